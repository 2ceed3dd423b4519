#include "nixl/library.hpp"

#include <cstdlib>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::nixl {

std::shared_ptr<const Library> Library::open(const std::string& path) {
    const SharedLibrary library(path);
    return std::make_shared<const Library>(path, capi::load_functions(library));
}

Library::Library(std::string path, const capi::Functions& functions)
    : path_(std::move(path)), functions_(functions) {
    if (functions_.is_stub()) {
        throw Error("LibraryVersionError",
                    text(path_, " is a stub build of NIXL whose every call fails"));
    }
}

std::string Library::version() const {
    if (functions_.get_version == nullptr) {
        return {};
    }
    int major = 0;
    int minor = 0;
    int patch = 0;
    functions_.get_version(&major, &minor, &patch);
    return text(major, '.', minor, '.', patch);
}

void Library::fail(Status status, const char* call, const std::string& detail) const {
    if (status == Status::kException && functions_.last_error_message != nullptr) {
        throw_status(status, call, text(detail, "; ", functions_.last_error_message()));
    }
    throw_status(status, call, detail);
}

void Library::free(void* memory) const noexcept {
    if (functions_.mem_free != nullptr) {
        functions_.mem_free(memory);
    } else {
        std::free(memory);  // NOLINT(cppcoreguidelines-owning-memory)
    }
}

}  // namespace pynixlkv::nixl
