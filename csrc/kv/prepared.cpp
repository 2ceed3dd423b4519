/// @file
/// Plans for transports that take a list of all descriptors once and indices into it afterwards.
#include <algorithm>
#include <limits>
#include <string>

#include "kv/plan.hpp"
#include "kv/radix.hpp"
#include "kv/words.hpp"

namespace pynixlkv::kv {

/// The runs of one whole block, cut, with their places in the prepared lists: run s of block b is
/// entry `first + b * step` of a side's list. Strips are in the order of the local list.
std::vector<Plan::Strip> Plan::strips() const {
    std::vector<Strip> strips;
    for (const Lane& lane : lanes_) {
        const Shape whole{0, 0, groups_[lane.group].paging[0].slots};
        for (const Run& run : lane_runs(lane, whole)) {
            for (std::uint64_t at = 0; at < run.length; at += max_bytes_) {
                strips.push_back({lane.group,
                                  std::min(max_bytes_, run.length - at),
                                  {run.address[0] + at, run.address[1] + at},
                                  run.block_stride,
                                  run.span,
                                  {},
                                  {}});
            }
        }
    }
    for (const std::size_t side : {std::size_t{1}, std::size_t{0}}) {
        radix_sort_by(strips, [&](const Strip& strip) { return strip.address[side]; });
        std::uint64_t first = 0;
        for (auto begin = strips.begin(); begin != strips.end();) {
            // Strips whose blocks do not get past the next block of the first of them.
            const std::uint64_t stride = begin->block_stride[side];
            const auto end = std::find_if(begin + 1, strips.end(), [&](const Strip& strip) {
                return strip.group != begin->group || strip.block_stride[side] != stride ||
                       strip.address[side] + strip.length - begin->address[side] > stride;
            });
            const auto step = static_cast<std::uint64_t>(end - begin);
            const std::uint64_t num_blocks = groups_[begin->group].paging[side].num_blocks;
            for (std::uint64_t i = 0; begin != end; ++begin, ++i) {
                begin->first[side] = first + i;
                begin->step[side] = step;
            }
            first = add(first, mul(step, num_blocks));
        }
    }
    return strips;
}

bool Plan::can_prepare() const {
    for (const PlanGroup& group : groups_) {
        if (!group.paging[0].same_tokens(group.paging[1])) {
            return false;
        }
    }
    const std::array<std::uint64_t, 2> sizes = prepared_sizes();
    return std::max(sizes[0], sizes[1]) <= std::numeric_limits<std::int32_t>::max();
}

std::array<std::uint64_t, 2> Plan::prepared_sizes() const {
    std::array<std::uint64_t, 2> rows{};
    for (const Strip& strip : strips()) {
        for (std::size_t side = 0; side < 2; ++side) {
            rows[side] += groups_[strip.group].paging[side].num_blocks;
        }
    }
    return rows;
}

void Plan::require_prepare() const {
    if (!can_prepare()) {
        plan_error("the plan cannot be prepared: the sides need blocks of the same tokens, and ",
                   std::numeric_limits<std::int32_t>::max(), " rows at most");
    }
}

std::vector<Row> Plan::prepared_rows(Side which) const {
    require_prepare();
    const auto side = static_cast<std::size_t>(which);
    std::vector<Row> rows(prepared_sizes()[side]);
    for (const Strip& strip : strips()) {
        for (std::uint64_t block = 0; block < groups_[strip.group].paging[side].num_blocks;
             ++block) {
            rows[strip.first[side] + block * strip.step[side]] = {
                strip.address[side] + block * strip.block_stride[side], strip.length,
                strip.span[side]->device};
        }
    }
    return rows;
}

std::optional<std::pair<std::size_t, Plan::Shape>> Plan::partial_block(
    const Expansion& expansion) const {
    for (std::size_t group = 0; group < groups_.size(); ++group) {
        for (const Shape& shape : expansion.work_[group].shapes) {
            if (shape.count != groups_[group].paging[0].slots) {
                return std::pair{group, shape};
            }
        }
    }
    return std::nullopt;
}

std::optional<std::size_t> Plan::num_indices(Tables tables) const {
    require_prepare();
    const Expansion expansion(*this, tables);
    if (partial_block(expansion)) {
        return std::nullopt;
    }
    std::size_t count = 0;
    for (const Strip& strip : strips()) {
        count += expansion.work_[strip.group].pieces.size();
    }
    return count;
}

void Plan::expand_indices(Tables tables, std::vector<std::int32_t>& local,
                          std::vector<std::int32_t>& remote) const {
    require_prepare();
    const Expansion expansion(*this, tables);
    if (const auto partial = partial_block(expansion)) {
        const auto& [group, shape] = *partial;
        plan_error("group ", group, ": prepared rows are whole blocks; ", shape.count,
                   " tokens of a block of ", groups_[group].paging[0].slots,
                   " would move; round num_tokens up");
    }
    const std::vector<Strip> all = strips();
    local.clear();
    remote.clear();
    for (auto begin = all.begin(); begin != all.end();) {
        const auto end = begin + static_cast<std::ptrdiff_t>(begin->step[0]);
        for (const Piece& piece : expansion.work_[begin->group].pieces) {
            for (auto strip = begin; strip != end; ++strip) {
                local.push_back(static_cast<std::int32_t>(strip->first[0] +
                                                          piece.local_block * strip->step[0]));
                remote.push_back(static_cast<std::int32_t>(strip->first[1] +
                                                           piece.remote_block * strip->step[1]));
            }
        }
        begin = end;
    }
}

}  // namespace pynixlkv::kv
