/// @file
/// A driver without a library: agents of one process that move real bytes with memcpy, respect the
/// bounds of registered memory, and fail on demand.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "transfer/driver.hpp"
#include "transfer/memory_map.hpp"

namespace pynixlkv::transfer {

/// The agents that can reach each other, and the faults injected between them. Thread-safe. Every
/// function that names an agent throws Error("UnknownPeerError") if there is none of that name.
class FakeNetwork {
  public:
    /// Operations to the agent take this long. The first half of each batch moves at once.
    void set_delay(const std::string& agent, Clock::duration delay) {
        set(agent, &Node::delay, delay);
    }
    /// Operations to the agent stay pending until resume(), as with a stopped process.
    void pause(const std::string& agent) { set(agent, &Node::paused, true); }
    void resume(const std::string& agent) { set(agent, &Node::paused, false); }
    /// Connections to the agent break, now and for as long as this incarnation lives.
    void kill(const std::string& agent) { set(agent, &Node::alive, false); }
    /// The next operations to the agent end with a library error.
    void fail_next(const std::string& agent, std::size_t count) {
        set(agent, &Node::failures, count);
    }
    /// The next notifications to the agent get lost on the way.
    void drop_notifications(const std::string& agent, std::size_t count) {
        set(agent, &Node::drops, count);
    }

  private:
    friend class FakeDriver;
    friend class FakeXfer;

    /// One incarnation of an agent.
    struct Node {
        std::string name;
        std::uint64_t token;  ///< of the incarnation
        MemoryMap memory;
        std::vector<Notification> inbox;
        Clock::duration delay{};
        bool alive = true;
        bool paused = false;
        std::size_t failures = 0;
        std::size_t drops = 0;
    };

    template <class T>
    void set(const std::string& agent, T Node::* member, T value) {
        const std::lock_guard lock(mutex_);
        const auto found = nodes_.find(agent);
        if (found == nodes_.end()) {
            throw Error("UnknownPeerError", "the fake network has no agent named '" + agent + "'");
        }
        (*found->second).*member = value;
    }
    static NativeError error(const std::string& call, const std::string& detail) {
        return {"fake", "backend", -2, call, detail, call + " failed: " + detail};
    }
    /// A killed agent moves nothing, in either direction.
    /// @throws ConnectionLost unless both ends are alive
    static void require_alive(const Node& self, const Node& peer, const std::string& call,
                              const std::string& before = "'",
                              const std::string& after = "' cannot be reached") {
        if (!self.alive || !peer.alive) {
            throw ConnectionLost(error(call, before + peer.name + after));
        }
    }

    std::mutex mutex_;
    std::uint64_t next_token_ = 1;
    std::map<std::string, std::shared_ptr<Node>> nodes_;
};

class FakeXfer final : public NativeXfer {
  public:
    using Node = FakeNetwork::Node;

    FakeXfer(std::shared_ptr<FakeNetwork> network, std::shared_ptr<const Node> self,
             std::shared_ptr<Node> peer, Op op, std::vector<Descriptor> local,
             std::vector<Descriptor> remote)
        : network_(std::move(network)),
          self_(std::move(self)),
          peer_(std::move(peer)),
          op_(op),
          local_(std::move(local)),
          remote_(std::move(remote)) {}

    void post() override {
        const std::lock_guard lock(network_->mutex_);
        FakeNetwork::require_alive(*self_, *peer_, "post");
        (void)peer_->memory.cover(remote_, "of peer '" + peer_->name + "'");
        ready_ = Clock::now() + peer_->delay;
        copy(0, half());
    }

    bool poll() override {
        const std::lock_guard lock(network_->mutex_);
        FakeNetwork::require_alive(*self_, *peer_, "poll", "the connection to '", "' broke");
        if (peer_->paused || Clock::now() < ready_) {
            return false;
        }
        if (peer_->failures > 0) {
            --peer_->failures;
            throw FakeNetwork::error("poll", "a failure was injected");
        }
        (void)peer_->memory.cover(remote_, "of peer '" + peer_->name + "'");
        copy(half(), local_.size());
        return true;
    }

  private:
    [[nodiscard]] std::size_t half() const noexcept { return local_.size() / 2; }

    /// Copy a part of the rows; the caller holds the network's lock.
    void copy(std::size_t first, std::size_t last) const {
        for (std::size_t i = first; i < last; ++i) {
            auto* here = reinterpret_cast<void*>(local_[i].address);    // NOLINT
            auto* there = reinterpret_cast<void*>(remote_[i].address);  // NOLINT
            if (op_ == Op::kRead) {
                std::memcpy(here, there, local_[i].length);
            } else {
                std::memcpy(there, here, local_[i].length);
            }
        }
    }

    const std::shared_ptr<FakeNetwork> network_;
    const std::shared_ptr<const Node> self_;
    const std::shared_ptr<Node> peer_;
    const Op op_;
    const std::vector<Descriptor> local_;
    const std::vector<Descriptor> remote_;
    TimePoint ready_{};
};

class FakeDriver : public Driver {
  public:
    /// @throws Error("DuplicatePeerError") when the network has an agent of that name
    FakeDriver(const std::string& name, std::shared_ptr<FakeNetwork> network)
        : network_(std::move(network)) {
        const std::lock_guard lock(network_->mutex_);
        std::shared_ptr<Node>& node = network_->nodes_[name];
        if (node && node->alive) {
            throw Error("DuplicatePeerError",
                        "the fake network has an agent named '" + name + "' already");
        }
        node = std::make_shared<Node>(name, network_->next_token_++);
        self_ = node;
    }
    ~FakeDriver() override {
        const std::lock_guard lock(network_->mutex_);
        self_->alive = false;
        if (network_->nodes_.at(self_->name) == self_) {  // there may be a successor
            network_->nodes_.erase(self_->name);
        }
    }

    std::unique_ptr<Registered> register_memory(std::span<const Span> spans) override {
        for (const Span& span : spans) {
            if (span.memory != Memory::kDram) {
                throw Error("RegistrationError",
                            span.row.str() + " is not host memory, which is all a FakeAgent moves");
            }
        }
        const std::lock_guard lock(network_->mutex_);
        const MemoryMap::Owner owner = network_->next_token_++;
        self_->memory.add(owner, spans);
        return std::make_unique<FakeRegistered>(network_, self_, owner);
    }
    std::string metadata() override { return std::to_string(self_->token); }
    std::unique_ptr<Connection> connect(const std::string& name, std::string_view metadata,
                                        std::optional<pid_t> /*process*/) override {
        if (metadata.empty() ||
            metadata.find_first_not_of("0123456789") != std::string_view::npos) {
            throw FakeNetwork::error("connect",
                                     "the metadata of '" + name + "' is not a fake agent's");
        }
        const std::lock_guard lock(network_->mutex_);
        const auto found = network_->nodes_.find(name);
        if (found == network_->nodes_.end() || !found->second->alive ||
            std::to_string(found->second->token) != metadata) {
            throw ConnectionLost(FakeNetwork::error("connect", "'" + name + "' cannot be reached"));
        }
        return std::make_unique<FakeConnection>(found->second);
    }
    void refresh(Connection& /*connection*/, std::string_view /*metadata*/) override {}
    bool is_alive(Connection& connection) override {
        const std::lock_guard lock(network_->mutex_);
        return node_of(connection)->alive;
    }
    std::unique_ptr<NativeXfer> make(Connection& connection, Op op,
                                     const DescriptorPairs& rows) override {
        return make_xfer(connection, op, {rows.local.begin(), rows.local.end()},
                         {rows.remote.begin(), rows.remote.end()});
    }
    std::unique_ptr<Prepared> prepare(Connection& /*connection*/,
                                      const DescriptorPairs& rows) override {
        return std::make_unique<FakePrepared>(rows);
    }
    std::unique_ptr<NativeXfer> make(Connection& connection, Op op, Prepared& prepared,
                                     const IndexPairs& indices) override {
        const auto& lists = static_cast<const FakePrepared&>(prepared);
        const auto pick = [](const std::vector<Descriptor>& from,
                             std::span<const std::int32_t> which) {
            std::vector<Descriptor> rows;
            for (const std::int32_t i : which) {
                rows.push_back(from.at(static_cast<std::size_t>(i)));
            }
            return rows;
        };
        return make_xfer(connection, op, pick(lists.local, indices.local),
                         pick(lists.remote, indices.remote));
    }
    void notify(Connection& connection, const std::string& message) override {
        Node& peer = *node_of(connection);
        const std::lock_guard lock(network_->mutex_);
        FakeNetwork::require_alive(*self_, peer, "notify");
        if (peer.drops > 0) {
            --peer.drops;
            return;
        }
        peer.inbox.push_back({self_->name, message});
    }
    bool receive(std::vector<Notification>& into) override {
        const std::lock_guard lock(network_->mutex_);
        if (self_->alive && !self_->paused) {
            std::move(self_->inbox.begin(), self_->inbox.end(), std::back_inserter(into));
            self_->inbox.clear();
        }
        return false;
    }

  private:
    using Node = FakeNetwork::Node;

    struct FakeConnection final : Connection {
        explicit FakeConnection(std::shared_ptr<Node> peer) : node(std::move(peer)) {}
        const std::shared_ptr<Node> node;
    };

    struct FakePrepared final : Prepared {
        explicit FakePrepared(const DescriptorPairs& rows)
            : local(rows.local.begin(), rows.local.end()),
              remote(rows.remote.begin(), rows.remote.end()) {}
        const std::vector<Descriptor> local;
        const std::vector<Descriptor> remote;
    };

    struct FakeRegistered final : Registered {
        FakeRegistered(std::shared_ptr<FakeNetwork> of, std::shared_ptr<Node> at,
                       MemoryMap::Owner id)
            : network(std::move(of)), node(std::move(at)), owner(id) {}
        ~FakeRegistered() override {
            const std::lock_guard lock(network->mutex_);
            node->memory.remove(owner);
        }
        const std::shared_ptr<FakeNetwork> network;
        const std::shared_ptr<Node> node;
        const MemoryMap::Owner owner;
    };

    static const std::shared_ptr<Node>& node_of(Connection& connection) {
        return static_cast<const FakeConnection&>(connection).node;
    }
    std::unique_ptr<NativeXfer> make_xfer(Connection& connection, Op op,
                                          std::vector<Descriptor> local,
                                          std::vector<Descriptor> remote) {
        return std::make_unique<FakeXfer>(network_, self_, node_of(connection), op,
                                          std::move(local), std::move(remote));
    }

    const std::shared_ptr<FakeNetwork> network_;
    std::shared_ptr<Node> self_;
};

}  // namespace pynixlkv::transfer
