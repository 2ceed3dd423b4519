/// @file
/// The agent's thread. Other threads reach it only through `SharedState`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "transfer/shared.hpp"

namespace pynixlkv::transfer {

/// What making requests costs here, in ns per row: moving averages that begin with values measured
/// for NIXL 1.5 on x86-64.
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

class Loop {
  public:
    explicit Loop(std::shared_ptr<SharedState> shared) : shared_(std::move(shared)) {}

    /// The thread's life.
    /// @return whether everything was given back
    bool run(DriverFactory factory, std::promise<void>& started);

    // ---- commands ----
    void add_registration(const std::shared_ptr<Registration>& registration);
    void remove_registration(Registration& registration);
    [[nodiscard]] std::string metadata() { return driver_->metadata(); }
    std::shared_ptr<Peer> connect(const std::string& name, const std::string& incarnation,
                                  const std::string& metadata, const std::vector<Span>& spans);
    std::shared_ptr<Peer> open_file(const std::string& name, int fd, const Span& span);
    [[nodiscard]] bool is_alive(const Peer& peer);
    void disconnect(const Peer& peer);
    void notify(const Peer& peer, const std::string& message);

  private:
    bool take_work();
    void excuse_pause();
    void look_for_dead_peers();
    bool receive();
    bool advance(Active& a);
    void settle();
    void pause(bool busy);
    void sleep(Clock::duration longest);
    void teardown();

    // ---- one transfer ----
    template <class Step>
    bool attempt(Active& a, Step step);
    bool poll_running(Active& a);
    bool start_batch(Active& a);
    [[nodiscard]] std::unique_ptr<NativeXfer> make_xfer(Active& a, std::size_t count) const;
    void make_rows(Active& a);
    void choose_lists(Active& a, const kv::Expansion& expansion);
    void cut_rows(Active& a) const;
    void end(Active& a, State state, const std::string& message,
             const std::optional<NativeError>& cause = {});

    // ---- peers ----
    /// The link of a peer; one without a connection if the peer is an earlier generation.
    [[nodiscard]] std::shared_ptr<Link> link_of(const std::shared_ptr<Peer>& peer) const;
    /// @throws Error("ConfigError") for a peer of another agent
    [[nodiscard]] Link& connected(const Peer& peer) const;
    void tell(Link& link, const std::string& message);
    void lose(Link& link, PeerState state, const std::string& reason,
              const std::optional<NativeError>& cause = {});
    void forget_lists();

    const std::shared_ptr<SharedState> shared_;
    std::unique_ptr<Driver> driver_;
    std::vector<Active> active_;
    std::map<std::string, std::shared_ptr<Link>> links_;
    std::vector<std::shared_ptr<Link>> ended_;  ///< to be dropped when they are quiet
    /// The last generation of names without a link, and the names in the order of their ends.
    std::map<std::string, std::uint64_t> generations_;
    std::deque<std::string> names_;
    TimePoint last_look_ = Clock::now();  ///< for peers that are gone
    std::uint64_t num_closed_ = 0;        ///< sockets, when last looked
    TimePoint ask_at_ = TimePoint::max();
    std::map<std::uint64_t, std::unique_ptr<Registered>> registered_;

    Costs costs_;
    std::size_t num_xfers_ = 0;
    CommandQueue::Work work_;
    std::vector<Descriptor> spare_local_;
    std::vector<Descriptor> spare_remote_;
    std::vector<Notification> arrivals_;
    /// When this thread last looked at the clock between two steps; deadlines are judged by it.
    TimePoint now_ = Clock::now();
    TimePoint last_activity_ = Clock::now();
    TimePoint last_wake_{};
    TimePoint identity_rests_until_{};  ///< not polled while the process is out of descriptors
    /// Whether every known sender can wake this agent.
    bool all_wake_ = true;
};

}  // namespace pynixlkv::transfer
