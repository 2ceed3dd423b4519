/// @file
/// A transport or storage engine of an agent.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/live_count.hpp"
#include "nixl/handles.hpp"

namespace pynixlkv::nixl {

class Agent;

/// The engine itself lives as long as its agent; this owns NIXL's small wrapper of it.
class Backend : LiveCounted<Backend> {
  public:
    static constexpr const char* kLiveName = "nixl.Backend";

    Backend(std::weak_ptr<const Agent> agent, std::string type, Owned<capi::Backend> handle)
        : agent_(std::move(agent)), type_(std::move(type)), handle_(std::move(handle)) {}

    /// Name of the plugin, empty where NIXL does not tell which one it chose.
    [[nodiscard]] const std::string& type() const noexcept { return type_; }
    [[nodiscard]] std::shared_ptr<const Agent> agent() const noexcept { return agent_.lock(); }
    [[nodiscard]] capi::Backend native() const noexcept { return handle_.get(); }

  private:
    std::weak_ptr<const Agent> agent_;
    std::string type_;
    Owned<capi::Backend> handle_;
};

}  // namespace pynixlkv::nixl
