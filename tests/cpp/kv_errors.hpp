/// @file
/// Checks of errors by their kind and message.
#pragma once

#include <functional>
#include <string>

#include "base/error.hpp"

namespace kv_test {

/// "Kind: message" of the error that `body` throws, or "no error".
inline std::string error_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const pynixlkv::Error& e) {
        return e.kind() + ": " + e.what();
    }
    return "no error";
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace kv_test

#define CHECK_ERROR(part, ...)                                                               \
    do {                                                                                     \
        const std::string seen = kv_test::error_of([&] { (void)(__VA_ARGS__); });            \
        if (!kv_test::contains(seen, part)) check::fail(__FILE__, __LINE__, "saw: " + seen); \
    } while (false)
