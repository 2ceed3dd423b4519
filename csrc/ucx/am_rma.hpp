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
#include <unordered_set>
#include <utility>
#include <vector>

#include "transfer/driver.hpp"
#include "ucx/connection.hpp"

namespace pynixlkv::ucx {

class AmRmaXfer;

/// This process's AM-RMA transfers in flight, by number.
class AmRmaXfers {
  public:
    /// @return its number, never reused
    std::uint64_t add(AmRmaXfer* xfer);
    void remove(std::uint64_t number) { xfers_.erase(number); }
    /// Expect a kOpened. A connection that closes earlier leaves its sockets to UCX for ever.
    void expect_open(std::uint64_t connection) { unopened_.insert(connection); }
    [[nodiscard]] bool is_unopened(std::uint64_t connection) const {
        return unopened_.contains(connection);
    }
    void forget(std::uint64_t connection) { unopened_.erase(connection); }
    /// Handle kOpened, kData or kEnd; drops those of other connections and for transfers that have
    /// ended.
    void on_message(const AmRmaHeader& header, std::string_view data);

  private:
    std::uint64_t last_ = 0;
    std::unordered_map<std::uint64_t, AmRmaXfer*> xfers_;
    std::unordered_set<std::uint64_t> unopened_;
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
        : worker_(std::move(worker)),
          own_address_(worker_->address()),
          errors_(errors),
          regions_(std::move(regions)) {}

    /// Handle kOpen, kClose, kRead or kWrite; called by UCX.
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
            due;                   ///< missing bytes of each write; 0: refused
        std::size_t num_rows = 0;  ///< of the reads
        bool is_listed = false;    ///< in busy_
        bool is_over = false;
    };

    void take_read(Client& client, const AmRmaHeader& header, std::string_view data) const;
    void take_piece(Client& client, const AmRmaHeader& header, std::string_view data) const;
    void list(std::uint64_t number, Client& client);
    void forget(std::uint64_t number);
    bool serve(std::uint64_t number, Client& client);
    void send_piece(std::uint64_t number, Client& client) const;

    const std::shared_ptr<Worker> worker_;
    const std::string own_address_;
    const capi::ErrorMode errors_;
    const std::shared_ptr<const LocalRegions> regions_;
    // Messages can arrive while one is removed, so additions must leave the others in place.
    std::map<std::uint64_t, Client> clients_;
    std::vector<std::uint64_t> busy_;      ///< clients to look at in the next turn
    std::deque<std::uint64_t> newest_;     ///< the last to come, which may be unopened
    std::deque<std::uint64_t> gone_;       ///< the last to close, whose late messages are dropped
    std::uint64_t num_failures_seen_ = 0;  ///< of the worker's
    bool is_closed_ = false;
};

}  // namespace pynixlkv::ucx
