#include "ucx/lane.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/bytes.hpp"
#include "base/text.hpp"
#include "ucx/address.hpp"
#include "ucx/peer_memory.hpp"

namespace pynixlkv::ucx {

namespace {

using transfer::Op;

/// Most bytes of a system call, and most calls of a turn in each direction.
constexpr std::uint64_t kCallBytes = 512U << 10U;
constexpr int kMaxCalls = 4;
/// Where many bytes are to come, the kernel wakes this end for so many at once. Kernels before 5.9
/// may forget to when memory is short, so this end also looks by itself.
constexpr int kWakeBytes = 256 << 10;
constexpr auto kLookEvery = std::chrono::milliseconds(10);
/// Bytes between two looks at what else is to be sent.
constexpr std::uint64_t kChunkBytes = 4U << 20U;
constexpr std::uint32_t kMaxRows = 1U << 16U;        ///< of a request
constexpr std::size_t kMaxWaitingRows = 1U << 19U;   ///< of all reads of a lane
constexpr std::uint64_t kMaxRowBytes = 1ULL << 46U;  ///< so that sums do not overflow
constexpr std::uint64_t kMaxReason = 4096;
constexpr std::size_t kMaxEnds = 1U << 20U;
/// Most lanes that have not shown the token; the oldest go first.
constexpr std::size_t kMaxStrangers = 64;
constexpr std::size_t kMaxPlaces = 16;
/// Most lanes that are served; also, no more than half of the process's descriptors.
constexpr rlim_t kMaxServed = 1U << 14U;
/// Longest wait for an owner's answer to a hello.
constexpr auto kAnswerDeadline = std::chrono::seconds(15);
constexpr int kEventsOfTurn = 64;
constexpr std::uint64_t kWorkerEvent = 0;
constexpr unsigned kMaxPort = 65535;

std::array<char, 64U << 10U> scratch;        // takes the bytes of ended transfers; never read
const std::array<char, 64U << 10U> zeros{};  // in place of those that are gone
constexpr const char* kNotMapped = ", but the local memory is no longer mapped";

template <class T>
std::string_view bytes_of(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// A piece for bytes that were announced and are gone.
iovec some_zeros(std::uint64_t most) {
    return {const_cast<char*>(zeros.data()), std::min<std::uint64_t>(most, zeros.size())};
}

int new_socket(int family) {
    return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

void set_option(int fd, int level, int option, int value) {
    (void)::setsockopt(fd, level, option, &value, sizeof value);
}

void set_options(int fd) {
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    // As agents have UCX do: a host that has vanished is noticed within a quarter of a minute.
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

std::size_t max_served() {
    rlimit limit{};
    (void)::getrlimit(RLIMIT_NOFILE, &limit);
    return std::min(limit.rlim_cur / 2, kMaxServed);
}

/// A socket that listens at an address, on a port of a range; -1 if there is none.
int listen_at(std::string_view ip, PortRange ports, SocketAddress& place) {
    for (std::uint32_t port = ports.first; port <= ports.last; ++port) {
        if (!place.set(ip, static_cast<std::uint16_t>(port))) {
            break;
        }
        const int fd = new_socket(place.any.sa_family);
        set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
        if (::bind(fd, &place.any, place.size) == 0 && ::listen(fd, SOMAXCONN) == 0 &&
            ::getsockname(fd, &place.any, &place.size) == 0) {
            return fd;
        }
        if (fd >= 0) {
            ::close(fd);
        }
    }
    return -1;
}

}  // namespace

PortRange PortRange::read(const std::string& text) {
    unsigned first = 0;
    unsigned last = 0;
    const int count = std::sscanf(text.c_str(), "%u-%u", &first, &last);
    if (count < 1 || first > kMaxPort || (count == 2 && (last < first || last > kMaxPort))) {
        return {};
    }
    return {static_cast<std::uint16_t>(first),
            static_cast<std::uint16_t>(count == 2 ? last : first)};
}

// ---- rows

template <class Accept>
std::size_t Flow::gather(std::vector<iovec>& into, std::uint64_t most, Accept accept) const {
    std::size_t bytes = 0;
    std::uint64_t done = done_;
    for (std::size_t i = next_; i < rows_.size() && into.size() < kMaxPieces && bytes < most; ++i) {
        const iovec piece{static_cast<char*>(rows_[i].iov_base) + done,
                          std::min<std::size_t>(rows_[i].iov_len - done, most - bytes)};
        if (!accept(piece)) {
            break;
        }
        into.push_back(piece);
        bytes += piece.iov_len;
        done = 0;
    }
    return bytes;
}

void Flow::advance(std::uint64_t bytes) {
    left_ -= bytes;
    done_ += bytes;
    while (next_ < rows_.size() && done_ >= rows_[next_].iov_len) {
        done_ -= rows_[next_++].iov_len;
    }
}

// ---- both ends

Lane::~Lane() {
    ::close(fd_);
}

void Lane::note_events(std::uint32_t events) noexcept {
    can_receive_ |= (events & ~std::uint32_t{EPOLLOUT}) != 0;
    can_send_ |= (events & ~std::uint32_t{EPOLLIN}) != 0;
}

bool Lane::progress() {
    if (wake_bytes_ > 1 && !can_receive_) {
        const auto now = std::chrono::steady_clock::now();
        if (now - looked_at_ > kLookEvery) {
            can_receive_ = true;
            looked_at_ = now;
        }
    }
    bool worked = false;
    for (int i = 0; i < kMaxCalls && can_receive_ && !is_broken_ && receive_more(); ++i) {
        worked = true;
    }
    for (int i = 0; i < kMaxCalls && can_send_ && !is_broken_ && send_more(); ++i) {
        worked = true;
    }
    return worked;
}

Lane::Moved Lane::send(std::vector<iovec>& pieces, std::uint64_t& bytes) {
    if (!head_.empty()) {
        pieces.insert(pieces.begin(), {head_.data(), head_.size()});
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    const ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent < 0) {
        can_send_ = errno != EAGAIN;
        is_broken_ |= errno != EAGAIN && errno != EINTR && errno != EFAULT;
        return errno == EFAULT ? Moved::kFault : Moved::kNothing;
    }
    const std::size_t of_head = std::min<std::size_t>(static_cast<std::size_t>(sent), head_.size());
    head_.erase(0, of_head);
    bytes = static_cast<std::size_t>(sent) - of_head;
    return Moved::kSome;
}

Lane::Moved Lane::receive(std::vector<iovec>& pieces, std::uint64_t& bytes) {
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    const ssize_t received = ::recvmsg(fd_, &message, 0);
    if (received <= 0) {
        can_receive_ = received == 0 || errno != EAGAIN;
        is_broken_ |= received == 0 || (errno != EAGAIN && errno != EINTR && errno != EFAULT);
        return received < 0 && errno == EFAULT ? Moved::kFault : Moved::kNothing;
    }
    bytes = static_cast<std::size_t>(received);
    return Moved::kSome;
}

void Lane::expect(std::uint64_t bytes) {
    const int wake_bytes = bytes >= 4 * std::uint64_t{kWakeBytes} ? kWakeBytes : 1;
    if (std::exchange(wake_bytes_, wake_bytes) != wake_bytes) {
        set_option(fd_, SOL_SOCKET, SO_RCVLOWAT, wake_bytes);
        looked_at_ = std::chrono::steady_clock::now();
    }
}

bool Lane::receive_exactly(char* into, std::size_t size, std::size_t& done) {
    std::vector<iovec> rest{{into + done, size - done}};
    std::uint64_t bytes = 0;
    if (receive(rest, bytes) == Moved::kSome) {
        done += bytes;
    }
    return done == size;
}

bool Lane::discard(std::uint64_t& left) {
    std::vector<iovec> piece{{scratch.data(), std::min<std::uint64_t>(left, scratch.size())}};
    std::uint64_t bytes = 0;
    const bool is_moved = receive(piece, bytes) == Moved::kSome;
    left -= bytes;
    return is_moved;
}

// ---- the initiator

OwnLane::OwnLane(int fd, LaneHello hello, const SocketAddress& place)
    : Lane(fd), hello_(hello), place_(place) {
    say(bytes_of(hello_));
}

std::uint64_t OwnLane::left() const {
    return std::accumulate(
        xfers_.begin(), xfers_.end(), std::uint64_t{0},
        [](std::uint64_t sum, const auto& entry) { return sum + entry.second->flow_.left(); });
}

void OwnLane::post(LaneXfer& xfer) {
    xfer.number_ = ++last_;
    xfers_.emplace(last_, &xfer);
    to_send_.push_back(last_);
    (void)progress();
}

void OwnLane::remove(std::uint64_t number) {
    xfers_.erase(number);
    if (is_writing_ && to_send_.front() == number) {
        drop();  // in the middle of its bytes
        is_writing_ = false;
    }
    std::erase(to_send_, number);
}

void OwnLane::look_at_clock() {
    if (!is_ready_ && std::chrono::steady_clock::now() - since_ > kAnswerDeadline) {
        drop();
    }
}

bool OwnLane::send_more() {
    std::vector<iovec> pieces;
    std::uint64_t bytes = 0;
    if (!is_writing_ && !to_send_.empty() && is_ready_) {
        LaneXfer& xfer = *xfers_.at(to_send_.front());
        xfer.say_request([this](std::string_view part) { say(part); });
        if (xfer.op_ == Op::kRead) {
            to_send_.pop_front();
        } else {
            is_writing_ = true;
        }
    }
    if (has_said_all() && !is_writing_) {
        return false;
    }
    LaneXfer* const xfer = is_writing_ ? xfers_.at(to_send_.front()) : nullptr;
    if (xfer != nullptr && xfer->refusal_.empty()) {
        (void)xfer->flow_.gather(pieces, kCallBytes, [](const iovec&) { return true; });
    } else if (xfer != nullptr) {
        pieces.push_back(some_zeros(xfer->flow_.left()));
    }
    const Moved moved = send(pieces, bytes);
    if (xfer != nullptr) {
        if (moved == Moved::kFault) {
            xfer->refusal_ = kNotMapped;
        }
        xfer->flow_.advance(bytes);
        if (xfer->flow_.left() == 0) {
            is_writing_ = false;
            to_send_.pop_front();
        }
    }
    return moved != Moved::kNothing;
}

bool OwnLane::receive_more() {
    if (!is_ready_) {
        if (receive_exactly(reinterpret_cast<char*>(&answer_), sizeof answer_, in_done_)) {
            in_done_ = 0;
            is_ready_ = answer_ == hello_;
            if (!is_ready_) {
                drop();
            }
        }
        return is_ready_;
    }
    if (in_done_ < sizeof in_) {
        return receive_exactly(reinterpret_cast<char*>(&in_), sizeof in_, in_done_) && begin_body();
    }
    expect(in_.bytes);
    const auto found = xfers_.find(in_.xfer);
    LaneXfer* const xfer = found == xfers_.end() ? nullptr : found->second;
    bool is_moved = false;
    if (in_.kind == LaneHead::kEnd) {
        std::size_t done = reason_.size() - in_.bytes;
        is_moved = receive_exactly(reason_.data(), reason_.size(), done);
        in_.bytes = reason_.size() - done;
    } else if (xfer == nullptr || !xfer->refusal_.empty()) {
        is_moved = discard(in_.bytes);
    } else {
        std::vector<iovec> pieces;
        std::uint64_t bytes = 0;
        (void)xfer->flow_.gather(pieces, std::min(in_.bytes, kCallBytes),
                                 [](const iovec&) { return true; });
        const Moved moved = receive(pieces, bytes);
        if (moved == Moved::kFault) {
            xfer->refusal_ = kNotMapped;
        }
        xfer->flow_.advance(bytes);
        in_.bytes -= bytes;
        is_moved = moved != Moved::kNothing;
    }
    if (in_.bytes == 0) {
        end_body();
    }
    return is_moved;
}

/// Check what the owner announces.
bool OwnLane::begin_body() {
    const auto found = xfers_.find(in_.xfer);
    const bool is_end = in_.kind == LaneHead::kEnd;
    const bool fits =
        is_end
            ? in_.bytes <= kMaxReason
            : in_.kind == LaneHead::kData && in_.bytes > 0 &&
                  (found == xfers_.end() || !found->second->refusal_.empty() ||
                   (found->second->op_ == Op::kRead && in_.bytes <= found->second->flow_.left()));
    if (!fits) {
        drop();
        return false;
    }
    reason_.assign(is_end ? in_.bytes : 0, '\0');
    if (in_.bytes == 0) {
        end_body();
    }
    return true;
}

void OwnLane::end_body() {
    in_done_ = 0;
    const auto found = xfers_.find(in_.xfer);
    if (in_.kind != LaneHead::kEnd || found == xfers_.end()) {
        return;
    }
    LaneXfer& xfer = *found->second;
    if (xfer.refusal_.empty() && !reason_.empty()) {
        xfer.refusal_ = text(", which refuses: ", reason_);
    }
    if (xfer.refusal_.empty() && xfer.flow_.left() > 0) {
        drop();
    }
    xfer.is_over_ = true;
}

LaneXfer::LaneXfer(UcxConnection& connection, const LocalRegions& local_regions, Op op,
                   const transfer::DescriptorPairs& rows)
    : UcxXfer(connection, local_regions, op, rows) {
    for (const Part& part : parts_) {
        flow_.add(part.local, part.length);
    }
}

LaneXfer::~LaneXfer() {
    if (lane_) {
        lane_->remove(number_);
    }
}

void LaneXfer::begin() {
    lane_ = connection_.lane();
    if (lane_) {
        lane_->post(*this);
    }
}

void LaneXfer::say_request(const std::function<void(std::string_view)>& say) const {
    const bool is_read = op_ == Op::kRead;
    const LaneHead head{is_read ? LaneHead::kRead : LaneHead::kWrite,
                        static_cast<std::uint32_t>(parts_.size()), number_, flow_.left()};
    say(bytes_of(head));
    for (const Part& part : parts_) {
        say(bytes_of(LaneRow{part.remote, part.length}));
    }
}

bool LaneXfer::poll() {
    const char* call = op_ == Op::kRead ? "a served read" : "a served write";
    if (has_failed()) {
        fail(call);
    }
    if (!lane_) {
        begin();
    } else if (lane_->is_broken()) {
        throw transfer::ConnectionLost(make_error(Status::kConnectionReset, call, what()));
    }
    const bool is_quiet = is_over_ && (op_ == Op::kRead || flow_.left() == 0);
    if (is_quiet && !refusal_.empty()) {
        throw NativeError(make_error(Status::kInvalidAddr, call, text(what(), refusal_)));
    }
    return is_quiet;
}

// ---- the owner of the memory

bool ServedLane::take_hello() {
    if (in_done_ < sizeof hello_ &&
        !receive_exactly(reinterpret_cast<char*>(&hello_), sizeof hello_, in_done_)) {
        return false;
    }
    const bool has_token = hello_ == LaneHello{.token = token_, .connection = hello_.connection};
    is_stranger_ = !has_token;
    const Clients::Standing standing = clients_.standing(hello_.connection);
    if (has_token && standing == Clients::Standing::kUnknown) {
        return false;  // nothing else is sent before the answer
    }
    is_known_ =
        has_token && standing == Clients::Standing::kOpen && clients_.add_lane(hello_.connection);
    if (is_known_) {
        in_done_ = 0;
        ends_.append(bytes_of(hello_));
    } else {
        drop();
    }
    return is_known_;
}

void ServedLane::look_at_connection() {
    if (is_known_ && clients_.standing(hello_.connection) != Clients::Standing::kOpen) {
        drop();
    }
}

void ServedLane::say_end(std::uint64_t xfer, std::string_view refusal) {
    refusal = refusal.substr(0, kMaxReason);
    ends_.append(bytes_of(LaneHead{LaneHead::kEnd, 0, xfer, refusal.size()}));
    ends_.append(refusal);
    if (ends_.size() > kMaxEnds) {
        drop();  // a peer that asks and does not read
    }
}

bool ServedLane::may_move(const iovec& piece, Op op, std::string& reason) const {
    reason = refusal_of(*regions_,
                        {reinterpret_cast<std::uint64_t>(piece.iov_base), piece.iov_len, 0}, op);
    return reason.empty();
}

bool ServedLane::send_more() {
    if (chunk_left_ == 0) {
        say(std::exchange(ends_, {}));
        if (!reads_.empty()) {
            Read& read = reads_.front();
            std::vector<iovec> first;
            if (!may_send(read, 1, first)) {
                say_end(read.xfer, read.refusal);
                forget_read();
                return true;
            }
            chunk_left_ = std::min(read.flow.left(), kChunkBytes);
            say(bytes_of(LaneHead{LaneHead::kData, 0, read.xfer, chunk_left_}));
        } else if (has_said_all()) {
            return false;
        }
    }
    std::vector<iovec> pieces;
    std::uint64_t bytes = 0;
    Read* const read = chunk_left_ > 0 ? &reads_.front() : nullptr;
    const std::uint64_t most = std::min(chunk_left_, kCallBytes);
    if (read != nullptr && !may_send(*read, most, pieces)) {
        // The rest of the chunk was promised.
        pieces.push_back(some_zeros(most));
    }
    // The end travels with the last bytes: another message would cost as much as a small block.
    const LaneHead end{LaneHead::kEnd, 0, read != nullptr ? read->xfer : 0, 0};
    if (read != nullptr && read->refusal.empty() && length_of(pieces) == read->flow.left()) {
        pieces.push_back({const_cast<LaneHead*>(&end), sizeof end});
    }
    const Moved moved = send(pieces, bytes);
    if (read == nullptr) {
        return moved == Moved::kSome;
    }
    if (moved == Moved::kFault) {
        read->refusal = "its memory is no longer mapped";
    }
    const std::uint64_t of_rows = std::min(bytes, chunk_left_);
    read->flow.advance(of_rows);
    chunk_left_ -= of_rows;
    if (bytes > of_rows) {
        say(bytes_of(end).substr(bytes - of_rows));
        forget_read();
    } else if (chunk_left_ == 0 && (read->flow.left() == 0 || !read->refusal.empty())) {
        say_end(read->xfer, read->refusal);
        forget_read();
    }
    return moved != Moved::kNothing;
}

/// Gather what comes next of a read, as far as it may be sent.
bool ServedLane::may_send(Read& read, std::uint64_t most, std::vector<iovec>& pieces) const {
    std::string reason;
    if (read.refusal.empty() && read.flow.gather(pieces, most, [&](const iovec& piece) {
            return may_move(piece, Op::kRead, reason);
        }) == 0) {
        read.refusal = reason;
    }
    return read.refusal.empty();
}

void ServedLane::forget_read() {
    num_rows_ -= reads_.front().flow.num_rows();
    reads_.pop_front();
}

bool ServedLane::receive_more() {
    if (!is_known_) {
        return take_hello();
    }
    if (in_done_ < sizeof in_) {
        if (!receive_exactly(reinterpret_cast<char*>(&in_), sizeof in_, in_done_)) {
            return false;
        }
        const bool is_stale =
            in_.kind == LaneHead::kWrite && !clients_.may_write(hello_.connection);
        if (in_.kind > LaneHead::kWrite || in_.num_rows == 0 || in_.num_rows > kMaxRows ||
            is_stale) {
            drop();
            return false;
        }
        rows_.resize(in_.num_rows);
        rows_done_ = 0;
        return true;
    }
    const std::size_t row_bytes = rows_.size() * sizeof(LaneRow);
    if (rows_done_ < row_bytes) {
        return receive_exactly(reinterpret_cast<char*>(rows_.data()), row_bytes, rows_done_) &&
               take_request();
    }
    expect(in_.bytes);
    std::vector<iovec> pieces;
    std::uint64_t bytes = 0;
    Moved moved = Moved::kNothing;
    if (refusal_.empty()) {
        const std::size_t size = write_.gather(
            pieces, std::min(in_.bytes, kCallBytes),
            [&](const iovec& piece) { return may_move(piece, Op::kWrite, refusal_); });
        if (size > 0) {
            refusal_.clear();  // of a later piece
            moved = receive(pieces, bytes);
            if (moved == Moved::kFault) {
                refusal_ = "its memory is no longer mapped";
            }
            write_.advance(bytes);
            in_.bytes -= bytes;
        }
    } else if (discard(in_.bytes)) {
        moved = Moved::kSome;
    }
    if (in_.bytes == 0) {
        say_end(in_.xfer, std::exchange(refusal_, {}));
        in_done_ = 0;
    }
    return moved != Moved::kNothing || !refusal_.empty();
}

/// The rows of a request are there.
bool ServedLane::take_request() {
    Flow flow;
    for (const LaneRow& row : rows_) {
        if (row.length == 0 || row.length > kMaxRowBytes) {
            drop();
            return false;
        }
        flow.add(row.address, row.length);
    }
    if (flow.left() != in_.bytes) {
        drop();
        return false;
    }
    if (in_.kind == LaneHead::kWrite) {
        write_ = std::move(flow);
        refusal_.clear();
        return true;
    }
    num_rows_ += flow.num_rows();
    reads_.push_back({in_.xfer, std::move(flow), {}});
    in_done_ = 0;
    if (num_rows_ > kMaxWaitingRows) {
        drop();
    }
    return true;
}

// ---- all

Lanes::Lanes(std::string_view address, PortRange ports, int event_fd, const std::uint64_t& token,
             std::shared_ptr<const LocalRegions> regions, Clients& clients)
    // Close-on-exec is set by keep_from_children, which looks for what lacks it.
    : token_(token), regions_(std::move(regions)), clients_(clients), epoll_(::epoll_create1(0)) {
    if (epoll_ < 0) {
        throw Error("StateError", "epoll_create1 failed; the process may be out of descriptors");
    }
    if (!watch(event_fd, kWorkerEvent, EPOLLIN)) {
        ::close(epoll_);
        throw Error("StateError", "epoll_ctl failed; the user may have too many watches");
    }
    std::vector<std::string> ips = network_addresses(address);
    std::stable_partition(ips.begin(), ips.end(), [](const std::string& ip) {
        SocketAddress place;
        return place.set(ip, 0) && !place.is_link_local();
    });
    ByteWriter out;
    for (const std::string& ip : ips) {
        SocketAddress place;
        const int fd = listeners_.size() < kMaxPlaces ? listen_at(ip, ports, place) : -1;
        if (fd >= 0 && !watch(fd, last_ + 1, EPOLLIN | EPOLLET)) {
            ::close(fd);
        } else if (fd >= 0) {
            ++last_;
            listeners_.push_back(fd);
            out.put_bytes(ip);
            out.put(place.port());
        }
    }
    first_lane_ = last_ + 1;
    places_ = out.take();
}

Lanes::~Lanes() {
    for (const int fd : listeners_) {
        ::close(fd);
    }
    ::close(epoll_);
}

bool Lanes::watch(int fd, std::uint64_t number, std::uint32_t events) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = number;
    return ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0;
}

std::vector<std::shared_ptr<OwnLane>> Lanes::connect(std::string_view places, LaneHello hello,
                                                     bool is_local) {
    std::vector<std::shared_ptr<OwnLane>> lanes;
    ByteReader in(places, "the lanes of a peer");
    while (in.num_left() > 0 && lanes.size() < kMaxPlaces) {
        const std::string_view ip = in.get_bytes();
        SocketAddress place;
        if (!place.set(ip, in.get<std::uint16_t>()) || (place.is_loopback() && !is_local)) {
            continue;
        }
        if (auto lane = connect(place, hello)) {
            lanes.push_back(std::move(lane));
        }
    }
    return lanes;
}

std::shared_ptr<OwnLane> Lanes::connect(const SocketAddress& place, LaneHello hello) {
    const int fd = new_socket(place.any.sa_family);
    if (fd < 0) {
        return nullptr;
    }
    set_options(fd);
    if (::connect(fd, &place.any, place.size) != 0 && errno != EINPROGRESS) {
        ::close(fd);
        return nullptr;
    }
    auto lane = std::make_shared<OwnLane>(fd, hello, place);
    if (!watch(fd, ++last_, EPOLLIN | EPOLLOUT | EPOLLET)) {
        return nullptr;
    }
    own_.emplace(last_, lane);
    return lane;
}

void Lanes::accept_all(int listener) {
    for (int fd = 0;
         (fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) {
        set_options(fd);
        auto lane = std::make_unique<ServedLane>(fd, token_, regions_, clients_);
        if (!watch(fd, ++last_, EPOLLIN | EPOLLOUT | EPOLLET)) {
            continue;
        }
        served_.emplace(last_, std::move(lane));
        const std::size_t most = max_served();
        clients_.note_crowd(served_.size() > most / 2);
        if (served_.size() > most) {
            served_.erase(std::find_if(served_.begin(), served_.end(), [](const auto& entry) {
                return !entry.second->is_known();
            }));
        }
    }
    has_waiting_ |= errno != EAGAIN;
}

bool Lanes::take_events() {
    std::array<epoll_event, kEventsOfTurn> events{};
    const int count = ::epoll_wait(epoll_, events.data(), kEventsOfTurn, 0);
    bool has_some = false;
    for (int i = 0; i < count; ++i) {
        const epoll_event& event = events.at(static_cast<std::size_t>(i));
        const std::uint64_t number = event.data.u64;
        has_some |= number != kWorkerEvent;
        if (number != kWorkerEvent && number < first_lane_) {
            accept_all(listeners_[number - 1]);
        } else if (const auto served = served_.find(number); served != served_.end()) {
            served->second->note_events(event.events);
        } else if (const auto own = own_.find(number); own != own_.end()) {
            if (const auto lane = own->second.lock()) {
                lane->note_events(event.events);
            }
        }
    }
    return has_some;
}

bool Lanes::progress() {
    bool worked = take_events();
    if (std::exchange(has_waiting_, false)) {
        std::for_each(listeners_.begin(), listeners_.end(), [this](int fd) { accept_all(fd); });
    }
    std::size_t num_strangers = 0;
    std::erase_if(served_, [&](const auto& entry) {
        entry.second->look_at_connection();
        worked |= entry.second->progress();
        if (entry.second->is_stranger() && !entry.second->is_broken()) {
            ++num_strangers;
        }
        return entry.second->is_broken();
    });
    if (num_strangers > kMaxStrangers) {  // after a turn of each: many hellos may have waited
        std::erase_if(served_, [&](const auto& entry) {
            return entry.second->is_stranger() && num_strangers-- > kMaxStrangers;
        });
    }
    std::erase_if(own_, [&worked](const auto& entry) {
        const auto lane = entry.second.lock();
        if (lane) {
            worked |= lane->progress();
            lane->look_at_clock();
        }
        return !lane || lane->is_broken();
    });
    return worked;
}

}  // namespace pynixlkv::ucx
