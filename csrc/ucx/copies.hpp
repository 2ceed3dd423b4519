/// @file
/// Transfers that this process copies by itself, without the peer: through a mapping of the peer's
/// memory or through the kernel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ucx/connection.hpp"
#include "ucx/peer_memory.hpp"

namespace pynixlkv::ucx {

/// Threads that help the agent's thread with large transfers. Started by the first of them.
class CopyThreads {
  public:
    /// @param count with the agent's thread, at least 1
    explicit CopyThreads(std::size_t count) : count_(count) {}
    CopyThreads(const CopyThreads&) = delete;
    CopyThreads& operator=(const CopyThreads&) = delete;
    ~CopyThreads();

    [[nodiscard]] std::size_t count() const noexcept { return count_; }
    /// Call a function with each number below `num_steps`, on all threads, and wait for the last.
    /// @param step must not throw
    void run(std::size_t num_steps, const std::function<void(std::size_t)>& step);

  private:
    void help();
    void take(std::unique_lock<std::mutex>& lock);

    const std::size_t count_;
    std::mutex mutex_;  // guards the rest
    std::condition_variable has_work_;
    std::condition_variable is_idle_;
    std::vector<std::thread> helpers_;
    const std::function<void(std::size_t)>* step_ = nullptr;
    std::size_t next_ = 0;
    std::size_t num_steps_ = 0;
    std::size_t num_busy_ = 0;  ///< threads within a step
    bool is_closed_ = false;
};

/// A transfer between host memory at both ends. A turn of the loop moves about a megabyte for each
/// thread, so that the agent's other work, cancellation and deadlines have theirs.
class CopyXfer final : public UcxXfer {
  public:
    CopyXfer(UcxConnection& connection, const LocalRegions& local_regions, transfer::Op op,
             const transfer::DescriptorPairs& rows, std::shared_ptr<CopyThreads> threads);

    void post() override { advance(); }
    bool poll() override {
        advance();
        return next_step_ == steps_.size();
    }

  private:
    /// Pieces for one system call, or for copies in a row.
    struct Step {
        std::size_t first;
        std::size_t count;
        bool is_direct;
    };

    void add(std::uint64_t local, char* remote, std::uint64_t length, bool is_direct,
             bool is_fragile);
    void advance();
    [[nodiscard]] PeerMemory::Result copy_step(const Step& step) const;
    [[noreturn]] void fail_with(PeerMemory::Result result) const;

    const std::shared_ptr<CopyThreads> threads_;
    const std::optional<PeerMemory> memory_;
    std::vector<iovec> local_;
    std::vector<iovec> remote_;
    std::vector<char> is_fragile_;
    std::vector<Step> steps_;
    std::uint64_t step_bytes_ = 0;  ///< of the last step
    std::size_t next_step_ = 0;
};

}  // namespace pynixlkv::ucx
