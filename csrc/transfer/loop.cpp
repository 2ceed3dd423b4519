#include "transfer/loop.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <thread>
#include <utility>

#include "base/keep.hpp"

namespace pynixlkv::transfer {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How the thread waits. It spins (yielding) while an event is likely within microseconds, then naps
// ever longer: a waiting transfer is polled at 20 kHz, then 2 kHz; an idle agent as its options
// say.
constexpr auto kSpinWithWork = milliseconds(5);
constexpr auto kNapWithWork = microseconds(50);
constexpr auto kStalled = milliseconds(100);
constexpr auto kNapStalled = microseconds(500);
constexpr auto kSpinWithoutWork = microseconds(100);
constexpr auto kLinger = milliseconds(2);
/// A longer turn is a pause of the process, or of its host: nothing could be observed meanwhile.
constexpr auto kLongestTurn = std::chrono::seconds(1);
/// A notification this long after the last ring came from a sender that does not ring.
constexpr auto kRingIsOld = milliseconds(50);

std::string bytes_text(std::uint64_t bytes) {
    char text[32];
    if (bytes >= (1U << 20U)) {
        std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1U << 20U));
    } else {
        std::snprintf(text, sizeof text, "%llu bytes", static_cast<unsigned long long>(bytes));
    }
    return text;
}

}  // namespace

std::string seconds_text(Clock::duration d) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g s", std::chrono::duration<double>(d).count());
    return text;
}

/// Get the thread out of its sleep, after what it shall see has changed. Without holding the mutex,
/// which is the first thing that the thread wants.
void Loop::wake() {
    if (asleep_.exchange(false)) {
        woken_.set();
    }
}

void Loop::announce() {
    {
        const std::lock_guard lock(inbox_mutex_);
        ++activity_;
    }
    arrived_.notify_all();
}

void Loop::post(std::function<void()> command) {
    {
        const std::lock_guard lock(mutex_);
        if (closing_) {
            throw Error("ClosedError", "agent '" + name_ + "' is closed");
        }
        commands_.push_back(std::move(command));
    }
    wake();
}

// ---------------------------------------------------------------------------------------------
// Loop: agent thread

bool Loop::run(DriverFactory factory, std::promise<void>& started) {
    ::pthread_setname_np(::pthread_self(), ("pnkv-" + name_).substr(0, 15).c_str());
    ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // naps of 50 us should not become 100 us
    try {
        driver_ = std::exchange(factory, nullptr)();
    } catch (...) {
        started.set_exception(std::current_exception());
        return true;
    }
    started.set_value();

    for (;;) {
        bool busy = run_commands();
        busy |= admit();
        excuse_pause();
        busy |= receive();
        for (Active& a : active_) {
            busy |= advance(a);
            busy |= receive();  // a post may have taken milliseconds
        }
        settle();
        bool closing = false;
        {
            const std::lock_guard lock(mutex_);
            if (stop_) {
                break;
            }
            closing = closing_ && commands_.empty() && queued_.empty();
        }
        if (closing) {
            for (Active& a : active_) {
                end(a, State::kCancelled, describe(a) + " was cancelled: the agent was closed", {});
            }
            if (active_.empty()) {
                break;
            }
        }
        pause(busy);
    }
    const bool clean = refuse_the_rest() && active_.empty();
    if (clean) {
        teardown();
    } else {
        abandon();
    }
    return clean;
}

/// Drop commands and transfers that came too late; their callers see the agent as closed.
/// @return whether no transfer was among them
bool Loop::refuse_the_rest() {
    const std::lock_guard lock(mutex_);
    commands_.clear();
    return queued_.empty();
}

bool Loop::run_commands() {
    std::deque<std::function<void()>> commands;
    {
        const std::lock_guard lock(mutex_);
        commands.swap(commands_);
    }
    for (auto& command : commands) {
        command();
    }
    return !commands.empty();
}

bool Loop::admit() {
    std::deque<Active> queued;
    {
        const std::lock_guard lock(mutex_);
        queued.swap(queued_);
    }
    for (Active& a : queued) {
        {
            const std::lock_guard lock(a.transfer->mutex_);
            a.transfer->stats_.queued_ns = ns(Clock::now() - a.submitted);
        }
        ++a.transfer->peer_->unquiet_;
        active_.push_back(std::move(a));
    }
    return !queued.empty();
}

std::string Loop::describe(const Active& a) {
    const Transfer& t = *a.transfer;
    return std::string(t.op_ == Op::kRead ? "READ from" : "WRITE to") + " peer '" + t.peer_->name_ +
           "' (transfer " + std::to_string(t.id_) + ")";
}

/// No byte of the transfer can move any more: its memory and its peer are free of it.
void Loop::let_go(Active& a) {
    for (const auto& registration : a.uses) {
        registration->uses_.fetch_sub(1);
    }
    a.uses.clear();
    --a.transfer->peer_->unquiet_;
}

/// Give a transfer its end state, once; later calls change nothing.
void Loop::end(Active& a, State state, const std::string& message,
               const std::optional<NativeError>& cause) {
    Transfer& t = *a.transfer;
    if (is_end(t.state())) {
        return;
    }
    // The counts change first: whoever sees the end state must see them too.
    num_running_.fetch_sub(1);
    if (a.running.empty()) {
        let_go(a);
    } else {
        num_quarantined_.fetch_add(1);
    }
    {
        const std::lock_guard lock(t.mutex_);
        t.stats_.total_ns = ns(Clock::now() - a.submitted);
        t.message_ = message;
        t.cause_ = cause;
        t.state_.store(state, std::memory_order_release);
        if (a.running.empty()) {
            t.quiet_.store(true, std::memory_order_release);
        }
    }
    t.changed_.notify_all();
    if (t.watched_.load()) {
        const std::lock_guard lock(inbox_mutex_);
        if (t.watched_.exchange(false)) {
            completed_.push_back(t.id_);
            completion_.set();
        }
    }
    announce();
}

void Loop::cut_rows(Active& a) const {
    const std::uint64_t limit = options_.batch_bytes;
    const auto too_long = [limit](const Row& row) { return row.length > limit; };
    if (std::none_of(a.local.begin(), a.local.end(), too_long)) {
        return;
    }
    std::vector<Row> local;
    std::vector<Row> remote;
    for (std::size_t i = 0; i < a.local.size(); ++i) {
        for (std::uint64_t done = 0; done < a.local[i].length; done += limit) {
            const std::uint64_t length = std::min(limit, a.local[i].length - done);
            local.push_back({a.local[i].address + done, length, a.local[i].device});
            remote.push_back({a.remote[i].address + done, length, a.remote[i].device});
        }
    }
    a.local.swap(local);
    a.remote.swap(remote);
}

void Loop::make_rows(Active& a) {
    const TimePoint begin = Clock::now();
    if (a.source) {
        // Rows of an earlier transfer: their pages are there, new ones would have to be made first.
        a.local.swap(spare_local_);
        a.remote.swap(spare_remote_);
        a.source->expand(a.local, a.remote);
    }
    for (const Row& row : a.local) {
        a.bytes += row.length;
    }
    choose_lists(a);
    if (a.prepared == nullptr) {
        cut_rows(a);
    }
    a.expanded = true;
    Transfer& t = *a.transfer;
    const std::lock_guard lock(t.mutex_);
    t.stats_.expand_ns = ns(Clock::now() - begin);
    t.stats_.bytes = a.bytes;
    t.stats_.descriptors = a.prepared != nullptr ? a.local_indices.size() : a.local.size();
    t.stats_.prepared = a.prepared != nullptr;
    t.state_.store(State::kRunning, std::memory_order_release);
}

/// Decide between rows and prepared rows by what they cost here. Indices name rows before merging,
/// so that there may be far more of them; each is cheaper. Preparing costs once per row of the
/// pool, so it is done when not having done it has cost as much.
void Loop::choose_lists(Active& a) {
    const auto pool = a.source ? a.source->pool() : nullptr;
    if (!pool || a.local.empty()) {
        return;
    }
    const auto num_indices = a.source->num_indices();
    const double saved_ns = costs_.row_ns * static_cast<double>(a.local.size()) -
                            costs_.index_ns * static_cast<double>(num_indices.value_or(0));
    if (!num_indices || saved_ns <= 0) {
        return;
    }
    Peer& peer = *a.transfer->peer_;
    if (!peer.lists_.contains(pool)) {
        std::erase_if(peer.lists_, [](const auto& entry) { return entry.first.expired(); });
    }
    Peer::Lists& lists = peer.lists_[pool];
    if (!lists.prepared) {
        lists.regret_ns += saved_ns;
        const auto pool_size = static_cast<double>(a.source->pool_size());
        if (lists.regret_ns < costs_.prepare_ns * pool_size) {
            return;
        }
        std::vector<Row> local;
        std::vector<Row> remote;
        a.source->pool_rows(local, remote);
        const TimePoint begin = Clock::now();
        lists.prepared =
            driver_->prepare(*peer.native_, {local, remote, a.local_memory, a.remote_memory});
        Costs::learn(costs_.prepare_ns, Clock::now() - begin, local.size() + remote.size());
        if (!lists.prepared) {
            lists.regret_ns = 0;
            return;
        }
    }
    a.source->expand_indices(a.local_indices, a.remote_indices);
    a.prepared = lists.prepared.get();
    a.local.clear();
    a.remote.clear();
}

/// Ask every native request of a transfer whether it has ended.
bool Loop::poll_running(Active& a) {
    bool busy = false;
    for (std::size_t i = 0; i < a.running.size();) {
        bool ended = false;
        std::uint64_t arrived = 0;
        try {
            ended = a.running[i].operation->poll();
            arrived = ended ? a.running[i].bytes : 0;
        } catch (const ConnectionLost& e) {
            ended = true;
            lose(*a.transfer->peer_, PeerState::kLost, e.what(), e);
        } catch (const NativeError& e) {
            ended = true;
            end(a, State::kFailed, describe(a) + " failed: " + e.what(), e);
        } catch (const std::exception& e) {
            ended = true;
            end(a, State::kFailed, describe(a) + " failed: " + e.what(), {});
        }
        if (!ended) {
            ++i;
            continue;
        }
        busy = true;
        a.running[i] = std::move(a.running.back());
        a.running.pop_back();
        --num_operations_;
        const std::lock_guard lock(a.transfer->mutex_);
        a.transfer->stats_.bytes_done += arrived;
    }
    return busy;
}

/// Hand at most one batch to the library, so that transfers take turns.
bool Loop::start_batch(Active& a) {
    const std::size_t size = a.size();
    if (a.next >= size || num_operations_ >= options_.window) {
        return false;
    }
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    if (a.prepared != nullptr) {
        const std::uint64_t mean = std::max<std::uint64_t>(a.bytes / size, 1);
        count = std::clamp<std::size_t>(options_.batch_bytes / mean, 1, options_.batch_rows);
        count = std::min(count, size - a.next);
        // The mean is exact in sum: the last batch takes what the others left.
        bytes = a.next + count == size ? a.bytes - mean * a.next : mean * count;
    } else {
        while (a.next + count < size && count < options_.batch_rows &&
               (count == 0 || bytes + a.local[a.next + count].length <= options_.batch_bytes)) {
            bytes += a.local[a.next + count++].length;
        }
    }
    const TimePoint begin = Clock::now();
    auto operation = make_operation(a, count);
    const TimePoint made = Clock::now();
    operation->post();
    const TimePoint posted = Clock::now();
    Costs::learn(a.prepared != nullptr ? costs_.index_ns : costs_.row_ns, made - begin, count);
    a.running.push_back({std::move(operation), bytes});
    ++num_operations_;
    a.next += count;
    const std::lock_guard lock(a.transfer->mutex_);
    a.transfer->stats_.make_ns += ns(made - begin);
    a.transfer->stats_.post_ns += ns(posted - made);
    ++a.transfer->stats_.batches;
    return true;
}

std::unique_ptr<Operation> Loop::make_operation(Active& a, std::size_t count) const {
    Connection& connection = *a.transfer->peer_->native_;
    const auto part = [&](const auto& whole) { return std::span(whole).subspan(a.next, count); };
    if (a.prepared != nullptr) {
        return driver_->make(connection, a.transfer->op_, *a.prepared,
                             {part(a.local_indices), part(a.remote_indices)});
    }
    return driver_->make(connection, a.transfer->op_,
                         {part(a.local), part(a.remote), a.local_memory, a.remote_memory});
}

bool Loop::advance(Active& a) {
    const Transfer& t = *a.transfer;
    bool busy = poll_running(a);
    if (is_end(t.state())) {
        return busy;
    }
    if (t.cancel_.load()) {
        end(a, State::kCancelled, describe(a) + " was cancelled by its owner", {});
        return true;
    }
    if (t.peer_->state() != PeerState::kConnected) {
        const bool lost = t.peer_->state() == PeerState::kLost;
        end(a, lost ? State::kPeerLost : State::kCancelled,
            describe(a) + (lost ? " failed: the peer is lost: " + t.peer_->reason()
                                : " was cancelled: the peer was disconnected"),
            {});
        return true;
    }
    const bool is_moved = a.expanded && a.next >= a.size() && a.running.empty();
    if (turn_ >= a.deadline && !is_moved) {
        const std::uint64_t done = t.stats().bytes_done;
        end(a, State::kTimedOut,
            describe(a) + " did not end within " + seconds_text(a.timeout) + ": " +
                bytes_text(done) + " of " + bytes_text(t.stats().bytes) + " are known to have " +
                "arrived" +
                (a.running.empty() ? ""
                                   : "; its buffers stay quarantined until the library reports the "
                                     "rest as ended"),
            {});
        return true;
    }
    try {
        if (!a.expanded) {
            make_rows(a);
        }
        busy |= start_batch(a);
        if (a.next >= a.size() && a.running.empty()) {
            if (a.notify) {
                tell(*t.peer_, *a.notify);
            }
            end(a, State::kDone, {}, {});
            busy = true;
        }
    } catch (const ConnectionLost& e) {
        lose(*t.peer_, PeerState::kLost, e.what(), e);
        busy = true;
    } catch (const NativeError& e) {
        end(a, State::kFailed, describe(a) + " failed: " + e.what(), e);
        busy = true;
    } catch (const std::exception& e) {
        end(a, State::kFailed, describe(a) + " failed: " + e.what(), {});
        busy = true;
    }
    return busy;
}

/// Deadlines count only time in which this thread could see what arrived.
void Loop::excuse_pause() {
    const TimePoint before = std::exchange(turn_, Clock::now());
    if (turn_ - before <= kLongestTurn) {
        return;
    }
    for (Active& a : active_) {
        const auto missed = std::min(turn_ - before, turn_ - a.submitted);
        a.deadline = a.deadline < TimePoint::max() - missed ? a.deadline + missed : a.deadline;
    }
}

/// Let go of what has become quiet: transfers first, then the connections that wait for them.
void Loop::settle() {
    std::erase_if(active_, [this](Active& a) {
        Transfer& t = *a.transfer;
        if (!is_end(t.state()) || !a.running.empty()) {
            return false;
        }
        if (!t.is_quiet()) {
            let_go(a);
            num_quarantined_.fetch_sub(1);
            {
                const std::lock_guard lock(t.mutex_);
                t.quiet_.store(true, std::memory_order_release);
            }
            t.changed_.notify_all();
            announce();
        }
        if (a.local.capacity() > spare_local_.capacity()) {
            a.local.swap(spare_local_);
            a.remote.swap(spare_remote_);
        }
        return true;
    });
    for (auto& [name, peer] : peers_) {
        if (peer->native_ && peer->state() != PeerState::kConnected && peer->unquiet_ == 0) {
            drop(*peer);
        }
    }
}

void Loop::drop(Peer& peer) {
    peer.lists_.clear();
    peer.native_.reset();
}

/// Prepared rows hold on to memory, so they go before it does; they come back when they pay.
void Loop::forget_lists() {
    for (auto& [name, peer] : peers_) {
        std::erase_if(peer->lists_, [this](const auto& entry) {
            return std::none_of(active_.begin(), active_.end(), [&](const Active& a) {
                return a.prepared != nullptr && a.prepared == entry.second.prepared.get();
            });
        });
    }
}

/// The peer is gone: all that runs to it ends now, with one reason.
void Loop::lose(Peer& peer, PeerState state, const std::string& reason,
                const std::optional<NativeError>& cause) {
    if (peer.state() != PeerState::kConnected) {
        return;
    }
    {
        const std::lock_guard lock(peer.mutex_);
        peer.reason_ = reason;
    }
    peer.state_.store(state);
    for (Active& a : active_) {
        if (a.transfer->peer_.get() != &peer) {
            continue;
        }
        if (state == PeerState::kLost) {
            end(a, State::kPeerLost, describe(a) + " failed: the peer is lost: " + reason, cause);
        } else {
            end(a, State::kCancelled, describe(a) + " was cancelled: " + reason, cause);
        }
    }
}

bool Loop::receive() {
    bool worked = false;
    try {
        worked = driver_->receive(arrivals_);
    } catch (const std::exception& e) {
        const auto* ours = dynamic_cast<const Error*>(&e);
        {
            const std::lock_guard lock(inbox_mutex_);
            receive_error_ = ours != nullptr ? *ours : Error("StateError", e.what());
        }
        announce();
        return false;
    }
    if (arrivals_.empty()) {
        return worked;
    }
    if (doorbell_.take()) {
        last_ring_ = Clock::now();
    }
    all_ring_ &= Clock::now() - last_ring_ < kRingIsOld;
    {
        const std::lock_guard lock(inbox_mutex_);
        for (Notification& n : arrivals_) {
            inbox_.push_back(std::move(n));
        }
        arrivals_.clear();
    }
    announce();
    return true;
}

void Loop::pause(bool busy) {
    const TimePoint now = Clock::now();
    if (busy) {
        last_activity_ = now;
        return;
    }
    const auto quiet_for = now - last_activity_;
    Clock::duration nap;
    if (num_running_.load() > 0) {
        if (quiet_for < kSpinWithWork) {
            std::this_thread::yield();
            return;
        }
        nap = quiet_for < kStalled ? Clock::duration(kNapWithWork) : Clock::duration(kNapStalled);
    } else if (quiet_for < kSpinWithoutWork) {
        std::this_thread::yield();
        return;
    } else {
        const bool is_told = all_ring_ || driver_->event_fd() >= 0;
        nap = quiet_for < kLinger ? Clock::duration(kNapWithWork)
                                  : Clock::duration(is_told ? options_.rung_poll : options_.poll);
    }
    sleep(nap);
}

/// Sleep until there is something to do, somebody rings, or the time is over.
void Loop::sleep(Clock::duration longest) {
    if (!driver_->arm()) {
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        if (!commands_.empty() || !queued_.empty() || (closing_ && active_.empty()) || stop_) {
            return;
        }
        asleep_.store(true);
    }
    // A descriptor of -1 is never ready.
    std::array<pollfd, 3> fds{pollfd{woken_.fd(), POLLIN, 0}, pollfd{doorbell_.fd(), POLLIN, 0},
                              pollfd{driver_->event_fd(), POLLIN, 0}};
    const timespec timeout{0, static_cast<long>(std::min(ns(longest), std::int64_t{999'999'999}))};
    const bool woken = ::ppoll(fds.data(), fds.size(), &timeout, nullptr) > 0;
    asleep_.store(false);
    if (!woken) {
        return;
    }
    last_activity_ = Clock::now();
    if (fds[0].revents != 0) {
        woken_.clear();
    }
    if (fds[1].revents != 0 && doorbell_.take()) {
        last_ring_ = last_activity_;
    }
}

/// Give everything back, in the order that libraries demand: connections, memory, agent.
void Loop::teardown() {
    for (auto& [name, peer] : peers_) {
        lose(*peer, PeerState::kDisconnected, "the agent was closed", {});
        drop(*peer);
    }
    peers_.clear();
    {
        const std::unique_lock lock(memory_mutex_);
        for (auto& [id, registration] : registrations_) {
            registration->open_.store(false);
            registration->native_.reset();
        }
        registrations_.clear();
        memory_.clear();
    }
    driver_.reset();
}

/// Process exit with operations that may still run: keep all that they touch, for ever.
void Loop::abandon() {
    struct Kept {
        std::vector<Active> active;
        std::unique_ptr<Driver> driver;
        std::map<std::string, std::shared_ptr<Peer>> peers;
        std::map<std::uint64_t, std::shared_ptr<Registration>> registrations;
    };
    const std::unique_lock lock(memory_mutex_);
    keep_for_ever<Kept>(std::move(active_), std::move(driver_), std::move(peers_),
                        std::move(registrations_));
}

std::shared_ptr<Registration> Loop::add_registration(
    const std::shared_ptr<Registration>& registration) {
    {
        const std::unique_lock lock(memory_mutex_);
        memory_.add(registration->id_, registration->spans_);
    }
    try {
        registration->native_ = driver_->register_memory(registration->spans_);
    } catch (...) {
        const std::unique_lock lock(memory_mutex_);
        memory_.remove(registration->id_);
        throw;
    }
    const std::unique_lock lock(memory_mutex_);
    registrations_.emplace(registration->id_, registration);
    return registration;
}

void Loop::remove_registration(Registration& registration) {
    {
        const std::unique_lock lock(memory_mutex_);
        const auto found = registrations_.find(registration.id_);
        if (found == registrations_.end() || found->second.get() != &registration) {
            throw Error("ClosedError", "the registration is not one of agent '" + name_ +
                                           "', or was deregistered before");
        }
        if (const std::size_t uses = registration.uses(); uses > 0) {
            throw Error("RegistrationInUseError",
                        std::to_string(uses) +
                            " transfers that are not quiet still use the memory; wait for them");
        }
        registration.open_.store(false);
        memory_.remove(registration.id_);
        registrations_.erase(found);
    }
    forget_lists();
    registration.native_.reset();
}

std::shared_ptr<Peer> Loop::connect(const std::string& name, const std::string& incarnation,
                                    const std::string& metadata, const std::vector<Span>& spans) {
    MemoryMap memory;
    memory.add(0, spans);
    std::uint64_t generation = 1;
    if (const auto it = peers_.find(name); it != peers_.end()) {
        Peer& old = *it->second;
        if (old.state() == PeerState::kConnected && old.incarnation_ == incarnation) {
            forget_lists();
            driver_->refresh(*old.native_, metadata);
            const std::lock_guard lock(old.mutex_);
            old.memory_ = std::move(memory);
            return it->second;
        }
        if (old.state() == PeerState::kConnected) {
            if (driver_->is_alive(*old.native_)) {
                throw Error("DuplicatePeerError",
                            "another live agent named '" + name +
                                "' is connected; agent names must be unique, or disconnect() the "
                                "other one first");
            }
            lose(old, PeerState::kLost, "its connection was found dead when a successor connected",
                 {});
        }
        settle();
        if (old.native_) {
            throw Error("StateError", std::to_string(old.unquiet_) +
                                          " transfers to the previous generation of peer '" + name +
                                          "' are not quiet yet; connect again when they are");
        }
        generation = old.generation_ + 1;
    }
    auto peer = std::make_shared<Peer>(name, incarnation, generation);
    peer->native_ = driver_->connect(name, metadata);
    peer->memory_ = std::move(memory);
    peers_[name] = peer;
    all_ring_ &= doorbell_.ring(incarnation);
    return peer;
}

/// Send a notification and ring: before, so that the receiver can tell announced ones, and after,
/// so that it is awake when there is something to find.
void Loop::tell(Peer& peer, const std::string& message) {
    (void)doorbell_.ring(peer.incarnation_);
    driver_->notify(*peer.native_, message);
    (void)doorbell_.ring(peer.incarnation_);
}

void Loop::notify(Peer& peer, const std::string& message) {
    if (peer.state() != PeerState::kConnected) {
        throw Error("PeerLostError",
                    "peer '" + peer.name_ + "' is not connected: " + peer.reason());
    }
    try {
        tell(peer, message);
    } catch (const ConnectionLost& e) {
        lose(peer, PeerState::kLost, e.what(), e);
        throw;
    }
}

}  // namespace pynixlkv::transfer
