/// @file
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "transfer/event_fd.hpp"
#include "transfer/transfer.hpp"

namespace pynixlkv::transfer {

/// What the agent's thread tells its callers: notifications, ends of transfers, and that something
/// has happened. Thread-safe.
class Inbox {
  public:
    void deliver(std::vector<Notification>& arrivals) {
        change([&] {
            std::move(arrivals.begin(), arrivals.end(), std::back_inserter(notifications_));
        });
        arrivals.clear();
    }
    /// Let the next take() that finds no notifications throw.
    void fail(const Error& error) {
        change([&] { error_ = error; });
    }
    /// A transfer has its end state.
    void report_end(Transfer& transfer) {
        change([&] {
            if (transfer.take_watched()) {
                complete(transfer);
            }
        });
    }
    /// Let wait_activity() return.
    void announce() {
        change([] {});
    }

    [[nodiscard]] std::vector<Notification> take(TimePoint until) {
        std::unique_lock lock(mutex_);
        arrived_.wait_until(lock, until, [this] { return !notifications_.empty() || error_; });
        if (notifications_.empty() && error_) {
            throw Error(*std::exchange(error_, std::nullopt));
        }
        return std::exchange(notifications_, {});
    }
    [[nodiscard]] std::uint64_t wait_activity(std::uint64_t seen, TimePoint until) {
        std::unique_lock lock(mutex_);
        arrived_.wait_until(lock, until, [&] { return activity_ != seen; });
        return activity_;
    }
    void watch(Transfer& transfer) {
        const std::lock_guard lock(mutex_);
        if (is_end(transfer.state())) {
            complete(transfer);
        } else {
            transfer.set_watched();
        }
    }
    [[nodiscard]] std::vector<std::uint64_t> take_completed() {
        const std::lock_guard lock(mutex_);
        completion_.clear();
        return std::exchange(completed_, {});
    }
    [[nodiscard]] int completion_fd() const noexcept { return completion_.fd(); }

  private:
    template <class Change>
    void change(Change apply) {
        {
            const std::lock_guard lock(mutex_);
            apply();
            ++activity_;
        }
        arrived_.notify_all();
    }
    void complete(const Transfer& transfer) {
        completed_.push_back(transfer.id());
        completion_.set();
    }

    const EventFd completion_;
    std::mutex mutex_;  // guards what follows
    std::condition_variable arrived_;
    std::vector<Notification> notifications_;
    std::vector<std::uint64_t> completed_;
    std::optional<Error> error_;
    std::uint64_t activity_ = 0;  // counts arrivals, ends of transfers, and their becoming quiet
};

}  // namespace pynixlkv::transfer
