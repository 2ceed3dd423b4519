/// @file
/// pynixlkv._native: objects with a life. Calls one bind function per folder of csrc.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/live_count.hpp"
#include "bindings/bind.hpp"
#include "bindings/py_error.hpp"

namespace py = pybind11;
namespace bindings = pynixlkv::bindings;

PYBIND11_MODULE(_native, m) {
    m.doc() =
        "Native objects of pynixlkv. Private: the modules of the package are the public side.";
    py::register_local_exception_translator([](std::exception_ptr p) {
        if (p) {
            try {
                std::rethrow_exception(p);
            } catch (...) {
                if (!bindings::translate_current_exception()) {
                    throw;
                }
            }
        }
    });
    m.def("live_counts", &pynixlkv::LiveCounters::snapshot);
    bindings::bind_buffer(m);
    bindings::bind_kv(m.def_submodule("kv", "Geometries, plans, block tables."));
    bindings::bind_nixl(m.def_submodule("nixl", "NIXL's verbs."));
    bindings::bind_ucx(m.def_submodule("ucx", "UCX's verbs."));
    bindings::bind_transfer(m.def_submodule("transfer", "Agents, peers, memory, transfers."));
}
