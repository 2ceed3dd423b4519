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

inline std::uint64_t add(std::uint64_t a, std::uint64_t b) {
    if (a > kMaxNumber || b > kMaxNumber - a) {
        layout_error("address arithmetic overflows: ", a, " + ", b, " is above 2**60 - 1");
    }
    return a + b;
}

inline std::uint64_t mul(std::uint64_t a, std::uint64_t b) {
    if (b != 0 && a > kMaxNumber / b) {
        layout_error("address arithmetic overflows: ", a, " * ", b, " is above 2**60 - 1");
    }
    return a * b;
}

inline void check_range(const char* what, std::uint64_t value, std::uint64_t low = 0,
                        std::uint64_t high = kMaxNumber) {
    if (value < low || value > high) {
        layout_error("geometry: ", what, " is ", value, ", must be from ", low, " to ", high);
    }
}

}  // namespace pynixlkv::kv
