/// @file
/// UCX contexts, and memory mapped in them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/live_count.hpp"
#include "base/process.hpp"
#include "base/unique_handle.hpp"
#include "transfer/device_contexts.hpp"
#include "ucx/library.hpp"

namespace pynixlkv::ucx {

/// UCX settings by name, without the prefix `UCX_`.
using ConfigMap = std::map<std::string, std::string>;

class MemoryHandle;

/// An instance of UCX with its settings and devices. Thread-safe.
class Context : LiveCounted<Context> {
  public:
    static constexpr const char* kLiveName = "ucx.Context";

    /// @param config settings over those of the environment
    /// @throws Error ConfigError for a setting that UCX does not know, UcxError if it does not
    /// start
    Context(std::shared_ptr<const Library> library, ConfigMap config);
    ~Context();

    [[nodiscard]] const Library& library() const noexcept { return *library_; }
    [[nodiscard]] capi::Context handle() const noexcept { return handle_; }
    [[nodiscard]] const ConfigMap& config() const noexcept { return config_; }
    /// A setting that was made here or in the environment; empty if there is none.
    [[nodiscard]] std::string setting(const std::string& name) const;
    /// Whether UCX can move memory of a type here.
    [[nodiscard]] bool moves(capi::MemoryType type) const noexcept {
        return ((memory_types_ >> static_cast<unsigned>(type)) & 1U) != 0;
    }
    /// What UCX prints of its devices and transports.
    [[nodiscard]] std::string info() const;
    [[nodiscard]] const ProcessMark& process() const noexcept { return process_; }
    [[nodiscard]] transfer::DeviceContexts& devices() noexcept { return devices_; }

    /// The handle of UCX-allocated memory that contains a range; null if there is none.
    [[nodiscard]] std::shared_ptr<MemoryHandle> find_allocated(std::uint64_t address,
                                                               std::uint64_t length) const;

  private:
    friend class MemoryHandle;

    const std::shared_ptr<const Library> library_;
    const ConfigMap config_;
    capi::Context handle_ = nullptr;
    std::uint64_t memory_types_ = 0;
    const ProcessMark process_;
    transfer::DeviceContexts devices_;
    mutable std::mutex mutex_;  // guards allocated_
    std::map<std::uint64_t, std::weak_ptr<MemoryHandle>> allocated_;
};

/// Memory that peers can be given access to.
class MemoryHandle : LiveCounted<MemoryHandle> {
  public:
    static constexpr const char* kLiveName = "ucx.MemoryHandle";

    /// Map memory of the caller.
    /// @param is_device_known whether the row names the device
    /// @param keepalive held until the memory is unmapped
    [[nodiscard]] static std::shared_ptr<MemoryHandle> map(std::shared_ptr<Context> context,
                                                           const Descriptor& row,
                                                           capi::MemoryType type,
                                                           bool is_device_known,
                                                           std::shared_ptr<void> keepalive = {});
    /// Let UCX allocate host memory, shared where the system allows it, so that other processes of
    /// this host can map it.
    [[nodiscard]] static std::shared_ptr<MemoryHandle> allocate(std::shared_ptr<Context> context,
                                                                std::uint64_t length);
    ~MemoryHandle();

    [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
    [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
    [[nodiscard]] capi::Memory handle() const noexcept { return handle_; }
    [[nodiscard]] bool is_allocated() const noexcept { return is_allocated_; }
    /// The packed remote key.
    [[nodiscard]] std::string pack() const;

  private:
    friend class LiveCounted<MemoryHandle>;
    MemoryHandle(std::shared_ptr<Context> context, const capi::MemoryParams& params,
                 std::shared_ptr<void> keepalive);

    const std::shared_ptr<Context> context_;
    const std::shared_ptr<void> keepalive_;
    capi::Memory handle_ = nullptr;
    std::uint64_t address_ = 0;
    std::uint64_t length_ = 0;
    int device_ = -1;  ///< of CUDA memory
    bool is_allocated_ = false;
};

}  // namespace pynixlkv::ucx
