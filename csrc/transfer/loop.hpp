/// @file
/// The agent's thread and what it shares with its callers. Private to the agent.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "transfer/doorbell.hpp"
#include "transfer/agent.hpp"
#include "transfer/event_fd.hpp"

namespace pynixlkv::transfer {

/// A time span for people.
[[nodiscard]] std::string seconds_text(Clock::duration d);

/// A transfer on the agent's thread, until it is quiet.
struct Active {
    struct Running {
        std::unique_ptr<Operation> operation;
        std::uint64_t bytes;
    };

    std::shared_ptr<Transfer> transfer;
    std::vector<std::shared_ptr<Registration>> uses;
    std::shared_ptr<const Source> source;
    std::vector<Row> local;
    std::vector<Row> remote;
    /// Instead of rows, if not null: places in prepared rows. Owned by the peer.
    Prepared* prepared = nullptr;
    std::vector<std::int32_t> local_indices;
    std::vector<std::int32_t> remote_indices;
    std::uint64_t bytes = 0;
    Memory local_memory = Memory::kDram;
    Memory remote_memory = Memory::kDram;
    std::optional<std::string> notify;
    TimePoint submitted;
    TimePoint deadline;
    Clock::duration timeout{};
    bool expanded = false;
    std::size_t next = 0;
    std::vector<Running> running;

    [[nodiscard]] std::size_t size() const noexcept {
        return prepared != nullptr ? local_indices.size() : local.size();
    }
};

/// What the agent's thread and its callers share. The thread holds one reference, the Agent
/// another, so that neither has to wait for the other to go away.
class Loop {
  public:
    Loop(std::string name, const AgentOptions& options)
        : name_(std::move(name)), options_(options), doorbell_(options.incarnation) {}
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    // ---- agent thread ----
    /// The thread's life.
    /// @return whether everything was given back
    bool run(DriverFactory factory, std::promise<void>& started);
    std::shared_ptr<Registration> add_registration(const std::shared_ptr<Registration>& r);
    void remove_registration(Registration& registration);
    std::shared_ptr<Peer> connect(const std::string& name, const std::string& incarnation,
                                  const std::string& metadata, const std::vector<Span>& spans);
    void disconnect(Peer& peer);
    void notify(Peer& peer, const std::string& message);
    void forget_lists();
    void lose(Peer& peer, PeerState state, const std::string& reason,
              const std::optional<NativeError>& cause);

    // ---- any thread ----
    void post(std::function<void()> command);
    void wake();
    /// Let those who wait for activity look.
    void announce();

    const std::string name_;
    const AgentOptions options_;
    const Doorbell doorbell_;
    const EventFd completion_;
    const EventFd woken_;
    std::atomic<bool> asleep_{false};

    std::mutex mutex_;  // guards the next group
    std::deque<std::function<void()>> commands_;
    std::deque<Active> queued_;
    bool closing_ = false;
    bool stop_ = false;

    std::mutex inbox_mutex_;  // guards the next group
    std::condition_variable arrived_;
    std::vector<Notification> inbox_;
    std::vector<std::uint64_t> completed_;
    std::optional<Error> receive_error_;
    std::uint64_t activity_ = 0;  // counts arrivals, ends of transfers, and their becoming quiet

    std::shared_mutex memory_mutex_;  // guards the next group
    MemoryMap memory_;
    std::map<std::uint64_t, std::shared_ptr<Registration>> registrations_;

    std::atomic<std::uint64_t> next_id_{1};
    std::atomic<std::size_t> num_quarantined_{0};
    std::atomic<std::size_t> num_running_{0};

    // Agent thread only.
    std::unique_ptr<Driver> driver_;
    std::vector<Active> active_;
    std::map<std::string, std::shared_ptr<Peer>> peers_;

  private:
    bool run_commands();
    bool refuse_the_rest();
    bool admit();
    bool advance(Active& a);
    bool poll_running(Active& a);
    bool start_batch(Active& a);
    [[nodiscard]] std::unique_ptr<Operation> make_operation(Active& a, std::size_t count) const;
    void make_rows(Active& a);
    void choose_lists(Active& a);
    void cut_rows(Active& a) const;
    bool receive();
    static void let_go(Active& a);
    static void drop(Peer& peer);
    void settle();
    void excuse_pause();
    void pause(bool busy);
    void sleep(Clock::duration longest);
    void tell(Peer& peer, const std::string& message);
    void teardown();
    void abandon();
    void end(Active& a, State state, const std::string& message,
             const std::optional<NativeError>& cause);
    [[nodiscard]] static std::string describe(const Active& a);

    /// What making requests costs here, in ns per row: a moving average that begins with values
    /// measured for NIXL 1.5 on x86-64.
    struct Costs {
        double row_ns = 36;
        double index_ns = 21;
        double prepare_ns = 13;

        static void learn(double& cost, Clock::duration spent, std::size_t rows) {
            // Few rows say more about the call than about its rows.
            if (rows >= 256) {
                cost += (static_cast<double>(ns(spent)) / static_cast<double>(rows) - cost) / 8;
            }
        }
    };

    Costs costs_;
    std::size_t num_operations_ = 0;
    std::vector<Row> spare_local_;
    std::vector<Row> spare_remote_;
    std::vector<Notification> arrivals_;
    /// Start of the current turn of the loop; deadlines are judged by it.
    TimePoint turn_ = Clock::now();
    TimePoint last_activity_ = Clock::now();
    TimePoint last_ring_{};
    /// Whether all that may send to this agent are known to ring.
    bool all_ring_ = true;
};

}  // namespace pynixlkv::transfer
