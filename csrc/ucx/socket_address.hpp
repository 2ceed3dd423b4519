#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstring>
#include <string_view>

namespace pynixlkv::ucx {

/// A socket address out of the bytes of an internet address and a port.
struct SocketAddress {
    /// @return whether the bytes are an address
    bool set(std::string_view ip, std::uint16_t port) {
        if (ip.size() == sizeof v4.sin_addr) {
            v4 = {};
            v4.sin_family = AF_INET;
            v4.sin_port = htons(port);
            std::memcpy(&v4.sin_addr, ip.data(), ip.size());
        } else if (ip.size() == sizeof v6.sin6_addr) {
            v6 = {};
            v6.sin6_family = AF_INET6;
            v6.sin6_port = htons(port);
            std::memcpy(&v6.sin6_addr, ip.data(), ip.size());
        }
        size = ip.size() == sizeof v4.sin_addr ? sizeof v4 : sizeof v6;
        return ip.size() == sizeof v4.sin_addr || ip.size() == sizeof v6.sin6_addr;
    }
    [[nodiscard]] std::uint16_t port() const {
        return ntohs(any.sa_family == AF_INET ? v4.sin_port : v6.sin6_port);
    }
    [[nodiscard]] bool is_loopback() const {
        return any.sa_family == AF_INET ? (ntohl(v4.sin_addr.s_addr) >> 24U) == IN_LOOPBACKNET
                                        : IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
    }
    /// Whether the address alone does not say which device leads to it.
    [[nodiscard]] bool is_link_local() const {
        constexpr std::uint32_t kLinkLocal = 0xA9FE;  // 169.254
        return any.sa_family == AF_INET ? (ntohl(v4.sin_addr.s_addr) >> 16U) == kLinkLocal
                                        : IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr);
    }

    friend bool operator==(const SocketAddress& a, const SocketAddress& b) {
        return a.size == b.size && std::memcmp(&a.any, &b.any, a.size) == 0;
    }

    union {
        sockaddr any;
        sockaddr_in v4;
        sockaddr_in6 v6;
    };
    socklen_t size = 0;
};

}  // namespace pynixlkv::ucx
