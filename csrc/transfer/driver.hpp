/// @file
/// What an agent needs of a native library. One implementation per library, plus an in-process
/// one; only the agent's thread ever calls it, so no implementation needs locks of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// The connection to a peer is gone. Carries the library's error when there is one.
class ConnectionLost : public NativeError {
  public:
    explicit ConnectionLost(const NativeError& cause) : NativeError(cause) {}
};

/// One native request. Destroying it requires that it is quiet: never posted, or ended.
class Operation {
  public:
    Operation() = default;
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;
    virtual ~Operation() = default;

    /// Start moving, once; the copy may happen in this call.
    /// @throws ConnectionLost when the connection is gone, Error on other failures; it is then
    /// quiet
    virtual void post() = 0;
    /// Make progress and tell whether the operation has ended.
    /// @return true when all bytes have moved and, for a write, are visible at the peer
    /// @throws Error when it ended without success; it is then quiet
    virtual bool poll() = 0;
};

/// The connection to one generation of one peer, as the library knows it.
class Connection {
  public:
    Connection() = default;
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;
    virtual ~Connection() = default;
};

/// Memory that the library has registered. Destroying it deregisters.
class Registered {
  public:
    Registered() = default;
    Registered(const Registered&) = delete;
    Registered& operator=(const Registered&) = delete;
    virtual ~Registered() = default;
};

/// Rows of both sides in the library's own form, so that a transfer can name them by index.
class Prepared {
  public:
    Prepared() = default;
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;
    virtual ~Prepared() = default;
};

/// Rows of both sides, paired by index in the case of a request.
struct RowPairs {
    std::span<const Row> local;
    std::span<const Row> remote;
    Memory local_memory;
    Memory remote_memory;
};

/// Places in the prepared rows of both sides, paired by index.
struct IndexPairs {
    std::span<const std::int32_t> local;
    std::span<const std::int32_t> remote;
};

class Driver {
  public:
    Driver() = default;
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;
    virtual ~Driver() = default;

    [[nodiscard]] virtual std::unique_ptr<Registered> register_memory(
        std::span<const Span> spans) = 0;
    /// What a peer must load to reach the memory registered now.
    [[nodiscard]] virtual std::string metadata() = 0;

    /// Load what `metadata()` of the peer gave.
    /// @throws Error when the library refuses it
    [[nodiscard]] virtual std::unique_ptr<Connection> connect(const std::string& name,
                                                              std::string_view metadata) = 0;
    /// Load newer metadata of the same incarnation of a connected peer.
    virtual void refresh(Connection& connection, std::string_view metadata) = 0;
    /// Whether the library still believes in the connection. May cost a message.
    [[nodiscard]] virtual bool is_alive(Connection& connection) = 0;

    /// Make a request out of rows of equal lengths.
    /// @throws ConnectionLost when the connection is gone, Error on other failures
    [[nodiscard]] virtual std::unique_ptr<Operation> make(Connection& connection, Op op,
                                                          const RowPairs& rows) = 0;

    /// Put the rows of both sides (not paired) into the library's own form.
    /// @return null if the library has none
    [[nodiscard]] virtual std::unique_ptr<Prepared> prepare(Connection& /*connection*/,
                                                            const RowPairs& /*rows*/) {
        return nullptr;
    }
    /// Make a request out of prepared rows. Only called with what `prepare` gave.
    [[nodiscard]] virtual std::unique_ptr<Operation> make(Connection& connection, Op op,
                                                          Prepared& prepared,
                                                          const IndexPairs& indices);

    /// Send a notification. Returning means queued in order after what has ended before.
    virtual void notify(Connection& connection, const std::string& message) = 0;
    /// Progress the library and append what has arrived. Called in every round of the agent.
    /// @return whether the library had anything to do, as when it moves bytes for a peer; false
    ///         where that cannot be known
    virtual bool receive(std::vector<Notification>& into) = 0;

    /// A descriptor that is readable when the library has something to do; -1 if it has none, and
    /// must be asked at intervals.
    [[nodiscard]] virtual int event_fd() { return -1; }
    /// Called before the agent sleeps on the descriptor.
    /// @return false if there is something to do right now
    [[nodiscard]] virtual bool arm() { return true; }
};

inline std::unique_ptr<Operation> Driver::make(Connection& /*connection*/, Op /*op*/,
                                               Prepared& /*prepared*/,
                                               const IndexPairs& /*indices*/) {
    throw Error("StateError", "this library has no prepared rows");
}

}  // namespace pynixlkv::transfer
