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
            const auto refuse = [&](const Key& k, const Value& v) {
                throw Error("AlreadyRegisteredError",
                            range_text(row.address, row.length, row.device) + " overlaps " +
                                range_text(k.second, v.length, k.first) +
                                ", which is registered already; keep and reuse that registration");
            };
            if (next != spans_.end() && next->first.first == row.device &&
                next->first.second < row.address + row.length) {
                refuse(next->first, next->second);
            }
            if (next != spans_.begin()) {
                const auto before = std::prev(next);
                if (before->first.first == row.device &&
                    before->first.second + before->second.length > row.address) {
                    refuse(before->first, before->second);
                }
            }
            spans_.emplace_hint(next, key, Value{row.length, memory, owner});
            ++added;
        }
    } catch (...) {
        for (std::size_t i = 0; i < added; ++i) {
            spans_.erase(Key{spans[i].row.device, spans[i].row.address});
        }
        throw;
    }
}

void MemoryMap::remove(Owner owner) {
    std::erase_if(spans_, [owner](const auto& entry) { return entry.second.owner == owner; });
}

MemoryMap::Cover MemoryMap::cover(std::span<const Row> rows, const std::string& whose) const {
    Cover result;
    auto hit = spans_.end();
    const auto contains = [](const auto& entry, const Row& row) {
        const auto& [key, value] = entry;
        return key.first == row.device && key.second <= row.address && row.length <= value.length &&
               row.address - key.second <= value.length - row.length;
    };
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Row& row = rows[i];
        if (hit != spans_.end() && contains(*hit, row)) {
            continue;  // rows come in address order: nearly always the span of the row before
        }
        const auto next = spans_.upper_bound(Key{row.device, row.address});
        if (next == spans_.begin() || !contains(*std::prev(next), row)) {
            std::ostringstream out;
            out << "row " << i << ' ' << range_text(row.address, row.length, row.device)
                << " is not inside the registered memory " << whose;
            if (next != spans_.begin()) {
                const auto& [key, value] = *std::prev(next);
                out << "; the nearest registered span below starts at "
                    << range_text(key.second, value.length, key.first);
            }
            throw Error("NotRegisteredError", out.str());
        }
        hit = std::prev(next);
        const Value& value = hit->second;
        if (result.owners.empty()) {
            result.memory = value.memory;
        } else if (result.memory != value.memory) {
            throw Error("ConfigError",
                        "row " + std::to_string(i) +
                            " is in another kind of memory than the rows before it " + whose +
                            "; move each kind in a transfer of its own");
        }
        if (std::find(result.owners.begin(), result.owners.end(), value.owner) ==
            result.owners.end()) {
            result.owners.push_back(value.owner);
        }
    }
    return result;
}

}  // namespace pynixlkv::transfer
