/// @file
/// Sorting in time linear in the number of items.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pynixlkv::kv {

/// A sort key, and which item it belongs to.
struct Keyed {
    std::uint64_t key;
    std::size_t index;
};

/// Sort by key, stably; keys up to kMaxNumber. Costs one pass if they are in order already, else
/// two more passes for each 12 bits in which they differ.
void radix_sort(std::vector<Keyed>& items);

/// Sort items by a key, as above.
template <class Item, class Key>
void radix_sort_by(std::vector<Item>& items, Key key) {
    std::vector<Keyed> order;
    order.reserve(items.size());
    for (const Item& item : items) {
        order.push_back({key(item), order.size()});
    }
    radix_sort(order);
    std::vector<Item> sorted;
    sorted.reserve(items.size());
    for (const Keyed& keyed : order) {
        sorted.push_back(items[keyed.index]);
    }
    items.swap(sorted);
}

}  // namespace pynixlkv::kv
