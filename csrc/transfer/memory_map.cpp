#include "transfer/memory_map.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::transfer {

namespace {

std::string range_text(const Descriptor& row) {
    return text("[0x", std::hex, row.address, ", 0x", row.address + row.length, std::dec, ") (",
                row.length, " bytes, device ", row.device, ')');
}

}  // namespace

void MemoryMap::require_free(const Descriptor& row) const {
    if (row.length == 0) {
        throw Error("ConfigError",
                    "a span of 0 bytes at " + range_text(row) + " cannot be registered");
    }
    if (row.address > std::numeric_limits<std::uint64_t>::max() - row.length) {
        throw Error("ConfigError", text("a span of ", row.length, " bytes at address ", row.address,
                                        " wraps around the end of the address space"));
    }
    const auto refuse = [&](const Descriptor& there) {
        throw Error("AlreadyRegisteredError",
                    text(range_text(row), " overlaps ", range_text(there),
                         ", which is registered already; keep and reuse that registration"));
    };
    const auto next = spans_.lower_bound({row.device, row.address});
    if (next != spans_.end() && next->first.first == row.device &&
        next->first.second < row.address + row.length) {
        refuse(next->second.row);
    }
    if (next != spans_.begin()) {
        const Descriptor& before = std::prev(next)->second.row;
        if (before.device == row.device && before.address + before.length > row.address) {
            refuse(before);
        }
    }
}

void MemoryMap::add(Owner owner, std::span<const Span> spans) {
    for (const Span& span : spans) {
        require_free(span.row);
        add_overlapping(owner, span);
    }
}

void MemoryMap::add_overlapping(Owner owner, const Span& span) {
    auto& owned = by_owner_[owner];
    const auto index = static_cast<std::uint32_t>(owned.size());
    owned.push_back(spans_.emplace(Key{span.row.device, span.row.address},
                                   Entry{span.row, span.memory, owner, index, span.is_read_only}));
    longest_ = std::max(longest_, span.row.length);
}

void MemoryMap::remove(Owner owner) {
    const auto found = by_owner_.find(owner);
    if (found == by_owner_.end()) {
        return;
    }
    for (const auto& span : found->second) {
        if (span != spans_.end()) {
            spans_.erase(span);
        }
    }
    by_owner_.erase(found);
}

void MemoryMap::remove(Owner owner, std::uint32_t index) {
    spans_.erase(std::exchange(by_owner_.at(owner).at(index), spans_.end()));
}

MemoryMap::Cover MemoryMap::cover(std::span<const Descriptor> rows, const std::string& whose,
                                  bool is_written) const {
    Cover result;
    const Entry* hit = nullptr;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Descriptor& row = rows[i];
        if (hit != nullptr && hit->row.contains(row)) {
            continue;  // rows come in address order: nearly always the span of the row before
        }
        hit = find(row, [](const Entry&) { return true; });
        if (hit == nullptr) {
            std::string why = text("row ", i, ' ', range_text(row),
                                   " is not inside the registered memory ", whose);
            const auto next = spans_.upper_bound(Key{row.device, row.address});
            if (next != spans_.begin()) {
                why += "; the nearest registered span below starts at " +
                       range_text(std::prev(next)->second.row);
            }
            throw Error("NotRegisteredError", why);
        }
        if (is_written && hit->is_read_only) {
            throw Error("NotRegisteredError",
                        text("row ", i, ' ', range_text(row), " is in read-only memory ", whose,
                             ", which is registered as a source only"));
        }
        if (result.owners.empty()) {
            result.memory = hit->memory;
        } else if (result.memory != hit->memory) {
            throw Error("ConfigError",
                        text("row ", i, " is in another kind of memory than the rows before it ",
                             whose, "; move each kind in a transfer of its own"));
        }
        if (std::find(result.owners.begin(), result.owners.end(), hit->owner) ==
            result.owners.end()) {
            result.owners.push_back(hit->owner);
        }
    }
    return result;
}

}  // namespace pynixlkv::transfer
