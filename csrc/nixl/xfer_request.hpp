#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "nixl/agent.hpp"
#include "nixl/prepared_list.hpp"
#include "nixl/registration.hpp"

namespace pynixlkv::nixl {

enum class XferState { kNotPosted, kPending, kDone, kFailed, kReleased };

[[nodiscard]] constexpr const char* state_name(XferState state) noexcept {
    constexpr const char* kNames[] = {"NOT_POSTED", "PENDING", "DONE", "FAILED", "RELEASED"};
    return kNames[static_cast<std::size_t>(state)];
}

/// A native request and everything that must stay alive while its bytes may move: what goes into
/// quarantine when a request is given up while it runs.
struct XferBody : LiveCounted<XferBody> {
    static constexpr const char* kLiveName = "nixl.XferBody";

    explicit XferBody(std::shared_ptr<AgentHandle> agent) noexcept : native(std::move(agent)) {}

    void use(const std::shared_ptr<PreparedList>& list);

    // The native request goes first, then what it uses.
    std::vector<Pin> pins;
    std::vector<Use<PreparedList>> lists;
    XferHandle native;
};

/// A transfer of the verbs: made, posted, polled to its end, perhaps posted again, released.
class XferRequest : public std::enable_shared_from_this<XferRequest>, LiveCounted<XferRequest> {
    friend class Agent;

  public:
    static constexpr const char* kLiveName = "nixl.XferRequest";

    XferRequest(std::shared_ptr<Agent> agent, Op op, std::string peer, std::uint64_t generation,
                std::size_t num_descriptors, std::uint64_t num_bytes,
                std::unique_ptr<XferBody> body);
    /// Frees the request if it is quiet and the agent is not busy, quarantines it otherwise.
    ~XferRequest();

    [[nodiscard]] const std::shared_ptr<Agent>& agent() const noexcept { return agent_; }
    [[nodiscard]] Op op() const noexcept { return op_; }
    [[nodiscard]] const std::string& peer() const noexcept { return peer_; }
    [[nodiscard]] std::size_t num_descriptors() const noexcept { return num_descriptors_; }
    [[nodiscard]] std::uint64_t num_bytes() const noexcept { return num_bytes_; }
    /// State as of the last call; does not poll.
    [[nodiscard]] XferState state() const noexcept { return state_.load(); }
    [[nodiscard]] bool is_released() const noexcept { return state_ == XferState::kReleased; }

    /// Start the transfer, perhaps with another notification. Returns kPending or kDone.
    XferState post(const std::optional<std::string>& notification = std::nullopt);
    /// Poll a running transfer. One that has failed throws the same NativeError each time.
    XferState poll();
    /// Free the request. A running one is polled until it ends or patience does.
    /// @return false if it was quarantined: bytes may still move
    bool release(Duration patience);

    [[nodiscard]] std::shared_ptr<Backend> backend();
    [[nodiscard]] CostEstimate estimate_cost();
    [[nodiscard]] capi::Telemetry telemetry();

  private:
    void require_live(const char* call) const;
    /// Free the request if it is quiet; quarantine it if it is running and may be.
    /// @return kReleased if it was freed, kPending if its bytes may still move
    XferState give_up(bool may_quarantine);
    XferState enter(Status status, const char* call);
    /// Poll a running request unless another thread uses it. Needs `Agent::Call`.
    void settle() noexcept;
    [[nodiscard]] std::string about() const;

    const std::shared_ptr<Agent> agent_;
    const Op op_;
    const std::string peer_;
    const std::uint64_t generation_;
    const std::size_t num_descriptors_;
    const std::uint64_t num_bytes_;
    std::mutex mutex_;  ///< see Agent::Call
    std::atomic<XferState> state_{XferState::kNotPosted};
    std::optional<NativeError> failure_;
    std::unique_ptr<XferBody> body_;
};

}  // namespace pynixlkv::nixl
