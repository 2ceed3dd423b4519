#include "nixl/library.hpp"

#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::nixl {

namespace {

capi::Functions load_functions(const SharedLibrary& library) {
    capi::Functions table;
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

}  // namespace

std::shared_ptr<const Library> Library::open(const std::string& path) {
    const SharedLibrary library(path);
    return std::make_shared<const Library>(path, load_functions(library));
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
    const bool has_more = status == Status::kException && functions_.last_error_message != nullptr;
    const auto about = has_more ? text(detail, "; ", functions_.last_error_message()) : detail;
    const auto* info = std::find_if(kStatusTable.begin(), kStatusTable.end(),
                                    [&](const StatusInfo& row) { return row.status == status; });
    const bool is_known = info != kStatusTable.end();
    const int code = static_cast<int>(status);
    throw NativeError("nixl", is_known ? info->kind : "other", code, call, about,
                      text("nixl ", call, " failed (", about,
                           "): ", is_known ? info->name : "unlisted status", " (", code, ")"));
}

void Library::free(void* memory) const noexcept {
    if (functions_.mem_free != nullptr) {
        functions_.mem_free(memory);
    } else {
        std::free(memory);  // NOLINT(cppcoreguidelines-owning-memory)
    }
}

}  // namespace pynixlkv::nixl
