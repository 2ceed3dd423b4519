/// @file
/// Plain values of the NIXL room.
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

#include "base/row.hpp"

namespace pynixlkv::nixl {

using Duration = std::chrono::nanoseconds;
using ParamMap = std::map<std::string, std::string>;

/// Kind of memory, in NIXL's numbering; pynixlkv.types.MemoryType has the same.
enum class MemoryType : int { kDram = 0, kVram = 1, kBlock = 2, kObject = 3, kFile = 4 };

[[nodiscard]] constexpr const char* memory_name(MemoryType memory) noexcept {
    constexpr const char* kNames[] = {"DRAM", "VRAM", "BLOCK", "OBJECT", "FILE"};
    return kNames[static_cast<std::size_t>(memory)];
}

/// Files and objects. A registration of nothing at offset 0 stands for the whole of one.
[[nodiscard]] constexpr bool is_storage(MemoryType memory) noexcept {
    return memory != MemoryType::kDram && memory != MemoryType::kVram;
}

/// Direction of a transfer: kRead is remote to local.
enum class Operation : int { kRead = 0, kWrite = 1 };

/// NIXL's own locking. With kNone the owners of this room lock for it.
enum class ThreadSync : int { kNone = 0, kStrict = 1, kReadWrite = 2 };

using Rows = std::span<const Row>;

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
    std::vector<MemoryType> memory;
    ParamMap params;
};

struct CostEstimate {
    std::int64_t duration_us;
    std::int64_t margin_us;
    int method;
};

struct Notification {
    std::string peer;
    std::string message;
};

/// Where the metadata listener of another agent, or a metadata server, is reached.
struct Endpoint {
    std::string ip;          ///< empty: the metadata server
    std::uint16_t port = 0;  ///< 0: NIXL's default
};

class Backend;

/// The optional arguments of a call; each verb documents which ones it reads.
struct CallOptions {
    std::vector<std::shared_ptr<Backend>> backends = {};  ///< empty: NIXL chooses
    std::optional<std::string> notification = {};
    bool skip_merge = false;
    std::string custom_param = {};
    Endpoint endpoint = {};
};

}  // namespace pynixlkv::nixl
