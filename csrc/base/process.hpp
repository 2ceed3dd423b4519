#pragma once

#include <pthread.h>

#include <atomic>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv {

/// The process in which an object was made. Asking the system for the process id takes longer than
/// polling a finished transfer does, hence a fork counter that every child increments.
class ProcessMark {
  public:
    ProcessMark() noexcept : forks_(forks().load(std::memory_order_relaxed)) {}

    /// False in a forked child of the process that made the object.
    [[nodiscard]] bool is_here() const noexcept {
        return forks_ == forks().load(std::memory_order_relaxed);
    }

    /// @throws Error ForkError in a forked child
    void require_here(const char* what) const {
        if (!is_here()) {
            throw Error("ForkError", text(what,
                                          " belongs to the parent process and cannot be used in a "
                                          "forked child; make a new one after the fork"));
        }
    }

    /// The same for a library, whose own threads a forked child does not have.
    void require_here_since_first_use(const char* library) const {
        if (!is_here()) {
            throw Error("ForkError",
                        text(library,
                             " was in use before fork() and cannot be used in the child; start it "
                             "with the method `spawn`, or fork before the first agent is made"));
        }
    }

  private:
    static std::atomic<unsigned>& forks() noexcept {
        static std::atomic<unsigned> count{0};
        static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++count; });
        (void)registered;
        return count;
    }

    unsigned forks_;
};

}  // namespace pynixlkv
