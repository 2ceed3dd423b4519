/// @file
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/live_count.hpp"
#include "transfer/memory_map.hpp"
#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// Memory that an agent has registered and that transfers may use.
class Registration : LiveCounted<Registration> {
  public:
    static constexpr const char* kLiveName = "transfer.Registration";

    Registration(std::uint64_t id, std::vector<Span> spans) : id_(id), spans_(std::move(spans)) {}

    [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
    [[nodiscard]] const std::vector<Span>& spans() const noexcept { return spans_; }
    /// Number of transfers that are not quiet and touch this memory.
    [[nodiscard]] std::size_t uses() const noexcept { return uses_.load(); }
    [[nodiscard]] bool is_open() const noexcept { return open_.load(); }

    void begin_use() noexcept { uses_.fetch_add(1); }
    void end_use() noexcept { uses_.fetch_sub(1); }
    void close() noexcept { open_.store(false); }

  private:
    const std::uint64_t id_;
    const std::vector<Span> spans_;
    std::atomic<std::size_t> uses_{0};
    std::atomic<bool> open_{true};
};

/// The registrations that a transfer uses, until it lets go of them.
class Uses {
  public:
    Uses() = default;
    explicit Uses(std::vector<std::shared_ptr<Registration>> registrations)
        : registrations_(std::move(registrations)) {
        for (const auto& registration : registrations_) {
            registration->begin_use();
        }
    }
    Uses(Uses&& other) noexcept : registrations_(std::exchange(other.registrations_, {})) {}
    Uses& operator=(Uses&& other) noexcept {
        registrations_.swap(other.registrations_);
        return *this;
    }
    Uses(const Uses&) = delete;
    Uses& operator=(const Uses&) = delete;
    ~Uses() { end(); }

    void end() noexcept {
        for (const auto& registration : std::exchange(registrations_, {})) {
            registration->end_use();
        }
    }

  private:
    std::vector<std::shared_ptr<Registration>> registrations_;
};

/// The registered memory of one agent. Thread-safe.
class Registrations {
  public:
    explicit Registrations(const std::string& agent)
        : agent_(agent), whose_("of agent '" + agent + "'") {}

    /// Reserve the spans of a registration, which nothing can use before enable().
    /// @throws Error("AlreadyRegisteredError") where one overlaps registered memory
    void add(const Registration& registration);
    void enable(const std::shared_ptr<Registration>& registration);
    void abort(const Registration& registration);
    /// @throws Error("ClosedError") if it is not here, Error("RegistrationInUseError") while used
    void remove(Registration& registration);
    void close_all();

    /// @throws Error("NotRegisteredError") unless every row lies in registered memory
    void check(std::span<const Row> rows) const;
    /// The same, and begin to use the registrations that the rows lie in.
    [[nodiscard]] std::pair<Memory, Uses> use(std::span<const Row> rows) const;

  private:
    const std::string agent_;
    const std::string whose_;
    mutable std::shared_mutex mutex_;  // guards what follows
    MemoryMap memory_;
    std::map<std::uint64_t, std::shared_ptr<Registration>> by_id_;
};

}  // namespace pynixlkv::transfer
