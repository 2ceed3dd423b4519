/// @file
/// A connection to one peer, and its outgoing messages.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "transfer/driver.hpp"
#include "ucx/endpoint.hpp"
#include "ucx/message.hpp"
#include "ucx/peer_memory.hpp"
#include "ucx/regions.hpp"

namespace pynixlkv::ucx {

/// @throws ConnectionLost if the endpoint has failed or the status says so, else NativeError
[[noreturn]] void throw_failure(const Endpoint& endpoint, Status status, const char* call,
                                const std::string& detail);

/// Outgoing messages. Destroy it after its endpoint is closed.
class Outbox {
  public:
    explicit Outbox(std::shared_ptr<Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}
    /// Leaks the bytes of unsent messages, which UCX may still read.
    ~Outbox();

    /// @throws NativeError when the message fails at once
    void send(std::string_view header, std::string data, const std::string& peer);
    /// Number of unsent messages.
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

class Lanes;
class OwnLane;

class UcxConnection final : public transfer::Connection {
  public:
    UcxConnection(std::shared_ptr<Endpoint> to, std::shared_ptr<const RemoteRegions> keys,
                  std::string peer, std::uint64_t its_token, std::shared_ptr<Unopened> unopened,
                  std::shared_ptr<Endpoint> spare = {}, std::optional<PeerMemory> its_memory = {});
    ~UcxConnection() override;

    /// Send a message as this connection's.
    void send(MessageHeader header, std::string data) {
        header.token = token;
        header.connection = number;
        outbox_.send(make_header(header), std::move(data), name);
    }

    /// Use the keys of newer metadata.
    /// @throws NativeError when the connection fails
    void refresh(std::shared_ptr<const RemoteRegions> keys);

    /// Make progress until a condition holds, the connection breaks, or time is up.
    template <class Condition>
    void progress_until(std::chrono::milliseconds longest, Condition condition) {
        const auto deadline = std::chrono::steady_clock::now() + longest;
        while (!condition() && !endpoint->failure() &&
               std::chrono::steady_clock::now() < deadline) {
            endpoint->worker()->progress();
        }
    }

    /// UCX's, and our own for host memory.
    [[nodiscard]] std::vector<std::string> transports() const override;
    [[nodiscard]] bool has_failed() const override { return endpoint->failure().has_value(); }
    /// Whether the peer may have to take part in transfers of host memory.
    [[nodiscard]] bool may_be_served() const { return !is_one_sided || regions->has_served; }
    [[nodiscard]] bool is_quiet() { return outbox_.num_waiting() == 0; }

    const std::string name;
    const std::shared_ptr<Endpoint> endpoint;
    /// Replaced by a refresh; transfers in flight keep the one that they began with.
    std::shared_ptr<const RemoteRegions> regions;
    /// From the metadata of the peer, which takes no message without it.
    const std::uint64_t token;
    /// Names this connection to the peer's Clients and to its lanes.
    const std::uint64_t number;
    const bool is_one_sided;
    /// If the peer is a process of this host whose memory this one may copy.
    std::optional<PeerMemory> memory;
    std::string worker_id;  ///< of the peer
    bool is_local = false;  ///< whether the peer's process is one of this host
    /// Attempts, one for each way to the peer. The first to succeed decides the way; further lanes
    /// take it, because a network may limit what one connection of it carries.
    std::vector<std::shared_ptr<OwnLane>> lanes;
    /// Begins a lane beside another; may return null. Not set within one host, where lanes share
    /// its processors.
    std::function<std::shared_ptr<OwnLane>(const OwnLane&)> add_lane;
    /// The one with the least to do; null while there is none, or all have much to do.
    /// @throws ConnectionLost if all have failed
    [[nodiscard]] std::shared_ptr<OwnLane> lane();

  private:
    /// Send kOpen, once, if the peer has to know this connection: to close its own end of it.
    void introduce();

    const std::shared_ptr<Unopened> unopened_;
    /// Unused; closing it would close the peer's own connection.
    const std::shared_ptr<Endpoint> spare_;
    Outbox outbox_;
    bool is_introduced_ = false;
    std::size_t num_added_lanes_ = 0;
};

/// Rows that move between both sides, and the requests in flight for them.
class UcxXfer : public transfer::NativeXfer {
  protected:
    struct Part {
        std::uint64_t local;
        std::uint64_t remote;
        std::uint64_t length;
        capi::Memory memory;
        const RemoteRegion* region;
        bool is_fragile;  ///< the local memory
    };

    /// @throws Error NotRegisteredError
    UcxXfer(UcxConnection& connection, const LocalRegions& local_regions, transfer::Op op,
            const transfer::DescriptorPairs& rows);

    [[nodiscard]] bool has_failed() const {
        return completion_.status() != Status::kOk || endpoint_->failure();
    }
    [[nodiscard]] std::string what() const;
    [[noreturn]] void fail(const char* call) const {
        throw_failure(*endpoint_, completion_.status(), call, what());
    }

    UcxConnection& connection_;
    const std::shared_ptr<Endpoint> endpoint_;
    const std::shared_ptr<const RemoteRegions> regions_;
    const transfer::Op op_;
    Completion completion_;
    std::vector<Part> parts_;
    std::size_t next_ = 0;  ///< part to move next
};

}  // namespace pynixlkv::ucx
