#include "kv/radix.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "kv/checks.hpp"

namespace pynixlkv::kv {

void radix_sort(std::vector<Keyed>& items) {
    constexpr unsigned kBits = 12;
    constexpr std::uint64_t kMask = (1U << kBits) - 1;
    static_assert(kMaxNumber >> (5 * kBits) == 0, "the shift below ends before it is too wide");
    const auto less = [](const Keyed& a, const Keyed& b) { return a.key < b.key; };
    if (std::is_sorted(items.begin(), items.end(), less)) {
        return;
    }
    const auto ends = std::minmax_element(items.begin(), items.end(), less);
    const std::uint64_t least = ends.first->key;
    const std::uint64_t range = ends.second->key - least;
    std::vector<Keyed> other(items.size());
    for (unsigned shift = 0; range >> shift != 0; shift += kBits) {
        std::array<std::size_t, kMask + 1> next{};
        for (const Keyed& item : items) {
            ++next[(item.key - least) >> shift & kMask];
        }
        std::size_t sum = 0;
        for (std::size_t& start : next) {
            sum += std::exchange(start, sum);
        }
        for (const Keyed& item : items) {
            other[next[(item.key - least) >> shift & kMask]++] = item;
        }
        items.swap(other);
    }
}

}  // namespace pynixlkv::kv
