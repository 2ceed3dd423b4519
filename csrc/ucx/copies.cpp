#include "ucx/copies.hpp"

#include <pthread.h>

#include <algorithm>
#include <span>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/mappings.hpp"
#include "base/text.hpp"

namespace pynixlkv::ucx {

namespace {

/// Bytes of a system call: about 0.3 ms.
constexpr std::uint64_t kStepBytes = 1U << 20U;
/// Steps of each thread in a turn, if there are several: waking one costs some 50 us.
constexpr std::size_t kStepsOfThread = 4;
/// Steps of a turn of one thread: a turn costs some 10 us.
constexpr std::size_t kStepsAlone = 2;

}  // namespace

CopyThreads::~CopyThreads() {
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
    }
    has_work_.notify_all();
    for (std::thread& helper : helpers_) {
        helper.join();
    }
}

void CopyThreads::take(std::unique_lock<std::mutex>& lock) {
    ++num_busy_;
    while (next_ < num_steps_) {
        const std::size_t number = next_++;
        lock.unlock();
        (*step_)(number);
        lock.lock();
    }
    if (--num_busy_ == 0) {
        is_idle_.notify_all();
    }
}

void CopyThreads::help() {
    std::unique_lock lock(mutex_);
    while (!is_closed_) {
        has_work_.wait(lock, [this] { return is_closed_ || next_ < num_steps_; });
        take(lock);
    }
}

void CopyThreads::run(std::size_t num_steps, const std::function<void(std::size_t)>& step) {
    std::unique_lock lock(mutex_);
    try {
        while (num_steps > 1 && helpers_.size() + 1 < count_) {
            // Signals stay blocked, as on the agent's thread.
            helpers_.emplace_back([this] { help(); });
            ::pthread_setname_np(helpers_.back().native_handle(), "pnkv-copy");
        }
    } catch (const std::system_error&) {
        // The process may have no more threads: the others do the work.
    }
    step_ = &step;
    next_ = 0;
    num_steps_ = num_steps;
    if (num_steps > 1) {
        has_work_.notify_all();
    }
    take(lock);
    is_idle_.wait(lock, [this] { return num_busy_ == 0; });
}

CopyXfer::CopyXfer(UcxConnection& connection, const LocalRegions& local_regions, transfer::Op op,
                   const transfer::DescriptorPairs& rows, std::shared_ptr<CopyThreads> threads)
    : UcxXfer(connection, local_regions, op, rows),
      threads_(std::move(threads)),
      memory_(connection.memory) {
    local_.reserve(parts_.size());
    remote_.reserve(parts_.size());
    is_fragile_.reserve(parts_.size());
    for (const Part& part : parts_) {
        const bool is_direct = part.region->direct != nullptr;
        // NOLINTBEGIN(performance-no-int-to-ptr)
        char* const remote = is_direct
                                 ? part.region->direct + (part.remote - part.region->row.address)
                                 : reinterpret_cast<char*>(part.remote);
        // NOLINTEND(performance-no-int-to-ptr)
        for (std::uint64_t done = 0; done < part.length; done += kStepBytes) {
            add(part.local + done, remote + done, std::min(kStepBytes, part.length - done),
                is_direct, part.is_fragile || part.region->is_fragile);
        }
    }
}

void CopyXfer::add(std::uint64_t local, char* remote, std::uint64_t length, bool is_direct,
                   bool is_fragile) {
    if (steps_.empty() || steps_.back().is_direct != is_direct ||
        step_bytes_ + length > kStepBytes || steps_.back().count == PeerMemory::kMaxPieces) {
        steps_.push_back({local_.size(), 0, is_direct});
        step_bytes_ = 0;
    }
    ++steps_.back().count;
    step_bytes_ += length;
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    local_.push_back({reinterpret_cast<void*>(local), length});
    remote_.push_back({remote, length});
    is_fragile_.push_back(static_cast<char>(is_fragile));
}

PeerMemory::Result CopyXfer::copy_step(const Step& step) const {
    if (!step.is_direct) {
        const auto pieces = [&step](const std::vector<iovec>& all) {
            return std::span(all).subspan(step.first, step.count);
        };
        return memory_->move(op_, pieces(local_), pieces(remote_));
    }
    for (std::size_t i = step.first; i < step.first + step.count; ++i) {
        __builtin_prefetch(local_.data() + i + 1);  // the copy evicts them from the caches
        __builtin_prefetch(remote_.data() + i + 1);
        const auto& [to, from] = op_ == transfer::Op::kRead ? std::tie(local_[i], remote_[i])
                                                            : std::tie(remote_[i], local_[i]);
        if (!copy(to.iov_base, from.iov_base, to.iov_len, is_fragile_[i] != 0)) {
            return PeerMemory::Result::kUnmapped;
        }
    }
    return PeerMemory::Result::kMoved;
}

void CopyXfer::advance() {
    const std::size_t first = next_step_;
    const std::size_t most =
        threads_->count() > 1 ? threads_->count() * kStepsOfThread : kStepsAlone;
    next_step_ = std::min(first + most, steps_.size());
    std::atomic<PeerMemory::Result> result = PeerMemory::Result::kMoved;
    threads_->run(next_step_ - first, [&](std::size_t number) {
        const auto moved = copy_step(steps_[first + number]);
        if (moved != PeerMemory::Result::kMoved) {
            result = moved;
        }
    });
    // Order the copied bytes before any notification of them.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // A mapping outlives the peer: progress reports a lost connection.
    endpoint_->worker()->progress();
    if (result != PeerMemory::Result::kMoved) {
        fail_with(result);
    }
    if (has_failed()) {
        fail("a copy");
    }
}

void CopyXfer::fail_with(PeerMemory::Result result) const {
    const char* call = op_ == transfer::Op::kRead ? "process_vm_readv" : "process_vm_writev";
    const pid_t process = memory_ ? memory_->process() : 0;
    switch (result) {
        case PeerMemory::Result::kLost:
            throw transfer::ConnectionLost(
                make_error(Status::kConnectionReset, call,
                           text(what(), ": process ", process, " no longer has that agent")));
        case PeerMemory::Result::kRefused:
            connection_.memory.reset();  // not tried again
            throw Error("StateError", text(call, " of ", what(),
                                           ": the system no longer lets this "
                                           "process copy memory of process ",
                                           process));
        default:
            throw Error("StateError",
                        text("the local memory, or that of ", what(), ", is no longer mapped"));
    }
}

}  // namespace pynixlkv::ucx
