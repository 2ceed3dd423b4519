/// @file
/// UCX workers, and the counting of requests in flight.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "base/live_count.hpp"
#include "ucx/context.hpp"

namespace pynixlkv::ucx {

using TimePoint = std::chrono::steady_clock::time_point;

/// Counts the requests that one owner has in flight, and keeps their first failure. UCX writes to
/// it from within Worker::progress(), so it must stay in place until it is quiet.
class Completion {
  public:
    explicit Completion(const Library& library) : library_(&library) {}
    Completion(const Completion&) = delete;
    Completion& operator=(const Completion&) = delete;

    /// Whether no request is in flight.
    [[nodiscard]] bool is_quiet() const noexcept { return pending_ == 0; }
    [[nodiscard]] std::size_t pending() const noexcept { return pending_; }
    /// kOk, or the first failure.
    [[nodiscard]] Status status() const noexcept { return status_; }

    /// Parameters of a call whose result goes to `add`.
    [[nodiscard]] capi::RequestParams params() noexcept {
        capi::RequestParams params{};
        params.mask = capi::RequestParams::kCallback | capi::RequestParams::kUserData;
        params.callback = &Completion::on_done;
        params.user_data = this;
        return params;
    }

    /// Count the request that a call returned, if it did not complete at once.
    void add(capi::StatusPointer returned) noexcept {
        if (returned == nullptr) {
            return;
        }
        const auto number = reinterpret_cast<std::intptr_t>(returned);
        if (number < 0 && number >= static_cast<std::intptr_t>(Status::kLast)) {
            note(static_cast<Status>(number));
            return;
        }
        ++pending_;
    }

  private:
    static void on_done(void* request, Status status, void* user_data) noexcept {
        auto* self = static_cast<Completion*>(user_data);
        --self->pending_;
        self->note(status);
        self->library_->fn().request_free(request);
    }
    void note(Status status) noexcept {
        if (status_ == Status::kOk) {
            status_ = status;
        }
    }

    const Library* library_;
    std::size_t pending_ = 0;
    Status status_ = Status::kOk;
};

/// The id of all active messages between agents; headers tell them apart.
inline constexpr unsigned kMessageId = 77;

/// Called from within progress() with an active message, whose bytes are valid during the call.
using MessageHandler = std::function<void(std::string_view header, std::string_view data)>;

/// A progress engine. One thread at a time may use it and its endpoints, keys and requests: callers
/// that share one hold the lock of `enter()` around each use. Destructors lock by themselves.
class Worker : LiveCounted<Worker> {
  public:
    static constexpr const char* kLiveName = "ucx.Worker";

    explicit Worker(std::shared_ptr<Context> context);
    ~Worker();

    struct Inside {
        std::unique_lock<std::recursive_mutex> lock;
        transfer::DeviceContexts::Scope context;
    };
    /// Keep other threads out, and the context of a device current, while the result lives.
    /// @throws Error ForkError in a child process
    [[nodiscard]] Inside enter() const;
    [[nodiscard]] const std::shared_ptr<Context>& context() const noexcept { return context_; }
    [[nodiscard]] const Library& library() const noexcept { return context_->library(); }
    [[nodiscard]] capi::Worker handle() const noexcept { return handle_; }

    /// Endpoints that have failed so far.
    [[nodiscard]] std::uint64_t num_failures() const noexcept { return num_failures_; }
    void note_failure() noexcept { ++num_failures_; }

    /// The address for a peer's endpoint.
    [[nodiscard]] std::string address() const;
    /// @return number of events; 0 if there were none
    unsigned progress() noexcept { return library().fn().worker_progress(handle_); }
    /// A file descriptor that becomes readable with the next event. Sleep on it only after arm()
    /// returned true.
    [[nodiscard]] int event_fd() const noexcept { return event_fd_; }
    /// @return false if events wait already
    [[nodiscard]] bool arm();
    /// Make progress until a condition holds, which is evaluated under the lock.
    /// @param spin poll without a pause instead of sleeping on the event descriptor
    /// @return whether it held in time
    template <class Condition>
    [[nodiscard]] bool progress_until(TimePoint until, bool spin, Condition condition) {
        for (;;) {
            {
                const auto inside = enter();
                progress();
                if (condition()) {
                    return true;
                }
                if (std::chrono::steady_clock::now() >= until) {
                    return false;
                }
                if (spin || !arm()) {
                    continue;
                }
            }
            sleep(until);
        }
    }
    void on_message(MessageHandler handler);

  private:
    void sleep(TimePoint until) const;

    const std::shared_ptr<Context> context_;
    mutable std::recursive_mutex mutex_;
    capi::Worker handle_ = nullptr;
    int event_fd_ = -1;
    std::uint64_t num_failures_ = 0;
    MessageHandler handler_;
};

}  // namespace pynixlkv::ucx
