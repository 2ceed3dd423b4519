/// @file
/// The memory map of this process, and copies that survive what has changed in it.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace pynixlkv {

/// What all pages of a range have in common.
struct MappedRange {
    std::uint64_t length = 0;  ///< as far as it is mapped without a gap
    bool is_writable = true;
    bool is_of_file = false;  ///< in part; another process can truncate it
};

/// The mappings of this process at one moment.
class Mappings {
  public:
    [[nodiscard]] static Mappings now() {
        Mappings mappings;
        std::ifstream file("/proc/self/maps");
        for (std::string line; std::getline(file, line);) {
            Mapping mapping{};
            std::string access;
            std::string skipped;
            std::uint64_t inode = 0;
            std::istringstream fields(line);
            fields >> std::hex >> mapping.begin;
            fields.ignore(1, '-');
            fields >> mapping.end >> access >> skipped >> skipped >> std::dec >> inode;
            std::string path;
            std::getline(fields >> std::ws, path);
            mapping.is_writable = access.size() > 1 && access[1] == 'w';
            // System V's shared memory has an inode too, but a fixed size.
            mapping.is_of_file = inode != 0 && !path.starts_with("/SYSV");
            mappings.all_.push_back(mapping);
        }
        return mappings;
    }

    /// Whether the system does not tell.
    [[nodiscard]] bool empty() const noexcept { return all_.empty(); }

    /// The mappings that were not there before.
    [[nodiscard]] Mappings since(const Mappings& before) const {
        Mappings added(*this);
        std::erase_if(added.all_, [&before](const Mapping& mapping) {
            const auto same = std::lower_bound(
                before.all_.begin(), before.all_.end(), mapping.begin,
                [](const Mapping& m, std::uint64_t address) { return m.begin < address; });
            return same != before.all_.end() && *same == mapping;
        });
        return added;
    }

    [[nodiscard]] MappedRange describe(std::uint64_t address, std::uint64_t length) const {
        MappedRange range;
        auto at = std::upper_bound(all_.begin(), all_.end(), address,
                                   [](std::uint64_t a, const Mapping& m) { return a < m.end; });
        for (; length > 0; ++at) {
            if (at == all_.end() || at->begin > address) {
                break;
            }
            range.is_writable &= at->is_writable;
            range.is_of_file |= at->is_of_file;
            const std::uint64_t inside = std::min(length, at->end - address);
            address += inside;
            length -= inside;
            range.length += inside;
        }
        return range;
    }

  private:
    struct Mapping {
        std::uint64_t begin;
        std::uint64_t end;
        bool is_writable;
        bool is_of_file;

        friend bool operator==(const Mapping&, const Mapping&) = default;
    };

    std::vector<Mapping> all_;  // in ascending order
};

/// Copy inside this process.
/// @param is_fragile let the kernel copy, which reports pages that are gone instead of a signal
/// @return whether all bytes were copied
[[nodiscard]] inline bool copy(void* to, const void* from, std::size_t length, bool is_fragile) {
    if (is_fragile) {
        const iovec there{to, length};
        const iovec here{const_cast<void*>(from), length};
        const ssize_t copied = ::process_vm_readv(::getpid(), &there, 1, &here, 1, 0);
        if (copied >= 0 || (errno != EPERM && errno != ENOSYS)) {
            return copied == static_cast<ssize_t>(length);
        }
    }
    std::memcpy(to, from, length);
    return true;
}

}  // namespace pynixlkv
