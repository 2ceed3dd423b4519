#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "base/keep.hpp"

namespace pynixlkv {

/// How many objects of each owning class are alive, which the leak tests read. The counters are the
/// one mutable static of the native code.
class LiveCounters {
  public:
    [[nodiscard]] static std::atomic<std::int64_t>& counter(const char* name) {
        const std::lock_guard lock(instance().mutex_);
        return instance().counters_[name];
    }

    /// Class name -> number of live objects, also for classes that have none now.
    [[nodiscard]] static std::map<std::string, std::int64_t> snapshot() {
        const std::lock_guard lock(instance().mutex_);
        std::map<std::string, std::int64_t> counts;
        for (const auto& [name, count] : instance().counters_) {
            counts.emplace(name, count.load());
        }
        return counts;
    }

  private:
    static LiveCounters& instance() {
        // Never destroyed: objects that outlive static destruction still count themselves.
        static auto& counters = keep_for_ever<LiveCounters>();
        return counters;
    }

    std::mutex mutex_;
    std::map<std::string, std::atomic<std::int64_t>> counters_;
};

/// Base of every owner, which is not copied: `class Agent : LiveCounted<Agent>` with a `static
/// constexpr const char* kLiveName`.
template <class T>
class LiveCounted {
  public:
    LiveCounted(const LiveCounted&) = delete;
    LiveCounted& operator=(const LiveCounted&) = delete;

  protected:
    LiveCounted() noexcept { ++count(); }
    ~LiveCounted() { --count(); }

  private:
    static std::atomic<std::int64_t>& count() {
        static std::atomic<std::int64_t>& counter = LiveCounters::counter(T::kLiveName);
        return counter;
    }
};

}  // namespace pynixlkv
