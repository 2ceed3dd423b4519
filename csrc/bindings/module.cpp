/// @file
/// pynixlkv._native: objects with a life. Calls one bind function per room and nothing else.
#include <pybind11/pybind11.h>

#include "bindings/bind.hpp"
#include "bindings/py_error.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
    m.doc() = "Native objects of pynixlkv: agents, registrations, transfers.";
    py::register_local_exception_translator([](std::exception_ptr p) {
        if (p) {
            try {
                std::rethrow_exception(p);
            } catch (...) {
                if (!pynixlkv::bindings::translate_current_exception()) {
                    throw;
                }
            }
        }
    });
    pynixlkv::bindings::bind_base(m);
    pynixlkv::bindings::bind_buffer(m);
    pynixlkv::bindings::bind_nixl(m);
    pynixlkv::bindings::bind_transfer(m);
}
