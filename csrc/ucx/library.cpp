#include "ucx/library.hpp"

#include <type_traits>
#include <utility>

#include "base/library.hpp"

namespace pynixlkv::ucx {

std::shared_ptr<const Library> Library::open(const std::string& path) {
    const SharedLibrary library(path);
    capi::Functions table;
#define X(result, name, arguments) \
    table.name = library.require<std::remove_pointer_t<decltype(table.name)>>("ucp_" #name);
    PYNIXLKV_UCP_FUNCTIONS(X)
#undef X
    return std::make_shared<const Library>(path, table);
}

Library::Library(std::string path, const capi::Functions& functions)
    : path_(std::move(path)), functions_(functions) {
    unsigned major = 0;
    unsigned minor = 0;
    unsigned release = 0;
    functions_.get_version(&major, &minor, &release);
    version_ = text(major, '.', minor, '.', release);
    if (major != capi::kApiMajor || minor < capi::kApiMinor) {
        throw Error("LibraryVersionError",
                    text(path_, " is UCX ", version_, "; pynixlkv needs ", capi::kApiMajor, '.',
                         capi::kApiMinor, " or newer of UCX ", capi::kApiMajor));
    }
}

}  // namespace pynixlkv::ucx
