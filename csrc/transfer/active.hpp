/// @file
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/driver.hpp"
#include "transfer/registrations.hpp"
#include "transfer/submission.hpp"
#include "transfer/transfer.hpp"

namespace pynixlkv::transfer {

/// A peer on the agent's thread.
struct Link {
    struct Lists {
        std::unique_ptr<Prepared> prepared;
        double regret_ns = 0;  ///< what having the lists would have saved so far
    };

    std::shared_ptr<Peer> peer;
    std::unique_ptr<Connection> connection;
    /// By DescriptorSource::pool(), which they do not keep alive.
    std::map<std::weak_ptr<const void>, Lists, std::owner_less<>> lists;
    std::size_t unquiet = 0;  ///< transfers that may still move bytes

    void drop() {
        lists.clear();
        connection.reset();
    }
};

/// A transfer on the agent's thread, until it is quiet.
struct Active {
    struct Running {
        std::unique_ptr<NativeXfer> xfer;
        std::uint64_t bytes;
    };

    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<Link> link;
    Uses uses;
    std::shared_ptr<const DescriptorSource> source;
    std::vector<Row> local;
    std::vector<Row> remote;
    /// Instead of rows, if not null: places in prepared rows. Owned by the link.
    Prepared* prepared = nullptr;
    std::vector<std::int32_t> local_indices;
    std::vector<std::int32_t> remote_indices;
    std::uint64_t bytes = 0;
    Memory local_memory = Memory::kDram;
    Memory remote_memory = Memory::kDram;
    std::optional<std::string> notify;
    TimePoint submitted;
    TimePoint deadline;
    Clock::duration timeout{};
    bool expanded = false;
    std::size_t next = 0;
    std::vector<Running> running;

    [[nodiscard]] std::size_t size() const noexcept {
        return prepared != nullptr ? local_indices.size() : local.size();
    }
    /// Whether all rows have been posted and have ended.
    [[nodiscard]] bool is_moved() const noexcept {
        return expanded && next >= size() && running.empty();
    }
};

}  // namespace pynixlkv::transfer
