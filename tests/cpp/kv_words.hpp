/// @file
/// Builders for the flat words of geometries, and what the kv tests share.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kv/plan.hpp"

namespace kv_test {

using pynixlkv::kv::Extent;
using Words = std::vector<std::uint64_t>;

struct RegionWords {
    std::uint64_t span = 0;
    std::uint64_t base = 0;
    std::array<Extent, 6> axes{};
};

struct GroupWords {
    std::uint64_t element_bytes = 1;
    std::uint64_t num_blocks = 1;
    std::uint64_t slots = 1;
    std::uint64_t rank = 0;
    std::uint64_t ranks = 1;
    std::uint64_t interleave = 1;
    std::uint64_t has_heads = 1;
    std::uint64_t indivisible = 0;
    std::vector<RegionWords> regions{};
};

struct GeometryWords {
    std::vector<std::array<std::uint64_t, 3>> spans{};
    std::vector<GroupWords> groups{};

    [[nodiscard]] Words words() const {
        Words out{spans.size()};
        for (const auto& span : spans) {
            out.insert(out.end(), span.begin(), span.end());
        }
        out.push_back(groups.size());
        for (const GroupWords& g : groups) {
            const Words head{g.element_bytes, g.num_blocks, g.slots,       g.rank,          g.ranks,
                             g.interleave,    g.has_heads,  g.indivisible, g.regions.size()};
            out.insert(out.end(), head.begin(), head.end());
            for (const RegionWords& r : g.regions) {
                out.insert(out.end(), {r.span, r.base});
                for (const Extent& axis : r.axes) {
                    out.insert(out.end(), {axis.start, axis.count, axis.stride});
                }
            }
        }
        return out;
    }

    [[nodiscard]] pynixlkv::kv::Geometry parse() const {
        const Words all = words();
        return pynixlkv::kv::Geometry::from_words(all);
    }
};

/// "Kind: message" of the error that `body` throws, or "no error".
inline std::string error_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const pynixlkv::Error& e) {
        return e.kind() + ": " + e.what();
    }
    return "no error";
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace kv_test

#define CHECK_ERROR(part, ...)                                                               \
    do {                                                                                     \
        const std::string seen = kv_test::error_of([&] { (void)(__VA_ARGS__); });            \
        if (!kv_test::contains(seen, part)) check::fail(__FILE__, __LINE__, "saw: " + seen); \
    } while (false)
