/// @file
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "transfer/active.hpp"
#include "transfer/event_fd.hpp"

namespace pynixlkv::transfer {

class Loop;

/// What callers hand to the agent's thread, and what wakes that thread. Thread-safe.
class CommandQueue {
  public:
    using Command = std::function<void(Loop&)>;

    explicit CommandQueue(std::string agent) : agent_(std::move(agent)) {}

    /// @throws Error("ClosedError") after close()
    void post(Command command) { push(work_.commands, std::move(command)); }
    void post(Active transfer) { push(work_.transfers, std::move(transfer)); }
    /// Refuse new work; with `stop` the thread shall not even finish what it has.
    void close(bool stop = false) {
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
            stop_ |= stop;
        }
        wake();
    }
    /// Get the thread out of its sleep. The mutex must be free: the thread wants it first.
    void wake() {
        if (asleep_.exchange(false)) {
            woken_.set();
        }
    }

    // ---- agent's thread ----
    struct Work {
        std::vector<Command> commands;
        std::vector<Active> transfers;
    };
    /// Exchange all work for the empty one given.
    void take(Work& empty) {
        const std::lock_guard lock(mutex_);
        std::swap(work_, empty);
    }
    /// Whether the agent was closed and all work has been taken.
    [[nodiscard]] bool is_finished() const {
        const std::lock_guard lock(mutex_);
        return closing_ && work_.commands.empty() && work_.transfers.empty();
    }
    [[nodiscard]] bool is_stopped() const {
        const std::lock_guard lock(mutex_);
        return stop_;
    }
    /// Drop commands that came too late; their callers see the agent as closed.
    /// @return whether no transfer came too late
    bool refuse_rest() {
        const std::lock_guard lock(mutex_);
        work_.commands.clear();
        return work_.transfers.empty();
    }
    /// Announce that the thread goes to sleep on fd().
    /// @return false if it must not, because there is work
    [[nodiscard]] bool begin_sleep(bool is_idle) {
        const std::lock_guard lock(mutex_);
        if (!work_.commands.empty() || !work_.transfers.empty() || (closing_ && is_idle) || stop_) {
            return false;
        }
        asleep_.store(true);
        return true;
    }
    void end_sleep(bool is_woken) {
        asleep_.store(false);
        if (is_woken) {
            woken_.clear();
        }
    }
    [[nodiscard]] int fd() const noexcept { return woken_.fd(); }

  private:
    template <class Item>
    void push(std::vector<Item>& to, Item item) {
        {
            const std::lock_guard lock(mutex_);
            if (closing_) {
                throw Error("ClosedError", "agent '" + agent_ + "' is closed");
            }
            to.push_back(std::move(item));
        }
        wake();
    }

    const std::string agent_;
    const EventFd woken_;
    std::atomic<bool> asleep_{false};
    mutable std::mutex mutex_;  // guards what follows
    Work work_;
    bool closing_ = false;
    bool stop_ = false;
};

}  // namespace pynixlkv::transfer
