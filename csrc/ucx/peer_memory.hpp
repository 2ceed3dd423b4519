/// @file
/// Memory of another process of this host, through the kernel.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "transfer/types.hpp"

namespace pynixlkv::ucx {

/// Bytes of all pieces.
[[nodiscard]] std::size_t length_of(std::span<const iovec> pieces);

/// A secret number in a process's memory shows that it is still this process. Its id alone does
/// not: another process can have it by now, or the same one can have executed another program.
class PeerMemory {
  public:
    struct Proof {
        std::uint64_t address;
        std::uint64_t number;
    };
    /// Most pieces of one call: IOV_MAX.
    static constexpr std::size_t kMaxPieces = 1024;

    /// @return nothing if the system does not let this process copy, or the proof is not there
    [[nodiscard]] static std::optional<PeerMemory> open(pid_t process, Proof proof);

    enum class Result : std::uint8_t { kMoved, kLost, kRefused, kUnmapped };
    /// Move pieces in order, in one system call. Nothing else of this process is touched, and
    /// memory that is not mapped does no harm on either side.
    /// @param local, remote pieces of equal lengths, at most kMaxPieces
    [[nodiscard]] Result move(transfer::Op op, std::span<const iovec> local,
                              std::span<const iovec> remote) const;
    [[nodiscard]] pid_t process() const noexcept { return process_; }

  private:
    PeerMemory(pid_t process, Proof proof) noexcept : process_(process), proof_(proof) {}
    /// kMoved if the process is the peer.
    [[nodiscard]] Result look() const;

    pid_t process_;
    Proof proof_;
};

}  // namespace pynixlkv::ucx
