/// @file
/// One bind function per folder of csrc, and one for py_buffer.hpp.
#pragma once

#include <pybind11/pybind11.h>

namespace pynixlkv::bindings {

void bind_buffer(pybind11::module_ m);
void bind_kv(pybind11::module_ m);
void bind_nixl(pybind11::module_ m);
void bind_transfer(pybind11::module_ m);
void bind_ucx(pybind11::module_ m);

}  // namespace pynixlkv::bindings
