/// @file
/// IP addresses with a port.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "ucx/capi.hpp"

namespace pynixlkv::ucx {

class SocketAddress {
  public:
    /// @param ip numeric, version 4 or 6
    /// @throws Error ConfigError when it is no such address
    SocketAddress(const std::string& ip, std::uint16_t port);
    explicit SocketAddress(const sockaddr_storage& address) : address_(address) {}

    /// @return a view of this object
    [[nodiscard]] capi::SocketAddress native() const noexcept;
    [[nodiscard]] std::uint16_t port() const noexcept;

  private:
    sockaddr_storage address_{};
};

}  // namespace pynixlkv::ucx
