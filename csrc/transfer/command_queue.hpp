/// @file
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "transfer/active.hpp"
#include "transfer/event_fd.hpp"

namespace pynixlkv::transfer {

class Loop;

/// What callers hand to the agent's thread, and what wakes that thread. Thread-safe.
class CommandQueue {
  public:
    using Command = std::function<void(Loop&)>;

    explicit CommandQueue(const std::string& agent) : agent_(agent) {}

    /// @throws Error("ClosedError") after close()
    void post(Command command);
    void post(Active transfer);
    /// Refuse new work.
    void close();
    /// Refuse new work, and let the thread end without finishing the rest.
    void stop();
    /// Get the thread out of its sleep.
    void wake();

    // ---- agent's thread ----
    struct Work {
        std::vector<Command> commands;
        std::vector<Active> transfers;
    };
    /// Exchange all work for the empty one given.
    void take(Work& empty);
    /// Whether the agent was closed and all work has been taken.
    [[nodiscard]] bool is_finished() const;
    [[nodiscard]] bool is_stopped() const;
    /// Drop commands that came too late; their callers see the agent as closed.
    /// @return whether no transfer came too late
    bool refuse_rest();
    /// Announce that the thread goes to sleep on fd().
    /// @return false if it must not, because there is work
    [[nodiscard]] bool begin_sleep(bool is_idle);
    void end_sleep(bool is_woken);
    [[nodiscard]] int fd() const noexcept { return woken_.fd(); }

  private:
    template <class Item>
    void push(std::vector<Item>& to, Item item);

    const std::string agent_;
    const EventFd woken_;
    std::atomic<bool> asleep_{false};
    mutable std::mutex mutex_;  // guards what follows
    Work work_;
    bool closing_ = false;
    bool stop_ = false;
};

}  // namespace pynixlkv::transfer
