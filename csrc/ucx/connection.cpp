#include "ucx/connection.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/keep.hpp"
#include "base/text.hpp"
#include "ucx/clients.hpp"
#include "ucx/lane.hpp"

namespace pynixlkv::ucx {

namespace {

/// Longest wait for the last notifications to leave before a connection closes.
constexpr auto kLeaveDeadline = std::chrono::milliseconds(100);
/// What a lane has to do before a further one is opened, and before transfers wait for one. The
/// latter keeps 100 Gbit/s busy for 2.5 ms.
constexpr std::uint64_t kMuchOfLane = 8U << 20U;
constexpr std::uint64_t kMostOfLane = 32U << 20U;
constexpr std::size_t kMaxAddedLanes = 3;

}  // namespace

void throw_failure(const Endpoint& endpoint, Status status, const char* call,
                   const std::string& detail) {
    const NativeError error = make_error(endpoint.failure().value_or(status), call, detail);
    if (endpoint.failure() || is_connection_failure(status)) {
        throw transfer::ConnectionLost(error);
    }
    throw NativeError(error);
}

Outbox::~Outbox() {
    if (num_waiting() > 0) {
        keep_for_ever<std::deque<std::unique_ptr<Message>>>(std::move(messages_));
    }
}

void Outbox::send(std::string_view header, std::string data, const std::string& peer) {
    (void)num_waiting();
    auto& message = *messages_.emplace_back(
        std::make_unique<Message>(endpoint_->worker()->library(), std::move(data)));
    endpoint_->send(message.completion, header, message.data);
    if (const Status status = message.completion.status(); status != Status::kOk) {
        throw_failure(*endpoint_, status, "ucp_am_send_nbx",
                      text("a message to peer '", peer, "'"));
    }
}

std::size_t Outbox::num_waiting() {
    // They nearly always complete in order; those that do not are dropped a little later.
    while (!messages_.empty() && messages_.front()->completion.is_quiet()) {
        messages_.pop_front();
    }
    return messages_.size();
}

UcxConnection::UcxConnection(std::shared_ptr<Endpoint> to,
                             std::shared_ptr<const RemoteRegions> keys, std::string peer,
                             std::uint64_t its_token, std::shared_ptr<Unopened> unopened,
                             std::shared_ptr<Endpoint> spare, std::optional<PeerMemory> its_memory)
    : name(std::move(peer)),
      endpoint(std::move(to)),
      regions(std::move(keys)),
      token(its_token),
      number(new_secret()),
      is_one_sided(endpoint->is_one_sided()),
      memory(its_memory),
      unopened_(std::move(unopened)),
      spare_(std::move(spare)),
      outbox_(endpoint) {
    introduce();
}

void UcxConnection::introduce() {
    const bool is_needed = may_be_served() || endpoint->errors() == capi::kErrorPeer;
    if (is_needed && !is_introduced_) {
        send({.kind = MessageKind::kOpen}, endpoint->worker()->address());
        unopened_->insert(number);
        is_introduced_ = true;
    }
}

std::vector<std::string> UcxConnection::transports() const {
    std::vector<std::string> names = endpoint->transports();
    if (memory) {
        names.emplace_back("process_vm");
    } else if (!lanes.empty()) {
        names.emplace_back("lane");
    }
    return names;
}

std::shared_ptr<OwnLane> UcxConnection::lane() {
    std::erase_if(lanes, [](const auto& lane) { return lane->is_broken(); });
    const auto ready =
        std::find_if(lanes.begin(), lanes.end(), [](const auto& lane) { return lane->is_ready(); });
    if (lanes.empty()) {
        throw transfer::ConnectionLost(
            make_error(Status::kConnectionReset, "connect",
                       text("no connection for the bytes of host memory to peer '", name,
                            "' stands, beside UCX's own: do firewalls let the peer's ports through "
                            "(UCX_TCP_PORT_RANGE), and do both sides use the same networks "
                            "(UCX_NET_DEVICES)?")));
    }
    if (ready == lanes.end()) {
        return nullptr;
    }
    std::erase_if(lanes,
                  [place = (*ready)->place()](const auto& lane) { return lane->place() != place; });
    const auto cost = [](const auto& lane) {
        return lane->is_ready() ? lane->left() : std::numeric_limits<std::uint64_t>::max();
    };
    const auto idlest = *std::ranges::min_element(lanes, {}, cost);
    if (add_lane && idlest->left() >= kMuchOfLane && num_added_lanes_ < kMaxAddedLanes) {
        ++num_added_lanes_;
        if (auto lane = add_lane(*idlest)) {
            lanes.push_back(std::move(lane));
        }
    }
    return idlest->left() < kMostOfLane ? idlest : nullptr;
}

void UcxConnection::refresh(std::shared_ptr<const RemoteRegions> keys) {
    regions = std::move(keys);
    introduce();
}

UcxConnection::~UcxConnection() {
    if (is_introduced_ && !endpoint->failure()) {
        progress_until(kLeaveDeadline, [this] { return !unopened_->contains(number); });
        try {
            send({.kind = MessageKind::kClose}, {});
        } catch (const NativeError&) {
            // The peer notices the end of the connection by itself.
        }
    }
    progress_until(kLeaveDeadline, [this] { return is_quiet(); });
    unopened_->erase(number);
    regions.reset();
    endpoint->close();
}

UcxXfer::UcxXfer(UcxConnection& connection, const LocalRegions& local_regions, transfer::Op op,
                 const transfer::DescriptorPairs& rows)
    : connection_(connection),
      endpoint_(connection.endpoint),
      regions_(connection.regions),
      op_(op),
      completion_(endpoint_->worker()->library()) {
    const LocalRegion* local = nullptr;
    const RemoteRegion* remote = nullptr;
    parts_.reserve(rows.local.size());
    for (std::size_t i = 0; i < rows.local.size(); ++i) {
        (void)local_regions.find(rows.local[i], local);
        parts_.push_back({rows.local[i].address, rows.remote[i].address, rows.local[i].length,
                          local->memory->handle(), &regions_->find(rows.remote[i], remote),
                          local->is_fragile});
    }
}

std::string UcxXfer::what() const {
    return text(parts_.size(), " rows of peer '", connection_.name, "'");
}

}  // namespace pynixlkv::ucx
