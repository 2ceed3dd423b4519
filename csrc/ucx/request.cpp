#include "ucx/request.hpp"

namespace pynixlkv::ucx {

bool Request::check() const {
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
        endpoint->quarantine(std::move(owned));
    }
}

}  // namespace pynixlkv::ucx
