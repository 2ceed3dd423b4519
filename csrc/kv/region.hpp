/// @file
/// What a rank holds, as boxes with named axes. Integers only: no memory is touched here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

namespace pynixlkv::kv {

enum Axis : std::size_t { kLayer, kKv, kBlock, kHead, kToken, kDim, kNumAxes };

inline constexpr std::array<const char*, kNumAxes> kAxisNames{"layer", "kv",    "block",
                                                              "head",  "token", "dim"};

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

/// A contiguous range of memory that is registered as a whole.
struct Span {
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    std::uint64_t device = 0;
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
struct Paging {
    std::uint64_t num_blocks = 1;
    std::uint64_t slots = 1;
    std::uint64_t rank = 0;
    std::uint64_t ranks = 1;
    std::uint64_t interleave = 1;

    /// Positions of the sequence per block.
    [[nodiscard]] std::uint64_t unit() const noexcept { return slots * ranks; }
    /// Positions until it is this side's turn again.
    [[nodiscard]] std::uint64_t period() const noexcept { return interleave * ranks; }

    /// Whether blocks of both hold the same tokens; the pools may differ in size.
    [[nodiscard]] bool same_tokens(const Paging& other) const noexcept {
        return std::tie(slots, rank, ranks, interleave) ==
               std::tie(other.slots, other.rank, other.ranks, other.interleave);
    }
};

/// Layers that share one block table.
struct Group {
    std::uint64_t element_bytes = 1;
    Paging paging;
    /// The head axis is global; false for caches that every rank holds whole.
    bool has_heads = false;
    /// Bit per Axis: the inside is opaque along it.
    std::uint64_t indivisible = 0;
    /// Groups with the same number overlap in memory, block by block.
    std::size_t pool = 0;
    std::vector<Region> regions;
};

/// All that one rank holds.
struct Geometry {
    std::vector<Span> spans;
    std::vector<Group> groups;

    /// Parse and check: everything inside its span, no element at two places of a group, no two
    /// elements at one place.
    ///
    /// Words: number of spans, then (address, bytes, device) each; number of groups, then each
    /// (element bytes, number of blocks, slots, rank, ranks, interleave, has heads, indivisible,
    /// number of regions, then (span, base, then (start, count, stride) per axis) each).
    /// @throws Error LayoutError
    static Geometry from_words(std::span<const std::uint64_t> words);
};

class WordReader;

/// Words: number of blocks, slots, rank, ranks, interleave.
/// @throws Error LayoutError
Paging read_paging(WordReader& reader);

/// Words: number of spans, then (address, bytes, device) each, ascending and disjoint.
/// @throws Error LayoutError
std::vector<Span> read_spans(WordReader& reader);

/// One past the last byte of a region.
std::uint64_t region_end(const Region& region, std::uint64_t element_bytes);

}  // namespace pynixlkv::kv
