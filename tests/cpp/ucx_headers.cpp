// Compiled, not run, by tests/native/test_ucx_declarations.py against the headers of an installed
// UCX: our declarations of its interface say the same as its own.
#include <ucp/api/ucp.h>

#include <type_traits>

#include "ucx/capi.hpp"

namespace {

namespace capi = pynixlkv::ucx::capi;
using pynixlkv::ucx::Status;

static_assert(sizeof(Status) == sizeof(ucs_status_t));
static_assert(std::is_signed_v<std::underlying_type_t<Status>>);
static_assert(UCS_ERR_CONNECTION_RESET < 0);

#define SAME_FIELD(ours, our_field, theirs, their_field)                       \
    static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field)); \
    static_assert(sizeof(std::declval<ours>().our_field) ==                    \
                  sizeof(std::declval<theirs>().their_field))
#define SAME_VALUE(ours, theirs) \
    static_assert(static_cast<std::uint64_t>(ours) == static_cast<std::uint64_t>(theirs))

SAME_FIELD(capi::ContextParams, mask, ucp_params_t, field_mask);
SAME_FIELD(capi::ContextParams, features, ucp_params_t, features);
SAME_FIELD(capi::ContextParams, mt_workers_shared, ucp_params_t, mt_workers_shared);
SAME_VALUE(capi::ContextParams::kFeatures, UCP_PARAM_FIELD_FEATURES);
SAME_VALUE(capi::ContextParams::kMtWorkersShared, UCP_PARAM_FIELD_MT_WORKERS_SHARED);
SAME_VALUE(capi::kFeatureRma, UCP_FEATURE_RMA);
SAME_VALUE(capi::kFeatureWakeup, UCP_FEATURE_WAKEUP);
SAME_VALUE(capi::kFeatureAm, UCP_FEATURE_AM);

static_assert(sizeof(capi::ContextAttr) >= sizeof(ucp_context_attr_t));
SAME_FIELD(capi::ContextAttr, mask, ucp_context_attr_t, field_mask);
SAME_FIELD(capi::ContextAttr, memory_types, ucp_context_attr_t, memory_types);
SAME_VALUE(capi::ContextAttr::kMemoryTypes, UCP_ATTR_FIELD_MEMORY_TYPES);

SAME_FIELD(capi::WorkerParams, mask, ucp_worker_params_t, field_mask);
SAME_FIELD(capi::WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);
SAME_VALUE(capi::WorkerParams::kThreadMode, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
SAME_VALUE(capi::kThreadSerialized, UCS_THREAD_MODE_SERIALIZED);

SAME_FIELD(capi::EndpointParams, mask, ucp_ep_params_t, field_mask);
SAME_FIELD(capi::EndpointParams, address, ucp_ep_params_t, address);
SAME_FIELD(capi::EndpointParams, error_mode, ucp_ep_params_t, err_mode);
SAME_FIELD(capi::EndpointParams, error_handler, ucp_ep_params_t, err_handler.cb);
SAME_FIELD(capi::EndpointParams, error_argument, ucp_ep_params_t, err_handler.arg);
SAME_VALUE(capi::EndpointParams::kRemoteAddress, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME_VALUE(capi::EndpointParams::kErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME_VALUE(capi::EndpointParams::kErrorHandler, UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME_VALUE(capi::kErrorPeer, UCP_ERR_HANDLING_MODE_PEER);
SAME_VALUE(capi::kCloseForce, UCP_EP_CLOSE_FLAG_FORCE);

static_assert(sizeof(capi::EndpointAttr) >= sizeof(ucp_ep_attr_t));
static_assert(sizeof(capi::Transport) == sizeof(ucp_transport_entry_t));
SAME_FIELD(capi::Transport, name, ucp_transport_entry_t, transport_name);
SAME_FIELD(capi::EndpointAttr, mask, ucp_ep_attr_t, field_mask);
SAME_FIELD(capi::EndpointAttr, transports, ucp_ep_attr_t, transports.entries);
SAME_FIELD(capi::EndpointAttr, num_transports, ucp_ep_attr_t, transports.num_entries);
SAME_FIELD(capi::EndpointAttr, transport_bytes, ucp_ep_attr_t, transports.entry_size);
SAME_VALUE(capi::EndpointAttr::kTransports, UCP_EP_ATTR_FIELD_TRANSPORTS);

SAME_VALUE(capi::kErrorNone, UCP_ERR_HANDLING_MODE_NONE);

SAME_FIELD(capi::MemoryParams, mask, ucp_mem_map_params_t, field_mask);
SAME_FIELD(capi::MemoryParams, address, ucp_mem_map_params_t, address);
SAME_FIELD(capi::MemoryParams, length, ucp_mem_map_params_t, length);
SAME_FIELD(capi::MemoryParams, flags, ucp_mem_map_params_t, flags);
SAME_FIELD(capi::MemoryParams, memory_type, ucp_mem_map_params_t, memory_type);
SAME_VALUE(capi::MemoryParams::kAddress, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
SAME_VALUE(capi::MemoryParams::kLength, UCP_MEM_MAP_PARAM_FIELD_LENGTH);
SAME_VALUE(capi::MemoryParams::kFlags, UCP_MEM_MAP_PARAM_FIELD_FLAGS);
SAME_VALUE(capi::MemoryParams::kMemoryType, UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE);
SAME_VALUE(capi::MemoryParams::kAllocate, UCP_MEM_MAP_ALLOCATE);
SAME_VALUE(capi::kMemoryHost, UCS_MEMORY_TYPE_HOST);
SAME_VALUE(capi::kMemoryCuda, UCS_MEMORY_TYPE_CUDA);

SAME_FIELD(capi::MemoryAttr, mask, ucp_mem_attr_t, field_mask);
SAME_FIELD(capi::MemoryAttr, address, ucp_mem_attr_t, address);
SAME_VALUE(capi::MemoryAttr::kAddress, UCP_MEM_ATTR_FIELD_ADDRESS);

SAME_FIELD(capi::RequestParams, mask, ucp_request_param_t, op_attr_mask);
SAME_FIELD(capi::RequestParams, flags, ucp_request_param_t, flags);
SAME_FIELD(capi::RequestParams, callback, ucp_request_param_t, cb.send);
SAME_FIELD(capi::RequestParams, user_data, ucp_request_param_t, user_data);
SAME_FIELD(capi::RequestParams, memory, ucp_request_param_t, memh);
SAME_VALUE(capi::RequestParams::kCallback, UCP_OP_ATTR_FIELD_CALLBACK);
SAME_VALUE(capi::RequestParams::kUserData, UCP_OP_ATTR_FIELD_USER_DATA);
SAME_VALUE(capi::RequestParams::kFlags, UCP_OP_ATTR_FIELD_FLAGS);
SAME_VALUE(capi::RequestParams::kMemory, UCP_OP_ATTR_FIELD_MEMH);
SAME_VALUE(capi::RequestParams::kMultiSend, UCP_OP_ATTR_FLAG_MULTI_SEND);

SAME_VALUE(capi::kAmSendEager, UCP_AM_SEND_FLAG_EAGER);
SAME_VALUE(capi::kAmSendCopyHeader, UCP_AM_SEND_FLAG_COPY_HEADER);
SAME_FIELD(capi::AmReceived, attributes, ucp_am_recv_param_t, recv_attr);
SAME_VALUE(capi::AmReceived::kIsRendezvous, UCP_AM_RECV_ATTR_FLAG_RNDV);
SAME_FIELD(capi::AmHandler, mask, ucp_am_handler_param_t, field_mask);
SAME_FIELD(capi::AmHandler, id, ucp_am_handler_param_t, id);
SAME_FIELD(capi::AmHandler, flags, ucp_am_handler_param_t, flags);
SAME_FIELD(capi::AmHandler, callback, ucp_am_handler_param_t, cb);
SAME_FIELD(capi::AmHandler, argument, ucp_am_handler_param_t, arg);
SAME_VALUE(capi::AmHandler::kId, UCP_AM_HANDLER_PARAM_FIELD_ID);
SAME_VALUE(capi::AmHandler::kFlags, UCP_AM_HANDLER_PARAM_FIELD_FLAGS);
SAME_VALUE(capi::AmHandler::kCallback, UCP_AM_HANDLER_PARAM_FIELD_CB);
SAME_VALUE(capi::AmHandler::kArgument, UCP_AM_HANDLER_PARAM_FIELD_ARG);
SAME_VALUE(capi::AmHandler::kWholeMessage, UCP_AM_FLAG_WHOLE_MSG);

static_assert(UCP_API_MAJOR == capi::kApiMajor && UCP_API_MINOR >= capi::kApiMinor);

// Number and sizes of the arguments, and the size of the result, of every function.
template <class Ours, class Theirs>
struct SameShape : std::false_type {};
template <class R1, class... A1, class R2, class... A2>
    requires(sizeof...(A1) == sizeof...(A2))
struct SameShape<R1 (*)(A1...), R2 (*)(A2...)> {
    template <class T>
    static constexpr std::size_t size() {
        if constexpr (std::is_void_v<T>) {
            return 0;
        } else {
            return sizeof(T);
        }
    }
    static constexpr bool value = size<R1>() == size<R2>() && ((sizeof(A1) == sizeof(A2)) && ...) &&
                                  ((std::is_pointer_v<A1> == std::is_pointer_v<A2>) && ...);
};
#define X(result, name, arguments) \
    static_assert(SameShape<decltype(capi::Functions::name), decltype(&ucp_##name)>::value, #name);
PYNIXLKV_UCP_FUNCTIONS(X)
#undef X

}  // namespace
