/// @file
/// Status codes of UCX: the only list of them, and the only way from a code to an exception.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/error.hpp"

namespace pynixlkv::ucx {

/// One byte wide, as in UCX: the upper bits of the register that returns it are not defined.
enum class Status : std::int8_t {
    kOk = 0,
    kInProgress = 1,
    kNoMemory = -4,
    kInvalidAddr = -7,
    kBusy = -15,
    kSharedMemory = -17,
    kRejected = -23,
    kConnectionReset = -25,
    kFirstLinkFailure = -40,
    kLastLinkFailure = -59,
    kFirstEndpointFailure = -60,
    kEndpointTimeout = -80,
    kLastEndpointFailure = -89,
    kLast = -100,
};

struct StatusInfo {
    int status;
    const char* name;  ///< UCX's, without `UCS_` and `UCS_ERR_`
    const char* kind;  ///< "connection" if it says that a peer cannot be reached, else "other";
                       ///< empty where it is no failure
};

inline constexpr std::array kStatusTable{
    StatusInfo{0, "OK", ""},
    StatusInfo{1, "INPROGRESS", ""},
    StatusInfo{-1, "NO_MESSAGE", "other"},
    StatusInfo{-2, "NO_RESOURCE", "other"},
    StatusInfo{-3, "IO_ERROR", "connection"},
    StatusInfo{-4, "NO_MEMORY", "other"},
    StatusInfo{-5, "INVALID_PARAM", "other"},
    StatusInfo{-6, "UNREACHABLE", "connection"},
    StatusInfo{-7, "INVALID_ADDR", "other"},
    StatusInfo{-8, "NOT_IMPLEMENTED", "other"},
    StatusInfo{-9, "MESSAGE_TRUNCATED", "other"},
    StatusInfo{-10, "NO_PROGRESS", "other"},
    StatusInfo{-11, "BUFFER_TOO_SMALL", "other"},
    StatusInfo{-12, "NO_ELEM", "other"},
    StatusInfo{-13, "SOME_CONNECTS_FAILED", "connection"},
    StatusInfo{-14, "NO_DEVICE", "other"},
    StatusInfo{-15, "BUSY", "other"},
    StatusInfo{-16, "CANCELED", "connection"},
    StatusInfo{-17, "SHMEM_SEGMENT", "other"},
    StatusInfo{-18, "ALREADY_EXISTS", "other"},
    StatusInfo{-19, "OUT_OF_RANGE", "other"},
    StatusInfo{-20, "TIMED_OUT", "connection"},
    StatusInfo{-21, "EXCEEDS_LIMIT", "other"},
    StatusInfo{-22, "UNSUPPORTED", "other"},
    StatusInfo{-23, "REJECTED", "connection"},
    StatusInfo{-24, "NOT_CONNECTED", "connection"},
    StatusInfo{-25, "CONNECTION_RESET", "connection"},
    StatusInfo{-40, "FIRST_LINK_FAILURE", "connection"},
    StatusInfo{-59, "LAST_LINK_FAILURE", "connection"},
    StatusInfo{-60, "FIRST_ENDPOINT_FAILURE", "connection"},
    StatusInfo{-80, "ENDPOINT_TIMEOUT", "connection"},
    StatusInfo{-89, "LAST_ENDPOINT_FAILURE", "connection"},
    StatusInfo{-100, "LAST", "other"},
};

[[nodiscard]] constexpr bool is_error(Status status) noexcept {
    return static_cast<int>(status) < 0;
}

/// Name of a status; numbers between the named ones are link and endpoint failures.
[[nodiscard]] std::string status_name(Status status);

/// Whether a failure says that the peer cannot be reached.
[[nodiscard]] bool is_connection_failure(Status status) noexcept;

/// The error of a failed call.
/// @param call the native function
/// @param detail what was being done, on what, with which peer
[[nodiscard]] NativeError make_error(Status status, const char* call, const std::string& detail);

}  // namespace pynixlkv::ucx
