/// @file
/// Flat arrays of 64-bit words, the form in which geometries and plans reach C++, read with bounds;
/// and arithmetic on them that cannot wrap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace pynixlkv::kv {

/// Largest address, size or count. Sums of a few of them, and their differences, fit int64.
inline constexpr std::uint64_t kMaxWord = (std::uint64_t{1} << 60) - 1;

[[noreturn]] inline void layout_error(const std::string& message) {
    throw Error("LayoutError", message);
}

[[noreturn]] inline void plan_error(const std::string& message) {
    throw Error("PlanError", message);
}

/// a + b, or a LayoutError that names both.
inline std::uint64_t add(std::uint64_t a, std::uint64_t b) {
    if (a > kMaxWord || b > kMaxWord - a) {
        layout_error("address arithmetic overflows: " + std::to_string(a) + " + " +
                     std::to_string(b) + " is above 2**60 - 1");
    }
    return a + b;
}

/// a * b, or a LayoutError that names both.
inline std::uint64_t mul(std::uint64_t a, std::uint64_t b) {
    if (b != 0 && a > kMaxWord / b) {
        layout_error("address arithmetic overflows: " + std::to_string(a) + " * " +
                     std::to_string(b) + " is above 2**60 - 1");
    }
    return a * b;
}

/// Takes words one by one and refuses those that are missing or out of range.
class WordReader {
  public:
    WordReader(std::span<const std::uint64_t> words, std::string subject)
        : words_(words), subject_(std::move(subject)) {}

    /// @param what name of the field, for the message
    /// @param low,high inclusive range of the field
    std::uint64_t next(const char* what, std::uint64_t low = 0, std::uint64_t high = kMaxWord) {
        if (position_ == words_.size()) {
            layout_error(subject_ + " ends after " + std::to_string(position_) +
                         " words, before its " + what);
        }
        const std::uint64_t value = words_[position_++];
        if (value < low || value > high) {
            layout_error(subject_ + ": " + what + " is " + std::to_string(value) +
                         ", must be from " + std::to_string(low) + " to " + std::to_string(high));
        }
        return value;
    }

    /// A number of records to follow, never more than the words that are left could hold.
    std::size_t count(const char* what, std::size_t words_each, std::uint64_t low = 0) {
        const std::uint64_t most = (words_.size() - position_) / words_each;
        return static_cast<std::size_t>(next(what, low, most));
    }

    void finish() const {
        if (position_ != words_.size()) {
            layout_error(subject_ + " has " + std::to_string(words_.size() - position_) +
                         " words too many");
        }
    }

  private:
    std::span<const std::uint64_t> words_;
    std::string subject_;
    std::size_t position_ = 0;
};

}  // namespace pynixlkv::kv
