/// @file
/// CUDA contexts for the threads that reach device memory through a library.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/descriptor.hpp"

namespace pynixlkv::transfer {

class CudaDriver;

/// The primary contexts of the devices whose memory one owner moves, retained from the first use of
/// each until the end of the owner. Thread-safe. The CUDA driver is opened with the first use.
class DeviceContexts {
  public:
    static constexpr int kMaxDevices = 64;

    DeviceContexts() = default;
    DeviceContexts(const DeviceContexts&) = delete;
    DeviceContexts& operator=(const DeviceContexts&) = delete;
    ~DeviceContexts() { release(); }

    /// Keeps a context current on this thread, and then leaves the thread as it was.
    class Scope {
      public:
        Scope() = default;
        Scope(Scope&& other) noexcept : driver_(std::exchange(other.driver_, nullptr)) {}
        Scope& operator=(Scope&& other) noexcept {
            std::swap(driver_, other.driver_);
            return *this;
        }
        ~Scope();
        explicit operator bool() const noexcept { return driver_ != nullptr; }

      private:
        friend class DeviceContexts;
        explicit Scope(const CudaDriver* driver) noexcept : driver_(driver) {}
        const CudaDriver* driver_ = nullptr;
    };

    /// Enter the context of the device that has a row, and retain it if it is new. Without a CUDA
    /// driver nothing happens: the library may know the memory by another name.
    /// @param is_device_known whether the caller has named the device of the row
    /// @return the device, -1 without a driver
    /// @throws Error RegistrationError for memory that is not the device's, or a driver that fails
    [[nodiscard]] std::pair<int, Scope> enter_for(const Descriptor& row, bool is_device_known);
    /// Retain the context of a device that this process uses already; none if there is none.
    void retain_active() noexcept;

    /// Enter the context of a device if it was retained.
    [[nodiscard]] Scope enter(int device) const noexcept;
    /// Enter any retained context, unless this thread has a context.
    [[nodiscard]] Scope enter() const noexcept;

    /// Release what was retained. No scope of this object may be open.
    void release() noexcept;

    /// How device memory was allocated, and what can reach it.
    struct MemoryKind {
        const char* name;
        const char* advice;    ///< the setting to change for memory that more can reach
        bool is_exportable;    ///< to other processes of this host
        bool is_rdma_capable;  ///< for network cards
    };
    /// @return nothing for other memory, and if the CUDA driver fails
    [[nodiscard]] static std::optional<MemoryKind> kind_of(std::uint64_t address) noexcept;

    /// For errors: the kind of memory and the setting to change, if not all can reach it.
    [[nodiscard]] static std::string remark(std::uint64_t address);

    /// What the CUDA driver can do; opens it.
    struct DriverState {
        std::string problem;       ///< why device memory cannot be used; empty if it can
        bool has_dma_buf = false;  ///< whether network cards reach all GPUs by dma-buf
    };
    [[nodiscard]] static DriverState driver_state();

  private:
    void* retain(const CudaDriver& driver, int device);

    std::mutex mutex_;
    std::array<std::atomic<void*>, kMaxDevices> contexts_{};
    std::atomic<void*> first_{nullptr};
};

}  // namespace pynixlkv::transfer
