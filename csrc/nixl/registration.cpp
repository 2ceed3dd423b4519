#include "nixl/registration.hpp"

#include "base/error.hpp"

namespace pynixlkv::nixl {

Registration::Registration(Private /*unused*/, std::shared_ptr<Agent> agent, MemoryType memory,
                           std::vector<Row> rows, std::shared_ptr<void> keepalive)
    : agent_(std::move(agent)),
      memory_(memory),
      rows_(std::move(rows)),
      keepalive_(std::move(keepalive)) {}

Registration::~Registration() {
    if (!active_ || !agent_->process_.is_here()) {
        return;
    }
    Status status = Status::kInvalidState;
    try {
        const Agent::Call call(*agent_, "deregister_mem");
        status =
            agent_->library().fn().deregister_mem(agent_->handle_, list_.get(), options_.get());
    } catch (const Error&) {
        // The agent was abandoned: its memory stays registered.
    }
    agent_->remove_spans(*this);
    --agent_->num_registrations_;
    if (status != Status::kSuccess) {
        agent_->keep_for_ever(std::move(keepalive_));
    }
}

std::string Registration::str() const {
    return text(memory_name(memory_), " ", rows_.front().str(),
                rows_.size() > 1 ? text(" and ", rows_.size() - 1, " more") : std::string());
}

void Registration::release() {
    std::shared_ptr<void> keepalive;  // goes after the lock
    const Agent::Call call(*agent_, "deregister_mem");
    {
        const std::lock_guard lock(agent_->books_);
        if (!active_) {
            throw Error("ClosedError", text("deregister_mem: the registration of ", str(),
                                            " was released before"));
        }
        if (const std::size_t users = num_users_; users != 0) {
            throw Error("RegistrationInUseError",
                        text("deregister_mem: ", str(), " is used by ", users,
                             " prepared lists or requests; release them first"));
        }
        active_ = false;
    }
    const Status status =
        agent_->library().fn().deregister_mem(agent_->handle_, list_.get(), options_.get());
    if (status != Status::kSuccess) {
        active_ = true;
        agent_->library().fail(status, "deregister_mem", text(agent_->about({}), ", ", str()));
    }
    agent_->remove_spans(*this);
    --agent_->num_registrations_;
    keepalive = std::move(keepalive_);
}

}  // namespace pynixlkv::nixl
