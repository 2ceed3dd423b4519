/// @file
/// Leaving and taking the GIL in threads that the end of the interpreter may overtake.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace pynixlkv::bindings {

/// Calls a function that takes the GIL. Once the interpreter ends, Python before 3.14 answers with
/// `pthread_exit`, whose unwinding aborts the process in the first frame that may not throw. The
/// thread sleeps instead until the process is gone.
template <class Take>
[[gnu::noinline]] auto take_gil(Take take) {
    struct Park {
        bool is_unwinding = true;
        ~Park() {
            while (is_unwinding) {
                ::pause();
            }
        }
    } park;
    auto taken = take();
    park.is_unwinding = false;
    return taken;
}

/// Runs the rest of a scope without the GIL.
class GilRelease {
  public:
    GilRelease() : thread_(PyEval_SaveThread()) {}
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;
    ~GilRelease() {
        (void)take_gil([this] {
            PyEval_RestoreThread(thread_);
            return true;
        });
    }

  private:
    PyThreadState* const thread_;
};

}  // namespace pynixlkv::bindings
