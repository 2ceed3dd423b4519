/// @file
/// Reads and writes that the owner of the memory serves, by active messages, on connections whose
/// transports are not one-sided.
///
/// UCX emulates gets and puts there (tcp), in the owner's process, and ends that process when it
/// cannot answer because the peer has died: `ucp_request_try_send` in src/ucp/core/ucp_request.inl
/// takes any failure of `ucp_progress_get_reply` and `ucp_progress_rma_cmpl` in
/// src/ucp/rma/rma_sw.c for fatal (1.18 to 1.23). Failures of active messages are reported.
/// Besides, the owner looks up what it has registered, so that nobody reaches anything else.
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

enum class ServedKind : std::uint8_t {
    kOpen,   ///< to the owner: where to send answers; data: a worker's address
    kClose,  ///< to the owner: nothing more will come
    kRead,   ///< to the owner; data: address and length of each row
    kWrite,  ///< to the owner: a piece, which is the data
    kData,   ///< from the owner: a piece of a row
    kEnd,    ///< from the owner: all is written; or, if there are data, the reason of a refusal
};

/// The header of all these messages. Byte orders are equal: `connect` refuses other peers.
struct ServedHeader {
    ServedKind kind;
    std::uint8_t unused[3] = {};
    std::uint32_t row = 0;         ///< of kData: place in the rows that were asked for
    std::uint64_t connection = 0;  ///< to the owner: whose it is
    std::uint64_t operation = 0;
    std::uint64_t place = 0;  ///< of kData: offset in the row; of kWrite: address
    std::uint64_t total = 0;  ///< of kWrite: bytes of the whole operation
};

/// The bytes of a header, for as long as the full expression that it is made in.
[[nodiscard]] std::string_view make_header(const ServedHeader& header);
/// @return nothing if it is the header of another message
[[nodiscard]] std::optional<ServedHeader> read_header(std::string_view bytes);

/// A number that no other connection of any process has, but by a chance of one in 2^64.
[[nodiscard]] std::uint64_t new_served_number();

class ServedOperation;

/// The operations of this process that peers serve, by number.
class ServedOperations {
  public:
    /// @return its number, which is never used again
    std::uint64_t add(ServedOperation* operation);
    void remove(std::uint64_t number) { operations_.erase(number); }
    /// Take in kData or kEnd; what belongs to no operation (any more) is dropped.
    void on_message(const ServedHeader& header, std::string_view data);

  private:
    std::uint64_t last_ = 0;
    std::unordered_map<std::uint64_t, ServedOperation*> operations_;
};

/// An operation on host memory at both ends.
class ServedOperation final : public transfer::NativeXfer {
  public:
    /// @throws Error NotRegisteredError
    ServedOperation(std::shared_ptr<ServedOperations> all, UcxConnection& connection,
                    const LocalRegions& local_regions, transfer::Op op,
                    const transfer::RowPairs& rows);
    ServedOperation(const ServedOperation&) = delete;
    ServedOperation& operator=(const ServedOperation&) = delete;
    ~ServedOperation() override { all_->remove(number_); }

    void post() override;
    bool poll() override;

  private:
    friend class ServedOperations;
    struct Part {
        std::uint64_t local;
        std::uint64_t remote;
        std::uint64_t length;
    };

    void ask();
    void write();
    void check();
    void on_data(const ServedHeader& header, std::string_view data);

    const std::shared_ptr<ServedOperations> all_;
    const std::shared_ptr<Endpoint> endpoint_;
    UcxConnection& connection_;
    const transfer::Op op_;
    std::uint64_t number_ = 0;  ///< from `post` on
    Completion completion_;     ///< of pieces that are written
    std::vector<Part> parts_;
    std::uint64_t total_ = 0;
    std::uint64_t due_ = 0;     ///< bytes of a read that have not arrived
    std::size_t next_ = 0;      ///< part that is written
    std::uint64_t offset_ = 0;  ///< in it
    bool is_written_ = false;
    std::string refusal_;
};

/// Serves this process's memory to peers.
class Server {
  public:
    Server(std::shared_ptr<Worker> worker, capi::ErrorMode errors,
           std::shared_ptr<const LocalRegions> regions)
        : worker_(std::move(worker)), errors_(errors), regions_(std::move(regions)) {}

    /// Take in any other kind; called by UCX.
    void on_message(const ServedHeader& header, std::string_view data);
    /// Send what is due. Not called by UCX.
    /// @return whether there was anything to do
    bool serve();
    /// Hang up on everybody; serves nothing from now on.
    void close();

  private:
    struct Read {
        std::uint64_t operation;
        std::vector<Row> rows;
        std::size_t next = 0;      ///< row
        std::uint64_t offset = 0;  ///< in it
    };
    struct End {
        std::uint64_t operation;
        std::string refusal;
    };
    /// What is known of a peer's connection to here.
    struct Client {
        Client() = default;
        Client(const Client&) = delete;
        Client& operator=(const Client&) = delete;
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
        std::unordered_map<std::uint64_t, std::uint64_t> due;  ///< bytes by write; 0: refused
        bool is_over = false;
    };

    void take_piece(Client& client, const ServedHeader& header, std::string_view data) const;
    bool serve(Client& client);
    void send_piece(Client& client);
    [[nodiscard]] std::string refusal(const Row& row) const;

    const std::shared_ptr<Worker> worker_;
    const capi::ErrorMode errors_;
    const std::shared_ptr<const LocalRegions> regions_;
    // Messages may come in while one is removed, so additions must leave the others in place.
    std::map<std::uint64_t, Client> clients_;
    std::deque<std::uint64_t> gone_;  ///< numbers of the last that went, for what is late
    bool is_closed_ = false;
};

}  // namespace pynixlkv::ucx
