#include "nixl/driver.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

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
    NixlConnection(std::shared_ptr<AgentHandle> owner, std::string peer)
        : agent(std::move(owner)), name(std::move(peer)) {}
    ~NixlConnection() override {
        // Up to 1.4 NIXL forgets a lost peer by itself and then does not know it here.
        if (agent->is_usable()) {
            (void)agent->fn().invalidate_remote_md(agent->native(), name.c_str());
        }
    }
    const std::shared_ptr<AgentHandle> agent;
    const std::string name;
};

struct NixlRegistered final : transfer::Registered {
    std::vector<RegisteredMemory> memory;
};

struct NixlPrepared final : transfer::Prepared {
    PreparedHandle local;
    PreparedHandle remote;
};

class NixlXfer final : public transfer::NativeXfer {
  public:
    NixlXfer(XferHandle native, Op op, std::string peer, std::size_t count)
        : native_(std::move(native)), op_(op), peer_(std::move(peer)), count_(count) {}

    void post() override { (void)has_ended(native_.post(nullptr), "post_xfer_req"); }
    bool poll() override { return has_ended(native_.poll(), "get_xfer_status"); }

  private:
    [[nodiscard]] bool has_ended(Status status, const char* call) const {
        if (status == Status::kSuccess || status == Status::kInProgress) {
            return status == Status::kSuccess;
        }
        try {
            const AgentHandle& agent = native_.agent();
            agent.library().fail(
                status, call,
                text(agent.about(peer_), ", ", op_name(op_), " of ", count_, " descriptors"));
        } catch (const NativeError& e) {
            rethrow_as_lost(e);
        }
    }

    XferHandle native_;
    const Op op_;
    const std::string peer_;
    const std::size_t count_;
};

}  // namespace

NixlDriver::NixlDriver(std::shared_ptr<const Library> library, std::string name,
                       const DriverOptions& options)
    : library_(std::move(library)), name_(std::move(name)), options_(options) {
    if (!options_.storage.backend.empty()) {
        (void)FileAgent(library_, options_.storage, -1);  // finds out whether it works
    }
    if (options_.backend.empty()) {
        failure_ = std::make_exception_ptr(Error(
            "ConfigError", text("agent '", name_,
                                "' has a backend of storage alone, which reaches no peer; name one "
                                "that does beside it, as in NixlAgent(backend=\"UCX\", "
                                "storage=\"POSIX\")")));
        return;
    }
    make();
    try {
        (void)agent_->local_metadata();
    } catch (const NativeError& e) {
        throw Error("ConfigError", text("NIXL's backend ", options_.backend, " reaches no peer (",
                                        e.what(), "); expected one that does, such as UCX. ",
                                        "Files are opened with NixlAgent(storage=\"POSIX\")"));
    }
}

void NixlDriver::make() {
    device_ = {};
    args_ = {};
    backend_.reset();
    agent_.reset();  // its successor has the same name
    try {
        agent_ = std::make_shared<AgentHandle>(library_, name_, options_.agent);
        backend_ = agent_->create_backend(options_.backend, options_.backend_params);
        memory_types_ = backend_->memory();
        args_ = make_opt_args(agent_->library(), {.backends = {backend_}});
    } catch (...) {
        failure_ = std::current_exception();
        throw;
    }
}

void NixlDriver::require_made() const {
    if (failure_) {
        std::rethrow_exception(failure_);
    }
}

void NixlDriver::stay_on_device() {
    if (!device_) {
        device_ = agent_->devices().enter();
    }
}

void NixlDriver::expect_device_memory() {
    require_made();
    agent_->devices().retain_active();
    stay_on_device();
}

std::unique_ptr<transfer::Registered> NixlDriver::register_memory(
    std::span<const transfer::Span> spans) {
    if (options_.backend.empty()) {  // files take any host memory
        for (const transfer::Span& span : spans) {
            if (span.memory != Memory::kDram) {
                throw Error("RegistrationError",
                            text(span.row.str(), " is ", memory_name(span.memory),
                                 " memory, and files take host memory alone"));
            }
        }
        return std::make_unique<NixlRegistered>();
    }
    require_made();
    std::map<Memory, std::vector<Descriptor>> by_memory;
    for (const transfer::Span& span : spans) {
        if (span.is_read_only) {
            throw Error("RegistrationError",
                        text(span.row.str(),
                             " is read-only, and NIXL would let peers write to it;"
                             " use a UcxAgent, or a copy in writable memory"));
        }
        by_memory[span.memory].push_back(span.row);
    }
    if (by_memory.contains(Memory::kVram) && options_.agent.progress_thread) {
        // NIXL's progress thread has no CUDA context, and crashes (ai-dynamo/nixl#2102).
        if (is_announced_ || agent_.use_count() > 1) {
            throw Error("RegistrationError",
                        text(agent_->about(), " was used before its device memory (",
                             by_memory[Memory::kVram][0].str(),
                             ") was registered; register device memory first"));
        }
        options_.agent.progress_thread = false;
        make();
    }
    auto registered = std::make_unique<NixlRegistered>();
    for (const auto& [memory, rows] : by_memory) {
        // NIXL takes the word of the caller that it may hand the memory to the backend.
        if (std::find(memory_types_.begin(), memory_types_.end(), memory) == memory_types_.end()) {
            throw Error(
                "RegistrationError",
                text("NIXL's ", backend_->type(), " backend does not move ", memory_name(memory),
                     " memory (", rows[0].str(), "); choose another backend"));
        }
        RegisteredMemory native(agent_, memory, rows, {}, {.backends = {backend_}});
        native.add(true);
        registered->memory.push_back(std::move(native));
    }
    stay_on_device();
    return registered;
}

std::string NixlDriver::metadata() {
    require_made();
    is_announced_ = true;
    return agent_->local_metadata();
}

std::unique_ptr<transfer::Connection> NixlDriver::connect(const std::string& name,
                                                          std::string_view metadata,
                                                          std::optional<pid_t> /*process*/) {
    require_made();
    const std::string loaded = agent_->load_remote_metadata(metadata);
    auto connection = std::make_unique<NixlConnection>(agent_, loaded);
    if (loaded != name) {
        throw Error("HandshakeError", "the hello of agent '" + name +
                                          "' carries the NIXL metadata of agent '" + loaded + "'");
    }
    return connection;
}

std::unique_ptr<transfer::Connection> NixlDriver::open_file(int fd) {
    if (options_.storage.backend.empty()) {
        throw Error("ConfigError", text("agent '", name_,
                                        "' has no storage backend; make it with "
                                        "NixlAgent(storage=\"POSIX\")"));
    }
    return std::make_unique<FileConnection>(library_, options_.storage, fd);
}

void NixlDriver::refresh(transfer::Connection& /*connection*/, std::string_view metadata) {
    (void)agent_->load_remote_metadata(metadata);
}

bool NixlDriver::is_alive(transfer::Connection& connection) {
    if (dynamic_cast<FileConnection*>(&connection) != nullptr) {
        return true;
    }
    const std::string& peer = static_cast<const NixlConnection&>(connection).name;
    try {
        // The first message after a silent death may still be taken; progress in between finds out.
        agent_->notify(peer, kPing, args_.get());
        receive(early_);
        agent_->notify(peer, kPing, args_.get());
    } catch (const NativeError&) {
        return false;
    }
    return true;
}

template <class Make>
std::unique_ptr<transfer::NativeXfer> NixlDriver::request(transfer::Connection& connection, Op op,
                                                          std::size_t count, Make make) {
    const std::string& peer = static_cast<const NixlConnection&>(connection).name;
    try {
        return std::make_unique<NixlXfer>(XferHandle(agent_, make(peer)), op, peer, count);
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
                                                       const transfer::DescriptorPairs& rows) {
    if (auto* file = dynamic_cast<FileConnection*>(&connection)) {
        return file->make(op, rows);
    }
    return request(connection, op, rows.local.size(), [&](const std::string& peer) {
        const auto local = make_xfer_list(agent_->library(), rows.local_memory, rows.local);
        const auto remote = make_xfer_list(agent_->library(), rows.remote_memory, rows.remote);
        return agent_->create_xfer(op, local.get(), remote.get(), peer, args_.get());
    });
}

std::unique_ptr<transfer::Prepared> NixlDriver::prepare(transfer::Connection& connection,
                                                        const transfer::DescriptorPairs& rows) {
    if (dynamic_cast<FileConnection*>(&connection) != nullptr) {
        return nullptr;
    }
    const auto prepare_side = [this](const std::string& peer, Memory memory, Rows side) {
        const auto list = make_xfer_list(agent_->library(), memory, side);
        return PreparedHandle(agent_->prepare(peer, list.get(), args_.get()), {agent_});
    };
    auto prepared = std::make_unique<NixlPrepared>();
    prepared->local = prepare_side({}, rows.local_memory, rows.local);
    prepared->remote = prepare_side(static_cast<const NixlConnection&>(connection).name,
                                    rows.remote_memory, rows.remote);
    return prepared;
}

std::unique_ptr<transfer::NativeXfer> NixlDriver::make(transfer::Connection& connection,
                                                       transfer::Op op,
                                                       transfer::Prepared& prepared,
                                                       const transfer::IndexPairs& indices) {
    const auto& lists = static_cast<const NixlPrepared&>(prepared);
    return request(connection, op, indices.local.size(), [&](const std::string& peer) {
        return agent_->make_xfer(op, lists.local.get(), indices.local, lists.remote.get(),
                                 indices.remote, peer, args_.get());
    });
}

void NixlDriver::notify(transfer::Connection& connection, const std::string& message) {
    if (dynamic_cast<FileConnection*>(&connection) != nullptr) {
        throw Error("ConfigError", "a file receives no notifications");
    }
    try {
        agent_->notify(static_cast<const NixlConnection&>(connection).name, message, args_.get());
    } catch (const NativeError& e) {
        rethrow_as_lost(e);
    }
}

bool NixlDriver::receive(std::vector<transfer::Notification>& into) {
    if (options_.backend.empty()) {
        return false;
    }
    require_made();
    if (&into != &early_ && !early_.empty()) {
        into.insert(into.end(), std::make_move_iterator(early_.begin()),
                    std::make_move_iterator(early_.end()));
        early_.clear();
    }
    for (auto& note : agent_->take_notifications(args_.get())) {
        if (note.message != kPing) {
            into.push_back(std::move(note));
        }
    }
    return false;
}

}  // namespace pynixlkv::nixl
