/// @file
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "transfer/command_queue.hpp"
#include "transfer/inbox.hpp"
#include "transfer/options.hpp"
#include "transfer/registrations.hpp"
#include "transfer/wake_socket.hpp"

namespace pynixlkv::transfer {

/// What an agent's thread and its callers share. Both hold a reference, so that neither has to wait
/// for the other to go away.
struct Shared {
    Shared(std::string agent, AgentOptions agent_options)
        : name(std::move(agent)),
          options(std::move(agent_options)),
          wake_socket(options.incarnation),
          queue(name),
          registrations(name) {}

    const std::string name;
    const AgentOptions options;
    const WakeSocket wake_socket;
    CommandQueue queue;
    Inbox inbox;
    Registrations registrations;
    std::atomic<std::uint64_t> next_id{1};
    std::atomic<std::size_t> num_quarantined{0};
    std::atomic<std::size_t> num_running{0};
};

}  // namespace pynixlkv::transfer
