/// @file
/// Connections to workers of peers, and keys to their memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "base/live_count.hpp"
#include "transfer/types.hpp"
#include "ucx/worker.hpp"

namespace pynixlkv::ucx {

class RemoteKey;
class Request;

/// The native call that moves bytes in a direction.
[[nodiscard]] constexpr const char* call_of(transfer::Op op) noexcept {
    return op == transfer::Op::kRead ? "ucp_get_nbx" : "ucp_put_nbx";
}

/// A connection to one worker of a peer. Externally synchronised, see Worker.
class Endpoint : LiveCounted<Endpoint> {
  public:
    static constexpr const char* kLiveName = "ucx.Endpoint";

    /// Returns before the peer is reached; progress on both sides completes the connection.
    /// @param address the peer's Worker::address(). UCX trusts these bytes: verify their integrity
    ///        first
    /// @param errors the same at both sides
    /// @throws UcxError when no transport reaches the peer
    Endpoint(std::shared_ptr<Worker> worker, std::string_view address,
             capi::ErrorMode errors = capi::kErrorPeer);
    ~Endpoint();

    [[nodiscard]] const std::shared_ptr<Worker>& worker() const noexcept { return worker_; }
    /// The error that ended the connection.
    [[nodiscard]] std::optional<Status> failure() const noexcept { return failure_; }
    [[nodiscard]] capi::ErrorMode errors() const noexcept { return errors_; }
    [[nodiscard]] bool is_closed() const noexcept { return handle_ == nullptr; }
    /// Names of the transports that UCX chose for it.
    [[nodiscard]] std::vector<std::string> transports() const;
    /// Whether any of its transports has gets and puts.
    [[nodiscard]] bool is_one_sided() const;

    void move(Completion& completion, transfer::Op op, std::uint64_t local, std::size_t length,
              capi::Memory memory, std::uint64_t remote, const RemoteKey& key);
    /// Complete when all earlier requests are complete at the peer.
    void flush(Completion& completion);
    /// Send an active message. The data, not the header, must stay in place until completion.
    void send(Completion& completion, std::string_view header, std::string_view data);

    /// Keep a request whose owner dropped it until it has ended.
    void quarantine(std::unique_ptr<Request> request);

    /// Close without asking the peer; requests in flight end as cancelled before this returns.
    /// Without error handling UCX cannot force-close: wait up to 0.1 s, then leave the rest to UCX.
    void close();

  private:
    friend class RemoteKey;
    static void on_error(void* argument, capi::Endpoint handle, Status status) noexcept;
    [[nodiscard]] const capi::Functions& fn() const noexcept { return worker_->library().fn(); }
    [[nodiscard]] capi::Endpoint usable() const;
    /// @return whether no request is left; those that are keep the endpoint alive
    bool release_ended();

    const std::shared_ptr<Worker> worker_;
    const capi::ErrorMode errors_;
    capi::Endpoint handle_ = nullptr;
    std::optional<Status> failure_;
    std::set<RemoteKey*> keys_;
    std::vector<std::unique_ptr<Request>> quarantined_;
};

/// Access to memory of a peer through one endpoint.
class RemoteKey : LiveCounted<RemoteKey> {
  public:
    static constexpr const char* kLiveName = "ucx.RemoteKey";

    /// @param packed the peer's MemoryHandle::pack(); as trusted as an address
    RemoteKey(std::shared_ptr<Endpoint> endpoint, std::string_view packed);
    ~RemoteKey();

    [[nodiscard]] capi::RemoteKey handle() const;
    [[nodiscard]] const std::shared_ptr<Endpoint>& endpoint() const noexcept { return endpoint_; }
    /// Where an address of the peer is mapped in this process: only for memory that the peer's UCX
    /// allocated, on the same host. Null otherwise.
    [[nodiscard]] void* pointer(std::uint64_t remote) const;

  private:
    friend class Endpoint;
    void destroy() noexcept;

    const std::shared_ptr<Endpoint> endpoint_;
    capi::RemoteKey handle_ = nullptr;
};

}  // namespace pynixlkv::ucx
