#include "nixl/request.hpp"

#include <chrono>
#include <thread>

#include "base/error.hpp"

namespace pynixlkv::nixl {

namespace {

constexpr Duration kPollInterval = std::chrono::microseconds(50);

}  // namespace

// ---- RequestBody

RequestBody::~RequestBody() {
    if (local) {
        --local->num_users_;
        --remote->num_users_;
    }
}

void RequestBody::use(std::shared_ptr<PreparedList> local_list,
                      std::shared_ptr<PreparedList> remote_list) {
    for (const auto* list : {&local_list, &remote_list}) {
        if ((*list)->is_released()) {
            throw Error("ClosedError", text("make_xfer_req: ", (*list)->str(), " was released"));
        }
    }
    local = std::move(local_list);
    remote = std::move(remote_list);
    ++local->num_users_;
    ++remote->num_users_;
}

Status RequestBody::poll() noexcept {
    if (!running) {
        return Status::kSuccess;
    }
    const Status status = agent.library().fn().get_xfer_status(agent.handle_, handle);
    running = status == Status::kInProgress;
    return status;
}

Status RequestBody::free() noexcept {
    if (handle == nullptr) {
        return Status::kSuccess;
    }
    const Status status = agent.library().fn().release_xfer_req(agent.handle_, handle);
    if (status == Status::kSuccess) {
        (void)agent.library().fn().destroy_xfer_req(std::exchange(handle, nullptr));
    }
    return status;
}

// ---- Request

Request::Request(Private /*unused*/, std::shared_ptr<Agent> agent, Operation operation,
                 std::string peer, std::uint64_t generation, std::size_t num_descriptors,
                 std::uint64_t num_bytes, std::unique_ptr<RequestBody> body)
    : agent_(std::move(agent)),
      operation_(operation),
      peer_(std::move(peer)),
      generation_(generation),
      num_descriptors_(num_descriptors),
      num_bytes_(num_bytes),
      body_(std::move(body)) {
    ++agent_->num_requests_;
}

Request::~Request() {
    if (state_ == RequestState::kReleased) {
        return;
    }
    --agent_->num_requests_;
    if (!agent_->process_.is_here() || body_->handle == nullptr) {
        return;
    }
    {
        const Agent::Call call(*agent_, mutex_, std::try_to_lock);
        if (call.is_locked() && body_->poll() != Status::kInProgress &&
            body_->free() == Status::kSuccess) {
            return;
        }
    }
    agent_->park(std::move(body_));
}

std::string Request::about() const {
    return text(agent_->about(peer_), ", ", operation_ == Operation::kRead ? "READ" : "WRITE",
                " of ", num_bytes_, " bytes in ", num_descriptors_, " descriptors");
}

void Request::require_live(const char* call) const {
    if (state_ == RequestState::kReleased) {
        throw Error("ClosedError", text(call, ": the request was released (", about(), ")"));
    }
}

RequestState Request::enter(Status status, const char* call) {
    if (status == Status::kInProgress) {
        state_ = RequestState::kPending;
    } else if (status == Status::kSuccess) {
        state_ = RequestState::kDone;
    } else {
        state_ = RequestState::kFailed;
        failure_ = status;
        failed_call_ = call;
        agent_->library().fail(status, call, about());
    }
    return state_;
}

RequestState Request::post(const std::optional<std::string>& notification) {
    Owned<capi::OptArgs> args;
    if (notification) {
        args = make_opt_args(agent_->library(), {.notification = notification});
    }
    const Agent::Call call(*agent_, "post_xfer_req", &mutex_);
    require_live("post_xfer_req");
    if (state_ == RequestState::kPending) {
        throw Error("StateError", text("post_xfer_req: the request is running (", about(), ")"));
    }
    agent_->require_fresh(peer_, generation_, "the request");
    const Status status =
        agent_->library().fn().post_xfer_req(agent_->handle_, body_->handle, args.get());
    body_->running = status == Status::kInProgress;
    return enter(status, "post_xfer_req");
}

RequestState Request::poll() {
    const Agent::Call call(*agent_, "get_xfer_status", &mutex_);
    require_live("get_xfer_status");
    if (state_ == RequestState::kFailed) {
        agent_->library().fail(failure_, failed_call_, about());
    }
    if (state_ != RequestState::kPending) {
        return state_;
    }
    return enter(body_->poll(), "get_xfer_status");
}

RequestState Request::give_up(bool may_park) {
    std::unique_ptr<RequestBody> body;  // goes after the lock
    const Agent::Call call(*agent_, "release_xfer_req", &mutex_);
    require_live("release_xfer_req");
    const bool is_running = body_->poll() == Status::kInProgress;
    if (is_running && !may_park) {
        return RequestState::kPending;
    }
    if (!is_running) {
        agent_->library().check(body_->free(), "release_xfer_req", [this] { return about(); });
    }
    state_ = RequestState::kReleased;
    --agent_->num_requests_;
    body = std::move(body_);
    if (is_running) {
        agent_->park(std::move(body));
        return RequestState::kPending;
    }
    return RequestState::kReleased;
}

bool Request::release(Duration patience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    for (;;) {
        const bool may_park = std::chrono::steady_clock::now() >= deadline;
        const RequestState bytes = give_up(may_park);
        if (may_park || bytes == RequestState::kReleased) {
            return bytes == RequestState::kReleased;
        }
        std::this_thread::sleep_for(kPollInterval);
    }
}

std::shared_ptr<Backend> Request::backend() {
    const Library& library = agent_->library();
    const capi::Functions& fn = library.fn();
    const Agent::Call call(*agent_, "query_xfer_backend", &mutex_);
    require_live("query_xfer_backend");
    auto handle = own<capi::Backend>(
        library, fn.destroy_backend, "query_xfer_backend", [this] { return about(); },
        [&](capi::Backend* out) {
            return fn.query_xfer_backend(agent_->handle_, body_->handle, out);
        });
    const auto known = agent_->backends();
    return known.size() == 1 ? known.front()
                             : std::make_shared<Backend>(agent_->weak_from_this(), std::string(),
                                                         std::move(handle));
}

CostEstimate Request::estimate_cost() {
    const Agent::Call call(*agent_, "estimate_xfer_cost", &mutex_);
    require_live("estimate_xfer_cost");
    CostEstimate cost{};
    agent_->library().check(
        agent_->library().fn().estimate_xfer_cost(agent_->handle_, body_->handle, nullptr,
                                                  &cost.duration_us, &cost.margin_us, &cost.method),
        "estimate_xfer_cost", [this] { return about(); });
    return cost;
}

capi::Telemetry Request::telemetry() {
    const Agent::Call call(*agent_, "get_xfer_telemetry", &mutex_);
    require_live("get_xfer_telemetry");
    if (state_ != RequestState::kDone) {
        throw Error("StateError", text("get_xfer_telemetry: the request is ", state_name(state_),
                                       ", not DONE (", about(), ")"));
    }
    capi::Telemetry telemetry{};
    agent_->library().check(
        agent_->library().fn().get_xfer_telemetry(agent_->handle_, body_->handle, &telemetry),
        "get_xfer_telemetry", [this] { return about(); });
    return telemetry;
}

}  // namespace pynixlkv::nixl
