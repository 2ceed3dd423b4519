#include "nixl/driver.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "nixl/registration.hpp"
#include "nixl/request.hpp"

namespace pynixlkv::nixl {

namespace {

using transfer::ConnectionLost;

/// Sent to find out whether a connection stands; kept from the receiver's application.
const std::string kPing("\0pynixlkv ping", 14);

/// NIXL reports a dead connection as a general backend error of the calls that use it, and with its
/// UCX backend practically every run-time error kills the connection.
[[noreturn]] void rethrow_as_lost(const NativeError& error) {
    if (error.kind() == "backend") {
        throw ConnectionLost(error);
    }
    throw;
}

struct NixlConnection final : transfer::Connection {
    NixlConnection(std::shared_ptr<Agent> owner, std::string peer)
        : agent(std::move(owner)), name(std::move(peer)) {}
    NixlConnection(const NixlConnection&) = delete;
    NixlConnection& operator=(const NixlConnection&) = delete;
    ~NixlConnection() override {
        try {
            agent->invalidate_remote_metadata(name);
        } catch (const std::exception&) {
            // Up to 1.4 NIXL forgets a lost peer by itself and then does not know it here.
        }
    }
    const std::shared_ptr<Agent> agent;
    const std::string name;
};

struct NixlRegistered final : transfer::Registered {
    std::vector<std::shared_ptr<Registration>> registrations;
};

struct NixlPrepared final : transfer::Prepared {
    std::shared_ptr<PreparedList> local;
    std::shared_ptr<PreparedList> remote;
};

class NixlOperation final : public transfer::NativeXfer {
  public:
    explicit NixlOperation(std::shared_ptr<Request> request) : request_(std::move(request)) {}

    void post() override {
        try {
            (void)request_->post();
        } catch (const NativeError& e) {
            rethrow_as_lost(e);
        }
    }

    bool poll() override {
        try {
            return request_->poll() == RequestState::kDone;
        } catch (const NativeError& e) {
            rethrow_as_lost(e);
        }
    }

  private:
    const std::shared_ptr<Request> request_;
};

}  // namespace

NixlDriver::NixlDriver(std::shared_ptr<const Library> library, std::string name,
                       const DriverOptions& options)
    : agent_(Agent::create(std::move(library), std::move(name), options.agent)),
      backend_(options.backend) {
    const auto backend = agent_->create_backend(options.backend, options.backend_params);
    call_options_.backends = {backend};
    memory_types_ = agent_->backend_info(*backend).memory;
}

NixlDriver::~NixlDriver() {
    call_options_.backends.clear();
    try {
        agent_->close(Duration::zero());
    } catch (const std::exception&) {
        // Something still uses the agent; it goes when that goes.
    }
}

std::unique_ptr<transfer::Registered> NixlDriver::register_memory(
    std::span<const transfer::Span> spans) {
    std::map<transfer::Memory, std::vector<Row>> by_memory;
    for (const transfer::Span& span : spans) {
        by_memory[span.memory].push_back(span.row);
    }
    auto registered = std::make_unique<NixlRegistered>();
    for (const auto& [memory, rows] : by_memory) {
        // NIXL takes the word of the caller that it may hand the memory to the backend.
        const auto type = static_cast<MemoryType>(memory);
        if (std::find(memory_types_.begin(), memory_types_.end(), type) == memory_types_.end()) {
            throw Error("RegistrationError",
                        text("NIXL's ", backend_, " backend does not move ", memory_name(type),
                             " memory (", rows[0].str(), "); choose another backend"));
        }
        registered->registrations.push_back(agent_->register_memory(
            static_cast<MemoryType>(memory), rows, {}, nullptr, call_options_));
    }
    return registered;
}

std::string NixlDriver::metadata() {
    return agent_->local_metadata();
}

std::unique_ptr<transfer::Connection> NixlDriver::connect(const std::string& name,
                                                          std::string_view metadata) {
    const std::string loaded = agent_->load_remote_metadata(metadata);
    auto connection = std::make_unique<NixlConnection>(agent_, loaded);
    if (loaded != name) {
        throw Error("HandshakeError", "the hello of agent '" + name +
                                          "' carries the NIXL metadata of agent '" + loaded + "'");
    }
    return connection;
}

void NixlDriver::refresh(transfer::Connection& /*connection*/, std::string_view metadata) {
    (void)agent_->load_remote_metadata(metadata);
}

bool NixlDriver::is_alive(transfer::Connection& connection) {
    const auto& peer = static_cast<const NixlConnection&>(connection);
    try {
        // The first message after a silent death may still be taken; progress in between finds out.
        agent_->notify(peer.name, kPing, call_options_);
        receive(early_);
        agent_->notify(peer.name, kPing, call_options_);
    } catch (const NativeError&) {
        return false;
    }
    return true;
}

template <class Make>
std::unique_ptr<transfer::NativeXfer> NixlDriver::request(transfer::Connection& connection,
                                                          Make make) {
    try {
        return std::make_unique<NixlOperation>(make());
    } catch (const NativeError& e) {
        // Up to 1.4 NIXL drops a lost peer and then cannot make requests for it.
        if (!is_alive(connection)) {
            throw ConnectionLost(e);
        }
        throw;
    }
}

std::unique_ptr<transfer::NativeXfer> NixlDriver::make(transfer::Connection& connection,
                                                       transfer::Op op,
                                                       const transfer::RowPairs& rows) {
    const auto& peer = static_cast<const NixlConnection&>(connection);
    return request(connection, [&] {
        return agent_->create_request(
            static_cast<Operation>(op), static_cast<MemoryType>(rows.local_memory), rows.local,
            static_cast<MemoryType>(rows.remote_memory), rows.remote, peer.name, call_options_);
    });
}

std::unique_ptr<transfer::Prepared> NixlDriver::prepare(transfer::Connection& connection,
                                                        const transfer::RowPairs& rows) {
    const auto& peer = static_cast<const NixlConnection&>(connection);
    auto prepared = std::make_unique<NixlPrepared>();
    prepared->local =
        agent_->prepare({}, static_cast<MemoryType>(rows.local_memory), rows.local, call_options_);
    prepared->remote = agent_->prepare(peer.name, static_cast<MemoryType>(rows.remote_memory),
                                       rows.remote, call_options_);
    return prepared;
}

std::unique_ptr<transfer::NativeXfer> NixlDriver::make(transfer::Connection& connection,
                                                       transfer::Op op,
                                                       transfer::Prepared& prepared,
                                                       const transfer::IndexPairs& indices) {
    const auto& lists = static_cast<const NixlPrepared&>(prepared);
    return request(connection, [&] {
        return agent_->make_request(static_cast<Operation>(op), lists.local, indices.local,
                                    lists.remote, indices.remote, call_options_);
    });
}

void NixlDriver::notify(transfer::Connection& connection, const std::string& message) {
    const auto& peer = static_cast<const NixlConnection&>(connection);
    try {
        agent_->notify(peer.name, message, call_options_);
    } catch (const NativeError& e) {
        rethrow_as_lost(e);
    }
}

bool NixlDriver::receive(std::vector<transfer::Notification>& into) {
    if (&into != &early_ && !early_.empty()) {
        into.insert(into.end(), std::make_move_iterator(early_.begin()),
                    std::make_move_iterator(early_.end()));
        early_.clear();
    }
    for (auto& note : agent_->take_notifications(call_options_)) {
        if (note.message != kPing) {
            into.push_back({std::move(note.peer), std::move(note.message)});
        }
    }
    return false;
}

}  // namespace pynixlkv::nixl
