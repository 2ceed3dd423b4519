/// @file
/// The descriptor row that every room passes around: one contiguous range of memory.
#pragma once

#include <cstdint>

namespace pynixlkv {

/// A contiguous range: a row of the (n, 3) uint64 arrays of the Python side, same layout.
struct Row {
    std::uint64_t address;
    std::uint64_t length;
    std::uint64_t device;

    friend bool operator==(const Row&, const Row&) = default;
};
static_assert(sizeof(Row) == 24, "rows are shared with numpy arrays of shape (n, 3)");

}  // namespace pynixlkv
