/// @file
/// The NIXL agent of the verbs: `AgentHandle` with checked arguments, locks, and memory that cannot
/// go while NIXL uses it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/live_count.hpp"
#include "nixl/agent_handle.hpp"
#include "transfer/memory_map.hpp"

namespace pynixlkv::nixl {

class PreparedList;
class Registration;
class XferRequest;
struct XferBody;
struct Pin;

/// A native agent with checks and locks. Registrations, prepared lists and requests hold it, so it
/// is destroyed after them.
///
/// With ThreadSync::kNone NIXL has no locks and one call runs at a time behind a lock of ours;
/// otherwise calls run side by side and NIXL locks for itself. Failures are Error (found by us
/// before NIXL saw the call) or NativeError (reported by NIXL).
///
/// **Quarantine.** NIXL has no cancel: a released request goes on writing to memory. A running
/// request that its owner gives up is quarantined with all that it needs (`num_quarantined`),
/// polled by `reap`, and freed once it is quiet. If requests are still running when the agent is
/// closed, the native agent is abandoned: never destroyed, its buffers never freed, because
/// destroying it can abort the peer's process.
class Agent : public std::enable_shared_from_this<Agent>, LiveCounted<Agent> {
  public:
    static constexpr const char* kLiveName = "nixl.Agent";

    /// Made by std::make_shared only.
    Agent(std::shared_ptr<const Library> library, std::string name, const AgentConfig& config = {});

    [[nodiscard]] const std::string& name() const noexcept { return handle_->name(); }
    [[nodiscard]] bool is_closed() const noexcept { return is_closed_.load(); }
    /// False in a forked child of the process that made the agent.
    [[nodiscard]] bool is_here() const noexcept { return handle_->process().is_here(); }

    [[nodiscard]] std::vector<std::string> available_plugins() const;
    [[nodiscard]] BackendInfo plugin_info(const std::string& plugin) const;
    [[nodiscard]] std::shared_ptr<Backend> create_backend(const std::string& type,
                                                          const ParamMap& params);
    [[nodiscard]] BackendInfo backend_info(const Backend& backend) const;
    [[nodiscard]] std::vector<std::shared_ptr<Backend>> backends() const;

    /// Reads options.backends.
    /// @param blobs backend-specific text per row (file names, object keys), or empty
    /// @param keepalive released after the memory is deregistered
    [[nodiscard]] std::shared_ptr<Registration> register_memory(Memory memory, Rows rows,
                                                                std::span<const std::string> blobs,
                                                                std::shared_ptr<void> keepalive,
                                                                const CallOptions& options);
    /// Register memory that may be registered already: each row is counted, and registered with
    /// those backends that do not know it. The agent owns the registrations.
    void register_counted(Memory memory, Rows rows, std::span<const std::string> blobs,
                          const std::shared_ptr<void>& keepalive, const CallOptions& options);
    /// Undo `register_counted`, for any part of the rows. Refused only while a transfer moves bytes
    /// of memory that would go; otherwise lists and requests on such memory become stale.
    void deregister_counted(Memory memory, Rows rows, const CallOptions& options);
    /// Ask the one backend of the options about files or objects.
    [[nodiscard]] std::vector<std::optional<ParamMap>> query_memory(
        Memory memory, Rows rows, std::span<const std::string> blobs, const CallOptions& options);

    [[nodiscard]] std::string local_metadata() const;
    [[nodiscard]] std::string local_partial_metadata(Memory memory, Rows rows,
                                                     const CallOptions& options) const;
    /// @param metadata bytes that were verified: damaged ones can abort the process inside NIXL
    std::string load_remote_metadata(std::string_view metadata);
    [[nodiscard]] bool check_remote_metadata(const std::string& peer, Memory memory,
                                             Rows rows) const;
    void invalidate_remote_metadata(const std::string& peer);

    void send_local_metadata(const ListenerAddress& address);
    void send_local_partial_metadata(Memory memory, Rows rows, const CallOptions& options);
    void fetch_remote_metadata(const std::string& peer, const ListenerAddress& address);
    void invalidate_local_metadata(const ListenerAddress& address);
    void make_connection(const std::string& peer, const CallOptions& options);

    /// @param peer the agent whose memory it is; empty for this agent's own side
    [[nodiscard]] std::shared_ptr<PreparedList> prepare(const std::string& peer, Memory memory,
                                                        Rows rows, const CallOptions& options);
    [[nodiscard]] std::shared_ptr<PreparedList> prepare_runs(const std::string& peer, Memory memory,
                                                             std::vector<Run> runs,
                                                             const CallOptions& options);
    /// Reads options.backends, notification, skip_merge.
    [[nodiscard]] std::shared_ptr<XferRequest> make_request(
        Op op, const std::shared_ptr<PreparedList>& local,
        std::span<const std::int32_t> local_indices, const std::shared_ptr<PreparedList>& remote,
        std::span<const std::int32_t> remote_indices, const CallOptions& options);
    /// Reads options.backends, notification.
    [[nodiscard]] std::shared_ptr<XferRequest> create_request(Op op, Memory local_memory,
                                                              Rows local, Memory remote_memory,
                                                              Rows remote, const std::string& peer,
                                                              const CallOptions& options);

    void notify(const std::string& peer, std::string_view message, const CallOptions& options);
    [[nodiscard]] std::vector<Notification> take_notifications(const CallOptions& options);

    [[nodiscard]] std::size_t num_quarantined() const noexcept { return num_quarantined_.load(); }
    /// Poll the quarantined requests, free the quiet ones and return how many are left.
    std::size_t reap();
    /// Reap until none is left or patience ends.
    std::size_t drain(Duration patience);
    /// Destroy the native agent, after its quarantined requests. Idempotent; in a forked child this
    /// only forgets the agent.
    /// @return false if requests were still running, so that the native agent was abandoned
    bool close(Duration patience);
    /// Release everything that the agent made, and close it.
    /// @return as `close`
    bool end(Duration patience);

  private:
    friend class PreparedList;
    friend class Registration;
    friend class XferRequest;

    /// Held around native calls: right process, not closed, locked as the sync mode needs.
    /// Whatever may hold the last reference to a child must be declared before it, since a child's
    /// destructor enters the agent again.
    class Call {
      public:
        /// @param object lock of the one object that is used, for modes in which calls run
        /// side by side
        Call(const Agent& agent, const char* call, std::mutex* object = nullptr);
        /// Never waits; for destructors.
        Call(const Agent& agent, std::mutex& object, std::try_to_lock_t) noexcept;
        [[nodiscard]] bool is_locked() const noexcept {
            return alone_.owns_lock() || object_.owns_lock();
        }

      private:
        transfer::DeviceContexts::Scope device_;
        std::unique_lock<std::shared_mutex> alone_;
        std::shared_lock<std::shared_mutex> shared_;
        std::unique_lock<std::mutex> object_;
    };

    [[nodiscard]] const Library& library() const noexcept { return handle_->library(); }
    [[nodiscard]] const capi::Functions& fn() const noexcept { return handle_->fn(); }
    [[nodiscard]] Owned<capi::OptArgs> checked_args(const CallOptions& options) const;
    /// Pin the registrations that cover the rows.
    template <class Items>
    [[nodiscard]] std::vector<Pin> pin(Memory memory, const Items& items, const char* side) const;
    /// Whether pinned memory has been deregistered. Needs `books_`.
    [[nodiscard]] bool is_stale(const std::vector<Pin>& pins) const;
    [[nodiscard]] bool is_stale(const XferBody& body) const;
    /// @throws Error("NotRegisteredError") a stale list or request; needs `books_`
    template <class Pinned>
    void require_registered(const Pinned& pinned, const char* what) const;
    /// Whether a transfer may move bytes of deregistered memory. Needs `books_`.
    [[nodiscard]] bool is_stale_running() const;
    /// Let NIXL prepare a list, unless it has. Needs `Call`.
    void prepare_native(PreparedList& list, capi::OptArgs args);
    /// How often the peer was invalidated; a list or request made before the last time is stale.
    [[nodiscard]] std::uint64_t generation(const std::string& peer) const;
    void require_fresh(const std::string& peer, std::uint64_t generation, const char* what) const;
    /// Run a native call that addresses a peer. If it fails, say why as far as NIXL knows.
    template <class Items, class Body>
    auto addressing(const char* call, const std::string& peer, Memory memory, const Items& items,
                    Body&& body) const;

    /// What is still alive of what the agent made.
    template <class Map>
    [[nodiscard]] auto alive(const Map& made) const;
    void add_spans(const std::shared_ptr<Registration>& registration);
    void remove_spans(const Registration& registration) noexcept;
    /// Deregister rows whose count has become 0. Needs `Call`.
    void remove_rows(Registration& registration, std::span<const std::uint32_t> indices);
    void quarantine(std::unique_ptr<XferBody> body) noexcept;
    void keep_for_ever(std::shared_ptr<void> keepalive) noexcept;

    const std::shared_ptr<AgentHandle> handle_;
    const bool calls_run_alone_;
    std::atomic<bool> is_closed_{false};
    mutable std::shared_mutex calls_;  ///< see Call
    std::mutex notifications_mutex_;
    std::mutex counting_;  ///< held by what changes counted registrations; taken before `calls_`

    /// Guards what follows; taken after `calls_`.
    mutable std::mutex books_;
    std::vector<std::shared_ptr<Backend>> backends_;
    std::map<Memory, transfer::MemoryMap> spans_;
    std::unordered_map<std::uint64_t, std::weak_ptr<Registration>> registrations_;
    std::unordered_map<std::uint64_t, std::shared_ptr<Registration>> counted_;
    std::unordered_map<const void*, std::weak_ptr<PreparedList>> prepared_;
    std::unordered_map<const void*, std::weak_ptr<XferRequest>> requests_;
    std::unordered_map<const XferBody*, const void*> running_;  ///< with their requests
    std::unordered_map<std::string, std::uint64_t> generations_;
    std::vector<std::unique_ptr<XferBody>> quarantined_;
    /// Buffers whose deregistration failed in a destructor: NIXL may still use them.
    std::vector<std::shared_ptr<void>> stuck_;

    std::atomic<std::size_t> num_quarantined_{0};
    std::atomic<std::size_t> num_prepared_{0};
    std::atomic<std::size_t> num_requests_{0};
    bool has_revoked_ = false;  ///< counted memory was deregistered at some time
};

}  // namespace pynixlkv::nixl
