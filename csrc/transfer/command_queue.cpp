#include "transfer/command_queue.hpp"

#include <utility>

#include "base/error.hpp"

namespace pynixlkv::transfer {

template <class Item>
void CommandQueue::push(std::vector<Item>& to, Item item) {
    {
        const std::lock_guard lock(mutex_);
        if (closing_) {
            throw Error("ClosedError", "agent '" + agent_ + "' is closed");
        }
        to.push_back(std::move(item));
    }
    wake();
}

void CommandQueue::post(Command command) {
    push(work_.commands, std::move(command));
}

void CommandQueue::post(Active transfer) {
    push(work_.transfers, std::move(transfer));
}

void CommandQueue::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    wake();
}

void CommandQueue::stop() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        stop_ = true;
    }
    wake();
}

/// Called without the mutex, which is the first thing that the thread wants.
void CommandQueue::wake() {
    if (asleep_.exchange(false)) {
        woken_.set();
    }
}

void CommandQueue::take(Work& empty) {
    const std::lock_guard lock(mutex_);
    std::swap(work_, empty);
}

bool CommandQueue::is_finished() const {
    const std::lock_guard lock(mutex_);
    return closing_ && work_.commands.empty() && work_.transfers.empty();
}

bool CommandQueue::is_stopped() const {
    const std::lock_guard lock(mutex_);
    return stop_;
}

bool CommandQueue::refuse_rest() {
    const std::lock_guard lock(mutex_);
    work_.commands.clear();
    return work_.transfers.empty();
}

bool CommandQueue::begin_sleep(bool is_idle) {
    const std::lock_guard lock(mutex_);
    if (!work_.commands.empty() || !work_.transfers.empty() || (closing_ && is_idle) || stop_) {
        return false;
    }
    asleep_.store(true);
    return true;
}

void CommandQueue::end_sleep(bool is_woken) {
    asleep_.store(false);
    if (is_woken) {
        woken_.clear();
    }
}

}  // namespace pynixlkv::transfer
