#include "transfer/inbox.hpp"

#include <utility>

namespace pynixlkv::transfer {

void Inbox::deliver(std::vector<Notification>& arrivals) {
    {
        const std::lock_guard lock(mutex_);
        for (Notification& notification : arrivals) {
            notifications_.push_back(std::move(notification));
        }
        ++activity_;
    }
    arrivals.clear();
    arrived_.notify_all();
}

void Inbox::fail(const Error& error) {
    {
        const std::lock_guard lock(mutex_);
        error_ = error;
        ++activity_;
    }
    arrived_.notify_all();
}

void Inbox::report_end(Transfer& transfer) {
    {
        const std::lock_guard lock(mutex_);
        if (transfer.take_watched()) {
            complete(transfer);
        }
        ++activity_;
    }
    arrived_.notify_all();
}

void Inbox::announce() {
    {
        const std::lock_guard lock(mutex_);
        ++activity_;
    }
    arrived_.notify_all();
}

std::vector<Notification> Inbox::take(TimePoint until) {
    std::unique_lock lock(mutex_);
    arrived_.wait_until(lock, until, [this] { return !notifications_.empty() || error_; });
    if (notifications_.empty() && error_) {
        throw Error(*std::exchange(error_, std::nullopt));
    }
    return std::exchange(notifications_, {});
}

std::uint64_t Inbox::wait_activity(std::uint64_t seen, TimePoint until) {
    std::unique_lock lock(mutex_);
    arrived_.wait_until(lock, until, [&] { return activity_ != seen; });
    return activity_;
}

void Inbox::watch(Transfer& transfer) {
    const std::lock_guard lock(mutex_);
    if (is_end(transfer.state())) {
        complete(transfer);
    } else {
        transfer.set_watched();
    }
}

void Inbox::complete(const Transfer& transfer) {
    completed_.push_back(transfer.id());
    completion_.set();
}

std::vector<std::uint64_t> Inbox::take_completed() {
    const std::lock_guard lock(mutex_);
    completion_.clear();
    return std::exchange(completed_, {});
}

}  // namespace pynixlkv::transfer
