#include "transfer/fake_driver.hpp"

#include <charconv>
#include <cstring>
#include <utility>

#include "base/error.hpp"

namespace pynixlkv::transfer {

namespace {

NativeError fake_error(const std::string& call, const std::string& detail) {
    return {"fake", "backend", -2, call, detail, call + " failed: " + detail};
}

struct FakeConnection final : Connection {
    FakeConnection(std::string peer_name, std::uint64_t peer_token)
        : name(std::move(peer_name)), token(peer_token) {}
    const std::string name;
    const std::uint64_t token;
};

struct FakePrepared final : Prepared {
    explicit FakePrepared(const RowPairs& rows)
        : local(rows.local.begin(), rows.local.end()),
          remote(rows.remote.begin(), rows.remote.end()) {}
    const std::vector<Row> local;
    const std::vector<Row> remote;
};

struct FakeRegistered final : Registered {
    explicit FakeRegistered(std::function<void()> deregister) : undo(std::move(deregister)) {}
    FakeRegistered(const FakeRegistered&) = delete;
    FakeRegistered& operator=(const FakeRegistered&) = delete;
    ~FakeRegistered() override { undo(); }
    const std::function<void()> undo;
};

}  // namespace

class FakeXfer final : public NativeXfer {
  public:
    FakeXfer(std::shared_ptr<FakeNetwork> network, std::string owner_name,
             std::uint64_t owner_token, const FakeConnection& connection, Op op,
             const RowPairs& rows)
        : network_(std::move(network)),
          owner_name_(std::move(owner_name)),
          owner_token_(owner_token),
          name_(connection.name),
          token_(connection.token),
          op_(op),
          local_(rows.local.begin(), rows.local.end()),
          remote_(rows.remote.begin(), rows.remote.end()) {}

    void post() override {
        const std::lock_guard lock(network_->mutex_);
        const auto* peer = network_->find(name_, token_);
        if (peer == nullptr || network_->find(owner_name_, owner_token_) == nullptr) {
            throw ConnectionLost(fake_error("post", "'" + name_ + "' cannot be reached"));
        }
        (void)peer->memory.cover(remote_, "of peer '" + name_ + "'");
        ready_ = Clock::now() + peer->delay;
        copy(0, half());
    }

    /// Copy a part of the rows; the caller holds the network's lock.
    void copy(std::size_t first, std::size_t last) const {
        for (std::size_t i = first; i < last; ++i) {
            auto* here = reinterpret_cast<void*>(local_[i].address);    // NOLINT
            auto* there = reinterpret_cast<void*>(remote_[i].address);  // NOLINT
            if (op_ == Op::kRead) {
                std::memcpy(here, there, local_[i].length);
            } else {
                std::memcpy(there, here, local_[i].length);
            }
        }
    }

    [[nodiscard]] std::size_t half() const noexcept { return local_.size() / 2; }

    bool poll() override {
        const std::lock_guard lock(network_->mutex_);
        auto* peer = network_->find(name_, token_);
        // A killed agent moves nothing, in either direction.
        if (peer == nullptr || network_->find(owner_name_, owner_token_) == nullptr) {
            throw ConnectionLost(fake_error("poll", "the connection to '" + name_ + "' broke"));
        }
        if (peer->paused || Clock::now() < ready_) {
            return false;
        }
        if (peer->failures > 0) {
            --peer->failures;
            throw fake_error("poll", "a failure was injected");
        }
        (void)peer->memory.cover(remote_, "of peer '" + name_ + "'");
        copy(half(), local_.size());
        return true;
    }

  private:
    const std::shared_ptr<FakeNetwork> network_;
    const std::string owner_name_;
    const std::uint64_t owner_token_;
    const std::string name_;
    const std::uint64_t token_;
    const Op op_;
    const std::vector<Row> local_;
    const std::vector<Row> remote_;
    TimePoint ready_{};
};

// ---- FakeNetwork

FakeNetwork::Node& FakeNetwork::at(const std::string& name) {
    const auto it = nodes_.find(name);
    if (it == nodes_.end()) {
        throw Error("UnknownPeerError", "the fake network has no agent named '" + name + "'");
    }
    return it->second;
}

FakeNetwork::Node* FakeNetwork::find(const std::string& name, std::uint64_t token) {
    const auto it = nodes_.find(name);
    if (it == nodes_.end() || it->second.token != token || it->second.killed) {
        return nullptr;
    }
    return &it->second;
}

// ---- FakeDriver

FakeDriver::FakeDriver(std::string name, std::shared_ptr<FakeNetwork> network)
    : name_(std::move(name)), network_(std::move(network)) {
    const std::lock_guard lock(network_->mutex_);
    const auto [it, added] = network_->nodes_.try_emplace(name_);
    if (!added) {
        if (!it->second.killed) {
            throw Error("DuplicatePeerError",
                        "the fake network has an agent named '" + name_ + "' already");
        }
        it->second = {};  // a successor of a killed agent
    }
    token_ = network_->next_token_++;
    it->second.token = token_;
}

FakeDriver::~FakeDriver() {
    const std::lock_guard lock(network_->mutex_);
    const auto it = network_->nodes_.find(name_);
    if (it != network_->nodes_.end() && it->second.token == token_) {
        network_->nodes_.erase(it);
    }
}

std::unique_ptr<Registered> FakeDriver::register_memory(std::span<const Span> spans) {
    const std::lock_guard lock(network_->mutex_);
    const MemoryMap::Owner owner = network_->next_token_++;
    if (auto* self = network_->find(name_, token_)) {
        self->memory.add(owner, spans);
    }
    return std::make_unique<FakeRegistered>(
        [network = network_, name = name_, token = token_, owner] {
            const std::lock_guard inner(network->mutex_);
            if (auto* self = network->find(name, token)) {
                self->memory.remove(owner);
            }
        });
}

std::string FakeDriver::metadata() {
    return std::to_string(token_);
}

std::unique_ptr<Connection> FakeDriver::connect(const std::string& name,
                                                std::string_view metadata) {
    std::uint64_t token = 0;
    const auto [end, error] =
        std::from_chars(metadata.data(), metadata.data() + metadata.size(), token);
    if (error != std::errc() || end != metadata.data() + metadata.size()) {
        throw fake_error("connect", "the metadata of '" + name + "' is not a fake agent's");
    }
    const std::lock_guard lock(network_->mutex_);
    if (network_->find(name, token) == nullptr) {
        throw ConnectionLost(fake_error("connect", "'" + name + "' cannot be reached"));
    }
    return std::make_unique<FakeConnection>(name, token);
}

void FakeDriver::refresh(Connection& /*connection*/, std::string_view /*metadata*/) {}

bool FakeDriver::is_alive(Connection& connection) {
    const auto& peer = static_cast<const FakeConnection&>(connection);
    const std::lock_guard lock(network_->mutex_);
    return network_->find(peer.name, peer.token) != nullptr;
}

std::unique_ptr<NativeXfer> FakeDriver::make(Connection& connection, Op op, const RowPairs& rows) {
    return std::make_unique<FakeXfer>(network_, name_, token_,
                                      static_cast<const FakeConnection&>(connection), op, rows);
}

std::unique_ptr<Prepared> FakeDriver::prepare(Connection& /*connection*/, const RowPairs& rows) {
    return std::make_unique<FakePrepared>(rows);
}

std::unique_ptr<NativeXfer> FakeDriver::make(Connection& connection, Op op, Prepared& prepared,
                                             const IndexPairs& indices) {
    const auto& lists = static_cast<const FakePrepared&>(prepared);
    const auto pick = [](const std::vector<Row>& from, std::span<const std::int32_t> which) {
        std::vector<Row> rows;
        for (const std::int32_t i : which) {
            rows.push_back(from.at(static_cast<std::size_t>(i)));
        }
        return rows;
    };
    const std::vector<Row> local = pick(lists.local, indices.local);
    const std::vector<Row> remote = pick(lists.remote, indices.remote);
    return make(connection, op, {local, remote, Memory::kDram, Memory::kDram});
}

void FakeDriver::notify(Connection& connection, const std::string& message) {
    const auto& peer = static_cast<const FakeConnection&>(connection);
    const std::lock_guard lock(network_->mutex_);
    auto* node = network_->find(peer.name, peer.token);
    if (node == nullptr || network_->find(name_, token_) == nullptr) {
        throw ConnectionLost(fake_error("notify", "'" + peer.name + "' cannot be reached"));
    }
    if (node->drops > 0) {
        --node->drops;
        return;
    }
    node->inbox.push_back({name_, message});
}

bool FakeDriver::receive(std::vector<Notification>& into) {
    const std::lock_guard lock(network_->mutex_);
    auto* self = network_->find(name_, token_);
    if (self == nullptr || self->paused) {
        return false;
    }
    for (Notification& n : self->inbox) {
        into.push_back(std::move(n));
    }
    self->inbox.clear();
    return false;
}

}  // namespace pynixlkv::transfer
