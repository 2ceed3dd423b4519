/// @file
/// Which ranges of an address space may be touched: local registrations, or what a peer announced.
#pragma once

#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// Spans with an owner each, looked up by containment. Adjoining spans of one memory kind do not
/// act as one: a row must lie inside a single span, as native libraries demand.
class MemoryMap {
  public:
    using Owner = std::uint64_t;

    MemoryMap() = default;
    // Moved only: a copy would keep iterators into the spans of the original.
    MemoryMap(MemoryMap&&) = default;
    MemoryMap& operator=(MemoryMap&&) = default;

    struct Entry {
        Descriptor row;
        Memory memory;
        Owner owner;
        std::uint32_t index;  ///< of the span among those of its owner
        bool is_read_only = false;
    };

    /// @throws Error("AlreadyRegisteredError") when the row overlaps a span that is there, or
    ///         Error("ConfigError") when it is empty or wraps around
    void require_free(const Descriptor& row) const;
    /// Add spans under an owner, as far as the first that `require_free` refuses.
    void add(Owner owner, std::span<const Span> spans);
    /// Add a span that may overlap others.
    void add_overlapping(Owner owner, const Span& span);
    /// Forget the spans of an owner.
    void remove(Owner owner);
    /// Forget one span of an owner.
    void remove(Owner owner, std::uint32_t index);
    void clear() noexcept {
        spans_.clear();
        by_owner_.clear();
    }
    [[nodiscard]] bool empty() const noexcept { return spans_.empty(); }

    /// A span that contains the row and is accepted, null if there is none.
    template <class Accept>
    [[nodiscard]] const Entry* find(const Descriptor& row, Accept accept) const {
        for (auto next = spans_.upper_bound({row.device, row.address}); next != spans_.begin();) {
            const Entry& entry = (--next)->second;
            if (entry.row.device != row.device || row.address - entry.row.address >= longest_) {
                break;
            }
            if (entry.row.contains(row) && accept(entry)) {
                return &entry;
            }
        }
        return nullptr;
    }
    /// The last added span that is the row and is accepted, null if there is none.
    template <class Accept>
    [[nodiscard]] const Entry* find_exactly(const Descriptor& row, Accept accept) const {
        const auto [first, last] = spans_.equal_range(Key{row.device, row.address});
        for (auto next = last; next != first;) {
            const Entry& entry = (--next)->second;
            if (entry.row == row && accept(entry)) {
                return &entry;
            }
        }
        return nullptr;
    }
    /// Any span of a device, null if there is none.
    [[nodiscard]] const Entry* find_device(std::uint64_t device) const {
        const auto found = spans_.lower_bound(Key{device, 0});
        return found != spans_.end() && found->first.first == device ? &found->second : nullptr;
    }

    /// What the rows lie in.
    struct Cover {
        Memory memory = Memory::kDram;
        std::vector<Owner> owners;
    };

    /// Check that every row lies wholly inside one span, all of one memory kind.
    /// @param whose how to name the address space in an error, for example "of peer 'p0'"
    /// @param is_written whether the rows are to be written, which read-only spans refuse
    /// @throws Error("NotRegisteredError") naming the row's index, range and nearest span
    [[nodiscard]] Cover cover(std::span<const Descriptor> rows, const std::string& whose,
                              bool is_written = false) const;

  private:
    // Host and device memory share one virtual address space, so the memory kind is not part of the
    // key; the device is, because it is what a row carries.
    using Key = std::pair<std::uint64_t, std::uint64_t>;

    using Spans = std::multimap<Key, Entry>;

    Spans spans_;
    std::unordered_map<Owner, std::vector<Spans::iterator>> by_owner_;
    std::uint64_t longest_ = 0;  ///< never shrinks: how far before a row its span may begin
};

}  // namespace pynixlkv::transfer
