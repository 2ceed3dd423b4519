/// @file
/// A connection to one peer, and the messages that it has under way.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "transfer/driver.hpp"
#include "ucx/endpoint.hpp"
#include "ucx/regions.hpp"

namespace pynixlkv::ucx {

/// The active message id of everything that engines tell each other; headers say what it is.
inline constexpr unsigned kMessageId = 77;

/// @throws ConnectionLost if the endpoint has failed or the status says so, else NativeError
[[noreturn]] void throw_failure(const Endpoint& endpoint, Status status, const char* call,
                                const std::string& detail);

/// Messages on their way out. Destroy it after its endpoint is closed.
class Outbox {
  public:
    explicit Outbox(std::shared_ptr<Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}
    Outbox(const Outbox&) = delete;
    Outbox& operator=(const Outbox&) = delete;
    /// UCX may still have hold of the bytes: better lost than freed under it.
    ~Outbox();

    /// @throws NativeError when the message fails at once
    void send(std::string_view header, std::string data, const std::string& peer);
    /// Messages that have not left.
    [[nodiscard]] std::size_t num_waiting();

  private:
    struct Message {
        Message(const Library& library, std::string bytes)
            : completion(library), data(std::move(bytes)) {}
        Completion completion;
        const std::string data;
    };

    const std::shared_ptr<Endpoint> endpoint_;
    std::deque<std::unique_ptr<Message>> messages_;
};

class UcxConnection final : public transfer::Connection {
  public:
    UcxConnection(std::shared_ptr<Endpoint> to, std::shared_ptr<const RemoteRegions> keys,
                  std::string peer, std::shared_ptr<Endpoint> spare = {});
    UcxConnection(const UcxConnection&) = delete;
    UcxConnection& operator=(const UcxConnection&) = delete;
    ~UcxConnection() override;

    void send(std::string_view header, std::string data) {
        outbox_.send(header, std::move(data), name);
    }

    /// Let UCX work until a condition holds, the connection breaks, or time is up.
    template <class Condition>
    void progress_until(std::chrono::milliseconds longest, Condition condition) {
        const auto deadline = std::chrono::steady_clock::now() + longest;
        while (!condition() && !endpoint->failure() &&
               std::chrono::steady_clock::now() < deadline) {
            endpoint->worker()->progress();
        }
    }

    [[nodiscard]] bool is_quiet() { return outbox_.num_waiting() == 0; }

    const std::string name;
    const std::shared_ptr<Endpoint> endpoint;
    /// Replaced by a refresh; operations under way hold on to the one that they were made with.
    std::shared_ptr<const RemoteRegions> regions;
    /// The number under which the peer serves this connection; 0 where transports are one-sided.
    const std::uint64_t number;

  private:
    /// One that is not used, but whose end would be that of the peer's own connection.
    const std::shared_ptr<Endpoint> spare_;
    Outbox outbox_;
};

}  // namespace pynixlkv::ucx
