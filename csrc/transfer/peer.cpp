#include "transfer/peer.hpp"

#include "base/error.hpp"

namespace pynixlkv::transfer {

std::string Peer::reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
}

MemoryMap::Cover Peer::cover(std::span<const Row> rows) const {
    const std::lock_guard lock(mutex_);
    if (!is_connected()) {
        throw Error(state() == PeerState::kLost ? "PeerLostError" : "StalePeerError",
                    "generation " + std::to_string(generation_) + " of peer '" + name_ +
                        "' is not connected any more: " + reason_ + "; connect() again");
    }
    return memory_.cover(rows, "of peer '" + name_ + "'");
}

void Peer::set_memory(MemoryMap memory) {
    const std::lock_guard lock(mutex_);
    memory_ = std::move(memory);
}

void Peer::set_state(PeerState state, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    reason_ = reason;
    state_.store(state);
}

}  // namespace pynixlkv::transfer
