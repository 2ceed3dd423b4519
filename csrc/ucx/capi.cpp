#include "ucx/capi.hpp"

#include <type_traits>

namespace pynixlkv::ucx::capi {

Functions load_functions(const SharedLibrary& library) {
    Functions table;
#define X(result, name, arguments) \
    table.name = library.require<std::remove_pointer_t<decltype(table.name)>>("ucp_" #name);
    PYNIXLKV_UCP_FUNCTIONS(X)
#undef X
    return table;
}

}  // namespace pynixlkv::ucx::capi
