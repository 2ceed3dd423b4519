#include "transfer/wake_socket.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "base/error.hpp"

namespace pynixlkv::transfer {

namespace {

constexpr std::string_view kPrefix("\0pynixlkv-", 10);

}  // namespace

bool is_of_agent(int fd) noexcept {
    sockaddr_un address{};
    socklen_t length = sizeof address;
    return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
           address.sun_family == AF_UNIX &&
           std::string_view(address.sun_path, kPrefix.size()) == kPrefix;
}

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& incarnation,
                                                   const char* suffix) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string name(kPrefix);
    for (const char c : incarnation) {
        name += kDigits[(static_cast<unsigned char>(c) >> 4U) & 15U];
        name += kDigits[static_cast<unsigned char>(c) & 15U];
    }
    name += suffix;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::size_t length = std::min(name.size(), sizeof address.sun_path);
    std::memcpy(address.sun_path, name.data(), length);
    return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length)};
}

int bound_socket(int type, const std::string& incarnation, const char* what, const char* suffix) {
    const int fd = ::socket(AF_UNIX, type, 0);
    const auto [address, length] = abstract_address(incarnation, suffix);
    // A socket for datagrams does not listen.
    if (fd < 0 || ::bind(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        (::listen(fd, SOMAXCONN) != 0 && errno != EOPNOTSUPP)) {
        const std::string reason = std::strerror(errno);
        if (fd >= 0) {
            ::close(fd);
        }
        throw Error("StateError",
                    std::string("the agent's ") + what + " could not be made: " + reason);
    }
    return fd;
}

WakeSocket::WakeSocket(const std::string& incarnation)
    : fd_(bound_socket(SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, incarnation, "wake socket")) {}

WakeSocket::~WakeSocket() {
    ::close(fd_);
}

bool WakeSocket::take() const noexcept {
    std::array<char, 1> nothing{};
    bool woken = false;
    while (::recv(fd_, nothing.data(), nothing.size(), 0) >= 0) {
        woken = true;
    }
    return woken;
}

bool WakeSocket::wake_peer(const std::string& incarnation) const noexcept {
    const auto [address, length] = abstract_address(incarnation);
    // A full queue is as good: the peer has a datagram to wake up from.
    return ::sendto(fd_, "", 0, MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address),
                    length) >= 0 ||
           errno == EAGAIN;
}

}  // namespace pynixlkv::transfer
