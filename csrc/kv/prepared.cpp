/// @file
/// Plans for transports that take a list of all descriptors once and indices into it afterwards.
#include <algorithm>
#include <limits>

#include "kv/expansion.hpp"
#include "kv/radix.hpp"

namespace pynixlkv::kv {

std::vector<PoolRun> Plan::make_pool_runs() const {
    std::vector<PoolRun> all;
    for (const RunGroup& part : run_groups_) {
        for (Run run : runs(part, {0, 0, groups_[part.group].paging[0].slots})) {
            for (std::uint64_t left = run.length; left != 0; left -= run.length) {
                run.length = std::min(max_bytes_, left);
                all.push_back({part.group, run, {}, {}});
                run.address[0] += run.length;
                run.address[1] += run.length;
            }
        }
    }
    for (const std::size_t side : {std::size_t{1}, std::size_t{0}}) {
        radix_sort_by(all, [&](const PoolRun& at) { return at.run.address[side]; });
        std::uint64_t first = 0;
        for (auto begin = all.begin(); begin != all.end();) {
            // Runs whose blocks do not get past the next block of the first of them.
            const std::uint64_t stride = begin->run.block_stride[side];
            const auto end = std::find_if(begin + 1, all.end(), [&](const PoolRun& at) {
                return at.group != begin->group || at.run.block_stride[side] != stride ||
                       at.run.address[side] + at.run.length - begin->run.address[side] > stride;
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
    return all;
}

const Plan::Pool& Plan::pool() const {
    std::call_once(pool_made_, [this] {
        if (!std::all_of(groups_.begin(), groups_.end(), [](const GroupPair& group) {
                return group.paging[0].same_tokens(group.paging[1]);
            })) {
            return;
        }
        pool_.runs = make_pool_runs();
        for (const PoolRun& at : pool_.runs) {
            for (std::size_t side = 0; side < 2; ++side) {
                pool_.sizes[side] += groups_[at.group].paging[side].num_blocks;
            }
        }
        pool_.can_prepare =
            std::max(pool_.sizes[0], pool_.sizes[1]) <= std::numeric_limits<std::int32_t>::max();
    });
    return pool_;
}

std::vector<Descriptor> Plan::prepared_rows(Side side) const {
    if (!pool().can_prepare) {
        plan_error("the plan cannot be prepared: the sides need blocks of the same tokens, and ",
                   std::numeric_limits<std::int32_t>::max(), " rows at most");
    }
    std::vector<Descriptor> rows(pool().sizes[side]);
    for (const PoolRun& at : pool().runs) {
        for (std::uint64_t block = 0; block < groups_[at.group].paging[side].num_blocks; ++block) {
            rows[at.first[side] + block * at.step[side]] = {
                at.run.address[side] + block * at.run.block_stride[side], at.run.length,
                at.run.span[side]->device};
        }
    }
    return rows;
}

std::optional<std::size_t> Expansion::num_indices() const {
    if (!plan_.pool().can_prepare) {
        return std::nullopt;
    }
    for (std::size_t group = 0; group < paired_.size(); ++group) {
        for (const SlotRange& slots : paired_[group].slots) {
            if (slots.count != plan_.groups()[group].paging[0].slots) {
                return std::nullopt;
            }
        }
    }
    std::size_t count = 0;
    for (const PoolRun& at : plan_.pool().runs) {
        count += paired_[at.group].pairs.size();
    }
    return count;
}

void Expansion::emit_indices(std::vector<std::int32_t>& local,
                             std::vector<std::int32_t>& remote) const {
    if (!num_indices()) {
        plan_error("the tables cannot be told by indices into prepared rows");
    }
    local.clear();
    remote.clear();
    const std::vector<PoolRun>& all = plan_.pool().runs;
    for (auto begin = all.begin(); begin != all.end();) {
        const auto end = begin + static_cast<std::ptrdiff_t>(begin->step[0]);
        for (const BlockPair& pair : paired_[begin->group].pairs) {
            for (auto at = begin; at != end; ++at) {
                local.push_back(
                    static_cast<std::int32_t>(at->first[0] + pair.local_block * at->step[0]));
                remote.push_back(
                    static_cast<std::int32_t>(at->first[1] + pair.remote_block * at->step[1]));
            }
        }
        begin = end;
    }
}

}  // namespace pynixlkv::kv
