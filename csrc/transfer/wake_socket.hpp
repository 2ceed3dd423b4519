/// @file
/// Wakes sleeping agents of the same host.
///
/// The libraries give no event when a notification arrives, so a sleeping agent would have to poll
/// every millisecond, which costs a few percent of a core. Hence an agent that has sent something
/// wakes the receiver: an empty datagram to a socket whose abstract address is made from the
/// receiver's incarnation. The datagram only says "look now"; if it gets lost, or the sender is on
/// another host, the receiver still polls at its own pace.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <string>
#include <utility>

namespace pynixlkv::transfer {

/// An abstract address: no file, gone with the socket, private to the network namespace.
[[nodiscard]] std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& incarnation,
                                                                 const char* suffix = "");

/// Whether a socket is at such an address.
[[nodiscard]] bool is_of_agent(int fd) noexcept;

/// A new socket at that address, which listens if it is of a type with connections.
/// @param what of the agent the socket is, for the error
/// @throws Error("StateError") when the process is out of descriptors
[[nodiscard]] int bound_socket(int type, const std::string& incarnation, const char* what,
                               const char* suffix = "");

class WakeSocket {
  public:
    /// @param incarnation random bytes that peers know from the agent's hello
    /// @throws Error("StateError") when the process is out of descriptors
    explicit WakeSocket(const std::string& incarnation);
    WakeSocket(const WakeSocket&) = delete;
    WakeSocket& operator=(const WakeSocket&) = delete;
    ~WakeSocket();

    /// Readable after a peer's wake_peer().
    [[nodiscard]] int fd() const noexcept { return fd_; }
    /// Whether a peer has called wake_peer() since the last call.
    bool take() const noexcept;
    /// Never blocks.
    /// @return whether this host has an agent of that incarnation
    bool wake_peer(const std::string& incarnation) const noexcept;

  private:
    int fd_;
};

}  // namespace pynixlkv::transfer
