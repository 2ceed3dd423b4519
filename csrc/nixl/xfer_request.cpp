#include "nixl/xfer_request.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace pynixlkv::nixl {

namespace {

constexpr Duration kPollInterval = std::chrono::microseconds(50);

}  // namespace

// ---- XferBody

void XferBody::use(const std::shared_ptr<PreparedList>& list) {
    if (list->is_released()) {
        throw Error("ClosedError", text("make_xfer_req: ", list->str(), " was released"));
    }
    lists.emplace_back(list);
}

// ---- XferRequest

XferRequest::XferRequest(std::shared_ptr<Agent> agent, Op op, std::string peer,
                         std::uint64_t generation, std::size_t num_descriptors,
                         std::uint64_t num_bytes, std::unique_ptr<XferBody> body)
    : agent_(std::move(agent)),
      op_(op),
      peer_(std::move(peer)),
      generation_(generation),
      num_descriptors_(num_descriptors),
      num_bytes_(num_bytes),
      body_(std::move(body)) {
    ++agent_->num_requests_;
}

XferRequest::~XferRequest() {
    if (agent_->is_here()) {
        const std::lock_guard lock(agent_->books_);
        agent_->requests_.erase(this);
    }
    if (state_ == XferState::kReleased) {
        return;
    }
    --agent_->num_requests_;
    if (!agent_->is_here() || body_->native.get() == nullptr) {
        return;
    }
    {
        const Agent::Call call(*agent_, mutex_, std::try_to_lock);
        if (call.is_locked() && body_->native.poll() != Status::kInProgress &&
            body_->native.release() == Status::kSuccess) {
            const std::lock_guard lock(agent_->books_);
            agent_->running_.erase(body_.get());
            return;
        }
    }
    agent_->quarantine(std::move(body_));
}

std::string XferRequest::about() const {
    return text(agent_->handle_->about(peer_), ", ", op_name(op_), " of ", num_bytes_, " bytes in ",
                num_descriptors_, " descriptors");
}

void XferRequest::require_live(const char* call) const {
    if (state_ == XferState::kReleased) {
        throw Error("ClosedError", text(call, ": the request was released (", about(), ")"));
    }
}

XferState XferRequest::enter(Status status, const char* call) {
    if (status != Status::kInProgress) {
        const std::lock_guard lock(agent_->books_);
        agent_->running_.erase(body_.get());
    }
    if (status == Status::kInProgress) {
        state_ = XferState::kPending;
    } else if (status == Status::kSuccess) {
        state_ = XferState::kDone;
    } else {
        state_ = XferState::kFailed;
        try {
            agent_->library().fail(status, call, about());
        } catch (const NativeError& error) {
            failure_ = error;
            throw;
        }
    }
    return state_;
}

XferState XferRequest::post(const std::optional<std::string>& notification) {
    Owned<capi::OptArgs> args;
    if (notification) {
        args = make_opt_args(agent_->library(), {.notification = notification});
    }
    const Agent::Call call(*agent_, "post_xfer_req", &mutex_);
    require_live("post_xfer_req");
    if (state_ == XferState::kPending) {
        throw Error("StateError", text("post_xfer_req: the request is running (", about(), ")"));
    }
    agent_->require_fresh(peer_, generation_, "the request");
    {
        const std::lock_guard lock(agent_->books_);
        agent_->require_registered(*body_, "the request");
        agent_->running_.emplace(body_.get(), this);
    }
    return enter(body_->native.post(args.get()), "post_xfer_req");
}

XferState XferRequest::poll() {
    const Agent::Call call(*agent_, "get_xfer_status", &mutex_);
    require_live("get_xfer_status");
    if (state_ == XferState::kFailed) {
        throw NativeError(*failure_);
    }
    if (state_ != XferState::kPending) {
        return state_;
    }
    return enter(body_->native.poll(), "get_xfer_status");
}

void XferRequest::settle() noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock && state_ == XferState::kPending) {
        try {
            enter(body_->native.poll(), "get_xfer_status");
        } catch (const NativeError&) {
            // Kept for the next poll.
        }
    }
}

XferState XferRequest::give_up(bool may_quarantine) {
    std::unique_ptr<XferBody> body;  // goes after the lock
    const Agent::Call call(*agent_, "release_xfer_req", &mutex_);
    require_live("release_xfer_req");
    const bool is_running = body_->native.poll() == Status::kInProgress;
    if (is_running && !may_quarantine) {
        return XferState::kPending;
    }
    if (!is_running) {
        agent_->library().check(body_->native.release(), "release_xfer_req",
                                [this] { return about(); });
    }
    state_ = XferState::kReleased;
    --agent_->num_requests_;
    body = std::move(body_);
    if (is_running) {
        agent_->quarantine(std::move(body));
        return XferState::kPending;
    }
    const std::lock_guard lock(agent_->books_);
    agent_->running_.erase(body.get());
    return XferState::kReleased;
}

bool XferRequest::release(Duration patience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    for (;;) {
        const bool may_quarantine = std::chrono::steady_clock::now() >= deadline;
        const XferState bytes = give_up(may_quarantine);
        if (may_quarantine || bytes == XferState::kReleased) {
            return bytes == XferState::kReleased;
        }
        std::this_thread::sleep_for(kPollInterval);
    }
}

std::shared_ptr<Backend> XferRequest::backend() {
    const Agent::Call call(*agent_, "query_xfer_backend", &mutex_);
    require_live("query_xfer_backend");
    auto handle = own<capi::Backend>(
        agent_->library(), agent_->fn().destroy_backend, "query_xfer_backend",
        [this] { return about(); },
        [&](capi::Backend* out) {
            return agent_->fn().query_xfer_backend(agent_->handle_->native(), body_->native.get(),
                                                   out);
        });
    // NIXL makes a new wrapper around the engine each time; its first word is the engine's address.
    const auto engine = [](capi::Backend wrapper) {
        std::uintptr_t address = 0;
        std::memcpy(&address, static_cast<const void*>(wrapper), sizeof address);
        return address;
    };
    const auto known = agent_->backends();
    const auto found = std::find_if(known.begin(), known.end(), [&](const auto& backend) {
        return known.size() == 1 || engine(backend->native()) == engine(handle.get());
    });
    return found != known.end()
               ? *found
               : std::make_shared<Backend>(agent_->handle_, std::string(), std::vector<Memory>(),
                                           std::move(handle));
}

CostEstimate XferRequest::estimate_cost() {
    const Agent::Call call(*agent_, "estimate_xfer_cost", &mutex_);
    require_live("estimate_xfer_cost");
    CostEstimate cost{};
    agent_->library().check(
        agent_->fn().estimate_xfer_cost(agent_->handle_->native(), body_->native.get(), nullptr,
                                        &cost.duration_us, &cost.margin_us, &cost.method),
        "estimate_xfer_cost", [this] { return about(); });
    return cost;
}

capi::Telemetry XferRequest::telemetry() {
    const Agent::Call call(*agent_, "get_xfer_telemetry", &mutex_);
    require_live("get_xfer_telemetry");
    if (state_ != XferState::kDone) {
        throw Error("StateError", text("get_xfer_telemetry: the request is ", state_name(state_),
                                       ", not DONE (", about(), ")"));
    }
    capi::Telemetry telemetry{};
    agent_->library().check(
        agent_->fn().get_xfer_telemetry(agent_->handle_->native(), body_->native.get(), &telemetry),
        "get_xfer_telemetry", [this] { return about(); });
    return telemetry;
}

}  // namespace pynixlkv::nixl
