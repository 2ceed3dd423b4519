/// @file
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "transfer/driver.hpp"

namespace pynixlkv::transfer {

struct AgentOptions {
    /// Random bytes that tell this agent from others of its name; peers wake it by them.
    std::string incarnation;
    /// Longest sleep of an idle agent when senders may be unable to wake it: the bound on how late
    /// their notifications are seen.
    std::chrono::microseconds poll{1000};
    /// The same when all known senders wake the agent, or the library gives events.
    std::chrono::microseconds woken_poll{20000};
    /// Most bytes and rows of one native request; larger transfers are several requests, so that
    /// deadlines are kept and other transfers get their turn.
    std::uint64_t batch_bytes = 16U << 20U;
    std::size_t batch_rows = 4096;
    /// Most native requests in flight at once.
    std::size_t window = 64;
};

using DriverFactory = std::function<std::unique_ptr<Driver>()>;

}  // namespace pynixlkv::transfer
