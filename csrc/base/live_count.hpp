/// @file
/// Live counts of owners, for the leak tests: the one mutable static that native code may have.
#pragma once

#include <atomic>
#include <cstdint>

namespace pynixlkv {

/// Base of a class whose living objects are counted.
/// @tparam T the class itself
template <class T>
class LiveCount {
  public:
    [[nodiscard]] static std::int64_t live() noexcept {
        return count_.load(std::memory_order_relaxed);
    }

  protected:
    LiveCount() noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
    LiveCount(const LiveCount&) noexcept : LiveCount() {}
    LiveCount(LiveCount&&) noexcept : LiveCount() {}
    LiveCount& operator=(const LiveCount&) noexcept = default;
    LiveCount& operator=(LiveCount&&) noexcept = default;
    ~LiveCount() { count_.fetch_sub(1, std::memory_order_relaxed); }

  private:
    inline static std::atomic<std::int64_t> count_{0};
};

}  // namespace pynixlkv
