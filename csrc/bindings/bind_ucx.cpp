/// @file
/// The UCX owners for pynixlkv/ucx, which checks and converts arguments. Everything that may take a
/// lock of ours or of the library runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "bindings/bind.hpp"
#include "bindings/py_shared.hpp"
#include "ucx/context.hpp"
#include "ucx/library.hpp"

namespace pynixlkv::bindings {

namespace py = pybind11;
using namespace pynixlkv::ucx;

namespace {

using PyLibrary = Shared<const Library>;
using PyContext = Shared<Context>;
using PyMemory = Shared<MemoryHandle>;

template <class Body>
auto without_gil(Body&& body) {
    const py::gil_scoped_release unlocked;
    return body();
}

}  // namespace

void bind_ucx(py::module_& m) {
    py::class_<PyLibrary>(m, "UcxLibrary")
        .def(py::init([](const std::string& path) {
                 return PyLibrary(without_gil([&] { return Library::open(path); }));
             }),
             py::arg("path"))
        .def_property_readonly("path", [](const PyLibrary& self) { return self->path(); })
        .def_property_readonly("version", [](const PyLibrary& self) { return self->version(); });

    py::class_<PyContext>(m, "UcxContext")
        .def(py::init([](const PyLibrary& library, const ConfigMap& config) {
                 return PyContext(
                     without_gil([&] { return Context::create(library.ptr(), config); }));
             }),
             py::arg("library"), py::arg("config"))
        .def_property_readonly("config", [](const PyContext& self) { return self->config(); });

    // A writable buffer over the memory; whoever views it keeps it mapped.
    py::class_<PyMemory>(m, "UcxMemory", py::buffer_protocol())
        .def_static(
            "allocate",
            [](const PyContext& context, std::uint64_t length) {
                return PyMemory(
                    without_gil([&] { return MemoryHandle::allocate(context.ptr(), length); }));
            },
            py::arg("context"), py::arg("length"))
        .def_property_readonly("address", [](const PyMemory& self) { return self->address(); })
        .def_property_readonly("nbytes", [](const PyMemory& self) { return self->length(); })
        .def_buffer([](const PyMemory& self) {
            // NOLINTNEXTLINE(performance-no-int-to-ptr)
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(self->address()),
                                   static_cast<py::ssize_t>(self->length()));
        });

    // The one table of status codes, for those who want to list it: (code, name, kind).
    py::list table;
    for (const StatusInfo& info : kStatusTable) {
        table.append(py::make_tuple(static_cast<int>(info.status), info.name, info.kind));
    }
    m.attr("UCX_STATUS_TABLE") = py::tuple(table);
}

}  // namespace pynixlkv::bindings
