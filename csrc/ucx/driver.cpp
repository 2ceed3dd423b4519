#include "ucx/driver.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/bytes.hpp"
#include "ucx/address.hpp"
#include "ucx/connection.hpp"

namespace pynixlkv::ucx {

namespace {

using transfer::Memory;
using transfer::Op;

/// Most requests in flight of one transfer: each costs UCX memory, and more are not faster.
constexpr std::size_t kWindow = 1024;
/// Longest name of a sender of notifications, in bytes.
constexpr std::size_t kMaxName = 512;
/// Most calls of progress in a row, so that posting is not delayed.
constexpr int kMaxProgress = 64;
/// Longest wait for a ping to leave this process.
constexpr auto kPingDeadline = std::chrono::milliseconds(100);

capi::MemoryType memory_type(Memory memory) {
    switch (memory) {
        case Memory::kDram:
            return capi::kMemoryHost;
        case Memory::kVram:
            return capi::kMemoryCuda;
        default:
            throw Error("RegistrationError",
                        "UCX moves host and GPU memory only; use NIXL for storage");
    }
}

bool can_map(const RemoteRegions& regions) {
    return std::any_of(regions.all().begin(), regions.all().end(),
                       [](const auto& entry) { return entry.second.direct != nullptr; });
}

/// Whether these rows can be copied without UCX: through mappings, or by the kernel.
bool can_copy(const UcxConnection& connection, const transfer::DescriptorPairs& rows) {
    // UCX 1.23 also names pointers to device memory of a peer.
    if (rows.local_memory != Memory::kDram || rows.remote_memory != Memory::kDram) {
        return false;
    }
    const RemoteRegion* hint = nullptr;
    return connection.memory ||
           std::all_of(rows.remote.begin(), rows.remote.end(), [&](const Descriptor& row) {
               return connection.regions->find(row, hint).direct != nullptr;
           });
}

/// Whether some of these rows of host memory are reached by no transport.
bool needs_lane(const UcxConnection& connection, const transfer::DescriptorPairs& rows) {
    const RemoteRegion* hint = nullptr;
    return connection.may_be_served() && rows.local_memory == Memory::kDram &&
           rows.remote_memory == Memory::kDram &&
           std::any_of(rows.remote.begin(), rows.remote.end(), [&](const Descriptor& row) {
               return !connection.is_one_sided || !connection.regions->find(row, hint).key;
           });
}

class UcxRegistered final : public transfer::Registered {
  public:
    explicit UcxRegistered(std::shared_ptr<LocalRegions> regions) : regions_(std::move(regions)) {}
    ~UcxRegistered() override {
        for (const Descriptor& row : rows_) {
            regions_->remove(row);
        }
    }

    void add(LocalRegion region) {
        rows_.push_back(region.row);
        regions_->add(std::move(region));
    }

  private:
    const std::shared_ptr<LocalRegions> regions_;
    std::vector<Descriptor> rows_;
};

/// Moves bytes by UCX's gets and puts.
class OneSidedXfer final : public UcxXfer {
  public:
    OneSidedXfer(UcxConnection& connection, const LocalRegions& local_regions, Op op,
                 const transfer::DescriptorPairs& rows)
        : UcxXfer(connection, local_regions, op, rows),
          device_(rows.local_memory == Memory::kVram ? static_cast<int>(rows.local.front().device)
                                                     : -1) {
        if (!regions_->has_served) {
            return;
        }
        const auto is_stuck = [](const Part& part) { return !part.region->key; };
        if (const auto stuck = std::find_if(parts_.begin(), parts_.end(), is_stuck);
            stuck != parts_.end()) {
            throw Error("StateError",
                        text("the peer's shared memory of another user, ", stuck->region->row.str(),
                             ", only moves to host memory"));
        }
    }

    void post() override {
        issue();
        (void)is_over();
    }

    bool poll() override {
        issue();
        if (!is_over() || next_ < parts_.size()) {
            return false;
        }
        if (op_ == Op::kWrite && !is_flushed_) {
            // A complete put means that the local buffer is free; a complete flush, that the bytes
            // are at the peer.
            is_flushed_ = true;
            endpoint_->flush(completion_);
            return is_over();
        }
        return true;
    }

  private:
    /// A failure shows only when nothing moves any more.
    /// @throws NativeError if the posted requests have ended and one has failed
    bool is_over() const {
        if (!completion_.is_quiet()) {
            return false;
        }
        if (has_failed()) {
            fail(call_of(op_));
        }
        return true;
    }

    void issue() {
        const auto inside = endpoint_->worker()->context()->devices().enter(device_);
        for (; next_ < parts_.size() && completion_.pending() < kWindow && !has_failed(); ++next_) {
            const Part& part = parts_[next_];
            endpoint_->move(completion_, op_, part.local, part.length, part.memory, part.remote,
                            *part.region->key);
        }
    }

    const int device_;  ///< of the first local row; -1 in host memory
    bool is_flushed_ = false;
};

}  // namespace

UcxDriver::UcxDriver(std::shared_ptr<Context> context, std::string name, capi::ErrorMode errors,
                     std::size_t copy_threads)
    : context_(std::move(context)),
      name_(std::move(name)),
      errors_(errors),
      threads_(std::make_shared<CopyThreads>(copy_threads)),
      regions_(std::make_shared<LocalRegions>()),
      worker_(std::make_shared<Worker>(context_)),
      clients_(worker_, errors_),
      lanes_(worker_->address(), PortRange::read(context_->setting("TCP_PORT_RANGE")),
             worker_->event_fd(), token_, regions_, clients_) {
    if (name_.size() > kMaxName) {
        throw Error("ConfigError", text("the agent's name has ", name_.size(),
                                        " bytes, more than UCX agents take: ", kMaxName));
    }
    const std::string own = worker_->address();
    if (!is_plausible_address(own, own)) {
        throw Error("ConfigError",
                    text("UCX's address of this agent, ", own.size(),
                         " bytes, has a format that peers do not read; agents need "
                         "UCX_UNIFIED_MODE=n and UCX_ADDRESS_VERSION=v1, the defaults"));
    }
    worker_->on_message(
        [this](std::string_view header, std::string_view data) { on_message(header, data); });
}

UcxDriver::~UcxDriver() {
    clients_.close();
    std::atomic_ref(token_).store(0);  // peers of this host no longer copy
}

/// Called by UCX, through which no exception may pass.
void UcxDriver::on_message(std::string_view header, std::string_view data) {
    const auto read = read_header(header);
    if (!read) {
        return;
    }
    try {
        if (read->kind == MessageKind::kOpened) {
            unopened_->erase(read->connection);
        } else if (read->token != token_ || read->kind == MessageKind::kPing) {
            // A stranger's, or nothing to do.
        } else if (read->kind == MessageKind::kNote) {
            ByteReader in(data, "a notification");
            const std::string_view peer = in.get_bytes();
            if (peer.size() > kMaxName) {
                throw Error("WireError", text("its sender's name has ", peer.size(),
                                              " bytes, more than ", kMaxName));
            }
            inbox_.push_back({std::string(peer), std::string(in.rest())});
        } else {
            clients_.on_message(*read, data);
        }
    } catch (const std::exception& e) {
        receive_error_ = Error("StateError", text("a peer's message was dropped: ", e.what()));
    }
}

bool UcxDriver::arm() {
    try {
        return worker_->arm();
    } catch (const NativeError& e) {
        receive_error_ = e;  // thrown by the next receive(); until then the engine polls
        return true;
    }
}

void UcxDriver::stay_on_device() {
    if (!device_.scope) {
        device_.scope = device_.contexts.enter();
    }
}

void UcxDriver::expect_device_memory() {
    context_->devices().retain_active();
    stay_on_device();
}

std::unique_ptr<transfer::Registered> UcxDriver::register_memory(
    std::span<const transfer::Span> spans) {
    auto registered = std::make_unique<UcxRegistered>(regions_);
    for (const transfer::Span& span : spans) {
        std::shared_ptr<MemoryHandle> memory;
        if (span.memory == Memory::kDram) {
            memory = context_->find_allocated(span.row.address, span.row.length);
        }
        if (!memory) {
            memory = MemoryHandle::map(context_, span.row, memory_type(span.memory), true);
        }
        const bool is_fragile = span.is_fragile && !memory->is_allocated();
        registered->add({span.row, span.memory, std::move(memory), span.is_read_only, is_fragile});
    }
    stay_on_device();
    return registered;
}

std::string UcxDriver::metadata() {
    return describe(errors_, token_, worker_->address(), lanes_.places(), *regions_);
}

std::unique_ptr<transfer::Connection> UcxDriver::connect(const std::string& name,
                                                         std::string_view metadata,
                                                         std::optional<pid_t> process) {
    const Description description = read_description(metadata);
    if (description.errors != errors_) {
        throw Error("HandshakeError",
                    text("peer '", name, "' was made with error handling ",
                         description.errors == capi::kErrorPeer ? "on" : "off",
                         ", this agent with the opposite; UCX needs the same on both sides"));
    }
    const std::string own = worker_->address();
    if (!is_plausible_address(description.address, own)) {
        throw Error("WireError", text("the UCX address of peer '", name, "', ",
                                      description.address.size(), " bytes, is damaged"));
    }
    const std::string address =
        without_unroutable(without_other_processes(description.address, own, process), own);
    auto endpoint = std::make_shared<Endpoint>(worker_, address, errors_);
    auto regions = unpack_regions(endpoint, description);
    std::shared_ptr<Endpoint> spare;
    if (is_on_this_host(description) && !can_map(*regions)) {
        // If the peer connected first, UCX reuses its connection, which lacks the shared-memory
        // lanes. Create a second endpoint; keep the first, because closing it would close the
        // peer's.
        spare = std::make_shared<Endpoint>(worker_, address, errors_);
        auto mapped = unpack_regions(spare, description);
        if (can_map(*mapped)) {
            std::swap(endpoint, spare);
            regions = std::move(mapped);
        }
    }
    std::optional<PeerMemory> memory;
    if (process && share_cma(address, own)) {
        memory = PeerMemory::open(*process, {description.token_address, description.token});
    }
    auto connection =
        std::make_unique<UcxConnection>(std::move(endpoint), std::move(regions), name,
                                        description.token, unopened_, std::move(spare), memory);
    connection->worker_id = worker_id(description.address);
    clients_.let_in(connection->worker_id);
    connect_lanes(*connection, description, process.has_value());
    // Connects now instead of with the first transfer; from then on the loss of the peer shows.
    connection->send({.kind = MessageKind::kPing}, {});
    return connection;
}

void UcxDriver::connect_lanes(UcxConnection& peer, const Description& description, bool is_local) {
    peer.is_local = is_local;
    if (peer.may_be_served() && !peer.memory && peer.lanes.empty()) {
        peer.lanes = lanes_.connect(
            description.lanes, {.token = description.token, .connection = peer.number}, is_local);
        if (!is_local) {
            peer.add_lane = [this](const OwnLane& lane) { return lanes_.connect_beside(lane); };
        }
    }
}

void UcxDriver::refresh(transfer::Connection& connection, std::string_view metadata) {
    auto& peer = static_cast<UcxConnection&>(connection);
    const Description description = read_description(metadata);
    peer.refresh(unpack_regions(peer.endpoint, description));
    connect_lanes(peer, description, peer.is_local);
}

void UcxDriver::shut_out(transfer::Connection& connection) {
    clients_.shut_out(static_cast<UcxConnection&>(connection).worker_id);
}

bool UcxDriver::is_alive(transfer::Connection& connection) {
    auto& peer = static_cast<UcxConnection&>(connection);
    try {
        peer.send({.kind = MessageKind::kPing}, {});
    } catch (const NativeError&) {
        return false;
    }
    peer.progress_until(kPingDeadline, [&peer] { return peer.is_quiet(); });
    for (int i = 0; i < kMaxProgress && worker_->progress() > 0; ++i) {
    }
    return !peer.endpoint->failure();
}

std::unique_ptr<transfer::NativeXfer> UcxDriver::make(transfer::Connection& connection,
                                                      transfer::Op op,
                                                      const transfer::DescriptorPairs& rows) {
    auto& peer = static_cast<UcxConnection&>(connection);
    if (can_copy(peer, rows)) {
        return std::make_unique<CopyXfer>(peer, *regions_, op, rows, threads_);
    }
    if (needs_lane(peer, rows)) {
        return std::make_unique<LaneXfer>(peer, *regions_, op, rows);
    }
    return std::make_unique<OneSidedXfer>(peer, *regions_, op, rows);
}

void UcxDriver::notify(transfer::Connection& connection, const std::string& message) {
    ByteWriter out;
    out.put_bytes(name_);
    out.put_raw(message);
    static_cast<UcxConnection&>(connection).send({.kind = MessageKind::kNote}, out.take());
}

bool UcxDriver::receive(std::vector<transfer::Notification>& into) {
    int rounds = 0;
    while (rounds < kMaxProgress && worker_->progress() > 0) {
        ++rounds;
    }
    into.insert(into.end(), std::make_move_iterator(inbox_.begin()),
                std::make_move_iterator(inbox_.end()));
    inbox_.clear();
    const bool has_served = clients_.serve();
    const bool has_moved = lanes_.progress();
    if (const auto error = std::exchange(receive_error_, std::nullopt)) {
        throw Error(*error);
    }
    return rounds > 0 || has_served || has_moved;
}

}  // namespace pynixlkv::ucx
