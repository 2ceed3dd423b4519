#include "ucx/peer_memory.hpp"

#include <array>
#include <cerrno>

namespace pynixlkv::ucx {

std::size_t length_of(std::span<const iovec> pieces) {
    std::size_t length = 0;
    for (const iovec& piece : pieces) {
        length += piece.iov_len;
    }
    return length;
}

std::optional<PeerMemory> PeerMemory::open(pid_t process, Proof proof) {
    const PeerMemory memory(process, proof);
    return memory.look() == Result::kMoved ? std::optional(memory) : std::nullopt;
}

PeerMemory::Result PeerMemory::look() const {
    std::uint64_t found = 0;
    const iovec here{&found, sizeof found};
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    const iovec there{reinterpret_cast<void*>(proof_.address), sizeof found};
    if (::process_vm_readv(process_, &here, 1, &there, 1, 0) < 0 &&
        (errno == EPERM || errno == ENOSYS)) {
        return Result::kRefused;
    }
    return found == proof_.number ? Result::kMoved : Result::kLost;
}

PeerMemory::Result PeerMemory::move(transfer::Op op, std::span<const iovec> local,
                                    std::span<const iovec> remote) const {
    const bool is_read = op == transfer::Op::kRead;
    if (const Result before = look(); before != Result::kMoved) {
        return before;
    }
    const auto call = is_read ? &::process_vm_readv : &::process_vm_writev;
    const std::size_t length = length_of(local);
    const ssize_t moved =
        call(process_, local.data(), local.size(), remote.data(), remote.size(), 0);
    if (const Result after = look(); after != Result::kMoved) {
        return after;
    }
    return moved == static_cast<ssize_t>(length) ? Result::kMoved : Result::kUnmapped;
}

}  // namespace pynixlkv::ucx
