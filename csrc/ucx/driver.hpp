/// @file
/// The transfer agent's view of UCX.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/driver.hpp"
#include "ucx/endpoint.hpp"
#include "ucx/regions.hpp"
#include "ucx/served.hpp"

namespace pynixlkv::ucx {

/// Drives one worker. Memory that UCX allocated is copied by the processor that asks, through a
/// mapping of it, where the peer is on the same host; everything else goes through UCX's one-sided
/// operations; and where no transport has any, host memory is served by messages.
class UcxDriver final : public transfer::Driver {
  public:
    /// @param errors whether UCX looks after connections; both sides need the same
    UcxDriver(std::shared_ptr<Context> context, std::string name,
              capi::ErrorMode errors = capi::kErrorPeer);
    UcxDriver(const UcxDriver&) = delete;
    UcxDriver& operator=(const UcxDriver&) = delete;
    ~UcxDriver() override { server_.close(); }

    std::unique_ptr<transfer::Registered> register_memory(
        std::span<const transfer::Span> spans) override;
    std::string metadata() override;
    std::unique_ptr<transfer::Connection> connect(const std::string& name,
                                                  std::string_view metadata) override;
    void refresh(transfer::Connection& connection, std::string_view metadata) override;
    bool is_alive(transfer::Connection& connection) override;
    using transfer::Driver::make;
    std::unique_ptr<transfer::NativeXfer> make(transfer::Connection& connection, transfer::Op op,
                                               const transfer::RowPairs& rows) override;
    void notify(transfer::Connection& connection, const std::string& message) override;
    bool receive(std::vector<transfer::Notification>& into) override;
    int event_fd() override { return worker_->event_fd(); }
    bool arm() override;

  private:
    void on_message(std::string_view header, std::string_view data);

    const std::shared_ptr<Context> context_;
    const std::string name_;
    const capi::ErrorMode errors_;
    const std::shared_ptr<LocalRegions> regions_;
    const std::shared_ptr<ServedOperations> served_ = std::make_shared<ServedOperations>();
    std::vector<transfer::Notification> inbox_;
    std::optional<Error> receive_error_;
    // Last, so that it goes before what its callbacks write to.
    const std::shared_ptr<Worker> worker_;
    Server server_;
};

}  // namespace pynixlkv::ucx
