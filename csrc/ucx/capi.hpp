/// @file
/// The part of UCP's C interface that we use, declared by ourselves and resolved at run time. UCX
/// only adds to the ends of its structures and reads a field only if its bit is set in the mask, so
/// a structure may end with the last field that we use. A test compares it all with UCX's headers.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "ucx/status.hpp"

namespace pynixlkv::ucx::capi {

using Address = struct AddressOpaque*;
using Config = struct ConfigOpaque*;
using Context = struct ContextOpaque*;
using Endpoint = struct EndpointOpaque*;
using Memory = struct MemoryOpaque*;
using RemoteKey = struct RemoteKeyOpaque*;
using Worker = struct WorkerOpaque*;
/// Null (done), an encoded failure, or a request: see request.hpp.
using StatusPointer = void*;

/// The oldest interface version that has all of this.
inline constexpr unsigned kApiMajor = 1;
inline constexpr unsigned kApiMinor = 18;

enum Feature : std::uint64_t {
    kFeatureRma = 1U << 1U,
    kFeatureWakeup = 1U << 4U,
    kFeatureAm = 1U << 6U,
};

struct ContextParams {
    enum Mask : std::uint64_t { kFeatures = 1U << 0U, kMtWorkersShared = 1U << 5U };
    std::uint64_t mask;
    std::uint64_t features;
    std::size_t request_size;
    void (*request_init)(void*);
    void (*request_cleanup)(void*);
    std::uint64_t tag_sender_mask;
    int mt_workers_shared;
};

struct ContextAttr {
    enum Mask : std::uint64_t { kMemoryTypes = 1U << 2U };
    std::uint64_t mask;
    std::size_t request_size;
    int thread_mode;
    std::uint64_t memory_types;  ///< a bit for each MemoryType
    char name[32];
    std::size_t device_counter_size;
};

enum ThreadMode : int { kThreadSerialized = 1 };

struct WorkerParams {
    enum Mask : std::uint64_t { kThreadMode = 1U << 0U };
    std::uint64_t mask;
    int thread_mode;
};

/// Whether UCX monitors a connection; both sides need the same.
enum ErrorMode : int { kErrorNone = 0, kErrorPeer = 1 };

struct EndpointParams {
    enum Mask : std::uint64_t {
        kRemoteAddress = 1U << 0U,
        kErrorMode = 1U << 1U,
        kErrorHandler = 1U << 2U,
    };
    std::uint64_t mask;
    const void* address;
    int error_mode;
    void (*error_handler)(void* argument, Endpoint, Status);
    void* error_argument;
};

struct Transport {
    const char* name;
    const char* device;
};

struct EndpointAttr {
    enum Mask : std::uint64_t { kTransports = 1U << 3U };
    std::uint64_t mask;
    char name[32];
    sockaddr_storage local;
    sockaddr_storage remote;
    Transport* transports;
    unsigned num_transports;  ///< capacity; then, number of transports
    std::size_t transport_bytes;
    void* user_data;
};

inline constexpr std::uint32_t kCloseForce = 1U << 0U;

struct MemoryParams {
    enum Mask : std::uint64_t {
        kAddress = 1U << 0U,
        kLength = 1U << 1U,
        kFlags = 1U << 2U,
        kMemoryType = 1U << 4U,
    };
    static constexpr unsigned kAllocate = 1U << 1U;
    std::uint64_t mask;
    void* address;
    std::size_t length;
    unsigned flags;
    unsigned protection;
    int memory_type;
};

struct MemoryAttr {
    enum Mask : std::uint64_t { kAddress = 1U << 0U };
    std::uint64_t mask;
    void* address;
    std::size_t length;
};

enum MemoryType : int { kMemoryHost = 0, kMemoryCuda = 1 };

struct RequestParams {
    enum Mask : std::uint32_t {
        kCallback = 1U << 1U,
        kUserData = 1U << 2U,
        kFlags = 1U << 4U,
        kMemory = 1U << 8U,
        kMultiSend = 1U << 19U,
    };
    std::uint32_t mask;
    std::uint32_t flags;
    void* request;
    void (*callback)(void* request, Status, void* user_data);
    std::uint64_t datatype;
    void* user_data;
    void* reply_buffer;
    int memory_type;
    void* receive_info;
    Memory memory;
};

enum AmSendFlag : std::uint32_t {
    kAmSendEager = 1U << 1U,
    kAmSendCopyHeader = 1U << 3U,
};

struct AmReceived {
    static constexpr std::uint64_t kIsRendezvous = 1U << 17U;
    std::uint64_t attributes;
};

struct AmHandler {
    enum Mask : std::uint64_t {
        kId = 1U << 0U,
        kFlags = 1U << 1U,
        kCallback = 1U << 2U,
        kArgument = 1U << 3U,
    };
    static constexpr std::uint32_t kWholeMessage = 1U << 0U;
    std::uint64_t mask;
    unsigned id;
    std::uint32_t flags;
    Status (*callback)(void* argument, const void* header, std::size_t header_length, void* data,
                       std::size_t length, const AmReceived*);
    void* argument;
};

// Each row: result, name without the prefix `ucp_`, arguments.
#define PYNIXLKV_UCP_FUNCTIONS(X)                                                                \
    X(void, get_version, (unsigned* major, unsigned* minor, unsigned* release))                  \
    X(Status, config_read, (const char* prefix, const char* file, Config* out))                  \
    X(Status, config_modify, (Config, const char* name, const char* value))                      \
    X(void, config_release, (Config))                                                            \
    X(Status, init_version,                                                                      \
      (unsigned major, unsigned minor, const ContextParams*, Config, Context* out))              \
    X(Status, context_query, (Context, ContextAttr*))                                            \
    X(void, context_print_info, (Context, std::FILE*))                                           \
    X(void, cleanup, (Context))                                                                  \
    X(Status, worker_create, (Context, const WorkerParams*, Worker* out))                        \
    X(void, worker_destroy, (Worker))                                                            \
    X(Status, worker_get_address, (Worker, Address * out, std::size_t* length))                  \
    X(void, worker_release_address, (Worker, Address))                                           \
    X(unsigned, worker_progress, (Worker))                                                       \
    X(Status, worker_get_efd, (Worker, int* out))                                                \
    X(Status, worker_arm, (Worker))                                                              \
    X(Status, worker_set_am_recv_handler, (Worker, const AmHandler*))                            \
    X(Status, ep_create, (Worker, const EndpointParams*, Endpoint* out))                         \
    X(Status, ep_query, (Endpoint, EndpointAttr*))                                               \
    X(StatusPointer, ep_close_nbx, (Endpoint, const RequestParams*))                             \
    X(StatusPointer, ep_flush_nbx, (Endpoint, const RequestParams*))                             \
    X(Status, mem_map, (Context, const MemoryParams*, Memory* out))                              \
    X(Status, mem_unmap, (Context, Memory))                                                      \
    X(Status, mem_query, (Memory, MemoryAttr*))                                                  \
    X(Status, rkey_pack, (Context, Memory, void** out, std::size_t* length))                     \
    X(void, rkey_buffer_release, (void*))                                                        \
    X(Status, ep_rkey_unpack, (Endpoint, const void* packed, RemoteKey* out))                    \
    X(Status, rkey_ptr, (RemoteKey, std::uint64_t address, void** out))                          \
    X(void, rkey_destroy, (RemoteKey))                                                           \
    X(StatusPointer, put_nbx,                                                                    \
      (Endpoint, const void* buffer, std::size_t count, std::uint64_t address, RemoteKey,        \
       const RequestParams*))                                                                    \
    X(StatusPointer, get_nbx,                                                                    \
      (Endpoint, void* buffer, std::size_t count, std::uint64_t address, RemoteKey,              \
       const RequestParams*))                                                                    \
    X(StatusPointer, am_send_nbx,                                                                \
      (Endpoint, unsigned id, const void* header, std::size_t header_length, const void* buffer, \
       std::size_t count, const RequestParams*))                                                 \
    X(Status, request_check_status, (void* request))                                             \
    X(void, request_free, (void* request))

/// The functions by their names without prefix.
struct Functions {
#define X(result, name, arguments) result(*name) arguments = nullptr;
    PYNIXLKV_UCP_FUNCTIONS(X)
#undef X
};

}  // namespace pynixlkv::ucx::capi
