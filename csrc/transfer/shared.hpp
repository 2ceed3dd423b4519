/// @file
/// What an agent's thread and its callers share.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "kv/expansion.hpp"
#include "transfer/driver.hpp"
#include "transfer/event_fd.hpp"
#include "transfer/process_identity.hpp"
#include "transfer/transfer.hpp"
#include "transfer/wake_socket.hpp"

namespace pynixlkv::transfer {

struct Submission {
    Op op = Op::kRead;
    std::shared_ptr<Peer> peer;
    /// What to move: block tables, or rows that are paired by index.
    std::shared_ptr<const kv::BlockTables> tables;
    std::vector<Descriptor> local;
    std::vector<Descriptor> remote;
    std::optional<std::string> notify;
    Clock::duration timeout{};
};

struct AgentOptions {
    /// Random bytes that tell this agent from others of its name; peers wake it by them.
    std::string incarnation;
    /// Most bytes and rows of one native request; larger transfers are several requests, so that
    /// deadlines are kept and other transfers get their turn.
    std::uint64_t batch_bytes = 16U << 20U;
    std::size_t batch_rows = 4096;
};

using DriverFactory = std::function<std::unique_ptr<Driver>()>;

/// A peer on the agent's thread.
struct Link {
    struct Lists {
        std::unique_ptr<Prepared> prepared;
        double regret_ns = 0;  ///< what having the lists would have saved so far
    };

    std::shared_ptr<Peer> peer;
    std::unique_ptr<Connection> connection;
    std::optional<PeerProcess> process;  ///< if it is one of this host, and connected
    std::map<std::weak_ptr<const kv::Plan>, Lists, std::owner_less<>> lists;
    std::size_t unquiet = 0;  ///< transfers that may still move bytes

    void drop() {
        lists.clear();
        connection.reset();
    }
};

/// A transfer on the agent's thread, until it is quiet.
struct Active {
    struct Running {
        std::unique_ptr<NativeXfer> xfer;
        std::uint64_t bytes;
    };

    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<Link> link;
    std::vector<std::shared_ptr<void>> uses;        ///< of registrations
    std::shared_ptr<const kv::BlockTables> tables;  ///< null: the transfer came with its rows
    std::vector<Descriptor> local;
    std::vector<Descriptor> remote;
    /// Instead of rows, if not null: places in prepared rows. Owned by the link.
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
    /// Whether all rows have been posted and have ended.
    [[nodiscard]] bool is_moved() const noexcept {
        return expanded && next >= size() && running.empty();
    }
};

class Loop;

/// What callers hand to the agent's thread, and what wakes that thread. Thread-safe.
class CommandQueue {
  public:
    using Command = std::function<void(Loop&)>;

    explicit CommandQueue(std::string agent) : agent_(std::move(agent)) {}

    /// @throws Error("ClosedError") after close()
    void post(Command command) { push(work_.commands, std::move(command)); }
    void post(Active transfer) { push(work_.transfers, std::move(transfer)); }
    /// Refuse new work; with `stop` the thread shall not even finish what it has.
    void close(bool stop = false) {
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
            stop_ |= stop;
        }
        wake();
    }
    /// Get the thread out of its sleep. The mutex must be free: the thread wants it first.
    void wake() {
        if (asleep_.exchange(false)) {
            woken_.set();
        }
    }

    // ---- agent's thread ----
    struct Work {
        std::vector<Command> commands;
        std::vector<Active> transfers;
    };
    /// Exchange all work for the empty one given.
    void take(Work& empty) {
        const std::lock_guard lock(mutex_);
        std::swap(work_, empty);
    }
    /// Whether the agent was closed and all work has been taken.
    [[nodiscard]] bool is_finished() const {
        const std::lock_guard lock(mutex_);
        return closing_ && work_.commands.empty() && work_.transfers.empty();
    }
    [[nodiscard]] bool is_stopped() const {
        const std::lock_guard lock(mutex_);
        return stop_;
    }
    /// Drop commands that came too late; their callers see the agent as closed.
    /// @return whether no transfer came too late
    bool refuse_rest() {
        const std::lock_guard lock(mutex_);
        work_.commands.clear();
        return work_.transfers.empty();
    }
    /// Announce that the thread goes to sleep on fd().
    /// @return false if it must not, because there is work
    [[nodiscard]] bool begin_sleep(bool is_idle) {
        const std::lock_guard lock(mutex_);
        if (!work_.commands.empty() || !work_.transfers.empty() || (closing_ && is_idle) || stop_) {
            return false;
        }
        asleep_.store(true);
        return true;
    }
    void end_sleep(bool is_woken) {
        asleep_.store(false);
        if (is_woken) {
            woken_.clear();
        }
    }
    [[nodiscard]] int fd() const noexcept { return woken_.fd(); }

  private:
    template <class Item>
    void push(std::vector<Item>& to, Item item) {
        {
            const std::lock_guard lock(mutex_);
            if (closing_) {
                throw Error("ClosedError", "agent '" + agent_ + "' is closed");
            }
            to.push_back(std::move(item));
        }
        wake();
    }

    const std::string agent_;
    const EventFd woken_;
    std::atomic<bool> asleep_{false};
    mutable std::mutex mutex_;  // guards what follows
    Work work_;
    bool closing_ = false;
    bool stop_ = false;
};

/// What the agent's thread tells its callers: notifications, ends of transfers, and that something
/// has happened. Thread-safe.
class Inbox {
  public:
    /// Keep notifications until they are taken. Those that exceed the bound of their peer, or of
    /// all, are dropped, which take() reports after those that are kept.
    void deliver(std::vector<Notification>& arrivals) {
        change([&] {
            for (Notification& note : arrivals) {
                const std::size_t size = note.peer.size() + note.message.size() + kNoteBytes;
                const auto found = kept_by_peer_.find(note.peer);
                const bool is_known = found != kept_by_peer_.end();
                const std::size_t of_peer = is_known ? found->second : 0;
                if (of_peer + size > kMaxOfPeer || kept_ + size > kMaxKept ||
                    (is_full_ && !is_known)) {
                    error_ = Error("StateError",
                                   text("notifications of peer '", note.peer.substr(0, kNoteBytes),
                                        "' were dropped: ", of_peer, " bytes of its and ", kept_,
                                        " of all wait to be taken; call notifications() oftener"));
                    // Nor may a later one fit in. The names of senders count as kept, too.
                    const std::size_t mark = note.peer.size() + kNoteBytes;
                    if (is_known) {
                        found->second = kMaxOfPeer;
                    } else if (kept_ + mark <= kMaxKept) {
                        kept_ += mark;
                        kept_by_peer_.emplace(note.peer, kMaxOfPeer);
                    } else {
                        is_full_ = true;
                    }
                    continue;
                }
                kept_by_peer_[note.peer] += size;
                kept_ += size;
                notifications_.push_back(std::move(note));
            }
        });
        arrivals.clear();
    }
    /// Let take() throw, after what has been kept so far.
    void fail(const Error& error) {
        change([&] { error_ = error; });
    }
    /// A transfer has its end state.
    void report_end(Transfer& transfer) {
        change([&] {
            if (transfer.take_watched()) {
                complete(transfer);
            }
        });
    }
    /// Nothing more is to be waited for: take() and wait_activity() throw from now on.
    void close(const std::string& agent) {
        change([&] { closed_ = text("agent '", agent, "' is closed"); });
    }
    /// Let wait_activity() return.
    void announce() {
        change([] {});
    }

    [[nodiscard]] std::vector<Notification> take(TimePoint until) {
        std::unique_lock lock(mutex_);
        arrived_.wait_until(lock, until,
                            [this] { return !notifications_.empty() || error_ || closed_; });
        // What was dropped is told right after what was kept before it.
        const bool is_error_due = must_tell_ || notifications_.empty();
        must_tell_ = error_ && !is_error_due;
        if (!must_tell_) {  // else those who are full stay so: nothing may follow a gap unnoticed
            kept_by_peer_.clear();
            kept_ = 0;
            is_full_ = false;
        }
        if (is_error_due) {
            if (const auto error = std::exchange(error_, std::nullopt)) {
                throw Error(*error);
            }
        }
        if (notifications_.empty()) {
            require_open();
        }
        return std::exchange(notifications_, {});
    }
    [[nodiscard]] std::uint64_t wait_activity(std::uint64_t seen, TimePoint until) {
        std::unique_lock lock(mutex_);
        arrived_.wait_until(lock, until, [&] { return activity_ != seen || closed_; });
        require_open();
        return activity_;
    }
    void watch(Transfer& transfer) {
        const std::lock_guard lock(mutex_);
        if (is_end(transfer.state())) {
            complete(transfer);
        } else {
            transfer.set_watched();
        }
    }
    [[nodiscard]] std::vector<std::uint64_t> take_completed() {
        const std::lock_guard lock(mutex_);
        completion_.clear();
        return std::exchange(completed_, {});
    }
    [[nodiscard]] int completion_fd() const noexcept { return completion_.fd(); }

  private:
    /// Most bytes of notifications that wait to be taken, and what one takes beside its bytes.
    static constexpr std::size_t kMaxOfPeer = 64U << 20U;
    static constexpr std::size_t kMaxKept = 256U << 20U;
    static constexpr std::size_t kNoteBytes = 256;

    template <class Change>
    void change(Change apply) {
        {
            const std::lock_guard lock(mutex_);
            apply();
            ++activity_;
        }
        arrived_.notify_all();
    }
    /// @throws Error("ClosedError") after close()
    void require_open() const {
        if (closed_) {
            throw Error("ClosedError", *closed_);
        }
    }
    void complete(const Transfer& transfer) {
        completed_.push_back(transfer.id());
        completion_.set();
    }

    const EventFd completion_;
    std::mutex mutex_;  // guards what follows
    std::condition_variable arrived_;
    std::vector<Notification> notifications_;
    std::unordered_map<std::string, std::size_t> kept_by_peer_;  // bytes
    std::size_t kept_ = 0;
    bool is_full_ = false;    // whether a peer without an entry has lost a notification
    bool must_tell_ = false;  // take() has returned what came before error_
    std::vector<std::uint64_t> completed_;
    std::optional<Error> error_;
    std::optional<std::string> closed_;  // why nothing more is to be waited for
    std::uint64_t activity_ = 0;  // counts arrivals, ends of transfers, and their becoming quiet
};

/// The registered memory of one agent. Thread-safe.
class Registrations {
  public:
    explicit Registrations(const std::string& agent)
        : agent_(agent), whose_("of agent '" + agent + "'") {}

    /// Add a registration once the driver has registered it; until then nothing can use it.
    /// @throws Error("AlreadyRegisteredError") where a span overlaps registered memory
    template <class Register>
    void add(const std::shared_ptr<Registration>& registration, Register register_natively) {
        for (MemoryMap among_themselves; const Span& span : registration->spans()) {
            among_themselves.add(registration->id(), {&span, 1});
            memory_.require_free(span.row);  // only the agent's thread changes it
        }
        register_natively();
        const std::unique_lock lock(mutex_);
        by_id_.emplace(registration->id(), registration);
        memory_.add(registration->id(), registration->spans());
    }
    /// @throws Error("ClosedError") if it is not here, Error("RegistrationInUseError") while used
    void remove(Registration& registration) {
        const std::unique_lock lock(mutex_);
        const auto found = by_id_.find(registration.id());
        if (found == by_id_.end() || found->second.get() != &registration) {
            throw Error("ClosedError", "the registration is not one of agent '" + agent_ +
                                           "', or was deregistered before");
        }
        if (const std::size_t uses = registration.uses(); uses > 0) {
            throw Error(
                "RegistrationInUseError",
                text(uses, " transfers that are not quiet still use the memory; wait for them"));
        }
        registration.close();
        memory_.remove(registration.id());
        by_id_.erase(found);
    }
    void close_all() {
        const std::unique_lock lock(mutex_);
        for (auto& [id, registration] : by_id_) {
            registration->close();
        }
        by_id_.clear();
        memory_.clear();
    }

    /// @throws Error("NotRegisteredError") unless every row lies in registered memory
    void check(std::span<const Descriptor> rows) const {
        const std::shared_lock lock(mutex_);
        (void)memory_.cover(rows, whose_);
    }
    /// The same; the registrations that the rows lie in count as used until the tokens are dropped.
    [[nodiscard]] std::pair<Memory, std::vector<std::shared_ptr<void>>> use(
        std::span<const Descriptor> rows, bool is_written) const {
        const std::shared_lock lock(mutex_);
        const auto cover = memory_.cover(rows, whose_, is_written);
        std::vector<std::shared_ptr<void>> uses;
        uses.reserve(cover.owners.size());
        for (const MemoryMap::Owner owner : cover.owners) {
            uses.push_back(Registration::use(by_id_.at(owner)));
        }
        return {cover.memory, std::move(uses)};
    }

  private:
    const std::string agent_;
    const std::string whose_;
    mutable std::shared_mutex mutex_;  // guards what follows
    MemoryMap memory_;
    std::map<std::uint64_t, std::shared_ptr<Registration>> by_id_;
};

/// The agent and its thread hold a reference each, so that neither has to wait for the other's end.
struct SharedState {
    SharedState(std::string agent, AgentOptions agent_options)
        : name(std::move(agent)),
          options(std::move(agent_options)),
          wake_socket(options.incarnation),
          identity(options.incarnation),
          queue(name),
          registrations(name) {}

    const std::string name;
    const AgentOptions options;
    const WakeSocket wake_socket;
    const IdentitySocket identity;
    CommandQueue queue;
    Inbox inbox;
    Registrations registrations;
    std::atomic<std::uint64_t> next_id{1};
    std::atomic<std::size_t> num_quarantined{0};
    std::atomic<std::size_t> num_running{0};
};

}  // namespace pynixlkv::transfer
