/// @file
/// Plain values of the NIXL module.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/descriptor.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::nixl {

using transfer::Memory;
using transfer::Notification;
using transfer::Op;

using Duration = std::chrono::nanoseconds;
using ParamMap = std::map<std::string, std::string>;
using Rows = std::span<const Descriptor>;

/// Descriptors in constant steps; a row of NIXL's strided (n, 5) arrays, same layout.
struct Run {
    Descriptor row;  ///< the first
    std::uint64_t stride;
    std::uint64_t count;

    [[nodiscard]] Descriptor at(std::uint64_t index) const noexcept {
        return {row.address + index * stride, row.length, row.device};
    }
    /// Everything from the first byte to the last; meaningless for a run that wraps around.
    [[nodiscard]] Descriptor bounds() const noexcept {
        return {row.address, row.length + (count - 1) * stride, row.device};
    }
};
static_assert(sizeof(Run) == 40);
using Runs = std::span<const Run>;

[[nodiscard]] constexpr const char* memory_name(Memory memory) noexcept {
    constexpr const char* kNames[] = {"DRAM", "VRAM", "BLOCK", "OBJECT", "FILE"};
    return kNames[static_cast<std::size_t>(memory)];
}

/// Files and objects. A registration of nothing at offset 0 stands for the whole of one.
[[nodiscard]] constexpr bool is_storage(Memory memory) noexcept {
    return memory != Memory::kDram && memory != Memory::kVram;
}

[[nodiscard]] constexpr const char* op_name(Op op) noexcept {
    return op == Op::kRead ? "READ" : "WRITE";
}

/// NIXL's own locking. With kNone `Agent` locks for it.
enum class ThreadSync : int { kNone = 0, kStrict = 1, kReadWrite = 2 };

struct AgentConfig {
    bool progress_thread = true;
    bool listen_thread = false;
    std::uint16_t listen_port = 0;
    ThreadSync thread_sync = ThreadSync::kNone;
    std::uint64_t progress_delay_us = 1000;  ///< 0 burns a whole core
    std::uint64_t listen_delay_us = 100000;
    bool telemetry = false;
};

/// What a plugin or a backend says about itself.
struct BackendInfo {
    std::vector<Memory> memory;
    ParamMap params;
};

struct CostEstimate {
    std::int64_t duration_us;
    std::int64_t margin_us;
    int method;
};

/// The metadata listener of another agent, or a metadata server.
struct ListenerAddress {
    std::string ip;          ///< empty: the metadata server
    std::uint16_t port = 0;  ///< 0: NIXL's default
};

class Backend;

/// The optional arguments of a call; each verb documents which ones it reads.
struct CallOptions {
    std::vector<std::shared_ptr<Backend>> backends = {};  ///< empty: NIXL chooses
    std::optional<std::string> notification = {};
    bool skip_merge = false;
    ListenerAddress address = {};
};

}  // namespace pynixlkv::nixl
