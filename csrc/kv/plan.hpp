/// @file
/// A plan: how to turn block tables of two sides into paired runs of bytes.
///
/// Making one (`compile`) intersects the boxes of both sides. What comes out is a flat program of
/// 64-bit words, so that it can cross module boundaries; `Plan` is its checked, expandable form.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/row.hpp"
#include "kv/region.hpp"

namespace pynixlkv::kv {

using pynixlkv::Row;

enum class Side : std::size_t { kLocal, kRemote };

/// Block tables of one group: entry i of a table holds the positions from start + i * unit on.
struct Table {
    std::span<const std::int64_t> local;
    std::span<const std::int64_t> remote;
    /// Valid positions of the sequence, or -1 for all that the tables hold.
    std::int64_t num_tokens = -1;
    /// Position of the first block of each table, a multiple of the side's unit.
    std::int64_t local_start = 0;
    std::int64_t remote_start = 0;
};

/// One entry for each group of the plan, in its order.
using Tables = std::span<const Table>;

/// Words per group in the flat form of tables.
inline constexpr std::size_t kTableWords = 5;

/// Tables from two flat arrays: all block ids (local then remote, group after group), and per group
/// (local count, remote count, num_tokens, local_start, remote_start). Views, not copies.
/// @throws Error PlanError if the counts do not add up
std::vector<Table> tables_from_flat(std::span<const std::int64_t> ids,
                                    std::span<const std::int64_t> headers);

/// Half-open range.
struct Interval {
    std::uint64_t start;
    std::uint64_t stop;
};

/// What to move of all that both sides hold, and in what pieces.
struct Selection {
    std::uint64_t max_bytes = kAllBytes;
    std::vector<Interval> heads;
    std::vector<Interval> layers;

    static constexpr std::uint64_t kAllBytes = (std::uint64_t{1} << 60) - 1;

    /// Words: max bytes; number of head ranges, (start, stop) each; the same for layers.
    static Selection from_words(std::span<const std::uint64_t> words);
};

/// The program that moves `selection` between group i of one side and group i of the other.
/// @throws Error PlanError if something selected is held by the local side only, if the sides
/// cannot be matched, or if there is nothing to move
std::vector<std::uint64_t> compile(const Geometry& local, const Geometry& remote,
                                   const Selection& selection);

/// Positions that both tables of a group cover, and which entries of each table they touch.
struct Cover {
    std::uint64_t begin = 0, end = 0;
    /// Per side: position of the table's first block, and entries [first, last) that are touched.
    std::array<std::uint64_t, 2> start{}, first{}, last{};
};

class Expansion;

/// Immutable after construction; all members may be called from several threads at once.
class Plan {
  public:
    /// Parse a program and prove that no valid table makes it leave its spans.
    /// @throws Error LayoutError
    static Plan from_words(std::span<const std::uint64_t> words);

    [[nodiscard]] std::size_t num_groups() const noexcept { return groups_.size(); }

    /// The spans of one side that contain the rows that `expand` makes, and no others.
    [[nodiscard]] std::vector<Row> extents(Side side) const;

    /// Check tables as `expand` does, and that no block is written twice. O(blocks).
    /// @throws Error PlanError naming group, index, value and limit
    void check(Tables tables, Side written) const;

    /// Bytes that the tables move.
    [[nodiscard]] std::uint64_t bytes(Tables tables) const;

    /// The positions that the tables of a group have in common; never complains about their ends.
    [[nodiscard]] Cover cover(std::size_t group, const Table& table) const;

    /// Rows of both sides, paired by index, ascending by local address, adjacent rows merged, then
    /// cut to max_bytes. Replaces the contents of the vectors. O(rows before merging).
    /// @throws Error PlanError as `check`, except for duplicates
    void expand(Tables tables, std::vector<Row>& local, std::vector<Row>& remote) const;

    /// Lengths of the runs of one whole block pair of a group, unmerged across blocks and uncut.
    [[nodiscard]] std::vector<std::uint64_t> block_runs(std::size_t group) const;

    /// Whether both sides hold the same tokens per block, so that whole blocks pair up, and a list
    /// of all their runs can be indexed by int32.
    [[nodiscard]] bool can_prepare() const;

    /// Number of prepared rows of each side.
    [[nodiscard]] std::array<std::uint64_t, 2> prepared_sizes() const;

    /// Every run of every block of a side's pool, cut to max_bytes, ascending by address (except
    /// where groups interleave in memory).
    /// @throws Error PlanError unless `can_prepare`
    [[nodiscard]] std::vector<Row> prepared_rows(Side which) const;

    /// Number of indices that `expand_indices` gives for the tables; none if part of a block would
    /// move, which prepared rows cannot say.
    /// @throws Error PlanError as `expand`, unless `can_prepare`
    [[nodiscard]] std::optional<std::size_t> num_indices(Tables tables) const;

    /// Indices into both sides' prepared rows, paired; the same bytes as `expand`. Replaces the
    /// contents of the vectors.
    /// @throws Error PlanError as `expand`, unless `can_prepare`, or if part of a block would move
    void expand_indices(Tables tables, std::vector<std::int32_t>& local,
                        std::vector<std::int32_t>& remote) const;

  private:
    friend class Expansion;

    struct PlanGroup {
        std::array<Paging, 2> paging;
        std::array<std::uint64_t, 2> pool{};
        bool whole = false;
        std::uint64_t slot_bytes = 0;
    };

    struct Loop {
        std::uint64_t count = 1;
        std::array<std::uint64_t, 2> stride{};
    };

    /// The common box of two regions: nested loops around one element, widest local stride first.
    struct Nest {
        std::size_t group = 0;
        std::array<std::size_t, 2> span{};
        std::array<std::uint64_t, 2> base{};
        std::array<std::uint64_t, 2> block_stride{};
        std::uint64_t length = 0;
        std::size_t token_loop = 0;
        std::array<Loop, 5> loops;
    };

    /// Nests of one group whose runs of a block lie between those of the blocks around it.
    struct Lane {
        std::size_t group = 0;
        std::size_t first_nest = 0, last_nest = 0;
    };

    /// Consecutive slots of a block pair.
    struct Shape {
        std::uint64_t local_slot, remote_slot, count;
        auto operator<=>(const Shape&) const = default;
    };

    struct Piece {
        std::uint64_t local_block, remote_block;
        std::size_t shape;
    };

    struct Run {
        std::array<std::uint64_t, 2> address;
        std::uint64_t length;
        std::array<std::uint64_t, 2> block_stride;
        std::array<const Span*, 2> span;
    };

    /// A run of a whole block for each block of the pool; see `strips`.
    struct Strip {
        std::size_t group;
        std::uint64_t length;
        std::array<std::uint64_t, 2> address, block_stride;
        std::array<const Span*, 2> span;
        std::array<std::uint64_t, 2> first, step;
    };

    void add_lane(std::size_t index);
    void append_runs(const Nest& nest, const Shape& shape, std::vector<Run>& out) const;
    [[nodiscard]] std::vector<Run> lane_runs(const Lane& lane, const Shape& shape) const;
    [[nodiscard]] std::vector<Strip> strips() const;
    void require_prepare() const;
    /// Group and shape of a part of a block that would move, which prepared rows cannot say.
    [[nodiscard]] std::optional<std::pair<std::size_t, Shape>> partial_block(
        const Expansion& expansion) const;
    void require_tables(Tables tables) const;
    Cover require_cover(std::size_t index, const Table& table) const;

    std::uint64_t max_bytes_ = Selection::kAllBytes;
    std::array<std::vector<Span>, 2> spans_;
    std::vector<PlanGroup> groups_;
    std::vector<Nest> nests_;
    std::vector<Lane> lanes_;
};

/// Tables resolved against a plan: how much there is to write is known before it is written.
class Expansion {
  public:
    /// Keeps a reference to the plan, and none to the tables.
    /// @throws Error PlanError
    Expansion(const Plan& plan, Tables tables);

    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

    /// Rows before merging.
    [[nodiscard]] std::size_t num_runs() const noexcept { return num_runs_; }

    /// No fewer than the rows that `emit` writes.
    [[nodiscard]] std::size_t bound() const noexcept { return bound_; }

    /// Write the rows to arrays of at least `bound()` each.
    /// @return number of rows
    std::size_t emit(Row* local, Row* remote) const;

  private:
    friend class Plan;
    using Shape = Plan::Shape;
    using Piece = Plan::Piece;
    using Run = Plan::Run;

    /// Slots that go together, by index into the tables.
    struct Pair {
        std::size_t local, remote;
        Shape shape;
        bool extend(const Pair& next);
    };

    /// Pieces of one group by ascending local address, and how often each shape occurs.
    struct Work {
        std::vector<Piece> pieces;
        std::vector<Shape> shapes;
        std::vector<std::uint64_t> uses;
        std::map<Shape, std::size_t> known;
        std::size_t shape = 0;
        void close(const Pair& pair, const Table& table);
    };

    static Work split(const Plan& plan, std::size_t index, const Table& table);
    template <class Visit>
    void for_each_run(Visit visit) const;

    const Plan& plan_;
    std::vector<Work> work_;
    std::uint64_t bytes_ = 0;
    std::size_t num_runs_ = 0;
    std::size_t bound_ = 0;
    /// Runs of each (lane, shape), one after the other: those of template t lie between
    /// `template_end_[t - 1]` and `template_end_[t]`; the templates of a lane start at
    /// `lane_templates_`.
    std::vector<Run> runs_;
    std::vector<std::size_t> template_end_{0};
    std::vector<std::size_t> lane_templates_;
};

}  // namespace pynixlkv::kv
