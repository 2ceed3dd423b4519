#include "transfer/transfer.hpp"

namespace pynixlkv::transfer {

bool Transfer::wait(TimePoint until, bool for_quiet) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, until,
                               [&] { return for_quiet ? is_quiet() : is_end(state()); });
}

TransferStats Transfer::stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
}

std::string Transfer::message() const {
    const std::lock_guard lock(mutex_);
    return message_;
}

std::optional<NativeError> Transfer::cause() const {
    const std::lock_guard lock(mutex_);
    return cause_;
}

void Transfer::end(State state, const std::string& message, const std::optional<NativeError>& cause,
                   Clock::duration total, bool quiet) {
    {
        const std::lock_guard lock(mutex_);
        stats_.total_ns = ns(total);
        message_ = message;
        cause_ = cause;
        state_.store(state, std::memory_order_release);
        if (quiet) {
            quiet_.store(true, std::memory_order_release);
        }
    }
    changed_.notify_all();
}

void Transfer::become_quiet() {
    {
        const std::lock_guard lock(mutex_);
        quiet_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
}

}  // namespace pynixlkv::transfer
