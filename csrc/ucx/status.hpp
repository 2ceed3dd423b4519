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
    kNoMessage = -1,
    kNoResource = -2,
    kIoError = -3,
    kNoMemory = -4,
    kInvalidParam = -5,
    kUnreachable = -6,
    kInvalidAddr = -7,
    kNotImplemented = -8,
    kMessageTruncated = -9,
    kNoProgress = -10,
    kBufferTooSmall = -11,
    kNoElem = -12,
    kSomeConnectsFailed = -13,
    kNoDevice = -14,
    kBusy = -15,
    kCanceled = -16,
    kShmemSegment = -17,
    kAlreadyExists = -18,
    kOutOfRange = -19,
    kTimedOut = -20,
    kExceedsLimit = -21,
    kUnsupported = -22,
    kRejected = -23,
    kNotConnected = -24,
    kConnectionReset = -25,
    kFirstLinkFailure = -40,
    kLastLinkFailure = -59,
    kFirstEndpointFailure = -60,
    kEndpointTimeout = -80,
    kLastEndpointFailure = -89,
    kLast = -100,
};

struct StatusInfo {
    Status status;
    const char* name;  ///< UCX's, without `UCS_` and `UCS_ERR_`
    const char* kind;  ///< "connection" if it says that a peer cannot be reached, else "other";
                       ///< empty where it is no failure
};

inline constexpr std::array kStatusTable{
    StatusInfo{Status::kOk, "OK", ""},
    StatusInfo{Status::kInProgress, "INPROGRESS", ""},
    StatusInfo{Status::kNoMessage, "NO_MESSAGE", "other"},
    StatusInfo{Status::kNoResource, "NO_RESOURCE", "other"},
    StatusInfo{Status::kIoError, "IO_ERROR", "connection"},
    StatusInfo{Status::kNoMemory, "NO_MEMORY", "other"},
    StatusInfo{Status::kInvalidParam, "INVALID_PARAM", "other"},
    StatusInfo{Status::kUnreachable, "UNREACHABLE", "connection"},
    StatusInfo{Status::kInvalidAddr, "INVALID_ADDR", "other"},
    StatusInfo{Status::kNotImplemented, "NOT_IMPLEMENTED", "other"},
    StatusInfo{Status::kMessageTruncated, "MESSAGE_TRUNCATED", "other"},
    StatusInfo{Status::kNoProgress, "NO_PROGRESS", "other"},
    StatusInfo{Status::kBufferTooSmall, "BUFFER_TOO_SMALL", "other"},
    StatusInfo{Status::kNoElem, "NO_ELEM", "other"},
    StatusInfo{Status::kSomeConnectsFailed, "SOME_CONNECTS_FAILED", "connection"},
    StatusInfo{Status::kNoDevice, "NO_DEVICE", "other"},
    StatusInfo{Status::kBusy, "BUSY", "other"},
    StatusInfo{Status::kCanceled, "CANCELED", "connection"},
    StatusInfo{Status::kShmemSegment, "SHMEM_SEGMENT", "other"},
    StatusInfo{Status::kAlreadyExists, "ALREADY_EXISTS", "other"},
    StatusInfo{Status::kOutOfRange, "OUT_OF_RANGE", "other"},
    StatusInfo{Status::kTimedOut, "TIMED_OUT", "connection"},
    StatusInfo{Status::kExceedsLimit, "EXCEEDS_LIMIT", "other"},
    StatusInfo{Status::kUnsupported, "UNSUPPORTED", "other"},
    StatusInfo{Status::kRejected, "REJECTED", "connection"},
    StatusInfo{Status::kNotConnected, "NOT_CONNECTED", "connection"},
    StatusInfo{Status::kConnectionReset, "CONNECTION_RESET", "connection"},
    StatusInfo{Status::kFirstLinkFailure, "FIRST_LINK_FAILURE", "connection"},
    StatusInfo{Status::kLastLinkFailure, "LAST_LINK_FAILURE", "connection"},
    StatusInfo{Status::kFirstEndpointFailure, "FIRST_ENDPOINT_FAILURE", "connection"},
    StatusInfo{Status::kEndpointTimeout, "ENDPOINT_TIMEOUT", "connection"},
    StatusInfo{Status::kLastEndpointFailure, "LAST_ENDPOINT_FAILURE", "connection"},
    StatusInfo{Status::kLast, "LAST", "other"},
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
