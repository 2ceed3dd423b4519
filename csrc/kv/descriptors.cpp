/// @file
/// Block tables through a plan: which slots pair up, then their runs, merged and cut.
#include <algorithm>
#include <string>

#include "kv/plan.hpp"
#include "kv/radix.hpp"
#include "kv/words.hpp"

namespace pynixlkv::kv {

namespace {

constexpr std::array<const char*, 2> kSideNames{"local", "remote"};

std::string group_name(std::size_t group) {
    return "group " + std::to_string(group) + ": ";
}

std::span<const std::int64_t> ids(const Table& table, std::size_t side) {
    return side == 0 ? table.local : table.remote;
}

std::uint64_t start(const Table& table, std::size_t side, const Paging& paging, std::size_t group) {
    const std::int64_t value = side == 0 ? table.local_start : table.remote_start;
    if (value < 0 || static_cast<std::uint64_t>(value) % paging.unit() != 0) {
        plan_error(group_name(group), kSideNames[side], "_start is ", value,
                   ", must be a multiple of the ", paging.unit(),
                   " tokens that a block stands for");
    }
    return static_cast<std::uint64_t>(value);
}

void check_ids(const Table& table, std::size_t side, const Paging& paging, std::size_t group) {
    const auto blocks = ids(table, side);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (std::cmp_less(blocks[i], 0) || std::cmp_greater_equal(blocks[i], paging.num_blocks)) {
            plan_error(group_name(group), kSideNames[side], " block ", blocks[i], " at index ", i,
                       " must be from 0 to ", paging.num_blocks - 1);
        }
    }
}

/// Walks the positions of a sequence on one side.
class Cursor {
  public:
    Cursor(const Paging& paging, std::uint64_t table_start, std::uint64_t begin)
        : paging_(paging),
          index_((begin - table_start) / paging.unit()),
          offset_((begin - table_start) % paging.unit()) {
        settle();
    }

    /// Entry of the table.
    [[nodiscard]] std::size_t index() const noexcept { return static_cast<std::size_t>(index_); }
    /// Slot in the block; meaningful if `skip()` is 0.
    [[nodiscard]] std::uint64_t slot() const noexcept { return slot_; }
    /// Consecutive positions from here on that are this side's and in this block.
    [[nodiscard]] std::uint64_t available() const noexcept { return available_; }
    /// Positions until it is this side's turn.
    [[nodiscard]] std::uint64_t skip() const noexcept { return skip_; }

    void advance(std::uint64_t positions) {
        offset_ += positions;
        while (offset_ >= paging_.unit()) {
            offset_ -= paging_.unit();
            ++index_;
        }
        settle();
    }

  private:
    void settle() {
        if (paging_.ranks == 1) {  // the general case without its divisions
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

/// Joins rows that continue the one before on both sides, and cuts what is too long.
class RowWriter {
  public:
    RowWriter(Row* local, Row* remote, std::uint64_t max_bytes)
        : local_(local), remote_(remote), max_bytes_(max_bytes) {}

    void push(std::uint64_t local, std::uint64_t remote, std::uint64_t length,
              const Span* local_span, const Span* remote_span) {
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

    Row* local_;
    Row* remote_;
    std::uint64_t max_bytes_;
    std::size_t count_ = 0;
    bool is_ascending_ = true;
    std::uint64_t local_begin_ = 0;
    std::uint64_t local_end_ = 0;
    std::uint64_t remote_end_ = 0;
    const Span* local_span_ = nullptr;
    const Span* remote_span_ = nullptr;
};

}  // namespace

std::vector<Table> tables_from_flat(std::span<const std::int64_t> ids,
                                    std::span<const std::int64_t> headers) {
    if (headers.size() % kTableWords != 0) {
        plan_error("table headers must come in groups of ", kTableWords, " words, got ",
                   headers.size());
    }
    std::vector<Table> tables(headers.size() / kTableWords);
    for (std::size_t i = 0; i < tables.size(); ++i) {
        const auto header = headers.subspan(i * kTableWords, kTableWords);
        for (std::size_t side = 0; side < 2; ++side) {
            const auto count = static_cast<std::uint64_t>(header[side]);
            if (count > ids.size()) {
                plan_error(group_name(i), kSideNames[side], " table of ", header[side],
                           " blocks, but only ", ids.size(), " are left");
            }
            (side == 0 ? tables[i].local : tables[i].remote) = ids.first(count);
            ids = ids.subspan(count);
        }
        tables[i].num_tokens = header[2];
        tables[i].local_start = header[3];
        tables[i].remote_start = header[4];
    }
    if (!ids.empty()) {
        plan_error(ids.size(), " block ids belong to no table");
    }
    return tables;
}

Cover Plan::cover(std::size_t group, const Table& table) const {
    const PlanGroup& sides = groups_.at(group);
    Cover cover;
    cover.end = kMaxWord;
    for (std::size_t side = 0; side < 2; ++side) {
        const Paging& paging = sides.paging[side];
        check_ids(table, side, paging, group);
        cover.start[side] = start(table, side, paging, group);
        cover.begin = std::max(cover.begin, cover.start[side]);
        cover.end = std::min(cover.end,
                             add(cover.start[side], mul(ids(table, side).size(), paging.unit())));
    }
    if (table.num_tokens >= 0) {
        auto wanted = static_cast<std::uint64_t>(table.num_tokens);
        if (sides.whole) {
            const std::uint64_t unit = sides.paging[0].unit();
            wanted = mul(wanted / unit + (wanted % unit == 0 ? 0 : 1), unit);
        }
        cover.end = std::min(cover.end, wanted);
    }
    cover.end = std::max(cover.begin, cover.end);
    for (std::size_t side = 0; side < 2; ++side) {
        const std::uint64_t unit = sides.paging[side].unit();
        cover.first[side] = (cover.begin - cover.start[side]) / unit;
        cover.last[side] = cover.begin == cover.end
                               ? cover.first[side]
                               : (cover.end - cover.start[side] + unit - 1) / unit;
    }
    return cover;
}

void Plan::require_tables(Tables tables) const {
    if (tables.size() != groups_.size()) {
        plan_error("the plan has ", groups_.size(), " groups, got tables for ", tables.size());
    }
}

void Plan::check(Tables tables, Side written) const {
    require_tables(tables);
    const auto side = static_cast<std::size_t>(written);
    struct Use {
        std::uint64_t pool, block;
        std::size_t group, index;
    };
    std::vector<Use> uses;
    for (std::size_t group = 0; group < tables.size(); ++group) {
        // Entries beyond what moves may repeat: engines pad tables with a null block.
        const Cover cover = require_cover(group, tables[group]);
        const auto blocks = ids(tables[group], side);
        for (std::size_t i = cover.first[side]; i < cover.last[side]; ++i) {
            uses.push_back(
                {groups_[group].pool[side], static_cast<std::uint64_t>(blocks[i]), group, i});
        }
    }
    radix_sort_by(uses, [](const Use& use) { return use.block; });
    radix_sort_by(uses, [](const Use& use) { return use.pool; });
    for (std::size_t i = 1; i < uses.size(); ++i) {
        const Use& a = uses[i - 1];
        const Use& b = uses[i];
        if (a.pool == b.pool && a.block == b.block) {
            plan_error(group_name(b.group), kSideNames[side], " block ", b.block, " at index ",
                       b.index, " would be written twice; it is also at index ", a.index,
                       " of group ", a.group);
        }
    }
}

std::uint64_t Plan::bytes(Tables tables) const {
    return Expansion(*this, tables).bytes();
}

void Plan::expand(Tables tables, std::vector<Row>& local, std::vector<Row>& remote) const {
    const Expansion expansion(*this, tables);
    local.resize(expansion.bound());
    remote.resize(expansion.bound());
    const std::size_t count = expansion.emit(local.data(), remote.data());
    local.resize(count);
    remote.resize(count);
}

std::vector<std::uint64_t> Plan::block_runs(std::size_t group) const {
    const Paging& local = groups_.at(group).paging[0];
    const Paging& remote = groups_.at(group).paging[1];
    const Shape shape{0, 0, std::min(local.slots, remote.slots)};
    std::vector<std::uint64_t> lengths;
    for (const Lane& lane : lanes_) {
        if (lane.group == group) {
            for (const Run& run : lane_runs(lane, shape)) {
                lengths.push_back(run.length);
            }
        }
    }
    return lengths;
}

void Plan::append_runs(const Nest& nest, const Shape& shape, std::vector<Run>& out) const {
    auto loops = nest.loops;
    loops[nest.token_loop].count = shape.count;
    const auto& token_stride = loops[nest.token_loop].stride;
    Run run{{nest.base[0] + shape.local_slot * token_stride[0],
             nest.base[1] + shape.remote_slot * token_stride[1]},
            nest.length,
            nest.block_stride,
            {&spans_[0][nest.span[0]], &spans_[1][nest.span[1]]}};
    // Innermost loops that continue the run on both sides become part of it.
    std::size_t depth = loops.size();
    while (depth > 0 &&
           (loops[depth - 1].count == 1 || (loops[depth - 1].stride[0] == run.length &&
                                            loops[depth - 1].stride[1] == run.length))) {
        run.length *= loops[--depth].count;
    }
    const std::size_t first = out.size();
    out.push_back(run);
    for (std::size_t level = 0; level < depth; ++level) {
        const std::size_t last = out.size();
        const std::vector<Run> outer(out.begin() + static_cast<std::ptrdiff_t>(first),
                                     out.begin() + static_cast<std::ptrdiff_t>(last));
        out.resize(first);
        for (const Run& at : outer) {
            Run next = at;
            for (std::uint64_t i = 0; i < loops[level].count; ++i) {
                out.push_back(next);
                next.address[0] += loops[level].stride[0];
                next.address[1] += loops[level].stride[1];
            }
        }
    }
}

/// Runs of the blocks numbered 0, ascending by local address, merged.
std::vector<Plan::Run> Plan::lane_runs(const Lane& lane, const Shape& shape) const {
    std::vector<Run> runs;
    for (std::size_t i = lane.first_nest; i < lane.last_nest; ++i) {
        append_runs(nests_[i], shape, runs);
    }
    radix_sort_by(runs, [](const Run& run) { return run.address[0]; });
    std::size_t kept = 0;
    for (std::size_t i = 1; i < runs.size(); ++i) {
        Run& a = runs[kept];
        const Run& b = runs[i];
        if (a.address[0] + a.length == b.address[0] && a.address[1] + a.length == b.address[1] &&
            a.block_stride == b.block_stride && a.span == b.span) {
            a.length += b.length;
        } else {
            runs[++kept] = b;
        }
    }
    runs.resize(kept + 1);
    return runs;
}

/// The positions to move, if the tables cover all of them.
Cover Plan::require_cover(std::size_t index, const Table& table) const {
    const PlanGroup& group = groups_[index];
    const Cover cover = this->cover(index, table);
    std::array<std::uint64_t, 2> ends{};
    for (std::size_t side = 0; side < 2; ++side) {
        ends[side] = cover.start[side] + ids(table, side).size() * group.paging[side].unit();
    }
    for (std::size_t side = 0; side < 2; ++side) {
        if (table.num_tokens < 0) {
            // The last block of each table must be needed, at least in part.
            const std::uint64_t other_end = ends[1 - side];
            if (ends[side] > other_end && ends[side] - other_end >= group.paging[side].unit()) {
                plan_error(group_name(index), "the tables cover different tokens: local [",
                           cover.start[0], ", ", ends[0], "), remote [", cover.start[1], ", ",
                           ends[1], "); pass num_tokens, or ask coverage() what they share");
            }
        } else if (const auto wanted = static_cast<std::uint64_t>(table.num_tokens);
                   wanted > cover.begin && ends[side] < wanted) {
            plan_error(group_name(index), "num_tokens is ", wanted, ", but the ", kSideNames[side],
                       " table ends at ", ends[side]);
        }
    }
    return cover;
}

/// Check the tables of a group and pair up their slots, in order of local block.
Expansion::Work Expansion::split(const Plan& plan, std::size_t index, const Table& table) {
    const Plan::PlanGroup& group = plan.groups_[index];
    const Cover cover = plan.require_cover(index, table);
    Work work;
    Cursor local(group.paging[0], cover.start[0], cover.begin);
    Cursor remote(group.paging[1], cover.start[1], cover.begin);
    Pair open{};
    for (std::uint64_t at = cover.begin; at < cover.end;) {
        std::uint64_t step = std::max(local.skip(), remote.skip());
        if (step == 0) {
            step = std::min({local.available(), remote.available(), cover.end - at});
            const Pair next{local.index(), remote.index(), {local.slot(), remote.slot(), step}};
            if (!open.extend(next)) {
                work.close(open, table);
                open = next;
            }
        }
        at += step;
        local.advance(step);
        remote.advance(step);
    }
    work.close(open, table);
    radix_sort_by(work.pieces, [&](const Piece& piece) {
        return piece.local_block * group.paging[0].slots + work.shapes[piece.shape].local_slot;
    });
    return work;
}

bool Expansion::Pair::extend(const Pair& next) {
    const bool continues = next.local == local && next.remote == remote &&
                           next.shape.local_slot == shape.local_slot + shape.count &&
                           next.shape.remote_slot == shape.remote_slot + shape.count;
    shape.count += continues ? next.shape.count : 0;
    return continues;
}

void Expansion::Work::close(const Pair& pair, const Table& table) {
    if (pair.shape.count == 0) {
        return;  // the pair before the first
    }
    if (shapes.empty() || !(shapes[shape] == pair.shape)) {  // mostly the same again
        const auto [entry, is_new] = known.try_emplace(pair.shape, shapes.size());
        shape = entry->second;
        if (is_new) {
            shapes.push_back(pair.shape);
            uses.push_back(0);
        }
    }
    ++uses[shape];
    pieces.push_back({static_cast<std::uint64_t>(table.local[pair.local]),
                      static_cast<std::uint64_t>(table.remote[pair.remote]), shape});
}

Expansion::Expansion(const Plan& plan, Tables tables) : plan_(plan) {
    plan.require_tables(tables);
    for (std::size_t group = 0; group < tables.size(); ++group) {
        work_.push_back(split(plan, group, tables[group]));
        const Work& work = work_.back();
        for (std::size_t i = 0; i < work.shapes.size(); ++i) {
            bytes_ = add(bytes_, mul(mul(work.uses[i], work.shapes[i].count),
                                     plan.groups_[group].slot_bytes));
        }
    }
    for (const Plan::Lane& lane : plan.lanes_) {
        const Work& work = work_[lane.group];
        lane_templates_.push_back(template_end_.size());
        for (std::size_t i = 0; i < work.shapes.size(); ++i) {
            const std::vector<Run> runs = plan.lane_runs(lane, work.shapes[i]);
            runs_.insert(runs_.end(), runs.begin(), runs.end());
            template_end_.push_back(runs_.size());
            num_runs_ += work.uses[i] * runs.size();
        }
    }
    bound_ = num_runs_ + static_cast<std::size_t>(bytes_ / plan.max_bytes_);
}

template <class Visit>
void Expansion::for_each_run(Visit visit) const {
    for (std::size_t i = 0; i < plan_.lanes_.size(); ++i) {
        for (const Piece& piece : work_[plan_.lanes_[i].group].pieces) {
            const std::size_t at = lane_templates_[i] + piece.shape;
            const Run* const last = runs_.data() + template_end_[at];
            for (const Run* run = runs_.data() + template_end_[at - 1]; run != last; ++run) {
                visit(run->address[0] + piece.local_block * run->block_stride[0],
                      run->address[1] + piece.remote_block * run->block_stride[1], *run);
            }
        }
    }
}

std::size_t Expansion::emit(Row* local, Row* remote) const {
    RowWriter writer(local, remote, plan_.max_bytes_);
    for_each_run([&](std::uint64_t a, std::uint64_t b, const Run& run) {
        writer.push(a, b, run.length, run.span[0], run.span[1]);
    });
    if (writer.is_ascending()) {
        return writer.finish();
    }
    // Lanes of different groups or odd strides interleave in local memory.
    struct Flat {
        std::uint64_t local, remote;
        const Run* run;
    };
    std::vector<Flat> all;
    all.reserve(num_runs_);
    for_each_run(
        [&](std::uint64_t a, std::uint64_t b, const Run& run) { all.push_back({a, b, &run}); });
    radix_sort_by(all, [](const Flat& flat) { return flat.local; });
    RowWriter sorted(local, remote, plan_.max_bytes_);
    for (const Flat& flat : all) {
        sorted.push(flat.local, flat.remote, flat.run->length, flat.run->span[0],
                    flat.run->span[1]);
    }
    return sorted.finish();
}

}  // namespace pynixlkv::kv
