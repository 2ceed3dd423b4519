/// @file
/// Types that the whole module shares.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "base/descriptor.hpp"

namespace pynixlkv::transfer {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

[[nodiscard]] inline std::int64_t ns(Clock::duration d) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(d).count();
}

[[nodiscard]] inline std::string seconds_text(Clock::duration d) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g s", std::chrono::duration<double>(d).count());
    return text;
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

/// A message from a peer, byte for byte.
struct Notification {
    std::string peer;
    std::string message;
};

/// A range of memory with its kind, as registered or as announced by a peer.
struct Span {
    Descriptor row;
    Memory memory;
    bool is_read_only = false;  ///< a source only
    bool is_fragile = false;    ///< its pages can go, or are not there: copy() says how to use it
};

}  // namespace pynixlkv::transfer
