/// @file
#pragma once

#include <pybind11/pybind11.h>

namespace pynixlkv::bindings {

/// The transfer engine, and the fake network that tests run it on.
void bind_transfer(pybind11::module_& m);

}  // namespace pynixlkv::bindings
