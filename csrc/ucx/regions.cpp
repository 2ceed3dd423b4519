#include "ucx/regions.hpp"

#include <algorithm>
#include <fstream>
#include <limits>

#include "base/bytes.hpp"
#include "base/mappings.hpp"

namespace pynixlkv::ucx {

namespace {

constexpr std::string_view kMagic = "pnkvucx4";
// Sizes seen are 60 to 300 bytes; a device adds some tens.
constexpr std::size_t kMaxAddressBytes = 1U << 16U;
constexpr std::size_t kMaxKeyBytes = 1U << 12U;
constexpr std::size_t kRegionBytes = 3 * sizeof(std::uint64_t) + sizeof(std::uint32_t);
constexpr std::size_t kMaxHostBytes = 64;
constexpr std::size_t kMaxLaneBytes = 1024;

/// Linux's id of this boot of this machine; empty if there is none.
const std::string& this_host() {
    static const std::string name = [] {
        std::string line;
        std::ifstream file("/proc/sys/kernel/random/boot_id");
        std::getline(file, line);
        return line;
    }();
    return name;
}

}  // namespace

std::string refusal_of(const LocalRegions& regions, const Descriptor& row, transfer::Op op) {
    const LocalRegion* region = nullptr;
    try {
        if (regions.find(row, region).memory_type != transfer::Memory::kDram) {
            return text(row.str(), " is not host memory");
        }
    } catch (const Error& e) {
        return e.what();
    }
    if (op == transfer::Op::kWrite && region->is_read_only) {
        return text(row.str(), " is read-only");
    }
    return "";
}

std::string describe(capi::ErrorMode errors, const std::uint64_t& token, const std::string& address,
                     std::string_view lanes, const LocalRegions& regions) {
    ByteWriter out;
    out.put_raw(kMagic);
    out.put(static_cast<std::uint8_t>(errors));
    out.put(token);
    out.put_bytes(address);
    const bool can_be_mapped =
        std::any_of(regions.all().begin(), regions.all().end(),
                    [](const auto& entry) { return entry.second.memory->is_allocated(); });
    out.put_bytes(can_be_mapped ? this_host() : "");
    out.put(reinterpret_cast<std::uint64_t>(&token));
    out.put_bytes(lanes);
    out.put(static_cast<std::uint32_t>(regions.all().size()));
    for (const auto& [key, region] : regions.all()) {
        out.put(region.row.address);
        out.put(region.row.length);
        out.put(region.row.device);
        out.put_bytes(region.memory->pack());
    }
    return out.take();
}

Description read_description(std::string_view bytes) {
    ByteReader in(bytes, "the UCX metadata of the peer");
    if (in.get_raw(kMagic.size()) != kMagic) {
        throw Error("WireError", text("the UCX metadata of the peer do not begin with ", kMagic));
    }
    Description description;
    const auto errors = in.get<std::uint8_t>();
    if (errors > capi::kErrorPeer) {
        throw Error("WireError",
                    text("the UCX metadata of the peer name error mode ", unsigned{errors}));
    }
    description.errors = static_cast<capi::ErrorMode>(errors);
    description.token = in.get<std::uint64_t>();
    description.address = in.get_bytes();
    if (description.address.empty() || description.address.size() > kMaxAddressBytes) {
        throw Error("WireError",
                    text("the UCX address of the peer has ", description.address.size(),
                         " bytes; expected 1 to ", kMaxAddressBytes));
    }
    description.host = in.get_bytes();
    if (description.host.size() > kMaxHostBytes) {
        throw Error("WireError", text("the name of the peer's host has ", description.host.size(),
                                      " bytes; expected up to ", kMaxHostBytes));
    }
    description.token_address = in.get<std::uint64_t>();
    description.lanes = in.get_bytes();
    if (description.lanes.size() > kMaxLaneBytes) {
        throw Error("WireError", text("the lanes of the peer have ", description.lanes.size(),
                                      " bytes; expected up to ", kMaxLaneBytes));
    }
    const auto count = in.get<std::uint32_t>();
    if (count > bytes.size() / kRegionBytes) {
        throw Error("WireError", text("the UCX metadata of the peer promise ", count,
                                      " regions in ", bytes.size(), " bytes"));
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        Description::Region region{};
        region.row.address = in.get<std::uint64_t>();
        region.row.length = in.get<std::uint64_t>();
        region.row.device = in.get<std::uint64_t>();
        region.packed_key = in.get_bytes();
        if (region.row.length == 0 ||
            region.row.address > std::numeric_limits<std::uint64_t>::max() - region.row.length) {
            throw Error("WireError", text("region ", i, " of the peer, ", region.row.str(),
                                          ", is empty or wraps around"));
        }
        if (region.packed_key.empty() || region.packed_key.size() > kMaxKeyBytes) {
            throw Error("WireError",
                        text("the key of region ", i, " of the peer has ", region.packed_key.size(),
                             " bytes; expected 1 to ", kMaxKeyBytes));
        }
        description.regions.push_back(region);
    }
    in.require_end();
    return description;
}

bool is_on_this_host(const Description& description) {
    return !description.host.empty() && description.host == this_host();
}

namespace {

/// @return null for shared memory that this process may not map, as that of another user
std::shared_ptr<RemoteKey> unpack_key(const std::shared_ptr<Endpoint>& endpoint,
                                      std::string_view packed) {
    try {
        return std::make_shared<RemoteKey>(endpoint, packed);
    } catch (const NativeError& e) {
        if (e.status() != static_cast<int>(Status::kSharedMemory)) {
            throw;
        }
        return nullptr;
    }
}

}  // namespace

std::shared_ptr<const RemoteRegions> unpack_regions(const std::shared_ptr<Endpoint>& endpoint,
                                                    const Description& description) {
    auto regions = std::make_shared<RemoteRegions>();
    struct Unpacked {
        std::shared_ptr<RemoteKey> key;
        Mappings mappings;  // that UCX made for it
    };
    // Spans of one allocation, and all ordinary memory of some transports, have the same key.
    std::map<std::string_view, Unpacked> keys;
    const bool can_be_mapped = is_on_this_host(description);
    Mappings before = can_be_mapped ? Mappings::now() : Mappings();
    for (auto [row, packed] : description.regions) {
        const auto [found, is_new] = keys.try_emplace(packed);
        auto& [key, mappings] = found->second;
        if (is_new) {
            key = unpack_key(endpoint, packed);
            if (can_be_mapped) {
                Mappings now = Mappings::now();
                mappings = now.since(before);
                before = std::move(now);
            }
        }
        auto* direct =
            can_be_mapped && key ? static_cast<char*>(key->pointer(row.address)) : nullptr;
        bool is_fragile = false;
        if (direct != nullptr) {
            if (mappings.empty()) {
                throw Error("HandshakeError",
                            text("region ", row.str(),
                                 " of the peer was mapped, but /proc/self/maps shows no new "
                                 "mapping, so how far it goes is unknown; connect again"));
            }
            // UCX does not check what a region claims: nothing outside the key's memory is reached.
            const auto begin = reinterpret_cast<std::uint64_t>(direct);
            const MappedRange range = mappings.describe(begin, row.length);
            row.length = range.length;
            is_fragile = range.is_of_file;
        }
        regions->has_served |= !key;
        if (row.length > 0) {
            regions->add({row, key, direct, is_fragile});
        }
    }
    return regions;
}

}  // namespace pynixlkv::ucx
