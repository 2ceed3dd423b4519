/// @file
/// Many pieces of the same length moved as one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ucx/request.hpp"

namespace pynixlkv::ucx {

/// Offsets of a piece from the first bytes of both memories.
struct Place {
    std::uint64_t local;
    std::uint64_t remote;
};

/// Posts its pieces in order, with a limited number in flight. Externally synchronised, see Worker.
/// Dropped before its end it posts nothing more; the pieces in flight live on at the endpoint.
class Batch {
  public:
    /// @param remote address at the peer from which the offsets count
    /// @param window most pieces in flight at a time, at least 1
    /// @param is_timed whether to record when each piece is posted
    Batch(const std::shared_ptr<MemoryHandle>& local, std::shared_ptr<RemoteKey> key,
          std::uint64_t remote, std::vector<Place> places, std::uint64_t length, transfer::Op op,
          std::size_t window, bool is_timed)
        : local_(local),
          key_(std::move(key)),
          remote_(remote),
          places_(std::move(places)),
          length_(length),
          op_(op),
          window_(window),
          is_timed_(is_timed),
          request_(Request::start(key_->endpoint(), call_of(op), {local_, key_},
                                  [this](Completion& completion) { completion_ = &completion; })) {}

    /// When each piece was posted and when all had ended, in nanoseconds of the steady clock.
    [[nodiscard]] const std::vector<std::int64_t>& times() const noexcept { return times_; }
    [[nodiscard]] Worker& worker() const noexcept { return *key_->endpoint()->worker(); }

    /// Fill the window.
    /// @return whether all bytes have moved and, of puts, are at the peer
    /// @throws UcxError once a piece has failed and none is in flight
    [[nodiscard]] bool advance() {
        Endpoint& endpoint = *key_->endpoint();
        for (; next_ < places_.size() && completion_->pending() < window_ &&
               completion_->status() == Status::kOk;
             ++next_) {
            note_time();
            const Place& place = places_[next_];
            endpoint.move(*completion_, op_, local_->address() + place.local, length_,
                          local_->handle(), remote_ + place.remote, *key_);
        }
        if (!request_->check() || next_ < places_.size()) {
            return false;
        }
        if (times_.size() == places_.size()) {
            note_time();
        }
        if (op_ == transfer::Op::kWrite && !is_flushed_) {
            is_flushed_ = true;
            endpoint.flush(*completion_);
            return request_->check();
        }
        return true;
    }

  private:
    void note_time() {
        if (is_timed_) {
            times_.push_back(
                std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch())
                    .count());
        }
    }

    const std::shared_ptr<MemoryHandle> local_;
    const std::shared_ptr<RemoteKey> key_;
    const std::uint64_t remote_;
    const std::vector<Place> places_;
    const std::uint64_t length_;
    const transfer::Op op_;
    const std::size_t window_;
    const bool is_timed_;
    Completion* completion_ = nullptr;  // of the request
    const std::shared_ptr<Request> request_;
    std::vector<std::int64_t> times_;
    std::size_t next_ = 0;
    bool is_flushed_ = false;
};

}  // namespace pynixlkv::ucx
