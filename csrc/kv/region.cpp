#include "kv/region.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "kv/checks.hpp"

namespace pynixlkv::kv {

namespace {

/// Bounds the time that a peer's geometry can take, to about a second; most need a thousandth.
constexpr std::uint64_t kMaxOverlapSteps = 10'000'000;

std::string name(std::size_t group, std::size_t region) {
    return text("region ", region, " of group ", group);
}

/// Each axis must step over all that lies inside it, so that no two elements share a byte.
void check_nested(const Region& region, std::uint64_t element_bytes, const std::string& subject) {
    std::array<std::size_t, kNumAxes> order{kLayer, kKv, kBlock, kHead, kToken, kDim};
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return region.axes[a].stride < region.axes[b].stride;
    });
    std::uint64_t inside = element_bytes;
    for (const std::size_t axis : order) {
        const Extent& extent = region.axes[axis];
        if (extent.count > 1 && extent.stride < inside) {
            layout_error(subject, ": the stride of its ", kAxisNames[axis], " axis is ",
                         extent.stride, " bytes, less than the ", inside,
                         " bytes inside it, so its elements would overlap or interleave");
        }
        inside = add(inside, mul(extent.count - 1, extent.stride));
    }
}

/// Searches for a byte that two boxes share: chooses the difference of their indices axis by axis,
/// widest stride first, and prunes branches whose remaining axes cannot close the distance.
class OverlapSearch {
  public:
    /// @param pair region of each group
    /// @param same_block whether equal block ids count as well
    /// @param steps budget of all searches together
    OverlapSearch(const Group& a_group, const Group& b_group,
                  const std::array<std::size_t, 2>& pair, bool same_block, std::uint64_t& steps)
        : a_bytes_(static_cast<std::int64_t>(a_group.element_bytes)),
          b_bytes_(static_cast<std::int64_t>(b_group.element_bytes)),
          same_block_(same_block),
          steps_(steps) {
        const Region& a = a_group.regions[pair[0]];
        const Region& b = b_group.regions[pair[1]];
        for (std::size_t axis = 0; axis < kNumAxes; ++axis) {
            const Extent& x = a.axes[axis];
            const Extent& y = b.axes[axis];
            if (x.stride == y.stride) {
                append(axis, x.stride, y.count - 1, x.count - 1);
            } else {
                append(kNumAxes, x.stride, 0, x.count - 1);
                append(kNumAxes, y.stride, y.count - 1, 0);
            }
        }
        std::sort(digits_.begin(), digits_.end(),
                  [](const Digit& p, const Digit& q) { return p.stride > q.stride; });
        reach_.resize(digits_.size() + 1);
        for (std::size_t i = digits_.size(); i-- > 0;) {
            reach_[i].low = reach_[i + 1].low + digits_[i].low * digits_[i].stride;
            reach_[i].high = reach_[i + 1].high + digits_[i].high * digits_[i].stride;
        }
        found_ = find(0, static_cast<std::int64_t>(a.base) - static_cast<std::int64_t>(b.base));
    }

    [[nodiscard]] bool found() const noexcept { return found_; }

  private:
    struct Digit {
        std::size_t axis;
        std::int64_t stride, low, high;
    };
    struct Reach {
        std::int64_t low = 0, high = 0;
    };

    void append(std::size_t axis, std::uint64_t stride, std::uint64_t below, std::uint64_t above) {
        if (below + above > 0) {
            digits_.push_back({axis, static_cast<std::int64_t>(stride),
                               -static_cast<std::int64_t>(below),
                               static_cast<std::int64_t>(above)});
        }
    }

    static std::int64_t floor_div(std::int64_t a, std::int64_t b) {
        return a / b - (a % b < 0 ? 1 : 0);
    }

    bool find(std::size_t level, std::int64_t distance) {
        if (level == digits_.size()) {
            return true;  // the ranges meet, and each choice kept the distance in bounds
        }
        // Strides of two different layouts may not nest; then the search could become long.
        if (steps_ == 0) {
            layout_error("regions interleave too irregularly to prove that they are disjoint");
        }
        --steps_;
        const Digit& digit = digits_[level];
        const Reach& rest = reach_[level + 1];
        // distance + m * stride + rest must land in (-a_bytes, b_bytes).
        const std::int64_t first =
            std::max(digit.low, -floor_div(distance + rest.high + a_bytes_ - 1, digit.stride));
        const std::int64_t last =
            std::min(digit.high, floor_div(b_bytes_ - 1 - distance - rest.low, digit.stride));
        for (std::int64_t m = first; m <= last; ++m) {
            if ((m != 0 || same_block_ || digit.axis != kBlock) &&
                find(level + 1, distance + m * digit.stride)) {
                return true;
            }
        }
        return false;
    }

    std::int64_t a_bytes_, b_bytes_;
    bool same_block_;
    std::uint64_t& steps_;
    bool found_ = false;
    std::vector<Digit> digits_;
    std::vector<Reach> reach_;
};

bool share_logical_element(const Region& a, const Region& b) {
    return std::all_of(kMatchedAxes.begin(), kMatchedAxes.end(), [&](Axis axis) {
        const Extent& x = a.axes[axis];
        const Extent& y = b.axes[axis];
        return x.start < y.start + y.count && y.start < x.start + x.count;
    });
}

void check_region(const Region& region, const Geometry& geometry, const Group& group,
                  const std::string& subject) {
    check_range("span", region.span, 0, geometry.spans.size() - 1);
    check_range("base", region.base);
    for (const Extent& extent : region.axes) {
        check_range("axis start", extent.start);
        check_range("axis count", extent.count, 1);
        check_range("axis stride", extent.stride);
        add(extent.start, extent.count);
    }
    const std::array<std::uint64_t, 2> counts{region.axes[kBlock].count, region.axes[kToken].count};
    if (counts != std::array<std::uint64_t, 2>{group.paging.num_blocks, group.paging.slots}) {
        layout_error(subject, " has ", counts[0], " blocks of ", counts[1], " tokens, its group ",
                     group.paging.num_blocks, " of ", group.paging.slots);
    }
    check_nested(region, group.element_bytes, subject);
    const Descriptor& span = geometry.spans[region.span];
    const std::uint64_t end = region_end(region, group.element_bytes);
    if (region.base < span.address || end > span.address + span.length) {
        layout_error(subject, " occupies [", region.base, ", ", end, "), outside its span [",
                     span.address, ", ", span.address + span.length, ")");
    }
}

void check_spans(const std::vector<Descriptor>& spans) {
    check_range("number of spans", spans.size(), 1);
    std::uint64_t previous_end = 0;
    for (const Descriptor& span : spans) {
        check_range("span address", span.address);
        check_range("span bytes", span.length, 1);
        check_range("span device", span.device);
        if (span.address < previous_end) {
            layout_error("spans are not ascending and disjoint: one at ", span.address,
                         " starts before ", previous_end);
        }
        previous_end = add(span.address, span.length);
    }
}

void check_paging(const Paging& paging) {
    check_range("number of blocks", paging.num_blocks, 1);
    check_range("tokens per block", paging.slots, 1);
    check_range("context rank", paging.rank);
    check_range("context ranks", paging.ranks, paging.rank + 1);
    check_range("context interleave", paging.interleave, 1);
    check_range("tokens per state", paging.tokens_per_slot, 1);
    if (paging.tokens_per_slot > 1 && paging.ranks > 1) {
        layout_error("a state of ", paging.tokens_per_slot, " tokens cannot be dealt to ",
                     paging.ranks, " context ranks");
    }
    if (paging.slots % paging.interleave != 0) {
        layout_error(paging.slots, " tokens per block do not divide into turns of ",
                     paging.interleave);
    }
    mul(mul(mul(paging.slots, paging.ranks), paging.tokens_per_slot), paging.num_blocks);
}

/// The pairs of regions, one of each group or both of one, whose address ranges meet.
std::vector<std::array<std::size_t, 2>> touching(const Group& a, const Group& b) {
    std::vector<std::array<std::size_t, 2>> pairs;
    for (std::size_t i = 0; i < a.regions.size(); ++i) {
        const std::uint64_t begin = a.regions[i].base;
        const std::uint64_t end = region_end(a.regions[i], a.element_bytes);
        for (std::size_t j = &a == &b ? i + 1 : 0; j < b.regions.size(); ++j) {
            if (b.regions[j].base < end && begin < region_end(b.regions[j], b.element_bytes)) {
                pairs.push_back({i, j});
            }
        }
    }
    return pairs;
}

void check_inside_group(const Group& group, std::size_t index, std::uint64_t& steps) {
    for (std::size_t i = 0; i < group.regions.size(); ++i) {
        for (std::size_t j = i + 1; j < group.regions.size(); ++j) {
            if (share_logical_element(group.regions[i], group.regions[j])) {
                layout_error(name(index, i), " and ", name(index, j),
                             " hold the same layer, head and element twice");
            }
        }
    }
    for (const auto& pair : touching(group, group)) {
        if (OverlapSearch(group, group, pair, true, steps).found()) {
            layout_error(name(index, pair[0]), " and ", name(index, pair[1]), " overlap in memory");
        }
    }
}

/// Groups may lie in the same pool of blocks, as long as different blocks stay apart.
/// @param may_repeat whether the two may be one group of a checked geometry
void join_pools(Geometry& geometry, std::size_t first, std::size_t second, bool may_repeat,
                std::uint64_t& steps) {
    const Group& a = geometry.groups[first];
    const Group& b = geometry.groups[second];
    for (const auto& pair : touching(a, b)) {
        if (OverlapSearch(a, b, pair, false, steps).found()) {
            layout_error(name(first, pair[0]), " and ", name(second, pair[1]),
                         " overlap in memory at different block numbers");
        }
        if (OverlapSearch(a, b, pair, true, steps).found()) {
            if (a.shares_table(b) && !may_repeat) {
                layout_error(name(first, pair[0]), " and ", name(second, pair[1]),
                             " overlap in memory, and their groups share a block table");
            }
            const auto [kept, joined] =
                std::pair(std::min(a.pool, b.pool), std::max(a.pool, b.pool));
            for (Group& group : geometry.groups) {
                group.pool = group.pool == joined ? kept : group.pool;
            }
        }
    }
}

void number_pools(Geometry& geometry, bool may_repeat, std::uint64_t& steps) {
    for (std::size_t i = 0; i < geometry.groups.size(); ++i) {
        geometry.groups[i].pool = i;
        for (std::size_t j = 0; j < i; ++j) {
            join_pools(geometry, j, i, may_repeat, steps);
        }
    }
}

}  // namespace

std::uint64_t region_end(const Region& region, std::uint64_t element_bytes) {
    std::uint64_t end = add(region.base, element_bytes);
    for (const Extent& extent : region.axes) {
        end = add(end, mul(extent.count - 1, extent.stride));
    }
    return end;
}

Geometry checked(Geometry geometry) {
    check_spans(geometry.spans);
    check_range("number of groups", geometry.groups.size(), 1);
    std::size_t num_regions = 0;
    for (std::size_t i = 0; i < geometry.groups.size(); ++i) {
        const Group& group = geometry.groups[i];
        check_range("element bytes", group.element_bytes, 1);
        check_paging(group.paging);
        num_regions += group.regions.size();
        if (num_regions > kMaxRegions) {
            layout_error("a geometry holds at most ", kMaxRegions, " regions");
        }
        check_range("number of regions", group.regions.size(), 1);
        for (std::size_t j = 0; j < group.regions.size(); ++j) {
            check_region(group.regions[j], geometry, group, name(i, j));
        }
    }
    std::uint64_t steps = kMaxOverlapSteps;
    for (std::size_t i = 0; i < geometry.groups.size(); ++i) {
        check_inside_group(geometry.groups[i], i, steps);
    }
    number_pools(geometry, false, steps);
    return geometry;
}

Geometry select(const Geometry& geometry, std::span<const std::size_t> indices) {
    Geometry selected{geometry.spans, {}};
    for (const std::size_t index : indices) {
        selected.groups.push_back(geometry.groups.at(index));
    }
    std::uint64_t steps = kMaxOverlapSteps;
    number_pools(selected, true, steps);
    return selected;
}

}  // namespace pynixlkv::kv
