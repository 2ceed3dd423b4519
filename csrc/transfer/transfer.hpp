/// @file
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/live_count.hpp"
#include "transfer/peer.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// What a transfer moved and when, in nanoseconds of the steady clock.
struct TransferStats {
    std::uint64_t bytes = 0;        ///< bytes asked for
    std::uint64_t bytes_done = 0;   ///< bytes of batches that ended well
    std::uint64_t descriptors = 0;  ///< rows or indices given to the library
    bool prepared = false;          ///< chosen from prepared rows by index
    std::uint64_t batches = 0;
    std::int64_t queued_ns = 0;  ///< from submit to the start of work on the agent's thread
    std::int64_t expand_ns = 0;  ///< making rows out of block tables
    std::int64_t make_ns = 0;    ///< making native requests out of rows
    std::int64_t post_ns = 0;    ///< inside the library's post calls
    std::int64_t total_ns = 0;   ///< from submit to the end state
};

/// State of a transfer, shared by its owner and the agent's thread.
class Transfer : LiveCounted<Transfer> {
  public:
    static constexpr const char* kLiveName = "transfer.Transfer";

    Transfer(std::uint64_t id, Op op, std::shared_ptr<Peer> peer)
        : id_(id), op_(op), peer_(std::move(peer)) {}

    [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
    [[nodiscard]] Op op() const noexcept { return op_; }
    [[nodiscard]] const std::shared_ptr<Peer>& peer() const noexcept { return peer_; }
    [[nodiscard]] State state() const noexcept { return state_.load(std::memory_order_acquire); }
    /// Whether the transfer can no longer move any byte. Follows the end state, at once or later.
    [[nodiscard]] bool is_quiet() const noexcept { return quiet_.load(std::memory_order_acquire); }
    /// Wait for the end state, or for quiet.
    /// @return whether it was reached in time
    bool wait(TimePoint until, bool for_quiet = false) const;
    [[nodiscard]] TransferStats stats() const;
    /// Why the transfer failed; empty otherwise.
    [[nodiscard]] std::string message() const;
    /// The library's own error behind the message, if there was one.
    [[nodiscard]] std::optional<NativeError> cause() const;

    /// Ask the agent's thread to end the transfer.
    void cancel() noexcept { cancel_.store(true); }
    [[nodiscard]] bool is_cancelled() const noexcept { return cancel_.load(); }
    /// Whether take_completed() shall report the end; guarded by the inbox.
    void set_watched() noexcept { watched_ = true; }
    [[nodiscard]] bool take_watched() noexcept { return std::exchange(watched_, false); }

    // ---- agent's thread ----
    template <class Change>
    void update(Change change) {
        const std::lock_guard lock(mutex_);
        change(stats_);
    }
    void start() noexcept { state_.store(State::kRunning, std::memory_order_release); }
    void end(State state, const std::string& message, const std::optional<NativeError>& cause,
             Clock::duration total, bool quiet);
    void become_quiet();

  private:
    const std::uint64_t id_;
    const Op op_;
    const std::shared_ptr<Peer> peer_;

    std::atomic<State> state_{State::kQueued};
    std::atomic<bool> quiet_{false};
    std::atomic<bool> cancel_{false};
    bool watched_ = false;
    mutable std::mutex mutex_;  // guards what follows
    mutable std::condition_variable changed_;
    TransferStats stats_;
    std::string message_;
    std::optional<NativeError> cause_;
};

}  // namespace pynixlkv::transfer
