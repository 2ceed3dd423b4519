/// @file
/// Descriptors that are prepared once, for requests that choose from them by index.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nixl/agent.hpp"
#include "nixl/registration.hpp"

namespace pynixlkv::nixl {

/// The runs that rows in constant steps make up; steps go upwards.
[[nodiscard]] std::vector<Run> runs_of(Rows rows);

/// NIXL wants every descriptor by itself, so a list of few runs stays ours until a request chooses
/// from it, and costs next to nothing until then.
class PreparedList : LiveCounted<PreparedList> {
    friend class Agent;
    template <class T>
    friend class Use;
    friend struct XferBody;

  public:
    static constexpr const char* kLiveName = "nixl.PreparedList";

    PreparedList(std::shared_ptr<Agent> agent, std::string peer, Memory memory,
                 std::vector<Run> runs, std::uint64_t generation);
    ~PreparedList();

    [[nodiscard]] const std::shared_ptr<Agent>& agent() const noexcept { return agent_; }
    /// Agent whose memory it is; empty for the agent's own side.
    [[nodiscard]] const std::string& peer() const noexcept { return peer_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] bool is_released() const noexcept { return is_released_.load(); }

    /// @param when_unused let requests that use the list go on, and free it after them
    void release(bool when_unused = false);

  private:
    /// Free a list that was released while requests used it, if none does any more. Takes the
    /// agent's locks.
    void end_use() noexcept;
    /// Free a released list that is not used. Idempotent; needs `Agent::Call`.
    /// @param pins what it had pinned; to be dropped after the call
    void free(std::vector<Pin>& pins);
    [[nodiscard]] std::uint64_t length(std::size_t index) const noexcept {
        return lengths_.empty() ? runs_.front().row.length : lengths_[index];
    }
    [[nodiscard]] const char* side() const noexcept { return peer_.empty() ? "local" : "remote"; }
    [[nodiscard]] std::string str() const;

    const std::shared_ptr<Agent> agent_;
    const std::string peer_;
    const Memory memory_;
    const std::vector<Run> runs_;
    const std::uint64_t generation_;
    std::size_t size_ = 0;
    std::vector<std::uint64_t> lengths_;  ///< empty where all are equal
    std::vector<Pin> pins_;
    std::mutex preparing_;
    PreparedHandle handle_;                  ///< empty until a request needs it
    std::atomic<bool> is_released_{true};    ///< changes under the agent's books_
    std::atomic<std::size_t> num_users_{0};  ///< requests made from it that are not released
};

}  // namespace pynixlkv::nixl
