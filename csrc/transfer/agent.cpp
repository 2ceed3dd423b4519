#include "transfer/agent.hpp"

#include <pthread.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): POSIX has more in it
#include <unistd.h>

#include <exception>
#include <future>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/keep.hpp"
#include "transfer/loop.hpp"
#include "transfer/pairs.hpp"

namespace pynixlkv::transfer {

namespace {

/// How long a caller waits for the agent's thread to run a native call on its behalf.
constexpr auto kCallDeadline = std::chrono::seconds(60);

}  // namespace

std::string Peer::reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
}

bool Transfer::wait(TimePoint until, bool for_quiet) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, until,
                               [&] { return for_quiet ? is_quiet() : is_end(state()); });
}

TransferStats Transfer::stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
}

std::string Transfer::message() const {
    const std::lock_guard lock(mutex_);
    return message_;
}

std::optional<NativeError> Transfer::cause() const {
    const std::lock_guard lock(mutex_);
    return cause_;
}

Agent::Agent(std::string name, const DriverFactory& factory, const AgentOptions& options)
    : loop_(std::make_shared<Loop>(std::move(name), options)), pid_(::getpid()) {
    auto started = std::make_shared<std::promise<void>>();
    auto ready = started->get_future();
    // Signals belong to the application's threads.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        std::promise<bool> exited;
        exited_ = exited.get_future();
        std::thread([loop = loop_, factory, started, exited = std::move(exited)]() mutable {
            exited.set_value_at_thread_exit(loop->run(std::move(factory), *started));
        }).detach();
    } catch (...) {
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (ready.wait_for(kCallDeadline) != std::future_status::ready) {
        throw Error("StateError", "agent '" + loop_->name_ + "' did not start within " +
                                      seconds_text(kCallDeadline));
    }
    ready.get();
}

Agent::~Agent() {
    if (::getpid() != pid_) {
        // The thread does not exist in a forked child, and its locks may be held for ever.
        keep_for_ever<std::shared_ptr<Loop>>(std::move(loop_));
        return;
    }
    {
        const std::lock_guard lock(loop_->mutex_);
        loop_->closing_ = true;
    }
    loop_->wake();
}

void Agent::check_usable() const {
    if (::getpid() != pid_) {
        throw Error("ForkError", "agent '" + loop_->name_ +
                                     "' was made before fork(); make agents in the child instead");
    }
}

template <class F>
auto Agent::call(F function) -> decltype(function()) {
    using Result = decltype(function());
    check_usable();
    auto promise = std::make_shared<std::promise<Result>>();
    auto future = promise->get_future();
    loop_->post([promise, function = std::move(function)]() mutable {
        try {
            if constexpr (std::is_void_v<Result>) {
                function();
                promise->set_value();
            } else {
                promise->set_value(function());
            }
        } catch (...) {
            promise->set_exception(std::current_exception());
        }
    });
    if (future.wait_for(kCallDeadline) != std::future_status::ready) {
        throw Error("StateError", "agent '" + loop_->name_ + "' did not answer within " +
                                      seconds_text(kCallDeadline) +
                                      "; its thread is inside a native call");
    }
    try {
        return future.get();
    } catch (const std::future_error&) {  // the thread ended before it came to the call
        throw Error("ClosedError", "agent '" + loop_->name_ + "' is closed");
    }
}

std::shared_ptr<Registration> Agent::register_memory(std::vector<Span> spans) {
    if (spans.empty()) {
        throw Error("ConfigError", "there is nothing to register: the list of spans is empty");
    }
    auto registration =
        std::make_shared<Registration>(loop_->next_id_.fetch_add(1), std::move(spans));
    return call([loop = loop_, registration] { return loop->add_registration(registration); });
}

void Agent::deregister(const std::shared_ptr<Registration>& registration) {
    call([loop = loop_, registration] { loop->remove_registration(*registration); });
}

void Agent::check_registered(const std::vector<Row>& rows) const {
    check_usable();
    const std::shared_lock lock(loop_->memory_mutex_);
    (void)loop_->memory_.cover(rows, "of agent '" + loop_->name_ + "'");
}

std::string Agent::metadata() {
    return call([loop = loop_] { return loop->driver_->metadata(); });
}

std::shared_ptr<Peer> Agent::connect(const std::string& name, const std::string& incarnation,
                                      const std::string& metadata, const std::vector<Span>& spans) {
    return call([loop = loop_, name, incarnation, metadata, spans] {
        return loop->connect(name, incarnation, metadata, spans);
    });
}

bool Agent::is_alive(const std::shared_ptr<Peer>& peer) {
    return call([loop = loop_, peer] {
        if (peer->state() != PeerState::kConnected) {
            return false;
        }
        if (!loop->driver_->is_alive(*peer->native_)) {
            loop->lose(*peer, PeerState::kLost, "the connection is dead", {});
            return false;
        }
        return true;
    });
}

void Agent::disconnect(const std::shared_ptr<Peer>& peer) {
    call([loop = loop_, peer] {
        loop->lose(*peer, PeerState::kDisconnected, "the peer was disconnected", {});
    });
}

std::shared_ptr<Transfer> Agent::submit(Request request) {
    check_usable();
    const TimePoint now = Clock::now();
    if (request.timeout <= Clock::duration::zero()) {
        throw Error("ConfigError", "the timeout of a transfer must be positive, not " +
                                       seconds_text(request.timeout));
    }
    if (!request.source) {
        check_pairs(request.local_extents, request.remote_extents, request.op);
    }
    const auto& peer = request.peer;
    MemoryMap::Cover remote;
    {
        const std::lock_guard lock(peer->mutex_);
        if (peer->state() != PeerState::kConnected) {
            throw Error(peer->state() == PeerState::kLost ? "PeerLostError" : "StalePeerError",
                        "generation " + std::to_string(peer->generation_) + " of peer '" +
                            peer->name_ + "' is not connected any more: " + peer->reason_ +
                            "; connect() again");
        }
        remote = peer->memory_.cover(request.remote_extents, "of peer '" + peer->name_ + "'");
    }
    auto transfer = std::shared_ptr<Transfer>(
        new Transfer(loop_->next_id_.fetch_add(1), request.op, request.peer));
    Active active;
    active.transfer = transfer;
    active.submitted = now;
    active.timeout = request.timeout;
    // A timeout beyond the clock's range means "no practical limit"; it must not wrap around.
    active.deadline =
        request.timeout < TimePoint::max() - now ? now + request.timeout : TimePoint::max();
    active.notify = std::move(request.notify);
    active.remote_memory = remote.memory;
    {
        const std::shared_lock lock(loop_->memory_mutex_);
        const auto local =
            loop_->memory_.cover(request.local_extents, "of agent '" + loop_->name_ + "'");
        active.local_memory = local.memory;
        for (const MemoryMap::Owner owner : local.owners) {
            active.uses.push_back(loop_->registrations_.at(owner));
        }
        for (const auto& registration : active.uses) {
            registration->uses_.fetch_add(1);
        }
    }
    active.source = std::move(request.source);
    if (!active.source) {
        active.local = std::move(request.local_extents);
        active.remote = std::move(request.remote_extents);
    }
    {
        const std::lock_guard lock(loop_->mutex_);
        if (loop_->closing_) {
            for (const auto& registration : active.uses) {
                registration->uses_.fetch_sub(1);
            }
            throw Error("ClosedError", "agent '" + loop_->name_ + "' is closed");
        }
        loop_->queued_.push_back(std::move(active));
        loop_->num_running_.fetch_add(1);
    }
    loop_->wake();
    return transfer;
}

void Agent::cancel(const std::shared_ptr<Transfer>& transfer) {
    check_usable();
    transfer->cancel_.store(true);
    loop_->wake();
}

void Agent::watch(const std::shared_ptr<Transfer>& transfer) {
    check_usable();
    const std::lock_guard lock(loop_->inbox_mutex_);
    transfer->watched_.store(true);
    if (is_end(transfer->state()) && transfer->watched_.exchange(false)) {
        loop_->completed_.push_back(transfer->id_);
        loop_->completion_.set();
    }
}

std::vector<std::uint64_t> Agent::take_completed() {
    check_usable();
    std::vector<std::uint64_t> ids;
    const std::lock_guard lock(loop_->inbox_mutex_);
    loop_->completion_.clear();
    ids.swap(loop_->completed_);
    return ids;
}

int Agent::completion_fd() const noexcept {
    return loop_->completion_.fd();
}

void Agent::notify(const std::shared_ptr<Peer>& peer, std::string message) {
    call([loop = loop_, peer, message = std::move(message)] { loop->notify(*peer, message); });
}

std::vector<Notification> Agent::take_notifications(TimePoint until) {
    check_usable();
    std::vector<Notification> taken;
    std::unique_lock lock(loop_->inbox_mutex_);
    loop_->arrived_.wait_until(lock, until,
                               [this] { return !loop_->inbox_.empty() || loop_->receive_error_; });
    taken.swap(loop_->inbox_);
    if (taken.empty() && loop_->receive_error_) {
        const Error error = *loop_->receive_error_;
        loop_->receive_error_.reset();
        throw Error(error);
    }
    return taken;
}

std::uint64_t Agent::wait_activity(std::uint64_t seen, TimePoint until) const {
    check_usable();
    std::unique_lock lock(loop_->inbox_mutex_);
    loop_->arrived_.wait_until(lock, until, [&] { return loop_->activity_ != seen; });
    return loop_->activity_;
}

void Agent::wake_waiters() const {
    loop_->announce();
}

std::size_t Agent::quarantined() const noexcept {
    return loop_->num_quarantined_.load();
}
std::size_t Agent::running() const noexcept {
    return loop_->num_running_.load();
}
const std::string& Agent::name() const noexcept {
    return loop_->name_;
}

bool Agent::close(TimePoint until) {
    check_usable();
    {
        const std::lock_guard lock(loop_->mutex_);
        loop_->closing_ = true;
    }
    loop_->wake();
    (void)exited_.wait_until(until);
    return is_closed();
}

bool Agent::is_closed() const noexcept {
    return exited_.wait_for(Clock::duration::zero()) == std::future_status::ready && exited_.get();
}

void Agent::stop(TimePoint until) {
    check_usable();
    {
        const std::lock_guard lock(loop_->mutex_);
        loop_->closing_ = true;
        loop_->stop_ = true;
    }
    loop_->wake();
    (void)exited_.wait_until(until);
}

}  // namespace pynixlkv::transfer
