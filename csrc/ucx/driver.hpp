#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/driver.hpp"
#include "ucx/clients.hpp"
#include "ucx/copies.hpp"
#include "ucx/endpoint.hpp"
#include "ucx/lane.hpp"
#include "ucx/regions.hpp"

namespace pynixlkv::ucx {

/// Drives one worker. Host memory of a peer on this host is copied: through a mapping if the peer's
/// UCX allocated it, else by the kernel where that is allowed. Everything else uses UCX's gets and
/// puts; where no transport has them, host memory moves through lanes.
class UcxDriver final : public transfer::Driver {
  public:
    UcxDriver(std::shared_ptr<Context> context, std::string name,
              capi::ErrorMode errors = capi::kErrorPeer, std::size_t copy_threads = 1);
    ~UcxDriver() override;

    void expect_device_memory() override;
    std::unique_ptr<transfer::Registered> register_memory(
        std::span<const transfer::Span> spans) override;
    std::string metadata() override;
    std::unique_ptr<transfer::Connection> connect(const std::string& name,
                                                  std::string_view metadata,
                                                  std::optional<pid_t> process) override;
    void refresh(transfer::Connection& connection, std::string_view metadata) override;
    void shut_out(transfer::Connection& connection) override;
    bool is_alive(transfer::Connection& connection) override;
    using transfer::Driver::make;
    std::unique_ptr<transfer::NativeXfer> make(transfer::Connection& connection, transfer::Op op,
                                               const transfer::DescriptorPairs& rows) override;
    void notify(transfer::Connection& connection, const std::string& message) override;
    bool receive(std::vector<transfer::Notification>& into) override;
    int event_fd() override { return lanes_.event_fd(); }
    bool arm() override;

  private:
    void stay_on_device();
    void connect_lanes(UcxConnection& peer, const Description& description, bool is_local);
    void on_message(std::string_view header, std::string_view data);

    const std::shared_ptr<Context> context_;
    const std::string name_;
    const capi::ErrorMode errors_;
    const std::shared_ptr<CopyThreads> threads_;
    /// In the metadata, with its place: peers of this host look at it there.
    std::uint64_t token_ = new_secret();
    const std::shared_ptr<LocalRegions> regions_;
    const std::shared_ptr<Unopened> unopened_ = std::make_shared<Unopened>();
    /// From the first device memory on, until the worker, which is declared later, has gone.
    struct OnDevice {
        explicit OnDevice(transfer::DeviceContexts& all) : contexts(all) {}
        ~OnDevice() {
            scope = {};
            contexts.release();
        }
        transfer::DeviceContexts& contexts;
        transfer::DeviceContexts::Scope scope;
    };
    OnDevice device_{context_->devices()};
    std::vector<transfer::Notification> inbox_;
    std::optional<Error> receive_error_;
    // After the members that its callbacks write to, so that it is destroyed first.
    const std::shared_ptr<Worker> worker_;
    Clients clients_;
    Lanes lanes_;
};

}  // namespace pynixlkv::ucx
