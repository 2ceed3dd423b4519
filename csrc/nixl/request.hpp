/// @file
/// A transfer request.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "nixl/agent.hpp"
#include "nixl/prepared_list.hpp"
#include "nixl/registration.hpp"

namespace pynixlkv::nixl {

enum class RequestState { kNotPosted, kPending, kDone, kFailed, kReleased };

[[nodiscard]] constexpr const char* state_name(RequestState state) noexcept {
    constexpr const char* kNames[] = {"NOT_POSTED", "PENDING", "DONE", "FAILED", "RELEASED"};
    return kNames[static_cast<std::size_t>(state)];
}

/// A native request and everything that must stay alive while its bytes may move. It is what a
/// request leaves behind on its agent when it is given up while running.
struct RequestBody : LiveCounted<RequestBody> {
    static constexpr const char* kLiveName = "nixl.RequestBody";

    explicit RequestBody(const Agent& agent_of) noexcept : agent(agent_of) {}
    RequestBody(const RequestBody&) = delete;
    RequestBody& operator=(const RequestBody&) = delete;
    /// Frees nothing native: a body whose request is still there was abandoned.
    ~RequestBody();

    void use(std::shared_ptr<PreparedList> local_list, std::shared_ptr<PreparedList> remote_list);
    [[nodiscard]] Status poll() noexcept;
    /// Free the native request, which must not be running.
    [[nodiscard]] Status free() noexcept;

    const Agent& agent;  ///< outlives the body, which it owns once its request is gone
    capi::Request handle = nullptr;
    bool running = false;
    std::vector<Pin> pins;
    std::shared_ptr<PreparedList> local;
    std::shared_ptr<PreparedList> remote;
};

/// One transfer: made, posted, polled to its end, perhaps posted again, released.
class Request : LiveCounted<Request> {
    friend class Agent;
    struct Private {};

  public:
    static constexpr const char* kLiveName = "nixl.Request";

    Request(Private, std::shared_ptr<Agent> agent, Operation operation, std::string peer,
            std::uint64_t generation, std::size_t num_descriptors, std::uint64_t num_bytes,
            std::unique_ptr<RequestBody> body);
    Request(const Request&) = delete;
    Request& operator=(const Request&) = delete;
    /// Frees the request if it is quiet and nobody holds the agent at the moment, parks it else.
    ~Request();

    [[nodiscard]] const std::shared_ptr<Agent>& agent() const noexcept { return agent_; }
    [[nodiscard]] Operation operation() const noexcept { return operation_; }
    [[nodiscard]] const std::string& peer() const noexcept { return peer_; }
    [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
    /// Descriptors as given, before NIXL merged any.
    [[nodiscard]] std::size_t num_descriptors() const noexcept { return num_descriptors_; }
    [[nodiscard]] std::uint64_t num_bytes() const noexcept { return num_bytes_; }
    /// State as of the last call; does not poll.
    [[nodiscard]] RequestState state() const noexcept { return state_.load(); }

    /// Start the transfer. On same-host paths this copies everything before it returns.
    /// @param notification replaces the one given when the request was made
    /// @return kPending or kDone
    /// @throws Error StateError while running, StalePeerError, ClosedError
    /// @throws NativeError the transfer failed
    RequestState post(const std::optional<std::string>& notification = std::nullopt);

    /// Poll. Returns kNotPosted without asking NIXL, which would call that a failure.
    /// @throws NativeError the transfer failed; every further call throws the same
    RequestState poll();

    /// Free the request. A running one is polled until it ends or patience does; then it is parked.
    /// @return false if it was parked: bytes may still move
    /// @throws Error ClosedError if it was released before
    bool release(Duration patience);

    [[nodiscard]] std::shared_ptr<Backend> backend();
    [[nodiscard]] CostEstimate estimate_cost();
    /// Needs AgentConfig::telemetry and a request that is done.
    [[nodiscard]] capi::Telemetry telemetry();

  private:
    void require_live(const char* call) const;
    /// Free the request if it is quiet; park it if it is running and may be parked.
    /// @return kReleased if it was freed, kPending if its bytes may still move
    RequestState give_up(bool may_park);
    /// Take a native status over into the state.
    RequestState enter(Status status, const char* call);
    [[nodiscard]] std::string about() const;

    const std::shared_ptr<Agent> agent_;
    const Operation operation_;
    const std::string peer_;
    const std::uint64_t generation_;
    const std::size_t num_descriptors_;
    const std::uint64_t num_bytes_;
    std::mutex mutex_;  ///< see Agent::Call
    std::atomic<RequestState> state_{RequestState::kNotPosted};
    Status failure_ = Status::kSuccess;
    const char* failed_call_ = "";
    std::unique_ptr<RequestBody> body_;
};

}  // namespace pynixlkv::nixl
