/// @file
/// The other ends of the connections that peers have to this process.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ucx/connection.hpp"

namespace pynixlkv::ucx {

/// Connects back to the peers that ask for it, so that either side can close both ends.
class Clients {
  public:
    Clients(std::shared_ptr<Worker> worker, capi::ErrorMode errors)
        : worker_(std::move(worker)), own_address_(worker_->address()), errors_(errors) {}

    /// Handle kOpen or kClose; called by UCX.
    void on_message(const MessageHeader& header, std::string_view data);
    /// Send the answers that are due. Not called by UCX.
    /// @return whether there was anything to do
    bool serve();
    enum class Standing : std::uint8_t { kUnknown, kOpen, kOver };
    /// Of a connection: kUnknown as long as its kOpen has not arrived.
    [[nodiscard]] Standing standing(std::uint64_t number) const;
    /// Count a lane of an open connection.
    /// @return false if it is one too many
    [[nodiscard]] bool add_lane(std::uint64_t number);
    /// Whether there is only room for one lane of each connection.
    void note_crowd(bool is_crowded) noexcept { is_crowded_ = is_crowded; }
    /// Take no more bytes through the lanes of a worker's present connections.
    void shut_out(std::string_view worker);
    /// Trust the next connection of a worker: this side connects to it.
    void let_in(std::string_view worker);
    /// Whether a connection, which is open, was made since its worker was shut out.
    [[nodiscard]] bool may_write(std::uint64_t number) const {
        return clients_.at(number).may_write;
    }
    /// Close all connections and ignore later requests.
    void close();

  private:
    struct Client {
        ~Client() {
            if (endpoint) {
                endpoint->close();
            }
        }
        std::string address;
        std::unique_ptr<Outbox> outbox;
        std::shared_ptr<Endpoint> endpoint;
        std::size_t num_lanes = 0;
        bool is_shut_out = false;
        bool may_write = true;
        bool is_over = false;
    };

    void serve(std::uint64_t number, Client& client);
    /// Whether the endpoint of a connection that is over may be the other end of the peer's next.
    /// UCX pairs the endpoints of two workers by the order in which each side makes them, so this
    /// happens if both connect at once. One connection later it has no such use.
    [[nodiscard]] bool is_kept(std::uint64_t number, const Client& client);
    void forget(std::uint64_t number);

    const std::shared_ptr<Worker> worker_;
    const std::string own_address_;
    const capi::ErrorMode errors_;
    // Messages can arrive while one is removed, so additions must leave the others in place.
    std::map<std::uint64_t, Client> clients_;
    std::vector<std::uint64_t> busy_;   ///< clients to look at in the next turn
    std::deque<std::uint64_t> newest_;  ///< the last to come, which may be unopened
    std::deque<std::uint64_t> gone_;    ///< the last to close, whose late messages are dropped
    std::deque<std::string> unseen_;    ///< workers shut out that had no connection: one may come
    /// Workers that this side is connected to, and the last connection of each that is kept.
    std::map<std::string, std::uint64_t, std::less<>> connected_;
    std::uint64_t num_failures_seen_ = 0;  ///< of the worker's
    bool is_crowded_ = false;
    bool is_closed_ = false;
};

}  // namespace pynixlkv::ucx
