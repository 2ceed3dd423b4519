#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include "base/error.hpp"

namespace pynixlkv::transfer {

/// An eventfd: a thread sleeps on it, others wake that thread.
class EventFd {
  public:
    /// @throws Error("StateError") when the process is out of descriptors
    EventFd() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (fd_ < 0) {
            throw Error("StateError", "eventfd failed; the process may be out of descriptors");
        }
    }
    EventFd(const EventFd&) = delete;
    EventFd& operator=(const EventFd&) = delete;
    ~EventFd() { ::close(fd_); }

    [[nodiscard]] int fd() const noexcept { return fd_; }
    void set() const noexcept { (void)::eventfd_write(fd_, 1); }
    void clear() const noexcept {
        eventfd_t count = 0;
        (void)::eventfd_read(fd_, &count);
    }

  private:
    int fd_;
};

}  // namespace pynixlkv::transfer
