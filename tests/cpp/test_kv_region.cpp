#include "kv/region.hpp"

#include <algorithm>
#include <random>
#include <set>

#include "check.hpp"
#include "kv/checks.hpp"

using namespace pynixlkv::kv;

namespace {

/// One layer at 1000: 4 blocks of 2 heads, 8 tokens, 16 elements of 2 bytes; 512 bytes a block.
Region layer(std::uint64_t number, std::uint64_t base) {
    return {
        0, base, {{{number, 1, 0}, {0, 1, 0}, {0, 4, 512}, {0, 2, 256}, {0, 8, 32}, {0, 16, 2}}}};
}

Geometry small() {
    Group group{2, {4, 8}, true};
    group.regions = {layer(0, 1000)};
    return {{{1000, 4096, 3}}, {group}};
}

/// Boxes of one axis each, to reason about overlaps: `count` blocks of one element.
Group strided(std::uint64_t base, std::uint64_t count, std::uint64_t stride, std::uint64_t bytes,
              std::uint64_t layer_number) {
    Group group{bytes, {count}};
    group.regions = {{0, base, {}}};
    group.regions[0].axes[kLayer].start = layer_number;
    group.regions[0].axes[kBlock] = {0, count, stride};
    return group;
}

Geometry two_groups(const Group& a, const Group& b) {
    return {{{1000, 1 << 20, 0}}, {a, b}};
}

Geometry one_group(Group a, const Group& b) {
    a.regions.push_back(b.regions[0]);
    return {{{1000, 1 << 20, 0}}, {a}};
}

}  // namespace

TEST_CASE("sums and products that leave 60 bits are errors that name both sides") {
    CHECK_EQ(add(kMaxNumber - 1, 1), kMaxNumber);
    CHECK_ERROR("LayoutError: address arithmetic overflows: 1152921504606846975 + 1",
                add(kMaxNumber, 1));
    CHECK_EQ(mul(kMaxNumber, 1), kMaxNumber);
    CHECK_EQ(mul(kMaxNumber, 0), 0U);
    CHECK_ERROR("1152921504606846975 * 2 is above", mul(kMaxNumber, 2));
}

TEST_CASE("a checked geometry is what it was") {
    const Geometry geometry = checked(small());
    CHECK_EQ(geometry.spans.size(), 1U);
    CHECK_EQ(geometry.spans[0].device, 3U);
    const Group& group = geometry.groups.at(0);
    CHECK_EQ(group.element_bytes, 2U);
    CHECK_EQ(group.paging.num_blocks, 4U);
    CHECK_EQ(group.paging.unit(), 8U);
    CHECK(group.has_heads);
    CHECK_EQ(group.pool, 0U);
    CHECK_EQ(group.regions.at(0).axes[kToken].stride, 32U);
    CHECK_EQ(region_end(group.regions[0], 2), 1000U + 2048U);
}

TEST_CASE("fields out of range are named with their value and range") {
    Geometry g = small();
    g.spans.clear();
    CHECK_ERROR("LayoutError: geometry: number of spans is 0, must be from 1 to", checked(g));
    g = small();
    g.groups.clear();
    CHECK_ERROR("number of groups is 0", checked(g));
    g = small();
    g.groups[0].regions.clear();
    CHECK_ERROR("number of regions is 0", checked(g));
    g = small();
    g.groups[0].paging.ranks = 0;
    CHECK_ERROR("context ranks is 0, must be from 1", checked(g));
    g = small();
    g.groups[0].paging.interleave = 3;
    CHECK_ERROR("8 tokens per block do not divide into turns of 3", checked(g));
    g = small();
    g.groups[0].paging.num_blocks = std::uint64_t{1} << 58;
    CHECK_ERROR("8 * 288230376151711744 is above", checked(g));
    g = small();
    g.groups[0].regions[0].span = 1;
    CHECK_ERROR("span is 1, must be from 0 to 0", checked(g));
    g = small();
    g.groups[0].regions[0].axes[kDim].count = 0;
    CHECK_ERROR("axis count is 0", checked(g));
    g = small();
    g.groups[0].regions[0].axes[kLayer].start = kMaxNumber;
    CHECK_ERROR("overflows", checked(g));
    g = small();
    g.groups[0].regions[0].axes[kLayer].start = kMaxNumber + 1;
    CHECK_ERROR("axis start is 1152921504606846976", checked(g));
}

TEST_CASE("a region must agree with its group and stay in its span") {
    Geometry g = small();
    g.groups[0].paging.num_blocks = 5;
    CHECK_ERROR("region 0 of group 0 has 4 blocks of 8 tokens, its group 5 of 8", checked(g));
    g = small();
    g.groups[0].paging.slots = 4;
    CHECK_ERROR("has 4 blocks of 8 tokens, its group 4 of 4", checked(g));
    g = small();
    g.spans[0] = {1000, 2047, 0};
    CHECK_ERROR("occupies [1000, 3048), outside its span [1000, 3047)", checked(g));
    g.spans[0] = {1001, 4096, 0};
    CHECK_ERROR("outside its span [1001, 5097)", checked(g));
}

TEST_CASE("spans ascend and do not overlap") {
    Geometry g = small();
    g.spans.push_back({5095, 10, 0});
    CHECK_ERROR("one at 5095 starts before 5096", checked(g));
    g.spans[1].address = 5096;
    CHECK_EQ(checked(g).spans.size(), 2U);
}

TEST_CASE("strides that let elements overlap or interleave are refused") {
    Geometry g = small();
    g.groups[0].regions[0].axes[kToken].stride = 30;
    CHECK_ERROR("the stride of its token axis is 30 bytes, less than the 32 bytes inside it",
                checked(g));
    g = small();
    g.groups[0].regions[0].axes[kHead].stride = 0;
    CHECK_ERROR("the stride of its head axis is 0 bytes, less than the 2", checked(g));
}

TEST_CASE("no element twice, no byte twice in a group") {
    Geometry g = small();
    g.groups[0].regions.push_back(layer(0, 3048));
    CHECK_ERROR("region 0 of group 0 and region 1 of group 0 hold the same layer", checked(g));
    g.groups[0].regions[1] = layer(1, 3048);
    CHECK_EQ(checked(g).groups[0].regions.size(), 2U);
    g.groups[0].regions[0] = layer(2, 1000);
    CHECK_EQ(checked(g).groups[0].regions.size(), 2U);
    g.groups[0].regions[1] = layer(1, 3046);
    CHECK_ERROR("region 0 of group 0 and region 1 of group 0 overlap in memory", checked(g));
}

TEST_CASE("at most 4096 regions") {
    Geometry g{{{0, 1 << 20, 0}}, {Group{}}};
    for (std::uint64_t i = 0; i <= kMaxRegions; ++i) {
        g.groups[0].regions.push_back({0, i, {}});
        g.groups[0].regions.back().axes[kLayer].start = i;
    }
    CHECK_ERROR("a geometry holds at most 4096 regions", checked(g));
    g.groups[0].regions.pop_back();
    CHECK_EQ(checked(g).groups[0].regions.size(), kMaxRegions);
}

TEST_CASE("interleaved boxes are apart, or not, to the byte") {
    // Blocks of 10 bytes every 20; the other starts in the gap, or a byte too early or late.
    const Group a = strided(1000, 8, 20, 10, 0);
    CHECK_EQ(checked(one_group(a, strided(1010, 8, 20, 10, 1))).groups[0].regions.size(), 2U);
    CHECK_ERROR("overlap in memory", checked(one_group(a, strided(1009, 8, 20, 10, 1))));
    CHECK_ERROR("overlap in memory", checked(one_group(a, strided(1011, 8, 20, 10, 1))));
    CHECK_EQ(checked(one_group(a, strided(1150, 8, 20, 10, 1))).groups[0].regions.size(), 2U);
    // Behind the other in memory as well as in front of it.
    CHECK_EQ(checked(one_group(strided(1110, 8, 20, 10, 0), strided(1000, 8, 20, 10, 1)))
                 .groups[0]
                 .regions.size(),
             2U);
    CHECK_ERROR("overlap in memory",
                checked(one_group(strided(1111, 8, 20, 10, 0), strided(1000, 8, 20, 10, 1))));
}

namespace {

std::set<std::uint64_t> bytes_of(const Region& region, std::uint64_t element_bytes) {
    std::vector<std::uint64_t> starts{region.base};
    for (const Extent& axis : region.axes) {
        const std::vector<std::uint64_t> outer = starts;
        for (std::uint64_t i = 1; i < axis.count; ++i) {
            for (const std::uint64_t start : outer) {
                starts.push_back(start + i * axis.stride);
            }
        }
    }
    std::set<std::uint64_t> bytes;
    for (const std::uint64_t start : starts) {
        for (std::uint64_t i = 0; i < element_bytes; ++i) {
            bytes.insert(start + i);
        }
    }
    return bytes;
}

}  // namespace

TEST_CASE("whether two boxes overlap agrees with counting their bytes") {
    std::mt19937 random(7);
    const auto pick = [&](std::uint64_t low, std::uint64_t high) {
        return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
    };
    int apart = 0;
    int overlapping = 0;
    for (int round = 0; round < 3000; ++round) {
        Group group{pick(1, 3), {pick(1, 3)}};
        for (std::uint64_t number = 0; number < 2; ++number) {
            Region region{0, pick(1000, 1040), {}};
            region.axes[kLayer].start = number;
            region.axes[kBlock].count = group.paging.num_blocks;
            region.axes[kHead].count = pick(1, 3);
            region.axes[kDim].count = pick(1, 3);
            std::array<std::size_t, 3> order{kBlock, kHead, kDim};
            std::shuffle(order.begin(), order.end(), random);
            std::uint64_t inside = group.element_bytes;
            for (const std::size_t axis : order) {
                region.axes[axis].stride = inside + pick(0, 8);
                inside += (region.axes[axis].count - 1) * region.axes[axis].stride;
            }
            group.regions.push_back(region);
        }
        const auto a = bytes_of(group.regions[0], group.element_bytes);
        const auto b = bytes_of(group.regions[1], group.element_bytes);
        const bool meet =
            std::any_of(a.begin(), a.end(), [&](std::uint64_t byte) { return b.contains(byte); });
        const Geometry g{{{1000, 1 << 20, 0}}, {group}};
        const std::string seen = check::error_of([&] { (void)checked(g); });
        CHECK_EQ(check::contains(seen, "overlap in memory"), meet);
        CHECK_EQ(seen == "no error", !meet);
        ++(meet ? overlapping : apart);
    }
    CHECK(apart > 300);
    CHECK(overlapping > 300);
}

TEST_CASE("an overlap that takes too long to decide is refused") {
    // Two boxes with five pairs of strides that do not nest, and no common byte: even against odd.
    Group group{1, {30, 30}};
    for (std::uint64_t i = 0; i < 2; ++i) {
        Region r{0, 1000 + i, {}};
        r.axes[kLayer] = {i, 1, 0};
        std::uint64_t stride = 2;
        for (const std::size_t axis : {kDim, kToken, kBlock, kHead, kKv}) {
            r.axes[axis] = {0, 30, stride + (i == 0 ? 0 : 2)};
            stride = 2 + 29 * r.axes[axis].stride + stride;
        }
        group.regions.push_back(r);
    }
    const Geometry g{{{0, std::uint64_t{1} << 50, 0}}, {group}};
    CHECK_ERROR("interleave too irregularly", checked(g));
}

TEST_CASE("groups may share a pool, block by block") {
    const Group a = strided(1000, 8, 64, 32, 0);
    const Geometry same = checked(two_groups(a, strided(1000, 8, 64, 32, 0)));
    CHECK_EQ(same.groups[0].pool, 0U);
    CHECK_EQ(same.groups[1].pool, 0U);
    const Geometry part = checked(two_groups(a, strided(1016, 8, 64, 32, 0)));
    CHECK_EQ(part.groups[1].pool, 0U);
    const Geometry apart = checked(two_groups(a, strided(1032, 8, 64, 32, 0)));
    CHECK_EQ(apart.groups[1].pool, 1U);
    const Geometry far = checked(two_groups(a, strided(9000, 8, 64, 32, 0)));
    CHECK_EQ(far.groups[1].pool, 1U);
    CHECK_ERROR("region 0 of group 0 and region 0 of group 1 overlap in memory at different block",
                checked(two_groups(a, strided(1064, 8, 64, 32, 0))));
    CHECK_ERROR("at different block", checked(two_groups(a, strided(1000, 4, 128, 32, 0))));
}

TEST_CASE("pools join through a third group") {
    // The first and the second lie apart in each block, the third over both.
    Geometry g = two_groups(strided(1000, 8, 64, 16, 0), strided(1032, 8, 64, 16, 0));
    g.groups.push_back(strided(1008, 8, 64, 32, 0));
    const Geometry geometry = checked(g);
    CHECK_EQ(geometry.groups[0].pool, 0U);
    CHECK_EQ(geometry.groups[1].pool, 0U);
    CHECK_EQ(geometry.groups[2].pool, 0U);
    // Without the third they are apart.
    const std::array<std::size_t, 2> both{1, 0};
    const Geometry apart = select(geometry, both);
    CHECK_EQ(apart.groups.at(0).regions.at(0).base, 1032U);
    CHECK_EQ(apart.groups[0].pool, 0U);
    CHECK_EQ(apart.groups.at(1).pool, 1U);
}

int main() {
    return check::run();
}
