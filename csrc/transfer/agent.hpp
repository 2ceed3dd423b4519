/// @file
/// The agent: one thread that owns a native library object, and everything that libraries leave
/// out: deadlines, sticky end states, quarantine of buffers until quiet, peer generations.
///
/// All functions may be called from any thread; only the agent's own thread touches the driver.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/live_count.hpp"
#include "transfer/driver.hpp"
#include "transfer/memory_map.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

class Loop;

/// Memory that the agent has registered and that transfers may use.
class Registration : LiveCounted<Registration> {
  public:
    static constexpr const char* kLiveName = "transfer.Registration";

    Registration(std::uint64_t id, std::vector<Span> spans) : id_(id), spans_(std::move(spans)) {}

    [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
    [[nodiscard]] const std::vector<Span>& spans() const noexcept { return spans_; }
    /// Number of transfers that are not quiet and touch this memory.
    [[nodiscard]] std::size_t uses() const noexcept { return uses_.load(); }
    [[nodiscard]] bool is_open() const noexcept { return open_.load(); }

  private:
    friend class Loop;
    friend class Agent;
    friend class Transfer;

    const std::uint64_t id_;
    const std::vector<Span> spans_;
    std::atomic<std::size_t> uses_{0};
    std::atomic<bool> open_{true};
    std::unique_ptr<Registered> native_;  // agent thread only
};

enum class PeerState : int { kConnected = 0, kLost = 1, kDisconnected = 2 };

/// One generation of one peer.
class Peer : LiveCounted<Peer> {
  public:
    static constexpr const char* kLiveName = "transfer.Peer";

    Peer(std::string name, std::string incarnation, std::uint64_t generation)
        : name_(std::move(name)), incarnation_(std::move(incarnation)), generation_(generation) {}

    [[nodiscard]] const std::string& name() const noexcept { return name_; }
    /// Bytes that differ between two agents that used the same name.
    [[nodiscard]] const std::string& incarnation() const noexcept { return incarnation_; }
    /// 1 for the first connection to this name, one more for each that follows.
    [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
    [[nodiscard]] PeerState state() const noexcept { return state_.load(); }
    /// Why the peer was lost; empty while it is not.
    [[nodiscard]] std::string reason() const;

  private:
    friend class Loop;
    friend class Agent;

    const std::string name_;
    const std::string incarnation_;
    const std::uint64_t generation_;
    std::atomic<PeerState> state_{PeerState::kConnected};
    mutable std::mutex mutex_;  // guards memory_ and reason_
    MemoryMap memory_;
    std::string reason_;

    // Agent thread only.
    struct Lists {
        std::unique_ptr<Prepared> prepared;
        double regret_ns = 0;  ///< what having the lists would have saved so far
    };
    std::unique_ptr<Connection> native_;
    /// By Source::pool(), which they do not keep alive.
    std::map<std::weak_ptr<const void>, Lists, std::owner_less<>> lists_;
    std::size_t unquiet_ = 0;  ///< transfers that may still move bytes
};

/// What a transfer moved and when, in nanoseconds of the steady clock.
struct TransferStats {
    std::uint64_t bytes = 0;        ///< bytes asked for
    std::uint64_t bytes_done = 0;   ///< bytes of batches that ended well
    std::uint64_t descriptors = 0;  ///< rows or indices given to the library
    bool prepared = false;          ///< chosen from prepared rows by index
    std::uint64_t batches = 0;
    std::int64_t queued_ns = 0;  ///< from submit to the agent taking it up
    std::int64_t expand_ns = 0;  ///< making rows out of block tables
    std::int64_t make_ns = 0;    ///< making native requests out of rows
    std::int64_t post_ns = 0;    ///< inside the library's post calls
    std::int64_t total_ns = 0;   ///< from submit to the end state
};

/// A transfer as its owner sees it.
class Transfer : LiveCounted<Transfer> {
  public:
    static constexpr const char* kLiveName = "transfer.Transfer";

    [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
    [[nodiscard]] Op op() const noexcept { return op_; }
    [[nodiscard]] const std::shared_ptr<Peer>& peer() const noexcept { return peer_; }
    [[nodiscard]] State state() const noexcept { return state_.load(std::memory_order_acquire); }
    /// Whether no byte of it can move any more. Follows the end state, at once or later.
    [[nodiscard]] bool is_quiet() const noexcept { return quiet_.load(std::memory_order_acquire); }
    /// Wait for the end state, or for quiet.
    /// @return whether it was reached in time
    bool wait(TimePoint until, bool for_quiet = false) const;
    [[nodiscard]] TransferStats stats() const;
    /// Why it ended without success; empty otherwise.
    [[nodiscard]] std::string message() const;
    /// The library's own error behind the message, if there was one.
    [[nodiscard]] std::optional<NativeError> cause() const;

  private:
    friend class Loop;
    friend class Agent;

    Transfer(std::uint64_t id, Op op, std::shared_ptr<Peer> peer)
        : id_(id), op_(op), peer_(std::move(peer)) {}

    const std::uint64_t id_;
    const Op op_;
    const std::shared_ptr<Peer> peer_;

    std::atomic<State> state_{State::kQueued};
    std::atomic<bool> quiet_{false};
    std::atomic<bool> watched_{false};
    std::atomic<bool> cancel_{false};
    mutable std::mutex mutex_;  // guards what follows
    mutable std::condition_variable changed_;
    TransferStats stats_;
    std::string message_;
    std::optional<NativeError> cause_;
};

/// Makes the rows of a transfer, on the agent's thread.
class Source {
  public:
    Source() = default;
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;
    virtual ~Source() = default;

    /// The rows, paired. Replaces the contents of the vectors.
    virtual void expand(std::vector<Row>& local, std::vector<Row>& remote) const = 0;

    /// What all transfers that can share prepared rows have in common; null if there is none.
    [[nodiscard]] virtual std::shared_ptr<const void> pool() const { return nullptr; }
    /// Number of rows of the pool, both sides together.
    [[nodiscard]] virtual std::size_t pool_size() const { return 0; }
    /// All rows that transfers of the pool choose from, in address order. Lengths are those that
    /// `expand_indices` counts with.
    virtual void pool_rows(std::vector<Row>& /*local*/, std::vector<Row>& /*remote*/) const {}
    /// Number of indices that `expand_indices` gives; none if this transfer's rows are not rows of
    /// the pool.
    [[nodiscard]] virtual std::optional<std::size_t> num_indices() const { return std::nullopt; }
    /// The rows of this transfer as places in the pool.
    virtual void expand_indices(std::vector<std::int32_t>& /*local*/,
                                std::vector<std::int32_t>& /*remote*/) const {}
};

/// What to move.
struct Request {
    Op op = Op::kRead;
    std::shared_ptr<Peer> peer;
    /// Rows, or ranges that contain every row that `source` will make; checked in submit().
    std::vector<Row> local_extents;
    std::vector<Row> remote_extents;
    /// Null: the extents are the rows.
    std::shared_ptr<const Source> source;
    std::optional<std::string> notify;
    Clock::duration timeout{};
};

struct AgentOptions {
    /// Random bytes that tell this agent from others of its name; peers ring at it by them.
    std::string incarnation;
    /// Longest pause of an idle agent when senders may be out of the doorbell's reach: the bound
    /// on how late a notification of theirs is seen.
    std::chrono::microseconds poll{1000};
    /// The same when all senders are known to ring, or the library gives events.
    std::chrono::microseconds rung_poll{20000};
    /// Most bytes and rows that one native request gets; larger transfers are several of them, so
    /// that deadlines and other transfers get their turn.
    std::uint64_t batch_bytes = 16U << 20U;
    std::size_t batch_rows = 4096;
    /// Most native requests in flight at once.
    std::size_t window = 64;
};

using DriverFactory = std::function<std::unique_ptr<Driver>()>;

class Agent : LiveCounted<Agent> {
  public:
    static constexpr const char* kLiveName = "transfer.Agent";

    /// Start the thread and make the driver on it; an exception of the factory comes out here.
    Agent(std::string name, const DriverFactory& factory, const AgentOptions& options);
    Agent(const Agent&) = delete;
    Agent& operator=(const Agent&) = delete;
    /// Never blocks: what is running is cancelled, and the thread lives on until all is quiet.
    ~Agent();

    [[nodiscard]] std::shared_ptr<Registration> register_memory(std::vector<Span> spans);
    /// @throws Error("RegistrationInUseError") while transfers that are not quiet touch it,
    ///         Error("ClosedError") when done before
    void deregister(const std::shared_ptr<Registration>& registration);
    /// @throws Error("NotRegisteredError") unless every row lies in registered memory
    void check_registered(const std::vector<Row>& rows) const;
    [[nodiscard]] std::string metadata();

    /// Connect to a peer, or to its next generation after it was lost or disconnected.
    /// @throws Error("DuplicatePeerError") when another incarnation is connected and alive
    [[nodiscard]] std::shared_ptr<Peer> connect(const std::string& name,
                                                const std::string& incarnation,
                                                const std::string& metadata,
                                                const std::vector<Span>& spans);
    [[nodiscard]] bool is_alive(const std::shared_ptr<Peer>& peer);
    /// Cancel the peer's transfers; the native connection goes when they are quiet.
    void disconnect(const std::shared_ptr<Peer>& peer);

    /// Hand over a transfer. Returns at once; whatever goes wrong later is the transfer's end
    /// state.
    [[nodiscard]] std::shared_ptr<Transfer> submit(Request request);
    /// End a transfer as cancelled if it has not ended; it becomes quiet later.
    void cancel(const std::shared_ptr<Transfer>& transfer);
    /// Ask for the id of the transfer in take_completed() once it has an end state.
    void watch(const std::shared_ptr<Transfer>& transfer);
    /// Ids of watched transfers that ended since the last call.
    [[nodiscard]] std::vector<std::uint64_t> take_completed();
    /// A descriptor that is readable when take_completed() has something; owned by the agent.
    [[nodiscard]] int completion_fd() const noexcept;

    void notify(const std::shared_ptr<Peer>& peer, std::string message);
    /// Everything that arrived since the last call; waits for something until the given time.
    [[nodiscard]] std::vector<Notification> take_notifications(TimePoint until);

    /// Wait until something has happened since the count that was seen last: a notification came,
    /// a transfer ended or became quiet, or wake_waiters() was called.
    /// @return the count now; the same as `seen` if the time ran out
    [[nodiscard]] std::uint64_t wait_activity(std::uint64_t seen, TimePoint until) const;
    void wake_waiters() const;

    /// Transfers that have ended but may still move bytes.
    [[nodiscard]] std::size_t quarantined() const noexcept;
    [[nodiscard]] std::size_t running() const noexcept;
    [[nodiscard]] const std::string& name() const noexcept;

    /// Refuse new work, cancel what runs, wait until all is quiet, give everything back.
    /// @return false if the time ran out first: the thread then finishes the job by itself, and
    ///         the buffers of the quarantined transfers must stay as they are until is_closed()
    bool close(TimePoint until);
    [[nodiscard]] bool is_closed() const noexcept;
    /// Stop the thread for good, without giving back what is not quiet. For process exit only.
    void stop(TimePoint until);

  private:
    void check_usable() const;
    /// Run a function on the agent's thread and return when it has run.
    template <class F>
    auto call(F function) -> decltype(function());

    std::shared_ptr<Loop> loop_;
    /// Ready when the thread is gone with all that it held: whether it gave everything back.
    std::shared_future<bool> exited_;
    pid_t pid_;
};

}  // namespace pynixlkv::transfer
