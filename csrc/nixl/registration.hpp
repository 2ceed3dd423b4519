#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "nixl/agent.hpp"

namespace pynixlkv::nixl {

/// Memory that an agent has registered; made by Agent::register_memory, deregistered by `release`
/// or at the end of its life. Every prepared list and request on the memory keeps it.
class Registration : LiveCounted<Registration> {
    friend class Agent;
    template <class T>
    friend class Use;

  public:
    static constexpr const char* kLiveName = "nixl.Registration";

    Registration(std::shared_ptr<Agent> agent, RegisteredMemory memory,
                 std::shared_ptr<void> keepalive);
    ~Registration();

    [[nodiscard]] const std::shared_ptr<Agent>& agent() const noexcept { return agent_; }
    [[nodiscard]] Memory memory() const noexcept { return memory_.memory(); }
    [[nodiscard]] Rows rows() const noexcept { return memory_.rows(); }
    [[nodiscard]] bool is_released() const noexcept { return is_released_.load(); }
    [[nodiscard]] std::size_t num_users() const noexcept { return num_users_.load(); }

    void release();

  private:
    void end_use() noexcept {}
    [[nodiscard]] std::uint64_t id() const noexcept {
        return reinterpret_cast<std::uint64_t>(this);
    }

    const std::shared_ptr<Agent> agent_;
    RegisteredMemory memory_;
    std::shared_ptr<void> keepalive_;
    std::atomic<bool> is_released_{true};  ///< changes under the agent's books_
    std::atomic<std::size_t> num_users_{0};
    // Of a counted registration, under the agent's books_.
    std::vector<std::shared_ptr<Backend>> backends_;
    std::vector<std::uint32_t> counts_;  ///< per row: deregistrations until it is gone
    std::size_t num_left_ = 0;           ///< rows that are not gone
};

/// A use of registered memory or of a prepared list, which forbids to release it.
template <class T>
class Use {
  public:
    explicit Use(std::shared_ptr<T> used) noexcept : used_(std::move(used)) { ++used_->num_users_; }
    Use(Use&&) noexcept = default;
    ~Use() {
        if (used_ && --used_->num_users_ == 0) {
            used_->end_use();
        }
    }

    [[nodiscard]] const T* get() const noexcept { return used_.get(); }
    [[nodiscard]] const T* operator->() const noexcept { return used_.get(); }

  private:
    std::shared_ptr<T> used_;
};

/// A use of some rows of a registration.
struct Pin {
    Use<Registration> registration;
    std::vector<std::uint32_t> rows = {};
};

}  // namespace pynixlkv::nixl
