/// @file
/// Message building: `text("block ", 9, " of ", 4)`.
#pragma once

#include <sstream>
#include <string>

namespace pynixlkv {

template <class... Parts>
[[nodiscard]] std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

}  // namespace pynixlkv
