#include "kv/expansion.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "check.hpp"
#include "kv/radix.hpp"

using namespace pynixlkv::kv;
using pynixlkv::Descriptor;

namespace {

constexpr std::uint64_t kTwo = 2;  // bytes per element, mostly
using Counts = std::array<std::uint64_t, 6>;

/// A dense region; `order` lists its axes from the widest stride to the narrowest.
Region dense(const std::vector<Axis>& order, const Counts& counts, std::uint64_t base,
             std::uint64_t element_bytes = kTwo) {
    Region region{0, base, {}};
    std::uint64_t stride = element_bytes;
    for (std::size_t axis = 0; axis < kNumAxes; ++axis) {
        region.axes[axis].count = counts[axis];
    }
    for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
        region.axes[*axis].stride = counts[*axis] > 1 ? stride : 0;
        stride *= counts[*axis];
    }
    return region;
}

Group group_of(std::vector<Region> regions, std::uint64_t element_bytes = kTwo) {
    Group group{
        element_bytes, {regions[0].axes[kBlock].count, regions[0].axes[kToken].count}, true};
    group.regions = std::move(regions);
    return group;
}

Geometry over(std::uint64_t address, std::uint64_t bytes, Group group, std::uint64_t device = 0) {
    return {{{address, bytes, device}}, {std::move(group)}};
}

Plan plan_of(const Geometry& a, const Geometry& b, const Selection& selection = {}) {
    return {checked(a), checked(b), selection};
}

BlockTables tables_of(const Plan& plan, const std::vector<Table>& tables) {
    return {{std::shared_ptr<void>(), &plan}, tables};
}

std::uint64_t bytes_of(const Plan& plan, const std::vector<Table>& tables) {
    return Expansion(tables_of(plan, tables)).bytes();
}

void check_written_once(const Plan& plan, const std::vector<Table>& tables, Side side) {
    tables_of(plan, tables).check_written_once(side);
}

struct Rows {
    std::vector<Descriptor> local, remote;
};

Rows expand(const Plan& plan, const std::vector<Table>& tables) {
    Rows rows;
    Expansion(tables_of(plan, tables)).emit(rows.local, rows.remote);
    CHECK_EQ(rows.local.size(), rows.remote.size());
    for (std::size_t i = 0; i < rows.local.size(); ++i) {
        CHECK_EQ(rows.local[i].length, rows.remote[i].length);
        CHECK(rows.local[i].length > 0);
        CHECK(i == 0 || rows.local[i - 1].address <= rows.local[i].address);
    }
    return rows;
}

using Ids = std::vector<std::int64_t>;

/// 4 blocks of 8 tokens, 2 heads, 16 elements, K and V, heads outside tokens or inside.
const Counts kCounts{1, 2, 4, 2, 8, 16};
constexpr std::uint64_t kBytes = 2 * 4 * 2 * 8 * 16 * kTwo;
const std::vector<Axis> kKbhnd{kLayer, kKv, kBlock, kHead, kToken, kDim};
const std::vector<Axis> kKbnhd{kLayer, kKv, kBlock, kToken, kHead, kDim};
const std::vector<Axis> kBkhnd{kLayer, kBlock, kKv, kHead, kToken, kDim};

Geometry hnd(std::uint64_t address) {
    return over(address, kBytes, group_of({dense(kKbhnd, kCounts, address)}));
}

Geometry nhd(std::uint64_t address) {
    return over(address, kBytes, group_of({dense(kKbnhd, kCounts, address)}), 5);
}

}  // namespace

TEST_CASE("radix sort is stable, whatever the width of the keys") {
    std::mt19937_64 random(3);
    for (const unsigned bits : {1U, 11U, 13U, 40U, 60U}) {
        std::vector<std::pair<std::uint64_t, std::size_t>> items;
        for (std::size_t i = 0; i < 500; ++i) {
            items.emplace_back(random() >> (64 - bits), i);
        }
        auto expected = items;
        std::sort(expected.begin(), expected.end());
        radix_sort_by(items, [](const auto& item) { return item.first; });
        CHECK(items == expected);
    }
}

TEST_CASE("equal layouts are one run per block and K or V") {
    const Plan plan = plan_of(hnd(10'000), hnd(90'000));
    CHECK_EQ(plan.groups().size(), 1U);
    CHECK(plan.block_runs(0) == (std::vector<std::uint64_t>{512, 512}));
    const Ids local{3, 0};
    const Ids remote{1, 3};
    const std::vector<Table> tables{{local, remote}};
    const Rows rows = expand(plan, tables);
    const std::vector<Descriptor> expected_local{{10'000, 512, 0},
                                                 {10'000 + 3 * 512, 512, 0},
                                                 {10'000 + 4 * 512, 512, 0},
                                                 {10'000 + 7 * 512, 512, 0}};
    const std::vector<Descriptor> expected_remote{{90'000 + 3 * 512, 512, 0},
                                                  {90'000 + 1 * 512, 512, 0},
                                                  {90'000 + 7 * 512, 512, 0},
                                                  {90'000 + 5 * 512, 512, 0}};
    CHECK(rows.local == expected_local);
    CHECK(rows.remote == expected_remote);
    CHECK_EQ(bytes_of(plan, tables), 2048U);
}

TEST_CASE("blocks that follow each other on both sides are one run, in any order of the tables") {
    Counts counts = kCounts;
    counts[kBlock] = 20'000;
    const std::uint64_t bytes = kBytes / 4 * 20'000;
    const auto big = [&](std::uint64_t address) {
        return over(address, bytes, group_of({dense(kKbhnd, counts, address)}));
    };
    const Plan plan = plan_of(big(1 << 20), big(std::uint64_t{1} << 40));
    Ids local(15'000);
    std::iota(local.begin(), local.end(), 100);
    std::mt19937 random(1);
    for (int order = 0; order < 3; ++order) {
        Ids remote = local;
        std::transform(local.begin(), local.end(), remote.begin(), [](auto id) { return id + 7; });
        const std::vector<Table> tables{{local, remote}};
        CHECK_EQ(expand(plan, tables).local.size(), 2U);
        order == 0 ? std::reverse(local.begin(), local.end())
                   : std::shuffle(local.begin(), local.end(), random);
    }
}

TEST_CASE("other order of heads and tokens: one run per head and token") {
    const Plan plan = plan_of(hnd(10'000), nhd(90'000));
    CHECK_EQ(plan.block_runs(0).size(), 2U * 2 * 8);
    const Ids local{2, 1};
    const Ids remote{0, 3};
    const Rows rows = expand(plan, {{local, remote, 13}});
    std::size_t i = 0;
    for (std::uint64_t kv = 0; kv < 2; ++kv) {
        for (const auto [here, there, tokens] : {std::array{1U, 3U, 5U}, std::array{2U, 0U, 8U}}) {
            for (std::uint64_t head = 0; head < 2; ++head) {
                for (std::uint64_t token = 0; token < tokens; ++token, ++i) {
                    const std::uint64_t a = ((kv * 4 + here) * 2 + head) * 8 + token;
                    const std::uint64_t b = ((kv * 4 + there) * 8 + token) * 2 + head;
                    CHECK(rows.local.at(i) == (Descriptor{10'000 + a * 32, 32, 0}));
                    CHECK(rows.remote.at(i) == (Descriptor{90'000 + b * 32, 32, 5}));
                }
            }
        }
    }
    CHECK_EQ(rows.local.size(), i);
}

TEST_CASE("long runs are cut after merging") {
    Selection selection;
    selection.max_bytes = 700;
    const Plan plan = plan_of(hnd(10'000), hnd(90'000), selection);
    const Ids ids{0, 1};
    const Rows rows = expand(plan, {{ids, ids}});
    std::vector<std::uint64_t> lengths;
    for (const Descriptor& row : rows.local) {
        lengths.push_back(row.length);
    }
    CHECK(lengths == (std::vector<std::uint64_t>{700, 324, 700, 324}));
    CHECK_EQ(rows.remote[1].address, 90'700U);
}

TEST_CASE("blocks of unlike size meet by position") {
    Counts quarter = kCounts;
    quarter[kBlock] = 16;
    quarter[kToken] = 2;
    const Geometry remote = over(90'000, kBytes, group_of({dense(kBkhnd, quarter, 90'000)}));
    const Plan plan = plan_of(hnd(10'000), remote);
    // Local blocks 2 and 0 hold positions 8 to 23, remote blocks from 12 on.
    const Ids local{2, 0};
    const Ids there{9, 8, 15, 1, 4, 2};
    const std::vector<Table> tables{{local, there, 23, 8, 12}};
    const Overlap overlap = plan.overlap(0, tables[0]);
    CHECK_EQ(overlap.begin, 12U);
    CHECK_EQ(overlap.end, 23U);
    CHECK_EQ(overlap.first[0], 0U);
    CHECK_EQ(overlap.last[0], 2U);
    CHECK_EQ(overlap.first[1], 0U);
    CHECK_EQ(overlap.last[1], 6U);
    CHECK_EQ(bytes_of(plan, tables), 11U * 2 * 2 * 32);
    const Rows rows = expand(plan, tables);
    // Ascending: K of local block 0 (positions 16 on), whose first pair comes from remote 15.
    CHECK_EQ(rows.local[0].address, 10'000U);
    CHECK_EQ(rows.local[0].length, 64U);
    CHECK_EQ(rows.remote[0].address, 90'000U + 15 * 256);
    // The remote table may end inside the last local block, and the local one then is not full.
    const Ids half{4, 5};
    const Ids last{1};
    CHECK_EQ(bytes_of(plan, {{last, half}}), 4U * 2 * 2 * 32);
    // 2 halves of K/V times 2 heads times 6 pieces: 4 in local block 0, 2 in local block 2.
    CHECK_EQ(rows.local.size(), 2U * 2 * 6);
}

TEST_CASE("context-parallel sides exchange the tokens they share") {
    // Remote rank 1 of 2 in turns of 2: of each 8 positions in a block of 4 it has 2, 3, 6, 7.
    Counts counts = kCounts;
    counts[kToken] = 4;
    Group turns = group_of({dense(kBkhnd, counts, 90'000)});
    turns.paging.rank = 1;
    turns.paging.ranks = 2;
    turns.paging.interleave = 2;
    const Geometry remote = over(90'000, kBytes, turns);
    const Plan plan = plan_of(hnd(10'000), remote);
    const Ids local{1};
    const Ids there{3};
    const Rows rows = expand(plan, {{local, there}});
    CHECK_EQ(rows.local.size(), 2U * 2 * 2);
    CHECK_EQ(rows.local[0].address, 10'000U + 512 + 2 * 32);
    CHECK_EQ(rows.local[0].length, 64U);
    CHECK_EQ(rows.remote[0].address, 90'000U + 3 * 512);
    CHECK_EQ(rows.local[1].address, 10'000U + 512 + 6 * 32);
    CHECK_EQ(rows.remote[1].address, 90'000U + 3 * 512 + 64);
    const Rows back = expand(plan_of(remote, hnd(10'000)), {{there, local}});
    CHECK_EQ(back.local.size(), 2U * 2 * 2);
    CHECK_EQ(back.remote[1].address, 10'000U + 512 + 6 * 32);
    // Both sides alike: whole blocks again.
    const Plan alike = plan_of(remote, remote);
    CHECK_EQ(expand(alike, {{local, there}}).local.size(), 1U);
    CHECK_EQ(bytes_of(alike, {{local, there}}), 512U);
    // A turn of 2 that begins before a turn of 1 in the same cycle of 4, and reaches into it.
    Group short_turns = turns;
    short_turns.paging.ranks = 4;
    short_turns.paging.interleave = 1;
    Group early = turns;
    early.paging.rank = 0;
    const Plan meeting = plan_of(over(90'000, kBytes, short_turns), over(90'000, kBytes, early));
    CHECK_EQ(meeting.groups().size(), 1U);
    // The other rank has none of these tokens.
    turns.paging.rank = 0;
    CHECK_ERROR("PlanError: group 0: context rank 1 of 2 here and rank 0 of 2 there have no tokens",
                plan_of(remote, over(90'000, kBytes, turns)));
    CHECK_ERROR("context rank 0 of 2 here and rank 1 of 2",
                plan_of(over(90'000, kBytes, turns), remote));
}

TEST_CASE("a packed tensor here and a tensor per layer there, and both packed") {
    const Counts packed{3, 2, 4, 2, 8, 16};
    const std::vector<Axis> blocks_first{kBlock, kLayer, kKv, kHead, kToken, kDim};
    const Geometry here = over(10'000, 3 * kBytes, group_of({dense(blocks_first, packed, 10'000)}));
    std::vector<Region> layers;
    for (std::uint64_t i = 0; i < 3; ++i) {
        layers.push_back(dense(kBkhnd, kCounts, 90'000 + i * kBytes));
        layers.back().axes[kLayer].start = i;
    }
    const Geometry there = over(90'000, 3 * kBytes, group_of(layers));
    const Ids ids{1, 2};
    const Rows apart = expand(plan_of(here, there), {{ids, ids}});
    CHECK_EQ(apart.local.size(), 6U);  // one per block and layer
    CHECK_EQ(expand(plan_of(there, here), {{ids, ids}}).local.size(), 6U);
    CHECK_EQ(expand(plan_of(here, here), {{ids, ids}}).local.size(), 1U);
    // The same memory as views, one per layer: still one run.
    std::vector<Region> views;
    for (std::uint64_t i = 0; i < 3; ++i) {
        views.push_back(dense(blocks_first, packed, 10'000 + i * kBytes / 4));
        views.back().axes[kLayer] = {i, 1, 0};
    }
    const Geometry viewed = over(10'000, 3 * kBytes, group_of(views));
    CHECK_EQ(plan_of(viewed, viewed).block_runs(0).size(), 1U);
    CHECK_EQ(expand(plan_of(viewed, here), {{ids, ids}}).local.size(), 1U);
    // Layers 0 and 2 only.
    Selection selection;
    selection.layers = {{{0, 1}, {2, 9}}};
    CHECK_EQ(expand(plan_of(here, there, selection), {{ids, ids}}).local.size(), 4U);
}

TEST_CASE("groups that interleave in memory still come out ascending") {
    // Two groups in one storage: in each block of 2048 bytes 1024 of the one, then of the other.
    Geometry g{{{10'000, 1 << 16, 0}}, {}};
    for (std::uint64_t i = 0; i < 2; ++i) {
        Region region = dense(kBkhnd, kCounts, 10'000 + i * 1024);
        region.axes[kBlock].stride = 2048;
        g.groups.push_back(group_of({region}));
    }
    const Plan plan = plan_of(g, g);
    const Ids even{0, 2};
    const Ids odd{3, 1};
    Rows rows = expand(plan, {{even, even}, {odd, odd}});
    std::vector<std::uint64_t> addresses;
    for (const Descriptor& row : rows.local) {
        addresses.push_back(row.address);
    }
    CHECK(addresses == (std::vector<std::uint64_t>{10'000, 10'000 + 3072, 10'000 + 7168}));
    CHECK_EQ(rows.local[1].length, 2048U);
    const Ids same{0, 1, 2, 3};
    CHECK_EQ(expand(plan, {{same, same}, {same, same}}).local.size(), 1U);
    CHECK(plan.block_runs(1) == (std::vector<std::uint64_t>{1024}));
    const std::vector<Descriptor> prepared = plan.prepared_rows(Side::kLocal);
    CHECK_EQ(prepared.size(), 8U);
    CHECK_EQ(prepared[4].address, 11'024U);
    check_written_once(plan, {{same, same}, {same, same}}, Side::kLocal);
}

TEST_CASE("tokens outside the blocks are sorted into order") {
    const std::vector<Axis> tokens_first{kLayer, kToken, kKv, kBlock, kHead, kDim};
    const Geometry g = over(10'000, kBytes, group_of({dense(tokens_first, kCounts, 10'000)}));
    const Ids ids{3, 1};
    CHECK_EQ(expand(plan_of(g, g), {{ids, ids}}).local.size(), 2U * 2 * 8);
}

TEST_CASE("runs do not cross from one span into the next") {
    const auto two_spans = [](std::uint64_t address) {
        Region first = dense(kBkhnd, kCounts, address);
        Region second = dense(kBkhnd, kCounts, address + kBytes);
        second.span = 1;
        second.axes[kLayer].start = 1;
        return Geometry{{{address, kBytes, 0}, {address + kBytes, kBytes, 0}},
                        {group_of({first, second})}};
    };
    const Plan plan = plan_of(two_spans(10'000), two_spans(90'000));
    const Ids ids{0, 1, 2, 3};
    CHECK_EQ(expand(plan, {{ids, ids}}).local.size(), 2U);
    const Geometry joined{{{90'000, 2 * kBytes, 0}}, {two_spans(90'000).groups[0]}};
    Geometry one = joined;
    one.groups[0].regions[1].span = 0;
    CHECK_EQ(expand(plan_of(one, one), {{ids, ids}}).local.size(), 1U);
    CHECK_EQ(expand(plan_of(one, two_spans(10'000)), {{ids, ids}}).local.size(), 2U);
    const std::vector<Descriptor> extents = plan.extents(Side::kRemote);
    CHECK_EQ(extents.size(), 2U);
    CHECK(extents[1] == (Descriptor{90'000 + kBytes, kBytes, 0}));
    Selection second;
    second.layers = {{{1, 2}}};
    const Plan part = plan_of(two_spans(10'000), two_spans(90'000), second);
    CHECK_EQ(part.extents(Side::kLocal).size(), 1U);
    CHECK_EQ(part.extents(Side::kLocal)[0].address, 10'000 + kBytes);
    CHECK_EQ(expand(part, {{ids, ids}}).remote[0].address, 90'000 + kBytes);
}

TEST_CASE("runs that adjoin in one block pair only are not one run") {
    // Here a block holds layer 0 and then layer 1; there too, in block 0, but other blocks of
    // layer 1 are elsewhere, or each layer has a span of its own.
    const Counts counts{1, 2, 2, 2, 8, 16};
    const auto layered = [&](std::uint64_t second, std::uint64_t stride, std::uint64_t span) {
        Geometry g{{{90'000, 1 << 20, 0}}, {}};
        std::vector<Region> regions{dense(kBkhnd, counts, 90'000), dense(kBkhnd, counts, second)};
        regions[0].axes[kBlock].stride = 4096;
        regions[1].axes[kBlock].stride = stride;
        regions[1].axes[kLayer].start = 1;
        regions[1].span = span;
        g.groups.push_back(group_of(regions));
        return g;
    };
    const Geometry here = layered(91'024, 4096, 0);
    const Ids zero{0};
    const Ids one{1};
    CHECK_EQ(plan_of(here, here).block_runs(0).size(), 1U);
    const Plan wider = plan_of(here, layered(91'024, 8192, 0));
    CHECK_EQ(wider.block_runs(0).size(), 2U);
    CHECK_EQ(expand(wider, {{zero, zero}}).local.size(), 1U);
    CHECK_EQ(expand(plan_of(layered(91'024, 8192, 0), here), {{zero, zero}}).local.size(), 1U);
    CHECK_EQ(expand(wider, {{zero, one}}).local.size(), 2U);
    CHECK_EQ(wider.prepared_rows(Side::kRemote)[3].address, 91'024U + 8192);
    const Geometry apart{{{90'000, 1024, 0}, {91'024, 1024, 0}}, layered(91'024, 8192, 1).groups};
    Geometry single = apart;
    for (Region& region : single.groups[0].regions) {
        region.axes[kBlock] = {0, 1, 0};
    }
    single.groups[0].paging.num_blocks = 1;
    const Plan spans = plan_of(here, single);
    CHECK_EQ(expand(spans, {{zero, zero}}).local.size(), 2U);
}

TEST_CASE("tables are checked: ranges, starts, ends, numbers") {
    const Plan plan = plan_of(hnd(10'000), hnd(90'000));
    const auto check = [&](const Ids& local, const Ids& remote, std::int64_t tokens = -1,
                           std::int64_t local_start = 0, std::int64_t remote_start = 0) {
        const std::vector<Table> tables{{local, remote, tokens, local_start, remote_start}};
        check_written_once(plan, tables, Side::kLocal);
        expand(plan, tables);
    };
    check({}, {});
    check({1}, {2}, 0);
    check({1}, {2}, 8, 8, 8);  // begins where it ends
    CHECK_ERROR("PlanError: group 0: local block 4 at index 1 must be from 0 to 3",
                check({0, 4}, {0, 1}));
    CHECK_ERROR("remote block -1 at index 0 must be from 0 to 3", check({0}, {-1}));
    CHECK_ERROR("local_start is 4, must be a multiple of the 8 tokens", check({0}, {1}, -1, 4, 0));
    CHECK_ERROR("remote_start is -8", check({0}, {1}, -1, 0, -8));
    CHECK_ERROR("the tables cover different tokens: local [0, 16), remote [0, 8)",
                check({0, 1}, {1}));
    CHECK_ERROR("the tables cover different tokens: local [0, 8), remote [8, 24)",
                check({0}, {1, 2}, -1, 0, 8));
    CHECK_ERROR("num_tokens is 9, but the local table ends at 8", check({0}, {1, 2}, 9));
    CHECK_ERROR("num_tokens is 9, but the remote table ends at 8", check({0, 2}, {1}, 9));
    CHECK_ERROR("the plan has 1 groups, got tables for 0",
                check_written_once(plan, {}, Side::kLocal));
    CHECK_ERROR("the plan has 1 groups, got tables for 0", bytes_of(plan, {}));
    CHECK_ERROR("overflows", check({0}, {0}, -1, std::int64_t{1} << 60, 0));
}

TEST_CASE("no block is written twice, within a table or across groups of a pool") {
    const Plan plan = plan_of(hnd(10'000), hnd(90'000));
    const Ids twice{2, 1, 2};
    const Ids once{0, 1, 3};
    const std::vector<Table> local_twice{{twice, once}};
    CHECK_ERROR(
        "PlanError: group 0: local block 2 at index 2 would be written twice; it is also "
        "at index 0 of group 0",
        check_written_once(plan, local_twice, Side::kLocal));
    check_written_once(plan, local_twice, Side::kRemote);
    CHECK_EQ(expand(plan, local_twice).local.size(), 6U);
    CHECK_ERROR("remote block 2 at index 2 would be written twice",
                check_written_once(plan, {{once, twice}}, Side::kRemote));

    Geometry shared = hnd(10'000);
    shared.groups.push_back(shared.groups[0]);
    Geometry apart{{{90'000, 2 * kBytes, 0}}, shared.groups};
    apart.groups[0].regions[0].base = 90'000;
    apart.groups[1].regions[0].base = 90'000 + kBytes;
    const Plan pool = plan_of(shared, apart);
    const Ids other{2};
    const Ids any{1};
    const std::vector<Table> clash{{once, once}, {any, other}};
    CHECK_ERROR(
        "group 1: local block 1 at index 0 would be written twice; it is also at index 1 "
        "of group 0",
        check_written_once(pool, clash, Side::kLocal));
    check_written_once(pool, clash, Side::kRemote);
    check_written_once(pool, {{once, once}, {other, any}}, Side::kLocal);
}

TEST_CASE("what is missing on the remote side is named") {
    Geometry half = hnd(90'000);
    half.groups[0].regions[0].axes[kHead].count = 1;
    CHECK_ERROR("PlanError: group 0: the remote side does not hold layer 0, kv 0, head 1, dim 0",
                plan_of(hnd(10'000), half));
    Selection selection;
    selection.heads = {{0, 1}};
    CHECK_EQ(plan_of(hnd(10'000), half, selection).block_runs(0).size(), 2U);
    Geometry values = hnd(90'000);
    values.groups[0].regions[0].axes[kKv] = {1, 1, 0};
    CHECK_ERROR("does not hold layer 0, kv 0", plan_of(hnd(10'000), values));
    Geometry narrow = hnd(90'000);
    narrow.groups[0].regions[0].axes[kDim].count = 15;
    CHECK_ERROR("layer 0, kv 0, head 0, dim 15", plan_of(hnd(10'000), narrow));
    Geometry other = hnd(90'000);
    other.groups[0].regions[0].axes[kLayer].start = 4;
    CHECK_ERROR("does not hold layer 0, kv 0, head 0, dim 0", plan_of(hnd(10'000), other));
    selection.layers = {{{7, 8}}};
    CHECK_ERROR("PlanError: nothing to move", plan_of(hnd(10'000), hnd(90'000), selection));
}

TEST_CASE("a cache without heads ignores the selection of heads") {
    Geometry a = hnd(10'000);
    a.groups[0].has_heads = 0;
    Selection selection;
    selection.heads = {{5, 6}};
    CHECK_EQ(plan_of(a, a, selection).block_runs(0).size(), 2U);
}

TEST_CASE("sides that cannot be matched") {
    Geometry two = hnd(90'000);
    two.spans[0].length = 2 * kBytes;
    two.groups.push_back(two.groups[0]);
    two.groups[1].regions[0].base += kBytes;
    CHECK_ERROR("PlanError: local has 1 groups, remote 2", plan_of(hnd(10'000), two));
    const auto differs = [](const std::function<void(Group&)>& change) {
        Geometry changed = hnd(90'000);
        change(changed.groups[0]);
        return plan_of(hnd(10'000), changed);
    };
    const std::string message = "group 0 differs in element size, head axis, opaque axes";
    CHECK_ERROR(message, differs([](Group& g) { g.element_bytes = 1; }));
    CHECK_ERROR(message, differs([](Group& g) { g.has_heads = 0; }));
    CHECK_ERROR(message, differs([](Group& g) { g.opaque_axes = 1 << kDim; }));
}

TEST_CASE("opaque axes move whole, with the same inside, or not at all") {
    const auto opaque = [](Geometry g, Axis axis) {
        g.groups[0].opaque_axes = std::uint64_t{1} << axis;
        return g;
    };
    // Heads may be split where tokens may not, if heads lie outside them.
    Geometry half = hnd(90'000);
    half.groups[0].regions[0].axes[kHead] = {1, 1, 0};
    half.groups[0].regions[0].base += 256;
    const Plan heads = plan_of(opaque(half, kToken), opaque(hnd(10'000), kToken));
    const Ids ids{0, 2};
    const Rows rows = expand(heads, {{ids, ids, 9}});
    CHECK_EQ(rows.local.size(), 4U);  // position 9 is in the second block, so both move whole
    CHECK_EQ(rows.local[0].length, 256U);
    CHECK_EQ(rows.local[1].length, 256U);
    CHECK_EQ(bytes_of(heads, {{ids, ids, 16}}), 4U * 256);
    // In the other order a head is spread over all tokens.
    Geometry inner = nhd(90'000);
    inner.groups[0].regions[0].axes[kHead] = {1, 1, 0};
    CHECK_ERROR(
        "group 0: the token axis is opaque, so its head axis must be the same on both "
        "sides and move whole; local is 1 from 1",
        plan_of(opaque(inner, kToken), opaque(nhd(10'000), kToken)));
    CHECK_ERROR(
        "its token axis must be the same on both sides and move whole; local is 8 from 0 "
        "by 32 bytes, remote 8 from 0 by 64",
        plan_of(opaque(hnd(10'000), kToken), opaque(nhd(90'000), kToken)));
    // Selecting part of what is opaque.
    Selection selection;
    selection.heads = {{0, 1}};
    CHECK_ERROR("the head axis is opaque, so its head axis",
                plan_of(opaque(hnd(10'000), kHead), opaque(hnd(90'000), kHead), selection));
    CHECK_EQ(plan_of(opaque(hnd(10'000), kHead), opaque(hnd(90'000), kHead)).block_runs(0).size(),
             2U);
    // Blocks of other sizes, pools of other sizes.
    Counts counts = kCounts;
    counts[kToken] = 4;
    const Geometry small = over(90'000, kBytes, group_of({dense(kKbhnd, counts, 90'000)}));
    CHECK_ERROR(
        "the token axis is opaque, so blocks must hold the same tokens on both sides; "
        "local has 8 per block, remote 4",
        plan_of(opaque(hnd(10'000), kToken), opaque(small, kToken)));
    counts = kCounts;
    counts[kBlock] = 3;
    const Geometry fewer = over(90'000, kBytes, group_of({dense(kKbhnd, counts, 90'000)}));
    CHECK_EQ(plan_of(opaque(hnd(10'000), kToken), opaque(fewer, kToken)).groups().size(), 1U);
}

TEST_CASE("a pool of one block") {
    Counts counts = kCounts;
    counts[kBlock] = 1;
    const Geometry g = over(10'000, kBytes, group_of({dense(kBkhnd, counts, 10'000)}));
    const Ids zero{0};
    const Rows rows = expand(plan_of(g, hnd(90'000)), {{zero, zero}});
    CHECK_EQ(rows.local.size(), 2U);
    CHECK_EQ(expand(plan_of(g, g), {{zero, zero}}).local.size(), 1U);
}

TEST_CASE("prepared rows and indices say the same as rows") {
    Selection cut;
    cut.max_bytes = 200;
    Geometry three = hnd(10'000);
    const Counts packed{3, 2, 6, 2, 8, 16};
    const std::vector<Axis> blocks_first{kBlock, kLayer, kKv, kHead, kToken, kDim};
    const Counts other{3, 2, 5, 2, 8, 16};
    const std::vector<Axis> layers_first{kLayer, kKv, kBlock, kHead, kToken, kDim};
    const Geometry here = over(10'000, 6 * 3072, group_of({dense(blocks_first, packed, 10'000)}));
    const Geometry there = over(90'000, 5 * 3072, group_of({dense(layers_first, other, 90'000)}));
    const std::vector<Axis> tokens_first{kLayer, kToken, kKv, kBlock, kHead, kDim};
    const Geometry odd = over(90'000, kBytes, group_of({dense(tokens_first, kCounts, 90'000)}));
    const auto check_plan = [](const Plan& plan) {
        const std::vector<Descriptor> local = plan.prepared_rows(Side::kLocal);
        const std::vector<Descriptor> remote = plan.prepared_rows(Side::kRemote);
        for (const auto* rows : {&local, &remote}) {
            CHECK(std::is_sorted(rows->begin(), rows->end(),
                                 [](const Descriptor& a, const Descriptor& b) {
                                     return a.address + a.length <= b.address;
                                 }) ||
                  rows->empty());
        }
        const Ids a{3, 0, 1};
        const Ids b{2, 1, 3};
        const std::vector<Table> tables{{a, b}};
        std::vector<std::int32_t> i{99};
        std::vector<std::int32_t> j;
        const Expansion whole(tables_of(plan, tables));
        whole.emit_indices(i, j);
        CHECK_EQ(i.size(), j.size());
        CHECK_EQ(whole.num_indices().value(), i.size());
        CHECK_EQ(plan.pool().sizes[0], local.size());
        CHECK_EQ(plan.pool().sizes[1], remote.size());
        const Expansion part(tables_of(plan, {{a, b, 19}}));
        CHECK(!part.num_indices().has_value());
        std::set<std::array<std::uint64_t, 2>> bytes;
        std::set<std::array<std::uint64_t, 2>> expected;
        const auto add_bytes = [](auto& set, const Descriptor& x, const Descriptor& y) {
            CHECK_EQ(x.length, y.length);
            for (std::uint64_t at = 0; at < x.length; ++at) {
                CHECK(set.insert({x.address + at, y.address + at}).second);
            }
        };
        for (std::size_t k = 0; k < i.size(); ++k) {
            add_bytes(bytes, local.at(static_cast<std::size_t>(i[k])),
                      remote.at(static_cast<std::size_t>(j[k])));
        }
        const Rows rows = expand(plan, tables);
        for (std::size_t k = 0; k < rows.local.size(); ++k) {
            add_bytes(expected, rows.local[k], rows.remote[k]);
        }
        CHECK(bytes == expected);
        CHECK_ERROR("cannot be told by indices", part.emit_indices(i, j));
    };
    check_plan(plan_of(here, there));
    check_plan(plan_of(there, here));
    check_plan(plan_of(here, there, cut));
    check_plan(plan_of(hnd(10'000), odd, cut));
    check_plan(plan_of(odd, hnd(10'000)));
}

TEST_CASE("plans that cannot be prepared") {
    Counts counts = kCounts;
    counts[kToken] = 4;
    const Geometry small = over(90'000, kBytes, group_of({dense(kKbhnd, counts, 90'000)}));
    const Plan unlike = plan_of(hnd(10'000), small);
    CHECK(!unlike.pool().can_prepare);
    CHECK_ERROR("PlanError: the plan cannot be prepared", unlike.prepared_rows(Side::kLocal));
    const Ids none;
    const Expansion nothing(tables_of(unlike, {{none, none}}));
    CHECK(!nothing.num_indices().has_value());
    Counts huge{1, 2, std::uint64_t{1} << 30, 1, 1, 1};
    const auto many = [&](std::uint64_t address) {
        return over(address, std::uint64_t{1} << 32, group_of({dense(kKbhnd, huge, address)}));
    };
    CHECK(!plan_of(many(0), many(std::uint64_t{1} << 33)).pool().can_prepare);
}

int main() {
    return check::run();
}
