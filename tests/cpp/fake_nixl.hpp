/// @file
/// A NIXL library made of counters: every handle that it gives out is tracked, and any one call can
/// be made to fail.
#pragma once

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "nixl/library.hpp"

namespace fake {

using pynixlkv::nixl::Library;
using pynixlkv::nixl::Status;
namespace capi = pynixlkv::nixl::capi;

/// What the next calls do and what the last ones did.
struct State {
    int countdown = -1;  ///< this many calls succeed, the next one fails; negative: none fails
    bool has_failed = false;
    std::map<std::string, int> calls;
    std::set<const void*> live;          ///< handles and buffers given out and not freed
    std::set<const void*> unreleased;    ///< requests that release_xfer_req has not seen
    std::vector<std::string> misuse;     ///< calls with a handle that was not alive
    Status transfer = Status::kSuccess;  ///< what post and status report
    std::set<std::string> unknown_peers;
    std::vector<std::pair<std::string, std::string>> incoming;
    bool is_stub = false;
    std::vector<unsigned char> config;  ///< as the last agent was made with
    bool had_notification = false;      ///< of the last opt args
};

inline State& state() {
    static State instance;
    return instance;
}

inline Status step(const char* name) {
    State& s = state();
    ++s.calls[name];
    if (s.countdown >= 0 && s.countdown-- == 0) {
        s.has_failed = true;
        return Status::kBackend;
    }
    return Status::kSuccess;
}

inline void give(const void* memory) {
    state().live.insert(memory);
}

inline void* give_new() {
    void* memory = std::malloc(1);
    give(memory);
    return memory;
}

inline void take(const char* name, const void* memory) {
    if (state().live.erase(memory) == 0) {
        state().misuse.emplace_back(name);
    } else {
        std::free(const_cast<void*>(memory));
    }
}

inline void expect_live(const char* name, const void* handle) {
    if (!state().live.contains(handle)) {
        state().misuse.emplace_back(name);
    }
}

template <auto Member>
inline const char* name_of = "";

/// The call succeeds, and only counts; its first handle must be alive.
template <auto Member>
struct Plain;
template <class First, class... Rest, Status (*capi::Functions::*Member)(First, Rest...)>
struct Plain<Member> {
    static Status call(First first, Rest... /*unused*/) {
        if constexpr (std::is_pointer_v<First> &&
                      !std::is_pointer_v<std::remove_pointer_t<First>>) {
            expect_live(name_of<Member>, first);
        }
        return step(name_of<Member>);
    }
};

/// The call writes a new handle through its argument number Index.
template <auto Member, std::size_t Index>
struct Create;
template <class... Args, Status (*capi::Functions::*Member)(Args...), std::size_t Index>
struct Create<Member, Index> {
    static Status call(Args... args) {
        auto* out = std::get<Index>(std::tuple<Args...>(args...));
        using Handle = std::remove_pointer_t<decltype(out)>;
        if (const Status status = step(name_of<Member>); status != Status::kSuccess) {
            *out = reinterpret_cast<Handle>(std::uintptr_t{0xdead});  // some NIXL versions do this
            return status;
        }
        *out = static_cast<Handle>(give_new());
        return Status::kSuccess;
    }
};

/// The call frees its only handle and never fails.
template <auto Member>
struct Destroy;
template <class Handle, Status (*capi::Functions::*Member)(Handle)>
struct Destroy<Member> {
    static Status call(Handle handle) {
        take(name_of<Member>, handle);
        return Status::kSuccess;
    }
};

inline Status give_bytes(const char* name, void** out, std::size_t* size) {
    const Status status = step(name);
    if (status == Status::kSuccess) {
        *out = ::strdup("metadata");
        give(*out);
        *size = 8;
    }
    return status;
}

inline Status give_info(const char* name, capi::MemList* mems, capi::Params* params) {
    const Status status = step(name);
    if (status == Status::kSuccess) {
        *mems = static_cast<capi::MemList>(give_new());
        *params = static_cast<capi::Params>(give_new());
    }
    return status;
}

inline Status give_request(const char* name, const void* local, const void* remote,
                           capi::Request* out) {
    expect_live(name, local);
    expect_live(name, remote);
    const Status status =
        Create<&capi::Functions::create_params, 0>::call(reinterpret_cast<capi::Params*>(out));
    if (status == Status::kSuccess) {
        state().unreleased.insert(*out);
    }
    return status;
}

inline Status run_request(const char* name, capi::Request request) {
    expect_live(name, request);
    if (!state().unreleased.contains(request)) {
        state().misuse.emplace_back(name);
    }
    const Status status = step(name);
    return status != Status::kSuccess ? status : state().transfer;
}

inline capi::Functions table() {
    capi::Functions t;
#define X(name, arguments)                   \
    name_of<&capi::Functions::name> = #name; \
    t.name = &Plain<&capi::Functions::name>::call;
    // create_* take their out argument first or have no handle to check
    PYNIXLKV_NIXL_REQUIRED(X)
#undef X
#define FAKE_CREATE(name, index) t.name = &Create<&capi::Functions::name, index>::call
    FAKE_CREATE(get_available_plugins, 1);
    FAKE_CREATE(create_params, 0);
    FAKE_CREATE(params_create_iterator, 1);
    FAKE_CREATE(create_backend, 3);
    FAKE_CREATE(create_opt_args, 0);
    FAKE_CREATE(create_reg_dlist, 1);
    FAKE_CREATE(create_query_resp_list, 0);
    FAKE_CREATE(query_resp_list_get_params, 2);
    FAKE_CREATE(create_xfer_dlist, 1);
    FAKE_CREATE(prep_xfer_dlist, 3);
    FAKE_CREATE(query_xfer_backend, 2);
    FAKE_CREATE(create_notif_map, 0);
#undef FAKE_CREATE
#define FAKE_DESTROY(name) t.name = &Destroy<&capi::Functions::name>::call
    FAKE_DESTROY(destroy_string_list);
    FAKE_DESTROY(destroy_mem_list);
    FAKE_DESTROY(destroy_params);
    FAKE_DESTROY(params_destroy_iterator);
    FAKE_DESTROY(destroy_backend);
    FAKE_DESTROY(destroy_opt_args);
    FAKE_DESTROY(destroy_reg_dlist);
    FAKE_DESTROY(destroy_query_resp_list);
    FAKE_DESTROY(destroy_xfer_dlist);
    FAKE_DESTROY(destroy_notif_map);
#undef FAKE_DESTROY
#define FAKE_ANSWER(name, arguments, ...) \
    t.name = [] arguments {               \
        __VA_ARGS__;                      \
        return step(#name);               \
    }
    t.is_stub = [] { return state().is_stub; };
    t.mem_free = [](void* memory) { take("mem_free", memory); };

    t.create_configured_agent = [](const char*, const void* config, capi::Agent* out) {
        const auto* bytes = static_cast<const unsigned char*>(config);
        state().config.assign(bytes, bytes + sizeof(capi::AgentConfig));
        return Create<&capi::Functions::create_notif_map, 0>::call(
            reinterpret_cast<capi::NotifMap*>(out));
    };
    t.destroy_agent = [](capi::Agent agent) {
        const Status status = step("destroy_agent");
        take("destroy_agent", agent);
        return status;
    };
    FAKE_ANSWER(string_list_size, (capi::StringList, std::size_t* out), *out = 2);
    FAKE_ANSWER(string_list_get, (capi::StringList, std::size_t index, const char** out),
                *out = index == 0 ? "UCX" : "POSIX");
    t.get_plugin_params = [](capi::Agent, const char*, capi::MemList* mems, capi::Params* params) {
        return give_info("get_plugin_params", mems, params);
    };
    t.get_backend_params = [](capi::Agent, capi::Backend, capi::MemList* mems,
                              capi::Params* params) {
        return give_info("get_backend_params", mems, params);
    };
    FAKE_ANSWER(mem_list_size, (capi::MemList, std::size_t* out), *out = 2);
    FAKE_ANSWER(mem_list_get, (capi::MemList, std::size_t index, int* out),
                *out = static_cast<int>(index));
    FAKE_ANSWER(params_is_empty, (capi::Params, bool* out), *out = false);
    FAKE_ANSWER(params_iterator_next,
                (capi::ParamIterator, const char** key, const char** value, bool* more),
                *key = "num_workers";
                *value = "1"; *more = false;);
    FAKE_ANSWER(query_resp_list_size, (capi::QueryList, std::size_t* out), *out = 2);
    FAKE_ANSWER(query_resp_list_has_value, (capi::QueryList, std::size_t index, bool* out),
                *out = index == 1);
    t.get_local_md = [](capi::Agent, void** out, std::size_t* size) {
        return give_bytes("get_local_md", out, size);
    };
    t.get_local_partial_md = [](capi::Agent, capi::RegList, void** out, std::size_t* size,
                                capi::OptArgs) {
        return give_bytes("get_local_partial_md", out, size);
    };
    t.load_remote_md = [](capi::Agent, const void* data, std::size_t size, char** name) {
        const Status status = step("load_remote_md");
        if (status == Status::kSuccess) {
            *name = ::strndup(static_cast<const char*>(data), size);
            give(*name);
        }
        return status;
    };
    t.check_remote_md = [](capi::Agent, const char* peer, capi::XferList) {
        ++state().calls["check_remote_md"];
        return state().unknown_peers.contains(peer) ? Status::kNotFound : Status::kSuccess;
    };
    FAKE_ANSWER(opt_args_set_has_notif, (capi::OptArgs, bool has), state().had_notification = has);
    FAKE_ANSWER(release_xfer_dlist_handle, (capi::Agent, capi::Prepared handle),
                take("release_xfer_dlist_handle", handle));
    t.make_xfer_req = [](capi::Agent, int, capi::Prepared local, const int*, std::size_t,
                         capi::Prepared remote, const int*, std::size_t, capi::Request* out,
                         capi::OptArgs) {
        return give_request("make_xfer_req", local, remote, out);
    };
    t.create_xfer_req = [](capi::Agent, int, capi::XferList local, capi::XferList remote,
                           const char*, capi::Request* out, capi::OptArgs) {
        return give_request("create_xfer_req", local, remote, out);
    };
    t.post_xfer_req = [](capi::Agent, capi::Request request, capi::OptArgs) {
        return run_request("post_xfer_req", request);
    };
    t.get_xfer_status = [](capi::Agent, capi::Request request) {
        return run_request("get_xfer_status", request);
    };
    t.release_xfer_req = [](capi::Agent, capi::Request request) {
        const Status status = step("release_xfer_req");
        if (status == Status::kSuccess && state().unreleased.erase(request) == 0) {
            state().misuse.emplace_back("release_xfer_req");
        }
        return status;
    };
    t.destroy_xfer_req = [](capi::Request request) {
        if (state().unreleased.contains(request)) {
            state().misuse.emplace_back("destroy_xfer_req before release");
        }
        take("destroy_xfer_req", request);
        return Status::kSuccess;
    };
    FAKE_ANSWER(notif_map_size, (capi::NotifMap, std::size_t* out), *out = state().incoming.size());
    FAKE_ANSWER(notif_map_get_agent_at, (capi::NotifMap, std::size_t index, const char** out),
                *out = state().incoming.at(index).first.c_str());
    FAKE_ANSWER(notif_map_get_notifs_size, (capi::NotifMap, const char*, std::size_t* out),
                *out = 1);
    t.notif_map_get_notif = [](capi::NotifMap, const char* peer, std::size_t, const void** data,
                               std::size_t* size) {
        for (const auto& [from, message] : state().incoming) {
            if (from == peer) {
                *data = message.data();
                *size = message.size();
            }
        }
        return step("notif_map_get_notif");
    };
    t.notif_map_clear = [](capi::NotifMap) {
        const Status status = step("notif_map_clear");
        if (status == Status::kSuccess) {
            state().incoming.clear();
        }
        return status;
    };
#undef FAKE_ANSWER
    return t;
}

/// A fresh library with nothing alive.
inline std::shared_ptr<const Library> library() {
    state() = State{};
    return std::make_shared<const Library>("fake", table());
}

}  // namespace fake
