#include "nixl/registration.hpp"

#include "base/error.hpp"

namespace pynixlkv::nixl {

Registration::Registration(std::shared_ptr<Agent> agent, RegisteredMemory memory,
                           std::shared_ptr<void> keepalive)
    : agent_(std::move(agent)), memory_(std::move(memory)), keepalive_(std::move(keepalive)) {}

Registration::~Registration() {
    if (is_released_ || !agent_->is_here()) {
        return;
    }
    try {
        const Agent::Call call(*agent_, "deregister_mem");
        memory_.remove();
    } catch (const Error&) {
        // Refused, or the agent was abandoned: NIXL may still use the buffer.
        memory_.forget();
        agent_->keep_for_ever(std::move(keepalive_));
    }
    agent_->remove_spans(*this);
}

void Registration::release() {
    std::shared_ptr<void> keepalive;  // goes after the lock
    const Agent::Call call(*agent_, "deregister_mem");
    {
        const std::lock_guard lock(agent_->books_);
        if (is_released_) {
            throw Error("ClosedError", text("deregister_mem: the registration of ", memory_.str(),
                                            " was released before"));
        }
        if (const std::size_t users = num_users_; users != 0) {
            throw Error("RegistrationInUseError",
                        text("deregister_mem: ", memory_.str(), " is used by ", users,
                             " prepared lists or requests; release them first"));
        }
        is_released_ = true;
    }
    try {
        if (counts_.empty()) {
            memory_.remove();
        } else {
            std::vector<std::uint32_t> left;
            for (std::uint32_t row = 0; row < counts_.size(); ++row) {
                if (counts_[row] != 0) {
                    left.push_back(row);
                }
            }
            memory_.remove(left);
            memory_.forget();
        }
    } catch (...) {
        is_released_ = false;
        throw;
    }
    agent_->remove_spans(*this);
    keepalive = std::move(keepalive_);
}

}  // namespace pynixlkv::nixl
