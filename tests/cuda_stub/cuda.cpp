/// @file
/// A CUDA driver without a GPU, for tests: libcuda.so.1 as far as UCX and this project call it.
///
/// "Device" memory is shared host memory (a memfd) behind addresses that the processor cannot
/// touch; the driver's copies reach it through a second mapping. It proves control flow, not speed.
/// Where the driver refuses a call, so does this one. References: [C] CUDA driver API, "Context
/// Management"; [P] "Primary Context Management"; [M] "Memory Management"; [V] "Virtual Memory
/// Management"; [U] "Unified Addressing"; [S] "Stream Management"; [E] "Event Management"; [O]
/// "Stream Ordered Memory Allocator" (all of CUDA 12.9); [G] "Developing a Linux Kernel Module
/// using GPUDirect RDMA"; or the public report named.
///
/// Environment: CUDA_STUB_DEVICES, number of cards (default 2); CUDA_VISIBLE_DEVICES as for CUDA;
/// CUDA_STUB_VERSION, the driver's version (default 12090); CUDA_STUB_INIT_ERROR, cuInit's result;
/// CUDA_STUB_DMA_BUF, whether cards have dma-buf (default 0);
/// CUDA_STUB_DEAF_TO, part of the name of a library whose changes of the context have no effect.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using Address = unsigned long long;

enum Result : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidContext = 201,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kContextIsDestroyed = 709,
    kNotPermitted = 800,
    kNotSupported = 801,
};

constexpr Address kPage = 1U << 16U;
constexpr Address kGranularity = 1U << 21U;
constexpr Address kFirst = 0x200000000000;
constexpr Address kLast = 0x300000000000;
/// From a device address to the mapping that the driver itself uses.
constexpr Address kShadow = 0x200000000000;
constexpr int kMaxDevices = 8;
constexpr int kPosixFd = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

/// How memory was allocated.
enum class Kind { kPlain, kVmm, kPool, kManaged };

int number(const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr && *text != '\0' ? std::atoi(text) : otherwise;
}

Address round_up(Address value, Address unit) {
    return (value + unit - 1) / unit * unit;
}

void* pointer(Address address) {
    return reinterpret_cast<void*>(address);
}

/// Physical memory, which may outlive the process that made it.
struct Memory {
    Memory(int descriptor, std::size_t bytes, int device_number, int types, bool for_rdma)
        : fd(descriptor),
          size(bytes),
          device(device_number),
          handle_types(types),
          is_rdma_capable(for_rdma) {}
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { ::close(fd); }
    const int fd;
    const std::size_t size;
    const int device;
    const int handle_types;
    const bool is_rdma_capable;
};

std::shared_ptr<Memory> make_memory(std::size_t size, int device, int handle_types = 0,
                                    bool is_rdma_capable = false) {
    const int fd = static_cast<int>(::syscall(SYS_memfd_create, "cuda stub", 1U));
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size)) != 0) {
        return nullptr;
    }
    return std::make_shared<Memory>(fd, size, device, handle_types, is_rdma_capable);
}

struct Context {
    int device = 0;
    int retained = 0;
    unsigned long long id = 0;  ///< of this life: a released context that is retained is another
};

/// A range of device addresses with memory behind it.
struct Range {
    std::size_t size = 0;
    std::shared_ptr<Memory> memory;
    unsigned long long context_id = 0;
    unsigned long long id = 0;
    int device = 0;  ///< where it is, or the device of the context that opened it
    Kind kind = Kind::kPlain;
    std::set<int> accessible;  ///< devices, of VMM memory
    int opened = 0;            ///< how often, of another process's memory
    std::string handle;        ///< of another process's memory
};

struct Event {
    unsigned long long context_id = 0;
    std::uint64_t pending = 0;  ///< records that have not been reached
};

struct Stream {
    unsigned long long context_id = 0;
    int device = 0;
    std::deque<std::function<void()>> work;
    bool is_running = false;
    int allowed = -1;  ///< steps that may run; -1 is all
};

struct Driver {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_initialized = false;
    bool is_held = false;
    std::vector<int> visible;  ///< number of the card, by ordinal
    std::array<Context, kMaxDevices> contexts;
    unsigned long long next_id = 1;
    Address next_address = 0;
    std::map<Address, Range> ranges;
    std::map<Address, std::size_t> reserved;
    std::map<unsigned long long, std::pair<std::shared_ptr<Memory>, int>> handles;
    std::map<Address, std::size_t> host_registered;
    std::set<Stream*> streams;
    std::set<Event*> events;
    std::map<std::string, int> calls;  ///< by name, of those that tests count
};

// Never destroyed: libraries call the driver from their destructors.
Driver& driver() {
    static Driver& one = *new Driver;
    return one;
}

/// Contexts of a thread. Without a destructor, for the same reason: a thread's objects go first.
struct Stack {
    std::array<Context*, 256> items;
    std::size_t size;

    [[nodiscard]] bool empty() const { return size == 0; }
    [[nodiscard]] Context* back() const { return items.at(size - 1); }
    void push_back(Context* context) { items.at(size++) = context; }
    void pop_back() { --size; }
};
thread_local Stack stack{};

using Lock = std::unique_lock<std::mutex>;

Lock locked() {
    return Lock(driver().mutex);
}

Context* current() {
    return stack.empty() ? nullptr : stack.back();
}

/// [C] "CUDA_ERROR_INVALID_CONTEXT: there is no context bound to the current thread";
/// CUDA_ERROR_CONTEXT_IS_DESTROYED for a primary context that was released.
Result check_context() {
    if (!driver().is_initialized) {
        return kNotInitialized;
    }
    if (current() == nullptr) {
        return kInvalidContext;
    }
    return current()->retained > 0 ? kSuccess : kContextIsDestroyed;
}

/// Whether a call comes from the library that the environment names.
bool is_deaf_to(void* caller) {
    static const char* const name = std::getenv("CUDA_STUB_DEAF_TO");
    Dl_info info{};
    return name != nullptr && ::dladdr(caller, &info) != 0 &&
           std::strstr(info.dli_fname, name) != nullptr;
}

#define REQUIRE(condition, error) \
    do {                          \
        if (!(condition)) {       \
            return (error);       \
        }                         \
    } while (false)
#define REQUIRE_CONTEXT()                                                         \
    do {                                                                          \
        if (const Result without = check_context(); without != 0) return without; \
    } while (false)

bool is_device(int device) {
    return driver().is_initialized && device >= 0 &&
           device < static_cast<int>(driver().visible.size());
}

Range* find(Address address, std::size_t length = 1, Address* base = nullptr) {
    auto& ranges = driver().ranges;
    auto next = ranges.upper_bound(address);
    if (next == ranges.begin()) {
        return nullptr;
    }
    --next;
    if (address - next->first >= next->second.size ||
        length > next->second.size - (address - next->first)) {
        return nullptr;
    }
    if (base != nullptr) {
        *base = next->first;
    }
    return &next->second;
}

bool is_device_address(Address address) {
    return address >= kFirst && address < kLast;
}

/// Processes get unlike addresses, so that an address of the wrong process is never valid.
Address reserve(std::size_t size, Address alignment) {
    Driver& d = driver();
    if (d.next_address == 0) {
        d.next_address = kFirst + (static_cast<Address>(::getpid()) % 2048) * (1ULL << 33U);
    }
    const Address address = round_up(d.next_address, std::max<Address>(alignment, kPage));
    d.next_address = address + round_up(size, kPage) + kPage;
    void* place = ::mmap(pointer(address), size, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    return place == pointer(address) ? address : 0;
}

bool map_shadow(Address address, std::size_t size, const Memory& memory, std::size_t offset) {
    return ::mmap(pointer(address + kShadow), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                  memory.fd, static_cast<off_t>(offset)) != MAP_FAILED;
}

void unmap(std::map<Address, Range>::iterator at, bool is_reserved) {
    ::munmap(pointer(at->first + kShadow), at->second.size);
    if (!is_reserved) {
        ::munmap(pointer(at->first), at->second.size);
    }
    driver().ranges.erase(at);
}

Address add_range(std::shared_ptr<Memory> memory, int device, unsigned long long context_id) {
    const Address address = reserve(memory->size, kPage);
    if (address == 0 || !map_shadow(address, memory->size, *memory, 0)) {
        return 0;
    }
    Range range;
    range.size = memory->size;
    range.device = device;
    range.memory = std::move(memory);
    range.context_id = context_id;
    range.id = driver().next_id++;
    driver().ranges[address] = std::move(range);
    return address;
}

/// Where the processor finds the bytes of one side of a copy; null if the copy must fail.
/// [V] "cuMemSetAccess": memory is accessible only from the devices that were given access; a copy
/// runs on the device of the current context (openucx/ucx#10671 met this).
char* side_of_copy(Address address, std::size_t length) {
    if (!is_device_address(address)) {
        return static_cast<char*>(pointer(address));
    }
    const Range* range = find(address, length);
    if (range == nullptr ||
        (range->kind == Kind::kVmm && !range->accessible.contains(current()->device))) {
        return nullptr;
    }
    return static_cast<char*>(pointer(address + kShadow));
}

/// Runs the work of all streams, so that a copy is complete only some time after its call.
void run_streams() {
    Driver& d = driver();
    Lock lock(d.mutex);
    for (;;) {
        Stream* busy = nullptr;
        d.changed.wait(lock, [&] {
            if (d.is_held) {
                return false;
            }
            for (Stream* stream : d.streams) {
                if (!stream->work.empty() && stream->allowed != 0) {
                    busy = stream;
                }
            }
            return busy != nullptr;
        });
        const auto step = std::move(busy->work.front());
        busy->work.pop_front();
        busy->allowed -= busy->allowed > 0 ? 1 : 0;
        busy->is_running = true;
        lock.unlock();
        step();
        lock.lock();
        busy->is_running = false;
        d.changed.notify_all();
    }
}

void enqueue(Stream& stream, std::function<void()> step) {
    static const bool started = [] {
        std::thread(run_streams).detach();
        return true;
    }();
    (void)started;
    stream.work.push_back(std::move(step));
    driver().changed.notify_all();
}

Stream* stream_of(void* handle) {
    auto* stream = static_cast<Stream*>(handle);
    return driver().streams.contains(stream) ? stream : nullptr;
}

Event* event_of(void* handle) {
    auto* event = static_cast<Event*>(handle);
    return driver().events.contains(event) ? event : nullptr;
}

Result copy(Address to, Address from, std::size_t length, void* handle) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    Stream* stream = stream_of(handle);
    REQUIRE(stream != nullptr, kInvalidHandle);
    char* target = side_of_copy(to, length);
    const char* source = side_of_copy(from, length);
    REQUIRE(target != nullptr && source != nullptr, kInvalidValue);
    ++driver().calls["copy"];
    enqueue(*stream, [=] { std::memcpy(target, source, length); });
    return kSuccess;
}

Result allocate(Address* address, std::size_t size, Kind kind) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    REQUIRE(size > 0, kInvalidValue);
    auto memory = make_memory(round_up(size, kPage), current()->device);
    *address = memory ? add_range(std::move(memory), current()->device, current()->id) : 0;
    REQUIRE(*address != 0, kOutOfMemory);
    driver().ranges[*address].kind = kind;
    return kSuccess;
}

/// CUipcMemHandle: 64 bytes that only the driver reads.
struct IpcHandle {
    std::int32_t pid;
    std::int32_t fd;
    std::uint64_t size;
    std::uint64_t id;
    std::int32_t card;
    char unused[36];
};
static_assert(sizeof(IpcHandle) == 64);

struct Location {
    int type;
    int id;
};

struct AllocationProp {
    int type;
    int handle_types;
    Location location;
    void* windows;
    unsigned char flags[8];  ///< the second: for GPUDirect RDMA
};

struct AccessDesc {
    Location location;
    int flags;
};

Memory* memory_of(unsigned long long handle) {
    const auto found = driver().handles.find(handle);
    return found == driver().handles.end() ? nullptr : found->second.first.get();
}

unsigned long long add_handle(std::shared_ptr<Memory> memory) {
    for (auto& [handle, owned] : driver().handles) {
        if (owned.first == memory) {
            ++owned.second;
            return handle;
        }
    }
    const unsigned long long handle = driver().next_id++;
    driver().handles[handle] = {std::move(memory), 1};
    return handle;
}

struct Attribute {
    std::size_t width;  ///< 0 for attributes that are not known here
    std::uint64_t value;
};

/// Attributes of CUpointer_attribute that UCX and this project ask for.
Attribute attribute_of(const Range& range, Address base, int attribute) {
    const auto context =
        reinterpret_cast<std::uint64_t>(&driver().contexts[static_cast<std::size_t>(range.device)]);
    const bool is_legacy = range.kind == Kind::kPlain && range.handle.empty();
    switch (attribute) {
        case 1:  // CONTEXT; [U] null for memory that belongs to no context
            return {8, range.kind == Kind::kVmm || range.kind == Kind::kPool ? 0 : context};
        case 2:  // MEMORY_TYPE: device
            return {4, 2};
        case 6:  // SYNC_MEMOPS
            return {4, 0};
        case 8:  // IS_MANAGED
            return {4, range.kind == Kind::kManaged ? 1U : 0U};
        case 7:  // BUFFER_ID
            return {8, range.id};
        case 9:  // DEVICE_ORDINAL
            return {4, static_cast<std::uint64_t>(range.device)};
        case 10:  // IS_LEGACY_CUDA_IPC_CAPABLE; [M] cuIpcGetMemHandle
            return {4, is_legacy ? 1U : 0U};
        case 11:  // RANGE_START_ADDR
            return {8, base};
        case 12:  // RANGE_SIZE
            return {8, range.size};
        case 13:  // MAPPED
            return {4, 1};
        case 14:  // ALLOWED_HANDLE_TYPES
            return {8, range.memory ? static_cast<std::uint64_t>(range.memory->handle_types) : 0};
        case 15:  // IS_GPU_DIRECT_RDMA_CAPABLE; [G] memory of cuMemAlloc; of cuMemCreate, if asked
                  // for
            return {4, is_legacy || (range.memory && range.memory->is_rdma_capable) ? 1U : 0U};
        case 17:  // MEMPOOL_HANDLE
            return {8, range.kind == Kind::kPool ? 1U : 0U};
        default:
            return {0, 0};
    }
}

}  // namespace

extern "C" {

// ---- tests only

/// Where the processor may look at device memory.
__attribute__((visibility("default"))) void* cudaStubView(Address address) {
    return pointer(address + kShadow);
}

/// Let nothing complete from now on, or let everything go on.
__attribute__((visibility("default"))) void cudaStubHold(int is_held) {
    const Lock lock = locked();
    driver().is_held = is_held != 0;
    driver().changed.notify_all();
}

/// Let only some of the work of a stream run from now on, or all if the number is -1.
__attribute__((visibility("default"))) void cudaStubAllow(void* stream, int steps) {
    const Lock lock = locked();
    static_cast<Stream*>(stream)->allowed = steps;
    driver().changed.notify_all();
}

/// How often something happened: "copy", "ipc open", "retain" minus releases by device.
__attribute__((visibility("default"))) int cudaStubCount(const char* what) {
    const Lock lock = locked();
    return driver().calls[what];
}

#pragma GCC visibility push(default)

// ---- devices

Result cuInit(unsigned /*flags*/) {
    const Lock lock = locked();
    Driver& d = driver();
    if (const int error = number("CUDA_STUB_INIT_ERROR", 0); error != 0) {
        return static_cast<Result>(error);
    }
    if (!d.is_initialized) {
        const int cards = std::min(number("CUDA_STUB_DEVICES", 2), kMaxDevices);
        const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
        if (visible == nullptr) {
            for (int card = 0; card < cards; ++card) {
                d.visible.push_back(card);
            }
        } else {
            // [CUDA environment variables] the first invalid number ends the list.
            std::istringstream words(visible);
            for (std::string word; std::getline(words, word, ',');) {
                const int card = word.empty() ? -1 : std::atoi(word.c_str());
                if (card < 0 || card >= cards) {
                    break;
                }
                d.visible.push_back(card);
            }
        }
        for (int device = 0; device < kMaxDevices; ++device) {
            d.contexts[static_cast<std::size_t>(device)].device = device;
        }
        d.is_initialized = !d.visible.empty();
    }
    return d.is_initialized ? kSuccess : kNoDevice;
}

Result cuDriverGetVersion(int* version) {
    *version = number("CUDA_STUB_VERSION", 12090);
    return kSuccess;
}

Result cuDeviceGetCount(int* count) {
    REQUIRE(driver().is_initialized, kNotInitialized);
    *count = static_cast<int>(driver().visible.size());
    return kSuccess;
}

Result cuDeviceGet(int* device, int ordinal) {
    REQUIRE(driver().is_initialized, kNotInitialized);
    REQUIRE(is_device(ordinal), kInvalidDevice);
    *device = ordinal;
    return kSuccess;
}

Result cuDeviceGetName(char* name, int length, int device) {
    REQUIRE(is_device(device), kInvalidDevice);
    std::snprintf(name, static_cast<std::size_t>(length), "Stub card %d",
                  driver().visible[static_cast<std::size_t>(device)]);
    return kSuccess;
}

Result cuDeviceGetUuid(void* uuid, int device) {
    REQUIRE(is_device(device), kInvalidDevice);
    std::memset(uuid, 0xa0 + driver().visible[static_cast<std::size_t>(device)], 16);
    return kSuccess;
}

Result cuDeviceTotalMem_v2(std::size_t* bytes, int device) {
    REQUIRE(is_device(device), kInvalidDevice);
    *bytes = std::size_t{8} << 30U;
    return kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, int device) {
    REQUIRE(is_device(device), kInvalidDevice);
    switch (attribute) {
        case 33:  // PCI_BUS_ID
            *value = 0x10 + driver().visible[static_cast<std::size_t>(device)];
            break;
        case 75:  // COMPUTE_CAPABILITY_MAJOR
            *value = 9;
            break;
        case 41:   // UNIFIED_ADDRESSING
        case 102:  // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        case 103:  // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            *value = 1;
            break;
        case 124:  // DMA_BUF_SUPPORTED; a kernel module's, which need not be there
            *value = number("CUDA_STUB_DMA_BUF", 0);
            break;
        default:
            *value = 0;
    }
    return kSuccess;
}

// ---- contexts

Result cuDevicePrimaryCtxRetain(void** context, int device) {
    const Lock lock = locked();
    REQUIRE(is_device(device), kInvalidDevice);
    Context& primary = driver().contexts[static_cast<std::size_t>(device)];
    if (primary.retained++ == 0) {
        primary.id = driver().next_id++;
    }
    ++driver().calls["retained"];
    *context = &primary;
    return kSuccess;
}

/// [P] The last release resets the context: its memory, streams and events are gone.
Result cuDevicePrimaryCtxRelease_v2(int device) {
    const Lock lock = locked();
    Driver& d = driver();
    REQUIRE(is_device(device), kInvalidDevice);
    Context& primary = d.contexts[static_cast<std::size_t>(device)];
    REQUIRE(primary.retained > 0, kInvalidContext);
    --d.calls["retained"];
    if (--primary.retained > 0) {
        return kSuccess;
    }
    for (auto at = d.ranges.begin(); at != d.ranges.end();) {
        const auto next = std::next(at);
        if (at->second.kind != Kind::kVmm && at->second.context_id == primary.id) {
            unmap(at, false);
        }
        at = next;
    }
    std::erase_if(d.streams, [&](Stream* s) { return s->context_id == primary.id; });
    std::erase_if(d.events, [&](Event* e) { return e->context_id == primary.id; });
    return kSuccess;
}

Result cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    const Lock lock = locked();
    REQUIRE(is_device(device), kInvalidDevice);
    *flags = 0;
    *active = driver().contexts[static_cast<std::size_t>(device)].retained > 0 ? 1 : 0;
    return kSuccess;
}

Result cuCtxGetCurrent(void** context) {
    REQUIRE(driver().is_initialized, kNotInitialized);
    *context = current();
    return kSuccess;
}

Result cuCtxPushCurrent_v2(void* context) {
    REQUIRE(driver().is_initialized, kNotInitialized);
    REQUIRE(context != nullptr, kInvalidContext);
    REQUIRE(!is_deaf_to(__builtin_return_address(0)), kSuccess);
    stack.push_back(static_cast<Context*>(context));
    return kSuccess;
}

Result cuCtxPopCurrent_v2(void** context) {
    REQUIRE(!is_deaf_to(__builtin_return_address(0)), kSuccess);
    REQUIRE(!stack.empty(), kInvalidContext);
    if (context != nullptr) {
        *context = stack.back();
    }
    stack.pop_back();
    return kSuccess;
}

/// [C] "If hcuContext is NULL, this is equivalent to popping the CPU thread's context stack."
Result cuCtxSetCurrent(void* context) {
    REQUIRE(driver().is_initialized, kNotInitialized);
    if (!stack.empty()) {
        stack.pop_back();
    }
    if (context != nullptr) {
        stack.push_back(static_cast<Context*>(context));
    }
    return kSuccess;
}

Result cuCtxGetDevice(int* device) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    *device = current()->device;
    return kSuccess;
}

Result cuCtxGetId(void* context, unsigned long long* id) {
    const Lock lock = locked();
    if (context == nullptr) {
        REQUIRE_CONTEXT();
        context = current();
    }
    *id = static_cast<Context*>(context)->id;
    return kSuccess;
}

Result cuCtxGetFlags(unsigned* flags) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    *flags = 0;
    return kSuccess;
}

Result cuCtxSetFlags(unsigned /*flags*/) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();  // "cuCtxSetFlags ... failed: invalid device context", openucx/ucx#10837
    return kSuccess;
}

// ---- memory

Result cuMemAlloc_v2(Address* address, std::size_t size) {
    return allocate(address, size, Kind::kPlain);
}

Result cuMemFree_v2(Address address) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    const auto at = driver().ranges.find(address);
    REQUIRE(
        at != driver().ranges.end() && at->second.kind != Kind::kVmm && at->second.handle.empty(),
        kInvalidValue);
    unmap(at, false);
    return kSuccess;
}

Result cuMemAllocManaged(Address* address, std::size_t size, unsigned /*flags*/) {
    return allocate(address, size, Kind::kManaged);
}

Result cuMemAllocAsync(Address* address, std::size_t size, void* stream) {
    {
        const Lock lock = locked();
        REQUIRE(stream_of(stream) != nullptr, kInvalidHandle);
    }
    return allocate(address, size, Kind::kPool);
}

/// Fails without a context: openucx/ucx#10837.
Result cuMemGetAddressRange_v2(Address* base, std::size_t* size, Address address) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    Address start = 0;
    const Range* range = find(address, 1, &start);
    REQUIRE(range != nullptr, kNotFound);
    if (base != nullptr) {
        *base = start;
    }
    if (size != nullptr) {
        *size = range->size;
    }
    return kSuccess;
}

Result cuPointerGetAttribute(void* value, int attribute, Address address) {
    const Lock lock = locked();
    REQUIRE(driver().is_initialized, kNotInitialized);
    Address base = 0;
    const Range* range = find(address, 1, &base);
    // [U] "If ptr was not allocated by, mapped by, or registered with a CUcontext ...
    // CUDA_ERROR_INVALID_VALUE is returned"
    REQUIRE(range != nullptr, kInvalidValue);
    const Attribute found = attribute_of(*range, base, attribute);
    std::memcpy(value, &found.value, found.width);
    return found.width > 0 ? kSuccess : kInvalidValue;
}

/// [U] Unlike cuPointerGetAttribute, "this function will not return an error when the ptr ... is
/// not valid", but fill the attributes with zero.
Result cuPointerGetAttributes(unsigned count, int* attributes, void** values, Address address) {
    const Lock lock = locked();
    REQUIRE(driver().is_initialized, kNotInitialized);
    Address base = 0;
    const Range* range = find(address, 1, &base);
    for (unsigned i = 0; i < count; ++i) {
        Attribute found = attribute_of(range != nullptr ? *range : Range(), base, attributes[i]);
        found.value = range != nullptr ? found.value : 0;
        std::memcpy(values[i], &found.value, found.width);
    }
    return kSuccess;
}

Result cuPointerSetAttribute(const void* /*value*/, int /*attribute*/, Address address) {
    const Lock lock = locked();
    REQUIRE(find(address) != nullptr, kInvalidValue);
    return kSuccess;
}

Result cuMemRangeGetAttribute(void* /*d*/, std::size_t /*s*/, int /*a*/, Address /*p*/,
                              std::size_t /*n*/) {
    return kInvalidValue;  // [U] for managed memory only
}

Result cuMemHostRegister_v2(void* address, std::size_t size, unsigned /*flags*/) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    const auto start = reinterpret_cast<Address>(address);
    REQUIRE(!is_device_address(start), kInvalidValue);
    // [M] CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    REQUIRE(driver().host_registered.emplace(start, size).second, static_cast<Result>(712));
    return kSuccess;
}

Result cuMemHostUnregister(void* address) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    // [M] CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    REQUIRE(driver().host_registered.erase(reinterpret_cast<Address>(address)) == 1,
            static_cast<Result>(713));
    return kSuccess;
}

Result cuMemcpyAsync(Address to, Address from, std::size_t length, void* stream) {
    return copy(to, from, length, stream);
}

Result cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t length, void* stream) {
    // [M] Both are device memory.
    REQUIRE(is_device_address(to) && is_device_address(from), kInvalidValue);
    return copy(to, from, length, stream);
}

Result cuMemcpyHtoD_v2(Address to, const void* from, std::size_t length) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    char* target = side_of_copy(to, length);
    REQUIRE(target != nullptr && is_device_address(to), kInvalidValue);
    std::memcpy(target, from, length);
    return kSuccess;
}

Result cuMemcpyDtoH_v2(void* to, Address from, std::size_t length) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    const char* source = side_of_copy(from, length);
    REQUIRE(source != nullptr && is_device_address(from), kInvalidValue);
    std::memcpy(to, source, length);
    return kSuccess;
}

// ---- memory of another process

Result cuIpcGetMemHandle(void* handle, Address address) {
    const Lock lock = locked();
    REQUIRE(driver().is_initialized, kNotInitialized);
    const Range* range = find(address);
    // [M] for memory of cuMemAlloc; [O] not of pools; openucx/ucx#10671 met its refusal of VMM
    // memory
    REQUIRE(range != nullptr && range->kind == Kind::kPlain && range->handle.empty(),
            kInvalidValue);
    IpcHandle made{};
    made.pid = ::getpid();
    made.fd = range->memory->fd;
    made.size = range->size;
    made.id = range->id;
    made.card = driver().visible[static_cast<std::size_t>(range->device)];
    std::memcpy(handle, &made, sizeof made);
    return kSuccess;
}

Result cuIpcOpenMemHandle_v2(Address* address, IpcHandle handle, unsigned /*flags*/) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    Driver& d = driver();
    // [M] CUDA_ERROR_INVALID_CONTEXT in the process that exported it
    REQUIRE(handle.pid != ::getpid(), kInvalidContext);
    const std::string name(reinterpret_cast<const char*>(&handle), sizeof handle);
    for (auto& [base, range] : d.ranges) {
        if (range.handle == name && range.device == current()->device) {
            ++range.opened;  // [M] the reference count is incremented
            *address = base;
            return kSuccess;
        }
    }
    const std::string path =
        "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0, kInvalidValue);
    *address = add_range(std::make_shared<Memory>(fd, handle.size, current()->device, 0, false),
                         current()->device, current()->id);
    REQUIRE(*address != 0, kOutOfMemory);
    d.ranges[*address].handle = name;
    d.ranges[*address].opened = 1;
    ++d.calls["ipc open"];
    return kSuccess;
}

Result cuIpcCloseMemHandle(Address address) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    const auto at = driver().ranges.find(address);
    REQUIRE(at != driver().ranges.end() && at->second.opened > 0, kInvalidValue);
    if (--at->second.opened == 0) {
        unmap(at, false);
    }
    return kSuccess;
}

// ---- virtual memory management

Result cuMemGetAllocationGranularity(std::size_t* granularity, const AllocationProp* /*prop*/,
                                     int /*option*/) {
    *granularity = kGranularity;
    return kSuccess;
}

Result cuMemCreate(unsigned long long* handle, std::size_t size, const AllocationProp* prop,
                   unsigned long long /*flags*/) {
    const Lock lock = locked();
    REQUIRE(driver().is_initialized, kNotInitialized);
    REQUIRE(size % kGranularity == 0 && size > 0, kInvalidValue);
    REQUIRE(is_device(prop->location.id), kInvalidDevice);
    REQUIRE((prop->handle_types & ~kPosixFd) == 0, kNotPermitted);  // no fabric here
    auto memory = make_memory(size, prop->location.id, prop->handle_types, prop->flags[1] != 0);
    REQUIRE(memory != nullptr, kOutOfMemory);
    *handle = add_handle(std::move(memory));
    return kSuccess;
}

Result cuMemRelease(unsigned long long handle) {
    const Lock lock = locked();
    const auto found = driver().handles.find(handle);
    REQUIRE(found != driver().handles.end(), kInvalidValue);
    if (--found->second.second == 0) {
        driver().handles.erase(found);
    }
    return kSuccess;
}

Result cuMemAddressReserve(Address* address, std::size_t size, std::size_t alignment,
                           Address /*wish*/, unsigned long long /*flags*/) {
    const Lock lock = locked();
    REQUIRE(size % kPage == 0 && size > 0, kInvalidValue);
    *address = reserve(size, std::max<Address>(alignment, kGranularity));
    REQUIRE(*address != 0, kOutOfMemory);
    driver().reserved[*address] = size;
    return kSuccess;
}

Result cuMemAddressFree(Address address, std::size_t size) {
    const Lock lock = locked();
    const auto at = driver().reserved.find(address);
    REQUIRE(at != driver().reserved.end() && at->second == size, kInvalidValue);
    REQUIRE(find(address) == nullptr, kInvalidValue);  // [V] must be unmapped
    ::munmap(pointer(address), size);
    driver().reserved.erase(at);
    return kSuccess;
}

Result cuMemMap(Address address, std::size_t size, std::size_t offset, unsigned long long handle,
                unsigned long long /*flags*/) {
    const Lock lock = locked();
    Driver& d = driver();
    auto reserved = d.reserved.upper_bound(address);
    REQUIRE(reserved != d.reserved.begin(), kInvalidValue);
    --reserved;
    REQUIRE(address + size <= reserved->first + reserved->second, kInvalidValue);
    const Memory* memory = memory_of(handle);
    REQUIRE(memory != nullptr && offset == 0 && size <= memory->size, kInvalidValue);
    REQUIRE(map_shadow(address, size, *memory, offset), kOutOfMemory);
    Range range;
    range.size = size;
    range.memory = d.handles[handle].first;
    range.device = memory->device;
    range.id = d.next_id++;
    range.kind = Kind::kVmm;
    d.ranges[address] = std::move(range);
    return kSuccess;
}

Result cuMemSetAccess(Address address, std::size_t size, const AccessDesc* access,
                      std::size_t count) {
    const Lock lock = locked();
    Range* range = find(address, size);
    REQUIRE(range != nullptr && range->kind == Kind::kVmm, kInvalidValue);
    for (std::size_t i = 0; i < count; ++i) {
        range->accessible.insert(access[i].location.id);
    }
    return kSuccess;
}

Result cuMemUnmap(Address address, std::size_t size) {
    const Lock lock = locked();
    const auto at = driver().ranges.find(address);
    REQUIRE(at != driver().ranges.end() && at->second.kind == Kind::kVmm && at->second.size == size,
            kInvalidValue);
    unmap(at, true);
    return kSuccess;
}

/// [V] Fails for memory that cuMemCreate has not made.
Result cuMemRetainAllocationHandle(unsigned long long* handle, void* address) {
    const Lock lock = locked();
    const Range* range = find(reinterpret_cast<Address>(address));
    REQUIRE(range != nullptr && range->kind == Kind::kVmm, kInvalidValue);
    *handle = add_handle(range->memory);
    return kSuccess;
}

Result cuMemGetAllocationPropertiesFromHandle(AllocationProp* prop, unsigned long long handle) {
    const Lock lock = locked();
    const Memory* memory = memory_of(handle);
    REQUIRE(memory != nullptr, kInvalidValue);
    *prop = {};
    prop->type = 1;  // pinned
    prop->handle_types = memory->handle_types;
    prop->location = {1, memory->device};  // of a device
    return kSuccess;
}

Result cuMemExportToShareableHandle(void* made, unsigned long long handle, int type,
                                    unsigned long long /*flags*/) {
    const Lock lock = locked();
    const Memory* memory = memory_of(handle);
    REQUIRE(memory != nullptr, kInvalidValue);
    // [V] only the types that were requested of cuMemCreate
    REQUIRE(type == kPosixFd && (memory->handle_types & type) != 0, kNotPermitted);
    *static_cast<int*>(made) = ::fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
    return kSuccess;
}

Result cuMemImportFromShareableHandle(unsigned long long* handle, void* shared, int type) {
    const Lock lock = locked();
    REQUIRE(type == kPosixFd, kNotSupported);
    const int fd =
        ::fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(shared)), F_DUPFD_CLOEXEC, 0);
    const off_t size = ::lseek(fd, 0, SEEK_END);
    REQUIRE(fd >= 0 && size > 0, kInvalidValue);
    ++driver().calls["ipc open"];
    *handle = add_handle(
        std::make_shared<Memory>(fd, static_cast<std::size_t>(size), 0, kPosixFd, false));
    return kSuccess;
}

#define NOT_SUPPORTED(name)   \
    Result name() {           \
        return kNotSupported; \
    }
NOT_SUPPORTED(cuMemPoolDestroy)
NOT_SUPPORTED(cuMemPoolExportPointer)
NOT_SUPPORTED(cuMemPoolExportToShareableHandle)
NOT_SUPPORTED(cuMemPoolImportFromShareableHandle)
NOT_SUPPORTED(cuMemPoolImportPointer)
NOT_SUPPORTED(cuMemPoolSetAccess)
NOT_SUPPORTED(cuMemGetHandleForAddressRange)

// ---- streams and events

Result cuStreamCreate(void** stream, unsigned /*flags*/) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    auto* made = new Stream;
    made->context_id = current()->id;
    made->device = current()->device;
    driver().streams.insert(made);
    *stream = made;
    return kSuccess;
}

Result cuStreamSynchronize(void* handle) {
    Lock lock = locked();
    REQUIRE_CONTEXT();
    Stream* stream = stream_of(handle);
    REQUIRE(stream != nullptr, kInvalidHandle);
    driver().changed.wait(lock, [&] { return stream->work.empty() && !stream->is_running; });
    return kSuccess;
}

Result cuStreamDestroy_v2(void* handle) {
    // [S] "the function will return immediately and the resources ... released ... once the device
    // has completed all work": here the work is waited for.
    if (const Result result = cuStreamSynchronize(handle); result != kSuccess) {
        return result;
    }
    const Lock lock = locked();
    driver().streams.erase(static_cast<Stream*>(handle));
    return kSuccess;
}

Result cuStreamAddCallback(void* handle, void (*callback)(void*, Result, void*), void* argument,
                           unsigned /*flags*/) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    Stream* stream = stream_of(handle);
    REQUIRE(stream != nullptr, kInvalidHandle);
    enqueue(*stream, [=] { callback(handle, kSuccess, argument); });
    return kSuccess;
}

Result cuEventCreate(void** event, unsigned /*flags*/) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    auto* made = new Event;
    made->context_id = current()->id;
    driver().events.insert(made);
    *event = made;
    return kSuccess;
}

/// [E] "hEvent and hStream must be from the same context otherwise CUDA_ERROR_INVALID_HANDLE"
Result cuEventRecord(void* handle, void* stream_handle) {
    const Lock lock = locked();
    REQUIRE_CONTEXT();
    Event* event = event_of(handle);
    Stream* stream = stream_of(stream_handle);
    REQUIRE(event != nullptr && stream != nullptr && event->context_id == stream->context_id,
            kInvalidHandle);
    ++event->pending;
    enqueue(*stream, [event] {
        const Lock inside = locked();
        --event->pending;
    });
    return kSuccess;
}

/// The driver crashes here on a thread without a context: ai-dynamo/nixl#2102, sgl-project/
/// sglang#23499.
Result cuEventQuery(void* handle) {
    const Lock lock = locked();
    if (current() == nullptr) {
        std::fputs("cuda stub: cuEventQuery on a thread without a context\n", stderr);
        std::abort();
    }
    const Event* event = event_of(handle);
    REQUIRE(event != nullptr, kInvalidHandle);
    return event->pending == 0 ? kSuccess : kNotReady;
}

/// Events are small and kept, because work of a stream may still refer to them.
Result cuEventDestroy_v2(void* handle) {
    const Lock lock = locked();
    REQUIRE(driver().events.erase(static_cast<Event*>(handle)) == 1, kInvalidHandle);
    return kSuccess;
}

// ---- the rest

Result cuGetErrorString(int error, const char** text) {
    static const std::map<int, const char*> texts{
        {kSuccess, "no error"},
        {kInvalidValue, "invalid argument"},
        {kOutOfMemory, "out of memory"},
        {kNotInitialized, "initialization error"},
        {34, "CUDA driver is a stub library"},
        {kNoDevice, "no CUDA-capable device is detected"},
        {kInvalidDevice, "invalid device ordinal"},
        {kInvalidContext, "invalid device context"},
        {kInvalidHandle, "invalid resource handle"},
        {kNotFound, "named symbol not found"},
        {kNotReady, "device not ready"},
        {kContextIsDestroyed, "context is destroyed"},
        {kNotPermitted, "operation not permitted"},
        {kNotSupported, "operation not supported"},
        {803, "system has unsupported display driver / cuda driver combination"},
        {999, "unknown error"},
    };
    const auto found = texts.find(error);
    *text = found == texts.end() ? nullptr : found->second;
    return found == texts.end() ? kInvalidValue : kSuccess;
}

Result cuGetProcAddress_v2(const char* name, void** function, int /*version*/,
                           unsigned long long /*flags*/, int* status) {
    static void* const self = [] {
        Dl_info info{};
        ::dladdr(reinterpret_cast<void*>(&cuInit), &info);
        return ::dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    *function = ::dlsym(self, (std::string(name) + "_v2").c_str());
    if (*function == nullptr) {
        *function = ::dlsym(self, name);
    }
    if (status != nullptr) {
        *status = *function != nullptr ? 0 : 1;
    }
    return *function != nullptr ? kSuccess : kNotFound;
}

#pragma GCC visibility pop

}  // extern "C"
