#include "kv/expansion.hpp"

#include <algorithm>

#include "kv/radix.hpp"

namespace pynixlkv::kv {

namespace {

/// Walks the positions of a sequence on one side.
class Cursor {
  public:
    Cursor(const Paging& paging, std::uint64_t table_start, std::uint64_t begin)
        : paging_(paging),
          index_((begin - table_start) / paging.positions()),
          offset_((begin - table_start) % paging.positions()) {
        settle();
    }

    /// Entry of the table.
    [[nodiscard]] std::size_t index() const noexcept { return static_cast<std::size_t>(index_); }
    /// Slot in the block; valid if `skip()` is 0.
    [[nodiscard]] std::uint64_t slot() const noexcept { return slot_; }
    /// Consecutive positions from here on that this side holds in this block.
    [[nodiscard]] std::uint64_t available() const noexcept { return available_; }
    /// Positions until it is this side's turn.
    [[nodiscard]] std::uint64_t skip() const noexcept { return skip_; }

    void advance(std::uint64_t positions) {
        offset_ += positions;
        while (offset_ >= paging_.positions()) {
            offset_ -= paging_.positions();
            ++index_;
        }
        settle();
    }

  private:
    void settle() {
        if (paging_.ranks == 1) {  // saves the divisions of the general case
            slot_ = offset_;
            available_ = paging_.slots - offset_;
            return;
        }
        const std::uint64_t turn = offset_ / paging_.interleave;
        const std::uint64_t inside = offset_ % paging_.interleave;
        const std::uint64_t wait =
            (paging_.rank + paging_.ranks - turn % paging_.ranks) % paging_.ranks;
        skip_ = wait == 0 ? 0 : wait * paging_.interleave - inside;
        slot_ = turn / paging_.ranks * paging_.interleave + inside;
        available_ = paging_.interleave - inside;
    }

    const Paging& paging_;
    std::uint64_t index_;
    std::uint64_t offset_;
    std::uint64_t slot_ = 0;
    std::uint64_t available_ = 0;
    std::uint64_t skip_ = 0;
};

/// Merges rows that adjoin on both sides, and cuts them to `max_bytes`.
class RowWriter {
  public:
    RowWriter(Descriptor* local, Descriptor* remote, std::uint64_t max_bytes)
        : local_(local), remote_(remote), max_bytes_(max_bytes) {}

    void push(std::uint64_t local, std::uint64_t remote, std::uint64_t length,
              const Descriptor* local_span, const Descriptor* remote_span) {
        if (local == local_end_ && remote == remote_end_ && local_span == local_span_ &&
            remote_span == remote_span_) {
            local_end_ += length;
            remote_end_ += length;
            return;
        }
        is_ascending_ = is_ascending_ && local >= local_begin_;
        flush();
        local_begin_ = local;
        local_end_ = local + length;
        remote_end_ = remote + length;
        local_span_ = local_span;
        remote_span_ = remote_span;
    }

    std::size_t finish() {
        flush();
        return count_;
    }

    [[nodiscard]] bool is_ascending() const noexcept { return is_ascending_; }

  private:
    void flush() {
        std::uint64_t left = local_end_ - local_begin_;
        while (left != 0) {
            const std::uint64_t length = std::min(left, max_bytes_);
            local_[count_] = {local_end_ - left, length, local_span_->device};
            remote_[count_] = {remote_end_ - left, length, remote_span_->device};
            ++count_;
            left -= length;
        }
    }

    Descriptor* local_;
    Descriptor* remote_;
    std::uint64_t max_bytes_;
    std::size_t count_ = 0;
    bool is_ascending_ = true;
    std::uint64_t local_begin_ = 0;
    std::uint64_t local_end_ = 0;
    std::uint64_t remote_end_ = 0;
    const Descriptor* local_span_ = nullptr;
    const Descriptor* remote_span_ = nullptr;
};

/// Raise a PlanError unless the tables cover all positions to move.
void check_ends(std::size_t index, const GroupPair& group, const Table& table,
                const Overlap& overlap) {
    const std::array<std::uint64_t, 2> ends{
        overlap.start[0] + table.ids[0].size() * group.paging[0].unit(),
        overlap.start[1] + table.ids[1].size() * group.paging[1].unit()};
    for (std::size_t side = 0; side < 2; ++side) {
        if (table.num_tokens < 0) {
            // The last block of each table must be needed, at least in part.
            const std::uint64_t other_end = ends[1 - side];
            if (ends[side] > other_end && ends[side] - other_end >= group.paging[side].unit()) {
                plan_error("group ", index, ": the tables cover different tokens: local [",
                           overlap.start[0], ", ", ends[0], "), remote [", overlap.start[1], ", ",
                           ends[1], "); pass num_tokens, or ask coverage() what they share");
            }
        } else if (const auto wanted = static_cast<std::uint64_t>(table.num_tokens);
                   wanted > overlap.begin && ends[side] < wanted) {
            plan_error("group ", index, ": num_tokens is ", wanted, ", but the ", kSideNames[side],
                       " table ends at ", ends[side]);
        }
    }
}

}  // namespace

BlockTables::BlockTables(std::shared_ptr<const Plan> plan, std::span<const Table> tables)
    : plan_(std::move(plan)) {
    const std::vector<GroupPair>& pairs = plan_->groups();
    if (tables.size() != pairs.size()) {
        plan_error("the plan has ", pairs.size(), " groups, got tables for ", tables.size());
    }
    for (std::size_t i = 0; i < tables.size(); ++i) {
        const Table& table = tables[i];
        const Overlap overlap = plan_->overlap(i, table);
        check_ends(i, pairs[i], table, overlap);
        GroupTables& group = groups_.emplace_back();
        group.overlap = overlap;
        for (std::size_t side = 0; side < 2; ++side) {
            group.ids[side].assign(table.ids[side].begin(), table.ids[side].end());
        }
    }
}

void BlockTables::check_written_once(Side side) const {
    struct Use {
        std::uint64_t pool, block;
        std::size_t table, group, index;
    };
    std::vector<Use> uses;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        const GroupTables& group = groups_[i];
        // Entries beyond what moves may repeat: engines pad tables with a null block.
        for (std::size_t at = group.overlap.first[side]; at < group.overlap.last[side]; ++at) {
            const GroupPair& pair = plan_->groups()[i];
            uses.push_back({pair.pool[side], group.ids[side][at], pair.table[side], i, at});
        }
    }
    radix_sort_by(uses, [](const Use& use) { return use.block; });
    radix_sort_by(uses, [](const Use& use) { return use.pool; });
    for (std::size_t i = 1; i < uses.size(); ++i) {
        const Use& a = uses[i - 1];
        const Use& b = uses[i];
        // Groups that share a table are at different bytes of its blocks.
        if (a.pool == b.pool && a.block == b.block && (a.table != b.table || a.group == b.group)) {
            plan_error("group ", b.group, ": ", kSideNames[side], " block ", b.block, " at index ",
                       b.index, " would be written twice; it is also at index ", a.index,
                       " of group ", a.group);
        }
    }
}

/// Pair up the slots of a group, in order of local block.
Expansion::PairedGroup Expansion::pair_slots(const std::array<Paging, 2>& paging,
                                             const BlockTables::GroupTables& tables) {
    const std::uint64_t tokens = paging[0].tokens_per_slot;
    const std::uint64_t begin = tables.overlap.begin / tokens;
    const std::uint64_t end = tables.overlap.end / tokens;
    PairedGroup paired;
    Cursor local(paging[0], tables.overlap.start[0] / tokens, begin);
    Cursor remote(paging[1], tables.overlap.start[1] / tokens, begin);
    std::size_t local_index = 0;
    std::size_t remote_index = 0;
    SlotRange open{0, 0, 0};
    const auto close = [&] {
        if (open.count != 0) {
            paired.append(tables.ids[0][local_index], tables.ids[1][remote_index], open);
        }
    };
    for (std::uint64_t at = begin; at < end;) {
        std::uint64_t step = std::max(local.skip(), remote.skip());
        if (step == 0) {
            step = std::min({local.available(), remote.available(), end - at});
            if (local.index() == local_index && remote.index() == remote_index &&
                local.slot() == open.local_slot + open.count &&
                remote.slot() == open.remote_slot + open.count) {
                open.count += step;
            } else {
                close();
                local_index = local.index();
                remote_index = remote.index();
                open = {local.slot(), remote.slot(), step};
            }
        }
        at += step;
        local.advance(step);
        remote.advance(step);
    }
    close();
    radix_sort_by(paired.pairs, [&](const BlockPair& pair) {
        return pair.local_block * paging[0].slots + paired.slots[pair.slots].local_slot;
    });
    return paired;
}

void Expansion::PairedGroup::append(std::uint64_t local_block, std::uint64_t remote_block,
                                    const SlotRange& range) {
    if (slots.empty() || slots[last] != range) {  // seldom
        const auto [entry, is_new] = known.try_emplace(range, slots.size());
        last = entry->second;
        if (is_new) {
            slots.push_back(range);
            uses.push_back(0);
        }
    }
    ++uses[last];
    pairs.push_back({local_block, remote_block, last});
}

Expansion::Expansion(const BlockTables& tables) : plan_(*tables.plan()) {
    for (std::size_t i = 0; i < tables.groups().size(); ++i) {
        const GroupPair& group = plan_.groups()[i];
        paired_.push_back(pair_slots(group.paging, tables.groups()[i]));
        const PairedGroup& paired = paired_.back();
        for (std::size_t j = 0; j < paired.slots.size(); ++j) {
            bytes_ = add(bytes_, mul(mul(paired.uses[j], paired.slots[j].count), group.slot_bytes));
        }
    }
    for (const RunGroup& part : plan_.run_groups()) {
        const PairedGroup& paired = paired_[part.group];
        first_template_.push_back(template_end_.size());
        for (std::size_t i = 0; i < paired.slots.size(); ++i) {
            const std::vector<Run> runs = plan_.runs(part, paired.slots[i]);
            runs_.insert(runs_.end(), runs.begin(), runs.end());
            template_end_.push_back(runs_.size());
            num_runs_ += paired.uses[i] * runs.size();
        }
    }
    bound_ = num_runs_ + static_cast<std::size_t>(bytes_ / plan_.max_bytes());
}

template <class Visit>
void Expansion::for_each_run(Visit visit) const {
    for (std::size_t i = 0; i < plan_.run_groups().size(); ++i) {
        for (const BlockPair& pair : paired_[plan_.run_groups()[i].group].pairs) {
            const std::size_t at = first_template_[i] + pair.slots;
            const Run* const last = runs_.data() + template_end_[at];
            for (const Run* run = runs_.data() + template_end_[at - 1]; run != last; ++run) {
                visit(run->address[0] + pair.local_block * run->block_stride[0],
                      run->address[1] + pair.remote_block * run->block_stride[1], *run);
            }
        }
    }
}

std::size_t Expansion::emit(Descriptor* local, Descriptor* remote) const {
    RowWriter writer(local, remote, plan_.max_bytes());
    for_each_run([&](std::uint64_t a, std::uint64_t b, const Run& run) {
        writer.push(a, b, run.length, run.span[0], run.span[1]);
    });
    if (writer.is_ascending()) {
        return writer.finish();
    }
    // Run groups of different groups or odd strides interleave in local memory.
    struct Flat {
        std::uint64_t local, remote;
        const Run* run;
    };
    std::vector<Flat> all;
    all.reserve(num_runs_);
    for_each_run(
        [&](std::uint64_t a, std::uint64_t b, const Run& run) { all.push_back({a, b, &run}); });
    radix_sort_by(all, [](const Flat& flat) { return flat.local; });
    RowWriter sorted(local, remote, plan_.max_bytes());
    for (const Flat& flat : all) {
        sorted.push(flat.local, flat.remote, flat.run->length, flat.run->span[0],
                    flat.run->span[1]);
    }
    return sorted.finish();
}

void Expansion::emit(std::vector<Descriptor>& local, std::vector<Descriptor>& remote) const {
    local.resize(bound());
    remote.resize(bound());
    const std::size_t count = emit(local.data(), remote.data());
    local.resize(count);
    remote.resize(count);
}

}  // namespace pynixlkv::kv
