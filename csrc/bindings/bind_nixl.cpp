/// @file
/// NIXL's verbs. pynixlkv/nixl/verbs.py exports what is bound here and adds the rest: conversion of
/// arrays, and the verbs that take them. What may take a lock of ours or of the library runs
/// without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "bindings/py_shared.hpp"
#include "bindings/py_types.hpp"
#include "nixl/agent.hpp"
#include "nixl/prepared_list.hpp"
#include "nixl/registration.hpp"
#include "nixl/xfer_request.hpp"

namespace pybind11::detail {

/// A C-contiguous uint64 array, as it is: (n, 3) as descriptors, (n, 5) as runs of them.
template <class Item>
struct span_caster {
    using Number = std::uint64_t;
    static constexpr auto name = make_caster<array_t<Number, array::c_style>>::name;

    bool load(handle source, bool /*convert*/) {
        if (!array_.load(source, false)) {
            return false;
        }
        const auto& numbers = static_cast<array_t<Number, array::c_style>&>(array_);
        if (numbers.ndim() != 2 ||
            static_cast<std::size_t>(numbers.shape(1)) * sizeof(Number) != sizeof(Item)) {
            return false;
        }
        value_ = {reinterpret_cast<const Item*>(numbers.data()),
                  static_cast<std::size_t>(numbers.shape(0))};
        return true;
    }
    template <class T>
    using cast_op_type = std::span<const Item>;
    operator std::span<const Item>() { return value_; }

  private:
    make_caster<array_t<Number, array::c_style>> array_;
    std::span<const Item> value_;
};
template <>
struct type_caster<pynixlkv::nixl::Rows> : span_caster<pynixlkv::Descriptor> {};
template <>
struct type_caster<pynixlkv::nixl::Runs> : span_caster<pynixlkv::nixl::Run> {};

/// Indices: a C-contiguous int32 array as it is; lists and tuples of ints, and arrays of int64, if
/// all fit. Anything else is refused: Python converts it, or names the error.
template <>
struct type_caster<std::span<const std::int32_t>> {
    static constexpr auto name = const_name("numpy.typing.ArrayLike");

    bool load(handle source, bool /*convert*/) {
        if (PyList_Check(source.ptr()) || PyTuple_Check(source.ptr())) {
            PyObject* const* items = PySequence_Fast_ITEMS(source.ptr());
            return convert(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(source.ptr())),
                           [&](std::size_t i) {
                               int overflow = 0;
                               return PyLong_CheckExact(items[i])
                                          ? PyLong_AsLongLongAndOverflow(items[i], &overflow)
                                          : -1;
                           });
        }
        if (array_.load(source, false)) {
            const auto& numbers = static_cast<array_t<std::int32_t, array::c_style>&>(array_);
            value_ = {numbers.data(), static_cast<std::size_t>(numbers.size())};
            return numbers.ndim() == 1;
        }
        make_caster<array_t<std::int64_t, array::c_style>> wide;
        if (!wide.load(source, false)) {
            return false;
        }
        const auto& numbers = static_cast<array_t<std::int64_t, array::c_style>&>(wide);
        const std::int64_t* data = numbers.data();
        return numbers.ndim() == 1 && convert(static_cast<std::size_t>(numbers.size()),
                                              [&](std::size_t i) { return data[i]; });
    }
    template <class T>
    using cast_op_type = std::span<const std::int32_t>;
    operator std::span<const std::int32_t>() { return value_; }

  private:
    bool convert(std::size_t size, auto get) {
        converted_.resize(size);
        for (std::size_t i = 0; i < size; ++i) {
            const long long index = get(i);
            if (index < 0 || index > std::numeric_limits<std::int32_t>::max()) {
                return false;
            }
            converted_[i] = static_cast<std::int32_t>(index);
        }
        value_ = converted_;
        return true;
    }

    make_caster<array_t<std::int32_t, array::c_style>> array_;
    std::vector<std::int32_t> converted_;
    std::span<const std::int32_t> value_;
};

/// The backends that a call may use.
template <>
struct type_caster<pynixlkv::nixl::CallOptions> {
    using Backends = std::vector<std::shared_ptr<pynixlkv::nixl::Backend>>;
    PYBIND11_TYPE_CASTER(pynixlkv::nixl::CallOptions, make_caster<Backends>::name);

    bool load(handle source, bool convert) {
        make_caster<Backends> backends;
        if (!backends.load(source, convert)) {
            return false;
        }
        value.backends = cast_op<Backends&&>(std::move(backends));
        return true;
    }
};

struct xfer_state_names {
    static constexpr const char* kModule = "pynixlkv.nixl._enums";
    static constexpr const char* kClass = "XferState";
    static constexpr const char* kMember = "a state of a request";
};

template <>
struct type_caster<pynixlkv::nixl::XferState>
    : python_enum_caster<pynixlkv::nixl::XferState, xfer_state_names> {
    static constexpr auto name = const_name("pynixlkv.nixl._enums.XferState");
};

}  // namespace pybind11::detail

namespace pynixlkv::nixl {

// What Released asks of an owner.

template <class T>
static bool is_closed(const T& self) {
    return self.is_released() || self.agent()->is_closed();
}

static std::string repr(const Registration& self) {
    std::uint64_t num_bytes = 0;
    for (const Descriptor& row : self.rows()) {
        num_bytes += row.length;
    }
    return text("<Registration of ", num_bytes, " bytes ", memory_name(self.memory()), " in ",
                self.rows().size(), " descriptors with agent '", self.agent()->name(), "', ",
                is_closed(self) ? "deregistered>" : "registered>");
}

static std::string repr(const PreparedList& self) {
    return text("<PreparedList of ", self.size(), " descriptors for ",
                self.peer().empty() ? "the local side" : text("peer '", self.peer(), "'"),
                " with agent '", self.agent()->name(), "', ",
                is_closed(self) ? "released>" : "ready>");
}

static std::string repr(const XferRequest& self) {
    return text("<XferRequest ", op_name(self.op()), " of ", self.num_bytes(), " bytes in ",
                self.num_descriptors(), " descriptors, agent '", self.agent()->name(), "', peer '",
                self.peer(), "', ", state_name(self.state()), ">");
}

}  // namespace pynixlkv::nixl

namespace pynixlkv::bindings {

namespace py = pybind11;
using namespace pynixlkv::nixl;

namespace {

using PyLibrary = Shared<const Library>;
using PyAgent = Shared<Agent>;
using PyRegistration = Released<Registration>;
using PyPrepared = Released<PreparedList>;
using PyRequest = Released<XferRequest>;
using Indices = std::span<const std::int32_t>;
using Message = std::optional<Bytes>;
using Blobs = std::vector<Bytes>;
using NoGil = py::call_guard<GilRelease>;

std::vector<std::string> strings_of(Blobs blobs) {
    std::vector<std::string> strings;
    for (Bytes& blob : blobs) {
        strings.push_back(std::move(blob.value));
    }
    return strings;
}

std::optional<std::string> string_of(const Message& message) {
    return message ? std::optional(message->value) : std::nullopt;
}

/// A Python float of seconds cannot hold the longest duration; a year is as good as for ever.
Duration seconds(double timeout) {
    if (!(timeout >= 0)) {
        throw Error("ConfigError",
                    text("timeout is ", timeout, "; it must be a number of seconds, 0 or more"));
    }
    constexpr double kLongest = 3.2e7;
    return std::chrono::duration_cast<Duration>(
        std::chrono::duration<double>(std::fmin(timeout, kLongest)));
}

/// What an agent made, for a verb of that agent.
template <class T>
T& ours(const PyAgent& agent, const Released<T>& made) {
    if (made->agent() != agent.ptr()) {
        throw Error("ConfigError",
                    text(repr(*made), " was made by another agent than '", agent->name(), "'"));
    }
    return *made;
}

template <class T>
void close(const Released<T>& self) {
    if (!is_closed(*self)) {
        self->release();
    }
}

/// A method of the agent.
template <class... Args>
auto verb(auto method) {
    return [method](const PyAgent& self, Args... args) {
        return std::invoke(method, *self, std::forward<Args>(args)...);
    };
}

/// A method of what an agent made, as a verb of the agent.
template <class T>
auto verb_on(auto method) {
    return [method](const PyAgent& self, const Released<T>& made) {
        return std::invoke(method, ours(self, made));
    };
}

/// What all that an agent makes has in common.
template <class T>
py::class_<Released<T>> bind_owner(py::module_& m, const char* name, const char* doc) {
    using Owner = Released<T>;
    return py::class_<Owner>(m, name, doc)
        .def_property_readonly(
            "is_closed", [](const Owner& self) { return is_closed(*self); },
            "Whether it was released, or its agent closed.")
        .def("__repr__", [](const Owner& self) { return repr(*self); })
        .def(
            "__enter__", [](Owner& self) -> Owner& { return self; },
            py::return_value_policy::reference)
        .def(
            "__exit__",
            [](const py::object& self, const py::object& /*kind*/, const py::object& /*error*/,
               const py::object& /*traceback*/) { self.attr("close")(); },
            py::arg("kind"), py::arg("error"), py::arg("traceback"));
}

void bind_values(py::module_& m) {
    py::class_<BackendInfo>(m, "PluginParams", "What a plugin or a backend says about itself.")
        .def_property_readonly(
            "memory_types",
            [](const BackendInfo& self) -> py::typing::Tuple<Memory, py::ellipsis> {
                return py::tuple(py::cast(self.memory));
            },
            "Kinds of memory that it can transfer.")
        .def_readonly("params", &BackendInfo::params);
    py::class_<CostEstimate>(
        m, "TransferCost",
        "NIXL's estimate of a request; rough for small descriptors, which it rounds down to 1 µs.")
        .def_readonly("duration_us", &CostEstimate::duration_us)
        .def_readonly("margin_us", &CostEstimate::margin_us)
        .def_readonly("method", &CostEstimate::method, "NIXL's number for how it estimated.");
    py::class_<capi::Telemetry>(m, "TransferTelemetry",
                                "What NIXL measured of a transfer that is done.")
        .def_readonly("start_us", &capi::Telemetry::start_us, "Start, on the steady clock.")
        .def_readonly("post_us", &capi::Telemetry::post_us)
        .def_readonly("transfer_us", &capi::Telemetry::transfer_us,
                      "Until the poll that saw the end.")
        .def_readonly("num_bytes", &capi::Telemetry::num_bytes)
        .def_readonly("num_descriptors", &capi::Telemetry::num_descriptors, "After merging.");
}

void bind_owners(py::module_& m) {
    bind_library<Library>(m);
    py::class_<Backend, std::shared_ptr<Backend>>(m, "Backend",
                                                  "A transport or storage engine of an agent; made "
                                                  "by `Agent.create_backend`.")
        .def_property_readonly(
            "type", &Backend::type,
            "Name of its plugin; empty where NIXL does not tell which backend it "
            "chose.")
        .def("__repr__", [](const Backend& self) {
            return text("<Backend ", self.type().empty() ? "(unnamed)" : self.type(), ">");
        });

    bind_owner<Registration>(m, "Registration",
                             "Registered memory; made by `Agent.register_mem` and "
                             "`Agent.register_buffers`. Dropping it deregisters the memory too, "
                             "with a `ResourceWarning`.")
        .def_property_readonly("memory_type",
                               [](const PyRegistration& self) { return self->memory(); })
        .def_property_readonly(
            "descriptors",
            [](const py::object& self) {
                const Rows rows = self.cast<const PyRegistration&>()->rows();
                py::array_t<std::uint64_t> array({rows.size(), std::size_t{3}},
                                                 &rows.data()->address, self);
                array.attr("flags").attr("writeable") = false;
                return array;
            },
            "What was registered, as (n, 3) uint64: address, length in bytes, device.")
        .def_property_readonly(
            "num_users", [](const PyRegistration& self) { return self->num_users(); },
            "Prepared lists and requests that use the memory and forbid to deregister it.")
        .def(
            "close", close<Registration>, NoGil(),
            "Deregister the memory; a second call does nothing. Over TCP and same-host copies a "
            "peer that knows the memory can still read and write it: tell the peers to stop before "
            "you reuse it.");

    bind_owner<PreparedList>(m, "PreparedList",
                             "Descriptors that NIXL has prepared; made by `Agent.prep_xfer_dlist`.")
        .def("__len__", [](const PyPrepared& self) { return self->size(); })
        .def_property_readonly(
            "peer",
            [](const PyPrepared& self) {
                return self->peer().empty() ? std::optional<py::str>()
                                            : std::optional(name_of(self->peer()));
            },
            "Agent whose memory it is; None for the agent's own side.")
        .def("close", close<PreparedList>, NoGil(),
             "Release the list; a second call does nothing.");

    bind_owner<XferRequest>(m, "XferRequest",
                            "One transfer; made by `Agent.make_xfer_req` and "
                            "`Agent.create_xfer_req`.")
        .def_property_readonly(
            "state", [](const PyRequest& self) { return self->state(); },
            "State as of the last call; does not poll.")
        .def_property_readonly("peer", [](const PyRequest& self) { return name_of(self->peer()); })
        .def_property_readonly("operation", [](const PyRequest& self) { return self->op(); })
        .def_property_readonly(
            "num_descriptors", [](const PyRequest& self) { return self->num_descriptors(); },
            "Descriptors as given, before NIXL merged any.")
        .def_property_readonly(
            "num_bytes", [](const PyRequest& self) { return self->num_bytes(); },
            "Bytes that one post moves.")
        .def(
            "close",
            [](const PyRequest& self, double timeout) {
                if (!is_closed(*self)) {
                    self->release(seconds(timeout));
                }
            },
            py::arg("timeout") = 0.0, NoGil(),
            "Release it as `Agent.release_xfer_req` does; a second call does nothing.");
}

void bind_life(py::class_<PyAgent>& agent) {
    agent
        .def(py::init([](const PyLibrary& library, const std::string& name, bool progress_thread,
                         bool listen_thread, std::uint16_t listen_port, int thread_sync,
                         std::uint64_t progress_delay_us, std::uint64_t listen_delay_us,
                         bool telemetry) {
                 const AgentConfig config{.progress_thread = progress_thread,
                                          .listen_thread = listen_thread,
                                          .listen_port = listen_port,
                                          .thread_sync = static_cast<ThreadSync>(thread_sync),
                                          .progress_delay_us = progress_delay_us,
                                          .listen_delay_us = listen_delay_us,
                                          .telemetry = telemetry};
                 return PyAgent(without_gil(
                     [&] { return std::make_shared<Agent>(library.ptr(), name, config); }));
             }),
             py::arg("library"), py::arg("name"), py::kw_only(), py::arg("progress_thread") = false,
             py::arg("listen_thread") = false, py::arg("listen_port") = 0,
             py::arg("thread_sync") = 0, py::arg("progress_delay_us") = 1000,
             py::arg("listen_delay_us") = 100'000, py::arg("telemetry") = false)
        .def_property_readonly("name", [](const PyAgent& self) { return name_of(self->name()); })
        .def_property_readonly("is_closed", [](const PyAgent& self) { return self->is_closed(); })
        .def_property_readonly(
            "is_here", [](const PyAgent& self) { return self->is_here(); },
            "False in a forked child of the process that made it.")
        .def_property_readonly(
            "num_quarantined", [](const PyAgent& self) { return self->num_quarantined(); },
            "Requests that were given up while running and are not quiet yet.")
        .def(
            "_end", [](const PyAgent& self, double timeout) { return self->end(seconds(timeout)); },
            py::arg("timeout"), NoGil());
}

void bind_memory(py::class_<PyAgent>& agent) {
    agent
        .def("get_available_plugins", verb(&Agent::available_plugins), NoGil(),
             "Return the names of the plugins that NIXL knows; not all need to load here.")
        .def("get_plugin_params", verb<const std::string&>(&Agent::plugin_info), py::arg("plugin"),
             NoGil(), "Return memory types and default parameters of a plugin.")
        .def(
            "create_backend",
            [](const PyAgent& self, const std::string& plugin,
               const std::optional<ParamMap>& params) {
                return self->create_backend(plugin, params.value_or(ParamMap()));
            },
            py::arg("plugin"), py::arg("params") = std::nullopt, NoGil(),
            "Create a backend, one of each type per agent, with parameters over the defaults.")
        .def("get_backend_params", verb<const Backend&>(&Agent::backend_info), py::arg("backend"),
             NoGil(), "Return memory types and parameters of a backend.")
        .def_property_readonly("backends", verb(&Agent::backends),
                               "The backends that were created.")
        .def(
            "_register_mem",
            [](const PyAgent& self, Rows rows, Memory memory, const Blobs& metadata,
               const py::object& keepalive, const CallOptions& options) {
                const auto blobs = strings_of(metadata);
                std::shared_ptr<void> kept = keepalive.is_none() ? nullptr : keep_alive(keepalive);
                return PyRegistration(without_gil([&] {
                    return self->register_memory(memory, rows, blobs, std::move(kept), options);
                }));
            },
            py::arg("rows"), py::arg("memory"), py::arg("metadata"), py::arg("keepalive"),
            py::arg("backends"))
        .def("deregister_mem", verb_on<Registration>(&Registration::release),
             py::arg("registration"), NoGil(),
             "Deregister memory, once and not while prepared lists or requests use it.")
        .def(
            "register_counted",
            [](const PyAgent& self, Rows rows, Memory memory, const Blobs& metadata,
               const py::object& keepalive, const CallOptions& options) {
                const auto blobs = strings_of(metadata);
                std::shared_ptr<void> kept = keepalive.is_none() ? nullptr : keep_alive(keepalive);
                without_gil(
                    [&] { self->register_counted(memory, rows, blobs, std::move(kept), options); });
            },
            py::arg("rows"), py::arg("memory"), py::arg("metadata"), py::arg("keepalive"),
            py::arg("backends"),
            "Register memory that may be registered already: each row is counted, and registered "
            "with those backends that do not know it. The agent owns the registration.")
        .def(
            "deregister_counted",
            [](const PyAgent& self, Rows rows, Memory memory, const CallOptions& options) {
                self->deregister_counted(memory, rows, options);
            },
            py::arg("rows"), py::arg("memory"), py::arg("backends"), NoGil(),
            "Undo `register_counted`, for all rows or for some. Refused only while a transfer "
            "moves "
            "bytes of the memory; prepared lists and other requests on it become stale.")
        .def(
            "_query_mem",
            [](const PyAgent& self, Rows rows, Memory memory, const Blobs& metadata,
               const CallOptions& options) {
                return self->query_memory(memory, rows, strings_of(metadata), options);
            },
            py::arg("rows"), py::arg("memory"), py::arg("metadata"), py::arg("backends"), NoGil());
}

void bind_metadata(py::class_<PyAgent>& agent) {
    agent
        .def(
            "get_local_md",
            [](const PyAgent& self) {
                return py::bytes(without_gil([&] { return self->local_metadata(); }));
            },
            "Return what a peer must load to reach this agent and its registered memory.")
        .def(
            "_get_local_partial_md",
            [](const PyAgent& self, Rows rows, Memory memory, const CallOptions& options) {
                return py::bytes(without_gil(
                    [&] { return self->local_partial_metadata(memory, rows, options); }));
            },
            py::arg("rows"), py::arg("memory"), py::arg("backends"))
        .def(
            "_load_remote_md",
            [](const PyAgent& self, const Bytes& metadata) {
                return name_of(
                    without_gil([&] { return self->load_remote_metadata(metadata.value); }));
            },
            py::arg("metadata"))
        .def(
            "_check_remote_md",
            [](const PyAgent& self, const std::string& peer, Rows rows, Memory memory) {
                return self->check_remote_metadata(peer, memory, rows);
            },
            py::arg("peer"), py::arg("rows"), py::arg("memory"), NoGil())
        .def("invalidate_remote_md", verb<const std::string&>(&Agent::invalidate_remote_metadata),
             py::arg("peer"), NoGil(),
             "Forget a peer and its connection. Lists and requests made for it become stale and "
             "still have to be released. Load its metadata again for a new connection.")
        .def(
            "_send_local_md",
            [](const PyAgent& self, const std::string& ip, std::uint16_t port) {
                self->send_local_metadata({ip, port});
            },
            py::arg("ip"), py::arg("port"), NoGil())
        .def(
            "_send_local_partial_md",
            [](const PyAgent& self, Rows rows, Memory memory, const std::string& ip,
               std::uint16_t port, CallOptions options) {
                options.address = {ip, port};
                self->send_local_partial_metadata(memory, rows, options);
            },
            py::arg("rows"), py::arg("memory"), py::arg("ip"), py::arg("port"), py::arg("backends"),
            NoGil())
        .def(
            "_fetch_remote_md",
            [](const PyAgent& self, const std::string& peer, const std::string& ip,
               std::uint16_t port) { self->fetch_remote_metadata(peer, {ip, port}); },
            py::arg("peer"), py::arg("ip"), py::arg("port"), NoGil())
        .def(
            "_invalidate_local_md",
            [](const PyAgent& self, const std::string& ip, std::uint16_t port) {
                self->invalidate_local_metadata({ip, port});
            },
            py::arg("ip"), py::arg("port"), NoGil())
        .def("make_connection",
             verb<const std::string&, const CallOptions&>(&Agent::make_connection), py::arg("peer"),
             py::kw_only(), py::arg("backends") = py::tuple(), NoGil(),
             "Connect ahead of the first transfer. Success does not mean that the peer is alive.");
}

void bind_transfers(py::class_<PyAgent>& agent) {
    agent
        .def(
            "_prep_xfer_dlist",
            [](const PyAgent& self, const std::string& peer, Rows rows, Memory memory,
               const CallOptions& options) {
                return PyPrepared(self->prepare(peer, memory, rows, options));
            },
            py::arg("peer"), py::arg("rows"), py::arg("memory"), py::arg("backends"), NoGil())
        .def(
            "prep_xfer_runs",
            [](const PyAgent& self, const std::string& peer, Runs runs, Memory memory,
               const CallOptions& options) {
                return PyPrepared(
                    self->prepare_runs(peer, memory, {runs.begin(), runs.end()}, options));
            },
            py::arg("peer"), py::arg("runs"), py::arg("memory"), py::arg("backends"), NoGil(),
            "Prepare descriptors given as rows of address, length, device, step and count. They "
            "stay as they are until a request chooses from them.")
        .def(
            "release_dlist_handle",
            [](const PyAgent& self, const PyPrepared& prepared, bool when_unused) {
                ours(self, prepared).release(when_unused);
            },
            py::arg("prepared"), py::kw_only(), py::arg("when_unused") = false, NoGil(),
            "Release a prepared list, once. While requests made from it are not released it is "
            "refused or, with `when_unused`, put off until they are.")
        .def(
            "_make_xfer_req",
            [](const PyAgent& self, Op operation, const PyPrepared& local, Indices local_indices,
               const PyPrepared& remote, Indices remote_indices, const Message& notification,
               bool skip_merge, CallOptions options) {
                options.notification = string_of(notification);
                options.skip_merge = skip_merge;
                return PyRequest(self->make_request(operation, local.ptr(), local_indices,
                                                    remote.ptr(), remote_indices, options));
            },
            py::arg("operation"), py::arg("local"), py::arg("local_indices"), py::arg("remote"),
            py::arg("remote_indices"), py::arg("notification"), py::arg("skip_merge"),
            py::arg("backends"), NoGil())
        .def(
            "_create_xfer_req",
            [](const PyAgent& self, Op operation, Rows local, Memory local_memory, Rows remote,
               Memory remote_memory, const std::string& peer, const Message& notification,
               CallOptions options) {
                options.notification = string_of(notification);
                return PyRequest(self->create_request(operation, local_memory, local, remote_memory,
                                                      remote, peer, options));
            },
            py::arg("operation"), py::arg("local"), py::arg("local_memory"), py::arg("remote"),
            py::arg("remote_memory"), py::arg("peer"), py::arg("notification"), py::arg("backends"),
            NoGil())
        .def(
            "post_xfer_req",
            [](const PyAgent& self, const PyRequest& request, const Message& notification) {
                return ours(self, request).post(string_of(notification));
            },
            py::arg("request"), py::arg("notification") = std::nullopt, NoGil(),
            "Start a transfer, or start it again after its end, perhaps with another notification. "
            "Returns PENDING or DONE. Blocks, without the GIL, for as long as the backend takes: "
            "between processes of one host that is the whole copy.")
        .def("get_xfer_status", verb_on<XferRequest>(&XferRequest::poll), py::arg("request"),
             NoGil(),
             "Poll a transfer; returns NOT_POSTED, PENDING or DONE, and raises if it has failed.")
        .def(
            "release_xfer_req",
            [](const PyAgent& self, const PyRequest& request, double timeout) {
                return ours(self, request).release(seconds(timeout));
            },
            py::arg("request"), py::arg("timeout") = 0.0, NoGil(),
            "Release a request; wait up to the timeout in seconds for one that is running. False "
            "if it was still running and has been quarantined: its bytes may still move, and its "
            "memory cannot be deregistered yet.")
        .def("query_xfer_backend", verb_on<XferRequest>(&XferRequest::backend), py::arg("request"),
             NoGil(), "Return the backend that NIXL chose.")
        .def("estimate_xfer_cost", verb_on<XferRequest>(&XferRequest::estimate_cost),
             py::arg("request"), NoGil(),
             "Return NIXL's estimate of how long a request takes; works before it is posted.")
        .def("get_xfer_telemetry", verb_on<XferRequest>(&XferRequest::telemetry),
             py::arg("request"), NoGil(),
             "Return what NIXL measured of a transfer that is done; needs `AgentConfig.telemetry`.")
        .def(
            "_gen_notif",
            [](const PyAgent& self, const std::string& peer, const Bytes& message,
               const CallOptions& options) { self->notify(peer, message.value, options); },
            py::arg("peer"), py::arg("message"), py::arg("backends"), NoGil())
        .def(
            "_get_notifs",
            [](const PyAgent& self, const CallOptions& options) {
                const auto notes = without_gil([&] { return self->take_notifications(options); });
                py::typing::List<py::typing::Tuple<py::str, py::bytes>> result;
                for (const Notification& note : notes) {
                    result.append(py::make_tuple(name_of(note.peer), py::bytes(note.message)));
                }
                return result;
            },
            py::arg("backends"));
}

}  // namespace

void bind_nixl(py::module_ m) {
    bind_values(m);
    bind_owners(m);
    py::class_<PyAgent> agent(m, "NativeAgent");
    bind_life(agent);
    bind_memory(agent);
    bind_metadata(agent);
    bind_transfers(agent);
    m.def("status_table", [] {
        std::vector<std::tuple<int, std::string, std::string>> table;
        for (const StatusInfo& info : kStatusTable) {
            table.emplace_back(static_cast<int>(info.status), info.name, info.kind);
        }
        return table;
    });
}

}  // namespace pynixlkv::bindings
