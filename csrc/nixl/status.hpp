/// @file
/// Status codes of NIXL's C interface: the only list of them, and the only way from a code to an
/// exception. The numbers differ from those of NIXL's C++ enum.
#pragma once

#include <array>

namespace pynixlkv::nixl {

enum class Status : int {
    kInProgress = 1,
    kSuccess = 0,
    kInvalidParam = -1,
    kBackend = -2,
    kInvalidState = -3,
    kException = -4,
    kNoTelemetry = -5,
    kNotFound = -6,
    // Announced in the interface's header after 1.5.1, whose library folds them into kBackend.
    kNotPosted = -7,
    kMismatch = -8,
    kNotAllowed = -9,
    kRepostActive = -10,
    kUnknown = -11,
    kNotSupported = -12,
    kRemoteDisconnect = -13,
    kCanceled = -14,
};

struct StatusInfo {
    Status status;
    const char* name;
    const char* kind;  ///< what pynixlkv.errors chooses the class by; empty where it is no failure
};

inline constexpr std::array kStatusTable{
    StatusInfo{Status::kInProgress, "IN_PROG", ""},
    StatusInfo{Status::kSuccess, "SUCCESS", ""},
    StatusInfo{Status::kInvalidParam, "INVALID_PARAM", "invalid_param"},
    StatusInfo{Status::kBackend, "BACKEND", "backend"},
    StatusInfo{Status::kInvalidState, "INVALID_STATE", "state"},
    StatusInfo{Status::kException, "EXCEPTION", "other"},
    StatusInfo{Status::kNoTelemetry, "NO_TELEMETRY", "telemetry"},
    StatusInfo{Status::kNotFound, "NOT_FOUND", "not_found"},
    StatusInfo{Status::kNotPosted, "NOT_POSTED", "state"},
    StatusInfo{Status::kMismatch, "MISMATCH", "invalid_param"},
    StatusInfo{Status::kNotAllowed, "NOT_ALLOWED", "state"},
    StatusInfo{Status::kRepostActive, "REPOST_ACTIVE", "state"},
    StatusInfo{Status::kUnknown, "UNKNOWN", "other"},
    StatusInfo{Status::kNotSupported, "NOT_SUPPORTED", "other"},
    StatusInfo{Status::kRemoteDisconnect, "REMOTE_DISCONNECT", "backend"},
    StatusInfo{Status::kCanceled, "CANCELED", "backend"},
};

}  // namespace pynixlkv::nixl
