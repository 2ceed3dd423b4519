/// @file
/// The messages between agents.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace pynixlkv::ucx {

enum class AmRmaKind : std::uint8_t {
    kOpen,    ///< to the owner: where to send answers; data: a worker's address
    kClose,   ///< to the owner: the connection ends
    kRead,    ///< to the owner; data: address and length of each row
    kWrite,   ///< to the owner; data: a piece
    kOpened,  ///< from the owner: it has a connection too
    kData,    ///< from the owner; data: a piece of a row
    kEnd,     ///< from the owner: a write is complete; with data, why it or a read is refused
    kNote,    ///< a notification; data: the sender's name and the message
    kPing,    ///< tests whether a connection stands; the receiver drops it
};

/// The header of all messages. Byte orders are equal: `connect` refuses other peers.
struct AmRmaHeader {
    AmRmaKind kind;
    std::uint8_t unused[3] = {};
    std::uint32_t row = 0;         ///< of kData: index in the rows of the read
    std::uint64_t token = 0;       ///< not of answers: from the receiver's metadata
    std::uint64_t connection = 0;  ///< a secret of the two ends of one connection
    std::uint64_t xfer = 0;
    std::uint64_t place = 0;  ///< of kData: offset in the row; of kWrite: address
    std::uint64_t total = 0;  ///< of kWrite: bytes of the whole transfer
};

/// The bytes of a header, valid as long as it.
[[nodiscard]] std::string_view make_header(const AmRmaHeader& header);
/// @return nothing if it is the header of another message
[[nodiscard]] std::optional<AmRmaHeader> read_header(std::string_view bytes);

/// A random number that cannot be guessed; never 0.
[[nodiscard]] std::uint64_t new_secret();

}  // namespace pynixlkv::ucx
