#include "ucx/context.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::ucx {

namespace {

/// Bytes that can be allocated without swapping, as far as the system says.
std::uint64_t free_memory() {
    std::uint64_t free = std::numeric_limits<std::uint64_t>::max();
    std::ifstream info("/proc/meminfo");
    for (std::string line; std::getline(info, line);) {
        std::istringstream words(line);
        std::string name;
        std::uint64_t kib = 0;
        if (words >> name >> kib && name == "MemAvailable:") {
            free = kib * 1024;
        }
    }
    // Without a limit on the control group, these files hold a word or do not exist.
    std::uint64_t limit = 0;
    std::uint64_t used = 0;
    if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
        std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
        free = std::min(free, limit > used ? limit - used : 0);
    }
    return free;
}

}  // namespace

Context::Context(std::shared_ptr<const Library> library, ConfigMap config)
    : library_(std::move(library)), config_(std::move(config)) {
    static const ProcessMark first_use;
    first_use.require_here_since_first_use("UCX");
    capi::Config raw = nullptr;
    library_->check(library_->fn().config_read(nullptr, nullptr, &raw), "ucp_config_read",
                    [] { return "reading the UCX_* variables"; });
    const UniqueHandle settings(raw, library_->fn().config_release);
    for (const auto& [name, value] : config_) {
        const Status status = library_->fn().config_modify(raw, name.c_str(), value.c_str());
        if (is_error(status)) {
            throw Error("ConfigError",
                        text("UCX ", library_->version(), " does not take the setting ", name, "='",
                             value, "' (", status_name(status),
                             "); names have no prefix UCX_ here, and `ucx_info -cf` lists them"));
        }
    }
    capi::ContextParams params{};
    params.mask = capi::ContextParams::kFeatures | capi::ContextParams::kMtWorkersShared;
    params.features = capi::kFeatureRma | capi::kFeatureAm | capi::kFeatureWakeup;
    params.mt_workers_shared = 1;
    capi::Context handle = nullptr;
    library_->check(
        library_->fn().init_version(capi::kApiMajor, capi::kApiMinor, &params, raw, &handle),
        "ucp_init", [this] {
            const std::string tls = setting("TLS");
            return text("starting UCX with UCX_TLS=", tls.empty() ? "all" : tls);
        });
    UniqueHandle context(handle, library_->fn().cleanup);
    capi::ContextAttr attr{};
    attr.mask = capi::ContextAttr::kMemoryTypes;
    library_->check(library_->fn().context_query(handle, &attr), "ucp_context_query",
                    [] { return "asking for the types of memory"; });
    memory_types_ = attr.memory_types;
    handle_ = context.release();
}

std::string Context::setting(const std::string& name) const {
    if (const auto found = config_.find(name); found != config_.end()) {
        return found->second;
    }
    const char* value = std::getenv(("UCX_" + name).c_str());
    return value != nullptr ? value : "";
}

Context::~Context() {
    // In a forked child the context still belongs to the parent.
    if (process_.is_here()) {
        const auto inside = devices_.enter();
        library_->fn().cleanup(handle_);
    }
}

std::string Context::info() const {
    char* buffer = nullptr;
    std::size_t size = 0;
    std::FILE* stream = ::open_memstream(&buffer, &size);
    if (stream == nullptr) {
        return {};
    }
    {
        const auto inside = devices_.enter();
        library_->fn().context_print_info(handle_, stream);
    }
    (void)std::fclose(stream);
    const UniqueHandle owner(static_cast<void*>(buffer), &std::free);
    return {buffer, size};
}

std::shared_ptr<MemoryHandle> Context::find_allocated(std::uint64_t address,
                                                      std::uint64_t length) const {
    std::shared_ptr<MemoryHandle> memory;  // outlives the lock, which its end takes
    const std::lock_guard lock(mutex_);
    const auto next = allocated_.upper_bound(address);
    if (next == allocated_.begin()) {
        return nullptr;
    }
    memory = std::prev(next)->second.lock();
    if (!memory || length > memory->length() ||
        address - memory->address() > memory->length() - length) {
        return nullptr;
    }
    return memory;
}

std::shared_ptr<MemoryHandle> MemoryHandle::map(std::shared_ptr<Context> context,
                                                const Descriptor& row, capi::MemoryType type,
                                                bool is_device_known,
                                                std::shared_ptr<void> keepalive) {
    int device = -1;
    transfer::DeviceContexts::Scope inside;
    if (type == capi::kMemoryCuda && row.length > 0) {
        std::tie(device, inside) = context->devices().enter_for(row, is_device_known);
    }
    if (!context->moves(type)) {
        throw Error("RegistrationError",
                    text("this UCX does not move ", type == capi::kMemoryCuda ? "CUDA" : "host",
                         " memory (", row.str(),
                         "): it found no device or module for it; see pynixlkv.native_report()"));
    }
    capi::MemoryParams params{};
    params.mask = capi::MemoryParams::kAddress | capi::MemoryParams::kLength |
                  capi::MemoryParams::kMemoryType;
    params.address = reinterpret_cast<void*>(row.address);  // NOLINT(performance-no-int-to-ptr)
    params.length = row.length;
    params.memory_type = type;
    auto memory = std::shared_ptr<MemoryHandle>(
        new MemoryHandle(std::move(context), params, std::move(keepalive)));
    memory->device_ = device;
    return memory;
}

std::shared_ptr<MemoryHandle> MemoryHandle::allocate(std::shared_ptr<Context> context,
                                                     std::uint64_t length) {
    // UCX commits shared memory at once: too much of it would take the machine down instead of
    // failing.
    if (const std::uint64_t free = free_memory(); length > free) {
        throw Error("ConfigError", text(length, " bytes cannot be allocated: ", free,
                                        " bytes of memory are free"));
    }
    capi::MemoryParams params{};
    params.mask = capi::MemoryParams::kLength | capi::MemoryParams::kFlags;
    params.length = length;
    params.flags = capi::MemoryParams::kAllocate;
    auto memory = std::shared_ptr<MemoryHandle>(new MemoryHandle(std::move(context), params, {}));
    memory->is_allocated_ = true;
    const std::lock_guard lock(memory->context_->mutex_);
    memory->context_->allocated_[memory->address_] = memory;
    return memory;
}

MemoryHandle::MemoryHandle(std::shared_ptr<Context> context, const capi::MemoryParams& params,
                           std::shared_ptr<void> keepalive)
    : context_(std::move(context)), keepalive_(std::move(keepalive)) {
    const Library& library = context_->library();
    context_->process().require_here("a UCX context");
    if (params.length == 0) {
        throw Error("ConfigError", "0 bytes cannot be mapped");
    }
    capi::Memory handle = nullptr;
    library.check(library.fn().mem_map(context_->handle(), &params, &handle), "ucp_mem_map", [&] {
        return text("mapping ", params.length, " bytes at ", params.address,
                    params.memory_type == capi::kMemoryCuda
                        ? " (cuda)" + transfer::DeviceContexts::remark(
                                          reinterpret_cast<std::uint64_t>(params.address))
                        : std::string());
    });
    handle_ = handle;
    address_ = reinterpret_cast<std::uint64_t>(params.address);
    length_ = params.length;
    if ((params.mask & capi::MemoryParams::kAddress) == 0) {
        capi::MemoryAttr attr{};
        attr.mask = capi::MemoryAttr::kAddress;
        const Status status = library.fn().mem_query(handle_, &attr);
        if (status != Status::kOk) {
            (void)library.fn().mem_unmap(context_->handle(), handle_);
            throw make_error(status, "ucp_mem_query", "asking for the address of allocated memory");
        }
        address_ = reinterpret_cast<std::uint64_t>(attr.address);
    }
}

MemoryHandle::~MemoryHandle() {
    if (!context_->process().is_here()) {
        return;
    }
    if (is_allocated_) {
        // Before the range can be allocated again.
        const std::lock_guard lock(context_->mutex_);
        context_->allocated_.erase(address_);
    }
    const auto inside = context_->devices().enter(device_);
    (void)context_->library().fn().mem_unmap(context_->handle(), handle_);
}

std::string MemoryHandle::pack() const {
    const Library& library = context_->library();
    context_->process().require_here("a UCX context");
    const auto inside = context_->devices().enter(device_);
    void* raw = nullptr;
    std::size_t length = 0;
    library.check(library.fn().rkey_pack(context_->handle(), handle_, &raw, &length),
                  "ucp_rkey_pack", [this] { return text("memory at 0x", std::hex, address_); });
    std::string packed(static_cast<const char*>(raw), length);
    library.fn().rkey_buffer_release(raw);
    return packed;
}

}  // namespace pynixlkv::ucx
