#include "bindings/py_buffer.hpp"

#include "base/error.hpp"
#include "base/text.hpp"
#include "bindings/bind.hpp"

namespace pynixlkv::bindings {

namespace py = pybind11;

namespace {

constexpr int kHostMemory = 0;
constexpr int kDeviceMemory = 1;

// The parts of the DLPack protocol that we read, as its specification lays them out.
namespace dlpack {

constexpr std::int32_t kCpu = 1;
constexpr std::int32_t kCuda = 2;
constexpr std::int32_t kCudaHost = 3;

struct Tensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t ndim;
    std::uint8_t type_code;
    std::uint8_t type_bits;
    std::uint16_t type_lanes;
    std::int64_t* shape;
    std::int64_t* strides;  ///< in elements; null if contiguous
    std::uint64_t byte_offset;
};

}  // namespace dlpack

std::string type_name(const py::object& source) {
    return py::str(py::type::of(source).attr("__qualname__"));
}

[[noreturn]] void fail(const py::object& source, const std::string& why) {
    throw Error("ConfigError", text("cannot register a ", type_name(source), ": ", why));
}

}  // namespace

ArrayMemory::ArrayMemory(const py::object& source) {
    // torch tensors first: they speak DLPack too, but not for every dtype.
    if (py::hasattr(source, "data_ptr") && py::hasattr(source, "is_contiguous")) {
        take_tensor(source);
    } else if (PyObject_CheckBuffer(source.ptr()) != 0) {
        take_buffer(source);
    } else if (py::hasattr(source, "__dlpack__")) {
        take_dlpack(source);
    } else {
        fail(source, "it has neither the buffer protocol nor DLPack");
    }
    if (num_bytes_ == 0) {
        fail(source, "it is empty");
    }
}

ArrayMemory::~ArrayMemory() {
    if (view_.obj != nullptr) {
        PyBuffer_Release(&view_);
    }
}

void ArrayMemory::set_device(const std::string& type, std::int64_t index) {
    if (type == "cpu") {
        return;
    }
    if (type != "cuda") {
        throw Error("ConfigError", text("memory on device '", type, ":", index,
                                        "' cannot be registered; only 'cpu' and 'cuda' can"));
    }
    memory_ = kDeviceMemory;
    device_ = static_cast<std::uint64_t>(index);
}

void ArrayMemory::take_tensor(const py::object& source) {
    if (!source.attr("is_contiguous")().cast<bool>()) {
        fail(source, text("it is not contiguous (shape ",
                          py::str(py::list(source.attr("shape"))).cast<std::string>(), ", strides ",
                          py::str(py::list(source.attr("stride")())).cast<std::string>(),
                          "); register the tensor that it is a view of"));
    }
    const py::object device = source.attr("device");
    const py::object index = device.attr("index");
    set_device(device.attr("type").cast<std::string>(),
               index.is_none() ? 0 : index.cast<std::int64_t>());
    address_ = source.attr("data_ptr")().cast<std::uint64_t>();
    num_bytes_ = source.attr("numel")().cast<std::uint64_t>() *
                 source.attr("element_size")().cast<std::uint64_t>();
    keepalive_ = source;
}

void ArrayMemory::take_buffer(const py::object& source) {
    if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_STRIDES) != 0) {
        throw py::error_already_set();
    }
    const bool is_contiguous = PyBuffer_IsContiguous(&view_, 'A') != 0;
    if (is_contiguous && view_.readonly == 0) {
        address_ = reinterpret_cast<std::uint64_t>(view_.buf);
        num_bytes_ = static_cast<std::uint64_t>(view_.len);
        return;
    }
    PyBuffer_Release(&view_);
    view_.obj = nullptr;
    fail(source, is_contiguous ? "it is read-only, and a peer could write to it"
                               : "it is not contiguous; register the array that it is a view of");
}

void ArrayMemory::take_dlpack(const py::object& source) {
    const auto device = source.attr("__dlpack_device__")().cast<std::pair<std::int32_t, int>>();
    if (device.first == dlpack::kCuda) {
        set_device("cuda", device.second);
    } else if (device.first != dlpack::kCpu && device.first != dlpack::kCudaHost) {
        fail(source, text("its DLPack device type ", device.first, " is neither CPU nor CUDA"));
    }
    const py::object capsule = source.attr("__dlpack__")();
    const auto* tensor =
        static_cast<dlpack::Tensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (tensor == nullptr) {
        throw py::error_already_set();
    }
    std::uint64_t num_elements = 1;
    for (std::int32_t axis = tensor->ndim - 1; axis >= 0; --axis) {
        const std::int64_t extent = tensor->shape[axis];
        if (tensor->strides != nullptr && extent != 1 &&
            tensor->strides[axis] != static_cast<std::int64_t>(num_elements)) {
            fail(source, "it is not contiguous; register the array that it is a view of");
        }
        num_elements *= static_cast<std::uint64_t>(extent);
    }
    address_ = reinterpret_cast<std::uint64_t>(tensor->data) + tensor->byte_offset;
    num_bytes_ = num_elements * tensor->type_bits * tensor->type_lanes / 8;
    keepalive_ = capsule;  // not consumed, so that its own finalizer gives the tensor back
}

void bind_buffer(py::module_ m) {
    py::class_<ArrayMemory>(m, "ArrayMemory")
        .def(py::init<const py::object&>(), py::arg("source"))
        .def_property_readonly("address", &ArrayMemory::address)
        .def_property_readonly("nbytes", &ArrayMemory::num_bytes)
        .def_property_readonly("memory", &ArrayMemory::memory)
        .def_property_readonly("device", &ArrayMemory::device);
}

}  // namespace pynixlkv::bindings
