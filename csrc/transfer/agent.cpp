#include "transfer/agent.hpp"

#include <pthread.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): POSIX has more in it
#include <unistd.h>

#include <exception>
#include <thread>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "base/keep.hpp"
#include "transfer/loop.hpp"
#include "transfer/pairs.hpp"

namespace pynixlkv::transfer {

namespace {

/// How long a caller waits for the agent's thread to run a native call on its behalf.
constexpr auto kCallDeadline = std::chrono::seconds(60);

/// Blocks all signals in threads that are started meanwhile: signals belong to the application's.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;
    ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_{};
};

}  // namespace

Agent::Agent(std::string name, const DriverFactory& factory, const AgentOptions& options)
    : shared_(std::make_shared<SharedState>(std::move(name), options)), pid_(::getpid()) {
    auto started = std::make_shared<std::promise<void>>();
    auto ready = started->get_future();
    std::promise<bool> exited;
    exited_ = exited.get_future();
    {
        const SignalsBlocked blocked;
        std::thread([shared = shared_, factory = DriverFactory(factory), started,
                     exited = std::move(exited)]() mutable {
            auto loop = std::make_unique<Loop>(std::move(shared));
            const bool clean = loop->run(std::exchange(factory, nullptr), *started);
            if (!clean) {
                // Operations may still run: keep all that they touch.
                keep_for_ever<std::unique_ptr<Loop>>(std::move(loop));
            }
            exited.set_value_at_thread_exit(clean);
        }).detach();
    }
    if (ready.wait_for(kCallDeadline) != std::future_status::ready) {
        throw Error("StateError", "agent '" + shared_->name + "' did not start within " +
                                      seconds_text(kCallDeadline));
    }
    ready.get();
}

Agent::~Agent() {
    if (::getpid() != pid_) {
        // The thread does not exist in a forked child, and its locks may be held for ever.
        keep_for_ever<std::shared_ptr<SharedState>>(std::move(shared_));
        return;
    }
    shared_->queue.close();
}

void Agent::check_usable() const {
    if (::getpid() != pid_) {
        throw Error("ForkError", "agent '" + shared_->name +
                                     "' was made before fork(); make agents in the child instead");
    }
}

template <class F>
auto Agent::call(F function) -> std::invoke_result_t<F&, Loop&> {
    using Result = std::invoke_result_t<F&, Loop&>;
    check_usable();
    auto promise = std::make_shared<std::promise<Result>>();
    auto future = promise->get_future();
    shared_->queue.post([promise = std::move(promise), function = std::move(function)](Loop& loop) {
        try {
            if constexpr (std::is_void_v<Result>) {
                function(loop);
                promise->set_value();
            } else {
                promise->set_value(function(loop));
            }
        } catch (...) {
            promise->set_exception(std::current_exception());
        }
    });
    if (future.wait_for(kCallDeadline) != std::future_status::ready) {
        throw Error("StateError", "agent '" + shared_->name + "' did not answer within " +
                                      seconds_text(kCallDeadline) +
                                      "; its thread is inside a native call");
    }
    try {
        return future.get();
    } catch (const std::future_error&) {  // the thread ended before it came to the call
        throw Error("ClosedError", "agent '" + shared_->name + "' is closed");
    }
}

std::shared_ptr<Registration> Agent::register_memory(std::vector<Span> spans) {
    if (spans.empty()) {
        throw Error("ConfigError", "there is nothing to register: the list of spans is empty");
    }
    auto registration =
        std::make_shared<Registration>(shared_->next_id.fetch_add(1), std::move(spans));
    call([registration](Loop& loop) { loop.add_registration(registration); });
    return registration;
}

void Agent::deregister(const std::shared_ptr<Registration>& registration) {
    call([registration](Loop& loop) { loop.remove_registration(*registration); });
}

void Agent::check_registered(const std::vector<Row>& rows) const {
    check_usable();
    shared_->registrations.check(rows);
}

std::string Agent::metadata() {
    return call([](Loop& loop) { return loop.metadata(); });
}

std::shared_ptr<Peer> Agent::connect(const std::string& name, const std::string& incarnation,
                                     const std::string& metadata, const std::vector<Span>& spans) {
    return call([name, incarnation, metadata, spans](Loop& loop) {
        return loop.connect(name, incarnation, metadata, spans);
    });
}

bool Agent::is_alive(const std::shared_ptr<Peer>& peer) {
    return call([peer](Loop& loop) { return loop.is_alive(*peer); });
}

void Agent::disconnect(const std::shared_ptr<Peer>& peer) {
    call([peer](Loop& loop) { loop.disconnect(*peer); });
}

std::shared_ptr<Transfer> Agent::submit(Submission submission) {
    check_usable();
    const TimePoint now = Clock::now();
    if (submission.timeout <= Clock::duration::zero()) {
        throw Error("ConfigError", "the timeout of a transfer must be positive, not " +
                                       seconds_text(submission.timeout));
    }
    if (!submission.source) {
        check_pairs(submission.local_extents, submission.remote_extents, submission.op);
    }
    Active active;
    active.submitted = now;
    active.timeout = submission.timeout;
    // A timeout beyond the clock's range means "no practical limit"; it must not wrap around.
    active.deadline =
        submission.timeout < TimePoint::max() - now ? now + submission.timeout : TimePoint::max();
    active.remote_memory = submission.peer->cover(submission.remote_extents).memory;
    std::tie(active.local_memory, active.uses) =
        shared_->registrations.use(submission.local_extents);
    active.notify = std::move(submission.notify);
    active.source = std::move(submission.source);
    if (!active.source) {
        active.local = std::move(submission.local_extents);
        active.remote = std::move(submission.remote_extents);
    }
    auto transfer = std::make_shared<Transfer>(shared_->next_id.fetch_add(1), submission.op,
                                               std::move(submission.peer));
    active.transfer = transfer;
    shared_->num_running.fetch_add(1);
    try {
        shared_->queue.post(std::move(active));
    } catch (...) {
        shared_->num_running.fetch_sub(1);
        throw;
    }
    return transfer;
}

void Agent::cancel(const std::shared_ptr<Transfer>& transfer) {
    check_usable();
    transfer->cancel();
    shared_->queue.wake();
}

void Agent::watch(const std::shared_ptr<Transfer>& transfer) {
    check_usable();
    shared_->inbox.watch(*transfer);
}

std::vector<std::uint64_t> Agent::take_completed() {
    check_usable();
    return shared_->inbox.take_completed();
}

int Agent::completion_fd() const noexcept {
    return shared_->inbox.completion_fd();
}

void Agent::notify(const std::shared_ptr<Peer>& peer, std::string message) {
    call([peer, message = std::move(message)](Loop& loop) { loop.notify(*peer, message); });
}

std::vector<Notification> Agent::take_notifications(TimePoint until) {
    check_usable();
    return shared_->inbox.take(until);
}

std::uint64_t Agent::wait_activity(std::uint64_t seen, TimePoint until) const {
    check_usable();
    return shared_->inbox.wait_activity(seen, until);
}

void Agent::wake_waiters() const {
    shared_->inbox.announce();
}

std::size_t Agent::quarantined() const noexcept {
    return shared_->num_quarantined.load();
}
std::size_t Agent::running() const noexcept {
    return shared_->num_running.load();
}
const std::string& Agent::name() const noexcept {
    return shared_->name;
}

bool Agent::close(TimePoint until) {
    check_usable();
    shared_->queue.close();
    (void)exited_.wait_until(until);
    return is_closed();
}

bool Agent::is_closed() const noexcept {
    return exited_.wait_for(Clock::duration::zero()) == std::future_status::ready && exited_.get();
}

void Agent::stop(TimePoint until) {
    check_usable();
    shared_->queue.close(true);
    (void)exited_.wait_until(until);
}

}  // namespace pynixlkv::transfer
