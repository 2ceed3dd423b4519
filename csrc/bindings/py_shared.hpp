/// @file
/// Native owners inside Python objects, and Python objects inside native owners.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings/py_gil.hpp"

namespace pynixlkv::bindings {

/// A native owner inside a Python object. It is released without the GIL, because its destructor
/// can need a lock that another thread holds while it waits for the GIL.
template <class T>
class Shared {
  public:
    explicit Shared(std::shared_ptr<T> owner) noexcept : owner_(std::move(owner)) {}
    Shared(Shared&&) noexcept = default;
    ~Shared() {
        if (owner_) {
            const GilRelease unlocked;
            owner_.reset();
        }
    }

    [[nodiscard]] T& operator*() const noexcept { return *owner_; }
    [[nodiscard]] T* operator->() const noexcept { return owner_.get(); }
    [[nodiscard]] const std::shared_ptr<T>& ptr() const noexcept { return owner_; }

  private:
    std::shared_ptr<T> owner_;
};

template <class Body>
auto without_gil(Body&& body) {
    const GilRelease unlocked;
    return body();
}

template <class Library>
void bind_library(pybind11::module_& m) {
    using Owner = Shared<const Library>;
    pybind11::class_<Owner>(m, "Library")
        .def(pybind11::init([](const std::string& path) {
                 return Owner(without_gil([&] { return Library::open(path); }));
             }),
             pybind11::arg("path"))
        .def_property_readonly("path", [](const Owner& self) { return self->path(); })
        .def_property_readonly("version", [](const Owner& self) { return self->version(); });
}

/// Whether the interpreter is going away, so that Python code must not run.
inline bool is_ending() {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

/// An owner that has to be released: dropping it warns. Needs `is_closed` and `repr` of the owner.
template <class T>
class Released : public Shared<T> {
  public:
    using Shared<T>::Shared;
    Released(Released&&) noexcept = default;
    ~Released() {
        if (!this->ptr() || is_ending() || !this->ptr()->agent()->is_here() || is_closed(**this)) {
            return;
        }
        const pybind11::error_scope in_flight;
        const std::string message = "unreleased " + repr(**this);
        if (PyErr_WarnEx(PyExc_ResourceWarning, message.c_str(), 1) != 0) {
            PyErr_WriteUnraisable(nullptr);
        }
    }
};

/// A reference to a Python object that may be dropped by any thread, with or without the GIL.
inline std::shared_ptr<void> keep_alive(const pybind11::object& object) {
    return {object.inc_ref().ptr(), [](PyObject* reference) {
                if (Py_IsInitialized() != 0 && !is_ending()) {
                    const auto state = take_gil([] { return PyGILState_Ensure(); });
                    Py_DECREF(reference);
                    PyGILState_Release(state);
                }
            }};
}

/// A parameter that takes Python's bytes and nothing else.
struct Bytes {
    std::string value;
};

/// A name as str. Names come from other processes: undecodable bytes must not make a call fail.
inline pybind11::str name_of(const std::string& name) {
    PyObject* decoded =
        PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "surrogateescape");
    if (decoded == nullptr) {
        throw pybind11::error_already_set();
    }
    return pybind11::reinterpret_steal<pybind11::str>(decoded);
}

}  // namespace pynixlkv::bindings

namespace pybind11::detail {

template <>
struct type_caster<pynixlkv::bindings::Bytes> {
    PYBIND11_TYPE_CASTER(pynixlkv::bindings::Bytes, const_name("bytes"));

    bool load(handle source, bool /*convert*/) {
        if (!PyBytes_Check(source.ptr())) {
            return false;
        }
        value.value.assign(PyBytes_AS_STRING(source.ptr()),
                           static_cast<std::size_t>(PyBytes_GET_SIZE(source.ptr())));
        return true;
    }
};

}  // namespace pybind11::detail
