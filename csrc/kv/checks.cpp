#include "kv/checks.hpp"

namespace pynixlkv::kv {

std::uint64_t add(std::uint64_t a, std::uint64_t b) {
    if (a > kMaxNumber || b > kMaxNumber - a) {
        layout_error("address arithmetic overflows: ", a, " + ", b, " is above 2**60 - 1");
    }
    return a + b;
}

std::uint64_t mul(std::uint64_t a, std::uint64_t b) {
    if (b != 0 && a > kMaxNumber / b) {
        layout_error("address arithmetic overflows: ", a, " * ", b, " is above 2**60 - 1");
    }
    return a * b;
}

void check_range(const char* what, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
    if (value < low || value > high) {
        layout_error("geometry: ", what, " is ", value, ", must be from ", low, " to ", high);
    }
}

}  // namespace pynixlkv::kv
