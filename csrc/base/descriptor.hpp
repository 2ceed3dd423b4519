/// @file
/// The descriptor row that all modules share: one contiguous range of memory.
#pragma once

#include <cstdint>
#include <string>

#include "base/text.hpp"

namespace pynixlkv {

/// A row of the (n, 3) uint64 arrays of the Python side, same layout.
struct Descriptor {
    std::uint64_t address;  ///< or offset in a file, object or block device
    std::uint64_t length;   ///< bytes
    std::uint64_t device;   ///< device ordinal, file descriptor, object key

    [[nodiscard]] std::string str() const {
        return text("0x", std::hex, address, std::dec, "+", length, " on device ", device);
    }

    [[nodiscard]] bool contains(const Descriptor& inner) const noexcept {
        return inner.device == device && inner.address >= address && inner.length <= length &&
               inner.address - address <= length - inner.length;
    }

    friend bool operator==(const Descriptor&, const Descriptor&) = default;
};
static_assert(sizeof(Descriptor) == 24, "shared with numpy arrays of shape (n, 3)");

}  // namespace pynixlkv
