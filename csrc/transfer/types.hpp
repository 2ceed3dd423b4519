/// @file
/// Vocabulary of the transfer room: what is moved, how it can end, what peers say.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/row.hpp"

namespace pynixlkv::transfer {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

[[nodiscard]] inline std::int64_t ns(Clock::duration d) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(d).count();
}

/// Direction, seen from the side that posts.
enum class Op : int { kRead = 0, kWrite = 1 };

/// Kind of memory; the numbers are those of `pynixlkv.types.MemoryType`.
enum class Memory : int { kDram = 0, kVram = 1, kBlock = 2, kObject = 3, kFile = 4 };

/// Life of a transfer. The states from kDone on are end states: reached once, never left.
enum class State : int {
    kQueued = 0,
    kRunning = 1,
    kDone = 2,
    kFailed = 3,
    kTimedOut = 4,
    kPeerLost = 5,
    kCancelled = 6,
};

[[nodiscard]] constexpr bool is_end(State state) noexcept {
    return state >= State::kDone;
}

/// An exact byte string that a peer sent.
struct Notification {
    std::string peer;
    std::string message;
};

/// A range of memory with its kind, as registered or as announced by a peer.
struct Span {
    Row row;
    Memory memory;
};

}  // namespace pynixlkv::transfer
