#include "nixl/agent_handle.hpp"

#include <tuple>

#include "base/error.hpp"
#include "base/keep.hpp"

namespace pynixlkv::nixl {

namespace {

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

/// Copy what a call allocated, and free it.
std::string take_bytes(const Library& library, void* data, std::size_t size) {
    struct Free {
        const Library* library;
        void operator()(void* memory) const noexcept { library->free(memory); }
    };
    const std::unique_ptr<void, Free> owned(data, Free{&library});
    return {static_cast<const char*>(data), size};
}

/// @param get `get_plugin_params` or `get_backend_params` with all but its results given
template <class Get, class Detail>
BackendInfo read_info(const Library& library, const char* call, Detail&& detail, Get&& get) {
    capi::MemList mems = nullptr;
    capi::Params params = nullptr;
    library.check(get(&mems, &params), call, std::forward<Detail>(detail));
    const Owned<capi::MemList> owned_mems(mems, library.fn().destroy_mem_list);
    const Owned<capi::Params> owned_params(params, library.fn().destroy_params);
    return {read_memory_types(library, mems), read_params(library, params)};
}

}  // namespace

// ---- life

AgentHandle::AgentHandle(std::shared_ptr<const Library> library, std::string name,
                         const AgentConfig& config)
    : library_(std::move(library)), name_(std::move(name)) {
    static const ProcessMark first_use;
    first_use.require_here_since_first_use("NIXL");
    if (name_.empty() || name_.find('\0') != std::string::npos) {
        throw Error("ConfigError",
                    "the name of an agent must not be empty and must not contain a zero byte");
    }
    notifications_ = own<capi::NotifMap>(
        *library_, fn().destroy_notif_map, "create_notif_map", [this] { return about(); },
        [&](capi::NotifMap* out) { return fn().create_notif_map(out); });
    const auto classic = native_config<capi::AgentConfig>(config);
    const auto versioned = native_config<capi::AgentConfigVersioned>(config);
    const void* native = fn().get_version == nullptr ? static_cast<const void*>(&classic)
                                                     : static_cast<const void*>(&versioned);
    capi::Agent handle = nullptr;
    check(fn().create_configured_agent(name_.c_str(), native, &handle), "create_configured_agent");
    handle_ = handle;
}

AgentHandle::~AgentHandle() {
    if (is_usable()) {
        const auto inside = devices_.enter();
        notifications_.reset();
        fn().destroy_agent(handle_);
    } else {
        (void)notifications_.release();
    }
}

void AgentHandle::destroy() {
    notifications_.reset();
    check(fn().destroy_agent(std::exchange(handle_, nullptr)), "destroy_agent");
}

std::string AgentHandle::about(const std::string& peer) const {
    return peer.empty() ? text("agent '", name_, "'")
                        : text("agent '", name_, "', peer '", peer, "'");
}

// ---- plugins and backends

std::vector<std::string> AgentHandle::available_plugins() const {
    const auto list = own<capi::StringList>(
        *library_, fn().destroy_string_list, "get_available_plugins", [this] { return about(); },
        [&](capi::StringList* out) { return fn().get_available_plugins(handle_, out); });
    return read_strings(*library_, list.get());
}

BackendInfo AgentHandle::plugin_info(const std::string& plugin) const {
    return read_info(
        *library_, "get_plugin_params", [&] { return text(about(), ", plugin '", plugin, "'"); },
        [&](capi::MemList* mems, capi::Params* params) {
            return fn().get_plugin_params(handle_, plugin.c_str(), mems, params);
        });
}

std::shared_ptr<Backend> AgentHandle::create_backend(const std::string& type,
                                                     const ParamMap& params) {
    const Owned<capi::Params> native = make_params(*library_, params);
    auto handle = own<capi::Backend>(
        *library_, fn().destroy_backend, "create_backend",
        [&] { return text(about(), ", plugin '", type, "'"); },
        [&](capi::Backend* out) {
            return fn().create_backend(handle_, type.c_str(), native.get(), out);
        });
    auto memory = backend_info(handle.get(), type).memory;
    return std::make_shared<Backend>(weak_from_this(), type, std::move(memory), std::move(handle));
}

BackendInfo AgentHandle::backend_info(capi::Backend backend, const std::string& type) const {
    return read_info(
        *library_, "get_backend_params", [&] { return text(about(), ", backend ", type); },
        [&](capi::MemList* mems, capi::Params* params) {
            return fn().get_backend_params(handle_, backend, mems, params);
        });
}

std::vector<std::optional<ParamMap>> AgentHandle::query_memory(capi::RegList list,
                                                               capi::OptArgs args) const {
    const auto detail = [this] { return about(); };
    const auto answers = own<capi::QueryList>(
        *library_, fn().destroy_query_resp_list, "create_query_resp_list", detail,
        [&](capi::QueryList* out) { return fn().create_query_resp_list(out); });
    check(fn().query_mem(handle_, list, answers.get(), args), "query_mem");
    std::size_t size = 0;
    check(fn().query_resp_list_size(answers.get(), &size), "query_resp_list_size");
    std::vector<std::optional<ParamMap>> result(size);
    for (std::size_t i = 0; i < size; ++i) {
        bool has_value = false;
        check(fn().query_resp_list_has_value(answers.get(), i, &has_value),
              "query_resp_list_has_value");
        if (has_value) {
            const auto params =
                own<capi::Params>(*library_, fn().destroy_params, "query_resp_list_get_params",
                                  detail, [&](capi::Params* out) {
                                      return fn().query_resp_list_get_params(answers.get(), i, out);
                                  });
            result[i] = read_params(*library_, params.get());
        }
    }
    return result;
}

// ---- metadata

std::string AgentHandle::local_metadata() const {
    void* data = nullptr;
    std::size_t size = 0;
    check(fn().get_local_md(handle_, &data, &size), "get_local_md");
    return take_bytes(*library_, data, size);
}

std::string AgentHandle::local_partial_metadata(capi::RegList list, capi::OptArgs args) const {
    void* data = nullptr;
    std::size_t size = 0;
    library_->check(
        fn().get_local_partial_md(handle_, list, &data, &size, args), "get_local_partial_md",
        [this] { return about() + ", descriptors that must be exactly as registered"; });
    return take_bytes(*library_, data, size);
}

std::string AgentHandle::load_remote_metadata(std::string_view metadata) {
    char* peer = nullptr;
    library_->check(
        fn().load_remote_md(handle_, metadata.data(), metadata.size(), &peer), "load_remote_md",
        [&] {
            return text(about(), ", ", metadata.size(),
                        " bytes; metadata of this agent itself, of another agent under a name that "
                        "is loaded (invalidate that first), damaged, or of an incompatible NIXL");
        });
    return take_bytes(*library_, peer, std::char_traits<char>::length(peer));
}

bool AgentHandle::check_remote_metadata(const std::string& peer, Memory memory, Rows rows) const {
    Owned<capi::XferList> list;
    if (!rows.empty()) {
        list = make_xfer_list(*library_, memory, rows);
    }
    return fn().check_remote_md(handle_, peer.c_str(), list.get()) == Status::kSuccess;
}

void AgentHandle::invalidate_remote_metadata(const std::string& peer) {
    check(fn().invalidate_remote_md(handle_, peer.c_str()), "invalidate_remote_md", peer);
}

// ---- transfers

capi::Prepared AgentHandle::prepare(const std::string& peer, capi::XferList list,
                                    capi::OptArgs args) {
    capi::Prepared handle = nullptr;
    check(fn().prep_xfer_dlist(handle_, peer.c_str(), list, &handle, args), "prep_xfer_dlist",
          peer);
    return handle;
}

capi::Request AgentHandle::make_xfer(Op op, capi::Prepared local,
                                     std::span<const std::int32_t> local_indices,
                                     capi::Prepared remote,
                                     std::span<const std::int32_t> remote_indices,
                                     const std::string& peer, capi::OptArgs args) {
    capi::Request handle = nullptr;
    check(fn().make_xfer_req(handle_, static_cast<int>(op), local, local_indices.data(),
                             local_indices.size(), remote, remote_indices.data(),
                             remote_indices.size(), &handle, args),
          "make_xfer_req", peer);
    return handle;
}

capi::Request AgentHandle::create_xfer(Op op, capi::XferList local, capi::XferList remote,
                                       const std::string& peer, capi::OptArgs args) {
    capi::Request handle = nullptr;
    check(fn().create_xfer_req(handle_, static_cast<int>(op), local, remote, peer.c_str(), &handle,
                               args),
          "create_xfer_req", peer);
    return handle;
}

// ---- notifications

void AgentHandle::notify(const std::string& peer, std::string_view message, capi::OptArgs args) {
    check(fn().gen_notif(handle_, peer.c_str(), message.data(), message.size(), args), "gen_notif",
          peer);
}

std::vector<Notification> AgentHandle::take_notifications(capi::OptArgs args) {
    capi::NotifMap map = notifications_.get();
    check(fn().get_notifs(handle_, map, args), "get_notifs");
    std::size_t num_peers = 0;
    check(fn().notif_map_size(map, &num_peers), "notif_map_size");
    std::vector<Notification> result;
    // The map holds the senders of this poll only, which keeps the walk by index cheap. It is
    // cleared last: whatever throws before that loses nothing.
    for (std::size_t i = 0; i < num_peers; ++i) {
        const char* peer = nullptr;
        std::size_t count = 0;
        check(fn().notif_map_get_agent_at(map, i, &peer), "notif_map_get_agent_at");
        check(fn().notif_map_get_notifs_size(map, peer, &count), "notif_map_get_notifs_size");
        for (std::size_t j = 0; j < count; ++j) {
            const void* data = nullptr;
            std::size_t size = 0;
            check(fn().notif_map_get_notif(map, peer, j, &data, &size), "notif_map_get_notif");
            result.push_back({peer, std::string(static_cast<const char*>(data), size)});
        }
    }
    if (num_peers != 0) {
        check(fn().notif_map_clear(map), "notif_map_clear");
    }
    return result;
}

// ---- memory

RegisteredMemory::RegisteredMemory(std::shared_ptr<AgentHandle> agent, Memory memory, Rows rows,
                                   std::span<const std::string> blobs, const CallOptions& options)
    : agent_(std::move(agent)),
      memory_(memory),
      rows_(rows.begin(), rows.end()),
      blobs_(blobs.begin(), blobs.end()),
      args_(make_opt_args(agent_->library(), options)) {}

void RegisteredMemory::append(const Descriptor& row, const std::string* blob) {
    rows_.push_back(row);
    if (blob != nullptr) {
        blobs_.push_back(*blob);
    }
}

const std::string& RegisteredMemory::blob(std::size_t index) const noexcept {
    static const std::string none;
    return blobs_.empty() ? none : blobs_[index];
}

RegisteredMemory::~RegisteredMemory() {
    if (is_registered_ && agent_ && agent_->is_usable()) {
        const auto inside = agent_->devices().enter(device_);
        (void)agent_->fn().deregister_mem(agent_->native(), list_.get(), args_.get());
    }
}

std::string RegisteredMemory::str() const {
    return text(memory_name(memory_), " ", rows_.front().str(),
                rows_.size() > 1 ? text(" and ", rows_.size() - 1, " more") : std::string());
}

void RegisteredMemory::add(bool are_devices_known) {
    transfer::DeviceContexts::Scope inside;
    for (const Descriptor& row : memory_ == Memory::kVram ? rows() : Rows()) {
        std::tie(device_, inside) = agent_->devices().enter_for(row, are_devices_known);
    }
    list_ = make_reg_list(agent_->library(), memory_, rows_, blobs_);
    agent_->library().check(
        agent_->fn().register_mem(agent_->native(), list_.get(), args_.get()), "register_mem", [&] {
            return text(
                agent_->about(), ", ", str(), "; is there a backend for this kind of memory?",
                memory_ == Memory::kVram ? transfer::DeviceContexts::remark(rows_[0].address)
                                         : std::string());
        });
    is_registered_ = true;
}

void RegisteredMemory::remove() {
    const auto inside = agent_->devices().enter(device_);
    agent_->library().check(agent_->fn().deregister_mem(agent_->native(), list_.get(), args_.get()),
                            "deregister_mem", [&] { return text(agent_->about(), ", ", str()); });
    is_registered_ = false;
}

void RegisteredMemory::remove(std::span<const std::uint32_t> indices) {
    if (indices.size() == rows_.size()) {
        remove();
        return;
    }
    std::vector<Descriptor> rows;
    std::vector<std::string> blobs;
    for (const std::uint32_t index : indices) {
        rows.push_back(rows_[index]);
        if (!blobs_.empty()) {
            blobs.push_back(blobs_[index]);
        }
    }
    const Owned<capi::RegList> list = make_reg_list(agent_->library(), memory_, rows, blobs);
    agent_->library().check(
        agent_->fn().deregister_mem(agent_->native(), list.get(), args_.get()), "deregister_mem",
        [&] { return text(agent_->about(), ", ", rows.size(), " rows of ", str()); });
}

// ---- handles of transfers

Status ReleasePrepared::operator()(capi::Prepared handle) const noexcept {
    return agent->is_usable() ? agent->fn().release_xfer_dlist_handle(agent->native(), handle)
                              : Status::kSuccess;
}

Status XferHandle::post(capi::OptArgs args) noexcept {
    const Status status = agent_->fn().post_xfer_req(agent_->native(), handle_, args);
    is_running_ = status == Status::kInProgress;
    return status;
}

Status XferHandle::poll() noexcept {
    if (!is_running_) {
        return Status::kSuccess;
    }
    const Status status = agent_->fn().get_xfer_status(agent_->native(), handle_);
    is_running_ = status == Status::kInProgress;
    return status;
}

XferHandle::~XferHandle() {
    if (release() != Status::kSuccess) {
        (void)pynixlkv::keep_for_ever<std::shared_ptr<AgentHandle>>(agent_);
    }
}

Status XferHandle::release() noexcept {
    if (handle_ == nullptr || !agent_->is_usable()) {
        return Status::kSuccess;
    }
    const Status status = agent_->fn().release_xfer_req(agent_->native(), handle_);
    if (status == Status::kSuccess) {
        (void)agent_->fn().destroy_xfer_req(std::exchange(handle_, nullptr));
    }
    return status;
}

}  // namespace pynixlkv::nixl
