/// @file
/// A rank's KV cache as boxes with named axes. Integers only: no memory is touched here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/descriptor.hpp"

namespace pynixlkv::kv {

enum Axis : std::size_t { kLayer, kKv, kBlock, kHead, kToken, kDim, kNumAxes };

inline constexpr std::array<const char*, kNumAxes> kAxisNames{"layer", "kv",    "block",
                                                              "head",  "token", "dim"};
inline constexpr std::array<char, kNumAxes> kAxisLetters{'L', 'K', 'B', 'H', 'N', 'D'};

/// The axes that are matched by their global index. Blocks are addressed by tables and tokens by
/// position in the sequence.
inline constexpr std::array<Axis, 4> kMatchedAxes{kLayer, kKv, kHead, kDim};

/// Most regions in one geometry; checks that compare regions in pairs stay cheap.
inline constexpr std::size_t kMaxRegions = 4096;

/// One axis of a region: global index of its first element, number of elements, bytes per step.
struct Extent {
    std::uint64_t start = 0;
    std::uint64_t count = 1;
    std::uint64_t stride = 0;
};

/// A box of elements: element (i...) is at base + sum of (i - start) * stride over its axes.
struct Region {
    std::size_t span = 0;
    std::uint64_t base = 0;
    std::array<Extent, kNumAxes> axes{};
};

/// How one side spreads the positions of a sequence over the slots of its blocks.
///
/// Positions go round the `ranks` in turns of `interleave`; this side is number `rank`. A block
/// holds `slots` of its own positions and so stands for `slots * ranks` positions of the sequence.
/// In a compressed cache a position is `tokens_per_slot` tokens.
struct Paging {
    std::uint64_t num_blocks = 1;
    std::uint64_t slots = 1;
    std::uint64_t rank = 0;
    std::uint64_t ranks = 1;
    std::uint64_t interleave = 1;
    std::uint64_t tokens_per_slot = 1;

    /// Positions of the sequence per block.
    [[nodiscard]] std::uint64_t positions() const noexcept { return slots * ranks; }
    /// Tokens of the sequence per block.
    [[nodiscard]] std::uint64_t unit() const noexcept { return positions() * tokens_per_slot; }
    /// Positions until it is this side's turn again.
    [[nodiscard]] std::uint64_t period() const noexcept { return interleave * ranks; }

    /// Whether blocks of both hold the same tokens; the pools may differ in size.
    [[nodiscard]] bool same_tokens(const Paging& other) const noexcept {
        return std::tie(slots, rank, ranks, interleave, tokens_per_slot) ==
               std::tie(other.slots, other.rank, other.ranks, other.interleave,
                        other.tokens_per_slot);
    }
};

/// What layers hold of one kind.
struct Group {
    std::uint64_t element_bytes = 1;
    Paging paging;
    /// The head axis is global; false for caches that every rank holds whole.
    bool has_heads = false;
    /// Bit per Axis along which the inside of the cache is opaque.
    std::uint64_t opaque_axes = 0;
    std::vector<Region> regions{};
    /// Groups with the same number overlap in memory, block by block. Set by `checked`.
    std::size_t pool = 0;
    /// Name of the block table; groups with the same one are at different bytes of the same blocks.
    /// Empty if no other group uses its table.
    std::string table{};

    [[nodiscard]] bool shares_table(const Group& other) const noexcept {
        return !table.empty() && table == other.table;
    }
};

/// All that one rank holds.
struct Geometry {
    /// Memory registered as a whole, ascending and disjoint.
    std::vector<Descriptor> spans;
    std::vector<Group> groups;
};

/// Check that each region lies in its span, no group holds an element twice and no two elements
/// share a byte; number the pools.
/// @throws Error LayoutError
Geometry checked(Geometry geometry);

/// Some groups of a checked geometry, in the order of `indices`, perhaps one of them more than
/// once, with the pools numbered anew: two groups may share a pool only through a third.
Geometry select(const Geometry& geometry, std::span<const std::size_t> indices);

/// One past the last byte of a region.
std::uint64_t region_end(const Region& region, std::uint64_t element_bytes);

}  // namespace pynixlkv::kv
