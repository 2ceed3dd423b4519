#include "kv/plan.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "kv/words.hpp"

namespace pynixlkv::kv {

namespace {

/// First word of every program; the low byte is its version.
constexpr std::uint64_t kProgramMagic = 0x4b56'504c'414e'01;
constexpr std::size_t kNestWords = 24;
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

/// Whether tokens of one side can be tokens of the other: turns of both meet somewhere.
bool turns_meet(const Paging& a, const Paging& b) {
    const std::uint64_t cycle = std::gcd(a.period(), b.period());
    const std::uint64_t a_start = mul(a.rank, a.interleave) % cycle;
    const std::uint64_t b_start = mul(b.rank, b.interleave) % cycle;
    const std::uint64_t ahead = (b_start + cycle - a_start) % cycle;
    return ahead < a.interleave || cycle - ahead < b.interleave;
}

/// What is opaque along an axis has the same inside on both sides and moves whole.
void check_indivisible(const Region& a, const Region& b, const Box& box, std::uint64_t mask,
                       const std::string& subject) {
    // An axis of one element has no stride, so the side with more of them says where it lies.
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
                plan_error(subject, ": the ", kAxisNames[axis], " axis is indivisible, so its ",
                           kAxisNames[inner],
                           " axis must be the same on both sides and move whole; local is ",
                           x.count, " from ", x.start, " by ", x.stride, " bytes, remote ", y.count,
                           " from ", y.start, " by ", y.stride, " bytes");
            }
        }
    }
}

void append(std::vector<std::uint64_t>& words, std::initializer_list<std::uint64_t> more) {
    words.insert(words.end(), more);
}

void append_paging(std::vector<std::uint64_t>& words, const Group& group) {
    const Paging& p = group.paging;
    append(words, {p.num_blocks, p.slots, p.rank, p.ranks, p.interleave, group.pool});
}

std::vector<Interval> read_intervals(WordReader& reader, const char* what) {
    std::vector<Interval> intervals(reader.count(what, 2));
    for (Interval& interval : intervals) {
        interval.start = reader.next("range start");
        interval.stop = reader.next("range stop", interval.start);
    }
    return intervals;
}

/// Where the next record of the words starts, address first, so that sorting sorts by address.
struct NestWords {
    std::uint64_t address;
    std::array<std::uint64_t, kNestWords> words;
};

/// Collects the nests of a plan.
class Compiler {
  public:
    Compiler(const Geometry& local, const Geometry& remote, const Selection& selection)
        : local_(local), remote_(remote), selection_(selection) {}

    std::vector<std::uint64_t> run() {
        for (std::size_t i = 0; i < local_.groups.size(); ++i) {
            add_group(i);
        }
        if (nests_.empty()) {
            plan_error("nothing to move: the selected heads and layers are not held");
        }
        std::stable_sort(nests_.begin(), nests_.end(), [](const NestWords& a, const NestWords& b) {
            return a.address < b.address;
        });
        std::vector<std::uint64_t> words{kProgramMagic, selection_.max_bytes};
        append_used_spans(words, local_.spans, 1);
        append_used_spans(words, remote_.spans, 2);
        words.push_back(local_.groups.size());
        for (std::size_t i = 0; i < local_.groups.size(); ++i) {
            append_paging(words, local_.groups[i]);
            append_paging(words, remote_.groups[i]);
            words.push_back(local_.groups[i].indivisible >> kToken & 1);
        }
        words.push_back(nests_.size());
        for (const NestWords& nest : nests_) {
            words.insert(words.end(), nest.words.begin(), nest.words.end());
        }
        return words;
    }

  private:
    /// Append the spans that nests lie in, and number them anew in word `field` of each nest.
    void append_used_spans(std::vector<std::uint64_t>& words, const std::vector<Span>& spans,
                           std::size_t field) {
        std::map<std::uint64_t, std::uint64_t> places;
        for (const NestWords& nest : nests_) {
            places.emplace(nest.words[field], 0);
        }
        words.push_back(places.size());
        std::uint64_t next = 0;
        for (auto& [index, place] : places) {
            const Span& span = spans[index];
            words.insert(words.end(), {span.address, span.bytes, span.device});
            place = next++;
        }
        for (NestWords& nest : nests_) {
            nest.words[field] = places.at(nest.words[field]);
        }
    }

    void add_group(std::size_t index) {
        const Group& a = local_.groups[index];
        const Group& b = remote_.groups[index];
        const std::string subject = text("group ", index);
        if (a.element_bytes != b.element_bytes || a.has_heads != b.has_heads ||
            a.indivisible != b.indivisible) {
            plan_error(subject, " differs in element size, head axis or indivisible axes");
        }
        if (!turns_meet(a.paging, b.paging)) {
            plan_error(subject, ": context rank ", a.paging.rank, " of ", a.paging.ranks,
                       " here and rank ", b.paging.rank, " of ", b.paging.ranks,
                       " there have no tokens in common");
        }
        const bool whole_tokens = (a.indivisible >> kToken & 1) != 0;
        if (whole_tokens && !a.paging.same_tokens(b.paging)) {
            plan_error(subject, ": the token axis is indivisible, so blocks must hold the same ",
                       "tokens on both sides; local has ", a.paging.slots, " per block, remote ",
                       b.paging.slots);
        }
        const std::vector<Interval> everything{{0, kMaxWord}};
        for (const Region& region : a.regions) {
            for (const Interval& layers : selection_.layers) {
                for (const Interval& heads : a.has_heads ? selection_.heads : everything) {
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
                check_indivisible(region, other, box, remote.indivisible, text("group ", index));
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
        std::uint64_t a_base = a.base;
        std::uint64_t b_base = b.base;
        std::array<std::array<std::uint64_t, 3>, 5> loops{
            {{1, a.axes[kToken].stride, b.axes[kToken].stride}}};
        std::uint64_t token_loop = 0;
        for (std::size_t i = 0; i < kMatchedAxes.size(); ++i) {
            const Axis axis = kMatchedAxes[i];
            a_base += (box[axis].start - a.axes[axis].start) * a.axes[axis].stride;
            b_base += (box[axis].start - b.axes[axis].start) * b.axes[axis].stride;
            loops[i + 1] = {length(box[axis]), a.axes[axis].stride, b.axes[axis].stride};
        }
        std::array<std::size_t, 5> order{0, 1, 2, 3, 4};
        std::stable_sort(order.begin(), order.end(),
                         [&](std::size_t x, std::size_t y) { return loops[x][1] > loops[y][1]; });
        token_loop =
            static_cast<std::uint64_t>(std::find(order.begin(), order.end(), 0U) - order.begin());
        NestWords nest{
            a_base,
            {index, a.span, b.span, a_base, b_base, stride_of_blocks(a, local_),
             stride_of_blocks(b, remote_), local_.groups[index].element_bytes, token_loop}};
        for (std::size_t i = 0; i < order.size(); ++i) {
            std::copy(loops[order[i]].begin(), loops[order[i]].end(),
                      nest.words.begin() + 9 + static_cast<std::ptrdiff_t>(3 * i));
        }
        nests_.push_back(nest);
    }

    /// A pool of one block has no stride of its own; what lies in it is all within its span.
    static std::uint64_t stride_of_blocks(const Region& region, const Geometry& geometry) {
        const Extent& blocks = region.axes[kBlock];
        return blocks.count > 1 ? blocks.stride : geometry.spans[region.span].bytes;
    }

    const Geometry& local_;
    const Geometry& remote_;
    const Selection& selection_;
    std::vector<NestWords> nests_;
};

}  // namespace

Selection Selection::from_words(std::span<const std::uint64_t> words) {
    WordReader reader(words, "selection");
    Selection selection;
    selection.max_bytes = reader.next("max_bytes", 1);
    selection.heads = read_intervals(reader, "number of head ranges");
    selection.layers = read_intervals(reader, "number of layer ranges");
    reader.finish();
    return selection;
}

std::vector<std::uint64_t> compile(const Geometry& local, const Geometry& remote,
                                   const Selection& selection) {
    if (local.groups.size() != remote.groups.size()) {
        plan_error("local has ", local.groups.size(), " groups, remote ", remote.groups.size());
    }
    return Compiler(local, remote, selection).run();
}

Plan Plan::from_words(std::span<const std::uint64_t> words) {
    WordReader reader(words, "plan");
    reader.next("magic", kProgramMagic, kProgramMagic);
    Plan plan;
    plan.max_bytes_ = reader.next("max_bytes", 1);
    for (std::vector<Span>& spans : plan.spans_) {
        spans = read_spans(reader);
    }
    plan.groups_.resize(reader.count("number of groups", 13, 1));
    for (PlanGroup& group : plan.groups_) {
        for (std::size_t side = 0; side < 2; ++side) {
            group.paging[side] = read_paging(reader);
            group.pool[side] = reader.next("pool", 0, plan.groups_.size() - 1);
        }
        group.whole = reader.next("whole blocks flag", 0, 1) == 1;
    }
    plan.nests_.resize(reader.count("number of nests", kNestWords, 1));
    for (std::size_t i = 0; i < plan.nests_.size(); ++i) {
        Nest& nest = plan.nests_[i];
        nest.group = static_cast<std::size_t>(reader.next("group", 0, plan.groups_.size() - 1));
        for (std::size_t side = 0; side < 2; ++side) {
            nest.span[side] =
                static_cast<std::size_t>(reader.next("span", 0, plan.spans_[side].size() - 1));
        }
        nest.base[0] = reader.next("local base");
        nest.base[1] = reader.next("remote base");
        nest.block_stride[0] = reader.next("local block stride");
        nest.block_stride[1] = reader.next("remote block stride");
        nest.length = reader.next("element bytes", 1);
        nest.token_loop =
            static_cast<std::size_t>(reader.next("token loop", 0, nest.loops.size() - 1));
        for (Loop& loop : nest.loops) {
            loop.count = reader.next("loop count", 1);
            loop.stride[0] = reader.next("local stride");
            loop.stride[1] = reader.next("remote stride");
        }
        plan.add_lane(i);
    }
    reader.finish();
    return plan;
}

/// Prove that a nest stays in its spans for all blocks and slots, and append it to the lanes.
void Plan::add_lane(std::size_t index) {
    const Nest& nest = nests_[index];
    PlanGroup& group = groups_[nest.group];
    std::array<std::uint64_t, 2> block_end{};
    for (std::size_t side = 0; side < 2; ++side) {
        std::uint64_t end = add(nest.base[side], nest.length);
        for (std::size_t i = 0; i < nest.loops.size(); ++i) {
            const Loop& loop = nest.loops[i];
            const std::uint64_t count =
                i == nest.token_loop ? group.paging[side].slots : loop.count;
            end = add(end, mul(count - 1, loop.stride[side]));
        }
        block_end[side] = end;
        end = add(end, mul(group.paging[side].num_blocks - 1, nest.block_stride[side]));
        const Span& span = spans_[side][nest.span[side]];
        if (nest.base[side] < span.address || end > add(span.address, span.bytes)) {
            layout_error("plan: nest ", index, " reaches [", nest.base[side], ", ", end,
                         "), outside its span at ", span.address, " of ", span.bytes, " bytes");
        }
    }
    std::uint64_t slot_bytes = nest.length;
    for (std::size_t i = 0; i < nest.loops.size(); ++i) {
        slot_bytes = mul(slot_bytes, i == nest.token_loop ? 1 : nest.loops[i].count);
    }
    group.slot_bytes = add(group.slot_bytes, slot_bytes);
    mul(group.slot_bytes, mul(group.paging[0].slots, group.paging[0].num_blocks));
    if (!lanes_.empty()) {
        Lane& lane = lanes_.back();
        const Nest& first = nests_[lane.first_nest];  // the lowest address, if made by compile
        if (lane.group == nest.group && first.block_stride[0] == nest.block_stride[0] &&
            block_end[0] - first.base[0] <= nest.block_stride[0]) {
            lane.last_nest = index + 1;
            return;
        }
    }
    lanes_.push_back({nest.group, index, index + 1});
}

std::vector<Row> Plan::extents(Side side) const {
    std::vector<Row> rows;
    for (const Span& span : spans_[static_cast<std::size_t>(side)]) {
        rows.push_back({span.address, span.bytes, span.device});
    }
    return rows;
}

}  // namespace pynixlkv::kv
