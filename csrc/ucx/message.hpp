/// @file
/// The messages between agents.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_set>

namespace pynixlkv::ucx {

enum class MessageKind : std::uint8_t {
    kOpen,    ///< the sender has a connection; data: its worker's address
    kClose,   ///< that connection ends
    kOpened,  ///< the receiver of a kOpen has one too
    kNote,    ///< a notification; data: the sender's name and the message
    kPing,    ///< tests whether a connection stands; the receiver drops it
};

/// The header of all messages. Byte orders are equal: `connect` refuses other peers.
struct MessageHeader {
    MessageKind kind;
    std::uint8_t unused[7] = {};
    std::uint64_t token = 0;       ///< not of kOpened: from the receiver's metadata
    std::uint64_t connection = 0;  ///< a secret of the two ends of one connection
};

/// The bytes of a header, valid as long as it.
[[nodiscard]] std::string_view make_header(const MessageHeader& header);
/// @return nothing if it is the header of another message
[[nodiscard]] std::optional<MessageHeader> read_header(std::string_view bytes);

/// Connections whose kOpen has not been answered. One that closes earlier leaves its sockets to UCX
/// for ever.
using Unopened = std::unordered_set<std::uint64_t>;

/// A random number that cannot be guessed; never 0.
[[nodiscard]] std::uint64_t new_secret();

}  // namespace pynixlkv::ucx
