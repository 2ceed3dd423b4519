/// @file
/// The UCX owners for pynixlkv/ucx, which checks and converts arguments. Whatever may take a lock,
/// ours or the library's, runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "bindings/bind.hpp"
#include "bindings/py_shared.hpp"
#include "bindings/py_wait.hpp"
#include "ucx/batch.hpp"
#include "ucx/request.hpp"

namespace pynixlkv::bindings {

namespace py = pybind11;
using namespace pynixlkv::ucx;

namespace {

using PyLibrary = Shared<const Library>;
using PyContext = Shared<Context>;
using PyMemory = Shared<MemoryHandle>;
using PyWorker = Shared<Worker>;
using PyKey = Shared<RemoteKey>;
using PyRequest = Shared<Request>;

/// Call a function under the lock of a worker, without the GIL.
template <class Body>
auto inside(const Worker& worker, Body&& body) {
    const GilRelease unlocked;
    const auto entered = worker.enter();
    return body();
}

/// An endpoint that closes with its Python object, whatever else refers to it.
class PyEndpoint : public Shared<Endpoint> {
  public:
    using Shared::Shared;
    ~PyEndpoint() {
        const GilRelease unlocked;
        ptr()->close();
    }
    [[nodiscard]] const Worker& worker() const noexcept { return *ptr()->worker(); }
};

/// Wait in slices, see py_wait.hpp.
/// @throws Error TransferTimeout
template <class WaitUntil>
void require_end(double timeout, const char* what, const char* after, WaitUntil wait_until) {
    if (!wait_in_slices(timeout, wait_until)) {
        throw Error("TransferTimeout", text(what, " has not ended within ", timeout, " s", after));
    }
}

transfer::Op op_of(bool is_get) {
    return is_get ? transfer::Op::kRead : transfer::Op::kWrite;
}

PyRequest move(const PyMemory& local, std::uint64_t offset, const PyKey& key, std::uint64_t remote,
               std::uint64_t length, bool is_get) {
    const auto& endpoint = key->endpoint();
    return PyRequest(inside(*endpoint->worker(), [&] {
        return Request::start(endpoint, call_of(op_of(is_get)), {local.ptr(), key.ptr()},
                              [&](Completion& completion) {
                                  endpoint->move(completion, op_of(is_get),
                                                 local->address() + offset, length, local->handle(),
                                                 remote, *key);
                              });
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
    return Shared<Batch>(inside(*key->endpoint()->worker(), [&] {
        return std::make_shared<Batch>(local.ptr(), key.ptr(), remote, std::move(places), length,
                                       op_of(is_get), window, is_timed);
    }));
}

void bind_memory(py::module_& m) {
    bind_library<Library>(m);
    py::class_<PyContext>(m, "Context")
        .def(py::init([](const PyLibrary& library, const ConfigMap& config) {
                 return PyContext(
                     without_gil([&] { return std::make_shared<Context>(library.ptr(), config); }));
             }),
             py::arg("library"), py::arg("config"))
        .def_property_readonly("config", [](const PyContext& self) { return self->config(); })
        .def("info",
             [](const PyContext& self) { return without_gil([&] { return self->info(); }); });

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
                    return MemoryHandle::map(context.ptr(), {address, length, 0},
                                             static_cast<capi::MemoryType>(memory), false,
                                             std::move(kept));
                }));
            },
            py::arg("context"), py::arg("address"), py::arg("length"), py::arg("memory"),
            py::arg("keepalive"))
        .def("pack",
             [](const PyMemory& self) {
                 return py::bytes(without_gil([&] { return self->pack(); }));
             })
        .def_property_readonly("address", [](const PyMemory& self) { return self->address(); })
        .def_property_readonly("nbytes", [](const PyMemory& self) { return self->length(); })
        // The view holds the object, and with it the mapping.
        .def("view", [](const py::object& self) { return py::memoryview(self); })
        .def_buffer([](const PyMemory& self) {
            // NOLINTNEXTLINE(performance-no-int-to-ptr)
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(self->address()),
                                   static_cast<py::ssize_t>(self->length()));
        });
}

void bind_worker(py::module_& m) {
    py::class_<PyWorker>(m, "Worker")
        .def(py::init([](const PyContext& context) {
                 return PyWorker(
                     without_gil([&] { return std::make_shared<Worker>(context.ptr()); }));
             }),
             py::arg("context"))
        .def("address",
             [](const PyWorker& self) {
                 return py::bytes(inside(*self, [&] { return self->address(); }));
             })
        .def("progress",
             [](const PyWorker& self) { return inside(*self, [&] { return self->progress(); }); })
        .def(
            "spin",
            [](const PyWorker& self, double seconds) {
                (void)wait_in_slices(seconds, [&](TimePoint until) {
                    return self->progress_until(until, true, [] { return false; });
                });
            },
            py::arg("seconds"))
        .def("arm", [](const PyWorker& self) { return inside(*self, [&] { return self->arm(); }); })
        .def_property_readonly("event_fd", [](const PyWorker& self) { return self->event_fd(); });
}

void bind_connections(py::module_& m) {
    py::class_<PyRequest>(m, "Request", R"(A get, put or flush in flight.

When it is dropped before it has ended, it goes on, and its memory stays mapped until then.)")
        .def(
            "poll",
            [](const PyRequest& self) {
                Worker& worker = *self->endpoint()->worker();
                return inside(worker, [&] {
                    worker.progress();
                    return self->check();
                });
            },
            "Progress the worker; return whether the request is complete. Raises as `wait`.")
        .def(
            "wait",
            [](const PyRequest& self, double timeout, bool spin) {
                require_end(timeout, "the UCX request", "; it goes on", [&](TimePoint until) {
                    return self->endpoint()->worker()->progress_until(
                        until, spin, [&] { return self->check(); });
                });
            },
            py::arg("timeout") = 30.0, py::kw_only(), py::arg("spin") = false,
            R"(Wait until the request is complete, for at most `timeout` seconds.

With `spin`, poll without a pause for the lowest latency instead of sleeping on events. Raises
`TransferTimeout` if it is not complete in time, and `UcxError` if it has failed.)");

    py::class_<PyEndpoint>(m, "Endpoint")
        .def(py::init([](const PyWorker& worker, const Bytes& address, bool error_handling) {
                 return std::make_unique<PyEndpoint>(inside(*worker, [&] {
                     return std::make_shared<Endpoint>(
                         worker.ptr(), address.value,
                         error_handling ? capi::kErrorPeer : capi::kErrorNone);
                 }));
             }),
             py::arg("worker"), py::arg("address"), py::arg("error_handling"))
        .def("flush",
             [](const PyEndpoint& self) {
                 return PyRequest(inside(self.worker(), [&] {
                     return Request::start(
                         self.ptr(), "ucp_ep_flush_nbx", {},
                         [&](Completion& completion) { self->flush(completion); });
                 }));
             })
        .def("close", [](const PyEndpoint& self) { inside(self.worker(), [&] { self->close(); }); })
        .def_property_readonly("failure", [](const PyEndpoint& self) {
            const auto failure = inside(self.worker(), [&] { return self->failure(); });
            return failure ? status_name(*failure) : std::string();
        });

    py::class_<PyKey>(m, "RemoteKey")
        .def(py::init([](const PyEndpoint& endpoint, const Bytes& packed) {
                 return PyKey(inside(endpoint.worker(), [&] {
                     return std::make_shared<RemoteKey>(endpoint.ptr(), packed.value);
                 }));
             }),
             py::arg("endpoint"), py::arg("packed"))
        .def(
            "is_direct",
            [](const PyKey& self, std::uint64_t address) {
                return inside(*self->endpoint()->worker(),
                              [&] { return self->pointer(address) != nullptr; });
            },
            py::arg("address"));

    py::class_<Shared<Batch>>(m, "Batch", "Pieces that move as one.")
        .def(py::init(&make_batch), py::arg("local"), py::arg("key"), py::arg("remote"),
             py::arg("places"), py::arg("length"), py::arg("is_get"), py::arg("window"),
             py::arg("is_timed"))
        .def_property_readonly(
            "piece_times",
            [](const Shared<Batch>& self) {
                const auto& times = self->times();
                py::array_t<double> seconds(
                    static_cast<py::ssize_t>(times.empty() ? 0 : times.size() - 1));
                for (py::ssize_t i = 0; i < seconds.size(); ++i) {
                    const auto at = static_cast<std::size_t>(i);
                    seconds.mutable_at(i) = static_cast<double>(times[at + 1] - times[at]) * 1e-9;
                }
                return seconds;
            },
            R"(Seconds from the post of each piece to that of the next, or to the end; if timed.

With a window of 1 each is the duration of its piece.)")
        .def(
            "wait",
            [](const Shared<Batch>& self, double timeout, bool spin) {
                require_end(timeout, "the UCX batch", "", [&](TimePoint until) {
                    return self->worker().progress_until(until, spin,
                                                         [&] { return self->advance(); });
                });
            },
            py::arg("timeout") = 30.0, py::kw_only(), py::arg("spin") = false,
            R"(Move the pieces and wait for the last; of puts, until they are complete at the peer.

As `Request.wait`. After a timeout, call it again to go on; after a failure, no more are posted.)");

    m.def("move", &move, py::arg("local"), py::arg("offset"), py::arg("key"), py::arg("remote"),
          py::arg("length"), py::arg("is_get"));
}

}  // namespace

void bind_ucx(py::module_ m) {
    bind_memory(m);
    bind_worker(m);
    bind_connections(m);
    m.def("status_table", [] {
        py::typing::List<py::typing::Tuple<py::int_, py::str, py::str>> table;
        for (const StatusInfo& info : kStatusTable) {
            table.append(py::make_tuple(info.status, info.name, info.kind));
        }
        return table;
    });
}

}  // namespace pynixlkv::bindings
