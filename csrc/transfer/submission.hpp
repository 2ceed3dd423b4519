/// @file
/// What a caller asks an agent to move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/peer.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// Makes the rows of a transfer, on the agent's thread.
class DescriptorSource {
  public:
    DescriptorSource() = default;
    DescriptorSource(const DescriptorSource&) = delete;
    DescriptorSource& operator=(const DescriptorSource&) = delete;
    virtual ~DescriptorSource() = default;

    /// The rows, paired. Replaces the contents of the vectors.
    virtual void expand(std::vector<Row>& local, std::vector<Row>& remote) const = 0;

    /// What all transfers that can share prepared rows have in common; null if there is none.
    [[nodiscard]] virtual std::shared_ptr<const void> pool() const { return nullptr; }
    /// Number of rows of the pool, both sides together.
    [[nodiscard]] virtual std::size_t pool_size() const { return 0; }
    /// All rows that transfers of the pool choose from, in address order. Lengths are those that
    /// `expand_indices` counts with.
    virtual void pool_rows(std::vector<Row>& /*local*/, std::vector<Row>& /*remote*/) const {}
    /// Number of indices that `expand_indices` gives; none if this transfer's rows are not rows of
    /// the pool.
    [[nodiscard]] virtual std::optional<std::size_t> num_indices() const { return std::nullopt; }
    /// The rows of this transfer as places in the pool.
    virtual void expand_indices(std::vector<std::int32_t>& /*local*/,
                                std::vector<std::int32_t>& /*remote*/) const {}
};

struct Submission {
    Op op = Op::kRead;
    std::shared_ptr<Peer> peer;
    /// Rows, or ranges that contain every row that `source` will make; checked in submit().
    std::vector<Row> local_extents;
    std::vector<Row> remote_extents;
    /// Null: the extents are the rows.
    std::shared_ptr<const DescriptorSource> source;
    std::optional<std::string> notify;
    Clock::duration timeout{};
};

}  // namespace pynixlkv::transfer
