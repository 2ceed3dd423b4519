/// @file
/// A plan: what blocks of two caches have in common, as loops over runs of bytes.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/descriptor.hpp"
#include "kv/checks.hpp"
#include "kv/region.hpp"

namespace pynixlkv::kv {

enum Side : std::size_t { kLocal, kRemote };

inline constexpr std::array<const char*, 2> kSideNames{"local", "remote"};

/// Half-open range.
struct Interval {
    std::uint64_t start = 0;
    std::uint64_t stop = kMaxNumber;
};

/// What to move of all that both sides hold, and the longest descriptor.
struct Selection {
    std::uint64_t max_bytes = kMaxNumber;
    std::vector<Interval> heads{Interval{}};
    /// Of each group; all where there are none.
    std::vector<std::vector<Interval>> layers{};
};

/// Block tables of one group: entry i of a table holds the positions from start + i * unit on.
struct Table {
    std::array<std::span<const std::int64_t>, 2> ids;
    /// Valid positions of the sequence, or -1 for all that the tables hold.
    std::int64_t num_tokens = -1;
    /// Position of the first block of each table, a multiple of the side's unit.
    std::array<std::int64_t, 2> start{};
};

/// Positions that both tables of a group cover, and which entries of each table they touch.
struct Overlap {
    std::uint64_t begin = 0, end = 0;
    /// Per side: position of the table's first block, and entries [first, last) that are touched.
    std::array<std::uint64_t, 2> start{}, first{}, last{};
};

struct GroupPair {
    std::array<Paging, 2> paging;
    std::array<std::size_t, 2> pool{};
    /// Groups with the same number share a block table.
    std::array<std::size_t, 2> table{};
    /// The token axis is opaque: blocks move whole.
    bool whole = false;
    /// Bytes per token of the common box.
    std::uint64_t slot_bytes = 0;
};

/// The common box of two regions: nested loops around one element, widest local stride first.
struct LoopNest {
    struct Loop {
        std::uint64_t count = 1;
        std::array<std::uint64_t, 2> stride{};
    };

    std::size_t group = 0;
    std::array<std::size_t, 2> span{};
    std::array<std::uint64_t, 2> base{};
    std::array<std::uint64_t, 2> block_stride{};
    std::uint64_t length = 0;
    std::size_t token_loop = 0;  ///< its count depends on the slots that move
    std::array<Loop, 5> loops;
};

/// Consecutive nests of one group whose runs of a block lie between those of the blocks around it.
struct RunGroup {
    std::size_t group = 0;
    std::size_t first_nest = 0, last_nest = 0;
};

/// Consecutive slots of a pair of blocks.
struct SlotRange {
    std::uint64_t local_slot, remote_slot, count;
    auto operator<=>(const SlotRange&) const = default;
};

/// Consecutive bytes of the pair of blocks numbered 0.
struct Run {
    std::array<std::uint64_t, 2> address;
    std::uint64_t length;
    std::array<std::uint64_t, 2> block_stride;
    std::array<const Descriptor*, 2> span;
};

/// A run of whole blocks, cut to max_bytes, with its places in the prepared lists: the run of block
/// b is entry `first + b * step` of a side's list.
struct PoolRun {
    std::size_t group;
    Run run;
    std::array<std::uint64_t, 2> first, step;
};

/// Immutable; all members may be called from several threads at once.
class Plan {
  public:
    /// Plan to move `selection` between group i of one checked geometry and group i of the other.
    /// @throws Error PlanError if something selected is held by the local side only, if the sides
    /// cannot be matched, or if there is nothing to move
    Plan(const Geometry& local, const Geometry& remote, const Selection& selection = {});

    [[nodiscard]] const std::vector<GroupPair>& groups() const noexcept { return groups_; }
    [[nodiscard]] const std::vector<RunGroup>& run_groups() const noexcept { return run_groups_; }
    [[nodiscard]] std::uint64_t max_bytes() const noexcept { return max_bytes_; }

    /// The spans of one side that contain the plan's descriptors, and no others.
    [[nodiscard]] const std::vector<Descriptor>& extents(Side side) const noexcept {
        return spans_[side];
    }

    /// The positions that the tables of a group have in common; their ends may differ.
    /// @throws Error PlanError naming group, index, value and limit
    [[nodiscard]] Overlap overlap(std::size_t group, const Table& table) const;

    /// Runs of the blocks numbered 0, ascending by local address, merged.
    [[nodiscard]] std::vector<Run> runs(const RunGroup& part, const SlotRange& slots) const;

    /// Lengths of the runs of one whole block pair of a group, unmerged across blocks and uncut.
    [[nodiscard]] std::vector<std::uint64_t> block_runs(std::size_t group) const;

    struct Pool {
        /// Whether both sides hold the same tokens per block, so that whole blocks pair up, and a
        /// list of all their runs can be indexed by int32.
        bool can_prepare = false;
        /// Number of prepared rows of each side.
        std::array<std::uint64_t, 2> sizes{};
        /// In the order of the local list of prepared rows.
        std::vector<PoolRun> runs;
    };
    /// Made when first asked for: many plans are never prepared.
    [[nodiscard]] const Pool& pool() const;

    /// Every run of every block of a side's pool, cut to max_bytes, ascending by address (except
    /// where groups interleave in memory).
    /// @throws Error PlanError unless the pool can be prepared
    [[nodiscard]] std::vector<Descriptor> prepared_rows(Side side) const;

  private:
    void keep_used_spans(std::size_t side, const std::vector<Descriptor>& spans);
    void add_to_run_groups(std::size_t index);
    void append_runs(const LoopNest& nest, const SlotRange& slots, std::vector<Run>& out) const;
    [[nodiscard]] std::vector<PoolRun> make_pool_runs() const;

    std::uint64_t max_bytes_;
    std::vector<LoopNest> nests_;
    std::array<std::vector<Descriptor>, 2> spans_;
    std::vector<GroupPair> groups_;
    std::vector<RunGroup> run_groups_;
    mutable std::once_flag pool_made_;
    mutable Pool pool_;
};

}  // namespace pynixlkv::kv
