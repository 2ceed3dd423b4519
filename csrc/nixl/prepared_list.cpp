#include "nixl/prepared_list.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace pynixlkv::nixl {

std::vector<Run> runs_of(Rows rows) {
    std::vector<Run> runs;
    for (const Descriptor& row : rows) {
        if (!runs.empty()) {
            Run& run = runs.back();
            const std::uint64_t step = row.address - run.at(run.count - 1).address;
            if (row.length == run.row.length && row.device == run.row.device &&
                (run.count == 1 ? step >> 63U == 0 : step == run.stride)) {
                run.stride = step;
                ++run.count;
                continue;
            }
        }
        runs.push_back({row, 0, 1});
    }
    return runs;
}

PreparedList::PreparedList(std::shared_ptr<Agent> agent, std::string peer, Memory memory,
                           std::vector<Run> runs, std::uint64_t generation)
    : agent_(std::move(agent)),
      peer_(std::move(peer)),
      memory_(memory),
      runs_(std::move(runs)),
      generation_(generation) {
    bool is_uniform = true;
    for (const Run& run : runs_) {
        size_ += run.count;
        is_uniform = is_uniform && run.row.length == runs_.front().row.length;
    }
    if (!is_uniform) {
        lengths_.reserve(size_);
        for (const Run& run : runs_) {
            lengths_.insert(lengths_.end(), run.count, run.row.length);
        }
    }
}

PreparedList::~PreparedList() {
    if (!agent_->is_here()) {
        return;
    }
    {
        const std::lock_guard lock(agent_->books_);
        agent_->prepared_.erase(this);
    }
    if (!is_released_) {
        --agent_->num_prepared_;
    }
    if (!handle_) {
        return;
    }
    try {
        const Agent::Call call(*agent_, "release_xfer_dlist_handle");
        handle_.reset();
    } catch (const Error&) {
        // The agent was abandoned, and the list with it.
        (void)handle_.release();
    }
}

std::string PreparedList::str() const {
    return text("the list of ", size_, " ", memory_name(memory_), " descriptors for ",
                peer_.empty() ? std::string("the local side") : text("peer '", peer_, "'"));
}

void PreparedList::release(bool when_unused) {
    std::vector<Pin> pins;  // go after the lock
    const Agent::Call call(*agent_, "release_xfer_dlist_handle");
    {
        const std::lock_guard lock(agent_->books_);
        if (is_released_) {
            throw Error("ClosedError",
                        text("release_xfer_dlist_handle: ", str(), " was released before"));
        }
        const std::size_t users = num_users_;
        if (users != 0 && !when_unused) {
            throw Error("StateError", text("release_xfer_dlist_handle: ", str(), " is used by ",
                                           users, " requests; release them first"));
        }
        is_released_ = true;
        --agent_->num_prepared_;
    }
    // A last use that ended meanwhile may have found the list not released yet.
    if (num_users_ == 0) {
        free(pins);
    }
}

void PreparedList::end_use() noexcept {
    if (!is_released_ || num_users_ != 0 || !agent_->is_here()) {
        return;
    }
    try {
        std::vector<Pin> pins;  // go after the lock
        const Agent::Call call(*agent_, "release_xfer_dlist_handle");
        free(pins);
    } catch (const Error&) {
        // The agent was closed, or NIXL refused: no caller is left to tell.
    }
}

void PreparedList::free(std::vector<Pin>& pins) {
    const std::lock_guard lock(preparing_);
    pins.swap(pins_);
    if (handle_) {
        const ReleasePrepared release_native{agent_->handle_};
        agent_->library().check(release_native(handle_.release()), "release_xfer_dlist_handle",
                                [this] { return text(agent_->handle_->about(), ", ", str()); });
    }
}

}  // namespace pynixlkv::nixl
