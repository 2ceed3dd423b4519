#include "nixl/agent.hpp"

#include <algorithm>
#include <limits>
#include <thread>

#include "base/error.hpp"
#include "base/keep.hpp"
#include "nixl/prepared_list.hpp"
#include "nixl/registration.hpp"
#include "nixl/request.hpp"

namespace pynixlkv::nixl {

namespace {

constexpr Duration kPollInterval = std::chrono::microseconds(200);

const std::string kServer =
    "the metadata server (NIXL_ETCD_ENDPOINTS or NIXL_TCPSTORE_ENDPOINT names one)";

/// Agents whose requests never became quiet. Reachable for ever on purpose, never destroyed.
struct Graveyard {
    std::mutex mutex;
    std::vector<std::shared_ptr<Agent>> agents;
};

Graveyard& graveyard() {
    static auto& instance = keep_for_ever<Graveyard>();
    return instance;
}

template <class Config>
Config native_config(const AgentConfig& config) {
    Config native{};
    native.enable_progress_thread = config.progress_thread;
    native.enable_listen_thread = config.listen_thread;
    native.listen_port = config.listen_port;
    native.thread_sync = static_cast<int>(config.thread_sync);
    native.num_workers = 1;
    native.progress_delay_us = config.progress_delay_us;
    native.listen_delay_us = config.listen_delay_us;
    native.capture_telemetry = config.telemetry;
    return native;
}

/// Own what a call allocated, and copy it.
std::string take_bytes(const Library& library, void* data, std::size_t size) {
    struct Free {
        const Library* library;
        void operator()(void* memory) const noexcept { library->free(memory); }
    };
    const std::unique_ptr<void, Free> owned(data, Free{&library});
    return {static_cast<const char*>(data), size};
}

}  // namespace

// ---- life

std::shared_ptr<Agent> Agent::create(std::shared_ptr<const Library> library, std::string name,
                                     const AgentConfig& config) {
    return std::make_shared<Agent>(Private{}, std::move(library), std::move(name), config);
}

Agent::Agent(Private /*unused*/, std::shared_ptr<const Library> library, std::string name,
             const AgentConfig& config)
    : library_(std::move(library)), name_(std::move(name)), config_(config) {
    if (name_.empty() || name_.find('\0') != std::string::npos) {
        throw Error("ConfigError",
                    "the name of an agent must not be empty and must not contain a zero byte");
    }
    const capi::Functions& fn = library_->fn();
    const auto detail = [this] { return text("agent '", name_, "'"); };
    notifications_ =
        own<capi::NotifMap>(*library_, fn.destroy_notif_map, "create_notif_map", detail,
                            [&](capi::NotifMap* out) { return fn.create_notif_map(out); });
    const auto classic = native_config<capi::AgentConfig>(config_);
    const auto versioned = native_config<capi::AgentConfigVersioned>(config_);
    const void* native = fn.get_version == nullptr ? static_cast<const void*>(&classic)
                                                   : static_cast<const void*>(&versioned);
    capi::Agent handle = nullptr;
    library_->check(fn.create_configured_agent(name_.c_str(), native, &handle),
                    "create_configured_agent", detail);
    handle_ = handle;
}

Agent::~Agent() {
    if (handle_ != nullptr && process_.is_here()) {
        notifications_.reset();
        backends_.clear();
        library_->fn().destroy_agent(handle_);
    }
}

bool Agent::close(Duration patience) {
    if (!process_.is_here() || closed_) {
        closed_ = true;
        return num_parked_ == 0;
    }
    if (const std::size_t requests = num_requests_; requests != 0) {
        throw Error("StateError", text("agent '", name_, "' cannot be closed: ", requests,
                                       " of its requests are not released"));
    }
    drain(patience);
    std::vector<std::shared_ptr<void>> stuck;  // goes after the locks
    const std::unique_lock alone(calls_);
    if (closed_) {
        return num_parked_ == 0;
    }
    if (num_parked_ != 0) {
        closed_ = true;
        Graveyard& graves = graveyard();
        const std::lock_guard lock(graves.mutex);
        graves.agents.push_back(shared_from_this());
        return false;
    }
    const std::size_t registrations = num_registrations_;
    const std::size_t prepared = num_prepared_;
    const std::size_t requests = num_requests_;
    if (registrations + prepared + requests != 0) {
        throw Error("StateError", text("agent '", name_, "' cannot be closed: ", registrations,
                                       " registrations, ", prepared, " prepared lists and ",
                                       requests, " requests are not released"));
    }
    closed_ = true;
    {
        const std::lock_guard lock(books_);
        backends_.clear();
        stuck.swap(stuck_);
    }
    notifications_.reset();
    library_->check(library_->fn().destroy_agent(std::exchange(handle_, nullptr)), "destroy_agent",
                    [this] { return text("agent '", name_, "'"); });
    return true;
}

std::size_t Agent::num_abandoned() {
    Graveyard& graves = graveyard();
    const std::lock_guard lock(graves.mutex);
    return graves.agents.size();
}

std::size_t Agent::reap() {
    if (num_parked_ == 0) {
        return 0;
    }
    std::vector<std::unique_ptr<RequestBody>>
        quiet;  // freed after the locks: may end registrations
    const Call call(*this, "get_xfer_status");
    const std::lock_guard lock(books_);
    quiet.reserve(parked_.size());
    std::erase_if(parked_, [&](std::unique_ptr<RequestBody>& body) {
        if (body->poll() == Status::kInProgress || body->free() != Status::kSuccess) {
            return false;
        }
        quiet.push_back(std::move(body));
        return true;
    });
    num_parked_ = parked_.size();
    return parked_.size();
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

void Agent::park(std::unique_ptr<RequestBody> body) noexcept {
    const std::lock_guard lock(books_);
    try {
        parked_.push_back(std::move(body));
        num_parked_ = parked_.size();
    } catch (...) {
        // Out of memory: better lost than freed under a running transfer.
        (void)body.release();  // NOLINT(bugprone-unused-return-value)
    }
}

// ---- calls

Agent::Call::Call(const Agent& agent, const char* call, std::mutex* object) {
    agent.process_.require_here("a NIXL agent");
    if (agent.config_.thread_sync == ThreadSync::kNone) {
        alone_ = std::unique_lock(agent.calls_);
    } else {
        shared_ = std::shared_lock(agent.calls_);
        if (object != nullptr) {
            object_ = std::unique_lock(*object);
        }
    }
    if (agent.closed_) {
        throw Error("ClosedError", text(call, ": agent '", agent.name_, "' is closed"));
    }
}

Agent::Call::Call(const Agent& agent, std::mutex& object, std::try_to_lock_t /*unused*/) noexcept {
    if (!agent.process_.is_here() || agent.closed_) {
        return;
    }
    if (agent.config_.thread_sync == ThreadSync::kNone) {
        alone_ = std::unique_lock(agent.calls_, std::try_to_lock);
    } else {
        shared_ = std::shared_lock(agent.calls_, std::try_to_lock);
        if (shared_.owns_lock()) {
            object_ = std::unique_lock(object, std::try_to_lock);
        }
    }
}

std::string Agent::about(const std::string& peer) const {
    return peer.empty() ? text("agent '", name_, "'")
                        : text("agent '", name_, "', peer '", peer, "'");
}

void Agent::require_ours(const CallOptions& options) const {
    for (const auto& backend : options.backends) {
        if (backend->agent().get() != this) {
            throw Error("ConfigError", text("backend ", backend->type(),
                                            " was made by another agent than '", name_, "'"));
        }
    }
}

void Agent::require_rows(Rows rows, const char* side, bool allow_zero_length) {
    if (rows.empty()) {
        throw Error("ConfigError", text("the ", side, " descriptors are empty"));
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Row& row = rows[i];
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

// ---- plugins and backends

std::vector<std::string> Agent::available_plugins() const {
    const capi::Functions& fn = library_->fn();
    const Call call(*this, "get_available_plugins");
    const auto list = own<capi::StringList>(
        *library_, fn.destroy_string_list, "get_available_plugins", [this] { return about({}); },
        [&](capi::StringList* out) { return fn.get_available_plugins(handle_, out); });
    return read_strings(*library_, list.get());
}

BackendInfo Agent::plugin_info(const std::string& plugin) const {
    const capi::Functions& fn = library_->fn();
    const Call call(*this, "get_plugin_params");
    capi::MemList mems = nullptr;
    capi::Params params = nullptr;
    const Status status = fn.get_plugin_params(handle_, plugin.c_str(), &mems, &params);
    library_->check(status, "get_plugin_params",
                    [&] { return text(about({}), ", plugin '", plugin, "'"); });
    const Owned<capi::MemList> owned_mems(mems, fn.destroy_mem_list);
    const Owned<capi::Params> owned_params(params, fn.destroy_params);
    return {read_memory_types(*library_, mems), read_params(*library_, params)};
}

std::shared_ptr<Backend> Agent::create_backend(const std::string& type, const ParamMap& params) {
    const capi::Functions& fn = library_->fn();
    const Call call(*this, "create_backend");
    {
        const std::lock_guard lock(books_);
        for (const auto& backend : backends_) {
            if (backend->type() == type) {
                throw Error("StateError", text("agent '", name_, "' has a backend ", type,
                                               " already; there can be one of each type"));
            }
        }
    }
    const Owned<capi::Params> native = make_params(*library_, params);
    auto handle = own<capi::Backend>(
        *library_, fn.destroy_backend, "create_backend",
        [&] { return text(about({}), ", plugin '", type, "'"); },
        [&](capi::Backend* out) {
            return fn.create_backend(handle_, type.c_str(), native.get(), out);
        });
    auto backend = std::make_shared<Backend>(weak_from_this(), type, std::move(handle));
    const std::lock_guard lock(books_);
    backends_.push_back(backend);
    return backend;
}

BackendInfo Agent::backend_info(const Backend& backend) const {
    if (backend.agent().get() != this) {
        throw Error("ConfigError", text("backend ", backend.type(),
                                        " was made by another agent than '", name_, "'"));
    }
    const capi::Functions& fn = library_->fn();
    const Call call(*this, "get_backend_params");
    capi::MemList mems = nullptr;
    capi::Params params = nullptr;
    const Status status = fn.get_backend_params(handle_, backend.native(), &mems, &params);
    library_->check(status, "get_backend_params",
                    [&] { return text(about({}), ", backend ", backend.type()); });
    const Owned<capi::MemList> owned_mems(mems, fn.destroy_mem_list);
    const Owned<capi::Params> owned_params(params, fn.destroy_params);
    return {read_memory_types(*library_, mems), read_params(*library_, params)};
}

std::vector<std::shared_ptr<Backend>> Agent::backends() const {
    const std::lock_guard lock(books_);
    return backends_;
}

// ---- memory

void Agent::add_spans(const std::shared_ptr<Registration>& registration) {
    const std::lock_guard lock(books_);
    const Rows rows = registration->rows();
    const auto span_of = [&](const Row& row) {
        return Span{registration->memory(), row.device, row.address, row.length};
    };
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto [found, added] = spans_.try_emplace(span_of(rows[i]), registration);
        if (!added) {
            // Not by locking: dropping what that returns could end a registration in here.
            const bool twice = !found->second.owner_before(registration) &&
                               !registration.owner_before(found->second);
            for (std::size_t j = 0; j < i; ++j) {
                spans_.erase(span_of(rows[j]));
            }
            throw Error("AlreadyRegisteredError",
                        text(memory_name(registration->memory()), " descriptor ", i, " (",
                             rows[i].str(), twice ? ") is given twice" : ") is registered already",
                             " with agent '", name_, "'"));
        }
        longest_span_ = std::max(longest_span_, rows[i].length);
    }
}

void Agent::remove_spans(const Registration& registration) noexcept {
    const std::lock_guard lock(books_);
    for (const Row& row : registration.rows()) {
        spans_.erase(Span{registration.memory(), row.device, row.address, row.length});
    }
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

std::vector<Pin> Agent::pin(MemoryType memory, Rows rows, const char* side) const {
    std::vector<Pin> pins;
    std::vector<std::shared_ptr<Registration>> passed_over;  // goes after the lock, as pins do
    const std::lock_guard lock(books_);
    Span last{memory, 0, 0, 0};
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Row& row = rows[i];
        const auto covered_by = [&row](const Span& span) {
            return row.device == span.device && row.address >= span.address &&
                   row.address + row.length <= span.address + span.length;
        };
        if (covered_by(last)) {
            continue;
        }
        std::shared_ptr<Registration> found;
        const auto take = [&](const auto& entry) {
            found = entry.second.lock();
            if (found && !found->is_active()) {
                passed_over.push_back(std::move(found));
            }
            last = found ? entry.first : last;
        };
        auto next = spans_.upper_bound(
            Span{memory, row.device, row.address, std::numeric_limits<std::uint64_t>::max()});
        while (!found && next != spans_.begin()) {
            const Span& span = (--next)->first;
            if (span.memory != memory || span.device != row.device ||
                row.address - span.address >= longest_span_) {
                break;
            }
            if (covered_by(span)) {
                take(*next);
            }
        }
        if (!found && is_storage(memory)) {
            const auto whole = spans_.find(Span{memory, row.device, 0, 0});
            if (whole != spans_.end()) {
                take(*whole);
            }
        }
        if (!found) {
            throw Error(
                "NotRegisteredError",
                text(side, " descriptor ", i, " (", memory_name(memory), " ", row.str(),
                     ") is not wholly inside memory that agent '", name_, "' has registered"));
        }
        const auto same = [&](const Pin& pin) { return pin.get() == found.get(); };
        if (std::none_of(pins.begin(), pins.end(), same)) {
            pins.emplace_back(std::move(found));
        }
    }
    return pins;
}

std::shared_ptr<Registration> Agent::register_memory(MemoryType memory, Rows rows,
                                                     std::span<const std::string> blobs,
                                                     std::shared_ptr<void> keepalive,
                                                     const CallOptions& options) {
    require_ours(options);
    require_rows(rows, "registered", is_storage(memory));
    const auto registration = std::make_shared<Registration>(
        Registration::Private{}, shared_from_this(), memory,
        std::vector<Row>(rows.begin(), rows.end()), std::move(keepalive));
    registration->list_ = make_reg_list(*library_, memory, rows, blobs);
    registration->options_ = make_opt_args(*library_, options);
    const Call call(*this, "register_mem");
    add_spans(registration);
    const Status status = library_->fn().register_mem(handle_, registration->list_.get(),
                                                      registration->options_.get());
    if (status != Status::kSuccess) {
        remove_spans(*registration);
        library_->fail(status, "register_mem",
                       text(about({}), ", ", registration->str(),
                            "; is there a backend for this kind of memory?"));
    }
    const std::lock_guard lock(books_);
    registration->active_ = true;
    ++num_registrations_;
    return registration;
}

std::vector<std::optional<ParamMap>> Agent::query_memory(MemoryType memory, Rows rows,
                                                         std::span<const std::string> blobs,
                                                         const CallOptions& options) {
    require_ours(options);
    require_rows(rows, "queried", true);
    if (options.backends.size() != 1) {
        throw Error("ConfigError",
                    text("query_mem asks exactly one backend, but got ", options.backends.size()));
    }
    const capi::Functions& fn = library_->fn();
    const auto detail = [&] {
        return text(about({}), ", ", rows.size(), " ", memory_name(memory), " descriptors");
    };
    const Owned<capi::RegList> list = make_reg_list(*library_, memory, rows, blobs);
    const Owned<capi::OptArgs> args = make_opt_args(*library_, options);
    const auto answers = own<capi::QueryList>(
        *library_, fn.destroy_query_resp_list, "create_query_resp_list", detail,
        [&](capi::QueryList* out) { return fn.create_query_resp_list(out); });
    const Call call(*this, "query_mem");
    library_->check(fn.query_mem(handle_, list.get(), answers.get(), args.get()), "query_mem",
                    detail);
    std::size_t size = 0;
    library_->check(fn.query_resp_list_size(answers.get(), &size), "query_resp_list_size", detail);
    std::vector<std::optional<ParamMap>> result;
    for (std::size_t i = 0; i < size; ++i) {
        bool has_value = false;
        library_->check(fn.query_resp_list_has_value(answers.get(), i, &has_value),
                        "query_resp_list_has_value", detail);
        if (!has_value) {
            result.emplace_back();
            continue;
        }
        const auto params =
            own<capi::Params>(*library_, fn.destroy_params, "query_resp_list_get_params", detail,
                              [&](capi::Params* out) {
                                  return fn.query_resp_list_get_params(answers.get(), i, out);
                              });
        result.emplace_back(read_params(*library_, params.get()));
    }
    return result;
}

// ---- metadata

std::string Agent::local_metadata() const {
    const Call call(*this, "get_local_md");
    void* data = nullptr;
    std::size_t size = 0;
    library_->check(library_->fn().get_local_md(handle_, &data, &size), "get_local_md",
                    [this] { return about({}); });
    return take_bytes(*library_, data, size);
}

std::string Agent::local_partial_metadata(MemoryType memory, Rows rows,
                                          const CallOptions& options) const {
    require_ours(options);
    const std::vector<Pin> pins = pin(memory, rows, "local");
    const Owned<capi::RegList> list = make_reg_list(*library_, memory, rows, {});
    const Owned<capi::OptArgs> args = make_opt_args(*library_, options);
    const Call call(*this, "get_local_partial_md");
    void* data = nullptr;
    std::size_t size = 0;
    library_->check(
        library_->fn().get_local_partial_md(handle_, list.get(), &data, &size, args.get()),
        "get_local_partial_md", [&] {
            return text(about({}), ", ", rows.size(), " ", memory_name(memory),
                        " descriptors; they must be exactly as they were registered");
        });
    return take_bytes(*library_, data, size);
}

std::string Agent::load_remote_metadata(std::string_view metadata) {
    if (metadata.empty()) {
        throw Error("ConfigError", text("the metadata given to agent '", name_, "' is empty"));
    }
    const Call call(*this, "load_remote_md");
    char* peer = nullptr;
    const Status status =
        library_->fn().load_remote_md(handle_, metadata.data(), metadata.size(), &peer);
    library_->check(status, "load_remote_md", [&] {
        return text(about({}), ", ", metadata.size(),
                    " bytes; metadata of this agent itself, of another agent under a name that is "
                    "loaded (invalidate that first), damaged, or of an incompatible NIXL");
    });
    return take_bytes(*library_, peer, std::char_traits<char>::length(peer));
}

bool Agent::covers(const std::string& peer, MemoryType memory, Rows rows) const {
    Owned<capi::XferList> list;
    if (!rows.empty()) {
        list = make_xfer_list(*library_, memory, rows);
    }
    return library_->fn().check_remote_md(handle_, peer.c_str(), list.get()) == Status::kSuccess;
}

bool Agent::check_remote_metadata(const std::string& peer, MemoryType memory, Rows rows) const {
    const Call call(*this, "check_remote_md");
    return covers(peer, memory, rows);
}

void Agent::invalidate_remote_metadata(const std::string& peer) {
    const Call call(*this, "invalidate_remote_md");
    {
        // First, so that nothing can use handles that NIXL is about to invalidate.
        const std::lock_guard lock(books_);
        ++generations_[peer];
    }
    const Status status = library_->fn().invalidate_remote_md(handle_, peer.c_str());
    if (status != Status::kSuccess) {
        fail_remote(status, "invalidate_remote_md", peer, MemoryType::kDram, {});
    }
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

void Agent::fail_remote(Status status, const char* call, const std::string& peer, MemoryType memory,
                        Rows rows) const {
    if (peer != name_) {
        if (!covers(peer, memory, {})) {
            throw Error("UnknownPeerError",
                        text(call, ": agent '", name_, "' does not know a peer '", peer,
                             "'; load its metadata (NIXL also forgets peers that disconnect)"));
        }
        for (std::size_t i = 0; i < rows.size(); ++i) {
            if (!covers(peer, memory, rows.subspan(i, 1))) {
                throw Error("NotRegisteredError",
                            text(call, ": remote descriptor ", i, " (", memory_name(memory), " ",
                                 rows[i].str(), ") is not wholly inside memory that peer '", peer,
                                 "' has registered, as far as the metadata that agent '", name_,
                                 "' has loaded tells"));
            }
        }
    }
    library_->fail(status, call, about(peer));
}

void Agent::send_local_metadata(const Endpoint& endpoint) {
    const Owned<capi::OptArgs> args = make_opt_args(*library_, {.endpoint = endpoint});
    const Call call(*this, "send_local_md");
    library_->check(library_->fn().send_local_md(handle_, args.get()), "send_local_md", [&] {
        return text(about({}), ", to ", endpoint.ip.empty() ? kServer : endpoint.ip);
    });
}

void Agent::send_local_partial_metadata(MemoryType memory, Rows rows, const CallOptions& options) {
    require_ours(options);
    const std::vector<Pin> pins = pin(memory, rows, "local");
    const Owned<capi::RegList> list = make_reg_list(*library_, memory, rows, {});
    const Owned<capi::OptArgs> args = make_opt_args(*library_, options);
    const Call call(*this, "send_local_partial_md");
    library_->check(library_->fn().send_local_partial_md(handle_, list.get(), args.get()),
                    "send_local_partial_md", [&] {
                        return text(about({}), ", ", rows.size(), " descriptors, to ",
                                    options.endpoint.ip.empty() ? kServer : options.endpoint.ip);
                    });
}

void Agent::fetch_remote_metadata(const std::string& peer, const Endpoint& endpoint) {
    const Owned<capi::OptArgs> args = make_opt_args(*library_, {.endpoint = endpoint});
    const Call call(*this, "fetch_remote_md");
    library_->check(
        library_->fn().fetch_remote_md(handle_, peer.c_str(), args.get()), "fetch_remote_md",
        [&] { return text(about(peer), ", from ", endpoint.ip.empty() ? kServer : endpoint.ip); });
}

void Agent::invalidate_local_metadata(const Endpoint& endpoint) {
    const Owned<capi::OptArgs> args = make_opt_args(*library_, {.endpoint = endpoint});
    const Call call(*this, "invalidate_local_md");
    library_->check(library_->fn().invalidate_local_md(handle_, args.get()), "invalidate_local_md",
                    [this] { return about({}); });
}

void Agent::make_connection(const std::string& peer, const CallOptions& options) {
    require_ours(options);
    const Owned<capi::OptArgs> args = make_opt_args(*library_, options);
    const Call call(*this, "agent_make_connection");
    const Status status = library_->fn().agent_make_connection(handle_, peer.c_str(), args.get());
    if (status != Status::kSuccess) {
        fail_remote(status, "agent_make_connection", peer, MemoryType::kDram, {});
    }
}

// ---- transfers

std::shared_ptr<PreparedList> Agent::prepare(const std::string& peer, MemoryType memory, Rows rows,
                                             const CallOptions& options) {
    require_ours(options);
    const bool is_local = peer.empty();
    require_rows(rows, is_local ? "local" : "remote", false);
    auto prepared =
        std::make_shared<PreparedList>(PreparedList::Private{}, shared_from_this(), peer, memory,
                                       rows, is_local ? 0 : generation(peer));
    if (is_local || peer == name_) {
        prepared->pins_ = pin(memory, rows, is_local ? "local" : "remote");
    }
    const Owned<capi::XferList> list = make_xfer_list(*library_, memory, rows);
    const Owned<capi::OptArgs> args = make_opt_args(*library_, options);
    const Call call(*this, "prep_xfer_dlist");
    capi::Prepared handle = nullptr;
    const Status status =
        library_->fn().prep_xfer_dlist(handle_, peer.c_str(), list.get(), &handle, args.get());
    if (status != Status::kSuccess) {
        if (is_local) {
            library_->fail(status, "prep_xfer_dlist", about({}));
        }
        fail_remote(status, "prep_xfer_dlist", peer, memory, rows);
    }
    prepared->handle_ = handle;
    prepared->released_ = false;
    ++num_prepared_;
    return prepared;
}

std::shared_ptr<Request> Agent::make_request(Operation operation,
                                             const std::shared_ptr<PreparedList>& local,
                                             std::span<const std::int32_t> local_indices,
                                             const std::shared_ptr<PreparedList>& remote,
                                             std::span<const std::int32_t> remote_indices,
                                             const CallOptions& options) {
    require_ours(options);
    if (local->agent().get() != this || remote->agent().get() != this) {
        throw Error("ConfigError", text("the ", local->agent().get() != this ? "local" : "remote",
                                        " list was prepared by another agent than '", name_, "'"));
    }
    if (!local->is_local() || remote->is_local()) {
        throw Error("ConfigError",
                    text("make_xfer_req needs a list prepared for the local side and one for a "
                         "peer, but got '",
                         local->peer(), "' and '", remote->peer(), "' ('' is local)"));
    }
    const std::size_t count = local_indices.size();
    if (count == 0 || count != remote_indices.size()) {
        throw Error("ConfigError",
                    text("make_xfer_req got ", count, " local and ", remote_indices.size(),
                         " remote indices; there must be as many, and at least one"));
    }
    std::uint64_t num_bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const auto check_index = [i](std::int32_t index, const PreparedList& list,
                                     const char* side) {
            if (index < 0 || static_cast<std::size_t>(index) >= list.size()) {
                throw Error("ConfigError",
                            text(side, " index ", index, " at position ", i,
                                 " is out of range; the list has ", list.size(), " descriptors"));
            }
            return list.length(static_cast<std::size_t>(index));
        };
        const std::uint64_t local_length = check_index(local_indices[i], *local, "local");
        const std::uint64_t remote_length = check_index(remote_indices[i], *remote, "remote");
        if (local_length != remote_length) {
            throw Error("ConfigError",
                        text("lengths differ at position ", i, ": local descriptor ",
                             local_indices[i], " has ", local_length, " bytes, remote descriptor ",
                             remote_indices[i], " has ", remote_length));
        }
        num_bytes += local_length;
    }
    auto body = std::make_unique<RequestBody>(*this);
    const Owned<capi::OptArgs> args = make_opt_args(*library_, options);
    {
        const std::lock_guard lock(books_);
        body->use(local, remote);
    }
    const std::string& peer = remote->peer();
    auto request =
        std::make_shared<Request>(Request::Private{}, shared_from_this(), operation, peer,
                                  remote->generation(), count, num_bytes, std::move(body));
    const Call call(*this, "make_xfer_req");
    require_fresh(peer, remote->generation(), "the remote list");
    capi::Request handle = nullptr;
    const Status status = library_->fn().make_xfer_req(
        handle_, static_cast<int>(operation), local->handle_, local_indices.data(), count,
        remote->handle_, remote_indices.data(), count, &handle, args.get());
    if (status != Status::kSuccess) {
        fail_remote(status, "make_xfer_req", peer, remote->memory(), {});
    }
    request->body_->handle = handle;
    return request;
}

std::shared_ptr<Request> Agent::create_request(Operation operation, MemoryType local_memory,
                                               Rows local, MemoryType remote_memory, Rows remote,
                                               const std::string& peer,
                                               const CallOptions& options) {
    require_ours(options);
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
    auto body = std::make_unique<RequestBody>(*this);
    body->pins = pin(local_memory, local, "local");
    if (peer == name_) {
        for (Pin& more : pin(remote_memory, remote, "remote")) {
            body->pins.push_back(std::move(more));
        }
    }
    auto request =
        std::make_shared<Request>(Request::Private{}, shared_from_this(), operation, peer,
                                  generation_of, local.size(), num_bytes, std::move(body));
    const Owned<capi::XferList> local_list = make_xfer_list(*library_, local_memory, local);
    const Owned<capi::XferList> remote_list = make_xfer_list(*library_, remote_memory, remote);
    const Owned<capi::OptArgs> args = make_opt_args(*library_, options);
    const Call call(*this, "create_xfer_req");
    capi::Request handle = nullptr;
    const Status status =
        library_->fn().create_xfer_req(handle_, static_cast<int>(operation), local_list.get(),
                                       remote_list.get(), peer.c_str(), &handle, args.get());
    if (status != Status::kSuccess) {
        fail_remote(status, "create_xfer_req", peer, remote_memory, remote);
    }
    request->body_->handle = handle;
    return request;
}

// ---- notifications

void Agent::notify(const std::string& peer, std::string_view message, const CallOptions& options) {
    require_ours(options);
    const Owned<capi::OptArgs> args = make_opt_args(*library_, options);
    const Call call(*this, "gen_notif");
    const Status status =
        library_->fn().gen_notif(handle_, peer.c_str(), message.data(), message.size(), args.get());
    if (status != Status::kSuccess) {
        fail_remote(status, "gen_notif", peer, MemoryType::kDram, {});
    }
}

std::vector<Notification> Agent::take_notifications(const CallOptions& options) {
    require_ours(options);
    const capi::Functions& fn = library_->fn();
    const auto detail = [this] { return about({}); };
    const Owned<capi::OptArgs> args = make_opt_args(*library_, options);
    const Call call(*this, "get_notifs", &notifications_mutex_);
    capi::NotifMap map = notifications_.get();
    library_->check(fn.get_notifs(handle_, map, args.get()), "get_notifs", detail);
    std::size_t num_peers = 0;
    library_->check(fn.notif_map_size(map, &num_peers), "notif_map_size", detail);
    std::vector<Notification> result;
    // The map holds the senders of this poll only, which keeps the walk by index cheap. It is
    // cleared last: whatever throws before that loses nothing.
    for (std::size_t i = 0; i < num_peers; ++i) {
        const char* peer = nullptr;
        std::size_t count = 0;
        library_->check(fn.notif_map_get_agent_at(map, i, &peer), "notif_map_get_agent_at", detail);
        library_->check(fn.notif_map_get_notifs_size(map, peer, &count),
                        "notif_map_get_notifs_size", detail);
        for (std::size_t j = 0; j < count; ++j) {
            const void* data = nullptr;
            std::size_t size = 0;
            library_->check(fn.notif_map_get_notif(map, peer, j, &data, &size),
                            "notif_map_get_notif", detail);
            result.push_back({peer, std::string(static_cast<const char*>(data), size)});
        }
    }
    if (num_peers != 0) {
        library_->check(fn.notif_map_clear(map), "notif_map_clear", detail);
    }
    return result;
}

}  // namespace pynixlkv::nixl
