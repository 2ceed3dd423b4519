#include "ucx/listener.hpp"

#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/unique_handle.hpp"

namespace pynixlkv::ucx {

namespace {

struct DestroyListener {
    const Library* library = nullptr;
    void operator()(capi::Listener listener) const { library->fn().listener_destroy(listener); }
};

}  // namespace

std::shared_ptr<Listener> Listener::create(std::shared_ptr<Worker> worker,
                                           const SocketAddress& address) {
    return std::shared_ptr<Listener>(new Listener(std::move(worker), address));
}

Listener::Listener(std::shared_ptr<Worker> worker, const SocketAddress& address)
    : worker_(std::move(worker)) {
    const Library& library = worker_->library();
    capi::ListenerParams params{};
    params.mask = capi::ListenerParams::kSocketAddress | capi::ListenerParams::kOnRequest;
    params.socket_address = address.native();
    params.on_request = &Listener::on_request;
    params.request_argument = this;
    capi::Listener raw = nullptr;
    library.check(fn().listener_create(worker_->handle(), &params, &raw), "ucp_listener_create",
                  [&address] {
                      return text("listening on port ", address.port(),
                                  "; is the address one of this host, the port free, and does "
                                  "UCX_TLS name a transport that listens (tcp)?");
                  });
    UniqueHandle<capi::Listener, DestroyListener> listener(raw, {&library});
    capi::ListenerAttr attr{};
    attr.mask = capi::ListenerAttr::kSocketAddress;
    library.check(fn().listener_query(raw, &attr), "ucp_listener_query",
                  [] { return "asking for the address of a listener"; });
    port_ = SocketAddress(attr.socket_address).port();
    handle_ = listener.release();
}

Listener::~Listener() {
    close();
}

/// Runs inside of UCX, which knows no exceptions.
void Listener::on_request(capi::ConnectionRequest request, void* argument) noexcept {
    static_cast<Listener*>(argument)->waiting_.push_back(request);
}

std::shared_ptr<Endpoint> Listener::accept() {
    if (handle_ == nullptr) {
        throw Error("ClosedError", "the listener is closed");
    }
    if (waiting_.empty()) {
        return nullptr;
    }
    auto* const request = waiting_.front();
    waiting_.pop_front();
    return Endpoint::accept(worker_, request);
}

void Listener::close() {
    if (handle_ == nullptr || !worker_->context()->process().is_here()) {
        return;
    }
    const std::lock_guard lock(worker_->mutex());
    for (auto* const request : std::exchange(waiting_, {})) {
        (void)fn().listener_reject(handle_, request);
    }
    fn().listener_destroy(std::exchange(handle_, nullptr));
}

}  // namespace pynixlkv::ucx
