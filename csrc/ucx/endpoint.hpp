/// @file
/// Connections to workers of peers, and access to their memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/live_count.hpp"
#include "ucx/socket_address.hpp"
#include "ucx/worker.hpp"

namespace pynixlkv::ucx {

class RemoteKey;
class Request;

/// A connection to one worker of a peer. Externally synchronised, see Worker.
class Endpoint : public std::enable_shared_from_this<Endpoint>, LiveCounted<Endpoint> {
  public:
    static constexpr const char* kLiveName = "ucx.Endpoint";

    /// Returns before the peer is reached; progress goes on with it.
    /// @param address what Worker::address() gave at the peer. UCX trusts these bytes: verify their
    ///        integrity first
    /// @param errors the same at both sides
    /// @throws UcxError when no transport reaches the peer
    [[nodiscard]] static std::shared_ptr<Endpoint> create(
        std::shared_ptr<Worker> worker, std::string_view address,
        capi::ErrorMode errors = capi::kErrorPeer);
    /// Connect to a listener.
    [[nodiscard]] static std::shared_ptr<Endpoint> connect(std::shared_ptr<Worker> worker,
                                                           const SocketAddress& listener);
    /// Accept what a listener of the worker was asked for; whatever happens, the request is used
    /// up.
    [[nodiscard]] static std::shared_ptr<Endpoint> accept(std::shared_ptr<Worker> worker,
                                                          capi::ConnectionRequest request);
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;
    /// Closes at once.
    ~Endpoint();

    [[nodiscard]] const std::shared_ptr<Worker>& worker() const noexcept { return worker_; }
    /// What the connection died of, if it did.
    [[nodiscard]] std::optional<Status> failure() const noexcept { return failure_; }
    [[nodiscard]] bool is_closed() const noexcept { return handle_ == nullptr; }
    /// Whether any of its transports gets and puts without the peer's processor; otherwise UCX
    /// emulates that in the peer's process.
    [[nodiscard]] bool is_one_sided() const;

    void get(Completion& completion, void* local, std::size_t length, capi::Memory memory,
             std::uint64_t remote, const RemoteKey& key);
    void put(Completion& completion, const void* local, std::size_t length, capi::Memory memory,
             std::uint64_t remote, const RemoteKey& key);
    /// Complete when everything before it is complete at the peer.
    void flush(Completion& completion);
    /// Send an active message. The data, not the header, must stay in place until completion.
    void send(Completion& completion, unsigned id, std::string_view header, std::string_view data);

    /// Keep a request that nobody waits for any more until it has ended.
    void park(std::unique_ptr<Request> request);
    [[nodiscard]] std::size_t num_parked();

    /// Close without asking the peer; what is under way ends as cancelled before this returns. Its
    /// remote keys become unusable. Idempotent. Without error handling UCX cannot do that: then it
    /// gets a moment to end what is under way, and goes on with it when that is over.
    void close();

  private:
    friend class RemoteKey;

    friend class LiveCounted<Endpoint>;
    Endpoint(std::shared_ptr<Worker> worker, capi::EndpointParams params, const char* detail);
    static void on_error(void* argument, capi::Endpoint handle, Status status) noexcept;
    [[nodiscard]] const capi::Functions& fn() const noexcept { return worker_->library().fn(); }
    [[nodiscard]] capi::Endpoint usable() const;

    const std::shared_ptr<Worker> worker_;
    const capi::ErrorMode errors_;
    capi::Endpoint handle_ = nullptr;
    std::optional<Status> failure_;
    std::set<RemoteKey*> keys_;
    std::vector<std::unique_ptr<Request>> parked_;
};

/// Access to some memory of a peer through one endpoint.
class RemoteKey : LiveCounted<RemoteKey> {
  public:
    static constexpr const char* kLiveName = "ucx.RemoteKey";

    /// @param packed what MemoryHandle::pack() gave at the peer. As trusted as an address
    RemoteKey(std::shared_ptr<Endpoint> endpoint, std::string_view packed);
    RemoteKey(const RemoteKey&) = delete;
    RemoteKey& operator=(const RemoteKey&) = delete;
    ~RemoteKey();

    [[nodiscard]] capi::RemoteKey handle() const;
    [[nodiscard]] const std::shared_ptr<Endpoint>& endpoint() const noexcept { return endpoint_; }
    /// Where an address of the peer is in this process: only for memory that the peer's UCX
    /// allocated, on the same host. Null otherwise.
    [[nodiscard]] void* pointer(std::uint64_t remote) const;

  private:
    friend class Endpoint;
    void destroy() noexcept;

    const std::shared_ptr<Endpoint> endpoint_;
    capi::RemoteKey handle_ = nullptr;
};

}  // namespace pynixlkv::ucx
