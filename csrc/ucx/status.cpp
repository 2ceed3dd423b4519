#include "ucx/status.hpp"

#include "base/text.hpp"

namespace pynixlkv::ucx {

namespace {

const StatusInfo* find_status(Status status) noexcept {
    for (const StatusInfo& info : kStatusTable) {
        if (info.status == static_cast<int>(status)) {
            return &info;
        }
    }
    return nullptr;
}

bool is_between(Status status, Status first, Status last) noexcept {
    return status <= first && status >= last;
}

}  // namespace

std::string status_name(Status status) {
    if (const StatusInfo* info = find_status(status)) {
        return info->name;
    }
    if (is_between(status, Status::kFirstLinkFailure, Status::kLastLinkFailure)) {
        return "link failure";
    }
    if (is_between(status, Status::kFirstEndpointFailure, Status::kLastEndpointFailure)) {
        return "endpoint failure";
    }
    return "unlisted status";
}

bool is_connection_failure(Status status) noexcept {
    if (const StatusInfo* info = find_status(status)) {
        return std::string_view(info->kind) == "connection";
    }
    return is_between(status, Status::kFirstLinkFailure, Status::kLastEndpointFailure);
}

NativeError make_error(Status status, const char* call, const std::string& detail) {
    const int code = static_cast<int>(status);
    return {"ucx",  is_connection_failure(status) ? "connection" : "other",
            code,   call,
            detail, text(call, " failed (", detail, "): ", status_name(status), " (", code, ")")};
}

}  // namespace pynixlkv::ucx
