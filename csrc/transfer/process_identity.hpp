/// @file
/// Which process of this host has an agent of an incarnation, as the kernel says: what a peer says
/// of its process cannot be believed.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>

namespace pynixlkv::transfer {

/// Shows other processes of this host that this one has an agent of an incarnation.
class IdentitySocket {
  public:
    /// @throws Error("StateError") when the process is out of descriptors
    explicit IdentitySocket(const std::string& incarnation);
    IdentitySocket(const IdentitySocket&) = delete;
    IdentitySocket& operator=(const IdentitySocket&) = delete;
    ~IdentitySocket();

    /// Readable when peers have looked.
    [[nodiscard]] int fd() const noexcept { return fd_; }
    /// Make room for more peers to look.
    /// @return false if the process is out of descriptors: fd() stays readable
    [[nodiscard]] bool clear() const noexcept;

  private:
    int fd_;
};

/// The process of an agent, which no other process can become.
class PeerProcess {
  public:
    /// @return nothing if the agent is on another host, or its process has ended
    [[nodiscard]] static std::optional<PeerProcess> of(const std::string& incarnation);
    PeerProcess(PeerProcess&& other) noexcept : id_(other.id_), fd_(std::exchange(other.fd_, -1)) {}
    PeerProcess& operator=(PeerProcess&& other) noexcept {
        std::swap(id_, other.id_);
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~PeerProcess();

    [[nodiscard]] pid_t id() const noexcept { return id_; }
    [[nodiscard]] bool has_ended() const noexcept;

  private:
    PeerProcess(pid_t id, int fd) noexcept : id_(id), fd_(fd) {}

    pid_t id_;
    int fd_;
};

}  // namespace pynixlkv::transfer
