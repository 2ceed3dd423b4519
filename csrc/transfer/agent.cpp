#include "transfer/agent.hpp"

#include <pthread.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): POSIX has more in it
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "base/keep.hpp"
#include "base/mappings.hpp"
#include "transfer/loop.hpp"

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
    ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_{};
};

/// Refuse rows of a caller that cannot be moved: pairs that do not match, empty rows, and rows that
/// overlap on the written side.
void check_pairs(const std::vector<Descriptor>& local, const std::vector<Descriptor>& remote,
                 Op op) {
    if (local.size() != remote.size()) {
        throw Error("PlanError", text(local.size(), " local rows do not pair with ", remote.size(),
                                      " remote rows"));
    }
    for (std::size_t i = 0; i < local.size(); ++i) {
        if (local[i].length != remote[i].length) {
            throw Error("PlanError", text("row ", i, ": the local length ", local[i].length,
                                          " differs from the remote length ", remote[i].length));
        }
        if (local[i].length == 0) {
            throw Error("PlanError", text("row ", i, " has length 0; leave empty rows out"));
        }
    }
    const std::vector<Descriptor>& written = op == Op::kRead ? local : remote;
    const auto overlap = [](const Descriptor& a, const Descriptor& b) {
        return a.device == b.device && b.address < a.address + a.length;
    };
    bool ascending = true;
    for (std::size_t i = 1; ascending && i < written.size(); ++i) {
        ascending = std::pair(written[i - 1].device, written[i - 1].address) <
                        std::pair(written[i].device, written[i].address) &&
                    !overlap(written[i - 1], written[i]);
    }
    if (ascending) {
        return;
    }
    std::vector<std::size_t> order(written.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return std::pair(written[a].device, written[a].address) <
               std::pair(written[b].device, written[b].address);
    });
    for (std::size_t i = 1; i < order.size(); ++i) {
        if (overlap(written[order[i - 1]], written[order[i]])) {
            throw Error(
                "PlanError",
                text("rows ", order[i - 1], " and ", order[i],
                     " overlap on the written side; each destination byte may be written once"));
        }
    }
}

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
                                     "' was made before fork(); start the child with the method "
                                     "`spawn`, or fork before the first agent is made");
    }
}

template <class F>
auto Agent::call(F function) -> std::invoke_result_t<F&, Loop&> {
    using Result = std::invoke_result_t<F&, Loop&>;
    check_usable();
    auto task = std::make_shared<std::packaged_task<Result(Loop&)>>(std::move(function));
    auto future = task->get_future();
    shared_->queue.post([task = std::move(task)](Loop& loop) { (*task)(loop); });
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
    const Mappings mappings = Mappings::now();
    for (Span& span : spans) {
        if (span.memory == Memory::kDram && !mappings.empty()) {
            const auto range = mappings.describe(span.row.address, span.row.length);
            span.is_read_only |= !range.is_writable;
            span.is_fragile = range.is_of_file || range.length < span.row.length;
        }
    }
    auto registration =
        std::make_shared<Registration>(shared_->next_id.fetch_add(1), std::move(spans));
    call([registration](Loop& loop) { loop.add_registration(registration); });
    return registration;
}

void Agent::deregister(const std::shared_ptr<Registration>& registration) {
    call([registration](Loop& loop) { loop.remove_registration(*registration); });
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

std::shared_ptr<Peer> Agent::open_file(const std::string& name, int fd, const Span& span) {
    return call([name, fd, span](Loop& loop) { return loop.open_file(name, fd, span); });
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
    // Ranges that contain every row of the transfer.
    const std::vector<Descriptor>* local = &submission.local;
    const std::vector<Descriptor>* remote = &submission.remote;
    if (submission.tables) {
        const kv::Plan& plan = *submission.tables->plan();
        submission.tables->check_written_once(submission.op == Op::kRead ? kv::Side::kLocal
                                                                         : kv::Side::kRemote);
        local = &plan.extents(kv::Side::kLocal);
        remote = &plan.extents(kv::Side::kRemote);
    } else {
        check_pairs(*local, *remote, submission.op);
    }
    Active active;
    active.submitted = now;
    active.timeout = submission.timeout;
    // A timeout beyond the clock's range means "no practical limit"; it must not wrap around.
    active.deadline =
        submission.timeout < TimePoint::max() - now ? now + submission.timeout : TimePoint::max();
    active.remote_memory = submission.peer->cover(*remote, submission.op == Op::kWrite).memory;
    std::tie(active.local_memory, active.uses) =
        shared_->registrations.use(*local, submission.op == Op::kRead);
    active.notify = std::move(submission.notify);
    active.tables = std::move(submission.tables);
    active.local = std::move(submission.local);
    active.remote = std::move(submission.remote);
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

void Agent::notify(const std::shared_ptr<Peer>& peer, std::string message) {
    call([peer, message = std::move(message)](Loop& loop) { loop.notify(*peer, message); });
}

}  // namespace pynixlkv::transfer
