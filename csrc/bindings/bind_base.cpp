#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/live_count.hpp"
#include "bindings/bind.hpp"

namespace pynixlkv::bindings {

void bind_base(pybind11::module_ m) {
    m.def("live_counts", &LiveCounters::snapshot);
}

}  // namespace pynixlkv::bindings
