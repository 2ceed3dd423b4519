/// @file
/// Waiting on behalf of Python: without the GIL, and so that Ctrl-C interrupts.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>

#include "bindings/py_gil.hpp"

namespace pynixlkv::bindings {

/// Longest wait between two checks for signals such as Ctrl-C.
inline constexpr auto kSignalCheck = std::chrono::milliseconds(50);

/// Seconds as a duration: "for ever" becomes decades, which the clock can still add to now; a
/// negative number or NaN becomes 0.
inline std::chrono::steady_clock::duration duration(double seconds) {
    constexpr double kLongest = 1e9;
    return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
        std::chrono::duration<double>(seconds > 0 ? std::min(seconds, kLongest) : 0));
}

inline std::chrono::steady_clock::time_point after(double seconds) {
    return std::chrono::steady_clock::now() + duration(seconds);
}

/// Wait in slices without the GIL.
/// @param wait_until waits until a time and returns whether its condition holds
template <class F>
bool wait_in_slices(double seconds, F wait_until) {
    const auto until = after(seconds);
    for (;;) {
        bool reached = false;
        const auto slice = std::min(until, std::chrono::steady_clock::now() + kSignalCheck);
        {
            const GilRelease release;
            reached = wait_until(slice);
        }
        if (reached || slice == until) {
            return reached;
        }
        if (PyErr_CheckSignals() != 0) {
            throw pybind11::error_already_set();
        }
    }
}

}  // namespace pynixlkv::bindings
