/// @file
/// Wakes the agents of the same host that are asleep.
///
/// The libraries give no event when a notification arrives, so a sleeping agent would have to look
/// for one every millisecond, which costs a few percent of a core in wake-ups alone. Hence agents
/// of one host ring each other when they have sent something: an empty datagram to a socket whose
/// abstract address is made from the agent's incarnation. A ring carries no meaning beyond "look
/// now"; if it gets lost, or the sender is on another host, the agent still looks at its own pace.
#pragma once

#include <sys/un.h>

#include <string>

namespace pynixlkv::transfer {

class Doorbell {
  public:
    /// @param incarnation random bytes that peers know from the agent's hello
    /// @throws Error("StateError") when the process is out of descriptors
    explicit Doorbell(const std::string& incarnation);
    Doorbell(const Doorbell&) = delete;
    Doorbell& operator=(const Doorbell&) = delete;
    ~Doorbell();

    /// Readable when somebody has rung.
    [[nodiscard]] int fd() const noexcept { return fd_; }
    /// Whether somebody has rung since the last call.
    bool take() const noexcept;
    /// Ring at another agent. Never blocks.
    /// @return whether there is a doorbell of that incarnation within reach
    bool ring(const std::string& incarnation) const noexcept;

  private:
    int fd_;
};

}  // namespace pynixlkv::transfer
