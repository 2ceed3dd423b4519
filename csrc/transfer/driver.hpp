/// @file
/// What an agent needs of a native library: one implementation per library, and one in process.
/// Only the agent's thread calls a driver, so that no implementation needs locks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// The connection to a peer is gone.
class ConnectionLost : public NativeError {
  public:
    explicit ConnectionLost(const NativeError& cause) : NativeError(cause) {}
};

/// Base of what drivers implement.
class Polymorphic {
  public:
    Polymorphic() = default;
    Polymorphic(const Polymorphic&) = delete;
    Polymorphic& operator=(const Polymorphic&) = delete;
    virtual ~Polymorphic() = default;
};

/// One native request. It must be quiet when it is destroyed: never posted, or ended.
class NativeXfer : public Polymorphic {
  public:
    /// Start moving, once; the copy may happen in this call. Quiet if it throws.
    /// @throws ConnectionLost when the connection is gone, Error on other failures
    virtual void post() = 0;
    /// Make progress. Quiet if it throws.
    /// @return true when all bytes have moved and, for a write, are visible at the peer
    /// @throws Error when the request failed
    virtual bool poll() = 0;
    /// Whether it has moved bytes or may; not while it waits for a connection. Until then it is
    /// quiet.
    [[nodiscard]] virtual bool has_begun() const { return true; }
};

/// The connection to one generation of one peer, as the library knows it.
class Connection : public Polymorphic {
  public:
    /// Names of the transports it may use; empty if the library does not say.
    [[nodiscard]] virtual std::vector<std::string> transports() const { return {}; }
    /// Whether the library has noticed by itself that the connection is gone. Sends nothing.
    [[nodiscard]] virtual bool has_failed() const { return false; }
    /// Whether it takes another request now; not while it has as many as it can begin soon.
    [[nodiscard]] virtual bool has_room() const { return true; }
};

/// Memory that the library has registered. Destroying it deregisters.
class Registered : public Polymorphic {};

/// Rows of both sides in the library's own form, which requests choose from by index.
class Prepared : public Polymorphic {};

/// Rows of both sides, paired by index in the case of a request.
struct DescriptorPairs {
    std::span<const Descriptor> local;
    std::span<const Descriptor> remote;
    Memory local_memory;
    Memory remote_memory;
};

/// Places in the prepared rows of both sides, paired by index.
struct IndexPairs {
    std::span<const std::int32_t> local;
    std::span<const std::int32_t> remote;
};

class Driver : public Polymorphic {
  public:
    /// Called before a peer with device memory is connected.
    virtual void expect_device_memory() {}
    [[nodiscard]] virtual std::unique_ptr<Registered> register_memory(
        std::span<const Span> spans) = 0;
    /// What a peer must load to reach the memory registered now.
    [[nodiscard]] virtual std::string metadata() = 0;

    /// Load what `metadata()` of the peer gave.
    /// @param process the peer's, if it is known to be one of this host
    /// @throws Error when the library refuses it
    [[nodiscard]] virtual std::unique_ptr<Connection> connect(const std::string& name,
                                                              std::string_view metadata,
                                                              std::optional<pid_t> process) = 0;
    /// Open a region without a remote side.
    /// @param fd of a file; the driver makes a descriptor of its own
    /// @throws Error when it moves no files
    [[nodiscard]] virtual std::unique_ptr<Connection> open_file(int /*fd*/) {
        throw Error("ConfigError", "this agent opens no files");
    }
    /// Load newer metadata of the same incarnation of a connected peer.
    virtual void refresh(Connection& connection, std::string_view metadata) = 0;
    /// Called before anybody learns that a connection has ended: from its return on, the peer must
    /// write to no memory of this process, as far as the library can keep it from that.
    virtual void shut_out(Connection& /*connection*/) {}
    /// Ask the library whether the connection stands. May cost a message.
    [[nodiscard]] virtual bool is_alive(Connection& connection) = 0;

    /// Make a request out of rows of equal lengths.
    /// @throws ConnectionLost when the connection is gone, Error on other failures
    [[nodiscard]] virtual std::unique_ptr<NativeXfer> make(Connection& connection, Op op,
                                                           const DescriptorPairs& rows) = 0;

    /// Put the rows of both sides (not paired) into the library's own form.
    /// @return null if the library has none
    [[nodiscard]] virtual std::unique_ptr<Prepared> prepare(Connection& /*connection*/,
                                                            const DescriptorPairs& /*rows*/) {
        return nullptr;
    }
    /// Make a request out of prepared rows. Only called with what `prepare` gave.
    [[nodiscard]] virtual std::unique_ptr<NativeXfer> make(Connection& /*connection*/, Op /*op*/,
                                                           Prepared& /*prepared*/,
                                                           const IndexPairs& /*indices*/) {
        throw Error("StateError", "this library has no prepared rows");
    }

    /// Queue a notification; peers receive notifications in order, after the transfers that had
    /// ended before.
    virtual void notify(Connection& connection, const std::string& message) = 0;
    /// Progress the library and append the notifications that have arrived. Called in every turn of
    /// the loop.
    /// @return whether the library had work, such as bytes to move for a peer; false if unknown
    virtual bool receive(std::vector<Notification>& into) = 0;

    /// Whether the library progresses in calls of `receive` alone, without events to wait for.
    [[nodiscard]] virtual bool needs_polling() const { return false; }
    /// A file descriptor that is readable when the library has work; -1 if the library has none and
    /// must be polled.
    [[nodiscard]] virtual int event_fd() { return -1; }
    /// Called before the agent sleeps on the descriptor.
    /// @return false if there is work right now
    [[nodiscard]] virtual bool arm() { return true; }
};

}  // namespace pynixlkv::transfer
