/// @file
/// The agent: a thread with a native library's object, and what libraries leave out: deadlines,
/// sticky end states, quarantine of buffers until quiet, generations of peers.
///
/// All functions may be called from any thread; only the agent's own thread touches the driver.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/live_count.hpp"
#include "transfer/driver.hpp"
#include "transfer/transfer.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

class Loop;
struct SharedState;

/// Makes the rows of a transfer, on the agent's thread.
class DescriptorSource {
  public:
    DescriptorSource() = default;
    DescriptorSource(const DescriptorSource&) = delete;
    DescriptorSource& operator=(const DescriptorSource&) = delete;
    virtual ~DescriptorSource() = default;

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

struct Submission {
    Op op = Op::kRead;
    std::shared_ptr<Peer> peer;
    /// Rows, or ranges that contain every row that `source` will make; checked in submit().
    std::vector<Row> local_extents;
    std::vector<Row> remote_extents;
    /// Null: the extents are the rows.
    std::shared_ptr<const DescriptorSource> source;
    std::optional<std::string> notify;
    Clock::duration timeout{};
};

struct AgentOptions {
    /// Random bytes that tell this agent from others of its name; peers wake it by them.
    std::string incarnation;
    /// Longest sleep of an idle agent when senders may be unable to wake it: the bound on how late
    /// their notifications are seen.
    std::chrono::microseconds poll{1000};
    /// The same when all known senders wake the agent, or the library gives events.
    std::chrono::microseconds woken_poll{20000};
    /// Most bytes and rows of one native request; larger transfers are several requests, so that
    /// deadlines are kept and other transfers get their turn.
    std::uint64_t batch_bytes = 16U << 20U;
    std::size_t batch_rows = 4096;
    /// Most native requests in flight at once.
    std::size_t window = 64;
};

using DriverFactory = std::function<std::unique_ptr<Driver>()>;

class Agent : LiveCounted<Agent> {
  public:
    static constexpr const char* kLiveName = "transfer.Agent";

    /// Start the thread and make the driver on it; rethrows exceptions of the factory.
    Agent(std::string name, const DriverFactory& factory, const AgentOptions& options);
    Agent(const Agent&) = delete;
    Agent& operator=(const Agent&) = delete;
    /// Never blocks: cancels all transfers; the thread lives on until they are quiet.
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

    /// Hand over a transfer and return at once; later failures are end states of the transfer.
    [[nodiscard]] std::shared_ptr<Transfer> submit(Submission submission);
    /// End a transfer as cancelled if it has not ended; it becomes quiet later.
    void cancel(const std::shared_ptr<Transfer>& transfer);
    /// Ask for the id of the transfer in take_completed() once it has an end state.
    void watch(const std::shared_ptr<Transfer>& transfer);
    /// Ids of watched transfers that ended since the last call.
    [[nodiscard]] std::vector<std::uint64_t> take_completed();
    /// A descriptor that is readable when take_completed() has something; owned by the agent.
    [[nodiscard]] int completion_fd() const noexcept;

    void notify(const std::shared_ptr<Peer>& peer, std::string message);
    /// Notifications since the last call; waits until the given time for the first.
    [[nodiscard]] std::vector<Notification> take_notifications(TimePoint until);

    /// Wait for activity since the counter was `seen`: a notification, a transfer that ended or
    /// became quiet, or a call of wake_waiters().
    /// @return the activity counter; `seen` if the time ran out
    [[nodiscard]] std::uint64_t wait_activity(std::uint64_t seen, TimePoint until) const;
    void wake_waiters() const;

    /// Transfers that have ended but may still move bytes.
    [[nodiscard]] std::size_t quarantined() const noexcept;
    [[nodiscard]] std::size_t running() const noexcept;
    [[nodiscard]] const std::string& name() const noexcept;

    /// Refuse new work, cancel all transfers, wait until they are quiet, release everything.
    /// @return false if the time ran out first: the thread then goes on by itself, and the buffers
    ///         of the quarantined transfers must not be reused until is_closed()
    bool close(TimePoint until);
    [[nodiscard]] bool is_closed() const noexcept;
    /// Stop the thread without releasing what is not quiet. For process exit only.
    void stop(TimePoint until);

  private:
    void check_usable() const;
    /// Run a function of the loop on the agent's thread and return its result.
    template <class F>
    auto call(F function) -> std::invoke_result_t<F&, Loop&>;

    std::shared_ptr<SharedState> shared_;
    /// Ready when the thread has released everything: whether it gave everything back.
    std::shared_future<bool> exited_;
    pid_t pid_;
};

}  // namespace pynixlkv::transfer
