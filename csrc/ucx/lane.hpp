/// @file
/// Lanes: connections of TCP beside UCX's, for host memory where no transport is one-sided (tcp).
/// The kernel gathers and scatters the rows; nothing is copied in between. The owner checks its
/// registrations for every piece that it sends or receives, so that no other memory is reached.
///
/// UCX has an emulation too, but ends the owner's process when it cannot answer because the peer
/// has died: `ucp_request_try_send` in src/ucp/core/ucp_request.inl treats any failure of
/// `ucp_progress_get_reply` and `ucp_progress_rma_cmpl` in src/ucp/rma/rma_sw.c as fatal (1.18 to
/// 1.23).
#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ucx/clients.hpp"
#include "ucx/connection.hpp"
#include "ucx/regions.hpp"
#include "ucx/socket_address.hpp"

namespace pynixlkv::ucx {

class LaneXfer;

/// Rows that move through a socket, in order.
class Flow {
  public:
    /// Most pieces of one system call.
    static constexpr std::size_t kMaxPieces = 64;

    void add(std::uint64_t address, std::uint64_t length) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        rows_.push_back({reinterpret_cast<void*>(address), length});
        left_ += length;
    }
    [[nodiscard]] std::uint64_t left() const noexcept { return left_; }
    [[nodiscard]] std::size_t num_rows() const noexcept { return rows_.size(); }
    /// Append the pieces that come next, as many as fit and are accepted.
    /// @return their bytes
    template <class Accept>
    std::size_t gather(std::vector<iovec>& into, std::uint64_t most, Accept accept) const;
    void advance(std::uint64_t bytes);

  private:
    std::vector<iovec> rows_;
    std::size_t next_ = 0;
    std::uint64_t done_ = 0;  ///< bytes of that row
    std::uint64_t left_ = 0;
};

/// What precedes the rows of a request (kRead, kWrite), bytes (kData, and those of kWrite, which
/// follow its rows), or the reason of a refusal (kEnd; none if all is well).
struct LaneHead {
    enum Kind : std::uint32_t { kRead, kWrite, kData, kEnd };
    Kind kind;
    std::uint32_t num_rows;
    std::uint64_t xfer;
    std::uint64_t bytes;
};

struct LaneRow {
    std::uint64_t address;
    std::uint64_t length;
};

/// What both ends send first.
struct LaneHello {
    std::array<char, 8> magic = {'p', 'n', 'k', 'v', 'l', 'a', 'n', '1'};
    std::uint64_t token;       ///< of the owner, from its metadata
    std::uint64_t connection;  ///< the initiator's number of it

    friend bool operator==(const LaneHello&, const LaneHello&) = default;
};

/// One end of a lane.
class Lane {
  public:
    explicit Lane(int fd) : fd_(fd) {}
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;
    virtual ~Lane();

    [[nodiscard]] int fd() const noexcept { return fd_; }
    [[nodiscard]] bool is_broken() const noexcept { return is_broken_; }
    /// Send and receive what the socket takes and has, within bounds.
    /// @return whether anything moved
    bool progress();
    void note_events(std::uint32_t events) noexcept;

  protected:
    virtual bool send_more() = 0;
    virtual bool receive_more() = 0;

    void drop() noexcept { is_broken_ = true; }
    /// Queue bytes in front of those of a flow.
    void say(std::string_view bytes) { head_.append(bytes); }
    [[nodiscard]] bool has_said_all() const noexcept { return head_.empty(); }
    enum class Moved : std::uint8_t { kSome, kNothing, kFault };
    /// Send what was said, then pieces.
    Moved send(std::vector<iovec>& pieces, std::uint64_t& bytes);
    Moved receive(std::vector<iovec>& pieces, std::uint64_t& bytes);
    /// Called before bytes are received of which so many are to come.
    void expect(std::uint64_t bytes);
    /// Receive exactly as many bytes as `into` has left.
    /// @return whether they are complete
    bool receive_exactly(char* into, std::size_t size, std::size_t& done);
    bool discard(std::uint64_t& left);

    bool can_receive_ = true;
    bool can_send_ = true;

  private:
    const int fd_;
    std::string head_;
    int wake_bytes_ = 1;
    TimePoint looked_at_;  ///< without being woken
    bool is_broken_ = false;
};

/// The initiator's end.
class OwnLane final : public Lane {
  public:
    OwnLane(int fd, LaneHello hello, const SocketAddress& place);
    [[nodiscard]] bool is_ready() const noexcept { return is_ready_; }
    [[nodiscard]] const LaneHello& hello() const noexcept { return hello_; }
    /// Of the owner.
    [[nodiscard]] const SocketAddress& place() const noexcept { return place_; }
    /// Bytes of its transfers that have not moved.
    [[nodiscard]] std::uint64_t left() const;
    void post(LaneXfer& xfer);
    void remove(std::uint64_t number);
    /// Drop the lane if the owner has not answered for too long.
    void look_at_clock();

  private:
    bool send_more() override;
    bool receive_more() override;
    bool begin_body();
    void end_body();

    const LaneHello hello_;
    const SocketAddress place_;
    const TimePoint since_ = std::chrono::steady_clock::now();
    LaneHello answer_{};
    bool is_ready_ = false;
    std::uint64_t last_ = 0;
    std::unordered_map<std::uint64_t, LaneXfer*> xfers_;
    std::deque<std::uint64_t> to_send_;  ///< requests, and the bytes of writes
    bool is_writing_ = false;            ///< the bytes of the first
    LaneHead in_{};                      ///< its bytes: those that have not arrived
    std::size_t in_done_ = 0;
    std::string reason_;
};

/// The owner's end.
class ServedLane final : public Lane {
  public:
    ServedLane(int fd, const std::uint64_t& token, std::shared_ptr<const LocalRegions> regions,
               Clients& clients)
        : Lane(fd), token_(token), regions_(std::move(regions)), clients_(clients) {}
    [[nodiscard]] bool is_known() const noexcept { return is_known_; }
    /// Whether it has not shown the token.
    [[nodiscard]] bool is_stranger() const noexcept { return is_stranger_; }
    /// Drop the lane, and what has yet to be received, if its connection is over.
    void look_at_connection();

  private:
    struct Read {
        std::uint64_t xfer;
        Flow flow;
        std::string refusal;
    };
    bool send_more() override;
    bool receive_more() override;
    bool take_hello();
    bool take_request();
    void say_end(std::uint64_t xfer, std::string_view refusal);
    [[nodiscard]] bool may_send(Read& read, std::uint64_t most, std::vector<iovec>& pieces) const;
    void forget_read();
    [[nodiscard]] bool may_move(const iovec& piece, transfer::Op op, std::string& reason) const;

    const std::uint64_t& token_;
    const std::shared_ptr<const LocalRegions> regions_;
    Clients& clients_;
    LaneHello hello_{};
    bool is_stranger_ = true;
    bool is_known_ = false;  ///< and answered
    LaneHead in_{};          ///< its bytes: those that have not arrived
    std::size_t in_done_ = 0;
    std::vector<LaneRow> rows_;  ///< of that request
    std::size_t rows_done_ = 0;  ///< bytes
    Flow write_;
    std::string refusal_;  ///< of the write
    std::deque<Read> reads_;
    std::size_t num_rows_ = 0;      ///< of the reads
    std::uint64_t chunk_left_ = 0;  ///< of the first of them
    std::string ends_;              ///< to be sent after that chunk
};

/// Ports to listen on; 0 is any that is free.
struct PortRange {
    /// UCX_TCP_PORT_RANGE: `first-last`, or one.
    [[nodiscard]] static PortRange read(const std::string& text);

    std::uint16_t first = 0;
    std::uint16_t last = 0;
};

/// All lanes of an agent, and what wakes it for them.
class Lanes {
  public:
    /// @param address the worker's: lanes use the network addresses that UCX does
    /// @param event_fd the worker's
    /// @param clients lanes serve their open connections only
    Lanes(std::string_view address, PortRange ports, int event_fd, const std::uint64_t& token,
          std::shared_ptr<const LocalRegions> regions, Clients& clients);
    Lanes(const Lanes&) = delete;
    Lanes& operator=(const Lanes&) = delete;
    ~Lanes();

    /// Where peers connect to; part of the metadata.
    [[nodiscard]] const std::string& places() const noexcept { return places_; }
    /// Begin to connect to a peer.
    /// @param is_local whether its process is one of this host
    [[nodiscard]] std::vector<std::shared_ptr<OwnLane>> connect(std::string_view places,
                                                                LaneHello hello, bool is_local);
    /// Begin to connect once more to where a lane leads.
    /// @return null if the system does not let us
    [[nodiscard]] std::shared_ptr<OwnLane> connect_beside(const OwnLane& lane) {
        return connect(lane.place(), lane.hello());
    }
    /// @return whether anything moved
    bool progress();
    /// Readable when lanes or the worker have work.
    [[nodiscard]] int event_fd() const noexcept { return epoll_; }

  private:
    [[nodiscard]] std::shared_ptr<OwnLane> connect(const SocketAddress& place, LaneHello hello);
    /// @return whether it is watched
    [[nodiscard]] bool watch(int fd, std::uint64_t number, std::uint32_t events) const;
    void accept_all(int listener);
    bool take_events();

    const std::uint64_t& token_;
    const std::shared_ptr<const LocalRegions> regions_;
    Clients& clients_;
    const int epoll_;
    std::vector<int> listeners_;
    bool has_waiting_ = false;  ///< peers, which could not be accepted
    std::string places_;
    std::uint64_t last_ = 0;  ///< number of what is watched
    std::uint64_t first_lane_ = 0;
    std::map<std::uint64_t, std::unique_ptr<ServedLane>> served_;
    std::map<std::uint64_t, std::weak_ptr<OwnLane>> own_;
};

/// A transfer through a lane.
class LaneXfer final : public UcxXfer {
  public:
    LaneXfer(UcxConnection& connection, const LocalRegions& local_regions, transfer::Op op,
             const transfer::DescriptorPairs& rows);
    ~LaneXfer() override;

    void post() override { begin(); }
    bool poll() override;
    [[nodiscard]] bool has_begun() const override { return lane_ != nullptr; }

  private:
    friend class OwnLane;
    void begin();
    void say_request(const std::function<void(std::string_view)>& say) const;

    std::shared_ptr<OwnLane> lane_;  ///< once the connection has one
    std::uint64_t number_ = 0;       ///< from then on
    Flow flow_;
    bool is_over_ = false;
    std::string refusal_;
};

}  // namespace pynixlkv::ucx
