#include "kv/plan.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "kv/radix.hpp"

namespace pynixlkv::kv {

namespace {

/// Ranges of the matched axes, indexed by Axis.
using Box = std::array<Interval, kNumAxes>;

std::uint64_t length(const Interval& interval) {
    return interval.stop > interval.start ? interval.stop - interval.start : 0;
}

Interval intersect(const Interval& a, const Interval& b) {
    return {std::max(a.start, b.start), std::min(a.stop, b.stop)};
}

Box box_of(const Region& region) {
    Box box{};
    for (const Axis axis : kMatchedAxes) {
        const Extent& extent = region.axes[axis];
        box[axis] = {extent.start, extent.start + extent.count};
    }
    return box;
}

Box intersect(Box a, const Box& b) {
    for (const Axis axis : kMatchedAxes) {
        a[axis] = intersect(a[axis], b[axis]);
    }
    return a;
}

std::uint64_t volume(const Box& box) {
    std::uint64_t product = 1;
    for (const Axis axis : kMatchedAxes) {
        product = mul(product, length(box[axis]));
    }
    return product;
}

/// Elements of a box that a group holds. Its regions hold none twice.
std::uint64_t held(const Box& box, const Group& group) {
    std::uint64_t sum = 0;
    for (const Region& region : group.regions) {
        sum += volume(intersect(box, box_of(region)));
    }
    return sum;
}

/// Narrow a box that is not held whole down to its first missing element, and name that.
[[noreturn]] void report_missing(Box box, const Group& remote, std::size_t group) {
    std::string where;
    for (const Axis axis : kMatchedAxes) {
        const Interval range = box[axis];
        std::uint64_t index = range.start;
        do {
            box[axis] = {index, index + 1};
            ++index;
        } while (held(box, remote) == volume(box));
        where += text(where.empty() ? "" : ", ", kAxisNames[axis], " ", box[axis].start);
    }
    plan_error("group ", group, ": the remote side does not hold ", where,
               ", which the local side wants; select heads or layers that both sides hold");
}

bool has_opaque_tokens(const Group& group) {
    return (group.opaque_axes >> kToken & 1) != 0;
}

/// Whether tokens of one side can be tokens of the other: turns of both meet somewhere.
bool turns_meet(const Paging& a, const Paging& b) {
    const std::uint64_t cycle = std::gcd(a.period(), b.period());
    const std::uint64_t a_start = mul(a.rank, a.interleave) % cycle;
    const std::uint64_t b_start = mul(b.rank, b.interleave) % cycle;
    const std::uint64_t ahead = (b_start + cycle - a_start) % cycle;
    return ahead < a.interleave || cycle - ahead < b.interleave;
}

/// What is opaque along an axis must have the same inside on both sides and move whole.
void check_opaque_axes(const Region& a, const Region& b, const Box& box, std::uint64_t mask,
                       const std::string& subject) {
    // An axis of one element has no stride; the other side may have more elements and one.
    const auto stride = [&](std::size_t axis) {
        return std::max(a.axes[axis].stride, b.axes[axis].stride);
    };
    for (std::size_t axis = 0; axis < kNumAxes; ++axis) {
        for (std::size_t inner = 0; inner < kNumAxes; ++inner) {
            const bool is_opaque = inner == axis || stride(inner) < stride(axis);
            if ((mask >> axis & 1) == 0 || inner == kBlock || !is_opaque) {
                continue;
            }
            const Extent& x = a.axes[inner];
            const Extent& y = b.axes[inner];
            const auto shape = [](const Extent& e) {
                return std::array{e.start, e.count, (e.count - 1) * e.stride};
            };
            if (shape(x) != shape(y) || (inner != kToken && length(box[inner]) != x.count)) {
                plan_error(subject, ": the ", kAxisNames[axis], " axis is opaque, so its ",
                           kAxisNames[inner],
                           " axis must be the same on both sides and move whole; local is ",
                           x.count, " from ", x.start, " by ", x.stride, " bytes, remote ", y.count,
                           " from ", y.start, " by ", y.stride, " bytes");
            }
        }
    }
}

/// Collects the nests of a plan.
class Compiler {
  public:
    Compiler(const Geometry& local, const Geometry& remote, const Selection& selection)
        : local_(local), remote_(remote), selection_(selection) {}

    /// By ascending local address, with spans numbered as in the geometries.
    std::vector<LoopNest> run() {
        for (std::size_t i = 0; i < local_.groups.size(); ++i) {
            add_group(i);
        }
        if (nests_.empty()) {
            plan_error("nothing to move: the selected heads and layers are not held");
        }
        std::stable_sort(nests_.begin(), nests_.end(), [](const LoopNest& a, const LoopNest& b) {
            return a.base[0] < b.base[0];
        });
        return std::move(nests_);
    }

  private:
    void add_group(std::size_t index) {
        const Group& a = local_.groups[index];
        const Group& b = remote_.groups[index];
        const std::string subject = text("group ", index);
        if (a.element_bytes != b.element_bytes || a.has_heads != b.has_heads ||
            a.opaque_axes != b.opaque_axes ||
            a.paging.tokens_per_slot != b.paging.tokens_per_slot) {
            plan_error(subject,
                       " differs in element size, head axis, opaque axes or tokens per state");
        }
        if (!turns_meet(a.paging, b.paging)) {
            plan_error(subject, ": context rank ", a.paging.rank, " of ", a.paging.ranks,
                       " here and rank ", b.paging.rank, " of ", b.paging.ranks,
                       " there have no tokens in common");
        }
        if (has_opaque_tokens(a) && !a.paging.same_tokens(b.paging)) {
            plan_error(subject, ": the token axis is opaque, so blocks must hold the same ",
                       "tokens on both sides; local has ", a.paging.slots, " per block, remote ",
                       b.paging.slots);
        }
        for (const Region& region : a.regions) {
            for (const Interval& layers :
                 index < selection_.layers.size() ? selection_.layers[index] : everything_) {
                for (const Interval& heads : a.has_heads ? selection_.heads : everything_) {
                    Box box = box_of(region);
                    box[kLayer] = intersect(box[kLayer], layers);
                    box[kHead] = intersect(box[kHead], heads);
                    add_box(index, region, box);
                }
            }
        }
    }

    void add_box(std::size_t index, const Region& region, const Box& wanted) {
        const Group& remote = remote_.groups[index];
        if (held(wanted, remote) != volume(wanted)) {
            report_missing(wanted, remote, index);
        }
        for (const Region& other : remote.regions) {
            const Box box = intersect(wanted, box_of(other));
            if (volume(box) != 0) {
                check_opaque_axes(region, other, box, remote.opaque_axes, text("group ", index));
                add_nests(index, region, other, box);
            }
        }
    }

    /// Axes outside the block axis become nests of their own, so that within each nest higher
    /// blocks have higher addresses.
    void add_nests(std::size_t index, const Region& a, const Region& b, Box box) {
        const std::uint64_t block_stride = stride_of_blocks(a, local_);
        for (const Axis axis : kMatchedAxes) {
            if (length(box[axis]) > 1 && a.axes[axis].stride >= block_stride) {
                const Interval range = box[axis];
                for (std::uint64_t i = range.start; i < range.stop; ++i) {
                    box[axis] = {i, i + 1};
                    add_nests(index, a, b, box);
                }
                return;
            }
        }
        add_nest(index, a, b, box);
    }

    void add_nest(std::size_t index, const Region& a, const Region& b, const Box& box) {
        LoopNest nest{index,
                      {a.span, b.span},
                      {a.base, b.base},
                      {stride_of_blocks(a, local_), stride_of_blocks(b, remote_)},
                      local_.groups[index].element_bytes,
                      0,
                      {}};
        nest.loops[0] = {1, {a.axes[kToken].stride, b.axes[kToken].stride}};
        for (std::size_t i = 0; i < kMatchedAxes.size(); ++i) {
            const Axis axis = kMatchedAxes[i];
            const std::array<std::uint64_t, 2> stride{a.axes[axis].stride, b.axes[axis].stride};
            nest.base[0] += (box[axis].start - a.axes[axis].start) * stride[0];
            nest.base[1] += (box[axis].start - b.axes[axis].start) * stride[1];
            nest.loops[i + 1] = {length(box[axis]), stride};
        }
        std::array<std::size_t, 5> order{0, 1, 2, 3, 4};
        std::stable_sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) {
            return nest.loops[x].stride[0] > nest.loops[y].stride[0];
        });
        const auto unsorted = nest.loops;
        for (std::size_t i = 0; i < order.size(); ++i) {
            nest.loops[i] = unsorted[order[i]];
            if (order[i] == 0) {
                nest.token_loop = i;
            }
        }
        nests_.push_back(nest);
    }

    /// A pool of one block has no stride of its own; what lies in it is all within its span.
    static std::uint64_t stride_of_blocks(const Region& region, const Geometry& geometry) {
        const Extent& blocks = region.axes[kBlock];
        return blocks.count > 1 ? blocks.stride : geometry.spans[region.span].length;
    }

    const Geometry& local_;
    const Geometry& remote_;
    const Selection& selection_;
    const std::vector<Interval> everything_{Interval{}};
    std::vector<LoopNest> nests_;
};

/// The number of the first group that shares the group's block table.
std::size_t table_of(const Geometry& geometry, std::size_t group) {
    std::size_t first = 0;
    while (first < group && !geometry.groups[first].shares_table(geometry.groups[group])) {
        ++first;
    }
    return first;
}

std::uint64_t start_of(const Table& table, std::size_t side, const Paging& paging,
                       std::size_t group) {
    const std::int64_t value = table.start[side];
    if (value < 0 || static_cast<std::uint64_t>(value) % paging.unit() != 0) {
        plan_error("group ", group, ": ", kSideNames[side], "_start is ", value,
                   ", must be a multiple of the ", paging.unit(),
                   " tokens that a block stands for");
    }
    return static_cast<std::uint64_t>(value);
}

void check_ids(std::span<const std::int64_t> ids, std::size_t side, const Paging& paging,
               std::size_t group) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (std::cmp_less(ids[i], 0) || std::cmp_greater_equal(ids[i], paging.num_blocks)) {
            plan_error("group ", group, ": ", kSideNames[side], " block ", ids[i], " at index ", i,
                       " must be from 0 to ", paging.num_blocks - 1);
        }
    }
}

}  // namespace

Plan::Plan(const Geometry& local, const Geometry& remote, const Selection& selection)
    : max_bytes_(selection.max_bytes) {
    if (local.groups.size() != remote.groups.size()) {
        plan_error("local has ", local.groups.size(), " groups, remote ", remote.groups.size());
    }
    nests_ = Compiler(local, remote, selection).run();
    keep_used_spans(0, local.spans);
    keep_used_spans(1, remote.spans);
    for (std::size_t i = 0; i < local.groups.size(); ++i) {
        const Group& a = local.groups[i];
        const Group& b = remote.groups[i];
        groups_.push_back({{a.paging, b.paging},
                           {a.pool, b.pool},
                           {table_of(local, i), table_of(remote, i)},
                           has_opaque_tokens(a),
                           0});
    }
    for (std::size_t i = 0; i < nests_.size(); ++i) {
        add_to_run_groups(i);
    }
}

/// Keep the spans that nests lie in, and number them anew.
void Plan::keep_used_spans(std::size_t side, const std::vector<Descriptor>& spans) {
    std::map<std::size_t, std::size_t> places;
    for (const LoopNest& nest : nests_) {
        places.emplace(nest.span[side], 0);
    }
    for (auto& [index, place] : places) {
        place = spans_[side].size();
        spans_[side].push_back(spans[index]);
    }
    for (LoopNest& nest : nests_) {
        nest.span[side] = places.at(nest.span[side]);
    }
}

void Plan::add_to_run_groups(std::size_t index) {
    const LoopNest& nest = nests_[index];
    GroupPair& group = groups_[nest.group];
    std::uint64_t block_end = nest.base[0] + nest.length;
    std::uint64_t slot_bytes = nest.length;
    for (std::size_t i = 0; i < nest.loops.size(); ++i) {
        const bool is_token_loop = i == nest.token_loop;
        const std::uint64_t count = is_token_loop ? group.paging[0].slots : nest.loops[i].count;
        block_end += (count - 1) * nest.loops[i].stride[0];
        slot_bytes *= is_token_loop ? 1 : count;
    }
    group.slot_bytes += slot_bytes;
    if (!run_groups_.empty()) {
        RunGroup& part = run_groups_.back();
        const LoopNest& first = nests_[part.first_nest];  // the lowest address
        if (part.group == nest.group && first.block_stride[0] == nest.block_stride[0] &&
            block_end - first.base[0] <= nest.block_stride[0]) {
            part.last_nest = index + 1;
            return;
        }
    }
    run_groups_.push_back({nest.group, index, index + 1});
}

Overlap Plan::overlap(std::size_t group, const Table& table) const {
    const GroupPair& pair = groups_.at(group);
    Overlap overlap;
    overlap.end = kMaxNumber;
    for (std::size_t side = 0; side < 2; ++side) {
        const Paging& paging = pair.paging[side];
        check_ids(table.ids[side], side, paging, group);
        overlap.start[side] = start_of(table, side, paging, group);
        overlap.begin = std::max(overlap.begin, overlap.start[side]);
        overlap.end = std::min(
            overlap.end, add(overlap.start[side], mul(table.ids[side].size(), paging.unit())));
    }
    if (table.num_tokens >= 0) {
        auto wanted = static_cast<std::uint64_t>(table.num_tokens);
        const Paging& paging = pair.paging[0];
        const std::uint64_t unit = pair.whole ? paging.unit() : paging.tokens_per_slot;
        wanted = mul(wanted / unit + (wanted % unit == 0 ? 0 : 1), unit);
        overlap.end = std::min(overlap.end, wanted);
    }
    overlap.end = std::max(overlap.begin, overlap.end);
    for (std::size_t side = 0; side < 2; ++side) {
        const std::uint64_t unit = pair.paging[side].unit();
        overlap.first[side] = (overlap.begin - overlap.start[side]) / unit;
        overlap.last[side] = overlap.begin == overlap.end
                                 ? overlap.first[side]
                                 : (overlap.end - overlap.start[side] + unit - 1) / unit;
    }
    return overlap;
}

std::vector<std::uint64_t> Plan::block_runs(std::size_t group) const {
    const Paging& local = groups_.at(group).paging[0];
    const Paging& remote = groups_.at(group).paging[1];
    const SlotRange slots{0, 0, std::min(local.slots, remote.slots)};
    std::vector<std::uint64_t> lengths;
    for (const RunGroup& part : run_groups_) {
        if (part.group == group) {
            for (const Run& run : this->runs(part, slots)) {
                lengths.push_back(run.length);
            }
        }
    }
    return lengths;
}

void Plan::append_runs(const LoopNest& nest, const SlotRange& slots, std::vector<Run>& out) const {
    auto loops = nest.loops;
    loops[nest.token_loop].count = slots.count;
    const auto& token_stride = loops[nest.token_loop].stride;
    Run run{{nest.base[0] + slots.local_slot * token_stride[0],
             nest.base[1] + slots.remote_slot * token_stride[1]},
            nest.length,
            nest.block_stride,
            {&spans_[0][nest.span[0]], &spans_[1][nest.span[1]]}};
    // Innermost loops that continue the run on both sides become part of it.
    std::size_t depth = loops.size();
    while (depth > 0 &&
           (loops[depth - 1].count == 1 || (loops[depth - 1].stride[0] == run.length &&
                                            loops[depth - 1].stride[1] == run.length))) {
        run.length *= loops[--depth].count;
    }
    const std::size_t first = out.size();
    out.push_back(run);
    for (std::size_t level = 0; level < depth; ++level) {
        const std::size_t last = out.size();
        const std::vector<Run> outer(out.begin() + static_cast<std::ptrdiff_t>(first),
                                     out.begin() + static_cast<std::ptrdiff_t>(last));
        out.resize(first);
        for (const Run& at : outer) {
            Run next = at;
            for (std::uint64_t i = 0; i < loops[level].count; ++i) {
                out.push_back(next);
                next.address[0] += loops[level].stride[0];
                next.address[1] += loops[level].stride[1];
            }
        }
    }
}

std::vector<Run> Plan::runs(const RunGroup& part, const SlotRange& slots) const {
    std::vector<Run> runs;
    for (std::size_t i = part.first_nest; i < part.last_nest; ++i) {
        append_runs(nests_[i], slots, runs);
    }
    radix_sort_by(runs, [](const Run& run) { return run.address[0]; });
    std::size_t kept = 0;
    for (std::size_t i = 1; i < runs.size(); ++i) {
        Run& a = runs[kept];
        const Run& b = runs[i];
        if (a.address[0] + a.length == b.address[0] && a.address[1] + a.length == b.address[1] &&
            a.block_stride == b.block_stride && a.span == b.span) {
            a.length += b.length;
        } else {
            runs[++kept] = b;
        }
    }
    runs.resize(kept + 1);
    return runs;
}

}  // namespace pynixlkv::kv
