#pragma once

#include <utility>

namespace pynixlkv {

/// Move-only owner of a handle of a C library. There is deliberately no way to let a C call write
/// into it: some of them leave rubbish in their out argument when they fail.
/// @tparam Handle an opaque pointer type
/// @tparam Destroy callable that frees a handle; its result is ignored
template <class Handle, class Destroy>
class UniqueHandle {
  public:
    UniqueHandle() = default;
    /// Take over a handle; do this at once after the call that made it.
    UniqueHandle(Handle handle, Destroy destroy) noexcept : handle_(handle), destroy_(destroy) {}
    UniqueHandle(UniqueHandle&& other) noexcept
        : handle_(std::exchange(other.handle_, nullptr)), destroy_(other.destroy_) {}
    UniqueHandle& operator=(UniqueHandle&& other) noexcept {
        if (this != &other) {
            reset();
            handle_ = std::exchange(other.handle_, nullptr);
            destroy_ = other.destroy_;
        }
        return *this;
    }
    ~UniqueHandle() { reset(); }

    [[nodiscard]] Handle get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

    /// Give the handle up without freeing it.
    Handle release() noexcept { return std::exchange(handle_, nullptr); }

    void reset() noexcept {
        if (handle_ != nullptr) {
            destroy_(std::exchange(handle_, nullptr));
        }
    }

  private:
    Handle handle_ = nullptr;
    Destroy destroy_{};
};

}  // namespace pynixlkv
