/// @file
/// The NIXL agent: root of every other owner of this room.
#pragma once

#include <atomic>
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/live_count.hpp"
#include "base/process.hpp"
#include "nixl/backend.hpp"
#include "nixl/handles.hpp"
#include "nixl/types.hpp"

namespace pynixlkv::nixl {

class Pin;
class PreparedList;
class Registration;
class Request;
struct RequestBody;

/// Owner of a native agent. Registrations, prepared lists and requests hold it, so it is destroyed
/// after them; nothing else needs to be kept in order.
///
/// Safe from several threads. With ThreadSync::kNone NIXL has no locks and one call runs at a time
/// behind a lock of ours; otherwise calls run side by side and NIXL locks for itself. Failures are
/// Error (found by us before NIXL saw the call) or NativeError (reported by NIXL).
///
/// **Requests that cannot be stopped.** NIXL has no cancel: a released request goes on writing to
/// memory. A running request that its owner gives up is *parked* here with all that it needs
/// (`num_parked`), polled by `reap`, and freed once it is quiet. If requests are still running
/// when the agent is closed, the native agent is *abandoned*: never destroyed, its buffers never
/// freed, because destroying it can abort the peer's process.
class Agent : public std::enable_shared_from_this<Agent>, LiveCounted<Agent> {
    struct Private {};

  public:
    static constexpr const char* kLiveName = "nixl.Agent";

    /// @param name not empty, and unique among the agents that talk to each other
    [[nodiscard]] static std::shared_ptr<Agent> create(std::shared_ptr<const Library> library,
                                                       std::string name, const AgentConfig& config);
    Agent(Private, std::shared_ptr<const Library> library, std::string name,
          const AgentConfig& config);
    Agent(const Agent&) = delete;
    Agent& operator=(const Agent&) = delete;
    ~Agent();

    [[nodiscard]] const std::string& name() const noexcept { return name_; }
    [[nodiscard]] const AgentConfig& config() const noexcept { return config_; }
    [[nodiscard]] const Library& library() const noexcept { return *library_; }
    [[nodiscard]] bool is_closed() const noexcept { return closed_.load(); }

    // ---- plugins and backends

    [[nodiscard]] std::vector<std::string> available_plugins() const;
    [[nodiscard]] BackendInfo plugin_info(const std::string& plugin) const;
    /// One backend of each type per agent.
    std::shared_ptr<Backend> create_backend(const std::string& type, const ParamMap& params);
    [[nodiscard]] BackendInfo backend_info(const Backend& backend) const;
    [[nodiscard]] std::vector<std::shared_ptr<Backend>> backends() const;

    // ---- memory

    /// Register memory. Reads options.backends.
    /// @param blobs backend-specific text per row (file names, object keys), or empty
    /// @param keepalive released after the memory is deregistered
    /// @throws Error AlreadyRegisteredError for a row that is registered
    [[nodiscard]] std::shared_ptr<Registration> register_memory(MemoryType memory, Rows rows,
                                                                std::span<const std::string> blobs,
                                                                std::shared_ptr<void> keepalive,
                                                                const CallOptions& options);

    /// Ask a storage backend about files or objects; a row without an answer does not exist.
    /// @param options names the one backend to ask
    [[nodiscard]] std::vector<std::optional<ParamMap>> query_memory(
        MemoryType memory, Rows rows, std::span<const std::string> blobs,
        const CallOptions& options);

    // ---- metadata

    [[nodiscard]] std::string local_metadata() const;
    /// Metadata of some registered rows; of the connection alone if there are no rows.
    [[nodiscard]] std::string local_partial_metadata(MemoryType memory, Rows rows,
                                                     const CallOptions& options) const;
    /// @param metadata bytes that were verified: damaged ones can abort the process inside NIXL
    /// @return name of the peer
    std::string load_remote_metadata(std::string_view metadata);
    /// Whether a peer is loaded and, with rows, whether its metadata covers them.
    [[nodiscard]] bool check_remote_metadata(const std::string& peer, MemoryType memory,
                                             Rows rows) const;
    /// Forget a peer and its connection. Lists and requests made for it become stale.
    void invalidate_remote_metadata(const std::string& peer);
    /// How often the peer was invalidated; a prepared list or request is stale if this has grown.
    [[nodiscard]] std::uint64_t generation(const std::string& peer) const;

    void send_local_metadata(const Endpoint& endpoint);
    void send_local_partial_metadata(MemoryType memory, Rows rows, const CallOptions& options);
    void fetch_remote_metadata(const std::string& peer, const Endpoint& endpoint);
    void invalidate_local_metadata(const Endpoint& endpoint);
    void make_connection(const std::string& peer, const CallOptions& options);

    // ---- transfers

    /// Prepare descriptors to be chosen from by index. Give them in address order.
    /// @param peer the agent whose memory it is; empty for this agent's own side
    [[nodiscard]] std::shared_ptr<PreparedList> prepare(const std::string& peer, MemoryType memory,
                                                        Rows rows, const CallOptions& options);

    /// A request from prepared lists; NIXL merges neighbours unless options.skip_merge.
    /// Reads options.backends, notification, skip_merge, custom_param.
    [[nodiscard]] std::shared_ptr<Request> make_request(
        Operation operation, const std::shared_ptr<PreparedList>& local,
        std::span<const std::int32_t> local_indices, const std::shared_ptr<PreparedList>& remote,
        std::span<const std::int32_t> remote_indices, const CallOptions& options);

    /// A request from rows; NIXL does not merge these.
    /// Reads options.backends, notification, custom_param.
    [[nodiscard]] std::shared_ptr<Request> create_request(Operation operation,
                                                          MemoryType local_memory, Rows local,
                                                          MemoryType remote_memory, Rows remote,
                                                          const std::string& peer,
                                                          const CallOptions& options);

    // ---- notifications

    /// Send a notification by itself. Success means queued, not delivered.
    void notify(const std::string& peer, std::string_view message, const CallOptions& options);
    /// Take the notifications that have arrived. Without a progress thread this is what lets
    /// incoming traffic progress.
    [[nodiscard]] std::vector<Notification> take_notifications(const CallOptions& options);

    // ---- life

    /// Requests that were given up while running and are not quiet yet.
    [[nodiscard]] std::size_t num_parked() const noexcept { return num_parked_.load(); }
    /// Poll the parked requests and free the quiet ones.
    /// @return how many are left
    std::size_t reap();
    /// Reap until none is left or patience ends.
    std::size_t drain(Duration patience);
    /// False in a forked child of the process that made the agent.
    [[nodiscard]] bool is_here() const noexcept { return process_.is_here(); }

    /// Destroy the native agent; waits for parked requests first. Idempotent. In a forked child
    /// this only forgets the agent.
    /// @param patience how long to wait
    /// @return false if requests were still running, so that the native agent was abandoned
    /// @throws Error StateError while registrations, prepared lists or requests are alive
    bool close(Duration patience);

    /// Number of native agents that this process has abandoned.
    [[nodiscard]] static std::size_t num_abandoned();

  private:
    friend class PreparedList;
    friend class Registration;
    friend class Request;
    friend struct RequestBody;

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
        std::unique_lock<std::shared_mutex> alone_;
        std::shared_lock<std::shared_mutex> shared_;
        std::unique_lock<std::mutex> object_;
    };

    struct Span {
        MemoryType memory;
        std::uint64_t device;
        std::uint64_t address;
        std::uint64_t length;
        friend auto operator<=>(const Span&, const Span&) = default;
    };

    void require_ours(const CallOptions& options) const;
    static void require_rows(Rows rows, const char* side, bool allow_zero_length);
    /// Pin the registrations that cover the rows.
    [[nodiscard]] std::vector<Pin> pin(MemoryType memory, Rows rows, const char* side) const;
    void require_fresh(const std::string& peer, std::uint64_t generation, const char* what) const;
    /// Turn a failure to address a peer into the error that says why, as far as NIXL knows it.
    [[noreturn]] void fail_remote(Status status, const char* call, const std::string& peer,
                                  MemoryType memory, Rows rows) const;
    [[nodiscard]] bool covers(const std::string& peer, MemoryType memory, Rows rows) const;
    [[nodiscard]] std::string about(const std::string& peer) const;

    void add_spans(const std::shared_ptr<Registration>& registration);
    void remove_spans(const Registration& registration) noexcept;
    void park(std::unique_ptr<RequestBody> body) noexcept;
    void keep_for_ever(std::shared_ptr<void> keepalive) noexcept;

    const std::shared_ptr<const Library> library_;
    const std::string name_;
    const AgentConfig config_;
    const ProcessMark process_;
    capi::Agent handle_ = nullptr;
    std::atomic<bool> closed_{false};

    mutable std::shared_mutex calls_;  ///< see Call
    std::mutex notifications_mutex_;
    Owned<capi::NotifMap> notifications_;

    /// Guards what follows; taken after `calls_`.
    mutable std::mutex books_;
    std::vector<std::shared_ptr<Backend>> backends_;
    std::map<Span, std::weak_ptr<Registration>> spans_;
    std::uint64_t longest_span_ = 0;
    std::unordered_map<std::string, std::uint64_t> generations_;
    std::vector<std::unique_ptr<RequestBody>> parked_;
    /// Buffers whose deregistration failed in a destructor: NIXL may still use them.
    std::vector<std::shared_ptr<void>> stuck_;

    std::atomic<std::size_t> num_parked_{0};
    std::atomic<std::size_t> num_registrations_{0};
    std::atomic<std::size_t> num_prepared_{0};
    std::atomic<std::size_t> num_requests_{0};
};

}  // namespace pynixlkv::nixl
