/// @file
/// Owners of NIXL's long-lived handles. They check what NIXL returns, not what it is given, and
/// have no locks: `NixlDriver` calls them from the one thread of an agent, `Agent` checks and locks
/// first.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/live_count.hpp"
#include "base/process.hpp"
#include "nixl/handles.hpp"
#include "nixl/types.hpp"
#include "transfer/device_contexts.hpp"

namespace pynixlkv::nixl {

class AgentHandle;

/// A backend of an agent, which lives as long as its agent; this owns NIXL's small wrapper of it.
class Backend : LiveCounted<Backend> {
  public:
    static constexpr const char* kLiveName = "nixl.Backend";

    Backend(std::weak_ptr<const AgentHandle> agent, std::string type, std::vector<Memory> memory,
            Owned<capi::Backend> handle)
        : agent_(std::move(agent)),
          type_(std::move(type)),
          memory_(std::move(memory)),
          handle_(std::move(handle)) {}

    /// Name of the plugin, empty where NIXL does not tell which one it chose.
    [[nodiscard]] const std::string& type() const noexcept { return type_; }
    /// Kinds of memory that it can transfer.
    [[nodiscard]] const std::vector<Memory>& memory() const noexcept { return memory_; }
    [[nodiscard]] bool is_of(const AgentHandle& agent) const noexcept {
        return agent_.lock().get() == &agent;
    }
    [[nodiscard]] capi::Backend native() const noexcept { return handle_.get(); }

  private:
    std::weak_ptr<const AgentHandle> agent_;
    std::string type_;
    std::vector<Memory> memory_;
    Owned<capi::Backend> handle_;
};

/// Owner of a native agent, with NIXL's verbs on it. Every failure is a NativeError.
class AgentHandle : public std::enable_shared_from_this<AgentHandle>, LiveCounted<AgentHandle> {
  public:
    static constexpr const char* kLiveName = "nixl.AgentHandle";

    AgentHandle(std::shared_ptr<const Library> library, std::string name,
                const AgentConfig& config);
    ~AgentHandle();

    [[nodiscard]] const std::string& name() const noexcept { return name_; }
    [[nodiscard]] const Library& library() const noexcept { return *library_; }
    [[nodiscard]] const capi::Functions& fn() const noexcept { return library_->fn(); }
    [[nodiscard]] const ProcessMark& process() const noexcept { return process_; }
    [[nodiscard]] capi::Agent native() const noexcept { return handle_; }
    [[nodiscard]] transfer::DeviceContexts& devices() noexcept { return devices_; }
    /// Whether NIXL may be called: in the process that made the agent, before its end.
    [[nodiscard]] bool is_usable() const noexcept {
        return handle_ != nullptr && !is_abandoned_ && process_.is_here();
    }
    /// Name the agent, and a peer unless it is empty, in an error.
    [[nodiscard]] std::string about(const std::string& peer = {}) const;

    /// Throw unless a call, perhaps one that addressed a peer, succeeded.
    void check(Status status, const char* call, const std::string& peer = {}) const {
        library_->check(status, call, [&] { return about(peer); });
    }

    /// Destroy the native agent.
    void destroy();
    /// Forget the native agent without destroying it.
    void abandon() noexcept { is_abandoned_ = true; }

    [[nodiscard]] std::vector<std::string> available_plugins() const;
    [[nodiscard]] BackendInfo plugin_info(const std::string& plugin) const;
    [[nodiscard]] std::shared_ptr<Backend> create_backend(const std::string& type,
                                                          const ParamMap& params);
    [[nodiscard]] BackendInfo backend_info(capi::Backend backend, const std::string& type) const;
    /// A row without an answer does not exist.
    [[nodiscard]] std::vector<std::optional<ParamMap>> query_memory(capi::RegList list,
                                                                    capi::OptArgs args) const;

    [[nodiscard]] std::string local_metadata() const;
    [[nodiscard]] std::string local_partial_metadata(capi::RegList list, capi::OptArgs args) const;
    /// @return name of the peer
    std::string load_remote_metadata(std::string_view metadata);
    /// Whether a peer is loaded and, with rows, whether its metadata covers them.
    [[nodiscard]] bool check_remote_metadata(const std::string& peer, Memory memory,
                                             Rows rows) const;
    void invalidate_remote_metadata(const std::string& peer);

    [[nodiscard]] capi::Prepared prepare(const std::string& peer, capi::XferList list,
                                         capi::OptArgs args);
    [[nodiscard]] capi::Request make_xfer(Op op, capi::Prepared local,
                                          std::span<const std::int32_t> local_indices,
                                          capi::Prepared remote,
                                          std::span<const std::int32_t> remote_indices,
                                          const std::string& peer, capi::OptArgs args);
    [[nodiscard]] capi::Request create_xfer(Op op, capi::XferList local, capi::XferList remote,
                                            const std::string& peer, capi::OptArgs args);

    /// Success means queued, not delivered.
    void notify(const std::string& peer, std::string_view message, capi::OptArgs args);
    /// Take the notifications that have arrived; without a progress thread this also progresses
    /// incoming traffic.
    [[nodiscard]] std::vector<Notification> take_notifications(capi::OptArgs args);

  private:
    const std::shared_ptr<const Library> library_;
    const std::string name_;
    const ProcessMark process_;
    transfer::DeviceContexts devices_;
    capi::Agent handle_ = nullptr;
    bool is_abandoned_ = false;
    Owned<capi::NotifMap> notifications_;
};

/// Memory to register; deregistered at the end of its life if nothing did before.
class RegisteredMemory {
  public:
    /// @param blobs backend-specific text per row (file names, object keys), or empty
    RegisteredMemory(std::shared_ptr<AgentHandle> agent, Memory memory, Rows rows,
                     std::span<const std::string> blobs, const CallOptions& options);
    void append(const Descriptor& row, const std::string* blob);
    RegisteredMemory(RegisteredMemory&& other) noexcept = default;
    ~RegisteredMemory();

    [[nodiscard]] Memory memory() const noexcept { return memory_; }
    [[nodiscard]] Rows rows() const noexcept { return rows_; }
    [[nodiscard]] const std::string& blob(std::size_t index) const noexcept;
    [[nodiscard]] std::string str() const;

    /// @param are_devices_known whether the rows name the devices of device memory
    void add(bool are_devices_known = false);
    /// @throws NativeError the memory stays registered
    void remove();
    /// Deregister some of the rows; `remove` must not follow.
    void remove(std::span<const std::uint32_t> indices);
    /// Leave the memory registered.
    void forget() noexcept { is_registered_ = false; }

  private:
    std::shared_ptr<AgentHandle> agent_;
    Memory memory_;
    std::vector<Descriptor> rows_;
    std::vector<std::string> blobs_;
    Owned<capi::RegList> list_;
    Owned<capi::OptArgs> args_;
    int device_ = -1;  ///< of device memory
    bool is_registered_ = false;
};

/// Releases a native descriptor list unless its agent is gone.
struct ReleasePrepared {
    std::shared_ptr<AgentHandle> agent;
    Status operator()(capi::Prepared handle) const noexcept;
};
using PreparedHandle = UniqueHandle<capi::Prepared, ReleasePrepared>;

/// A native transfer request. At the end of its life it must be quiet, or the agent gone.
class XferHandle {
  public:
    explicit XferHandle(std::shared_ptr<AgentHandle> agent) noexcept : agent_(std::move(agent)) {}
    XferHandle(std::shared_ptr<AgentHandle> agent, capi::Request handle) noexcept
        : agent_(std::move(agent)), handle_(handle) {}
    XferHandle(XferHandle&& other) noexcept
        : agent_(std::move(other.agent_)),
          handle_(std::exchange(other.handle_, nullptr)),
          is_running_(other.is_running_) {}
    /// A request that NIXL does not free may still move bytes: its agent is then never destroyed.
    ~XferHandle();

    [[nodiscard]] const AgentHandle& agent() const noexcept { return *agent_; }
    [[nodiscard]] capi::Request get() const noexcept { return handle_; }
    void set(capi::Request handle) noexcept { handle_ = handle; }
    [[nodiscard]] Status post(capi::OptArgs args) noexcept;
    /// Success without asking NIXL unless it is running.
    [[nodiscard]] Status poll() noexcept;
    /// Free the request, which must not be running; after a failure it can be tried again.
    Status release() noexcept;

  private:
    std::shared_ptr<AgentHandle> agent_;
    capi::Request handle_ = nullptr;
    bool is_running_ = false;
};

}  // namespace pynixlkv::nixl
