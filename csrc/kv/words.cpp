#include "kv/words.hpp"

#include "base/error.hpp"

namespace pynixlkv::kv {

void fail(const char* kind, const std::string& message) {
    throw Error(kind, message);
}

std::uint64_t add(std::uint64_t a, std::uint64_t b) {
    if (a > kMaxWord || b > kMaxWord - a) {
        layout_error("address arithmetic overflows: ", a, " + ", b, " is above 2**60 - 1");
    }
    return a + b;
}

std::uint64_t mul(std::uint64_t a, std::uint64_t b) {
    if (b != 0 && a > kMaxWord / b) {
        layout_error("address arithmetic overflows: ", a, " * ", b, " is above 2**60 - 1");
    }
    return a * b;
}

std::uint64_t WordReader::next(const char* what, std::uint64_t low, std::uint64_t high) {
    if (position_ == words_.size()) {
        layout_error(subject_, " ends after ", position_, " words, before its ", what);
    }
    const std::uint64_t value = words_[position_++];
    if (value < low || value > high) {
        layout_error(subject_, ": ", what, " is ", value, ", must be from ", low, " to ", high);
    }
    return value;
}

std::size_t WordReader::count(const char* what, std::size_t words_each, std::uint64_t low) {
    const std::uint64_t most = (words_.size() - position_) / words_each;
    return static_cast<std::size_t>(next(what, low, most));
}

void WordReader::finish() const {
    if (position_ != words_.size()) {
        layout_error(subject_, " has ", words_.size() - position_, " words too many");
    }
}

}  // namespace pynixlkv::kv
