/// @file
/// The agent: a thread with a native library's object, and what libraries leave out: deadlines,
/// sticky end states, quarantine of buffers until quiet, generations of peers.
///
/// All functions may be called from any thread; only the agent's own thread touches the driver.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "base/live_count.hpp"
#include "transfer/shared.hpp"
#include "transfer/transfer.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

class Agent : LiveCounted<Agent> {
  public:
    static constexpr const char* kLiveName = "transfer.Agent";

    /// Start the thread and make the driver on it; rethrows exceptions of the factory.
    Agent(std::string name, const DriverFactory& factory, const AgentOptions& options);
    /// Never blocks: cancels all transfers; the thread lives on until they are quiet.
    ~Agent();

    [[nodiscard]] std::shared_ptr<Registration> register_memory(std::vector<Span> spans);
    /// @throws Error("RegistrationInUseError") while transfers that are not quiet touch it,
    ///         Error("ClosedError") when done before
    void deregister(const std::shared_ptr<Registration>& registration);
    /// @throws Error("NotRegisteredError") unless every row lies in registered memory
    void check_registered(const std::vector<Descriptor>& rows) const {
        check_usable();
        shared_->registrations.check(rows);
    }
    [[nodiscard]] std::string metadata();

    /// Connect to a peer, or to its next generation after it was lost or disconnected.
    /// @throws Error("DuplicatePeerError") when another incarnation is connected and alive
    [[nodiscard]] std::shared_ptr<Peer> connect(const std::string& name,
                                                const std::string& incarnation,
                                                const std::string& metadata,
                                                const std::vector<Span>& spans);
    /// Open a file, which transfers then take in place of a peer.
    /// @param span which part of the file transfers may touch
    [[nodiscard]] std::shared_ptr<Peer> open_file(const std::string& name, int fd,
                                                  const Span& span);
    [[nodiscard]] bool is_alive(const std::shared_ptr<Peer>& peer);
    /// Cancel the peer's transfers; the native connection goes when they are quiet.
    void disconnect(const std::shared_ptr<Peer>& peer);

    /// Hand over a transfer and return at once; later failures are end states of the transfer.
    [[nodiscard]] std::shared_ptr<Transfer> submit(Submission submission);
    /// End a transfer as cancelled if it has not ended; it becomes quiet later.
    void cancel(const std::shared_ptr<Transfer>& transfer) {
        check_usable();
        transfer->cancel();
        shared_->queue.wake();
    }
    /// Ask for the id of the transfer in take_completed() once it has an end state.
    void watch(const std::shared_ptr<Transfer>& transfer) {
        check_usable();
        shared_->inbox.watch(*transfer);
    }
    /// Ids of watched transfers that ended since the last call.
    [[nodiscard]] std::vector<std::uint64_t> take_completed() {
        check_usable();
        return shared_->inbox.take_completed();
    }
    /// A descriptor that is readable when take_completed() has something; owned by the agent.
    [[nodiscard]] int completion_fd() const noexcept { return shared_->inbox.completion_fd(); }

    void notify(const std::shared_ptr<Peer>& peer, std::string message);
    /// Notifications since the last call; waits until the given time for the first.
    /// @throws Error("ClosedError") when there are none and will be none
    [[nodiscard]] std::vector<Notification> take_notifications(TimePoint until) {
        check_usable();
        return shared_->inbox.take(until);
    }

    /// Wait for activity since the counter was `seen`: a notification, a transfer that ended or
    /// became quiet, or a call of wake_waiters().
    /// @return the activity counter; `seen` if the time ran out
    /// @throws Error("ClosedError") when the agent is closed
    [[nodiscard]] std::uint64_t wait_activity(std::uint64_t seen, TimePoint until) const {
        check_usable();
        return shared_->inbox.wait_activity(seen, until);
    }
    void wake_waiters() const { shared_->inbox.announce(); }

    /// Transfers that have ended but may still move bytes.
    [[nodiscard]] std::size_t quarantined() const noexcept {
        return shared_->num_quarantined.load();
    }
    [[nodiscard]] std::size_t running() const noexcept { return shared_->num_running.load(); }
    [[nodiscard]] const std::string& name() const noexcept { return shared_->name; }

    /// Refuse new work, cancel all transfers, wait until they are quiet, release everything.
    /// @return false if the time ran out first: the thread then goes on by itself, and the buffers
    ///         of the quarantined transfers must not be reused until is_closed()
    bool close(TimePoint until) {
        check_usable();
        shared_->queue.close();
        shared_->inbox.close(name());
        (void)exited_.wait_until(until);
        return is_closed();
    }
    [[nodiscard]] bool is_closed() const noexcept {
        return exited_.wait_for(Clock::duration::zero()) == std::future_status::ready &&
               exited_.get();
    }
    /// Stop the thread without releasing what is not quiet. For process exit only.
    void stop(TimePoint until) {
        check_usable();
        shared_->queue.close(true);
        shared_->inbox.close(name());
        (void)exited_.wait_until(until);
    }

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
