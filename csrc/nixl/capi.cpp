#include "nixl/capi.hpp"

#include <type_traits>

namespace pynixlkv::nixl::capi {

Functions load_functions(const SharedLibrary& library) {
    Functions table;
#define X(name, arguments) \
    table.name = library.require<std::remove_pointer_t<decltype(table.name)>>("nixl_capi_" #name);
    PYNIXLKV_NIXL_REQUIRED(X)
#undef X
    table.is_stub = library.require<bool()>("nixl_capi_is_stub");
#define X(result, name, arguments) \
    table.name = library.find<std::remove_pointer_t<decltype(table.name)>>("nixl_capi_" #name);
    PYNIXLKV_NIXL_OPTIONAL(X)
#undef X
    return table;
}

}  // namespace pynixlkv::nixl::capi
