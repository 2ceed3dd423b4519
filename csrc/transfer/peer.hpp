/// @file
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "base/live_count.hpp"
#include "transfer/memory_map.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

enum class PeerState : int { kConnected = 0, kLost = 1, kDisconnected = 2 };

/// One generation of one peer.
class Peer : LiveCounted<Peer> {
  public:
    static constexpr const char* kLiveName = "transfer.Peer";

    Peer(std::string name, std::string incarnation, std::uint64_t generation, MemoryMap memory)
        : name_(std::move(name)),
          incarnation_(std::move(incarnation)),
          generation_(generation),
          memory_(std::move(memory)) {}

    [[nodiscard]] const std::string& name() const noexcept { return name_; }
    /// Bytes that differ between two agents that used the same name.
    [[nodiscard]] const std::string& incarnation() const noexcept { return incarnation_; }
    /// 1 for the first connection to this name, one more for each that follows.
    [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
    [[nodiscard]] PeerState state() const noexcept { return state_.load(); }
    [[nodiscard]] bool is_connected() const noexcept { return state() == PeerState::kConnected; }
    /// Why the peer was lost; empty while it is not.
    [[nodiscard]] std::string reason() const;
    /// What the rows lie in at the peer.
    /// @throws Error("PeerLostError") or Error("StalePeerError") unless the peer is connected,
    ///         Error("NotRegisteredError") unless the peer has announced the memory
    [[nodiscard]] MemoryMap::Cover cover(std::span<const Row> rows) const;

    // ---- agent's thread ----
    void set_memory(MemoryMap memory);
    void set_state(PeerState state, const std::string& reason);

  private:
    const std::string name_;
    const std::string incarnation_;
    const std::uint64_t generation_;
    std::atomic<PeerState> state_{PeerState::kConnected};
    mutable std::mutex mutex_;  // guards what follows
    MemoryMap memory_;
    std::string reason_;
};

}  // namespace pynixlkv::transfer
