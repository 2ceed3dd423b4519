#include "ucx/am_rma.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "base/bytes.hpp"
#include "base/text.hpp"

namespace pynixlkv::ucx {

namespace {

using transfer::Memory;
using transfer::Op;

/// Bytes of a message. With its default settings UCX sends up to 16,515 bytes over tcp at once and
/// without a copy (`UCX_PROTO_INFO=y` shows it); longer messages take twice as long.
constexpr std::size_t kPieceBytes = 16U << 10U;
/// Most pieces waiting for the socket.
constexpr std::size_t kMaxWaiting = 128;
/// Most pieces in a row for one client, so that the others are served too.
constexpr int kMaxPieces = 64;
/// Number of closed clients to remember.
constexpr std::size_t kMaxGone = 1024;

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

std::uint64_t new_connection_number() {
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
    const auto found = xfers_.find(header.xfer);
    if (found == xfers_.end()) {
        return;
    }
    AmRmaXfer& xfer = *found->second;
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
    connection_.send(
        make_header({.kind = AmRmaKind::kRead, .connection = connection_.number, .xfer = number_}),
        out.take());
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
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* to = reinterpret_cast<char*>(parts_[header.row].local + header.place);
    std::memcpy(to, data.data(), data.size());
    due_ -= data.size();
}

// ---- the owner of the memory

void AmRmaServer::on_message(const AmRmaHeader& header, std::string_view data) {
    const std::uint64_t number = header.connection;
    if (is_closed_ || (!clients_.contains(number) &&
                       std::find(gone_.begin(), gone_.end(), number) != gone_.end())) {
        return;
    }
    // Messages can overtake each other: a client's first need not be kOpen.
    Client& client = clients_[number];
    switch (header.kind) {
        case AmRmaKind::kOpen:
            client.address = data;
            break;
        case AmRmaKind::kClose:
            client.is_over = true;
            break;
        case AmRmaKind::kRead: {
            Read read{.xfer = header.xfer, .rows = {}};
            ByteReader in(data, "the rows of a read");
            for (std::size_t i = 0; i < data.size() / (2 * sizeof(std::uint64_t)); ++i) {
                const auto address = in.get<std::uint64_t>();
                read.rows.push_back({address, in.get<std::uint64_t>(), 0});
            }
            in.require_end();
            client.reads.push_back(std::move(read));
            break;
        }
        case AmRmaKind::kWrite:
            take_piece(client, header, data);
            break;
        default:
            throw Error("WireError", text("an unknown kind of served message, ",
                                          static_cast<unsigned>(header.kind)));
    }
}

std::string AmRmaServer::refusal(const Descriptor& row) const {
    try {
        const LocalRegion* hint = nullptr;
        return regions_->find(row, hint).memory_type == Memory::kDram
                   ? ""
                   : text(row.str(), " is not host memory");
    } catch (const Error& e) {
        return e.what();
    }
}

void AmRmaServer::take_piece(Client& client, const AmRmaHeader& header,
                             std::string_view data) const {
    auto& due = client.due.try_emplace(header.xfer, header.total).first->second;
    if (due == 0) {
        return;  // refused before
    }
    std::string reason =
        data.size() > due ? "it is longer than it said" : refusal({header.place, data.size(), 0});
    if (!reason.empty()) {
        due = 0;
        client.ends.push_back({header.xfer, std::move(reason)});
        return;
    }
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    std::memcpy(reinterpret_cast<char*>(header.place), data.data(), data.size());
    due -= data.size();
    if (due == 0) {
        client.due.erase(header.xfer);
        client.ends.push_back({header.xfer, {}});
    }
}

bool AmRmaServer::serve() {
    bool worked = false;
    for (auto at = clients_.begin(); at != clients_.end();) {
        Client& client = at->second;
        if (client.is_over || (client.endpoint && client.endpoint->failure())) {
            gone_.push_back(at->first);
            if (gone_.size() > kMaxGone) {
                gone_.pop_front();
            }
            clients_.extract(at++);
            worked = true;
            continue;
        }
        ++at;
        try {
            worked |= serve(client);
        } catch (const std::exception&) {
            client.is_over = true;  // it cannot be reached
            worked = true;
        }
    }
    return worked;
}

bool AmRmaServer::serve(Client& client) {
    if (!client.endpoint) {
        if (client.address.empty()) {
            return false;
        }
        client.endpoint = std::make_shared<Endpoint>(worker_, client.address, errors_);
        client.outbox = std::make_unique<Outbox>(client.endpoint);
    }
    int count = 0;
    for (; count < kMaxPieces && client.outbox->num_waiting() < kMaxWaiting; ++count) {
        if (!client.ends.empty()) {
            const End end = std::move(client.ends.front());
            client.ends.pop_front();
            client.outbox->send(make_header({.kind = AmRmaKind::kEnd, .xfer = end.xfer}),
                                end.refusal, "a client");
        } else if (!client.reads.empty()) {
            send_piece(client);
        } else {
            break;
        }
    }
    return count > 0;
}

void AmRmaServer::send_piece(Client& client) {
    Read& read = client.reads.front();
    if (read.next == read.rows.size()) {
        client.reads.pop_front();
        return;
    }
    const Descriptor& row = read.rows[read.next];
    // For each piece, because the row may have been deregistered since the last one.
    if (std::string reason = refusal(row); !reason.empty()) {
        client.ends.push_back({read.xfer, std::move(reason)});
        client.reads.pop_front();
        return;
    }
    const std::uint64_t length = std::min<std::uint64_t>(row.length - read.offset, kPieceBytes);
    // Copied, so that the row may be deregistered while the bytes wait for the socket.
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    std::string bytes(reinterpret_cast<const char*>(row.address + read.offset), length);
    client.outbox->send(make_header({.kind = AmRmaKind::kData,
                                     .row = static_cast<std::uint32_t>(read.next),
                                     .xfer = read.xfer,
                                     .place = read.offset}),
                        std::move(bytes), "a client");
    read.offset += length;
    if (read.offset == row.length) {
        read.offset = 0;
        if (++read.next == read.rows.size()) {
            client.reads.pop_front();
        }
    }
}

void AmRmaServer::close() {
    is_closed_ = true;
    while (!clients_.empty()) {
        clients_.extract(clients_.begin());
    }
}

}  // namespace pynixlkv::ucx
