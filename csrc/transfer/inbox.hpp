/// @file
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "transfer/event_fd.hpp"
#include "transfer/transfer.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// What the agent's thread tells its callers: notifications, ends of transfers, and that something
/// has happened. Thread-safe.
class Inbox {
  public:
    // ---- agent's thread ----
    /// Takes the notifications out of the vector.
    void deliver(std::vector<Notification>& arrivals);
    /// The next take() without notifications throws the error.
    void fail(const Error& error);
    /// A transfer has its end state.
    void report_end(Transfer& transfer);
    /// Let wait_activity() return.
    void announce();

    // ---- callers ----
    [[nodiscard]] std::vector<Notification> take(TimePoint until);
    [[nodiscard]] std::uint64_t wait_activity(std::uint64_t seen, TimePoint until);
    void watch(Transfer& transfer);
    [[nodiscard]] std::vector<std::uint64_t> take_completed();
    [[nodiscard]] int completion_fd() const noexcept { return completion_.fd(); }

  private:
    void complete(const Transfer& transfer);

    const EventFd completion_;
    std::mutex mutex_;  // guards what follows
    std::condition_variable arrived_;
    std::vector<Notification> notifications_;
    std::vector<std::uint64_t> completed_;
    std::optional<Error> error_;
    std::uint64_t activity_ = 0;  // counts arrivals, ends of transfers, and their becoming quiet
};

}  // namespace pynixlkv::transfer
