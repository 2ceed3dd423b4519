/// @file
/// The UCX owners for pynixlkv/ucx, which checks and converts arguments. Everything that may take a
/// lock of ours or of the library runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "bindings/bind.hpp"
#include "bindings/py_shared.hpp"
#include "bindings/py_wait.hpp"
#include "ucx/batch.hpp"
#include "ucx/listener.hpp"
#include "ucx/request.hpp"

namespace pynixlkv::bindings {

namespace py = pybind11;
using namespace pynixlkv::ucx;

namespace {

using PyLibrary = Shared<const Library>;
using PyContext = Shared<Context>;
using PyMemory = Shared<MemoryHandle>;
using PyKey = Shared<RemoteKey>;
using PyListener = Shared<Listener>;
using PyRequest = Shared<Request>;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <class Body>
auto without_gil(Body&& body) {
    const py::gil_scoped_release unlocked;
    return body();
}

/// A worker, and the active messages that nobody has taken yet.
class PyWorker {
  public:
    PyWorker(std::shared_ptr<Context> context, bool single_thread)
        : worker_(without_gil([&] { return Worker::create(std::move(context), single_thread); })) {}
    PyWorker(PyWorker&&) = delete;
    ~PyWorker() {
        const py::gil_scoped_release unlocked;
        worker_.reset();
    }

    [[nodiscard]] const std::shared_ptr<Worker>& ptr() const noexcept { return worker_; }
    Worker* operator->() const noexcept { return worker_.get(); }

    using Messages = std::deque<std::pair<std::string, std::string>>;

    void open_inbox(unsigned id) {
        const auto inside = worker_->enter();
        auto& inbox = inboxes_[id];
        if (!inbox) {
            inbox = std::make_shared<Messages>();
            // The handler lives as long as the worker, which endpoints can keep for longer than
            // this.
            worker_->on_message(id, [inbox](std::string_view header, std::string_view data) {
                inbox->emplace_back(header, data);
            });
        }
    }

    py::list take(unsigned id, double timeout) {
        const std::shared_ptr<Messages> inbox = without_gil([&] {
            const auto inside = worker_->enter();
            const auto found = inboxes_.find(id);
            return found == inboxes_.end() ? nullptr : found->second;
        });
        if (!inbox) {
            throw Error("StateError", text("no inbox is open for active messages of id ", id,
                                           "; call open_inbox() first"));
        }
        Messages messages;
        wait_in_slices(timeout, [&](TimePoint until) {
            return worker_->progress_until(until, false, [&] {
                messages.swap(*inbox);
                return !messages.empty();
            });
        });
        py::list result;
        for (const auto& [header, data] : messages) {
            result.append(py::make_tuple(py::bytes(header), py::bytes(data)));
        }
        return result;
    }

  private:
    std::shared_ptr<Worker> worker_;
    std::map<unsigned, std::shared_ptr<Messages>> inboxes_;
};

/// An endpoint that closes with its Python object, whatever else holds on to it.
class PyEndpoint {
  public:
    explicit PyEndpoint(std::shared_ptr<Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}
    PyEndpoint(PyEndpoint&&) = delete;
    ~PyEndpoint() {
        const py::gil_scoped_release unlocked;
        endpoint_->close();
        endpoint_.reset();
    }
    [[nodiscard]] const std::shared_ptr<Endpoint>& ptr() const noexcept { return endpoint_; }
    Endpoint* operator->() const noexcept { return endpoint_.get(); }

  private:
    std::shared_ptr<Endpoint> endpoint_;
};

char* at(const MemoryHandle& memory, std::uint64_t offset) {
    return reinterpret_cast<char*>(memory.address() + offset);  // NOLINT
}

PyRequest move(const PyMemory& local, std::uint64_t offset, const PyKey& key, std::uint64_t remote,
               std::uint64_t length, bool is_get) {
    const auto& endpoint = key->endpoint();
    const auto inside = endpoint->worker()->enter();
    return PyRequest(Request::start(endpoint, is_get ? "ucp_get_nbx" : "ucp_put_nbx",
                                    {local.ptr(), key.ptr()}, [&](Completion& completion) {
                                        if (is_get) {
                                            endpoint->get(completion, at(*local, offset), length,
                                                          local->handle(), remote, *key);
                                        } else {
                                            endpoint->put(completion, at(*local, offset), length,
                                                          local->handle(), remote, *key);
                                        }
                                    }));
}

using PlaceArray = py::array_t<std::uint64_t, py::array::c_style>;

Shared<Batch> make_batch(const PyMemory& local, const PyKey& key, std::uint64_t remote,
                         const PlaceArray& array, std::uint64_t length, bool is_get,
                         std::size_t window, bool is_timed) {
    if (array.ndim() != 2 || array.shape(1) != 2) {
        throw Error("ConfigError", "places must be a uint64 array of shape (n, 2)");
    }
    std::vector<Place> places(static_cast<std::size_t>(array.shape(0)));
    if (!places.empty()) {
        std::memcpy(places.data(), array.data(), places.size() * sizeof(Place));
    }
    return Shared<Batch>(without_gil([&] {
        const auto inside = key->endpoint()->worker()->enter();
        return std::make_shared<Batch>(local.ptr(), key.ptr(), remote, std::move(places), length,
                                       is_get, window, is_timed);
    }));
}

void bind_memory(py::module_& m) {
    py::class_<PyLibrary>(m, "Library")
        .def(py::init([](const std::string& path) {
                 return PyLibrary(without_gil([&] { return Library::open(path); }));
             }),
             py::arg("path"))
        .def_property_readonly("path", [](const PyLibrary& self) { return self->path(); })
        .def_property_readonly("version", [](const PyLibrary& self) { return self->version(); });

    py::class_<PyContext>(m, "Context")
        .def(py::init([](const PyLibrary& library, const ConfigMap& config) {
                 return PyContext(
                     without_gil([&] { return Context::create(library.ptr(), config); }));
             }),
             py::arg("library"), py::arg("config"))
        .def_property_readonly("config", [](const PyContext& self) { return self->config(); });

    // A writable buffer over the memory; whoever views it keeps it mapped.
    py::class_<PyMemory>(m, "Memory", py::buffer_protocol())
        .def_static(
            "allocate",
            [](const PyContext& context, std::uint64_t length) {
                return PyMemory(
                    without_gil([&] { return MemoryHandle::allocate(context.ptr(), length); }));
            },
            py::arg("context"), py::arg("length"))
        .def_static(
            "map",
            [](const PyContext& context, std::uint64_t address, std::uint64_t length, int memory,
               const py::object& keepalive) {
                std::shared_ptr<void> kept = keep_alive(keepalive);
                return PyMemory(without_gil([&] {
                    return MemoryHandle::map(context.ptr(), address, length,
                                             static_cast<capi::MemoryType>(memory),
                                             std::move(kept));
                }));
            },
            py::arg("context"), py::arg("address"), py::arg("length"), py::arg("memory"),
            py::arg("keepalive"))
        .def("pack",
             [](const PyMemory& self) {
                 return py::bytes(without_gil([&] { return self->pack(); }));
             })
        .def(
            "advise",
            [](const PyMemory& self, std::uint64_t offset, std::uint64_t length, bool will_need) {
                self->advise(offset, length,
                             will_need ? capi::kAdviceWillNeed : capi::kAdviceNormal);
            },
            py::arg("offset"), py::arg("length"), py::arg("will_need"), NoGil())
        .def_property_readonly("address", [](const PyMemory& self) { return self->address(); })
        .def_property_readonly("nbytes", [](const PyMemory& self) { return self->length(); })
        .def_buffer([](const PyMemory& self) {
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(at(*self, 0)),
                                   static_cast<py::ssize_t>(self->length()));
        });
}

void bind_connections(py::module_& m) {
    py::class_<PyWorker>(m, "Worker")
        .def(py::init([](const PyContext& context, bool single_thread) {
                 return std::make_unique<PyWorker>(context.ptr(), single_thread);
             }),
             py::arg("context"), py::arg("single_thread"))
        .def("address",
             [](const PyWorker& self) {
                 return py::bytes(without_gil([&] {
                     const auto inside = self->enter();
                     return self->address();
                 }));
             })
        .def(
            "progress",
            [](const PyWorker& self) {
                const auto inside = self->enter();
                return self->progress();
            },
            NoGil())
        .def(
            "spin",
            [](const PyWorker& self, double seconds) {
                (void)wait_in_slices(seconds, [&](TimePoint until) {
                    return self->progress_until(until, true, [] { return false; });
                });
            },
            py::arg("seconds"))
        .def(
            "arm",
            [](const PyWorker& self) {
                const auto inside = self->enter();
                return self->arm();
            },
            NoGil())
        .def(
            "signal", [](const PyWorker& self) { self->signal(); }, NoGil())
        .def_property_readonly("event_fd", [](const PyWorker& self) { return self->event_fd(); })
        .def("open_inbox", &PyWorker::open_inbox, py::arg("id"), NoGil())
        .def("take", &PyWorker::take, py::arg("id"), py::arg("timeout"));

    py::class_<PyRequest>(m, "Request")
        .def_property_readonly("is_done",
                               [](const PyRequest& self) {
                                   return without_gil([&] {
                                       const auto inside = self->endpoint()->worker()->enter();
                                       return self->is_done();
                                   });
                               })
        .def(
            "cancel",
            [](const PyRequest& self) {
                const auto inside = self->endpoint()->worker()->enter();
                self->cancel();
            },
            NoGil())
        .def(
            "check",
            [](const PyRequest& self) {
                const auto inside = self->endpoint()->worker()->enter();
                return self->check();
            },
            NoGil())
        .def(
            "wait",
            [](const PyRequest& self, double timeout, bool spin) {
                return wait_in_slices(timeout, [&](TimePoint until) {
                    return self->endpoint()->worker()->progress_until(
                        until, spin, [&] { return self->check(); });
                });
            },
            py::arg("timeout"), py::arg("spin"));

    py::class_<PyEndpoint, std::shared_ptr<PyEndpoint>>(m, "Endpoint")
        .def(py::init([](const PyWorker& worker, const std::string& address, bool error_handling) {
                 return std::make_shared<PyEndpoint>(without_gil([&] {
                     const auto inside = worker->enter();
                     return Endpoint::create(worker.ptr(), address,
                                             error_handling ? capi::kErrorPeer : capi::kErrorNone);
                 }));
             }),
             py::arg("worker"), py::arg("address"), py::arg("error_handling"))
        .def_static(
            "connect",
            [](const PyWorker& worker, const std::string& ip, std::uint16_t port) {
                return std::make_shared<PyEndpoint>(without_gil([&] {
                    const auto inside = worker->enter();
                    return Endpoint::connect(worker.ptr(), SocketAddress(ip, port));
                }));
            },
            py::arg("worker"), py::arg("ip"), py::arg("port"))
        .def(
            "flush",
            [](const PyEndpoint& self) {
                const auto inside = self->worker()->enter();
                return PyRequest(
                    Request::start(self.ptr(), "ucp_ep_flush_nbx", {},
                                   [&](Completion& completion) { self->flush(completion); }));
            },
            NoGil())
        .def(
            "send",
            [](const PyEndpoint& self, unsigned id, const std::string& header, std::string data) {
                const auto inside = self->worker()->enter();
                const auto kept = std::make_shared<const std::string>(std::move(data));
                return PyRequest(Request::start(
                    self.ptr(), "ucp_am_send_nbx", {kept},
                    [&](Completion& completion) { self->send(completion, id, header, *kept); }));
            },
            py::arg("id"), py::arg("header"), py::arg("data"), NoGil())
        .def(
            "close",
            [](const PyEndpoint& self) {
                const auto inside = self->worker()->enter();
                self->close();
            },
            NoGil())
        .def_property_readonly("failure",
                               [](const PyEndpoint& self) {
                                   const auto failure = without_gil([&] {
                                       const auto inside = self->worker()->enter();
                                       return self->failure();
                                   });
                                   return failure ? status_name(*failure) : std::string();
                               })
        .def_property_readonly("num_parked", [](const PyEndpoint& self) {
            return without_gil([&] {
                const auto inside = self->worker()->enter();
                return self->num_parked();
            });
        });

    py::class_<PyListener>(m, "Listener")
        .def(py::init([](const PyWorker& worker, const std::string& ip, std::uint16_t port) {
                 return PyListener(without_gil([&] {
                     const auto inside = worker->enter();
                     return Listener::create(worker.ptr(), SocketAddress(ip, port));
                 }));
             }),
             py::arg("worker"), py::arg("ip"), py::arg("port"))
        .def_property_readonly("port", [](const PyListener& self) { return self->port(); })
        .def(
            "accept",
            [](const PyListener& self, double timeout) {
                std::shared_ptr<Endpoint> accepted;
                wait_in_slices(timeout, [&](TimePoint until) {
                    return self->worker()->progress_until(until, false, [&] {
                        accepted = self->accept();
                        return accepted != nullptr;
                    });
                });
                return accepted ? std::optional(std::make_shared<PyEndpoint>(std::move(accepted)))
                                : std::nullopt;
            },
            py::arg("timeout"))
        .def(
            "close",
            [](const PyListener& self) {
                const auto inside = self->worker()->enter();
                self->close();
            },
            NoGil());

    py::class_<PyKey>(m, "RemoteKey")
        .def(py::init([](const PyEndpoint& endpoint, const std::string& packed) {
                 return PyKey(without_gil([&] {
                     const auto inside = endpoint->worker()->enter();
                     return std::make_shared<RemoteKey>(endpoint.ptr(), packed);
                 }));
             }),
             py::arg("endpoint"), py::arg("packed"))
        .def(
            "is_direct",
            [](const PyKey& self, std::uint64_t address) {
                return without_gil([&] {
                    const auto inside = self->endpoint()->worker()->enter();
                    return self->pointer(address) != nullptr;
                });
            },
            py::arg("address"));

    py::class_<Shared<Batch>>(m, "Batch")
        .def(py::init(&make_batch), py::arg("local"), py::arg("key"), py::arg("remote"),
             py::arg("places"), py::arg("length"), py::arg("is_get"), py::arg("window"),
             py::arg("is_timed"))
        .def("times",
             [](const Shared<Batch>& self) {
                 const auto& times = self->times();
                 return py::array_t<std::int64_t>(static_cast<py::ssize_t>(times.size()),
                                                  times.data());
             })
        .def(
            "wait",
            [](const Shared<Batch>& self, double timeout, bool spin) {
                return wait_in_slices(timeout, [&](TimePoint until) {
                    return self->worker().progress_until(until, spin,
                                                         [&] { return self->advance(); });
                });
            },
            py::arg("timeout"), py::arg("spin"));

    m.def("move", &move, py::arg("local"), py::arg("offset"), py::arg("key"), py::arg("remote"),
          py::arg("length"), py::arg("is_get"), NoGil());
}

}  // namespace

void bind_ucx(py::module_ m) {
    bind_memory(m);
    bind_connections(m);
    // The one table of status codes, for those who want to list it: (code, name, kind).
    py::list table;
    for (const StatusInfo& info : kStatusTable) {
        table.append(py::make_tuple(static_cast<int>(info.status), info.name, info.kind));
    }
    m.attr("STATUS_TABLE") = py::tuple(table);
}

}  // namespace pynixlkv::bindings
