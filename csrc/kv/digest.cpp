#include "kv/digest.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#include "kv/checks.hpp"

namespace pynixlkv::kv {

namespace {

// Odd numbers from the fractions of square roots. They are part of the wire format.
constexpr std::uint64_t kRoot2 = 0x6a09e667f3bcc909;
constexpr std::uint64_t kRoot3 = 0xbb67ae8584caa73b;
constexpr std::uint64_t kRoot7 = 0xa54ff53a5f1d36f1;
constexpr std::uint64_t kRoot11 = 0x510e527fade682d1;

constexpr std::uint64_t kPageBytes = 4096;

/// A bijection in which every bit of the input reaches every bit of the output.
std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 32)) * kRoot2;
    x = (x ^ (x >> 29)) * kRoot3;
    return x ^ (x >> 32);
}

/// A bijection of either argument.
std::uint64_t absorb(std::uint64_t state, std::uint64_t word) {
    return std::rotl(state + word * kRoot7, 31) * kRoot11;
}

std::uint64_t load(const std::byte* from, std::size_t length = sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, from, length);
    return word;
}

/// Four lanes, because one would wait for its multiplications.
std::uint64_t hash_bytes(const std::byte* bytes, std::size_t length) {
    std::array<std::uint64_t, 4> lanes{kRoot2, kRoot3, kRoot7, kRoot11};
    std::size_t left = length;
    for (; left >= 32; left -= 32, bytes += 32) {
        for (std::size_t i = 0; i < 4; ++i) {
            lanes[i] = absorb(lanes[i], load(bytes + 8 * i));
        }
    }
    for (; left >= 8; left -= 8, bytes += 8) {
        lanes[0] = absorb(lanes[0], load(bytes));
    }
    if (left > 0) {
        lanes[0] = absorb(lanes[0], load(bytes, left));
    }
    std::uint64_t hash = length;
    for (const std::uint64_t lane : lanes) {
        hash = absorb(hash, lane);
    }
    return hash;
}

/// One index along an axis.
struct Coordinate {
    std::uint64_t step;  ///< strides from the first element
    std::uint64_t key;   ///< its share of the key of a row
    std::size_t place;   ///< its share of the index of the digest
};
using Coordinates = std::vector<Coordinate>;

std::uint64_t key_of(Axis axis, std::uint64_t index) {
    return mix(index * kNumAxes + axis + 1);
}

/// The indices along an axis of a region that a scope wants; `apart` is from digest to digest.
Coordinates coordinates_of(Axis axis, const Extent& extent, std::span<const std::int64_t> wanted,
                           std::size_t apart) {
    Coordinates found;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        const auto index = static_cast<std::uint64_t>(wanted[i]);
        if (index >= extent.start && index - extent.start < extent.count) {
            found.push_back({index - extent.start, key_of(axis, index), i * apart});
        }
    }
    return found;
}

/// Hashes the elements of one head and token, the row of a region.
class RowHash {
  public:
    RowHash(const Extent& dim, std::uint64_t element_bytes)
        : dim_(dim), element_bytes_(element_bytes), length_(mul(dim.count, element_bytes)) {
        if (dim.count > 1 && dim.stride != element_bytes) {
            gathered_.resize(length_);
        }
    }

    std::uint64_t operator()(const std::byte* row) {
        if (gathered_.empty()) {
            // The processor itself looks ahead only to the end of a page.
            for (std::uint64_t line = 0; line < length_; line += 64) {
                __builtin_prefetch(row + kPageBytes + line);
            }
            return hash_bytes(row, length_);
        }
        // A size that the compiler knows makes a copy one instruction.
        switch (element_bytes_) {
            case 1:
                gather(row, std::integral_constant<std::size_t, 1>());
                break;
            case 2:
                gather(row, std::integral_constant<std::size_t, 2>());
                break;
            case 4:
                gather(row, std::integral_constant<std::size_t, 4>());
                break;
            default:
                gather(row, element_bytes_);
        }
        return hash_bytes(gathered_.data(), length_);
    }

  private:
    template <class Size>
    void gather(const std::byte* row, Size size) {
        for (std::uint64_t i = 0; i < dim_.count; ++i) {
            std::memcpy(gathered_.data() + i * size, row + i * dim_.stride, size);
        }
    }

    Extent dim_;
    std::uint64_t element_bytes_;
    std::uint64_t length_;
    std::vector<std::byte> gathered_;
};

/// What a scope wants of one region, in any block.
struct Part {
    const Region* region;
    std::array<Coordinates, 3> axes;  ///< layer, kv, head
    RowHash hash;
};

std::vector<Part> parts_of(const Group& group, const DigestScope& scope) {
    std::vector<std::int64_t> planes(scope.num_kv);
    std::iota(planes.begin(), planes.end(), 0);
    const std::size_t heads = scope.heads.size() * scope.units.size();
    std::vector<Part> parts;
    parts.reserve(group.regions.size());
    for (const Region& region : group.regions) {
        parts.push_back(
            {&region,
             {coordinates_of(kLayer, region.axes[kLayer], scope.layers, scope.num_kv * heads),
              coordinates_of(kKv, region.axes[kKv], planes, heads),
              coordinates_of(kHead, region.axes[kHead], scope.heads, scope.units.size())},
             RowHash(region.axes[kDim], group.element_bytes)});
    }
    return parts;
}

/// Add the digests of one block of a region, in the order of its memory.
void add_block(Part& part, std::uint64_t block, const Coordinates& slots, std::uint64_t* out) {
    const Region& region = *part.region;
    const auto& [layer, kv, head] = part.axes;
    struct Level {
        std::uint64_t stride;
        const Coordinates* coordinates;
    };
    std::array<Level, 4> levels{{{region.axes[kLayer].stride, &layer},
                                 {region.axes[kKv].stride, &kv},
                                 {region.axes[kHead].stride, &head},
                                 {region.axes[kToken].stride, &slots}}};
    std::sort(levels.begin(), levels.end(),
              [](const Level& a, const Level& b) { return a.stride > b.stride; });
    const auto& [outer, second, third, inner] = levels;
    const auto* const base =  // NOLINTNEXTLINE(performance-no-int-to-ptr)
        reinterpret_cast<const std::byte*>(region.base + block * region.axes[kBlock].stride);
    for (const Coordinate& a : *outer.coordinates) {
        for (const Coordinate& b : *second.coordinates) {
            for (const Coordinate& c : *third.coordinates) {
                const std::byte* const rows =
                    base + a.step * outer.stride + b.step * second.stride + c.step * third.stride;
                const std::uint64_t key = a.key + b.key + c.key;
                std::uint64_t* const sums = out + a.place + b.place + c.place;
                for (const Coordinate& d : *inner.coordinates) {
                    const std::uint64_t hash = part.hash(rows + d.step * inner.stride);
                    sums[d.place] += mix(hash + key + d.key);
                }
            }
        }
    }
}

/// The slots of a table's entry with positions in [begin, end) that the scope wants.
Coordinates slots_of(const Group& group, std::uint64_t entry, std::uint64_t start,
                     std::uint64_t begin, std::uint64_t end, const DigestScope& scope) {
    const Paging& paging = group.paging;
    Coordinates slots;
    for (std::uint64_t slot = 0; slot < paging.slots; ++slot) {
        const std::uint64_t held = entry * paging.slots + slot;
        const std::uint64_t position =
            start + ((held / paging.interleave * paging.ranks + paging.rank) * paging.interleave +
                     held % paging.interleave) *
                        paging.tokens_per_slot;
        const bool is_wanted =
            position >= begin && position < end &&
            std::all_of(
                scope.turns.begin(), scope.turns.end(),
                [&](const Turns& turns) {
                    return position / turns.interleave % turns.ranks == turns.rank;
                });
        if (is_wanted) {
            slots.push_back({slot, key_of(kToken, position), 0});
        }
    }
    return slots;
}

}  // namespace

void add_digests(const Group& group, std::span<const std::int64_t> ids, std::uint64_t start,
                 const DigestScope& scope, std::span<std::uint64_t> out) {
    const std::uint64_t block_unit = group.paging.unit();
    const std::uint64_t end_of_table = add(start, mul(ids.size(), block_unit));
    if (scope.begin < start || scope.end > end_of_table) {
        plan_error("positions ", scope.begin, " to ", scope.end,
                   " are wanted, but the table covers ", start, " to ", end_of_table);
    }
    check_range("number of digests", out.size(), scope.size(), scope.size());
    for (const Turns& turns : scope.turns) {
        check_range("context ranks", turns.ranks, 1);
        check_range("context interleave", turns.interleave, 1);
    }
    std::vector<Part> parts = parts_of(group, scope);
    for (std::size_t i = 0; i < scope.units.size(); ++i) {
        const std::uint64_t first = mul(static_cast<std::uint64_t>(scope.units[i]), scope.unit);
        const std::uint64_t begin = std::max(scope.begin, first);
        const std::uint64_t end = std::min(scope.end, add(first, scope.unit));
        if (begin >= end) {
            continue;
        }
        const std::uint64_t last_entry = (end - start + block_unit - 1) / block_unit;
        for (std::uint64_t entry = (begin - start) / block_unit; entry < last_entry; ++entry) {
            const std::int64_t id = ids[entry];
            if (id < 0 || std::cmp_greater_equal(id, group.paging.num_blocks)) {
                plan_error("block ", id, " at index ", entry, " must be from 0 to ",
                           group.paging.num_blocks - 1);
            }
            const Coordinates slots = slots_of(group, entry, start, begin, end, scope);
            for (Part& part : parts) {
                add_block(part, static_cast<std::uint64_t>(id), slots, out.data() + i);
            }
        }
    }
}

}  // namespace pynixlkv::kv
