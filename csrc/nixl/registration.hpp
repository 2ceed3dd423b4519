/// @file
/// Registered memory of the verbs.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "nixl/agent.hpp"

namespace pynixlkv::nixl {

/// Memory that an agent has registered; made by Agent::register_memory, deregistered by `release`
/// or at the end of its life. Every prepared list and request on the memory keeps it.
class Registration : LiveCounted<Registration> {
    friend class Agent;
    friend class Pin;

  public:
    static constexpr const char* kLiveName = "nixl.Registration";

    Registration(std::shared_ptr<Agent> agent, RegisteredMemory memory,
                 std::shared_ptr<void> keepalive);
    ~Registration();

    [[nodiscard]] const std::shared_ptr<Agent>& agent() const noexcept { return agent_; }
    [[nodiscard]] Memory memory() const noexcept { return memory_.memory(); }
    [[nodiscard]] Rows rows() const noexcept { return memory_.rows(); }
    [[nodiscard]] bool is_released() const noexcept { return is_released_.load(); }
    /// Prepared lists and requests that use the memory.
    [[nodiscard]] std::size_t num_users() const noexcept { return num_users_.load(); }

    /// Deregister. Peers that know the memory can go on reading and writing it on some transports
    /// (same-host copies, TCP): do not reuse it before they have been told to stop.
    /// @throws Error RegistrationInUseError, ClosedError if it was released before
    void release();

  private:
    [[nodiscard]] std::uint64_t id() const noexcept {
        return reinterpret_cast<std::uint64_t>(this);
    }

    const std::shared_ptr<Agent> agent_;
    RegisteredMemory memory_;
    std::shared_ptr<void> keepalive_;
    std::atomic<bool> is_released_{true};  ///< changes under the agent's books_
    std::atomic<std::size_t> num_users_{0};
};

/// A use of registered memory, which forbids to deregister it.
class Pin {
  public:
    explicit Pin(std::shared_ptr<Registration> registration) noexcept
        : registration_(std::move(registration)) {
        ++registration_->num_users_;
    }
    Pin(Pin&&) noexcept = default;
    Pin& operator=(Pin&& other) noexcept {
        std::swap(registration_, other.registration_);
        return *this;
    }
    ~Pin() {
        if (registration_) {
            --registration_->num_users_;
        }
    }

    [[nodiscard]] const Registration* get() const noexcept { return registration_.get(); }

  private:
    std::shared_ptr<Registration> registration_;
};

}  // namespace pynixlkv::nixl
