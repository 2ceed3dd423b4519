/// @file
/// A driver without a library: agents of one process that move real bytes with memcpy, respect the
/// bounds of registered memory, and fail on demand.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

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
    void kill(const std::string& agent) { set(agent, &Node::killed, true); }
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

    struct Node {
        std::uint64_t token = 0;
        MemoryMap memory;
        std::vector<Notification> inbox;
        Clock::duration delay{};
        bool paused = false;
        bool killed = false;
        std::size_t failures = 0;
        std::size_t drops = 0;
    };

    template <class T>
    void set(const std::string& agent, T Node::* member, T value) {
        const std::lock_guard lock(mutex_);
        at(agent).*member = value;
    }
    Node& at(const std::string& name);
    /// The node if this incarnation of it can still be reached, else nullptr.
    Node* find(const std::string& name, std::uint64_t token);

    std::mutex mutex_;
    std::uint64_t next_token_ = 1;
    std::map<std::string, Node> nodes_;
};

class FakeDriver final : public Driver {
  public:
    /// @throws Error("DuplicatePeerError") when the network has an agent of that name
    FakeDriver(std::string name, std::shared_ptr<FakeNetwork> network);
    ~FakeDriver() override;

    std::unique_ptr<Registered> register_memory(std::span<const Span> spans) override;
    std::string metadata() override;
    std::unique_ptr<Connection> connect(const std::string& name,
                                        std::string_view metadata) override;
    void refresh(Connection& connection, std::string_view metadata) override;
    bool is_alive(Connection& connection) override;
    std::unique_ptr<NativeXfer> make(Connection& connection, Op op, const RowPairs& rows) override;
    std::unique_ptr<Prepared> prepare(Connection& connection, const RowPairs& rows) override;
    std::unique_ptr<NativeXfer> make(Connection& connection, Op op, Prepared& prepared,
                                     const IndexPairs& indices) override;
    void notify(Connection& connection, const std::string& message) override;
    bool receive(std::vector<Notification>& into) override;

  private:
    const std::string name_;
    const std::shared_ptr<FakeNetwork> network_;
    std::uint64_t token_ = 0;
};

}  // namespace pynixlkv::transfer
