/// @file
/// Descriptors and child processes. UCX opens its sockets without close-on-exec, and a child that
/// holds sockets keeps the ports and the connections of a dead process open.
#pragma once

#include <cstdint>

namespace pynixlkv::transfer {

/// Set close-on-exec on the sockets that are registered with an epoll without it, as UCX's are; to
/// be called repeatedly. Children that are forked after the first call let go of these sockets, and
/// of those of agents.
/// @return how many of their connections have ended so far
std::uint64_t keep_from_children();

}  // namespace pynixlkv::transfer
