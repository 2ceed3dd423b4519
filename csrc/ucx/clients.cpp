#include "ucx/clients.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "ucx/address.hpp"

namespace pynixlkv::ucx {

namespace {

/// Number of closed clients to remember, and of clients that may be unopened.
constexpr std::size_t kMaxGone = 1024;
constexpr std::size_t kMaxClients = 1U << 14U;
constexpr std::size_t kMaxLanes = 20;  ///< of a client: one for each way, and some beside

}  // namespace

std::string_view make_header(const MessageHeader& header) {
    return {reinterpret_cast<const char*>(&header), sizeof header};
}

std::optional<MessageHeader> read_header(std::string_view bytes) {
    if (bytes.size() != sizeof(MessageHeader)) {
        return std::nullopt;
    }
    MessageHeader header{};
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

void Clients::on_message(const MessageHeader& header, std::string_view data) {
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
                busy_.push_back(oldest->first);
            }
            newest_.pop_front();
        }
    }
    // Messages can overtake each other: a client's first need not be kOpen.
    Client& client = clients_[number];
    if (header.kind == MessageKind::kOpen && client.address.empty() &&
        is_plausible_address(data, own_address_)) {
        client.address = data;
        client.may_write = std::erase(unseen_, worker_id(data)) == 0;
    } else {
        client.is_over = true;
    }
    busy_.push_back(number);
}

bool Clients::is_kept(std::uint64_t number, const Client& client) {
    if (!client.endpoint || client.endpoint->failure() || errors_ != capi::kErrorPeer) {
        return false;
    }
    const auto own = connected_.find(worker_id(client.address));
    if (own == connected_.end()) {
        return false;
    }
    if (const std::uint64_t earlier = std::exchange(own->second, number); earlier != number) {
        forget(earlier);
    }
    return true;
}

void Clients::forget(std::uint64_t number) {
    gone_.push_back(number);
    if (gone_.size() > kMaxGone) {
        gone_.pop_front();
    }
    clients_.extract(number);
}

bool Clients::serve() {
    if (std::exchange(num_failures_seen_, worker_->num_failures()) != worker_->num_failures()) {
        for (auto& [number, client] : clients_) {
            if (client.endpoint && client.endpoint->failure()) {
                busy_.push_back(number);
            }
        }
    }
    const auto busy = std::exchange(busy_, {});
    for (const std::uint64_t number : busy) {
        const auto found = clients_.find(number);
        if (found == clients_.end()) {
            continue;  // forgotten in this turn
        }
        Client& client = found->second;
        try {
            serve(number, client);
        } catch (const std::exception&) {
            client.is_over = true;  // it cannot be reached
        }
        const bool has_failed = client.endpoint && client.endpoint->failure();
        if (has_failed || (client.is_over && !is_kept(number, client))) {
            forget(number);
        }
    }
    return !busy.empty();
}

void Clients::serve(std::uint64_t number, Client& client) {
    if (client.address.empty() || client.is_over || client.endpoint) {
        return;
    }
    client.endpoint = std::make_shared<Endpoint>(worker_, client.address, errors_);
    client.outbox = std::make_unique<Outbox>(client.endpoint);
    client.outbox->send(make_header({.kind = MessageKind::kOpened, .connection = number}), {},
                        "a client");
}

Clients::Standing Clients::standing(std::uint64_t number) const {
    const auto found = clients_.find(number);
    if (found == clients_.end()) {
        const bool is_gone = std::find(gone_.begin(), gone_.end(), number) != gone_.end();
        return is_gone ? Standing::kOver : Standing::kUnknown;
    }
    const Client& client = found->second;
    if (client.is_over || client.is_shut_out) {
        return Standing::kOver;
    }
    return client.address.empty() ? Standing::kUnknown : Standing::kOpen;
}

bool Clients::add_lane(std::uint64_t number) {
    return ++clients_.at(number).num_lanes <= (is_crowded_ ? 1 : kMaxLanes);
}

void Clients::let_in(std::string_view worker) {
    std::erase(unseen_, worker);
    connected_.try_emplace(std::string(worker));
}

void Clients::shut_out(std::string_view worker) {
    if (const auto own = connected_.find(worker); own != connected_.end()) {
        busy_.push_back(own->second);
        connected_.erase(own);
    }
    bool is_seen = false;
    for (auto& [number, client] : clients_) {
        const bool is_its = worker_id(client.address) == worker;
        client.is_shut_out |= is_its;
        is_seen |= is_its;
    }
    if (!is_seen) {
        unseen_.emplace_back(worker);
        if (unseen_.size() > kMaxGone) {
            unseen_.pop_front();
        }
    }
}

void Clients::close() {
    is_closed_ = true;
    busy_.clear();
    while (!clients_.empty()) {
        clients_.extract(clients_.begin());
    }
}

}  // namespace pynixlkv::ucx
