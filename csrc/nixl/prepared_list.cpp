#include "nixl/prepared_list.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace pynixlkv::nixl {

PreparedList::PreparedList(std::shared_ptr<Agent> agent, std::string peer, Memory memory, Rows rows,
                           std::uint64_t generation)
    : agent_(std::move(agent)),
      peer_(std::move(peer)),
      memory_(memory),
      size_(rows.size()),
      generation_(generation),
      uniform_length_(rows.front().length) {
    const auto differs = [this](const Descriptor& row) { return row.length != uniform_length_; };
    if (std::any_of(rows.begin(), rows.end(), differs)) {
        lengths_.reserve(rows.size());
        for (const Descriptor& row : rows) {
            lengths_.push_back(row.length);
        }
    }
}

PreparedList::~PreparedList() {
    if (is_released_ || !agent_->is_here()) {
        return;
    }
    --agent_->num_prepared_;
    try {
        const Agent::Call call(*agent_, "release_xfer_dlist_handle");
        handle_.reset();
    } catch (const Error&) {
        // The agent was abandoned, and the list with it.
    }
}

std::string PreparedList::str() const {
    return text("the list of ", size_, " ", memory_name(memory_), " descriptors for ",
                peer_.empty() ? std::string("the local side") : text("peer '", peer_, "'"));
}

void PreparedList::release() {
    std::vector<Pin> pins;  // go after the lock
    const Agent::Call call(*agent_, "release_xfer_dlist_handle");
    {
        const std::lock_guard lock(agent_->books_);
        if (is_released_) {
            throw Error("ClosedError",
                        text("release_xfer_dlist_handle: ", str(), " was released before"));
        }
        if (const std::size_t users = num_users_; users != 0) {
            throw Error("StateError", text("release_xfer_dlist_handle: ", str(), " is used by ",
                                           users, " requests; release them first"));
        }
        is_released_ = true;
    }
    --agent_->num_prepared_;
    pins = std::move(pins_);
    const ReleasePrepared release_native{agent_->handle_};
    agent_->library().check(release_native(handle_.release()), "release_xfer_dlist_handle",
                            [this] { return text(agent_->handle_->about(), ", ", str()); });
}

}  // namespace pynixlkv::nixl
