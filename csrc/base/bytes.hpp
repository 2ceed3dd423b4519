/// @file
/// Bytes of a wire format: little-endian, fixed widths, every length checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv {

class ByteWriter {
  public:
    template <class Integer>
    void put(Integer value) {
        for (std::size_t i = 0; i < sizeof(Integer); ++i) {
            bytes_ += static_cast<char>((static_cast<std::uint64_t>(value) >> (8 * i)) & 0xFFU);
        }
    }
    /// A 32-bit length and that many bytes.
    void put_bytes(std::string_view bytes) {
        put(static_cast<std::uint32_t>(bytes.size()));
        bytes_ += bytes;
    }
    void put_raw(std::string_view bytes) { bytes_ += bytes; }

    [[nodiscard]] std::string take() { return std::move(bytes_); }

  private:
    std::string bytes_;
};

class ByteReader {
  public:
    /// @param what names the bytes in errors
    ByteReader(std::string_view bytes, const char* what) : bytes_(bytes), what_(what) {}

    /// @throws Error WireError when fewer bytes are left
    template <class Integer>
    [[nodiscard]] Integer get() {
        const std::string_view raw = get_raw(sizeof(Integer));
        std::uint64_t value = 0;
        for (std::size_t i = 0; i < sizeof(Integer); ++i) {
            value |= std::uint64_t{static_cast<unsigned char>(raw[i])} << (8 * i);
        }
        return static_cast<Integer>(value);
    }
    /// What `put_bytes` wrote.
    [[nodiscard]] std::string_view get_bytes() { return get_raw(get<std::uint32_t>()); }
    [[nodiscard]] std::string_view get_raw(std::size_t count) {
        if (count > bytes_.size() - next_) {
            throw Error("WireError", text(what_, " end too early: ", count, " bytes expected at ",
                                          next_, " of ", bytes_.size()));
        }
        next_ += count;
        return bytes_.substr(next_ - count, count);
    }
    [[nodiscard]] std::size_t num_left() const noexcept { return bytes_.size() - next_; }
    [[nodiscard]] std::string_view rest() { return get_raw(bytes_.size() - next_); }
    /// @throws Error WireError unless everything has been read
    void require_end() const {
        if (next_ != bytes_.size()) {
            throw Error("WireError",
                        text(what_, " have ", bytes_.size() - next_, " bytes too many"));
        }
    }

  private:
    std::string_view bytes_;
    const char* what_;
    std::size_t next_ = 0;
};

}  // namespace pynixlkv
