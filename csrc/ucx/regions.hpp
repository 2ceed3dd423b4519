/// @file
/// The memory handle or remote key that contains a row, and how a peer learns of them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transfer/types.hpp"
#include "ucx/endpoint.hpp"

namespace pynixlkv::ucx {

/// Regions of one address space by device and address.
template <class Region>
class RegionMap {
  public:
    using Key = std::pair<std::uint64_t, std::uint64_t>;

    void add(Region region) {
        const Key key{region.row.device, region.row.address};
        regions_.insert_or_assign(key, std::move(region));
    }
    void remove(const Descriptor& row) { regions_.erase(Key{row.device, row.address}); }
    [[nodiscard]] const std::map<Key, Region>& all() const noexcept { return regions_; }

    /// The region that contains a row. Rows come in address order: the region of the previous row
    /// is tried first.
    /// @throws Error NotRegisteredError
    [[nodiscard]] const Region& find(const Descriptor& row, const Region*& hint) const {
        if (hint == nullptr || !hint->row.contains(row)) {
            const auto next = regions_.upper_bound(Key{row.device, row.address});
            hint = next == regions_.begin() ? nullptr : &std::prev(next)->second;
            if (hint == nullptr || !hint->row.contains(row)) {
                throw Error("NotRegisteredError", text(row.str(), " is not registered with UCX"));
            }
        }
        return *hint;
    }

  private:
    std::map<Key, Region> regions_;
};

struct LocalRegion {
    Descriptor row;
    transfer::Memory memory_type;
    std::shared_ptr<MemoryHandle> memory;
    bool is_read_only = false;  ///< no peer may write
    bool is_fragile = false;    ///< its pages can go: copy() says how to use it
};

struct RemoteRegion {
    Descriptor row;
    std::shared_ptr<RemoteKey> key;  ///< null: its owner has to serve it
    char* direct;                    ///< where it is mapped in this process; null if it is not
    bool is_fragile = false;         ///< the mapping's pages can go, as its owner may truncate it
};

using LocalRegions = RegionMap<LocalRegion>;
/// Why a peer that asks may not move a row; empty if it may.
[[nodiscard]] std::string refusal_of(const LocalRegions& regions, const Descriptor& row,
                                     transfer::Op op);

struct RemoteRegions : RegionMap<RemoteRegion> {
    bool has_served = false;  ///< whether a region has no key
};

/// The metadata for a peer: error handling, the worker's address, the host if there is memory that
/// its processes can map, and a key for each registered span. The token shows the owner that the
/// sender of a message has these metadata.
struct Description {
    struct Region {
        Descriptor row;
        std::string_view packed_key;
    };
    capi::ErrorMode errors = capi::kErrorPeer;
    std::uint64_t token = 0;
    std::uint64_t token_address = 0;  ///< in the memory of the process
    std::string_view address;
    std::string_view host;
    std::string_view lanes;  ///< Lanes::places()
    std::vector<Region> regions;
};

[[nodiscard]] std::string describe(capi::ErrorMode errors, const std::uint64_t& token,
                                   const std::string& address, std::string_view lanes,
                                   const LocalRegions& regions);

/// @return views into the bytes
/// @throws Error WireError for bytes that `describe` does not write
[[nodiscard]] Description read_description(std::string_view bytes);

/// Whether the peer has memory that can be mapped here.
[[nodiscard]] bool is_on_this_host(const Description& description);

/// Unpack the keys of a peer.
[[nodiscard]] std::shared_ptr<const RemoteRegions> unpack_regions(
    const std::shared_ptr<Endpoint>& endpoint, const Description& description);

}  // namespace pynixlkv::ucx
