/// @file
/// Status codes of NIXL's C interface, the only list of them. The numbers differ from those of
/// NIXL's C++ enum.
#pragma once

#include <array>

namespace pynixlkv::nixl {

// Each row: enumerator, code, NIXL's name, kind. The codes from -7 on were announced in the
// interface's header after 1.5.1, whose library folds them into kBackend.
#define PYNIXLKV_NIXL_STATUSES(X)                             \
    X(kInProgress, 1, "IN_PROG", "")                          \
    X(kSuccess, 0, "SUCCESS", "")                             \
    X(kInvalidParam, -1, "INVALID_PARAM", "invalid_param")    \
    X(kBackend, -2, "BACKEND", "backend")                     \
    X(kInvalidState, -3, "INVALID_STATE", "state")            \
    X(kException, -4, "EXCEPTION", "other")                   \
    X(kNoTelemetry, -5, "NO_TELEMETRY", "telemetry")          \
    X(kNotFound, -6, "NOT_FOUND", "not_found")                \
    X(kNotPosted, -7, "NOT_POSTED", "state")                  \
    X(kMismatch, -8, "MISMATCH", "invalid_param")             \
    X(kNotAllowed, -9, "NOT_ALLOWED", "state")                \
    X(kRepostActive, -10, "REPOST_ACTIVE", "state")           \
    X(kUnknown, -11, "UNKNOWN", "other")                      \
    X(kNotSupported, -12, "NOT_SUPPORTED", "other")           \
    X(kRemoteDisconnect, -13, "REMOTE_DISCONNECT", "backend") \
    X(kCanceled, -14, "CANCELED", "backend")

enum class Status : int {
#define X(enumerator, code, name, kind) enumerator = code,
    PYNIXLKV_NIXL_STATUSES(X)
#undef X
};

struct StatusInfo {
    Status status;
    const char* name;
    const char* kind;  ///< what pynixlkv.errors chooses the class by; empty where it is no failure
};

inline constexpr std::array kStatusTable{
#define X(enumerator, code, name, kind) StatusInfo{Status::enumerator, name, kind},
    PYNIXLKV_NIXL_STATUSES(X)
#undef X
};

}  // namespace pynixlkv::nixl
