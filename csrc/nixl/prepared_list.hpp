/// @file
/// Descriptors that NIXL has prepared once, for requests that choose from them by index.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "nixl/agent.hpp"
#include "nixl/registration.hpp"

namespace pynixlkv::nixl {

class PreparedList : LiveCounted<PreparedList> {
    friend class Agent;
    template <class T>
    friend class Use;
    friend struct XferBody;

  public:
    static constexpr const char* kLiveName = "nixl.PreparedList";

    PreparedList(std::shared_ptr<Agent> agent, std::string peer, Memory memory, Rows rows,
                 std::uint64_t generation);
    ~PreparedList();

    [[nodiscard]] const std::shared_ptr<Agent>& agent() const noexcept { return agent_; }
    /// Agent whose memory it is; empty for the agent's own side.
    [[nodiscard]] const std::string& peer() const noexcept { return peer_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] bool is_released() const noexcept { return is_released_.load(); }

    void release();

  private:
    [[nodiscard]] std::uint64_t length(std::size_t index) const noexcept {
        return lengths_.empty() ? uniform_length_ : lengths_[index];
    }
    [[nodiscard]] std::string str() const;

    const std::shared_ptr<Agent> agent_;
    const std::string peer_;
    const Memory memory_;
    const std::size_t size_;
    const std::uint64_t generation_;
    std::uint64_t uniform_length_;
    std::vector<std::uint64_t> lengths_;  ///< empty where all are equal
    std::vector<Pin> pins_;
    PreparedHandle handle_;
    std::atomic<bool> is_released_{true};    ///< changes under the agent's books_
    std::atomic<std::size_t> num_users_{0};  ///< requests made from it that are not released
};

}  // namespace pynixlkv::nixl
