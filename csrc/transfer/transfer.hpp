/// @file
/// The objects that an agent gives to its callers and shares with them: registrations, peers,
/// transfers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/live_count.hpp"
#include "transfer/memory_map.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// Memory that an agent has registered and that transfers may use.
class Registration : LiveCounted<Registration> {
  public:
    static constexpr const char* kLiveName = "transfer.Registration";

    Registration(std::uint64_t id, std::vector<Span> spans) : id_(id), spans_(std::move(spans)) {}

    [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
    [[nodiscard]] const std::vector<Span>& spans() const noexcept { return spans_; }
    /// Number of transfers that are not quiet and touch this memory.
    [[nodiscard]] std::size_t uses() const noexcept { return uses_.load(); }
    [[nodiscard]] bool is_open() const noexcept { return open_.load(); }

    /// Count a use of the registration until the token is dropped.
    [[nodiscard]] static std::shared_ptr<void> use(std::shared_ptr<Registration> registration) {
        Registration* self = registration.get();
        self->uses_.fetch_add(1);
        return {self, [kept = std::move(registration)](Registration* r) { r->uses_.fetch_sub(1); }};
    }
    void close() noexcept { open_.store(false); }

  private:
    const std::uint64_t id_;
    const std::vector<Span> spans_;
    std::atomic<std::size_t> uses_{0};
    std::atomic<bool> open_{true};
};

enum class PeerState : int { kConnected = 0, kLost = 1, kDisconnected = 2 };

/// One generation of one peer.
class Peer : LiveCounted<Peer> {
  public:
    static constexpr const char* kLiveName = "transfer.Peer";

    Peer(std::string name, std::string incarnation, std::uint64_t generation, MemoryMap memory)
        : name_(std::move(name)),
          incarnation_(std::move(incarnation)),
          generation_(generation),
          memory_(std::move(memory)) {}

    [[nodiscard]] const std::string& name() const noexcept { return name_; }
    /// Bytes that differ between two agents that used the same name.
    [[nodiscard]] const std::string& incarnation() const noexcept { return incarnation_; }
    /// 1 for the first connection to this name, one more for each that follows.
    [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
    [[nodiscard]] PeerState state() const noexcept { return state_.load(); }
    [[nodiscard]] bool is_connected() const noexcept { return state() == PeerState::kConnected; }
    /// Why the peer was lost; empty while it is not.
    [[nodiscard]] std::string reason() const {
        const std::lock_guard lock(mutex_);
        return reason_;
    }
    /// What the rows lie in at the peer.
    /// @throws Error("PeerLostError") or Error("StalePeerError") unless the peer is connected,
    ///         Error("NotRegisteredError") unless the peer has announced the memory
    [[nodiscard]] MemoryMap::Cover cover(std::span<const Descriptor> rows, bool is_written) const {
        const std::lock_guard lock(mutex_);
        if (!is_connected()) {
            throw Error(state() == PeerState::kLost ? "PeerLostError" : "StalePeerError",
                        "generation " + std::to_string(generation_) + " of peer '" + name_ +
                            "' is not connected any more: " + reason_ + "; connect() again");
        }
        return memory_.cover(rows, "of peer '" + name_ + "'", is_written);
    }

    /// Names of the transports to it; empty if the library does not say.
    [[nodiscard]] const std::vector<std::string>& transports() const noexcept {
        return transports_;
    }
    /// Whether it is known to be a process of this host.
    [[nodiscard]] bool is_local() const noexcept { return is_local_; }

    // ---- agent's thread ----
    /// Before any other thread knows the peer.
    void set_way(std::vector<std::string> transports, bool is_local) {
        transports_ = std::move(transports);
        is_local_ = is_local;
    }
    void set_memory(MemoryMap memory) {
        const std::lock_guard lock(mutex_);
        memory_ = std::move(memory);
    }
    void set_state(PeerState state, const std::string& reason) {
        const std::lock_guard lock(mutex_);
        reason_ = reason;
        state_.store(state);
    }

  private:
    const std::string name_;
    const std::string incarnation_;
    std::vector<std::string> transports_;
    bool is_local_ = false;
    const std::uint64_t generation_;
    std::atomic<PeerState> state_{PeerState::kConnected};
    mutable std::mutex mutex_;  // guards what follows
    MemoryMap memory_;
    std::string reason_;
};

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
    bool wait(TimePoint until, bool for_quiet = false) const {
        std::unique_lock lock(mutex_);
        return changed_.wait_until(lock, until,
                                   [&] { return for_quiet ? is_quiet() : is_end(state()); });
    }
    [[nodiscard]] TransferStats stats() const { return locked(stats_); }
    /// Why the transfer failed; empty otherwise.
    [[nodiscard]] std::string message() const { return locked(message_); }
    /// The library's own error behind the message, if there was one.
    [[nodiscard]] std::optional<NativeError> cause() const { return locked(cause_); }

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
             Clock::duration total, bool quiet) {
        update([&](TransferStats& stats) {
            stats.total_ns = ns(total);
            message_ = message;
            cause_ = cause;
            state_.store(state, std::memory_order_release);
            quiet_.store(quiet, std::memory_order_release);
        });
        changed_.notify_all();
    }
    void become_quiet() {
        update([&](TransferStats&) { quiet_.store(true, std::memory_order_release); });
        changed_.notify_all();
    }

  private:
    template <class T>
    [[nodiscard]] T locked(const T& member) const {
        const std::lock_guard lock(mutex_);
        return member;
    }

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
