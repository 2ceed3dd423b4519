/// @file
/// The descriptors of a plan, for a transfer.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kv/expansion.hpp"
#include "transfer/agent.hpp"

namespace pynixlkv::transfer {

/// Block tables of a plan. Its functions are called by one thread at a time.
class PlanSource final : public DescriptorSource {
  public:
    explicit PlanSource(std::shared_ptr<const kv::BlockTables> tables)
        : tables_(std::move(tables)) {}

    void expand(std::vector<Row>& local, std::vector<Row>& remote) const override {
        expansion().emit(local, remote);
    }
    [[nodiscard]] std::shared_ptr<const void> pool() const override {
        return plan().pool().can_prepare ? tables_->plan() : nullptr;
    }
    [[nodiscard]] std::size_t pool_size() const override {
        return plan().pool().sizes[0] + plan().pool().sizes[1];
    }
    void pool_rows(std::vector<Row>& local, std::vector<Row>& remote) const override {
        local = plan().prepared_rows(kv::Side::kLocal);
        remote = plan().prepared_rows(kv::Side::kRemote);
    }
    [[nodiscard]] std::optional<std::size_t> num_indices() const override {
        return expansion().num_indices();
    }
    void expand_indices(std::vector<std::int32_t>& local,
                        std::vector<std::int32_t>& remote) const override {
        expansion().emit_indices(local, remote);
    }

  private:
    [[nodiscard]] const kv::Plan& plan() const { return *tables_->plan(); }
    [[nodiscard]] const kv::Expansion& expansion() const {
        return expansion_ ? *expansion_ : expansion_.emplace(*tables_);
    }

    const std::shared_ptr<const kv::BlockTables> tables_;
    mutable std::optional<kv::Expansion> expansion_;
};

/// Let a submission move what the tables say; checks that no block is written twice.
/// @throws Error PlanError
inline void set_plan(Submission& submission, const std::shared_ptr<const kv::BlockTables>& tables) {
    tables->check_written_once(submission.op == Op::kRead ? kv::Side::kLocal : kv::Side::kRemote);
    submission.local_extents = tables->plan()->extents(kv::Side::kLocal);
    submission.remote_extents = tables->plan()->extents(kv::Side::kRemote);
    submission.source = std::make_shared<const PlanSource>(tables);
}

}  // namespace pynixlkv::transfer
