#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nixl/agent_handle.hpp"
#include "nixl/files.hpp"
#include "nixl/library.hpp"
#include "transfer/driver.hpp"

namespace pynixlkv::nixl {

struct DriverOptions {
    AgentConfig agent;
    std::string backend = "UCX";  ///< which reaches peers; empty: there are none
    ParamMap backend_params;
    StorageOptions storage;
};

/// Drives a NIXL agent of its own with one backend, and one for each open file.
class NixlDriver final : public transfer::Driver {
  public:
    NixlDriver(std::shared_ptr<const Library> library, std::string name,
               const DriverOptions& options);

    void expect_device_memory() override;
    bool needs_polling() const override { return !options_.agent.progress_thread; }
    std::unique_ptr<transfer::Registered> register_memory(
        std::span<const transfer::Span> spans) override;
    std::string metadata() override;
    std::unique_ptr<transfer::Connection> connect(const std::string& name,
                                                  std::string_view metadata,
                                                  std::optional<pid_t> process) override;
    std::unique_ptr<transfer::Connection> open_file(int fd) override;
    void refresh(transfer::Connection& connection, std::string_view metadata) override;
    bool is_alive(transfer::Connection& connection) override;
    std::unique_ptr<transfer::NativeXfer> make(transfer::Connection& connection, transfer::Op op,
                                               const transfer::DescriptorPairs& rows) override;
    std::unique_ptr<transfer::Prepared> prepare(transfer::Connection& connection,
                                                const transfer::DescriptorPairs& rows) override;
    std::unique_ptr<transfer::NativeXfer> make(transfer::Connection& connection, transfer::Op op,
                                               transfer::Prepared& prepared,
                                               const transfer::IndexPairs& indices) override;
    void notify(transfer::Connection& connection, const std::string& message) override;
    bool receive(std::vector<transfer::Notification>& into) override;

  private:
    /// Make NIXL's agent and its backend.
    void make();
    /// @throws Error what the last `make` failed with, or that there are no peers
    void require_made() const;
    void stay_on_device();
    /// Run a call that makes a request of some descriptors, and tell a lost connection from a
    /// refusal.
    template <class Make>
    std::unique_ptr<transfer::NativeXfer> request(transfer::Connection& connection, Op op,
                                                  std::size_t count, Make make);

    const std::shared_ptr<const Library> library_;
    const std::string name_;
    DriverOptions options_;
    std::shared_ptr<AgentHandle> agent_;
    std::shared_ptr<Backend> backend_;
    std::vector<Memory> memory_types_;
    Owned<capi::OptArgs> args_;  ///< names the backend
    bool is_announced_ = false;  ///< whether its metadata may be known to peers
    /// What is_alive() received while it made progress.
    std::vector<transfer::Notification> early_;
    std::exception_ptr failure_;  ///< why the agent could not be made again
    /// Of the agent's thread, from the first device memory on. It ends before the agent, which
    /// releases the context.
    transfer::DeviceContexts::Scope device_;
};

}  // namespace pynixlkv::nixl
