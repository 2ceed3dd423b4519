/// @file
/// UCX workers, and the counting of what is under way on them.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/live_count.hpp"
#include "ucx/context.hpp"

namespace pynixlkv::ucx {

using TimePoint = std::chrono::steady_clock::time_point;

/// Counts the requests that one owner has under way and keeps the first failure among them. UCX
/// writes to it from within Worker::progress(), so it must stay in place until it is quiet.
class Completion {
  public:
    explicit Completion(const Library& library) : library_(&library) {}
    Completion(const Completion&) = delete;
    Completion& operator=(const Completion&) = delete;

    /// Whether nothing is under way.
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

    /// Count what a call returned.
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
        last_ = returned;
    }

    /// What the last call returned, for those who make no more than one; null if that has ended.
    [[nodiscard]] void* last() const noexcept { return is_quiet() ? nullptr : last_; }

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
    void* last_ = nullptr;
    Status status_ = Status::kOk;
};

/// Called from within progress() with an active message, whose bytes are gone when it returns.
using MessageHandler = std::function<void(std::string_view header, std::string_view data)>;

/// A progress engine. It and what hangs from it may be used by several threads, one at a time:
/// callers that share one hold what `enter()` gives around each use. Destructors do it themselves.
class Worker : public std::enable_shared_from_this<Worker>, LiveCounted<Worker> {
  public:
    static constexpr const char* kLiveName = "ucx.Worker";

    /// @param single_thread promise to UCX that only this thread will use the worker
    [[nodiscard]] static std::shared_ptr<Worker> create(std::shared_ptr<Context> context,
                                                        bool single_thread = false);
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    ~Worker();

    /// Keep other threads out for as long as the result lives.
    /// @throws Error ForkError in a child process, StateError on a thread to which a
    /// single-threaded
    ///         worker does not belong
    [[nodiscard]] std::unique_lock<std::recursive_mutex> enter() const;
    [[nodiscard]] std::recursive_mutex& mutex() const noexcept { return mutex_; }
    [[nodiscard]] const std::shared_ptr<Context>& context() const noexcept { return context_; }
    [[nodiscard]] const Library& library() const noexcept { return context_->library(); }
    [[nodiscard]] capi::Worker handle() const noexcept { return handle_; }

    /// What a peer makes an endpoint with.
    [[nodiscard]] std::string address() const;
    /// @return how much was done; 0 if there was nothing to do
    unsigned progress() noexcept { return library().fn().worker_progress(handle_); }
    /// A descriptor that becomes readable when progress() will have something to do. Sleep on it
    /// only after arm() returned true.
    [[nodiscard]] int event_fd() const noexcept { return event_fd_; }
    /// @return false if there is something to do right now
    [[nodiscard]] bool arm();
    /// Make progress until a condition holds, looking at it with other threads kept out.
    /// @param spin burn the processor instead of sleeping on the event descriptor
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
    /// Make event_fd() readable. May be called by any thread.
    void signal();
    /// Call a function for every active message of an id, from now on.
    void on_message(unsigned id, MessageHandler handler);

  private:
    friend class LiveCounted<Worker>;
    Worker(std::shared_ptr<Context> context, bool single_thread);
    void sleep(TimePoint until) const;

    const std::shared_ptr<Context> context_;
    const std::optional<std::thread::id> owner_;  ///< of a single-threaded worker
    mutable std::recursive_mutex mutex_;
    capi::Worker handle_ = nullptr;
    int event_fd_ = -1;
    std::vector<std::unique_ptr<MessageHandler>> handlers_;
};

}  // namespace pynixlkv::ucx
