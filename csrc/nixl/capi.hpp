/// @file
/// Our own declarations of the functions that we use of NIXL's C interface (`libnixl_capi.so`),
/// resolved at run time. Types and order of arguments did not change from NIXL 0.10.1 to 1.5.1.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nixl/status.hpp"

namespace pynixlkv::nixl::capi {

using Agent = struct AgentOpaque*;
using Backend = struct BackendOpaque*;
using MemList = struct MemListOpaque*;
using NotifMap = struct NotifMapOpaque*;
using OptArgs = struct OptArgsOpaque*;
using ParamIterator = struct ParamIteratorOpaque*;
using Params = struct ParamsOpaque*;
using Prepared = struct PreparedOpaque*;
using QueryList = struct QueryListOpaque*;
using RegList = struct RegListOpaque*;
using Request = struct RequestOpaque*;
using StringList = struct StringListOpaque*;
using XferList = struct XferListOpaque*;

/// Configuration of an agent. The port is 16 bits wide in the versioned interface (a library that
/// has `get_version`), which moves the fields after it but keeps the size.
template <class Port>
struct ConfigWithPort {
    bool enable_progress_thread;
    bool enable_listen_thread;
    Port listen_port;
    int thread_sync;
    unsigned int num_workers;  ///< ignored by NIXL since 1.0; the UCX backend has a parameter
    std::uint64_t progress_delay_us;
    std::uint64_t listen_delay_us;
    bool capture_telemetry;
};
using AgentConfig = ConfigWithPort<int>;  // up to and including NIXL 1.5.1
using AgentConfigVersioned = ConfigWithPort<std::uint16_t>;
static_assert(sizeof(AgentConfig) == 40);
static_assert(offsetof(AgentConfig, listen_port) == 4);
static_assert(offsetof(AgentConfig, thread_sync) == 8);
static_assert(offsetof(AgentConfig, progress_delay_us) == 16);
static_assert(offsetof(AgentConfig, capture_telemetry) == 32);
static_assert(sizeof(AgentConfigVersioned) == 40);
static_assert(offsetof(AgentConfigVersioned, listen_port) == 2);
static_assert(offsetof(AgentConfigVersioned, thread_sync) == 4);
static_assert(offsetof(AgentConfigVersioned, progress_delay_us) == 16);

struct Telemetry {
    std::uint64_t start_us;  ///< on the steady clock
    std::uint64_t post_us;
    std::uint64_t transfer_us;  ///< up to the poll that saw the end
    std::uint64_t num_bytes;
    std::uint64_t num_descriptors;  ///< after merging
};
static_assert(sizeof(Telemetry) == 40);

// Each row: name without the prefix `nixl_capi_`, arguments. All return a Status.
#define PYNIXLKV_NIXL_REQUIRED(X)                                                                  \
    X(create_configured_agent, (const char* name, const void* config, Agent* out))                 \
    X(destroy_agent, (Agent))                                                                      \
    X(get_available_plugins, (Agent, StringList * out))                                            \
    X(string_list_size, (StringList, std::size_t* out))                                            \
    X(string_list_get, (StringList, std::size_t index, const char** out))                          \
    X(destroy_string_list, (StringList))                                                           \
    X(get_plugin_params, (Agent, const char* plugin, MemList* mems, Params* params))               \
    X(get_backend_params, (Agent, Backend, MemList * mems, Params * params))                       \
    X(mem_list_size, (MemList, std::size_t* out))                                                  \
    X(mem_list_get, (MemList, std::size_t index, int* out))                                        \
    X(destroy_mem_list, (MemList))                                                                 \
    X(create_params, (Params * out))                                                               \
    X(params_add, (Params, const char* key, const char* value))                                    \
    X(destroy_params, (Params))                                                                    \
    X(params_is_empty, (Params, bool* out))                                                        \
    X(params_create_iterator, (Params, ParamIterator * out))                                       \
    X(params_iterator_next, (ParamIterator, const char** key, const char** value, bool* more))     \
    X(params_destroy_iterator, (ParamIterator))                                                    \
    X(create_backend, (Agent, const char* plugin, Params, Backend* out))                           \
    X(destroy_backend, (Backend))                                                                  \
    X(create_opt_args, (OptArgs * out))                                                            \
    X(destroy_opt_args, (OptArgs))                                                                 \
    X(opt_args_add_backend, (OptArgs, Backend))                                                    \
    X(opt_args_set_notif_msg, (OptArgs, const void* data, std::size_t size))                       \
    X(opt_args_set_has_notif, (OptArgs, bool))                                                     \
    X(opt_args_set_skip_desc_merge, (OptArgs, bool))                                               \
    X(opt_args_set_ip_addr, (OptArgs, const char* address))                                        \
    X(opt_args_set_port, (OptArgs, std::uint16_t port))                                            \
    X(create_reg_dlist, (int memory, RegList* out))                                                \
    X(reg_dlist_add_desc, (RegList, std::uintptr_t address, std::size_t length,                    \
                           std::uint64_t device, const void* meta, std::size_t meta_size))         \
    X(destroy_reg_dlist, (RegList))                                                                \
    X(register_mem, (Agent, RegList, OptArgs))                                                     \
    X(deregister_mem, (Agent, RegList, OptArgs))                                                   \
    X(create_query_resp_list, (QueryList * out))                                                   \
    X(query_mem, (Agent, RegList, QueryList, OptArgs))                                             \
    X(query_resp_list_size, (QueryList, std::size_t* out))                                         \
    X(query_resp_list_has_value, (QueryList, std::size_t index, bool* out))                        \
    X(query_resp_list_get_params, (QueryList, std::size_t index, Params* out))                     \
    X(destroy_query_resp_list, (QueryList))                                                        \
    X(get_local_md, (Agent, void** out, std::size_t* size))                                        \
    X(get_local_partial_md, (Agent, RegList, void** out, std::size_t* size, OptArgs))              \
    X(load_remote_md, (Agent, const void* data, std::size_t size, char** name))                    \
    X(check_remote_md, (Agent, const char* peer, XferList))                                        \
    X(invalidate_remote_md, (Agent, const char* peer))                                             \
    X(send_local_md, (Agent, OptArgs))                                                             \
    X(send_local_partial_md, (Agent, RegList, OptArgs))                                            \
    X(fetch_remote_md, (Agent, const char* peer, OptArgs))                                         \
    X(invalidate_local_md, (Agent, OptArgs))                                                       \
    X(agent_make_connection, (Agent, const char* peer, OptArgs))                                   \
    X(create_xfer_dlist, (int memory, XferList* out))                                              \
    X(xfer_dlist_add_desc,                                                                         \
      (XferList, std::uintptr_t address, std::size_t length, std::uint64_t device))                \
    X(xfer_dlist_resize, (XferList, std::size_t count))                                            \
    X(xfer_dlist_clear, (XferList))                                                                \
    X(destroy_xfer_dlist, (XferList))                                                              \
    X(prep_xfer_dlist, (Agent, const char* peer, XferList, Prepared* out, OptArgs))                \
    X(release_xfer_dlist_handle, (Agent, Prepared))                                                \
    X(make_xfer_req,                                                                               \
      (Agent, int operation, Prepared local, const int* local_indices, std::size_t num_local,      \
       Prepared remote, const int* remote_indices, std::size_t num_remote, Request* out, OptArgs)) \
    X(create_xfer_req, (Agent, int operation, XferList local, XferList remote, const char* peer,   \
                        Request* out, OptArgs))                                                    \
    X(post_xfer_req, (Agent, Request, OptArgs))                                                    \
    X(get_xfer_status, (Agent, Request))                                                           \
    X(release_xfer_req, (Agent, Request))                                                          \
    X(destroy_xfer_req, (Request))                                                                 \
    X(query_xfer_backend, (Agent, Request, Backend * out))                                         \
    X(estimate_xfer_cost,                                                                          \
      (Agent, Request, OptArgs, std::int64_t* duration_us, std::int64_t* margin_us, int* method))  \
    X(get_xfer_telemetry, (Agent, Request, Telemetry * out))                                       \
    X(create_notif_map, (NotifMap * out))                                                          \
    X(destroy_notif_map, (NotifMap))                                                               \
    X(notif_map_clear, (NotifMap))                                                                 \
    X(get_notifs, (Agent, NotifMap, OptArgs))                                                      \
    X(notif_map_size, (NotifMap, std::size_t* out))                                                \
    X(notif_map_get_agent_at, (NotifMap, std::size_t index, const char** out))                     \
    X(notif_map_get_notifs_size, (NotifMap, const char* peer, std::size_t* out))                   \
    X(notif_map_get_notif,                                                                         \
      (NotifMap, const char* peer, std::size_t index, const void** data, std::size_t* size))       \
    X(gen_notif, (Agent, const char* peer, const void* data, std::size_t size, OptArgs))

// Functions of newer libraries, null where the library lacks them: result, name, arguments.
#define PYNIXLKV_NIXL_OPTIONAL(X)                              \
    X(void, get_version, (int* major, int* minor, int* patch)) \
    X(const char*, last_error_message, ())                     \
    X(void, mem_free, (void*))

/// The functions that we use, by their names without prefix.
struct Functions {
#define X(name, arguments) Status(*name) arguments = nullptr;
    PYNIXLKV_NIXL_REQUIRED(X)
#undef X
    bool (*is_stub)() = nullptr;
#define X(result, name, arguments) result(*name) arguments = nullptr;
    PYNIXLKV_NIXL_OPTIONAL(X)
#undef X
};

}  // namespace pynixlkv::nixl::capi
