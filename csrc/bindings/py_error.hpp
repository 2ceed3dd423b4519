/// @file
/// The one place where a C++ exception becomes a Python exception.
#pragma once

#include <Python.h>

#include "base/error.hpp"

namespace pynixlkv::bindings {

/// Set the Python error for a failure by calling pynixlkv.errors.from_native. Needs the GIL.
inline void set_native_error(const char* kind, const char* message, const char* library, int status,
                             const char* call, const char* detail) {
    PyObject* module = PyImport_ImportModule("pynixlkv.errors");
    if (module == nullptr) {
        return;  // the import error is the error
    }
    PyObject* exception = PyObject_CallMethod(module, "from_native", "sssiss", kind, message,
                                              library, status, call, detail);
    Py_DECREF(module);
    if (exception == nullptr) {
        return;
    }
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
    Py_DECREF(exception);
}

/// Translate the exception in flight. Call from a catch block, with the GIL held.
/// @return false if the exception is none of ours; it is then still in flight.
inline bool translate_current_exception() {
    try {
        throw;
    } catch (const NativeError& e) {
        set_native_error(e.kind().c_str(), e.what(), e.library().c_str(), e.status(),
                         e.call().c_str(), e.detail().c_str());
    } catch (const Error& e) {
        set_native_error(e.kind().c_str(), e.what(), "", 0, "", "");
    } catch (...) {
        return false;
    }
    return true;
}

}  // namespace pynixlkv::bindings
