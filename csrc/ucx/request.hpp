#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "base/live_count.hpp"
#include "ucx/endpoint.hpp"

namespace pynixlkv::ucx {

/// One native call in flight, with what it uses until it has ended. Externally synchronised, see
/// Worker.
class Request : LiveCounted<Request> {
  public:
    static constexpr const char* kLiveName = "ucx.Request";

    /// Whatever the call uses: memory, keys, bytes.
    using Keeps = std::vector<std::shared_ptr<const void>>;

    /// @param post receives the completion for the endpoint's functions
    /// @throws UcxError when the call fails at once
    template <class Post>
    [[nodiscard]] static std::shared_ptr<Request> start(std::shared_ptr<Endpoint> endpoint,
                                                        const char* call, Keeps keeps, Post post) {
        std::unique_ptr<Request> request(new Request(std::move(endpoint), call, std::move(keeps)));
        post(request->completion_);
        (void)request->check();
        // A request that is dropped before it has ended lives on at its endpoint.
        return {request.release(), [](Request* dropped) { retire(dropped); }};
    }

    [[nodiscard]] const std::shared_ptr<Endpoint>& endpoint() const noexcept { return endpoint_; }
    [[nodiscard]] bool is_done() const noexcept { return completion_.is_quiet(); }
    /// @return whether it is complete
    /// @throws UcxError when it has failed
    [[nodiscard]] bool check() const {
        if (!is_done()) {
            return false;
        }
        if (completion_.status() != Status::kOk) {
            throw make_error(endpoint_->failure().value_or(completion_.status()), call_,
                             endpoint_->failure() ? "the connection is lost" : "the request");
        }
        return true;
    }

  private:
    friend class LiveCounted<Request>;
    Request(std::shared_ptr<Endpoint> endpoint, const char* call, Keeps keeps)
        : endpoint_(std::move(endpoint)),
          call_(call),
          keeps_(std::move(keeps)),
          completion_(endpoint_->worker()->library()) {}
    static void retire(Request* request) {
        std::unique_ptr<Request> owned(request);
        const auto endpoint = request->endpoint_;
        if (!endpoint->worker()->context()->process().is_here()) {
            return;
        }
        const auto inside = endpoint->worker()->enter();
        if (owned->is_done()) {
            owned.reset();
        } else {
            endpoint->quarantine(std::move(owned));
        }
    }

    const std::shared_ptr<Endpoint> endpoint_;
    const char* const call_;
    const Keeps keeps_;
    Completion completion_;
};

}  // namespace pynixlkv::ucx
