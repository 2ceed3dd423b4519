/// @file
/// Digests of KV by logical coordinates: equal for equal contents in any layout, block size and
/// sharding.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/region.hpp"

namespace pynixlkv::kv {

/// Positions that one rank of a context-parallel group holds.
struct Turns {
    std::uint64_t rank = 0;
    std::uint64_t ranks = 1;
    std::uint64_t interleave = 1;
};

/// The digests to compute: one for each layer, K or V, head and unit of positions.
struct DigestScope {
    /// Positions [begin, end) of the sequence; others count nowhere.
    std::uint64_t begin = 0, end = 0;
    /// Unit i is the positions from i * unit to (i + 1) * unit - 1.
    std::uint64_t unit = 1;
    std::span<const std::int64_t> units;
    std::span<const std::int64_t> layers;
    std::span<const std::int64_t> heads;
    /// Of the kv axis: K and V, or planes of state.
    std::uint64_t num_kv = 1;
    /// Only positions that these ranks hold as well.
    std::vector<Turns> turns;

    [[nodiscard]] std::size_t size() const noexcept {
        return layers.size() * num_kv * heads.size() * units.size();
    }
};

/// Add the digests of a group's memory to `out`, of shape (layers, num_kv, heads, units).
///
/// A digest is the sum, mod 2**64, of one hash per token: of the bytes of the head's elements and
/// of the coordinates. Every region holds the whole dim axis. A change within one aligned 8-byte
/// word of a token always changes the digest.
///
/// @param ids block table; entry i holds the positions from start + i * unit on, as in a plan
/// @throws Error PlanError if the table does not cover the positions, or names no block of the pool
void add_digests(const Group& group, std::span<const std::int64_t> ids, std::uint64_t start,
                 const DigestScope& scope, std::span<std::uint64_t> out);

}  // namespace pynixlkv::kv
