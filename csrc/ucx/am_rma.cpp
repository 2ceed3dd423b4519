#include "ucx/am_rma.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "base/bytes.hpp"
#include "base/mappings.hpp"
#include "base/text.hpp"
#include "ucx/address.hpp"

namespace pynixlkv::ucx {

namespace {

using transfer::Op;

/// Bytes of a message. With its default settings UCX sends up to 16,515 bytes over tcp at once and
/// without a copy (`UCX_PROTO_INFO=y` shows it); longer messages take twice as long.
constexpr std::size_t kPieceBytes = 16U << 10U;
/// Most pieces waiting for the socket.
constexpr std::size_t kMaxWaiting = 128;
/// Most pieces in a row for one client, so that the others are served too.
constexpr int kMaxPieces = 64;
/// Number of closed clients to remember, and of clients that may be unopened.
constexpr std::size_t kMaxGone = 1024;
/// Most clients, and what is kept for one of them: more than any agent of ours asks for.
constexpr std::size_t kMaxClients = 1U << 14U;
constexpr std::size_t kMaxRows = 1U << 19U;
constexpr std::size_t kMaxWrites = 1U << 14U;

/// Whether memory of this process is mapped, as far as its length goes.
bool is_mapped(const Descriptor& row) {
    static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t begin = row.address / page * page;
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    return ::msync(reinterpret_cast<void*>(begin), row.address + row.length - begin, MS_ASYNC) == 0;
}

}  // namespace

std::string_view make_header(const AmRmaHeader& header) {
    return {reinterpret_cast<const char*>(&header), sizeof header};
}

std::optional<AmRmaHeader> read_header(std::string_view bytes) {
    if (bytes.size() != sizeof(AmRmaHeader)) {
        return std::nullopt;
    }
    AmRmaHeader header{};
    std::memcpy(&header, bytes.data(), sizeof header);
    return header;
}

std::uint64_t new_secret() {
    std::random_device random;
    std::uint64_t number = 0;
    while (number == 0) {
        number = std::uint64_t{random()} << 32U | random();
    }
    return number;
}

// ---- the initiator

std::uint64_t AmRmaXfers::add(AmRmaXfer* xfer) {
    xfers_.emplace(++last_, xfer);
    return last_;
}

void AmRmaXfers::on_message(const AmRmaHeader& header, std::string_view data) {
    if (header.kind == AmRmaKind::kOpened) {
        forget(header.connection);
        return;
    }
    const auto found = xfers_.find(header.xfer);
    if (found == xfers_.end()) {
        return;
    }
    AmRmaXfer& xfer = *found->second;
    if (header.connection != xfer.connection_.number) {
        return;
    }
    if (header.kind == AmRmaKind::kData) {
        xfer.on_data(header, data);
    } else if (data.empty()) {
        xfer.is_written_ = true;
    } else {
        xfer.refusal_ = data;
    }
}

AmRmaXfer::AmRmaXfer(std::shared_ptr<AmRmaXfers> all, UcxConnection& connection,
                     const LocalRegions& local_regions, Op op,
                     const transfer::DescriptorPairs& rows)
    : UcxXfer(connection, local_regions, op, rows), all_(std::move(all)) {
    for (const Part& part : parts_) {
        total_ += part.length;
    }
    due_ = total_;
}

void AmRmaXfer::post() {
    number_ = all_->add(this);
    if (op_ == Op::kRead) {
        ask();
    } else {
        write();
        if (completion_.is_quiet()) {
            check();
        }
    }
}

bool AmRmaXfer::poll() {
    if (op_ == Op::kWrite) {
        write();
        if (!completion_.is_quiet()) {
            return false;
        }
    }
    check();
    return op_ == Op::kRead ? due_ == 0 : is_written_;
}

void AmRmaXfer::ask() {
    ByteWriter out;
    for (const Part& part : parts_) {
        out.put(part.remote);
        out.put(part.length);
    }
    connection_.send({.kind = AmRmaKind::kRead, .xfer = number_}, out.take());
}

void AmRmaXfer::write() {
    while (next_ < parts_.size() && completion_.pending() < kMaxWaiting && refusal_.empty() &&
           !has_failed()) {
        const Part& part = parts_[next_];
        const std::uint64_t length = std::min<std::uint64_t>(part.length - offset_, kPieceBytes);
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        const auto* bytes = reinterpret_cast<const char*>(part.local + offset_);
        endpoint_->send(completion_,
                        make_header({.kind = AmRmaKind::kWrite,
                                     .token = connection_.token,
                                     .connection = connection_.number,
                                     .xfer = number_,
                                     .place = part.remote + offset_,
                                     .total = total_}),
                        {bytes, length});
        offset_ += length;
        if (offset_ == part.length) {
            offset_ = 0;
            ++next_;
        }
    }
}

/// @throws NativeError when it has failed
void AmRmaXfer::check() {
    const char* call = op_ == Op::kRead ? "a served read" : "a served write";
    if (!refusal_.empty()) {
        throw NativeError(
            make_error(Status::kInvalidAddr, call, text(what(), ", which refuses: ", refusal_)));
    }
    if (has_failed()) {
        fail(call);
    }
}

void AmRmaXfer::on_data(const AmRmaHeader& header, std::string_view data) {
    if (op_ != Op::kRead || header.row >= parts_.size() ||
        header.place > parts_[header.row].length ||
        data.size() > parts_[header.row].length - header.place || data.size() > due_) {
        refusal_ = "its answer does not fit the question";
        return;
    }
    const Part& part = parts_[header.row];
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* to = reinterpret_cast<char*>(part.local + header.place);
    if (!copy(to, data.data(), data.size(), part.is_fragile)) {
        refusal_ = "the local memory is no longer mapped";
        return;
    }
    due_ -= data.size();
}

// ---- the owner of the memory

void AmRmaServer::on_message(const AmRmaHeader& header, std::string_view data) {
    const std::uint64_t number = header.connection;
    if (is_closed_) {
        return;
    }
    if (!clients_.contains(number)) {
        if (clients_.size() >= kMaxClients ||
            std::find(gone_.begin(), gone_.end(), number) != gone_.end()) {
            return;
        }
        newest_.push_back(number);
        if (newest_.size() > kMaxGone) {
            const auto oldest = clients_.find(newest_.front());
            if (oldest != clients_.end() && oldest->second.address.empty()) {
                oldest->second.is_over = true;
                list(oldest->first, oldest->second);
            }
            newest_.pop_front();
        }
    }
    // Messages can overtake each other: a client's first need not be kOpen.
    Client& client = clients_[number];
    switch (header.kind) {
        case AmRmaKind::kOpen:
            if (client.address.empty() && is_plausible_address(data, own_address_)) {
                client.address = data;
            } else {
                client.is_over = true;
            }
            break;
        case AmRmaKind::kRead:
            take_read(client, header, data);
            break;
        case AmRmaKind::kWrite:
            take_piece(client, header, data);
            break;
        default:
            client.is_over = true;
    }
    list(number, client);
}

void AmRmaServer::list(std::uint64_t number, Client& client) {
    if (!std::exchange(client.is_listed, true)) {
        busy_.push_back(number);
    }
}

void AmRmaServer::take_read(Client& client, const AmRmaHeader& header,
                            std::string_view data) const {
    constexpr std::size_t kRowBytes = 2 * sizeof(std::uint64_t);
    const std::size_t count = data.size() / kRowBytes;
    client.num_rows += std::max<std::size_t>(count, 1);
    if (client.num_rows > kMaxRows || data.size() != count * kRowBytes) {
        client.is_over = true;
        return;
    }
    Read read{.xfer = header.xfer, .rows = {}};
    read.rows.reserve(count);
    ByteReader in(data, "the rows of a read");
    for (std::size_t i = 0; i < count; ++i) {
        const auto address = in.get<std::uint64_t>();
        read.rows.push_back({address, in.get<std::uint64_t>(), 0});
    }
    client.reads.push_back(std::move(read));
}

void AmRmaServer::take_piece(Client& client, const AmRmaHeader& header,
                             std::string_view data) const {
    if (client.due.size() >= kMaxWrites || client.ends.size() >= kMaxWrites) {
        client.is_over = true;
        return;
    }
    auto& due = client.due.try_emplace(header.xfer, header.total).first->second;
    if (due == 0) {
        return;  // refused before
    }
    const LocalRegion* region = nullptr;
    const Descriptor row{header.place, data.size(), 0};
    std::string reason =
        data.size() > due ? "it is longer than it said" : refusal_of(*regions_, row, Op::kWrite, region);
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* to = reinterpret_cast<char*>(row.address);
    if (reason.empty() &&
        !(is_mapped(row) && copy(to, data.data(), data.size(), region->is_fragile))) {
        reason = text(row.str(), " is no longer mapped");
    }
    if (!reason.empty()) {
        due = 0;
        client.ends.push_back({header.xfer, std::move(reason)});
        return;
    }
    due -= data.size();
    if (due == 0) {
        client.due.erase(header.xfer);
        client.ends.push_back({header.xfer, {}});
    }
}

void AmRmaServer::forget(std::uint64_t number) {
    gone_.push_back(number);
    if (gone_.size() > kMaxGone) {
        gone_.pop_front();
    }
    clients_.extract(number);
}

bool AmRmaServer::serve() {
    if (std::exchange(num_failures_seen_, worker_->num_failures()) != worker_->num_failures()) {
        for (auto& [number, client] : clients_) {
            if (client.endpoint && client.endpoint->failure()) {
                list(number, client);
            }
        }
    }
    bool worked = false;
    for (const std::uint64_t number : std::exchange(busy_, {})) {
        Client& client = clients_.at(number);  // only forget() removes, and once
        client.is_listed = false;
        try {
            worked |= serve(number, client);
        } catch (const std::exception&) {
            client.is_over = true;  // it cannot be reached
        }
        if (client.is_over || (client.endpoint && client.endpoint->failure())) {
            forget(number);
            worked = true;
        } else if (client.endpoint && !(client.ends.empty() && client.reads.empty())) {
            list(number, client);
        }
    }
    return worked;
}

bool AmRmaServer::serve(std::uint64_t number, Client& client) {
    if (client.address.empty() || client.is_over) {
        return false;
    }
    if (!client.endpoint) {
        client.endpoint = std::make_shared<Endpoint>(worker_, client.address, errors_);
        client.outbox = std::make_unique<Outbox>(client.endpoint);
        client.outbox->send(make_header({.kind = AmRmaKind::kOpened, .connection = number}), {},
                            "a client");
    }
    int count = 0;
    for (; count < kMaxPieces && client.outbox->num_waiting() < kMaxWaiting; ++count) {
        if (!client.ends.empty()) {
            const End end = std::move(client.ends.front());
            client.ends.pop_front();
            client.outbox->send(
                make_header({.kind = AmRmaKind::kEnd, .connection = number, .xfer = end.xfer}),
                end.refusal, "a client");
        } else if (!client.reads.empty()) {
            send_piece(number, client);
        } else {
            break;
        }
    }
    return count > 0;
}

void AmRmaServer::send_piece(std::uint64_t number, Client& client) const {
    Read& read = client.reads.front();
    const auto end_read = [&client] {
        client.num_rows -= std::max<std::size_t>(client.reads.front().rows.size(), 1);
        client.reads.pop_front();
    };
    if (read.next == read.rows.size()) {
        end_read();
        return;
    }
    const Descriptor& row = read.rows[read.next];
    const std::uint64_t length = std::min<std::uint64_t>(row.length - read.offset, kPieceBytes);
    // For each piece, because the row may have been deregistered since the last one.
    const LocalRegion* region = nullptr;
    std::string reason = refusal_of(*regions_, row, Op::kRead, region);
    // Copied, so that the row may be deregistered while the bytes wait for the socket.
    std::string bytes;
    if (reason.empty()) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        const auto* from = reinterpret_cast<const char*>(row.address + read.offset);
        bool is_there = read.offset > 0 || is_mapped(row);
        if (!region->is_fragile && is_there) {
            bytes.assign(from, length);
        } else if (is_there) {
            bytes.resize(length);
            is_there = copy(bytes.data(), from, length, true);
        }
        if (!is_there) {
            reason = text(row.str(), " is no longer mapped");
        }
    }
    if (!reason.empty()) {
        client.ends.push_back({read.xfer, std::move(reason)});
        end_read();
        return;
    }
    client.outbox->send(make_header({.kind = AmRmaKind::kData,
                                     .row = static_cast<std::uint32_t>(read.next),
                                     .connection = number,
                                     .xfer = read.xfer,
                                     .place = read.offset}),
                        std::move(bytes), "a client");
    read.offset += length;
    if (read.offset == row.length) {
        read.offset = 0;
        if (++read.next == read.rows.size()) {
            end_read();
        }
    }
}

void AmRmaServer::close() {
    is_closed_ = true;
    busy_.clear();
    while (!clients_.empty()) {
        clients_.extract(clients_.begin());
    }
}

}  // namespace pynixlkv::ucx
