/// @file
/// The little that the C++ tests need: named cases, checks that say what they saw, an exit status.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace check {

struct Case {
    std::string name;
    std::function<void()> body;
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

struct Register {
    Register(const char* name, std::function<void()> body) {
        cases().push_back({name, std::move(body)});
    }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    std::ostringstream out;
    out << file << ':' << line << ": " << what;
    throw std::runtime_error(out.str());
}

template <class A, class B>
void equal(const char* file, int line, const char* text, const A& a, const B& b) {
    if (!(a == b)) {
        std::ostringstream out;
        out << text << ": " << a << " != " << b;
        fail(file, line, out.str());
    }
}

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

inline int run() {
    int failed = 0;
    for (const Case& c : cases()) {
        try {
            c.body();
            std::printf("ok    %s\n", c.name.c_str());
        } catch (const std::exception& e) {
            ++failed;
            std::printf("FAIL  %s\n      %s\n", c.name.c_str(), e.what());
        }
    }
    std::printf("%zu cases, %d failed\n", cases().size(), failed);
    return failed == 0 && !cases().empty() ? 0 : 1;
}

}  // namespace check

#define CHECK_CONCAT2(a, b) a##b
#define CHECK_CONCAT(a, b) CHECK_CONCAT2(a, b)
#define TEST_CASE(name)                                                                       \
    static void CHECK_CONCAT(test_, __LINE__)();                                              \
    static const check::Register CHECK_CONCAT(reg_, __LINE__){name,                           \
                                                              CHECK_CONCAT(test_, __LINE__)}; \
    static void CHECK_CONCAT(test_, __LINE__)()
#define CHECK(cond)                                          \
    do {                                                     \
        if (!(cond)) check::fail(__FILE__, __LINE__, #cond); \
    } while (false)
#define CHECK_EQ(a, b) check::equal(__FILE__, __LINE__, #a " == " #b, (a), (b))
#define CHECK_THROWS(type, expr)                                                     \
    do {                                                                             \
        bool thrown = false;                                                         \
        try {                                                                        \
            (void)(expr);                                                            \
        } catch (const type&) {                                                      \
            thrown = true;                                                           \
        }                                                                            \
        if (!thrown) check::fail(__FILE__, __LINE__, #expr " did not throw " #type); \
    } while (false)
#define CHECK_ERROR(part, ...)                                                             \
    do {                                                                                   \
        const std::string seen = check::error_of([&] { (void)(__VA_ARGS__); });            \
        if (!check::contains(seen, part)) check::fail(__FILE__, __LINE__, "saw: " + seen); \
    } while (false)
