/// @file
/// AM-RMA: gets and puts of host memory emulated by active messages, for connections whose
/// transports have none of their own (tcp). The owner of the memory answers them.
///
/// UCX has such an emulation too, but ends the owner's process when it cannot answer because the
/// peer has died: `ucp_request_try_send` in src/ucp/core/ucp_request.inl treats any failure of
/// `ucp_progress_get_reply` and `ucp_progress_rma_cmpl` in src/ucp/rma/rma_sw.c as fatal (1.18 to
/// 1.23). Failures of active messages are reported. Ours also checks the owner's registrations, so
/// that no other memory can be reached.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transfer/driver.hpp"
#include "ucx/connection.hpp"

namespace pynixlkv::ucx {

enum class AmRmaKind : std::uint8_t {
    kOpen,   ///< to the owner: where to send answers; data: a worker's address
    kClose,  ///< to the owner: the connection ends
    kRead,   ///< to the owner; data: address and length of each row
    kWrite,  ///< to the owner; data: a piece
    kData,   ///< from the owner; data: a piece of a row
    kEnd,    ///< from the owner: a write is complete; with data, why it or a read is refused
};

/// The header of these messages. Byte orders are equal: `connect` refuses other peers.
struct AmRmaHeader {
    AmRmaKind kind;
    std::uint8_t unused[3] = {};
    std::uint32_t row = 0;         ///< of kData: index in the rows of the read
    std::uint64_t connection = 0;  ///< to the owner: its sender
    std::uint64_t xfer = 0;
    std::uint64_t place = 0;  ///< of kData: offset in the row; of kWrite: address
    std::uint64_t total = 0;  ///< of kWrite: bytes of the whole transfer
};

/// The bytes of a header, valid as long as it.
[[nodiscard]] std::string_view make_header(const AmRmaHeader& header);
/// @return nothing if it is the header of another message
[[nodiscard]] std::optional<AmRmaHeader> read_header(std::string_view bytes);

/// A random number, unique among the connections of all processes.
[[nodiscard]] std::uint64_t new_connection_number();

class AmRmaXfer;

/// This process's AM-RMA transfers in flight, by number.
class AmRmaXfers {
  public:
    /// @return its number, never reused
    std::uint64_t add(AmRmaXfer* xfer);
    void remove(std::uint64_t number) { xfers_.erase(number); }
    /// Handle kData or kEnd; drops messages for transfers that have ended.
    void on_message(const AmRmaHeader& header, std::string_view data);

  private:
    std::uint64_t last_ = 0;
    std::unordered_map<std::uint64_t, AmRmaXfer*> xfers_;
};

/// A transfer between host memory at both ends.
class AmRmaXfer final : public UcxXfer {
  public:
    AmRmaXfer(std::shared_ptr<AmRmaXfers> all, UcxConnection& connection,
              const LocalRegions& local_regions, transfer::Op op,
              const transfer::DescriptorPairs& rows);
    ~AmRmaXfer() override { all_->remove(number_); }

    void post() override;
    bool poll() override;

  private:
    friend class AmRmaXfers;
    void ask();
    void write();
    void check();
    void on_data(const AmRmaHeader& header, std::string_view data);

    const std::shared_ptr<AmRmaXfers> all_;
    std::uint64_t number_ = 0;  ///< from `post` on
    std::uint64_t total_ = 0;
    std::uint64_t due_ = 0;     ///< bytes of a read that have not arrived
    std::uint64_t offset_ = 0;  ///< in the part to write next
    bool is_written_ = false;
    std::string refusal_;
};

/// Answers the AM-RMA requests of peers.
class AmRmaServer {
  public:
    AmRmaServer(std::shared_ptr<Worker> worker, capi::ErrorMode errors,
                std::shared_ptr<const LocalRegions> regions)
        : worker_(std::move(worker)), errors_(errors), regions_(std::move(regions)) {}

    /// Handle any other kind; called by UCX.
    void on_message(const AmRmaHeader& header, std::string_view data);
    /// Send the answers that are due. Not called by UCX.
    /// @return whether there was anything to do
    bool serve();
    /// Close all connections and ignore later requests.
    void close();

  private:
    struct Read {
        std::uint64_t xfer;
        std::vector<Descriptor> rows;
        std::size_t next = 0;      ///< row to send next
        std::uint64_t offset = 0;  ///< in that row
    };
    struct End {
        std::uint64_t xfer;
        std::string refusal;
    };
    /// A connection of a peer to this process.
    struct Client {
        ~Client() {
            if (endpoint) {
                endpoint->close();
            }
        }
        std::string address;
        std::unique_ptr<Outbox> outbox;
        std::shared_ptr<Endpoint> endpoint;
        std::deque<Read> reads;
        std::deque<End> ends;
        std::unordered_map<std::uint64_t, std::uint64_t>
            due;  ///< missing bytes of each write; 0: refused
        bool is_over = false;
    };

    void take_piece(Client& client, const AmRmaHeader& header, std::string_view data) const;
    bool serve(Client& client);
    void send_piece(Client& client);
    [[nodiscard]] std::string refusal(const Descriptor& row) const;

    const std::shared_ptr<Worker> worker_;
    const capi::ErrorMode errors_;
    const std::shared_ptr<const LocalRegions> regions_;
    // Messages can arrive while one is removed, so additions must leave the others in place.
    std::map<std::uint64_t, Client> clients_;
    std::deque<std::uint64_t> gone_;  ///< the last to close, whose late messages are dropped
    bool is_closed_ = false;
};

}  // namespace pynixlkv::ucx
