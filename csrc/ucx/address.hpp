/// @file
/// What can be checked of the address of a peer's worker before UCX reads it, which does so without
/// knowing its length.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pynixlkv::ucx {

/// Whether UCX can read an address safely: its parts add up to its length, and the transports that
/// are also in this process's address have parts of the same sizes. Contents are not checked.
[[nodiscard]] bool is_plausible_address(std::string_view address, std::string_view own);

/// What names a worker in its address, which may change while the worker lives.
[[nodiscard]] std::string_view worker_id(std::string_view address);

/// The address without the transport that names a process of this host (cma, which reads and writes
/// the memory of whatever process that is), unless it names the given one.
[[nodiscard]] std::string without_other_processes(std::string_view address, std::string_view own,
                                                  std::optional<pid_t> process);

/// The address without tcp's internet addresses that no route leads to: each time that it fails to
/// connect to one, UCX (1.22, 1.23) leaves a socket open.
[[nodiscard]] std::string without_unroutable(std::string_view address, std::string_view own);

/// The internet addresses of the network devices that UCX uses for tcp, as bytes.
[[nodiscard]] std::vector<std::string> network_addresses(std::string_view own);

/// Whether both addresses have that transport, for processes of one host.
[[nodiscard]] bool share_cma(std::string_view address, std::string_view own);

}  // namespace pynixlkv::ucx
