/// @file
/// Errors of this folder, and arithmetic that cannot wrap.
#pragma once

#include <cstdint>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::kv {

/// Largest address, size or count. Sums of a few of them, and their differences, fit int64.
inline constexpr std::uint64_t kMaxNumber = (std::uint64_t{1} << 60) - 1;

template <class... Parts>
[[noreturn]] void layout_error(const Parts&... parts) {
    throw Error("LayoutError", text(parts...));
}

template <class... Parts>
[[noreturn]] void plan_error(const Parts&... parts) {
    throw Error("PlanError", text(parts...));
}

/// a + b, or a LayoutError that names both.
std::uint64_t add(std::uint64_t a, std::uint64_t b);

/// a * b, or a LayoutError that names both.
std::uint64_t mul(std::uint64_t a, std::uint64_t b);

/// Raise a LayoutError unless low <= value <= high.
void check_range(const char* what, std::uint64_t value, std::uint64_t low = 0,
                 std::uint64_t high = kMaxNumber);

}  // namespace pynixlkv::kv
