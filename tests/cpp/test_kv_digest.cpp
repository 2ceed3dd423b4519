#include "kv/digest.hpp"

#include <numeric>
#include <utility>

#include "check.hpp"

using namespace pynixlkv::kv;

namespace {

/// Four blocks of two tokens, two heads of 9 elements of 4 bytes, in this order.
struct Memory {
    std::vector<std::uint32_t> words = std::vector<std::uint32_t>(4 * 2 * 2 * 9);
    Group group{4, {4, 2}, true};

    Memory() {
        std::iota(words.begin(), words.end(), 1);
        const auto base = reinterpret_cast<std::uint64_t>(words.data());
        group.regions = {
            {0, base, {{{3, 1, 0}, {0, 1, 0}, {0, 4, 144}, {0, 2, 36}, {0, 2, 72}, {0, 9, 4}}}}};
    }
};

const std::vector<std::int64_t> kUnits{0, 1};
const std::vector<std::int64_t> kLayers{3};
const std::vector<std::int64_t> kHeads{0, 1};

DigestScope scope() {
    return {0, 4, 2, kUnits, kLayers, kHeads, 1, {}};
}

std::vector<std::uint64_t> digests(const Memory& memory, const std::vector<std::int64_t>& ids,
                                   const DigestScope& wanted, std::size_t room = 4) {
    std::vector<std::uint64_t> out(room);
    add_digests(memory.group, ids, 0, wanted, out);
    return out;
}

}  // namespace

TEST_CASE("a change of any byte that is wanted changes the digest of its place alone") {
    Memory memory;
    const std::vector<std::int64_t> ids{2, 1};
    const auto clean = digests(memory, ids, scope());
    for (std::size_t word = 0; word < memory.words.size(); ++word) {
        const std::size_t block = word / 36;
        const std::size_t head = word % 18 / 9;
        for (int byte = 0; byte < 4; ++byte) {
            memory.words[word] ^= 0x80U << (8 * byte);
            const auto seen = digests(memory, ids, scope());
            for (std::size_t i = 0; i < 4; ++i) {
                const bool is_place = i / 2 == head && std::cmp_equal(ids[i % 2], block);
                CHECK_EQ(seen[i] != clean[i], is_place);
            }
            memory.words[word] ^= 0x80U << (8 * byte);
        }
    }
}

TEST_CASE("digests are added to the values in the buffer") {
    const Memory memory;
    const std::vector<std::int64_t> ids{2, 1};
    const auto once = digests(memory, ids, scope());
    auto twice = once;
    add_digests(memory.group, ids, 0, scope(), twice);
    CHECK_EQ(twice[3], 2 * once[3]);
}

TEST_CASE("what the memory does not hold is not read") {
    const Memory memory;
    CHECK_ERROR("PlanError: positions 0 to 4 are wanted, but the table covers 0 to 2",
                digests(memory, {2}, scope()));
    CHECK_ERROR("PlanError: block 4 at index 1 must be from 0 to 3",
                digests(memory, {2, 4}, scope()));
    CHECK_ERROR("PlanError: block -1 at index 0", digests(memory, {-1, 2}, scope()));
    CHECK_ERROR("number of digests is 3, must be from 4 to 4", digests(memory, {2, 1}, scope(), 3));
    DigestScope wrong = scope();
    wrong.turns = {{0, 0, 1}};
    CHECK_ERROR("context ranks is 0", digests(memory, {2, 1}, wrong));
    wrong.turns = {{0, 1, 0}};
    CHECK_ERROR("context interleave is 0", digests(memory, {2, 1}, wrong));
}

TEST_CASE("units, layers and heads that are not held have the digest 0") {
    const Memory memory;
    const std::vector<std::int64_t> units{1, 7}, layers{2}, heads{0, 9};
    const DigestScope wanted{0, 4, 2, units, kLayers, heads, 1, {}};
    const auto seen = digests(memory, {2, 1}, wanted);
    CHECK(seen[0] != 0);
    CHECK_EQ(seen[1] + seen[2] + seen[3], 0U);
    CHECK_EQ(digests(memory, {2, 1}, {0, 4, 2, kUnits, layers, kHeads, 1, {}})[0], 0U);
}

int main() {
    return check::run();
}
