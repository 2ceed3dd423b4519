/// @file
/// Which ranges of an address space may be touched: local registrations, or what a peer announced.
#pragma once

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// Disjoint spans with an owner each, looked up by containment. Adjoining spans of one memory kind
/// do not act as one: a row must lie inside a single span, as native libraries demand.
class MemoryMap {
  public:
    using Owner = std::uint64_t;

    /// Add spans under an owner; all or none.
    /// @throws Error("AlreadyRegisteredError") when one overlaps a span that is there, or
    ///         Error("ConfigError") when one is empty or wraps around
    void add(Owner owner, std::span<const Span> spans);
    /// Forget the spans of an owner.
    void remove(Owner owner);
    void clear() noexcept { spans_.clear(); }
    [[nodiscard]] bool empty() const noexcept { return spans_.empty(); }

    /// What the rows lie in.
    struct Cover {
        Memory memory = Memory::kDram;
        std::vector<Owner> owners;
    };

    /// Check that every row lies wholly inside one span, all of one memory kind.
    /// @param whose how to name the address space in an error, for example "of peer 'p0'"
    /// @throws Error("NotRegisteredError") naming the row's index, range and nearest span
    [[nodiscard]] Cover cover(std::span<const Row> rows, const std::string& whose) const;

  private:
    // Host and device memory share one virtual address space, so the memory kind is not part of the
    // key; the device is, because it is what a row carries.
    using Key = std::pair<std::uint64_t, std::uint64_t>;
    struct Value {
        std::uint64_t length;
        Memory memory;
        Owner owner;
    };

    std::map<Key, Value> spans_;
};

}  // namespace pynixlkv::transfer
