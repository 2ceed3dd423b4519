#include "ucx/endpoint.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "base/bytes.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "ucx/request.hpp"

namespace pynixlkv::ucx {

namespace {

// UCX reads addresses and keys without knowing their length. Zeros behind them keep it from reading
// unrelated memory when a length inside them is wrong.
constexpr std::size_t kPadding = 4096;
// Longest wait for a forced close, which is local.
constexpr auto kCloseDeadline = std::chrono::seconds(5);
// Longest wait for a close that needs the peer.
constexpr auto kAskedCloseDeadline = std::chrono::milliseconds(100);

/// Transports that only send messages, or reach device memory only (`ucx_info -d` shows what each
/// can).
constexpr std::array<std::string_view, 6> kTwoSided{"tcp",      "ud_verbs",  "ud_mlx5",
                                                    "cuda_ipc", "cuda_copy", "gdr_copy"};
constexpr std::size_t kMaxTransports = 64;  // UCP_MAX_LANES in src/ucp/core/ucp_types.h

/// Check what UCX does not: it follows the lengths inside a packed key, and uses the type of memory
/// as an index. The format is that of `ucp_rkey_packed_copy` in src/ucp/core/ucp_rkey.c (UCX 1.18
/// to 1.23). What may come after the keys of the memory domains is not read.
/// @throws Error WireError
void check_packed_key(std::string_view packed) {
    ByteReader in(packed, "the bytes of a remote key of the peer");
    auto domains = in.get<std::uint64_t>();
    const auto type = in.get<std::uint8_t>();
    if (type != capi::kMemoryHost && type != capi::kMemoryCuda) {
        throw Error("WireError", text("a remote key of the peer is for memory of type ",
                                      unsigned{type}, "; expected 0 (host) or 1 (CUDA)"));
    }
    for (; domains != 0; domains &= domains - 1) {
        (void)in.get_raw(in.get<std::uint8_t>());
    }
}

std::string padded(std::string_view bytes) {
    std::string copy(bytes);
    copy.append(kPadding, '\0');
    return copy;
}

}  // namespace

Endpoint::Endpoint(std::shared_ptr<Worker> worker, std::string_view address, capi::ErrorMode errors)
    : worker_(std::move(worker)), errors_(errors) {
    if (address.empty()) {
        throw Error("WireError", "the UCX address of the peer is empty");
    }
    const std::string bytes = padded(address);
    capi::EndpointParams params{};
    params.mask = capi::EndpointParams::kRemoteAddress | capi::EndpointParams::kErrorMode |
                  capi::EndpointParams::kErrorHandler;
    params.address = bytes.data();
    params.error_mode = errors;
    params.error_handler = &Endpoint::on_error;
    params.error_argument = this;
    worker_->library().check(
        fn().ep_create(worker_->handle(), &params, &handle_), "ucp_ep_create", [errors] {
            return text("no transport", errors == capi::kErrorPeer ? " with error handling" : "",
                        " reaches the peer: does its process live, and do UCX_TLS and "
                        "UCX_NET_DEVICES of both sides agree?");
        });
}

Endpoint::~Endpoint() {
    close();
}

void Endpoint::on_error(void* argument, capi::Endpoint /*handle*/, Status status) noexcept {
    auto* self = static_cast<Endpoint*>(argument);
    self->failure_ = status;
    self->worker_->note_failure();
}

std::vector<std::string> Endpoint::transports() const {
    std::array<capi::Transport, kMaxTransports> transports{};
    capi::EndpointAttr attr{};
    attr.mask = capi::EndpointAttr::kTransports;
    attr.transports = transports.data();
    attr.num_transports = transports.size();
    attr.transport_bytes = sizeof(capi::Transport);
    worker_->library().check(fn().ep_query(usable(), &attr), "ucp_ep_query",
                             [] { return "asking for the transports of a connection"; });
    std::vector<std::string> names;
    for (std::size_t i = 0; i < attr.num_transports; ++i) {
        names.emplace_back(transports[i].name);
    }
    return names;
}

bool Endpoint::is_one_sided() const {
    const std::vector<std::string> names = transports();
    return std::any_of(names.begin(), names.end(), [](const std::string& name) {
        return std::find(kTwoSided.begin(), kTwoSided.end(), name) == kTwoSided.end();
    });
}

capi::Endpoint Endpoint::usable() const {
    if (handle_ == nullptr) {
        throw Error("ClosedError", "the endpoint is closed");
    }
    return handle_;
}

void Endpoint::move(Completion& completion, transfer::Op op, std::uint64_t local,
                    std::size_t length, capi::Memory memory, std::uint64_t remote,
                    const RemoteKey& key) {
    capi::RequestParams params = completion.params();
    params.mask |= capi::RequestParams::kMemory | capi::RequestParams::kMultiSend;
    params.memory = memory;
    auto* const bytes = reinterpret_cast<void*>(local);  // NOLINT(performance-no-int-to-ptr)
    completion.add(op == transfer::Op::kRead
                       ? fn().get_nbx(usable(), bytes, length, remote, key.handle(), &params)
                       : fn().put_nbx(usable(), bytes, length, remote, key.handle(), &params));
}

void Endpoint::flush(Completion& completion) {
    const capi::RequestParams params = completion.params();
    completion.add(fn().ep_flush_nbx(usable(), &params));
}

void Endpoint::send(Completion& completion, std::string_view header, std::string_view data) {
    capi::RequestParams params = completion.params();
    params.mask |= capi::RequestParams::kFlags;
    params.flags = capi::kAmSendEager | capi::kAmSendCopyHeader;
    completion.add(fn().am_send_nbx(usable(), kMessageId, header.data(), header.size(), data.data(),
                                    data.size(), &params));
}

void Endpoint::quarantine(std::unique_ptr<Request> request) {
    quarantined_.push_back(std::move(request));
    // UCX tells the requests of a closed endpoint with the next progress.
    while (is_closed() && worker_->progress() > 0) {
    }
    (void)release_ended();
}

bool Endpoint::release_ended() {
    std::erase_if(quarantined_, [](const auto& request) { return request->is_done(); });
    return quarantined_.empty();
}

void Endpoint::close() {
    if (handle_ == nullptr || !worker_->context()->process().is_here()) {
        return;
    }
    const auto inside = worker_->enter();
    for (RemoteKey* key : keys_) {
        key->destroy();
    }
    keys_.clear();
    const bool by_force = errors_ == capi::kErrorPeer;
    capi::RequestParams params{};
    params.mask = capi::RequestParams::kFlags;
    params.flags = by_force ? capi::kCloseForce : 0;
    void* request = fn().ep_close_nbx(std::exchange(handle_, nullptr), &params);
    const auto number = reinterpret_cast<std::intptr_t>(request);
    const auto deadline =
        std::chrono::steady_clock::now() +
        (by_force ? std::chrono::milliseconds(kCloseDeadline) : kAskedCloseDeadline);
    // Otherwise it is done, or refused, which nothing can be done about.
    if (number > 0 || number < static_cast<std::intptr_t>(Status::kLast)) {
        while (fn().request_check_status(request) == Status::kInProgress &&
               std::chrono::steady_clock::now() < deadline) {
            worker_->progress();
        }
        fn().request_free(request);
    }
    while (!release_ended() && std::chrono::steady_clock::now() < deadline) {
        worker_->progress();
    }
}

RemoteKey::RemoteKey(std::shared_ptr<Endpoint> endpoint, std::string_view packed)
    : endpoint_(std::move(endpoint)) {
    check_packed_key(packed);
    const std::string bytes = padded(packed);
    capi::RemoteKey handle = nullptr;
    endpoint_->worker()->library().check(
        endpoint_->fn().ep_rkey_unpack(endpoint_->usable(), bytes.data(), &handle),
        "ucp_ep_rkey_unpack", [&] { return text("a remote key of ", packed.size(), " bytes"); });
    handle_ = handle;
    endpoint_->keys_.insert(this);
}

RemoteKey::~RemoteKey() {
    if (!endpoint_->worker()->context()->process().is_here()) {
        return;
    }
    const auto inside = endpoint_->worker()->enter();
    endpoint_->keys_.erase(this);
    destroy();
}

void RemoteKey::destroy() noexcept {
    if (handle_ != nullptr) {
        endpoint_->fn().rkey_destroy(std::exchange(handle_, nullptr));
    }
}

capi::RemoteKey RemoteKey::handle() const {
    if (handle_ == nullptr) {
        throw Error("ClosedError", "the endpoint of the remote key is closed");
    }
    return handle_;
}

void* RemoteKey::pointer(std::uint64_t remote) const {
    void* pointer = nullptr;
    const Status status = endpoint_->fn().rkey_ptr(handle(), remote, &pointer);
    return status == Status::kOk ? pointer : nullptr;
}

}  // namespace pynixlkv::ucx
