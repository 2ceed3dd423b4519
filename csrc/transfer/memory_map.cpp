#include "transfer/memory_map.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <sstream>

#include "base/error.hpp"

namespace pynixlkv::transfer {

namespace {

std::string range_text(std::uint64_t address, std::uint64_t length, std::uint64_t device) {
    std::ostringstream out;
    out << "[0x" << std::hex << address << ", 0x" << address + length << std::dec << ") (" << length
        << " bytes, device " << device << ')';
    return out.str();
}

}  // namespace

void MemoryMap::add(Owner owner, std::span<const Span> spans) {
    std::size_t added = 0;
    try {
        for (const auto& [row, memory] : spans) {
            if (row.length == 0) {
                throw Error("ConfigError", "a span of 0 bytes at " +
                                               range_text(row.address, 0, row.device) +
                                               " cannot be registered");
            }
            if (row.address > std::numeric_limits<std::uint64_t>::max() - row.length) {
                throw Error("ConfigError", "a span of " + std::to_string(row.length) +
                                               " bytes at address " + std::to_string(row.address) +
                                               " wraps around the end of the address space");
            }
            const Key key{row.device, row.address};
            const auto next = spans_.lower_bound(key);
            const auto refuse = [&](const Row& there) {
                throw Error("AlreadyRegisteredError",
                            range_text(row.address, row.length, row.device) + " overlaps " +
                                range_text(there.address, there.length, there.device) +
                                ", which is registered already; keep and reuse that registration");
            };
            if (next != spans_.end() && next->first.first == row.device &&
                next->first.second < row.address + row.length) {
                refuse(next->second.row);
            }
            if (next != spans_.begin()) {
                const Row& before = std::prev(next)->second.row;
                if (before.device == row.device && before.address + before.length > row.address) {
                    refuse(before);
                }
            }
            add_overlapping(owner, {row, memory});
            ++added;
        }
    } catch (...) {
        for (std::size_t i = 0; i < added; ++i) {
            remove(owner, spans[i].row);
        }
        throw;
    }
}

void MemoryMap::add_overlapping(Owner owner, const Span& span) {
    spans_.emplace(Key{span.row.device, span.row.address}, Entry{span.row, span.memory, owner});
    longest_ = std::max(longest_, span.row.length);
}

void MemoryMap::remove(Owner owner) {
    std::erase_if(spans_, [owner](const auto& entry) { return entry.second.owner == owner; });
}

void MemoryMap::remove(Owner owner, const Row& row) {
    const auto [first, last] = spans_.equal_range(Key{row.device, row.address});
    const auto found = std::find_if(first, last, [&](const auto& entry) {
        return entry.second.owner == owner && entry.second.row == row;
    });
    if (found != last) {
        spans_.erase(found);
    }
}

const MemoryMap::Entry* MemoryMap::find_exactly(const Row& row) const {
    const auto [first, last] = spans_.equal_range(Key{row.device, row.address});
    const auto found =
        std::find_if(first, last, [&](const auto& entry) { return entry.second.row == row; });
    return found != last ? &found->second : nullptr;
}

MemoryMap::Cover MemoryMap::cover(std::span<const Row> rows, const std::string& whose) const {
    Cover result;
    const Entry* hit = nullptr;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Row& row = rows[i];
        if (hit != nullptr && hit->contains(row)) {
            continue;  // rows come in address order: nearly always the span of the row before
        }
        hit = find(row, [](const Entry&) { return true; });
        if (hit == nullptr) {
            std::ostringstream out;
            out << "row " << i << ' ' << range_text(row.address, row.length, row.device)
                << " is not inside the registered memory " << whose;
            const auto next = spans_.upper_bound(Key{row.device, row.address});
            if (next != spans_.begin()) {
                const Row& below = std::prev(next)->second.row;
                out << "; the nearest registered span below starts at "
                    << range_text(below.address, below.length, below.device);
            }
            throw Error("NotRegisteredError", out.str());
        }
        if (result.owners.empty()) {
            result.memory = hit->memory;
        } else if (result.memory != hit->memory) {
            throw Error("ConfigError",
                        "row " + std::to_string(i) +
                            " is in another kind of memory than the rows before it " + whose +
                            "; move each kind in a transfer of its own");
        }
        if (std::find(result.owners.begin(), result.owners.end(), hit->owner) ==
            result.owners.end()) {
            result.owners.push_back(hit->owner);
        }
    }
    return result;
}

}  // namespace pynixlkv::transfer
