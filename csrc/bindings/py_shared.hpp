/// @file
/// Native owners inside Python objects, and Python objects inside native owners.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

namespace pynixlkv::bindings {

/// A native owner inside a Python object. It is released without the GIL, because its destructor
/// can need a lock that another thread holds while it waits for the GIL.
template <class T>
class Shared {
  public:
    explicit Shared(std::shared_ptr<T> owner) noexcept : owner_(std::move(owner)) {}
    Shared(Shared&&) noexcept = default;
    Shared& operator=(Shared&&) = delete;
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;
    ~Shared() {
        if (owner_) {
            const pybind11::gil_scoped_release unlocked;
            owner_.reset();
        }
    }

    [[nodiscard]] T& operator*() const noexcept { return *owner_; }
    [[nodiscard]] T* operator->() const noexcept { return owner_.get(); }
    [[nodiscard]] const std::shared_ptr<T>& ptr() const noexcept { return owner_; }

  private:
    std::shared_ptr<T> owner_;
};

/// A reference to a Python object that may be dropped by any thread, with or without the GIL.
inline std::shared_ptr<void> keep_alive(const pybind11::object& object) {
    return {object.inc_ref().ptr(), [](PyObject* reference) {
#if PY_VERSION_HEX >= 0x030d0000
                const bool is_ending = Py_IsFinalizing() != 0;
#else
                const bool is_ending = _Py_IsFinalizing() != 0;
#endif
                if (Py_IsInitialized() != 0 && !is_ending) {
                    const PyGILState_STATE state = PyGILState_Ensure();
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
