#include "ucx/worker.hpp"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::ucx {

namespace {

Status deliver(void* argument, const void* header, std::size_t header_length, void* data,
               std::size_t length, const capi::AmReceived* received) {
    if ((received->attributes & capi::AmReceived::kIsRendezvous) != 0) {
        // Not fetched: our peers send eagerly.
        return Status::kOk;
    }
    (*static_cast<MessageHandler*>(argument))({static_cast<const char*>(header), header_length},
                                              {static_cast<const char*>(data), length});
    return Status::kOk;
}

}  // namespace

Worker::Worker(std::shared_ptr<Context> context) : context_(std::move(context)) {
    context_->process().require_here("a UCX context");
    capi::WorkerParams params{};
    params.mask = capi::WorkerParams::kThreadMode;
    params.thread_mode = capi::kThreadSerialized;
    capi::Worker raw = nullptr;
    library().check(library().fn().worker_create(context_->handle(), &params, &raw),
                    "ucp_worker_create", [] { return "making a worker"; });
    UniqueHandle worker(raw, library().fn().worker_destroy);
    library().check(library().fn().worker_get_efd(raw, &event_fd_), "ucp_worker_get_efd", [] {
        return "asking for an event descriptor; every transport of UCX_TLS must offer events";
    });
    handle_ = worker.release();
}

Worker::~Worker() {
    if (context_->process().is_here()) {
        const auto inside = enter();
        library().fn().worker_destroy(handle_);
    }
}

Worker::Inside Worker::enter() const {
    context_->process().require_here("a UCX worker");
    return {std::unique_lock(mutex_), context_->devices().enter()};
}

void Worker::sleep(TimePoint until) const {
    // Another thread may consume the event that this one waits for.
    constexpr auto kLongest = std::chrono::milliseconds(20);
    const auto left = std::clamp(
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()),
        std::chrono::milliseconds::zero(), kLongest);
    pollfd event{event_fd_, POLLIN, 0};
    (void)::poll(&event, 1, static_cast<int>(left.count()));
}

std::string Worker::address() const {
    capi::Address raw = nullptr;
    std::size_t length = 0;
    library().check(library().fn().worker_get_address(handle_, &raw, &length),
                    "ucp_worker_get_address", [] { return "asking for the worker's address"; });
    std::string address(reinterpret_cast<const char*>(raw), length);
    library().fn().worker_release_address(handle_, raw);
    return address;
}

bool Worker::arm() {
    const Status status = library().fn().worker_arm(handle_);
    if (status == Status::kBusy) {
        return false;
    }
    library().check(status, "ucp_worker_arm", [] { return "arming a worker's event descriptor"; });
    return true;
}

void Worker::on_message(MessageHandler handler) {
    handler_ = std::move(handler);
    capi::AmHandler params{};
    params.mask = capi::AmHandler::kId | capi::AmHandler::kFlags | capi::AmHandler::kCallback |
                  capi::AmHandler::kArgument;
    params.id = kMessageId;
    params.flags = capi::AmHandler::kWholeMessage;
    params.callback = &deliver;
    params.argument = &handler_;
    library().check(library().fn().worker_set_am_recv_handler(handle_, &params),
                    "ucp_worker_set_am_recv_handler",
                    [] { return text("active messages of id ", kMessageId); });
}

}  // namespace pynixlkv::ucx
