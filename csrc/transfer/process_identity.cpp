#include "transfer/process_identity.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "transfer/wake_socket.hpp"

namespace pynixlkv::transfer {

namespace {

constexpr int kSocketType = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;

constexpr int kPeerPidFd = 77;  // SO_PEERPIDFD, since Linux 6.5

struct Listener {
    pid_t id;
    int fd;  ///< names the process; -1 if Linux is too old
};

/// The process that listens under an incarnation.
std::optional<Listener> find(const std::string& incarnation) {
    const int fd = ::socket(AF_UNIX, kSocketType, 0);
    const auto [address, length] = abstract_address(incarnation, "-id");
    ucred owner{};
    socklen_t size = sizeof owner;
    Listener listener{0, -1};
    socklen_t fd_size = sizeof listener.fd;
    bool is_found = fd >= 0 &&
                    ::connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
                    ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &owner, &size) == 0 && owner.pid > 0;
    if (is_found && ::getsockopt(fd, SOL_SOCKET, kPeerPidFd, &listener.fd, &fd_size) != 0) {
        is_found = errno == ENOPROTOOPT;
        listener.fd = -1;
    }
    if (fd >= 0) {
        ::close(fd);
    }
    listener.id = owner.pid;
    return is_found ? std::optional(listener) : std::nullopt;
}

}  // namespace

IdentitySocket::IdentitySocket(const std::string& incarnation)
    : fd_(bound_socket(kSocketType, incarnation, "identity socket", "-id")) {}

IdentitySocket::~IdentitySocket() {
    ::close(fd_);
}

bool IdentitySocket::clear() const noexcept {
    for (int fd = 0; (fd = ::accept(fd_, nullptr, nullptr)) >= 0;) {
        ::close(fd);
    }
    return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
}

std::optional<PeerProcess> PeerProcess::of(const std::string& incarnation) {
    const auto found = find(incarnation);
    if (!found) {
        return std::nullopt;
    }
    const bool is_exact = found->fd >= 0;
    PeerProcess process(found->id, is_exact
                                       ? found->fd
                                       : static_cast<int>(::syscall(SYS_pidfd_open, found->id, 0)));
    const bool is_gone = process.fd_ < 0 && errno == ESRCH;
    if (is_gone || process.has_ended()) {
        return std::nullopt;
    }
    if (!is_exact) {
        // The number can be another process's by now. A second look finds out, unless a child of
        // the dead process still has the socket: only a newer Linux tells that.
        const auto again = find(incarnation);
        if (!again || again->id != found->id) {
            return std::nullopt;
        }
    }
    return process;
}

PeerProcess::~PeerProcess() {
    if (fd_ >= 0) {
        ::close(fd_);
    }
}

bool PeerProcess::has_ended() const noexcept {
    pollfd ended{fd_, POLLIN, 0};  // without a descriptor nothing is known
    return ::poll(&ended, 1, 0) > 0;
}

}  // namespace pynixlkv::transfer
