#include "ucx/request.hpp"

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::ucx {

void Request::cancel() {
    if (void* native = completion_.last()) {
        is_cancelled_ = true;
        const Worker& worker = *endpoint_->worker();
        worker.library().fn().request_cancel(worker.handle(), native);
    }
}

bool Request::check() const {
    if (is_cancelled_) {
        throw Error("TransferCancelled",
                    text("the request (", call_, ") was given up by its owner",
                         is_done() ? "" : "; UCX goes on with it, so its memory stays in use"));
    }
    if (!is_done()) {
        return false;
    }
    if (completion_.status() != Status::kOk) {
        throw make_error(endpoint_->failure().value_or(completion_.status()), call_,
                         endpoint_->failure() ? "the connection is lost" : "the request");
    }
    return true;
}

void Request::retire(Request* request) {
    std::unique_ptr<Request> owned(request);
    const auto endpoint = request->endpoint_;
    const std::lock_guard lock(endpoint->worker()->mutex());
    if (owned->is_done() || !endpoint->worker()->context()->process().is_here()) {
        owned.reset();
    } else {
        endpoint->park(std::move(owned));
    }
}

}  // namespace pynixlkv::ucx
