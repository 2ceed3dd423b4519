/// @file
/// Connections by socket address, as seen by the side that waits for them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "base/live_count.hpp"
#include "ucx/endpoint.hpp"

namespace pynixlkv::ucx {

/// Listens on a socket address. Externally synchronised, see Worker, whose progress brings
/// requests.
class Listener : LiveCounted<Listener> {
  public:
    static constexpr const char* kLiveName = "ucx.Listener";

    /// @param address port 0 lets the system choose one
    /// @throws UcxError when no transport can listen there
    [[nodiscard]] static std::shared_ptr<Listener> create(std::shared_ptr<Worker> worker,
                                                          const SocketAddress& address);
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;
    ~Listener();

    [[nodiscard]] const std::shared_ptr<Worker>& worker() const noexcept { return worker_; }
    [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
    [[nodiscard]] std::size_t num_waiting() const noexcept { return waiting_.size(); }
    /// Accept the request that has waited longest.
    /// @return null if none waits
    /// @throws Error ClosedError, UcxError when it cannot be accepted
    [[nodiscard]] std::shared_ptr<Endpoint> accept();
    /// Reject what waits and listen no more; what was accepted stays. Idempotent.
    void close();

  private:
    friend class LiveCounted<Listener>;
    Listener(std::shared_ptr<Worker> worker, const SocketAddress& address);
    static void on_request(capi::ConnectionRequest request, void* argument) noexcept;
    [[nodiscard]] const capi::Functions& fn() const noexcept { return worker_->library().fn(); }

    const std::shared_ptr<Worker> worker_;
    capi::Listener handle_ = nullptr;
    std::uint16_t port_ = 0;
    std::deque<capi::ConnectionRequest> waiting_;
};

}  // namespace pynixlkv::ucx
