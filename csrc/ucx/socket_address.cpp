#include "ucx/socket_address.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstring>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::ucx {

SocketAddress::SocketAddress(const std::string& ip, std::uint16_t port) {
    sockaddr_in v4{};
    sockaddr_in6 v6{};
    if (::inet_pton(AF_INET, ip.c_str(), &v4.sin_addr) == 1) {
        v4.sin_family = AF_INET;
        v4.sin_port = htons(port);
        std::memcpy(&address_, &v4, sizeof v4);
    } else if (::inet_pton(AF_INET6, ip.c_str(), &v6.sin6_addr) == 1) {
        v6.sin6_family = AF_INET6;
        v6.sin6_port = htons(port);
        std::memcpy(&address_, &v6, sizeof v6);
    } else {
        throw Error("ConfigError", text("'", ip, "' is not an IP address; names are not resolved"));
    }
}

capi::SocketAddress SocketAddress::native() const noexcept {
    return {reinterpret_cast<const sockaddr*>(&address_), address_.ss_family == AF_INET
                                                              ? socklen_t{sizeof(sockaddr_in)}
                                                              : socklen_t{sizeof(sockaddr_in6)}};
}

std::uint16_t SocketAddress::port() const noexcept {
    // Both kinds have it in the same place.
    sockaddr_in v4{};
    std::memcpy(&v4, &address_, sizeof v4);
    return ntohs(v4.sin_port);
}

}  // namespace pynixlkv::ucx
