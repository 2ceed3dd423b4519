#include "nixl/status.hpp"

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::nixl {

void throw_status(Status status, const char* call, const std::string& detail) {
    const StatusInfo* info = find_status(status);
    const int code = static_cast<int>(status);
    throw NativeError("nixl", info != nullptr ? info->kind : "other", code, call, detail,
                      text("nixl ", call, " failed (", detail, "): ",
                           info != nullptr ? info->name : "unlisted status", " (", code, ")"));
}

}  // namespace pynixlkv::nixl
