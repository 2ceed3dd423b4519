/// @file
/// Sorting in time linear in the number of items.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pynixlkv::kv {

/// Sort items by an unsigned key, stably. Costs one pass if they are in order already, else two
/// more passes for each 11 bits in which the keys differ.
template <class Item, class Key>
void radix_sort(std::vector<Item>& items, Key key) {
    constexpr unsigned kBits = 11;
    constexpr std::uint64_t kMask = (1U << kBits) - 1;
    const auto less = [&](const Item& a, const Item& b) { return key(a) < key(b); };
    if (std::is_sorted(items.begin(), items.end(), less)) {
        return;
    }
    const auto [low, high] = std::minmax_element(items.begin(), items.end(), less);
    const std::uint64_t least = key(*low);
    const std::uint64_t range = key(*high) - least;
    std::vector<Item> other(items.size());
    for (unsigned shift = 0; shift < 64 && range >> shift != 0; shift += kBits) {
        std::array<std::size_t, kMask + 1> next{};
        for (const Item& item : items) {
            ++next[(key(item) - least) >> shift & kMask];
        }
        std::size_t sum = 0;
        for (std::size_t& start : next) {
            sum += std::exchange(start, sum);
        }
        for (const Item& item : items) {
            other[next[(key(item) - least) >> shift & kMask]++] = item;
        }
        items.swap(other);
    }
}

}  // namespace pynixlkv::kv
