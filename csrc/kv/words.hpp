/// @file
/// Flat arrays of 64-bit words, the form in which geometries and plans reach C++, read with bounds;
/// and arithmetic on them that cannot wrap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "base/text.hpp"

namespace pynixlkv::kv {

/// Largest address, size or count. Sums of a few of them, and their differences, fit int64.
inline constexpr std::uint64_t kMaxWord = (std::uint64_t{1} << 60) - 1;

[[noreturn]] void fail(const char* kind, const std::string& message);

template <class... Parts>
[[noreturn]] void layout_error(const Parts&... parts) {
    fail("LayoutError", text(parts...));
}

template <class... Parts>
[[noreturn]] void plan_error(const Parts&... parts) {
    fail("PlanError", text(parts...));
}

/// a + b, or a LayoutError that names both.
std::uint64_t add(std::uint64_t a, std::uint64_t b);

/// a * b, or a LayoutError that names both.
std::uint64_t mul(std::uint64_t a, std::uint64_t b);

/// Takes words one by one and refuses those that are missing or out of range.
class WordReader {
  public:
    WordReader(std::span<const std::uint64_t> words, std::string subject)
        : words_(words), subject_(std::move(subject)) {}

    /// @param what name of the field, for the message
    /// @param low,high inclusive range of the field
    std::uint64_t next(const char* what, std::uint64_t low = 0, std::uint64_t high = kMaxWord);

    /// A number of records to follow, never more than the words that are left could hold.
    std::size_t count(const char* what, std::size_t words_each, std::uint64_t low = 0);

    /// Nothing may follow.
    void finish() const;

  private:
    std::span<const std::uint64_t> words_;
    std::string subject_;
    std::size_t position_ = 0;
};

}  // namespace pynixlkv::kv
