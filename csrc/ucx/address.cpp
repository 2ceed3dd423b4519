#include "ucx/address.hpp"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "base/bytes.hpp"
#include "ucx/socket_address.hpp"

namespace pynixlkv::ucx {

namespace {

// Version 1 of the format, as `ucp_address_unpack` in src/ucp/wireup/address.c reads it (UCX 1.18
// to 1.23). Bits of the first byte, of that before a device's address, and of that before a
// transport's:
constexpr unsigned kVersion = 0x0F;
constexpr unsigned kHasName = 0x10;
constexpr unsigned kHasUuid = 0x20;
constexpr unsigned kHasClient = 0x40;
constexpr unsigned kIsEmpty = 0x80;
constexpr unsigned kIsLast = 0x80;
constexpr unsigned kHasPaths = 0x40;
constexpr unsigned kHasSystemDevice = 0x20;
constexpr unsigned kDeviceLength = 0x1F;
constexpr unsigned kHasEndpoint = 0x40;
constexpr unsigned kTransportLength = 0x3F;
/// Bytes that describe a transport, with and without its index.
constexpr std::array<std::size_t, 2> kAttributeBytes{16, 17};
constexpr std::size_t kMaxTransports = 128;
/// In cma's address: the process is of another pid namespace than the first.
constexpr std::uint32_t kOtherNamespace = 1U << 31U;

/// How an address names a transport: CRC-16/X-25.
constexpr std::uint16_t checksum(std::string_view name) {
    std::uint16_t crc = 0xFFFF;
    for (const char c : name) {
        crc = static_cast<std::uint16_t>(crc ^ static_cast<unsigned char>(c));
        for (int bit = 0; bit < 8; ++bit) {
            crc = static_cast<std::uint16_t>((crc >> 1U) ^ ((crc & 1U) != 0 ? 0x8408U : 0U));
        }
    }
    return static_cast<std::uint16_t>(~crc);
}
static_assert(checksum("123456789") == 0x906E, "the check value of CRC-16/X-25");
constexpr std::uint16_t kCma = checksum("cma");
constexpr std::uint16_t kTcp = checksum("tcp");

struct Transport {
    std::size_t place;  ///< of the checksum of its name in the address
    std::uint16_t name;
    std::string_view device;
    std::string_view own;

    /// The process that cma's address names.
    [[nodiscard]] std::optional<std::uint32_t> process() const {
        std::uint32_t number = 0;
        if (own.size() < sizeof number) {
            return std::nullopt;
        }
        std::memcpy(&number, own.data(), sizeof number);
        return number & ~kOtherNamespace;
    }
};

using Transports = std::optional<std::vector<Transport>>;

Transports read(std::string_view address, std::size_t attribute_bytes) {
    std::vector<Transport> transports;
    ByteReader in(address, "an address");
    try {
        const auto flags = in.get<std::uint8_t>();
        if ((flags & (kVersion | kHasUuid)) != kHasUuid) {
            return std::nullopt;
        }
        (void)in.get<std::uint64_t>();
        if ((flags & kHasClient) != 0) {
            (void)in.get<std::uint64_t>();
        }
        if ((flags & kHasName) != 0) {
            (void)in.get_raw(in.get<std::uint8_t>());
        }
        for (bool is_last_device = false; !is_last_device;) {
            bool is_last = (in.get<std::uint8_t>() & kIsEmpty) != 0;
            const auto device_flags = in.get<std::uint8_t>();
            is_last_device = (device_flags & kIsLast) != 0;
            for (const unsigned flag : {kHasPaths, kHasSystemDevice}) {
                if ((device_flags & flag) != 0) {
                    (void)in.get<std::uint8_t>();
                }
            }
            const auto device = in.get_raw(device_flags & kDeviceLength);
            while (!is_last) {
                Transport transport{
                    address.size() - in.num_left(), in.get<std::uint16_t>(), device, {}};
                (void)in.get_raw(attribute_bytes);
                const auto length = in.get<std::uint8_t>();
                if ((length & kHasEndpoint) != 0 || transports.size() == kMaxTransports) {
                    return std::nullopt;
                }
                is_last = (length & kIsLast) != 0;
                transport.own = in.get_raw(length & kTransportLength);
                transports.push_back(transport);
            }
        }
        in.require_end();
    } catch (const Error&) {
        return std::nullopt;
    }
    return transports;
}

/// This process's transports and the peer's; those of this process are missing if its UCX has
/// another format.
std::pair<Transports, Transports> read_both(std::string_view own, std::string_view address) {
    for (const std::size_t bytes : kAttributeBytes) {
        if (auto ours = read(own, bytes)) {
            return {std::move(ours), read(address, bytes)};
        }
    }
    return {};
}

const Transport* find_cma(const Transports& transports) {
    const auto found = std::find_if(transports->begin(), transports->end(),
                                    [](const Transport& t) { return t.name == kCma; });
    return found == transports->end() ? nullptr : &*found;
}

}  // namespace

bool is_plausible_address(std::string_view address, std::string_view own) {
    const auto [ours, theirs] = read_both(own, address);
    return ours && theirs &&
           std::all_of(theirs->begin(), theirs->end(), [&ours = *ours](const Transport& their) {
               return std::all_of(ours.begin(), ours.end(), [&their](const Transport& our) {
                   return our.name != their.name || our.own.size() == their.own.size();
               });
           });
}

std::string_view worker_id(std::string_view address) {
    return address.substr(std::min<std::size_t>(address.size(), 1), sizeof(std::uint64_t));
}

namespace {

/// `uct_tcp_device_addr_t` in src/uct/tcp/tcp.h: flags, the family, its address. Empty for other
/// transports.
std::string network_address(const Transport& transport) {
    const std::string_view device = transport.device;
    if (transport.name != kTcp || device.size() < 2) {
        return "";
    }
    const bool is_v4 = device[1] == AF_INET;
    if ((device[0] & 1) != 0) {  // loopback
        return is_v4 ? std::string("\x7f\0\0\x01", 4) : std::string(15, '\0') + '\x01';
    }
    const std::size_t length = is_v4 ? sizeof(in_addr) : sizeof(in6_addr);
    return device.size() == 2 + length ? std::string(device.substr(2)) : "";
}

/// Whether the system knows a way to an address; sends nothing.
bool has_route(const std::string& ip) {
    SocketAddress place;
    if (!place.set(ip, 1)) {  // any port
        return true;
    }
    const int fd = ::socket(place.any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const bool is_known = ::connect(fd, &place.any, place.size) == 0 ||
                          (errno != ENETUNREACH && errno != EHOSTUNREACH);
    if (fd >= 0) {
        ::close(fd);
    }
    return is_known;
}

/// UCX skips transports whose name it does not know.
void take_out(std::string& address, const Transport& transport) {
    const std::uint16_t unknown = 0;
    std::memcpy(address.data() + transport.place, &unknown, sizeof unknown);
}

}  // namespace

std::string without_unroutable(std::string_view address, std::string_view own) {
    std::string kept(address);
    for (const Transport& transport :
         read_both(own, address).second.value_or(std::vector<Transport>())) {
        const std::string ip = network_address(transport);
        if (!ip.empty() && !has_route(ip)) {
            take_out(kept, transport);
        }
    }
    return kept;
}

std::string without_other_processes(std::string_view address, std::string_view own,
                                    std::optional<pid_t> process) {
    std::string kept(address);
    const auto [ours, theirs] = read_both(own, address);
    if (!ours || !theirs) {
        return kept;
    }
    const Transport* const cma = find_cma(ours);
    for (const Transport& their : *theirs) {
        if (their.name == kCma && (cma == nullptr || their.device == cma->device) &&
            their.process() != static_cast<std::uint32_t>(process.value_or(0))) {
            take_out(kept, their);
        }
    }
    return kept;
}

std::vector<std::string> network_addresses(std::string_view own) {
    std::vector<std::string> addresses;
    for (const Transport& transport :
         read_both(own, own).first.value_or(std::vector<Transport>())) {
        if (std::string ip = network_address(transport); !ip.empty()) {
            addresses.push_back(std::move(ip));
        }
    }
    return addresses;
}

bool share_cma(std::string_view address, std::string_view own) {
    const auto [ours, theirs] = read_both(own, address);
    if (!ours || !theirs) {
        return false;
    }
    const Transport* const our = find_cma(ours);
    const Transport* const their = find_cma(theirs);
    return our != nullptr && their != nullptr && our->device == their->device;
}

}  // namespace pynixlkv::ucx
