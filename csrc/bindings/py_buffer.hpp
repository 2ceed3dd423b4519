#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace pynixlkv::bindings {

/// The memory of an array or tensor (buffer protocol, torch, DLPack), kept alive and in place.
class ArrayMemory {
  public:
    /// @throws Error ConfigError for an object without memory, read-only or empty memory, and
    /// memory that is not contiguous or on a device that we do not know
    explicit ArrayMemory(const pybind11::object& source);
    ArrayMemory(const ArrayMemory&) = delete;
    ArrayMemory& operator=(const ArrayMemory&) = delete;
    ~ArrayMemory();

    [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
    [[nodiscard]] std::uint64_t num_bytes() const noexcept { return num_bytes_; }
    /// As in pynixlkv.types.MemoryType.
    [[nodiscard]] int memory() const noexcept { return memory_; }
    [[nodiscard]] std::uint64_t device() const noexcept { return device_; }

  private:
    void take_tensor(const pybind11::object& source);
    void take_dlpack(const pybind11::object& source);
    void take_buffer(const pybind11::object& source);
    void set_device(const std::string& type, std::int64_t index);

    pybind11::object keepalive_;
    Py_buffer view_{};
    std::uint64_t address_ = 0;
    std::uint64_t num_bytes_ = 0;
    int memory_ = 0;
    std::uint64_t device_ = 0;
};

}  // namespace pynixlkv::bindings
