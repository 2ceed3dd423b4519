#include "transfer/device_contexts.hpp"

#include <algorithm>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "base/library.hpp"
#include "base/text.hpp"

namespace pynixlkv::transfer {

/// The functions of libcuda that are needed here; see NVIDIA's CUDA driver API.
class CudaDriver {
    const SharedLibrary library_{"libcuda.so.1"};

    struct Symbol {
        void (*address)();
        template <class Function>
        operator Function*() const {  // NOLINT(google-explicit-constructor)
            return reinterpret_cast<Function*>(address);
        }
    };
    [[nodiscard]] Symbol symbol(const char* name) const { return {library_.require<void()>(name)}; }

  public:
    /// @return null if the system has none
    /// @throws Error RegistrationError if it has one that fails
    static const CudaDriver* get();

    /// "CUDA 12.4", the newest CUDA that the driver supports.
    [[nodiscard]] std::string version() const {
        int number = 0;
        (void)get_version(&number);
        return text("for CUDA ", number / 1000, ".", number % 1000 / 10);
    }

    [[nodiscard]] std::string describe(int status) const {
        const char* words = nullptr;
        (void)get_error_string(status, &words);
        return text("error ", status, ", ", words != nullptr ? words : "unknown");
    }

    void check(int status, const char* call, int device) const {
        if (status != 0) {
            throw Error("RegistrationError",
                        text("GPU ", device, " cannot be used: ", call, ": ", describe(status)));
        }
    }

    int (*init)(unsigned) = symbol("cuInit");
    int (*get_version)(int*) = symbol("cuDriverGetVersion");
    int (*get_error_string)(int, const char**) = symbol("cuGetErrorString");
    int (*device_count)(int*) = symbol("cuDeviceGetCount");
    int (*device_attribute)(int*, int, int) = symbol("cuDeviceGetAttribute");
    int (*retain)(void**, int) = symbol("cuDevicePrimaryCtxRetain");
    int (*release)(int) = symbol("cuDevicePrimaryCtxRelease_v2");
    int (*get_state)(int, unsigned*, int*) = symbol("cuDevicePrimaryCtxGetState");
    int (*get_current)(void**) = symbol("cuCtxGetCurrent");
    int (*push)(void*) = symbol("cuCtxPushCurrent_v2");
    int (*pop)(void**) = symbol("cuCtxPopCurrent_v2");
    int (*get_attribute)(void*, int, unsigned long long) = symbol("cuPointerGetAttribute");
};

namespace {

struct OpenedDriver {
    std::optional<CudaDriver> driver;
    std::optional<Error> failure;
};

OpenedDriver open_driver() {
    OpenedDriver opened;
    const auto fail = [&](const std::string& why) {
        opened.failure = Error("RegistrationError", "device memory cannot be used: " + why);
    };
    try {
        opened.driver.emplace();
    } catch (const Error& e) {
        if (e.kind() != "LibraryNotFoundError") {
            fail(text("the CUDA driver is too old: ", e.what()));
        }
        return opened;
    }
    const CudaDriver& driver = *opened.driver;
    if (const int status = driver.init(0); status != 0) {
        fail(text("the CUDA driver ", driver.version(), " did not start, cuInit: ",
                  driver.describe(status), "; check it with nvidia-smi"));
    }
    return opened;
}

/// CUpointer_attribute.
enum Attribute : int {
    kContext = 1,
    kMemoryType = 2,
    kIsManaged = 8,
    kDeviceOrdinal = 9,
    kIsLegacyIpcCapable = 10,
    kAllowedHandleTypes = 14,
    kIsRdmaCapable = 15,
    kPoolHandle = 17,
};

/// An attribute of memory; `unknown` from a driver that does not know the attribute.
std::uint64_t attribute_of(const CudaDriver& driver, std::uint64_t address, Attribute attribute,
                           std::uint64_t unknown) {
    std::uint64_t value = 0;  // little-endian, and wide enough for each attribute
    return driver.get_attribute(&value, attribute, address) == 0 ? value : unknown;
}

/// The device that has an address, -1 if the address is not device memory.
int device_of(const CudaDriver& driver, std::uint64_t address) {
    constexpr unsigned kOnDevice = 2;
    unsigned type = 0;
    int device = -1;
    const bool is_known = driver.get_attribute(&type, kMemoryType, address) == 0 &&
                          type == kOnDevice &&
                          driver.get_attribute(&device, kDeviceOrdinal, address) == 0;
    return is_known ? device : -1;
}

}  // namespace

const CudaDriver* CudaDriver::get() {
    static const OpenedDriver opened = open_driver();
    if (opened.failure) {
        throw Error(*opened.failure);
    }
    return opened.driver ? &*opened.driver : nullptr;
}

void DeviceContexts::release() noexcept {
    const std::lock_guard lock(mutex_);
    if (first_.exchange(nullptr) == nullptr) {
        return;
    }
    for (int device = 0; device < kMaxDevices; ++device) {
        if (contexts_[static_cast<std::size_t>(device)].exchange(nullptr) != nullptr) {
            (void)CudaDriver::get()->release(device);
        }
    }
}

std::optional<DeviceContexts::MemoryKind> DeviceContexts::kind_of(std::uint64_t address) noexcept {
    const CudaDriver* driver = nullptr;
    try {
        driver = CudaDriver::get();
    } catch (const Error&) {
        return std::nullopt;
    }
    if (driver == nullptr || device_of(*driver, address) < 0) {
        return std::nullopt;
    }
    const auto get = [&](Attribute attribute, std::uint64_t unknown) {
        return attribute_of(*driver, address, attribute, unknown);
    };
    // UCX up to 1.23 exports memory by a handle of the first CUDA, or else by
    // CU_MEM_HANDLE_TYPE_FABRIC, but not by a file descriptor.
    constexpr std::uint64_t kFabric = 8;
    const bool is_fabric = (get(kAllowedHandleTypes, 0) & kFabric) != 0;
    const bool is_legacy = get(kIsLegacyIpcCapable, 1) != 0;
    const bool is_rdma_capable = get(kIsRdmaCapable, 1) != 0;
    if (get(kIsManaged, 0) != 0) {
        return MemoryKind{"managed memory (cudaMallocManaged)", "allocate it with cudaMalloc",
                          false, false};
    }
    if (get(kPoolHandle, 0) != 0) {
        return MemoryKind{"memory of a pool (cudaMallocAsync)",
                          "for PyTorch, unset backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF; "
                          "or, for vLLM, set host_buffer_blocks",
                          is_fabric, is_rdma_capable};
    }
    if (!is_legacy && get(kContext, 0) == 0) {
        return MemoryKind{"memory of the virtual memory functions (cuMemMap)",
                          "for PyTorch, unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF; for "
                          "vLLM, enable_sleep_mode, or set host_buffer_blocks",
                          is_fabric, is_rdma_capable};
    }
    return MemoryKind{"memory of cudaMalloc", "register it in the process that allocated it",
                      is_legacy, is_rdma_capable};
}

std::string DeviceContexts::remark(std::uint64_t address) {
    const std::optional<MemoryKind> kind = kind_of(address);
    if (!kind || (kind->is_exportable && kind->is_rdma_capable)) {
        return {};
    }
    return text("; it is ", kind->name, ", which not all peers can reach; ", kind->advice);
}

DeviceContexts::DriverState DeviceContexts::driver_state() {
    constexpr int kDmaBufSupported = 124;  // CUdevice_attribute
    const CudaDriver* driver = nullptr;
    try {
        driver = CudaDriver::get();
    } catch (const Error& e) {
        return {e.what(), false};
    }
    if (driver == nullptr) {
        return {"needs an NVIDIA GPU and its driver (libcuda.so.1)", false};
    }
    int count = 0;
    (void)driver->device_count(&count);
    DriverState state;
    state.has_dma_buf = count > 0;
    for (int device = 0; device < count; ++device) {
        int is_supported = 0;
        state.has_dma_buf &=
            driver->device_attribute(&is_supported, kDmaBufSupported, device) == 0 &&
            is_supported != 0;
    }
    return state;
}

DeviceContexts::Scope::~Scope() {
    if (driver_ != nullptr) {
        (void)driver_->pop(nullptr);
    }
}

void* DeviceContexts::retain(const CudaDriver& driver, int device) {
    auto& context = contexts_.at(static_cast<std::size_t>(device));
    const std::lock_guard lock(mutex_);
    if (context == nullptr) {
        void* retained = nullptr;
        driver.check(driver.retain(&retained, device), "cuDevicePrimaryCtxRetain", device);
        context = retained;
        if (first_ == nullptr) {
            first_ = retained;
        }
    }
    return context;
}

std::pair<int, DeviceContexts::Scope> DeviceContexts::enter_for(const Descriptor& row,
                                                                bool is_device_known) {
    const CudaDriver* driver = CudaDriver::get();
    if (driver == nullptr) {
        return {-1, Scope()};
    }
    // Of VMM memory (PyTorch's expandable segments) a range can have several pieces.
    const int device = device_of(*driver, row.address);
    const int last = device_of(*driver, row.address + row.length - 1);
    if (device < 0 || last != device) {
        throw Error(
            "RegistrationError",
            text(row.str(), " is not memory of one GPU: the CUDA driver ", driver->version(),
                 " finds ", device < 0 ? "none at its first byte" : "another end",
                 "; was it freed, or put to sleep?"));
    }
    if (is_device_known && row.device != static_cast<std::uint64_t>(device)) {
        throw Error("RegistrationError", text(row.str(), " is memory of GPU ", device, ", not of ",
                                              row.device, ", as this process numbers its GPUs"));
    }
    // It migrates between the GPU and the host, under the operations of a peer.
    if (attribute_of(*driver, row.address, kIsManaged, 0) != 0) {
        throw Error("RegistrationError", row.str() + " cannot be moved" + remark(row.address));
    }
    driver->check(driver->push(retain(*driver, device)), "cuCtxPushCurrent", device);
    return {device, Scope(driver)};
}

void DeviceContexts::retain_active() noexcept {
    try {
        const CudaDriver* driver = first_ == nullptr ? CudaDriver::get() : nullptr;
        int count = 0;
        if (driver == nullptr || driver->device_count(&count) != 0) {
            return;
        }
        for (int device = 0; device < std::min(count, kMaxDevices); ++device) {
            unsigned flags = 0;
            int is_active = 0;
            if (driver->get_state(device, &flags, &is_active) == 0 && is_active != 0) {
                (void)retain(*driver, device);
                return;
            }
        }
    } catch (const Error&) {
        // A process without device memory works without a driver.
    }
}

DeviceContexts::Scope DeviceContexts::enter(int device) const noexcept {
    void* context = device >= 0 && device < kMaxDevices
                        ? contexts_[static_cast<std::size_t>(device)].load()
                        : nullptr;
    if (context == nullptr) {
        return {};
    }
    const CudaDriver* driver = CudaDriver::get();
    return driver->push(context) == 0 ? Scope(driver) : Scope();
}

DeviceContexts::Scope DeviceContexts::enter() const noexcept {
    void* first = first_.load(std::memory_order_acquire);
    if (first == nullptr) {
        return {};
    }
    const CudaDriver* driver = CudaDriver::get();
    void* current = nullptr;
    if (driver->get_current(&current) == 0 && current != nullptr) {
        return {};
    }
    return driver->push(first) == 0 ? Scope(driver) : Scope();
}

}  // namespace pynixlkv::transfer
