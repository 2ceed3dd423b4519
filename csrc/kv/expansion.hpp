/// @file
/// Block tables through a plan: which slots pair up, and their descriptors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kv/plan.hpp"

namespace pynixlkv::kv {

/// The block tables of one transfer, copied and checked against its plan. Immutable.
class BlockTables {
  public:
    struct GroupTables {
        std::array<std::vector<std::uint64_t>, 2> ids;
        Overlap overlap;
    };

    /// @param tables one for each group of the plan
    /// @throws Error PlanError naming group, index, value and limit if an id is out of range, or if
    /// the tables do not cover the same positions
    BlockTables(std::shared_ptr<const Plan> plan, std::span<const Table> tables);

    /// Check that no block is written twice. O(blocks).
    /// @throws Error PlanError
    void check_written_once(Side side) const;

    [[nodiscard]] const std::shared_ptr<const Plan>& plan() const noexcept { return plan_; }
    [[nodiscard]] const std::vector<GroupTables>& groups() const noexcept { return groups_; }

  private:
    std::shared_ptr<const Plan> plan_;
    std::vector<GroupTables> groups_;
};

/// Tables resolved into pairs of blocks: the size of the result is known before it is written.
class Expansion {
  public:
    /// Keeps a reference to the plan, and none to the tables.
    explicit Expansion(const BlockTables& tables);

    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

    /// Rows before merging.
    [[nodiscard]] std::size_t num_runs() const noexcept { return num_runs_; }

    /// No fewer than the rows that `emit` writes.
    [[nodiscard]] std::size_t bound() const noexcept { return bound_; }

    /// Write the rows of both sides to arrays of at least `bound()` each: paired by index,
    /// ascending by local address, adjacent rows merged, then cut to max_bytes.
    /// @return number of rows
    std::size_t emit(Descriptor* local, Descriptor* remote) const;

    /// As `emit`; replaces the contents of the vectors.
    void emit(std::vector<Descriptor>& local, std::vector<Descriptor>& remote) const;

    /// Number of indices that `emit_indices` gives; none if the plan cannot prepare or part of a
    /// block would move.
    [[nodiscard]] std::optional<std::size_t> num_indices() const;

    /// Indices into both sides' prepared rows, paired; the same bytes as `emit`. Replaces the
    /// contents of the vectors.
    /// @throws Error PlanError unless `num_indices` gives a number
    void emit_indices(std::vector<std::int32_t>& local, std::vector<std::int32_t>& remote) const;

  private:
    /// Blocks, and which of their slots go together.
    struct BlockPair {
        std::uint64_t local_block, remote_block;
        std::size_t slots;  ///< index into PairedGroup::slots
    };

    /// Pairs of one group by ascending local address, and how often each range of slots occurs.
    struct PairedGroup {
        std::vector<BlockPair> pairs;
        std::vector<SlotRange> slots;
        std::vector<std::uint64_t> uses;
        std::map<SlotRange, std::size_t> known;
        std::size_t last = 0;  ///< the range of the latest pair

        void append(std::uint64_t local_block, std::uint64_t remote_block, const SlotRange& range);
    };

    static PairedGroup pair_slots(const std::array<Paging, 2>& paging,
                                  const BlockTables::GroupTables& tables);
    template <class Visit>
    void for_each_run(Visit visit) const;

    const Plan& plan_;
    std::vector<PairedGroup> paired_;
    std::uint64_t bytes_ = 0;
    std::size_t num_runs_ = 0;
    std::size_t bound_ = 0;
    /// Runs of each (run group, slot range), one after the other: those of template t lie between
    /// `template_end_[t - 1]` and `template_end_[t]`; the templates of a run group start at
    /// `first_template_`.
    std::vector<Run> runs_;
    std::vector<std::size_t> template_end_{0};
    std::vector<std::size_t> first_template_;
};

}  // namespace pynixlkv::kv
