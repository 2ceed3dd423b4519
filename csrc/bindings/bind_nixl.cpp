/// @file
/// The NIXL owners for pynixlkv/nixl/binding.py, which checks and converts arguments. Everything
/// that may take a lock of ours or of the library runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "bindings/py_shared.hpp"
#include "nixl/agent.hpp"
#include "nixl/prepared_list.hpp"
#include "nixl/registration.hpp"
#include "nixl/request.hpp"

namespace pynixlkv::bindings {

namespace py = pybind11;
using namespace pynixlkv::nixl;

namespace {

using PyLibrary = Shared<const Library>;
using PyAgent = Shared<Agent>;
using PyBackend = Shared<Backend>;
using PyRegistration = Shared<Registration>;
using PyPrepared = Shared<PreparedList>;
using PyRequest = Shared<Request>;
using Backends = std::vector<const PyBackend*>;
using RowArray = py::array_t<std::uint64_t, py::array::c_style>;
using IndexArray = py::array_t<std::int32_t, py::array::c_style>;
using NoGil = py::call_guard<py::gil_scoped_release>;

Rows rows_of(const RowArray& array) {
    if (array.ndim() != 2 || array.shape(1) != 3) {
        throw Error("ConfigError", "descriptors must be an array of shape (n, 3)");
    }
    return {reinterpret_cast<const Row*>(array.data()), static_cast<std::size_t>(array.shape(0))};
}

std::span<const std::int32_t> indices_of(const IndexArray& array) {
    if (array.ndim() != 1) {
        throw Error("ConfigError", "indices must be an array with one dimension");
    }
    return {array.data(), static_cast<std::size_t>(array.size())};
}

CallOptions options_of(const Backends& backends, std::optional<std::string> notification = {},
                       bool skip_merge = false, std::string custom_param = {}) {
    CallOptions options;
    for (const PyBackend* backend : backends) {
        options.backends.push_back(backend->ptr());
    }
    options.notification = std::move(notification);
    options.skip_merge = skip_merge;
    options.custom_param = std::move(custom_param);
    return options;
}

Duration seconds(double s) {
    // A float cannot hold the largest duration; a year is as good as for ever.
    constexpr double kLongest = 3.2e7;
    return std::chrono::duration_cast<Duration>(
        std::chrono::duration<double>(s < kLongest ? s : kLongest));
}

std::vector<int> memory_numbers(const BackendInfo& info) {
    std::vector<int> numbers;
    for (const MemoryType memory : info.memory) {
        numbers.push_back(static_cast<int>(memory));
    }
    return numbers;
}

template <class Body>
auto without_gil(Body&& body) {
    const py::gil_scoped_release unlocked;
    return body();
}

void bind_owners(py::module_& m) {
    py::class_<PyLibrary>(m, "Library")
        .def(py::init([](const std::string& path) {
                 return PyLibrary(without_gil([&] { return Library::open(path); }));
             }),
             py::arg("path"))
        .def_property_readonly("path", [](const PyLibrary& self) { return self->path(); })
        .def_property_readonly("version", [](const PyLibrary& self) { return self->version(); });

    py::class_<PyBackend>(m, "Backend").def_property_readonly("type", [](const PyBackend& self) {
        return self->type();
    });

    py::class_<PyRegistration>(m, "Registration")
        .def(
            "release", [](const PyRegistration& self) { self->release(); }, NoGil())
        .def_property_readonly("is_active",
                               [](const PyRegistration& self) { return self->is_active(); })
        .def_property_readonly("num_users",
                               [](const PyRegistration& self) { return self->num_users(); });

    py::class_<PyPrepared>(m, "PreparedList")
        .def(
            "release", [](const PyPrepared& self) { self->release(); }, NoGil())
        .def("__len__", [](const PyPrepared& self) { return self->size(); })
        .def_property_readonly("peer", [](const PyPrepared& self) { return self->peer(); })
        .def_property_readonly("generation",
                               [](const PyPrepared& self) { return self->generation(); })
        .def_property_readonly("is_released",
                               [](const PyPrepared& self) { return self->is_released(); })
        .def_property_readonly("num_users",
                               [](const PyPrepared& self) { return self->num_users(); });

    py::class_<PyRequest>(m, "Request")
        .def(
            "post",
            [](const PyRequest& self, const std::optional<std::string>& notification) {
                return static_cast<int>(self->post(notification));
            },
            py::arg("notification"), NoGil())
        .def(
            "poll", [](const PyRequest& self) { return static_cast<int>(self->poll()); }, NoGil())
        .def(
            "release",
            [](const PyRequest& self, double patience) { return self->release(seconds(patience)); },
            py::arg("patience"), NoGil())
        .def(
            "backend", [](const PyRequest& self) { return PyBackend(self->backend()); }, NoGil())
        .def("estimate_cost",
             [](const PyRequest& self) {
                 const CostEstimate cost = without_gil([&] { return self->estimate_cost(); });
                 return py::make_tuple(cost.duration_us, cost.margin_us, cost.method);
             })
        .def("telemetry",
             [](const PyRequest& self) {
                 const capi::Telemetry t = without_gil([&] { return self->telemetry(); });
                 return py::make_tuple(t.start_us, t.post_us, t.transfer_us, t.num_bytes,
                                       t.num_descriptors);
             })
        .def_property_readonly(
            "state", [](const PyRequest& self) { return static_cast<int>(self->state()); })
        .def_property_readonly("peer", [](const PyRequest& self) { return self->peer(); })
        .def_property_readonly(
            "operation", [](const PyRequest& self) { return static_cast<int>(self->operation()); })
        .def_property_readonly("num_descriptors",
                               [](const PyRequest& self) { return self->num_descriptors(); })
        .def_property_readonly("num_bytes",
                               [](const PyRequest& self) { return self->num_bytes(); });
}

void bind_agent(py::module_& m) {
    py::class_<PyAgent>(m, "Agent")
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
                 return PyAgent(
                     without_gil([&] { return Agent::create(library.ptr(), name, config); }));
             }),
             py::arg("library"), py::arg("name"), py::kw_only(), py::arg("progress_thread"),
             py::arg("listen_thread"), py::arg("listen_port"), py::arg("thread_sync"),
             py::arg("progress_delay_us"), py::arg("listen_delay_us"), py::arg("telemetry"))
        .def_property_readonly("name", [](const PyAgent& self) { return self->name(); })
        .def_property_readonly("is_closed", [](const PyAgent& self) { return self->is_closed(); })
        .def_property_readonly("is_here", [](const PyAgent& self) { return self->is_here(); })
        .def_property_readonly("num_parked", [](const PyAgent& self) { return self->num_parked(); })
        .def_property_readonly_static(
            "num_abandoned", [](const py::object& /*cls*/) { return Agent::num_abandoned(); })
        .def(
            "generation",
            [](const PyAgent& self, const std::string& peer) { return self->generation(peer); },
            py::arg("peer"), NoGil())
        .def(
            "drain",
            [](const PyAgent& self, double patience) { return self->drain(seconds(patience)); },
            py::arg("patience"), NoGil())
        .def(
            "close",
            [](const PyAgent& self, double patience) { return self->close(seconds(patience)); },
            py::arg("patience"), NoGil())

        .def(
            "available_plugins", [](const PyAgent& self) { return self->available_plugins(); },
            NoGil())
        .def(
            "plugin_info",
            [](const PyAgent& self, const std::string& plugin) {
                const BackendInfo info = self->plugin_info(plugin);
                return std::pair(memory_numbers(info), info.params);
            },
            py::arg("plugin"), NoGil())
        .def(
            "create_backend",
            [](const PyAgent& self, const std::string& type, const ParamMap& params) {
                return PyBackend(self->create_backend(type, params));
            },
            py::arg("type"), py::arg("params"), NoGil())
        .def(
            "backend_info",
            [](const PyAgent& self, const PyBackend& backend) {
                const BackendInfo info = self->backend_info(*backend);
                return std::pair(memory_numbers(info), info.params);
            },
            py::arg("backend"), NoGil())

        .def(
            "register_memory",
            [](const PyAgent& self, int memory, const RowArray& rows,
               const std::vector<std::string>& metadata, const py::object& keepalive,
               const Backends& backends) {
                const Rows native_rows = rows_of(rows);
                const CallOptions options = options_of(backends);
                std::shared_ptr<void> kept = keepalive.is_none() ? nullptr : keep_alive(keepalive);
                return PyRegistration(without_gil([&] {
                    return self->register_memory(static_cast<MemoryType>(memory), native_rows,
                                                 metadata, std::move(kept), options);
                }));
            },
            py::arg("memory"), py::arg("rows").noconvert(), py::arg("metadata"),
            py::arg("keepalive"), py::arg("backends"))
        .def(
            "query_memory",
            [](const PyAgent& self, int memory, const RowArray& rows,
               const std::vector<std::string>& metadata, const Backends& backends) {
                const Rows native_rows = rows_of(rows);
                const CallOptions options = options_of(backends);
                return without_gil([&] {
                    return self->query_memory(static_cast<MemoryType>(memory), native_rows,
                                              metadata, options);
                });
            },
            py::arg("memory"), py::arg("rows").noconvert(), py::arg("metadata"),
            py::arg("backends"))

        .def("local_metadata",
             [](const PyAgent& self) {
                 return py::bytes(without_gil([&] { return self->local_metadata(); }));
             })
        .def(
            "local_partial_metadata",
            [](const PyAgent& self, int memory, const RowArray& rows, const Backends& backends) {
                const Rows native_rows = rows_of(rows);
                const CallOptions options = options_of(backends);
                return py::bytes(without_gil([&] {
                    return self->local_partial_metadata(static_cast<MemoryType>(memory),
                                                        native_rows, options);
                }));
            },
            py::arg("memory"), py::arg("rows").noconvert(), py::arg("backends"))
        .def(
            "load_remote_metadata",
            [](const PyAgent& self, const std::string& metadata) {
                return name_of(without_gil([&] { return self->load_remote_metadata(metadata); }));
            },
            py::arg("metadata"))
        .def(
            "check_remote_metadata",
            [](const PyAgent& self, const std::string& peer, int memory, const RowArray& rows) {
                const Rows native_rows = rows_of(rows);
                return without_gil([&] {
                    return self->check_remote_metadata(peer, static_cast<MemoryType>(memory),
                                                       native_rows);
                });
            },
            py::arg("peer"), py::arg("memory"), py::arg("rows").noconvert())
        .def(
            "invalidate_remote_metadata",
            [](const PyAgent& self, const std::string& peer) {
                self->invalidate_remote_metadata(peer);
            },
            py::arg("peer"), NoGil())
        .def(
            "send_local_metadata",
            [](const PyAgent& self, const std::string& ip, std::uint16_t port) {
                self->send_local_metadata({ip, port});
            },
            py::arg("ip"), py::arg("port"), NoGil())
        .def(
            "send_local_partial_metadata",
            [](const PyAgent& self, int memory, const RowArray& rows, const std::string& ip,
               std::uint16_t port, const Backends& backends) {
                const Rows native_rows = rows_of(rows);
                CallOptions options = options_of(backends);
                options.endpoint = {ip, port};
                without_gil([&] {
                    self->send_local_partial_metadata(static_cast<MemoryType>(memory), native_rows,
                                                      options);
                });
            },
            py::arg("memory"), py::arg("rows").noconvert(), py::arg("ip"), py::arg("port"),
            py::arg("backends"))
        .def(
            "fetch_remote_metadata",
            [](const PyAgent& self, const std::string& peer, const std::string& ip,
               std::uint16_t port) { self->fetch_remote_metadata(peer, {ip, port}); },
            py::arg("peer"), py::arg("ip"), py::arg("port"), NoGil())
        .def(
            "invalidate_local_metadata",
            [](const PyAgent& self, const std::string& ip, std::uint16_t port) {
                self->invalidate_local_metadata({ip, port});
            },
            py::arg("ip"), py::arg("port"), NoGil())
        .def(
            "make_connection",
            [](const PyAgent& self, const std::string& peer, const Backends& backends) {
                self->make_connection(peer, options_of(backends));
            },
            py::arg("peer"), py::arg("backends"), NoGil())

        .def(
            "prepare",
            [](const PyAgent& self, const std::string& peer, int memory, const RowArray& rows,
               const Backends& backends) {
                const Rows native_rows = rows_of(rows);
                const CallOptions options = options_of(backends);
                return PyPrepared(without_gil([&] {
                    return self->prepare(peer, static_cast<MemoryType>(memory), native_rows,
                                         options);
                }));
            },
            py::arg("peer"), py::arg("memory"), py::arg("rows").noconvert(), py::arg("backends"))
        .def(
            "make_request",
            [](const PyAgent& self, int operation, const PyPrepared& local,
               const IndexArray& local_indices, const PyPrepared& remote,
               const IndexArray& remote_indices, const std::optional<std::string>& notification,
               bool skip_merge, const std::string& custom_param, const Backends& backends) {
                const auto li = indices_of(local_indices);
                const auto ri = indices_of(remote_indices);
                const CallOptions options =
                    options_of(backends, notification, skip_merge, custom_param);
                return PyRequest(without_gil([&] {
                    return self->make_request(static_cast<Operation>(operation), local.ptr(), li,
                                              remote.ptr(), ri, options);
                }));
            },
            py::arg("operation"), py::arg("local"), py::arg("local_indices").noconvert(),
            py::arg("remote"), py::arg("remote_indices").noconvert(), py::arg("notification"),
            py::arg("skip_merge"), py::arg("custom_param"), py::arg("backends"))
        .def(
            "create_request",
            [](const PyAgent& self, int operation, int local_memory, const RowArray& local,
               int remote_memory, const RowArray& remote, const std::string& peer,
               const std::optional<std::string>& notification, const std::string& custom_param,
               const Backends& backends) {
                const Rows local_rows = rows_of(local);
                const Rows remote_rows = rows_of(remote);
                const CallOptions options = options_of(backends, notification, false, custom_param);
                return PyRequest(without_gil([&] {
                    return self->create_request(static_cast<Operation>(operation),
                                                static_cast<MemoryType>(local_memory), local_rows,
                                                static_cast<MemoryType>(remote_memory), remote_rows,
                                                peer, options);
                }));
            },
            py::arg("operation"), py::arg("local_memory"), py::arg("local").noconvert(),
            py::arg("remote_memory"), py::arg("remote").noconvert(), py::arg("peer"),
            py::arg("notification"), py::arg("custom_param"), py::arg("backends"))

        .def(
            "notify",
            [](const PyAgent& self, const std::string& peer, const std::string& message,
               const Backends& backends) { self->notify(peer, message, options_of(backends)); },
            py::arg("peer"), py::arg("message"), py::arg("backends"), NoGil())
        .def(
            "take_notifications",
            [](const PyAgent& self, const Backends& backends) {
                const CallOptions options = options_of(backends);
                const std::vector<Notification> notes =
                    without_gil([&] { return self->take_notifications(options); });
                py::list result;
                for (const Notification& note : notes) {
                    result.append(py::make_tuple(name_of(note.peer), py::bytes(note.message)));
                }
                return result;
            },
            py::arg("backends"));
}

}  // namespace

void bind_nixl(py::module_ m) {
    bind_owners(m);
    bind_agent(m);
    // The one table of status codes, for those who want to list it: (code, name, kind).
    py::list table;
    for (const StatusInfo& info : kStatusTable) {
        table.append(py::make_tuple(static_cast<int>(info.status), info.name, info.kind));
    }
    m.attr("STATUS_TABLE") = py::tuple(table);
}

}  // namespace pynixlkv::bindings
