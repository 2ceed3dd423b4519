#include "transfer/loop.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <span>
#include <thread>

#include "transfer/inherited.hpp"

namespace pynixlkv::transfer {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How the thread waits. It spins (yielding) while an event is likely within microseconds, then naps
// ever longer: a waiting transfer is polled at 20 kHz, then 2 kHz.
constexpr auto kSpinWithWork = milliseconds(5);
constexpr auto kNapWithWork = microseconds(50);
constexpr auto kStalled = milliseconds(100);
constexpr auto kNapStalled = microseconds(500);
constexpr auto kSpinWithoutWork = microseconds(100);
constexpr auto kLinger = milliseconds(2);
/// Longest sleep when senders may be unable to wake this agent: the bound on how late their
/// notifications are seen.
constexpr auto kSleep = milliseconds(1);
/// The same when all known senders wake this agent, or the library gives events.
constexpr auto kSleepUntilWoken = milliseconds(20);
/// Most native requests in flight at once.
constexpr std::size_t kWindow = 64;
/// A longer turn is a pause of the process, or of its host: nothing could be observed meanwhile.
constexpr auto kLongestStep = std::chrono::seconds(1);
/// A notification this long after the last wake-up came from a sender that cannot wake this agent.
constexpr auto kWakeIsOld = milliseconds(50);
/// How often to look whether processes of peers have ended.
constexpr auto kLookEvery = milliseconds(250);
/// A library without events does not tell whose connection has ended, so all peers are asked; but
/// not before the kernel has given up all connections to a silent host, because a message would
/// keep those.
constexpr auto kAskAfter = std::chrono::seconds(2);
/// Names without a peer whose generation is remembered.
constexpr std::size_t kMaxNames = 1U << 16U;

std::string bytes_text(std::uint64_t bytes) {
    char text[32];
    if (bytes >= (1U << 20U)) {
        std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1U << 20U));
    } else {
        std::snprintf(text, sizeof text, "%llu bytes", static_cast<unsigned long long>(bytes));
    }
    return text;
}

std::string describe(const Active& a) {
    const Transfer& t = *a.transfer;
    return std::string(t.op() == Op::kRead ? "READ from" : "WRITE to") + " peer '" +
           t.peer()->name() + "' (transfer " + std::to_string(t.id()) + ")";
}

void postpone(Active& a, Clock::duration missed) {
    a.deadline = a.deadline < TimePoint::max() - missed ? a.deadline + missed : a.deadline;
}

/// The transfer can no longer move any byte: its memory and its peer are free of it.
void let_go(Active& a) {
    a.uses.clear();
    --a.link->unquiet;
}

}  // namespace

bool Loop::run(DriverFactory factory, std::promise<void>& started) {
    ::pthread_setname_np(::pthread_self(), ("pnkv-" + shared_->name).substr(0, 15).c_str());
    ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // naps of 50 us should not become 100 us
    try {
        driver_ = std::exchange(factory, nullptr)();
    } catch (...) {
        started.set_exception(std::current_exception());
        return true;
    }
    keep_from_children();
    started.set_value();

    for (;;) {
        excuse_pause();
        look_for_dead_peers();
        bool busy = take_work();
        busy |= receive();
        for (Active& a : active_) {
            busy |= advance(a);
            busy |= receive();  // a post may have taken milliseconds
            excuse_pause();
        }
        settle();
        if (shared_->queue.is_stopped()) {
            break;
        }
        if (shared_->queue.is_finished()) {
            for (Active& a : active_) {
                end(a, State::kCancelled, describe(a) + " was cancelled: the agent was closed");
            }
            if (active_.empty()) {
                break;
            }
        }
        pause(busy);
    }
    const bool clean = shared_->queue.refuse_rest() && active_.empty();
    if (clean) {
        teardown();
    }
    return clean;
}

bool Loop::take_work() {
    shared_->queue.take(work_);
    const bool busy = !work_.commands.empty() || !work_.transfers.empty();
    for (auto& command : work_.commands) {
        command(*this);
    }
    work_.commands.clear();
    excuse_pause();  // what commands took is in the time that new transfers were queued
    for (Active& a : work_.transfers) {
        const auto queued = Clock::now() - a.submitted;
        a.transfer->update([&](TransferStats& stats) { stats.queued_ns = ns(queued); });
        if (queued > kLongestStep) {
            postpone(a, queued);
        }
        a.link = link_of(a.transfer->peer());
        ++a.link->unquiet;
        active_.push_back(std::move(a));
    }
    work_.transfers.clear();
    return busy;
}

/// Deadlines count only time in which this thread could see what arrived.
void Loop::excuse_pause() {
    const TimePoint before = std::exchange(now_, Clock::now());
    if (now_ - before <= kLongestStep) {
        return;
    }
    for (Active& a : active_) {
        postpone(a, std::min(now_ - before, now_ - a.submitted));
    }
}

/// Give a transfer its end state, once; later calls change nothing.
void Loop::end(Active& a, State state, const std::string& message,
               const std::optional<NativeError>& cause) {
    Transfer& t = *a.transfer;
    if (is_end(t.state())) {
        return;
    }
    const bool quiet = a.running.empty();
    // The counts change first: a caller that sees the end state must see them too.
    shared_->num_running.fetch_sub(1);
    if (quiet) {
        let_go(a);
    } else {
        shared_->num_quarantined.fetch_add(1);
    }
    t.end(state, message, cause, Clock::now() - a.submitted, quiet);
    shared_->inbox.report_end(t);
}

/// Run a step of a transfer. A failure ends the transfer, a lost connection all of the peer's.
/// @return what the step returned, true after a failure
template <class Step>
bool Loop::attempt(Active& a, Step step) {
    try {
        return step();
    } catch (const ConnectionLost& e) {
        lose(*a.link, PeerState::kLost, e.what(), e);
    } catch (const NativeError& e) {
        end(a, State::kFailed, describe(a) + " failed: " + e.what(), e);
    } catch (const std::exception& e) {
        end(a, State::kFailed, describe(a) + " failed: " + e.what());
    }
    return true;
}

void Loop::cut_rows(Active& a) const {
    const std::uint64_t limit = shared_->options.batch_bytes;
    const auto too_long = [limit](const Descriptor& row) { return row.length > limit; };
    if (std::none_of(a.local.begin(), a.local.end(), too_long)) {
        return;
    }
    std::vector<Descriptor> local;
    std::vector<Descriptor> remote;
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
    std::optional<kv::Expansion> expansion;
    if (a.tables) {
        // Vectors of an earlier transfer, whose pages the kernel has mapped already.
        a.local.swap(spare_local_);
        a.remote.swap(spare_remote_);
        expansion.emplace(*a.tables).emit(a.local, a.remote);
    }
    for (const Descriptor& row : a.local) {
        a.bytes += row.length;
    }
    if (expansion && a.tables->plan()->pool().can_prepare && !a.local.empty()) {
        choose_lists(a, *expansion);
    }
    if (a.prepared == nullptr) {
        cut_rows(a);
    }
    a.expanded = true;
    a.transfer->update([&](TransferStats& stats) {
        stats.expand_ns = ns(Clock::now() - begin);
        stats.bytes = a.bytes;
        stats.descriptors = a.size();
        stats.prepared = a.prepared != nullptr;
    });
    a.transfer->start();
}

/// Choose between rows and prepared rows by their measured costs. Indices name rows before merging,
/// so there may be far more of them, but each is cheaper. A plan is prepared once the accumulated
/// saving exceeds the cost of preparing it: a ski-rental rule.
void Loop::choose_lists(Active& a, const kv::Expansion& expansion) {
    const auto& plan = a.tables->plan();
    const auto num_indices = expansion.num_indices();
    const double saved_ns = costs_.row_ns * static_cast<double>(a.local.size()) -
                            costs_.index_ns * static_cast<double>(num_indices.value_or(0));
    if (!num_indices || saved_ns <= 0) {
        return;
    }
    if (!a.link->lists.contains(plan)) {
        std::erase_if(a.link->lists, [](const auto& entry) { return entry.first.expired(); });
    }
    Link::Lists& lists = a.link->lists[plan];
    if (!lists.prepared) {
        lists.regret_ns += saved_ns;
        const auto& sizes = plan->pool().sizes;
        if (lists.regret_ns < costs_.prepare_ns * static_cast<double>(sizes[0] + sizes[1])) {
            return;
        }
        const std::vector<Descriptor> local = plan->prepared_rows(kv::Side::kLocal);
        const std::vector<Descriptor> remote = plan->prepared_rows(kv::Side::kRemote);
        const TimePoint begin = Clock::now();
        lists.prepared =
            driver_->prepare(*a.link->connection, {local, remote, a.local_memory, a.remote_memory});
        Costs::learn(costs_.prepare_ns, Clock::now() - begin, local.size() + remote.size());
        if (!lists.prepared) {
            lists.regret_ns = 0;
            return;
        }
    }
    expansion.emit_indices(a.local_indices, a.remote_indices);
    a.prepared = lists.prepared.get();
    a.local.clear();
    a.remote.clear();
}

bool Loop::poll_running(Active& a) {
    bool busy = false;
    for (std::size_t i = 0; i < a.running.size();) {
        std::uint64_t arrived = 0;
        const bool ended = attempt(a, [&] {
            if (is_end(a.transfer->state()) && !a.running[i].xfer->has_begun()) {
                return true;
            }
            const bool done = a.running[i].xfer->poll();
            arrived = done ? a.running[i].bytes : 0;
            return done;
        });
        if (!ended) {
            ++i;
            continue;
        }
        busy = true;
        a.running[i] = std::move(a.running.back());
        a.running.pop_back();
        --num_xfers_;
        a.transfer->update([&](TransferStats& stats) { stats.bytes_done += arrived; });
    }
    return busy;
}

/// Hand at most one batch to the library, so that transfers take turns.
bool Loop::start_batch(Active& a) {
    const AgentOptions& options = shared_->options;
    const std::size_t size = a.size();
    if (a.next >= size || num_xfers_ >= kWindow || !a.link->connection->has_room()) {
        return false;
    }
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    if (a.prepared != nullptr) {
        const std::uint64_t mean = std::max<std::uint64_t>(a.bytes / size, 1);
        count = std::clamp<std::size_t>(options.batch_bytes / mean, 1, options.batch_rows);
        count = std::min(count, size - a.next);
        // The mean is exact in sum: the last batch takes what the others left.
        bytes = a.next + count == size ? a.bytes - mean * a.next : mean * count;
    } else {
        while (a.next + count < size && count < options.batch_rows &&
               (count == 0 || bytes + a.local[a.next + count].length <= options.batch_bytes)) {
            bytes += a.local[a.next + count++].length;
        }
    }
    const TimePoint begin = Clock::now();
    auto xfer = make_xfer(a, count);
    const TimePoint made = Clock::now();
    xfer->post();
    const TimePoint posted = Clock::now();
    Costs::learn(a.prepared != nullptr ? costs_.index_ns : costs_.row_ns, made - begin, count);
    a.running.push_back({std::move(xfer), bytes});
    ++num_xfers_;
    a.next += count;
    a.transfer->update([&](TransferStats& stats) {
        stats.make_ns += ns(made - begin);
        stats.post_ns += ns(posted - made);
        ++stats.batches;
    });
    return true;
}

std::unique_ptr<NativeXfer> Loop::make_xfer(Active& a, std::size_t count) const {
    Connection& connection = *a.link->connection;
    const Op op = a.transfer->op();
    const auto part = [&](const auto& whole) { return std::span(whole).subspan(a.next, count); };
    if (a.prepared != nullptr) {
        return driver_->make(connection, op, *a.prepared,
                             {part(a.local_indices), part(a.remote_indices)});
    }
    return driver_->make(connection, op,
                         {part(a.local), part(a.remote), a.local_memory, a.remote_memory});
}

bool Loop::advance(Active& a) {
    const Transfer& t = *a.transfer;
    const bool polled = poll_running(a);
    if (is_end(t.state())) {
        return polled;
    }
    if (t.is_cancelled()) {
        end(a, State::kCancelled, describe(a) + " was cancelled by its owner");
        return true;
    }
    const Peer& peer = *t.peer();
    if (peer.state() == PeerState::kLost) {
        end(a, State::kPeerLost, describe(a) + " failed: the peer is lost: " + peer.reason());
        return true;
    }
    if (!peer.is_connected()) {
        end(a, State::kCancelled, describe(a) + " was cancelled: the peer was disconnected");
        return true;
    }
    if (!a.link->connection) {
        end(a, State::kFailed, describe(a) + " failed: the peer is one of another agent");
        return true;
    }
    if (now_ >= a.deadline && !a.is_moved()) {
        const TransferStats stats = t.stats();
        std::string message = describe(a) + " did not end within " + seconds_text(a.timeout) +
                              ": " + bytes_text(stats.bytes_done) + " of " +
                              bytes_text(stats.bytes) + " are known to have arrived";
        if (!a.running.empty()) {
            message += "; its buffers stay quarantined until the library reports the rest as ended";
        }
        end(a, State::kTimedOut, message);
        return true;
    }
    const bool advanced = attempt(a, [&] {
        if (!a.expanded) {
            make_rows(a);
        }
        const bool started = start_batch(a);
        if (!a.is_moved()) {
            return started;
        }
        if (a.notify) {
            tell(*a.link, *a.notify);
        }
        end(a, State::kDone, {});
        return true;
    });
    return polled || advanced;
}

/// Release what has become quiet: transfers first, then the connections that wait for them.
void Loop::settle() {
    std::erase_if(active_, [this](Active& a) {
        Transfer& t = *a.transfer;
        if (!is_end(t.state()) || !a.running.empty()) {
            return false;
        }
        if (!t.is_quiet()) {
            let_go(a);
            shared_->num_quarantined.fetch_sub(1);
            t.become_quiet();
            shared_->inbox.announce();
        }
        if (a.local.capacity() > spare_local_.capacity()) {
            a.local.swap(spare_local_);
            a.remote.swap(spare_remote_);
        }
        return true;
    });
    std::erase_if(ended_, [this](const std::shared_ptr<Link>& link) {
        if (link->unquiet > 0) {
            return false;
        }
        link->drop();
        const Peer& peer = *link->peer;
        if (const auto found = links_.find(peer.name());
            found != links_.end() && found->second == link) {
            links_.erase(found);
            if (generations_.insert_or_assign(peer.name(), peer.generation()).second) {
                names_.push_back(peer.name());
            }
        }
        return true;
    });
    for (; names_.size() > kMaxNames; names_.pop_front()) {
        generations_.erase(names_.front());
    }
}

/// An idle connection breaks without anybody asking. That of a dead process stands while a child of
/// it holds it open.
void Loop::look_for_dead_peers() {
    if (now_ - last_look_ < kLookEvery) {
        return;
    }
    last_look_ = now_;
    if (const auto closed = keep_from_children();
        std::exchange(num_closed_, closed) != closed && driver_->event_fd() < 0) {
        ask_at_ = now_ + kAskAfter;
    }
    const bool asks = now_ >= ask_at_;
    ask_at_ = asks ? TimePoint::max() : ask_at_;
    for (auto& [name, link] : links_) {
        if (link->process && link->process->has_ended()) {
            lose(*link, PeerState::kLost, "its process has ended");
        } else if (link->connection && link->connection->has_failed()) {
            lose(*link, PeerState::kLost, "the connection is dead");
        } else if (asks && !link->process && link->unquiet == 0) {
            (void)is_alive(*link->peer);
        }
    }
}

bool Loop::receive() {
    bool worked = false;
    try {
        worked = driver_->receive(arrivals_);
    } catch (const Error& e) {
        shared_->inbox.fail(e);
        return false;
    } catch (const std::exception& e) {
        shared_->inbox.fail(Error("StateError", e.what()));
        return false;
    }
    if (arrivals_.empty()) {
        return worked;
    }
    if (shared_->wake_socket.take()) {
        last_wake_ = Clock::now();
    }
    all_wake_ &= Clock::now() - last_wake_ < kWakeIsOld;
    shared_->inbox.deliver(arrivals_);
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
    if (shared_->num_running.load() > 0) {
        if (quiet_for < kSpinWithWork) {
            std::this_thread::yield();
            return;
        }
        nap = quiet_for < kStalled ? Clock::duration(kNapWithWork) : Clock::duration(kNapStalled);
    } else if (quiet_for < kSpinWithoutWork) {
        std::this_thread::yield();
        return;
    } else if (quiet_for < kLinger) {
        nap = kNapWithWork;
    } else {
        const bool is_woken = !driver_->needs_polling() && (all_wake_ || driver_->event_fd() >= 0);
        nap = is_woken ? kSleepUntilWoken : kSleep;
    }
    sleep(nap);
}

/// Sleep until there is work, a peer wakes this agent, or the time is over.
void Loop::sleep(Clock::duration longest) {
    if (!driver_->arm() || !shared_->queue.begin_sleep(active_.empty())) {
        return;
    }
    // A descriptor of -1 is never ready.
    std::array<pollfd, 4> fds{
        pollfd{shared_->queue.fd(), POLLIN, 0}, pollfd{shared_->wake_socket.fd(), POLLIN, 0},
        pollfd{now_ < identity_rests_until_ ? -1 : shared_->identity.fd(), POLLIN, 0},
        pollfd{driver_->event_fd(), POLLIN, 0}};
    const timespec timeout{0, static_cast<long>(std::min(ns(longest), std::int64_t{999'999'999}))};
    const int num_ready = ::ppoll(fds.data(), fds.size(), &timeout, nullptr);
    const int error = errno;
    shared_->queue.end_sleep(num_ready > 0 && fds[0].revents != 0);
    if (num_ready < 0 && error != EINTR) {
        // Fewer descriptors than these may be open, or the system has no memory.
        std::this_thread::sleep_for(std::min(longest, Clock::duration(kSleep)));
    }
    if (num_ready <= 0) {
        return;
    }
    last_activity_ = Clock::now();
    if (fds[1].revents != 0 && shared_->wake_socket.take()) {
        last_wake_ = last_activity_;
    }
    if (fds[2].revents != 0 && !shared_->identity.clear()) {
        identity_rests_until_ = last_activity_ + kLookEvery;
    }
}

/// Give everything back, in the order that libraries demand: connections, memory, agent.
void Loop::teardown() {
    for (auto& [name, link] : links_) {
        lose(*link, PeerState::kDisconnected, "the agent was closed");
        link->drop();
    }
    ended_.clear();
    links_.clear();
    shared_->registrations.close_all();
    registered_.clear();
    driver_.reset();
}

// ---- registered memory

void Loop::add_registration(const std::shared_ptr<Registration>& registration) {
    shared_->registrations.add(registration, [&] {
        registered_.emplace(registration->id(), driver_->register_memory(registration->spans()));
    });
}

void Loop::remove_registration(Registration& registration) {
    shared_->registrations.remove(registration);
    forget_lists();
    registered_.erase(registration.id());
}

/// Prepared rows hold on to memory, so they go before it does; they come back when they pay.
void Loop::forget_lists() {
    for (auto& [name, link] : links_) {
        std::erase_if(link->lists, [this](const auto& entry) {
            return std::none_of(active_.begin(), active_.end(), [&](const Active& a) {
                return a.prepared != nullptr && a.prepared == entry.second.prepared.get();
            });
        });
    }
}

// ---- peers

std::shared_ptr<Link> Loop::link_of(const std::shared_ptr<Peer>& peer) const {
    const auto found = links_.find(peer->name());
    if (found != links_.end() && found->second->peer == peer) {
        return found->second;
    }
    auto link = std::make_shared<Link>();
    link->peer = peer;
    return link;
}

std::shared_ptr<Peer> Loop::connect(const std::string& name, const std::string& incarnation,
                                    const std::string& metadata, const std::vector<Span>& spans) {
    MemoryMap memory;
    memory.add(0, spans);
    if (std::any_of(spans.begin(), spans.end(),
                    [](const Span& span) { return span.memory == Memory::kVram; })) {
        driver_->expect_device_memory();
    }
    std::uint64_t generation = 1;
    if (const auto found = links_.find(name); found != links_.end()) {
        Link& old = *found->second;
        if (old.peer->is_connected() && old.peer->incarnation() == incarnation) {
            forget_lists();
            driver_->refresh(*old.connection, metadata);
            old.peer->set_memory(std::move(memory));
            return old.peer;
        }
        if (old.peer->is_connected()) {
            if (is_alive(*old.peer)) {
                throw Error("DuplicatePeerError",
                            "another live agent named '" + name +
                                "' is connected; agent names must be unique, or disconnect() the "
                                "other one first");
            }
        }
        const std::shared_ptr<Link> kept = found->second;  // settle() drops it if it is quiet
        settle();
        if (kept->connection) {
            throw Error("StateError", std::to_string(kept->unquiet) +
                                          " transfers to the previous generation of peer '" + name +
                                          "' are not quiet yet; connect again when they are");
        }
    }
    if (const auto found = generations_.find(name); found != generations_.end()) {
        generation = found->second + 1;
    }
    auto link = std::make_shared<Link>();
    link->peer = std::make_shared<Peer>(name, incarnation, generation, std::move(memory));
    auto process = PeerProcess::of(incarnation);
    link->connection =
        driver_->connect(name, metadata, process ? std::optional(process->id()) : std::nullopt);
    link->peer->set_way(link->connection->transports(), process.has_value());
    link->process = std::move(process);
    links_[name] = link;
    all_wake_ &= shared_->wake_socket.wake_peer(incarnation);
    if (driver_->event_fd() < 0) {
        ask_at_ = Clock::now() + kAskAfter;  // its connection may end before it is looked at
    }
    return link->peer;
}

/// A file is a peer that nobody is behind: no process to watch, none to wake.
std::shared_ptr<Peer> Loop::open_file(const std::string& name, int fd, const Span& span) {
    if (links_.contains(name)) {
        throw Error("DuplicatePeerError", "'" + name + "' is open or connected already");
    }
    MemoryMap memory;
    memory.add(0, {&span, 1});
    auto link = std::make_shared<Link>();
    link->peer = std::make_shared<Peer>(name, std::string(), 1, std::move(memory));
    link->connection = driver_->open_file(fd);
    links_[name] = link;
    return link->peer;
}

Link& Loop::connected(const Peer& peer) const {
    const auto found = links_.find(peer.name());
    if (found == links_.end() || found->second->peer.get() != &peer) {
        throw Error("ConfigError", "peer '" + peer.name() + "' is one of another agent than '" +
                                       shared_->name + "', which cannot use it");
    }
    return *found->second;
}

bool Loop::is_alive(const Peer& peer) {
    if (!peer.is_connected()) {
        return false;
    }
    Link& link = connected(peer);
    if ((link.process && link.process->has_ended()) || !driver_->is_alive(*link.connection)) {
        lose(link, PeerState::kLost, "the connection is dead");
        return false;
    }
    return true;
}

void Loop::disconnect(const Peer& peer) {
    if (peer.is_connected()) {
        lose(connected(peer), PeerState::kDisconnected, "the peer was disconnected");
    }
}

void Loop::notify(const Peer& peer, const std::string& message) {
    if (!peer.is_connected()) {
        throw Error("PeerLostError",
                    "peer '" + peer.name() + "' is not connected: " + peer.reason());
    }
    Link& link = connected(peer);
    try {
        tell(link, message);
    } catch (const ConnectionLost& e) {
        lose(link, PeerState::kLost, e.what(), e);
        throw;
    }
}

/// Send a notification between two wake-ups. By the first the receiver knows that this sender can
/// wake it; by the second it is awake when the notification is there.
void Loop::tell(Link& link, const std::string& message) {
    (void)shared_->wake_socket.wake_peer(link.peer->incarnation());
    driver_->notify(*link.connection, message);
    (void)shared_->wake_socket.wake_peer(link.peer->incarnation());
}

/// End a connection, and all its transfers with one reason.
void Loop::lose(Link& link, PeerState state, const std::string& reason,
                const std::optional<NativeError>& cause) {
    if (!link.peer->is_connected()) {
        return;
    }
    driver_->shut_out(*link.connection);
    link.peer->set_state(state, reason);
    link.process.reset();
    ended_.push_back(links_.at(link.peer->name()));  // a connected peer's link is there
    for (Active& a : active_) {
        if (a.link.get() != &link) {
            continue;
        }
        if (state == PeerState::kLost) {
            end(a, State::kPeerLost, describe(a) + " failed: the peer is lost: " + reason, cause);
        } else {
            end(a, State::kCancelled, describe(a) + " was cancelled: " + reason, cause);
        }
    }
}

}  // namespace pynixlkv::transfer
