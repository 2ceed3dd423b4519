#include "nixl/agent.hpp"

#include <algorithm>
#include <limits>
#include <thread>

#include "base/error.hpp"
#include "base/keep.hpp"
#include "nixl/prepared_list.hpp"
#include "nixl/registration.hpp"
#include "nixl/xfer_request.hpp"

namespace pynixlkv::nixl {

namespace {

constexpr Duration kPollInterval = std::chrono::microseconds(200);

const std::string kServer =
    "the metadata server (NIXL_ETCD_ENDPOINTS or NIXL_TCPSTORE_ENDPOINT names one)";

/// Keep an agent whose requests never became quiet reachable for ever.
void bury(std::shared_ptr<Agent> agent) {
    struct Graveyard {
        std::mutex mutex;
        std::vector<std::shared_ptr<Agent>> agents;
    };
    static auto& graveyard = keep_for_ever<Graveyard>();
    const std::lock_guard lock(graveyard.mutex);
    graveyard.agents.push_back(std::move(agent));
}

void require_rows(Rows rows, const char* side, bool allow_zero_length) {
    if (rows.empty()) {
        throw Error("ConfigError", text("the ", side, " descriptors are empty"));
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Descriptor& row = rows[i];
        if (row.length == 0 && !allow_zero_length) {
            throw Error("ConfigError",
                        text(side, " descriptor ", i, " (", row.str(), ") has zero length"));
        }
        if (row.length > std::numeric_limits<std::uint64_t>::max() - row.address) {
            throw Error("ConfigError", text(side, " descriptor ", i, " (", row.str(),
                                            ") goes beyond the end of the address space"));
        }
    }
}

}  // namespace

// ---- life

Agent::Agent(std::shared_ptr<const Library> library, std::string name, const AgentConfig& config)
    : handle_(std::make_shared<AgentHandle>(std::move(library), std::move(name), config)),
      calls_run_alone_(config.thread_sync == ThreadSync::kNone) {}

bool Agent::close(Duration patience) {
    if (!is_here() || is_closed_) {
        is_closed_ = true;
        return num_quarantined_ == 0;
    }
    if (const std::size_t requests = num_requests_; requests != 0) {
        throw Error("StateError", text("agent '", name(), "' cannot be closed: ", requests,
                                       " of its requests are not released"));
    }
    drain(patience);
    std::vector<std::shared_ptr<void>> stuck;  // goes after the locks
    const std::unique_lock alone(calls_);
    if (is_closed_) {
        return num_quarantined_ == 0;
    }
    if (num_quarantined_ != 0) {
        is_closed_ = true;
        handle_->abandon();
        bury(shared_from_this());
        return false;
    }
    const std::lock_guard lock(books_);
    const std::size_t registrations = registrations_.size();
    const std::size_t prepared = num_prepared_;
    const std::size_t requests = num_requests_;
    if (registrations + prepared + requests != 0) {
        throw Error("StateError", text("agent '", name(), "' cannot be closed: ", registrations,
                                       " registrations, ", prepared, " prepared lists and ",
                                       requests, " requests are not released"));
    }
    is_closed_ = true;
    backends_.clear();
    stuck.swap(stuck_);
    handle_->destroy();
    return true;
}

std::size_t Agent::reap() {
    if (num_quarantined_ == 0) {
        return 0;
    }
    std::vector<std::unique_ptr<XferBody>> quiet;  // freed after the locks: may end registrations
    const Call call(*this, "get_xfer_status");
    const std::lock_guard lock(books_);
    quiet.reserve(quarantined_.size());
    std::erase_if(quarantined_, [&](std::unique_ptr<XferBody>& body) {
        if (body->native.poll() == Status::kInProgress ||
            body->native.release() != Status::kSuccess) {
            return false;
        }
        quiet.push_back(std::move(body));
        return true;
    });
    num_quarantined_ = quarantined_.size();
    return quarantined_.size();
}

std::size_t Agent::drain(Duration patience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    std::size_t left = reap();
    while (left != 0 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(kPollInterval);
        left = reap();
    }
    return left;
}

void Agent::quarantine(std::unique_ptr<XferBody> body) noexcept {
    const std::lock_guard lock(books_);
    try {
        quarantined_.push_back(std::move(body));
        num_quarantined_ = quarantined_.size();
    } catch (...) {
        // Out of memory: better lost than freed under a running transfer.
        (void)body.release();  // NOLINT(bugprone-unused-return-value)
    }
}

// ---- calls

Agent::Call::Call(const Agent& agent, const char* call, std::mutex* object)
    : device_(agent.handle_->devices().enter()) {
    agent.handle_->process().require_here("a NIXL agent");
    if (agent.calls_run_alone_) {
        alone_ = std::unique_lock(agent.calls_);
    } else {
        shared_ = std::shared_lock(agent.calls_);
        if (object != nullptr) {
            object_ = std::unique_lock(*object);
        }
    }
    if (agent.is_closed_) {
        throw Error("ClosedError", text(call, ": agent '", agent.name(), "' is closed"));
    }
}

Agent::Call::Call(const Agent& agent, std::mutex& object, std::try_to_lock_t /*unused*/) noexcept
    : device_(agent.handle_->devices().enter()) {
    if (!agent.is_here() || agent.is_closed_) {
        return;
    }
    if (agent.calls_run_alone_) {
        alone_ = std::unique_lock(agent.calls_, std::try_to_lock);
    } else {
        shared_ = std::shared_lock(agent.calls_, std::try_to_lock);
        if (shared_.owns_lock()) {
            object_ = std::unique_lock(object, std::try_to_lock);
        }
    }
}

Owned<capi::OptArgs> Agent::checked_args(const CallOptions& options) const {
    for (const auto& backend : options.backends) {
        if (!backend->is_of(*handle_)) {
            throw Error("ConfigError", text("backend ", backend->type(),
                                            " was made by another agent than '", name(), "'"));
        }
    }
    return make_opt_args(library(), options);
}

template <class Body>
auto Agent::addressing(const char* call, const std::string& peer, Memory memory, Rows rows,
                       Body&& body) const {
    try {
        return body();
    } catch (const NativeError&) {
        if (peer == name()) {
            throw;
        }
        if (!handle_->check_remote_metadata(peer, memory, {})) {
            throw Error("UnknownPeerError",
                        text(call, ": agent '", name(), "' does not know a peer '", peer,
                             "'; load its metadata (NIXL also forgets peers that disconnect)"));
        }
        for (std::size_t i = 0; i < rows.size(); ++i) {
            if (!handle_->check_remote_metadata(peer, memory, rows.subspan(i, 1))) {
                throw Error("NotRegisteredError",
                            text(call, ": remote descriptor ", i, " (", memory_name(memory), " ",
                                 rows[i].str(), ") is not wholly inside memory that peer '", peer,
                                 "' has registered, as far as the metadata that agent '", name(),
                                 "' has loaded tells"));
            }
        }
        throw;
    }
}

// ---- plugins and backends

std::vector<std::string> Agent::available_plugins() const {
    const Call call(*this, "get_available_plugins");
    return handle_->available_plugins();
}

BackendInfo Agent::plugin_info(const std::string& plugin) const {
    const Call call(*this, "get_plugin_params");
    return handle_->plugin_info(plugin);
}

std::shared_ptr<Backend> Agent::create_backend(const std::string& type, const ParamMap& params) {
    const Call call(*this, "create_backend");
    for (const auto& backend : backends()) {
        if (backend->type() == type) {
            throw Error("StateError", text("agent '", name(), "' has a backend ", type,
                                           " already; there can be one of each type"));
        }
    }
    auto backend = handle_->create_backend(type, params);
    const std::lock_guard lock(books_);
    backends_.push_back(backend);
    return backend;
}

BackendInfo Agent::backend_info(const Backend& backend) const {
    const Call call(*this, "get_backend_params");
    if (!backend.is_of(*handle_)) {
        throw Error("ConfigError", text("backend ", backend.type(),
                                        " was made by another agent than '", name(), "'"));
    }
    return handle_->backend_info(backend);
}

std::vector<std::shared_ptr<Backend>> Agent::backends() const {
    const std::lock_guard lock(books_);
    return backends_;
}

// ---- memory

void Agent::add_spans(const std::shared_ptr<Registration>& registration) {
    const std::lock_guard lock(books_);
    const Memory memory = registration->memory();
    const Rows rows = registration->rows();
    transfer::MemoryMap& spans = spans_[memory];
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (const auto* there = spans.find_exactly(rows[i])) {
            const bool twice = there->owner == registration->id();
            spans.remove(registration->id());
            throw Error("AlreadyRegisteredError",
                        text(memory_name(memory), " descriptor ", i, " (", rows[i].str(),
                             twice ? ") is given twice" : ") is registered already",
                             " with agent '", name(), "'"));
        }
        spans.add_overlapping(registration->id(), {rows[i], memory});
    }
    registrations_[registration->id()] = registration;
}

void Agent::remove_spans(const Registration& registration) noexcept {
    const std::lock_guard lock(books_);
    spans_[registration.memory()].remove(registration.id());
    registrations_.erase(registration.id());
}

void Agent::keep_for_ever(std::shared_ptr<void> keepalive) noexcept {
    const std::lock_guard lock(books_);
    try {
        stuck_.push_back(std::move(keepalive));
    } catch (...) {
        // Out of memory: leak it, since NIXL may still use the buffer.
        (void)new (std::nothrow) std::shared_ptr<void>(std::move(keepalive));
    }
}

std::vector<Pin> Agent::pin(Memory memory, Rows rows, const char* side) const {
    std::vector<Pin> pins;
    std::vector<std::shared_ptr<Registration>> released;  // goes after the lock, as pins do
    const std::lock_guard lock(books_);
    const auto map = spans_.find(memory);
    std::shared_ptr<Registration> found;
    const auto accept = [&](const transfer::MemoryMap::Entry& entry) {
        found = registrations_.at(entry.owner).lock();
        if (found && found->is_released()) {
            released.push_back(std::move(found));
        }
        return found != nullptr;
    };
    const transfer::MemoryMap::Entry* hit = nullptr;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Descriptor& row = rows[i];
        if (hit != nullptr && hit->row.contains(row)) {
            continue;
        }
        hit = map == spans_.end() ? nullptr : map->second.find(row, accept);
        if (hit == nullptr && is_storage(memory) && map != spans_.end()) {
            hit = map->second.find_exactly({0, 0, row.device});  // the whole file
            hit = hit != nullptr && accept(*hit) ? hit : nullptr;
        }
        if (hit == nullptr) {
            throw Error(
                "NotRegisteredError",
                text(side, " descriptor ", i, " (", memory_name(memory), " ", row.str(),
                     ") is not wholly inside memory that agent '", name(), "' has registered"));
        }
        const auto same = [&](const Pin& pin) { return pin.get() == found.get(); };
        if (std::none_of(pins.begin(), pins.end(), same)) {
            pins.emplace_back(std::move(found));
        } else {
            found.reset();  // not the last reference: a pin holds one
        }
    }
    return pins;
}

std::shared_ptr<Registration> Agent::register_memory(Memory memory, Rows rows,
                                                     std::span<const std::string> blobs,
                                                     std::shared_ptr<void> keepalive,
                                                     const CallOptions& options) {
    (void)checked_args(options);
    require_rows(rows, "registered", is_storage(memory));
    const auto registration = std::make_shared<Registration>(
        shared_from_this(), RegisteredMemory(handle_, memory, rows, blobs, options),
        std::move(keepalive));
    const Call call(*this, "register_mem");
    add_spans(registration);
    try {
        registration->memory_.add();
    } catch (...) {
        remove_spans(*registration);
        throw;
    }
    const std::lock_guard lock(books_);
    registration->is_released_ = false;
    return registration;
}

std::vector<std::optional<ParamMap>> Agent::query_memory(Memory memory, Rows rows,
                                                         std::span<const std::string> blobs,
                                                         const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    require_rows(rows, "queried", true);
    if (options.backends.size() != 1) {
        throw Error("ConfigError",
                    text("query_mem asks exactly one backend, but got ", options.backends.size()));
    }
    const Owned<capi::RegList> list = make_reg_list(library(), memory, rows, blobs);
    const Call call(*this, "query_mem");
    return handle_->query_memory(list.get(), args.get());
}

// ---- metadata

std::string Agent::local_metadata() const {
    const Call call(*this, "get_local_md");
    return handle_->local_metadata();
}

std::string Agent::local_partial_metadata(Memory memory, Rows rows,
                                          const CallOptions& options) const {
    const Owned<capi::OptArgs> args = checked_args(options);
    const std::vector<Pin> pins = pin(memory, rows, "local");
    const Owned<capi::RegList> list = make_reg_list(library(), memory, rows, {});
    const Call call(*this, "get_local_partial_md");
    return handle_->local_partial_metadata(list.get(), args.get());
}

std::string Agent::load_remote_metadata(std::string_view metadata) {
    if (metadata.empty()) {
        throw Error("ConfigError", text("the metadata given to agent '", name(), "' is empty"));
    }
    const Call call(*this, "load_remote_md");
    return handle_->load_remote_metadata(metadata);
}

bool Agent::check_remote_metadata(const std::string& peer, Memory memory, Rows rows) const {
    const Call call(*this, "check_remote_md");
    return handle_->check_remote_metadata(peer, memory, rows);
}

void Agent::invalidate_remote_metadata(const std::string& peer) {
    const Call call(*this, "invalidate_remote_md");
    {
        // First, so that nothing can use handles that NIXL is about to invalidate.
        const std::lock_guard lock(books_);
        ++generations_[peer];
    }
    addressing("invalidate_remote_md", peer, Memory::kDram, {},
               [&] { handle_->invalidate_remote_metadata(peer); });
}

std::uint64_t Agent::generation(const std::string& peer) const {
    const std::lock_guard lock(books_);
    const auto found = generations_.find(peer);
    return found == generations_.end() ? 0 : found->second;
}

void Agent::require_fresh(const std::string& peer, std::uint64_t generation_of,
                          const char* what) const {
    const std::uint64_t now = generation(peer);
    if (generation_of != now) {
        throw Error("StalePeerError", text(what, " was made for generation ", generation_of,
                                           " of peer '", peer, "', which is at generation ", now,
                                           " since it was invalidated; make it again"));
    }
}

void Agent::send_local_metadata(const ListenerAddress& address) {
    const Owned<capi::OptArgs> args = make_opt_args(library(), {.address = address});
    const Call call(*this, "send_local_md");
    library().check(fn().send_local_md(handle_->native(), args.get()), "send_local_md", [&] {
        return text(handle_->about(), ", to ", address.ip.empty() ? kServer : address.ip);
    });
}

void Agent::send_local_partial_metadata(Memory memory, Rows rows, const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    const std::vector<Pin> pins = pin(memory, rows, "local");
    const Owned<capi::RegList> list = make_reg_list(library(), memory, rows, {});
    const Call call(*this, "send_local_partial_md");
    library().check(fn().send_local_partial_md(handle_->native(), list.get(), args.get()),
                    "send_local_partial_md", [&] {
                        return text(handle_->about(), ", ", rows.size(), " descriptors, to ",
                                    options.address.ip.empty() ? kServer : options.address.ip);
                    });
}

void Agent::fetch_remote_metadata(const std::string& peer, const ListenerAddress& address) {
    const Owned<capi::OptArgs> args = make_opt_args(library(), {.address = address});
    const Call call(*this, "fetch_remote_md");
    library().check(
        fn().fetch_remote_md(handle_->native(), peer.c_str(), args.get()), "fetch_remote_md", [&] {
            return text(handle_->about(peer), ", from ", address.ip.empty() ? kServer : address.ip);
        });
}

void Agent::invalidate_local_metadata(const ListenerAddress& address) {
    const Owned<capi::OptArgs> args = make_opt_args(library(), {.address = address});
    const Call call(*this, "invalidate_local_md");
    handle_->check(fn().invalidate_local_md(handle_->native(), args.get()), "invalidate_local_md");
}

void Agent::make_connection(const std::string& peer, const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    const Call call(*this, "agent_make_connection");
    addressing("agent_make_connection", peer, Memory::kDram, {}, [&] {
        handle_->check(fn().agent_make_connection(handle_->native(), peer.c_str(), args.get()),
                       "agent_make_connection", peer);
    });
}

// ---- transfers

std::shared_ptr<PreparedList> Agent::prepare(const std::string& peer, Memory memory, Rows rows,
                                             const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    const bool is_local = peer.empty();
    const char* side = is_local ? "local" : "remote";
    require_rows(rows, side, false);
    auto prepared = std::make_shared<PreparedList>(shared_from_this(), peer, memory, rows,
                                                   is_local ? 0 : generation(peer));
    if (is_local || peer == name()) {
        prepared->pins_ = pin(memory, rows, side);
    }
    const Owned<capi::XferList> list = make_xfer_list(library(), memory, rows);
    const Call call(*this, "prep_xfer_dlist");
    const auto prep = [&] { return handle_->prepare(peer, list.get(), args.get()); };
    prepared->handle_ = PreparedHandle(
        is_local ? prep() : addressing("prep_xfer_dlist", peer, memory, rows, prep), {handle_});
    prepared->is_released_ = false;
    ++num_prepared_;
    return prepared;
}

std::shared_ptr<XferRequest> Agent::make_request(Op op, const std::shared_ptr<PreparedList>& local,
                                                 std::span<const std::int32_t> local_indices,
                                                 const std::shared_ptr<PreparedList>& remote,
                                                 std::span<const std::int32_t> remote_indices,
                                                 const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    if (local->agent().get() != this || remote->agent().get() != this) {
        throw Error("ConfigError", text("the ", local->agent().get() != this ? "local" : "remote",
                                        " list was made by another agent than '", name(), "'"));
    }
    const std::string& peer = remote->peer();
    if (!local->peer().empty() || peer.empty()) {
        throw Error("ConfigError",
                    text("make_xfer_req needs a list prepared for the local side and one for a "
                         "peer, but got '",
                         local->peer(), "' and '", peer, "' ('' is local)"));
    }
    const std::size_t count = local_indices.size();
    if (count == 0 || count != remote_indices.size()) {
        throw Error("ConfigError",
                    text("make_xfer_req got ", count, " local and ", remote_indices.size(),
                         " remote indices; there must be as many, and at least one"));
    }
    const auto checked_length = [](const PreparedList& list, const char* side, std::size_t i,
                                   std::int32_t index) {
        if (index < 0 || static_cast<std::size_t>(index) >= list.size()) {
            throw Error("ConfigError",
                        text(side, " index ", index, " at position ", i,
                             " is out of range; the list has ", list.size(), " descriptors"));
        }
        return list.length(static_cast<std::size_t>(index));
    };
    std::uint64_t num_bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t ours = checked_length(*local, "local", i, local_indices[i]);
        const std::uint64_t theirs = checked_length(*remote, "remote", i, remote_indices[i]);
        if (ours != theirs) {
            throw Error("ConfigError",
                        text("lengths differ at position ", i, ": local descriptor ",
                             local_indices[i], " has ", ours, " bytes, remote descriptor ",
                             remote_indices[i], " has ", theirs));
        }
        num_bytes += ours;
    }
    auto body = std::make_unique<XferBody>(handle_);
    {
        const std::lock_guard lock(books_);
        body->use(local);
        body->use(remote);
    }
    auto request = std::make_shared<XferRequest>(shared_from_this(), op, peer, remote->generation_,
                                                 count, num_bytes, std::move(body));
    const Call call(*this, "make_xfer_req");
    require_fresh(peer, remote->generation_, "the remote list");
    request->body_->native.set(addressing("make_xfer_req", peer, remote->memory_, {}, [&] {
        return handle_->make_xfer(op, local->handle_.get(), local_indices, remote->handle_.get(),
                                  remote_indices, peer, args.get());
    }));
    return request;
}

std::shared_ptr<XferRequest> Agent::create_request(Op op, Memory local_memory, Rows local,
                                                   Memory remote_memory, Rows remote,
                                                   const std::string& peer,
                                                   const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    require_rows(local, "local", false);
    require_rows(remote, "remote", false);
    if (local.size() != remote.size()) {
        throw Error("ConfigError", text("there are ", local.size(), " local but ", remote.size(),
                                        " remote descriptors"));
    }
    std::uint64_t num_bytes = 0;
    for (std::size_t i = 0; i < local.size(); ++i) {
        if (local[i].length != remote[i].length) {
            throw Error("ConfigError",
                        text("lengths differ at descriptor ", i, ": local has ", local[i].length,
                             " bytes, remote has ", remote[i].length));
        }
        num_bytes += local[i].length;
    }
    const std::uint64_t generation_of = generation(peer);
    auto body = std::make_unique<XferBody>(handle_);
    body->pins = pin(local_memory, local, "local");
    if (peer == name()) {
        for (Pin& more : pin(remote_memory, remote, "remote")) {
            body->pins.push_back(std::move(more));
        }
    }
    auto request = std::make_shared<XferRequest>(shared_from_this(), op, peer, generation_of,
                                                 local.size(), num_bytes, std::move(body));
    const Owned<capi::XferList> local_list = make_xfer_list(library(), local_memory, local);
    const Owned<capi::XferList> remote_list = make_xfer_list(library(), remote_memory, remote);
    const Call call(*this, "create_xfer_req");
    request->body_->native.set(addressing("create_xfer_req", peer, remote_memory, remote, [&] {
        return handle_->create_xfer(op, local_list.get(), remote_list.get(), peer, args.get());
    }));
    return request;
}

// ---- notifications

void Agent::notify(const std::string& peer, std::string_view message, const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    const Call call(*this, "gen_notif");
    addressing("gen_notif", peer, Memory::kDram, {},
               [&] { handle_->notify(peer, message, args.get()); });
}

std::vector<Notification> Agent::take_notifications(const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    const Call call(*this, "get_notifs", &notifications_mutex_);
    return handle_->take_notifications(args.get());
}

}  // namespace pynixlkv::nixl
