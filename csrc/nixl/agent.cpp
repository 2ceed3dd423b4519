#include "nixl/agent.hpp"

#include <algorithm>
#include <limits>
#include <thread>

#include "base/error.hpp"
#include "base/keep.hpp"
#include "nixl/prepared_list.hpp"
#include "nixl/registration.hpp"
#include "nixl/xfer_request.hpp"

namespace pynixlkv::nixl {

namespace {

constexpr Duration kPollInterval = std::chrono::microseconds(200);
constexpr std::uint64_t kMaxIndex = std::numeric_limits<std::int32_t>::max();

const std::string kServer =
    "the metadata server (NIXL_ETCD_ENDPOINTS or NIXL_TCPSTORE_ENDPOINT names one)";

/// Keep an agent whose requests never became quiet reachable for ever.
void bury(std::shared_ptr<Agent> agent) {
    struct Graveyard {
        std::mutex mutex;
        std::vector<std::shared_ptr<Agent>> agents;
    };
    static auto& graveyard = keep_for_ever<Graveyard>();
    const std::lock_guard lock(graveyard.mutex);
    graveyard.agents.push_back(std::move(agent));
}

void require_rows(Rows rows, const char* side, bool allow_zero_length) {
    if (rows.empty()) {
        throw Error("ConfigError", text("the ", side, " descriptors are empty"));
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Descriptor& row = rows[i];
        if (row.length == 0 && !allow_zero_length) {
            throw Error("ConfigError",
                        text(side, " descriptor ", i, " (", row.str(), ") has zero length"));
        }
        if (row.length > std::numeric_limits<std::uint64_t>::max() - row.address) {
            throw Error("ConfigError", text(side, " descriptor ", i, " (", row.str(),
                                            ") goes beyond the end of the address space"));
        }
    }
}

/// Whether a run goes beyond the end of the address space.
bool wraps_around(const Run& run) {
    const std::uint64_t room = std::numeric_limits<std::uint64_t>::max() - run.row.address;
    return run.row.length > room ||
           (run.stride != 0 && run.count - 1 > (room - run.row.length) / run.stride);
}

/// Whether runs are so few that to ask NIXL about each costs little beside each row: it takes rows
/// one by one.
bool are_few(Runs runs, std::size_t num_rows) {
    return runs.size() * 8 < num_rows;
}

std::vector<Descriptor> bounds_of(Runs runs) {
    std::vector<Descriptor> bounds(runs.size());
    std::ranges::transform(runs, bounds.begin(), [](const Run& run) { return run.bounds(); });
    return bounds;
}

void require_runs(std::vector<Run>& runs, const char* side) {
    std::erase_if(runs, [](const Run& run) { return run.count == 0; });
    std::uint64_t total = 0;
    for (const Run& run : runs) {
        const Descriptor first = run.row;
        require_rows({&first, 1}, side, false);
        if (wraps_around(run)) {
            throw Error("ConfigError", text("the ", side, " descriptors from ", first.str(), ", ",
                                            run.count, " in steps of ", run.stride,
                                            ", go beyond the end of the address space"));
        }
        total = run.count > kMaxIndex - total ? kMaxIndex + 1 : total + run.count;
        if (total > kMaxIndex) {
            throw Error("ConfigError", text("there are more ", side, " descriptors than ",
                                            kMaxIndex, ", the largest index"));
        }
    }
    if (runs.empty()) {
        throw Error("ConfigError", text("the ", side, " descriptors are empty"));
    }
}

}  // namespace

// ---- life

Agent::Agent(std::shared_ptr<const Library> library, std::string name, const AgentConfig& config)
    : handle_(std::make_shared<AgentHandle>(std::move(library), std::move(name), config)),
      calls_run_alone_(config.thread_sync == ThreadSync::kNone) {}

bool Agent::close(Duration patience) {
    if (!is_here() || is_closed_) {
        is_closed_ = true;
        return num_quarantined_ == 0;
    }
    if (const std::size_t requests = num_requests_; requests != 0) {
        throw Error("StateError", text("agent '", name(), "' cannot be closed: ", requests,
                                       " of its requests are not released"));
    }
    drain(patience);
    std::vector<std::shared_ptr<void>> stuck;  // goes after the locks
    const std::unique_lock alone(calls_);
    if (is_closed_) {
        return num_quarantined_ == 0;
    }
    if (num_quarantined_ != 0) {
        is_closed_ = true;
        handle_->abandon();
        bury(shared_from_this());
        return false;
    }
    const std::lock_guard lock(books_);
    const std::size_t registrations = registrations_.size();
    const std::size_t prepared = num_prepared_;
    const std::size_t requests = num_requests_;
    if (registrations + prepared + requests != 0) {
        throw Error("StateError", text("agent '", name(), "' cannot be closed: ", registrations,
                                       " registrations, ", prepared, " prepared lists and ",
                                       requests, " requests are not released"));
    }
    is_closed_ = true;
    backends_.clear();
    stuck.swap(stuck_);
    handle_->destroy();
    return true;
}

template <class Map>
auto Agent::alive(const Map& made) const {
    std::vector<std::shared_ptr<typename Map::mapped_type::element_type>> result;
    const std::lock_guard lock(books_);
    for (const auto& [key, weak] : made) {
        if (auto strong = weak.lock()) {
            result.push_back(std::move(strong));
        }
    }
    return result;
}

bool Agent::end(Duration patience) {
    if (!is_here() || is_closed_) {
        return close(Duration::zero());
    }
    const auto deadline = std::chrono::steady_clock::now() + patience;
    const auto left = [&] {
        return std::max<Duration>(Duration::zero(), deadline - std::chrono::steady_clock::now());
    };
    for (const auto& request : alive(requests_)) {
        if (!request->is_released()) {
            request->release(left());
        }
    }
    if (drain(left()) != 0) {
        return close(Duration::zero());
    }
    for (const auto& list : alive(prepared_)) {
        if (!list->is_released()) {
            list->release();
        } else {
            list->end_use();
        }
    }
    for (const auto& registration : alive(registrations_)) {
        if (!registration->is_released()) {
            registration->release();
        }
    }
    return close(Duration::zero());
}

std::size_t Agent::reap() {
    if (num_quarantined_ == 0) {
        return 0;
    }
    std::vector<std::unique_ptr<XferBody>> quiet;  // freed after the locks: may end registrations
    const Call call(*this, "get_xfer_status");
    const std::lock_guard lock(books_);
    quiet.reserve(quarantined_.size());
    std::erase_if(quarantined_, [&](std::unique_ptr<XferBody>& body) {
        if (body->native.poll() == Status::kInProgress ||
            body->native.release() != Status::kSuccess) {
            return false;
        }
        quiet.push_back(std::move(body));
        return true;
    });
    num_quarantined_ = quarantined_.size();
    return quarantined_.size();
}

std::size_t Agent::drain(Duration patience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    std::size_t left = reap();
    while (left != 0 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(kPollInterval);
        left = reap();
    }
    return left;
}

void Agent::quarantine(std::unique_ptr<XferBody> body) noexcept {
    const std::lock_guard lock(books_);
    running_.erase(body.get());
    try {
        quarantined_.push_back(std::move(body));
        num_quarantined_ = quarantined_.size();
    } catch (...) {
        // Out of memory: better lost than freed under a running transfer.
        (void)body.release();  // NOLINT(bugprone-unused-return-value)
    }
}

// ---- calls

Agent::Call::Call(const Agent& agent, const char* call, std::mutex* object)
    : device_(agent.handle_->devices().enter()) {
    agent.handle_->process().require_here("a NIXL agent");
    if (agent.calls_run_alone_) {
        alone_ = std::unique_lock(agent.calls_);
    } else {
        shared_ = std::shared_lock(agent.calls_);
        if (object != nullptr) {
            object_ = std::unique_lock(*object);
        }
    }
    if (agent.is_closed_) {
        throw Error("ClosedError", text(call, ": agent '", agent.name(), "' is closed"));
    }
}

Agent::Call::Call(const Agent& agent, std::mutex& object, std::try_to_lock_t /*unused*/) noexcept
    : device_(agent.handle_->devices().enter()) {
    if (!agent.is_here() || agent.is_closed_) {
        return;
    }
    if (agent.calls_run_alone_) {
        alone_ = std::unique_lock(agent.calls_, std::try_to_lock);
    } else {
        shared_ = std::shared_lock(agent.calls_, std::try_to_lock);
        if (shared_.owns_lock()) {
            object_ = std::unique_lock(object, std::try_to_lock);
        }
    }
}

Owned<capi::OptArgs> Agent::checked_args(const CallOptions& options) const {
    for (const auto& backend : options.backends) {
        if (!backend->is_of(*handle_)) {
            throw Error("ConfigError", text("backend ", backend->type(),
                                            " was made by another agent than '", name(), "'"));
        }
    }
    return make_opt_args(library(), options);
}

template <class Items, class Body>
auto Agent::addressing(const char* call, const std::string& peer, Memory memory, const Items& items,
                       Body&& body) const {
    try {
        return body();
    } catch (const NativeError&) {
        if (peer == name()) {
            throw;
        }
        if (!handle_->check_remote_metadata(peer, memory, {})) {
            throw Error("UnknownPeerError",
                        text(call, ": agent '", name(), "' does not know a peer '", peer,
                             "'; load its metadata (NIXL also forgets peers that disconnect)"));
        }
        std::size_t index = 0;
        const auto require = [&](const Descriptor& row) {
            if (!handle_->check_remote_metadata(peer, memory, {&row, 1})) {
                throw Error("NotRegisteredError",
                            text(call, ": remote descriptor ", index, " (", memory_name(memory),
                                 " ", row.str(), ") is not wholly inside memory that peer '", peer,
                                 "' has registered, as far as the metadata that agent '", name(),
                                 "' has loaded tells"));
            }
            ++index;
        };
        for (const auto& item : items) {
            if constexpr (std::is_same_v<Items, Rows>) {
                require(item);
            } else {
                for (std::uint64_t i = 0; i < item.count; ++i) {
                    require(item.at(i));
                }
            }
        }
        throw;
    }
}

// ---- plugins and backends

std::vector<std::string> Agent::available_plugins() const {
    const Call call(*this, "get_available_plugins");
    return handle_->available_plugins();
}

BackendInfo Agent::plugin_info(const std::string& plugin) const {
    const Call call(*this, "get_plugin_params");
    return handle_->plugin_info(plugin);
}

std::shared_ptr<Backend> Agent::create_backend(const std::string& type, const ParamMap& params) {
    const Call call(*this, "create_backend");
    for (const auto& backend : backends()) {
        if (backend->type() == type) {
            throw Error("StateError", text("agent '", name(), "' has a backend ", type,
                                           " already; there can be one of each type"));
        }
    }
    auto backend = handle_->create_backend(type, params);
    const std::lock_guard lock(books_);
    backends_.push_back(backend);
    return backend;
}

BackendInfo Agent::backend_info(const Backend& backend) const {
    const Call call(*this, "get_backend_params");
    if (!backend.is_of(*handle_)) {
        throw Error("ConfigError", text("backend ", backend.type(),
                                        " was made by another agent than '", name(), "'"));
    }
    return handle_->backend_info(backend.native(), backend.type());
}

std::vector<std::shared_ptr<Backend>> Agent::backends() const {
    const std::lock_guard lock(books_);
    return backends_;
}

// ---- memory

void Agent::add_spans(const std::shared_ptr<Registration>& registration) {
    const std::lock_guard lock(books_);
    const Memory memory = registration->memory();
    const Rows rows = registration->rows();
    transfer::MemoryMap& spans = spans_[memory];
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (const auto* there = spans.find_exactly(rows[i], [](const auto&) { return true; })) {
            const bool twice = there->owner == registration->id();
            spans.remove(registration->id());
            throw Error("AlreadyRegisteredError",
                        text(memory_name(memory), " descriptor ", i, " (", rows[i].str(),
                             twice ? ") is given twice" : ") is registered already",
                             " with agent '", name(), "'"));
        }
        spans.add_overlapping(registration->id(), {rows[i], memory});
    }
    registrations_[registration->id()] = registration;
}

void Agent::remove_spans(const Registration& registration) noexcept {
    const std::lock_guard lock(books_);
    spans_[registration.memory()].remove(registration.id());
    registrations_.erase(registration.id());
    counted_.erase(registration.id());
}

void Agent::keep_for_ever(std::shared_ptr<void> keepalive) noexcept {
    const std::lock_guard lock(books_);
    try {
        stuck_.push_back(std::move(keepalive));
    } catch (...) {
        // Out of memory: leak it, since NIXL may still use the buffer.
        (void)new (std::nothrow) std::shared_ptr<void>(std::move(keepalive));
    }
}

template <class Items>
std::vector<Pin> Agent::pin(Memory memory, const Items& items, const char* side) const {
    std::vector<Pin> pins;
    std::vector<std::shared_ptr<Registration>> seen;  // goes after the lock, as pins do
    std::unordered_map<const Registration*, std::size_t> places;
    const std::lock_guard lock(books_);
    const auto map = spans_.find(memory);
    const auto accept = [&](const transfer::MemoryMap::Entry& entry) {
        auto found = registrations_.at(entry.owner).lock();
        const bool is_usable = found && !found->is_released();
        if (is_usable) {
            const auto [place, is_new] = places.try_emplace(found.get(), pins.size());
            if (is_new) {
                pins.push_back({Use<Registration>(found)});
            }
            pins[place->second].rows.push_back(entry.index);
        }
        seen.push_back(std::move(found));
        return is_usable;
    };
    const transfer::MemoryMap::Entry* hit = nullptr;
    const auto covers = [&](const Descriptor& row) {
        if (hit != nullptr && hit->row.contains(row)) {
            return true;
        }
        hit = map == spans_.end() ? nullptr : map->second.find(row, accept);
        if (hit == nullptr && is_storage(memory) && map != spans_.end()) {
            hit = map->second.find_exactly({0, 0, row.device}, accept);  // the whole file
        }
        if (hit != nullptr) {
            // The same memory can be registered once for each of several backends.
            (void)map->second.find_exactly(hit->row, [&](const auto& entry) {
                return &entry != hit && accept(entry) && false;
            });
        }
        return hit != nullptr;
    };
    std::size_t index = 0;
    const auto require = [&](const Descriptor& row) {
        if (!covers(row)) {
            throw Error(
                "NotRegisteredError",
                text(side, " descriptor ", index, " (", memory_name(memory), " ", row.str(),
                     ") is not wholly inside memory that agent '", name(), "' has registered"));
        }
        ++index;
    };
    for (const auto& item : items) {
        if constexpr (std::is_same_v<Items, Rows>) {
            require(item);
        } else if (covers(item.bounds())) {
            index += item.count;
        } else {
            for (std::uint64_t i = 0; i < item.count; ++i) {
                require(item.at(i));
            }
        }
    }
    return pins;
}

bool Agent::is_stale(const std::vector<Pin>& pins) const {
    return std::any_of(pins.begin(), pins.end(), [](const Pin& pin) {
        const auto& counts = pin.registration->counts_;
        return !counts.empty() && std::any_of(pin.rows.begin(), pin.rows.end(),
                                              [&](std::uint32_t row) { return counts[row] == 0; });
    });
}

bool Agent::is_stale(const XferBody& body) const {
    return is_stale(body.pins) ||
           std::any_of(body.lists.begin(), body.lists.end(),
                       [&](const auto& list) { return is_stale(list->pins_); });
}

template <class Pinned>
void Agent::require_registered(const Pinned& pinned, const char* what) const {
    if (has_revoked_ && is_stale(pinned)) {
        throw Error("NotRegisteredError",
                    text(what, " of agent '", name(),
                         "' was made on memory that has been deregistered since; register the "
                         "memory and make it again"));
    }
}

std::shared_ptr<Registration> Agent::register_memory(Memory memory, Rows rows,
                                                     std::span<const std::string> blobs,
                                                     std::shared_ptr<void> keepalive,
                                                     const CallOptions& options) {
    (void)checked_args(options);
    require_rows(rows, "registered", is_storage(memory));
    const auto registration = std::make_shared<Registration>(
        shared_from_this(), RegisteredMemory(handle_, memory, rows, blobs, options),
        std::move(keepalive));
    const Call call(*this, "register_mem");
    add_spans(registration);
    try {
        registration->memory_.add();
    } catch (...) {
        remove_spans(*registration);
        throw;
    }
    const std::lock_guard lock(books_);
    registration->is_released_ = false;
    return registration;
}

void Agent::register_counted(Memory memory, Rows rows, std::span<const std::string> blobs,
                             const std::shared_ptr<void>& keepalive, const CallOptions& options) {
    (void)checked_args(options);
    require_rows(rows, "registered", is_storage(memory));
    if (!blobs.empty() && blobs.size() != rows.size()) {
        throw Error("ConfigError", text(blobs.size(), " metadata strings for ", rows.size(),
                                        " descriptors; give one for each or none"));
    }
    using Backends = std::vector<std::shared_ptr<Backend>>;
    std::map<Backends, std::shared_ptr<Registration>> fresh;
    std::vector<std::pair<Registration*, std::uint32_t>> counted;
    std::vector<std::shared_ptr<Registration>> seen;  // goes after the locks
    const std::lock_guard counting(counting_);
    const Call call(*this, "register_mem");
    Backends wanted = options.backends;
    for (const auto& backend : wanted.empty() ? backends() : Backends()) {
        if (std::ranges::count(backend->memory(), memory) != 0) {
            wanted.push_back(backend);
        }
    }
    const auto undo = [&] {
        for (const auto& [registration, index] : counted) {
            --registration->counts_[index];
        }
        for (const auto& [unused, registration] : fresh) {
            spans_[memory].remove(registration->id());
            registrations_.erase(registration->id());
        }
    };
    const std::string no_blob;
    Registration* main = nullptr;
    const auto owner_of = [&](const transfer::MemoryMap::Entry& entry) {
        return seen.emplace_back(registrations_.at(entry.owner).lock()).get();
    };
    const auto add_row = [&](std::size_t i) {
        const std::string& blob = blobs.empty() ? no_blob : blobs[i];
        transfer::MemoryMap& spans = spans_[memory];
        if (const auto* other = is_storage(memory) ? spans.find_device(rows[i].device) : nullptr) {
            const Registration* there = owner_of(*other);
            if (there != nullptr && there->memory_.blob(other->index) != blob) {
                throw Error(
                    "AlreadyRegisteredError",
                    text(memory_name(memory), " descriptor ", i, " (", rows[i].str(), ") is for '",
                         blob, "', but agent '", name(), "' has registered device ", rows[i].device,
                         " for '", there->memory_.blob(other->index),
                         "'; give each file or object a device number of its own"));
            }
        }
        Registration* last = nullptr;
        std::uint32_t place = 0;
        Backends covered;
        (void)spans.find_exactly(rows[i], [&](const transfer::MemoryMap::Entry& entry) {
            Registration* there = owner_of(entry);
            if (there != nullptr && !there->counts_.empty()) {
                covered.insert(covered.end(), there->backends_.begin(), there->backends_.end());
                if (last == nullptr) {
                    last = there;
                    place = entry.index;
                }
            }
            return false;
        });
        Registration* registration = last == nullptr ? main : nullptr;
        if (registration == nullptr) {
            Backends missing = wanted;
            std::erase_if(missing, [&](const auto& backend) {
                return std::ranges::count(covered, backend) != 0;
            });
            if (last != nullptr && missing.empty()) {
                ++last->counts_[place];
                counted.emplace_back(last, place);
                return;
            }
            auto& made = fresh[missing];
            if (made == nullptr) {
                made = std::make_shared<Registration>(
                    shared_from_this(),
                    RegisteredMemory(handle_, memory, {}, {},
                                     {.backends = covered.empty() ? options.backends : missing}),
                    keepalive);
                made->backends_ = missing;
                registrations_[made->id()] = made;
            }
            registration = made.get();
            main = covered.empty() ? registration : main;
        }
        spans.add_overlapping(registration->id(), {rows[i], memory});
        registration->memory_.append(rows[i], blobs.empty() ? nullptr : &blob);
        registration->counts_.push_back(1);
        ++registration->num_left_;
    };
    {
        const std::lock_guard lock(books_);
        try {
            for (std::size_t i = 0; i < rows.size(); ++i) {
                add_row(i);
            }
        } catch (...) {
            undo();
            throw;
        }
    }
    std::vector<std::shared_ptr<Registration>> added;
    try {
        for (const auto& [unused, registration] : fresh) {
            registration->memory_.add();
            added.push_back(registration);
        }
    } catch (...) {
        for (const auto& registration : added) {
            registration->memory_.remove();
        }
        const std::lock_guard lock(books_);
        undo();
        throw;
    }
    const std::lock_guard lock(books_);
    for (const auto& registration : added) {
        registration->is_released_ = false;
        counted_[registration->id()] = registration;
    }
}

bool Agent::is_stale_running() const {
    return std::any_of(running_.begin(), running_.end(),
                       [&](const auto& entry) { return is_stale(*entry.first); }) ||
           std::any_of(quarantined_.begin(), quarantined_.end(),
                       [&](const auto& body) { return is_stale(*body); });
}

void Agent::deregister_counted(Memory memory, Rows rows, const CallOptions& options) {
    (void)checked_args(options);
    reap();
    std::vector<std::shared_ptr<XferRequest>> running;  // goes after the locks, as `gone` does
    std::unordered_map<Registration*, std::vector<std::uint32_t>> gone;
    std::vector<std::pair<Registration*, std::uint32_t>> counted;
    std::vector<std::shared_ptr<Registration>> kept;
    const std::lock_guard counting(counting_);
    const Call call(*this, "deregister_mem");
    const auto undo = [&] {
        for (const auto& [registration, index] : counted) {
            registration->num_left_ += ++registration->counts_[index] == 1 ? 1U : 0U;
        }
    };
    {
        const std::lock_guard lock(books_);
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const auto* entry =
                spans_[memory].find_exactly(rows[i], [&](const transfer::MemoryMap::Entry& found) {
                    const auto there = counted_.find(found.owner);
                    return there != counted_.end() && there->second->counts_[found.index] != 0;
                });
            if (entry == nullptr) {
                undo();
                throw Error("NotRegisteredError",
                            text("descriptor ", i, " (", memory_name(memory), " ", rows[i].str(),
                                 ") is not registered with agent '", name(),
                                 "'; deregister exactly what was registered, and once"));
            }
            Registration* registration = counted_.at(entry->owner).get();
            counted.emplace_back(registration, entry->index);
            if (--registration->counts_[entry->index] == 0) {
                --registration->num_left_;
                gone[registration].push_back(entry->index);
            }
        }
        if (gone.empty()) {
            return;
        }
        has_revoked_ = true;
        for (const auto& [body, request] : running_) {
            const auto found = requests_.find(request);
            if (found != requests_.end() && is_stale(*body)) {
                running.push_back(found->second.lock());
            }
        }
    }
    for (const auto& request : running) {
        if (request) {
            request->settle();
        }
    }
    {
        const std::lock_guard lock(books_);
        if (is_stale_running()) {
            undo();
            throw Error("RegistrationInUseError",
                        text("deregister_mem: a transfer of agent '", name(),
                             "' still moves bytes of this memory, and NIXL cannot stop it; wait "
                             "until it has ended, or keep the memory"));
        }
        for (const auto& [registration, unused] : gone) {
            kept.push_back(counted_.at(registration->id()));
        }
    }
    std::exception_ptr failure;
    for (auto& [registration, indices] : gone) {
        try {
            remove_rows(*registration, indices);
        } catch (const NativeError&) {
            failure = std::current_exception();  // what follows is deregistered all the same
        }
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

void Agent::remove_rows(Registration& registration, std::span<const std::uint32_t> indices) {
    try {
        registration.memory_.remove(indices);
    } catch (...) {
        const std::lock_guard lock(books_);
        for (const std::uint32_t index : indices) {
            registration.counts_[index] = 1;
        }
        registration.num_left_ += indices.size();
        throw;
    }
    if (registration.num_left_ == 0) {
        registration.memory_.forget();
        registration.is_released_ = true;
        remove_spans(registration);
        return;
    }
    const std::lock_guard lock(books_);
    for (const std::uint32_t index : indices) {
        spans_[registration.memory()].remove(registration.id(), index);
    }
}

std::vector<std::optional<ParamMap>> Agent::query_memory(Memory memory, Rows rows,
                                                         std::span<const std::string> blobs,
                                                         const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    require_rows(rows, "queried", true);
    if (options.backends.size() != 1) {
        throw Error("ConfigError",
                    text("query_mem asks exactly one backend, but got ", options.backends.size()));
    }
    const Owned<capi::RegList> list = make_reg_list(library(), memory, rows, blobs);
    const Call call(*this, "query_mem");
    return handle_->query_memory(list.get(), args.get());
}

// ---- metadata

std::string Agent::local_metadata() const {
    const Call call(*this, "get_local_md");
    return handle_->local_metadata();
}

std::string Agent::local_partial_metadata(Memory memory, Rows rows,
                                          const CallOptions& options) const {
    const Owned<capi::OptArgs> args = checked_args(options);
    const std::vector<Pin> pins = pin(memory, rows, "local");
    const Owned<capi::RegList> list = make_reg_list(library(), memory, rows, {});
    const Call call(*this, "get_local_partial_md");
    return handle_->local_partial_metadata(list.get(), args.get());
}

std::string Agent::load_remote_metadata(std::string_view metadata) {
    if (metadata.empty()) {
        throw Error("ConfigError", text("the metadata given to agent '", name(), "' is empty"));
    }
    const Call call(*this, "load_remote_md");
    return handle_->load_remote_metadata(metadata);
}

bool Agent::check_remote_metadata(const std::string& peer, Memory memory, Rows rows) const {
    const std::vector<Run> runs = runs_of(rows);
    const Call call(*this, "check_remote_md");
    // Mostly all that lies between rows is registered too.
    return (are_few(runs, rows.size()) && std::ranges::none_of(runs, wraps_around) &&
            handle_->check_remote_metadata(peer, memory, bounds_of(runs))) ||
           handle_->check_remote_metadata(peer, memory, rows);
}

void Agent::invalidate_remote_metadata(const std::string& peer) {
    const Call call(*this, "invalidate_remote_md");
    {
        // First, so that nothing can use handles that NIXL is about to invalidate.
        const std::lock_guard lock(books_);
        ++generations_[peer];
    }
    addressing("invalidate_remote_md", peer, Memory::kDram, Rows(),
               [&] { handle_->invalidate_remote_metadata(peer); });
}

std::uint64_t Agent::generation(const std::string& peer) const {
    const std::lock_guard lock(books_);
    const auto found = generations_.find(peer);
    return found == generations_.end() ? 0 : found->second;
}

void Agent::require_fresh(const std::string& peer, std::uint64_t generation_of,
                          const char* what) const {
    const std::uint64_t now = generation(peer);
    if (generation_of != now) {
        throw Error("StalePeerError", text(what, " was made for generation ", generation_of,
                                           " of peer '", peer, "', which is at generation ", now,
                                           " since it was invalidated; make it again"));
    }
}

void Agent::send_local_metadata(const ListenerAddress& address) {
    const Owned<capi::OptArgs> args = make_opt_args(library(), {.address = address});
    const Call call(*this, "send_local_md");
    library().check(fn().send_local_md(handle_->native(), args.get()), "send_local_md", [&] {
        return text(handle_->about(), ", to ", address.ip.empty() ? kServer : address.ip);
    });
}

void Agent::send_local_partial_metadata(Memory memory, Rows rows, const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    const std::vector<Pin> pins = pin(memory, rows, "local");
    const Owned<capi::RegList> list = make_reg_list(library(), memory, rows, {});
    const Call call(*this, "send_local_partial_md");
    library().check(fn().send_local_partial_md(handle_->native(), list.get(), args.get()),
                    "send_local_partial_md", [&] {
                        return text(handle_->about(), ", ", rows.size(), " descriptors, to ",
                                    options.address.ip.empty() ? kServer : options.address.ip);
                    });
}

void Agent::fetch_remote_metadata(const std::string& peer, const ListenerAddress& address) {
    const Owned<capi::OptArgs> args = make_opt_args(library(), {.address = address});
    const Call call(*this, "fetch_remote_md");
    library().check(
        fn().fetch_remote_md(handle_->native(), peer.c_str(), args.get()), "fetch_remote_md", [&] {
            return text(handle_->about(peer), ", from ", address.ip.empty() ? kServer : address.ip);
        });
}

void Agent::invalidate_local_metadata(const ListenerAddress& address) {
    const Owned<capi::OptArgs> args = make_opt_args(library(), {.address = address});
    const Call call(*this, "invalidate_local_md");
    handle_->check(fn().invalidate_local_md(handle_->native(), args.get()), "invalidate_local_md");
}

void Agent::make_connection(const std::string& peer, const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    const Call call(*this, "agent_make_connection");
    addressing("agent_make_connection", peer, Memory::kDram, Rows(), [&] {
        handle_->check(fn().agent_make_connection(handle_->native(), peer.c_str(), args.get()),
                       "agent_make_connection", peer);
    });
}

// ---- transfers

std::shared_ptr<PreparedList> Agent::prepare(const std::string& peer, Memory memory, Rows rows,
                                             const CallOptions& options) {
    require_rows(rows, peer.empty() ? "local" : "remote", false);
    return prepare_runs(peer, memory, runs_of(rows), options);
}

std::shared_ptr<PreparedList> Agent::prepare_runs(const std::string& peer, Memory memory,
                                                  std::vector<Run> runs,
                                                  const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    require_runs(runs, peer.empty() ? "local" : "remote");
    const auto prepared = std::make_shared<PreparedList>(
        shared_from_this(), peer, memory, std::move(runs), peer.empty() ? 0 : generation(peer));
    const Runs whole(prepared->runs_);
    const bool is_ours = peer.empty() || peer == name();
    if (is_ours) {
        prepared->pins_ = pin(memory, whole, prepared->side());
    }
    const Call call(*this, "prep_xfer_dlist");
    bool can_wait = args.get() == nullptr && are_few(whole, prepared->size());
    if (can_wait && !is_ours) {
        can_wait = handle_->check_remote_metadata(peer, memory, bounds_of(whole));
    }
    if (!can_wait) {
        prepare_native(*prepared, args.get());
    }
    const std::lock_guard lock(books_);
    require_registered(prepared->pins_, "the list");
    prepared_.emplace(prepared.get(), prepared);
    prepared->is_released_ = false;
    ++num_prepared_;
    return prepared;
}

void Agent::prepare_native(PreparedList& list, capi::OptArgs args) {
    const std::lock_guard lock(list.preparing_);
    if (list.handle_) {
        return;
    }
    const Runs runs(list.runs_);
    const Owned<capi::XferList> native = make_xfer_list(library(), list.memory_, runs);
    const auto prep = [&] { return handle_->prepare(list.peer_, native.get(), args); };
    list.handle_ = PreparedHandle(
        list.peer_.empty() ? prep()
                           : addressing("prep_xfer_dlist", list.peer_, list.memory_, runs, prep),
        {handle_});
}

std::shared_ptr<XferRequest> Agent::make_request(Op op, const std::shared_ptr<PreparedList>& local,
                                                 std::span<const std::int32_t> local_indices,
                                                 const std::shared_ptr<PreparedList>& remote,
                                                 std::span<const std::int32_t> remote_indices,
                                                 const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    if (local->agent().get() != this || remote->agent().get() != this) {
        throw Error("ConfigError", text("the ", local->agent().get() != this ? "local" : "remote",
                                        " list was made by another agent than '", name(), "'"));
    }
    const std::string& peer = remote->peer();
    if (!local->peer().empty() || peer.empty()) {
        throw Error("ConfigError",
                    text("make_xfer_req needs a list prepared for the local side and one for a "
                         "peer, but got '",
                         local->peer(), "' and '", peer, "' ('' is local)"));
    }
    const std::size_t count = local_indices.size();
    if (count == 0 || count != remote_indices.size()) {
        throw Error("ConfigError",
                    text("make_xfer_req got ", count, " local and ", remote_indices.size(),
                         " remote indices; there must be as many, and at least one"));
    }
    const auto checked_length = [](const PreparedList& list, const char* side, std::size_t i,
                                   std::int32_t index) {
        if (index < 0 || static_cast<std::size_t>(index) >= list.size()) {
            throw Error("ConfigError",
                        text(side, " index ", index, " at position ", i,
                             " is out of range; the list has ", list.size(), " descriptors"));
        }
        return list.length(static_cast<std::size_t>(index));
    };
    std::uint64_t num_bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t ours = checked_length(*local, "local", i, local_indices[i]);
        const std::uint64_t theirs = checked_length(*remote, "remote", i, remote_indices[i]);
        if (ours != theirs) {
            throw Error("ConfigError",
                        text("lengths differ at position ", i, ": local descriptor ",
                             local_indices[i], " has ", ours, " bytes, remote descriptor ",
                             remote_indices[i], " has ", theirs));
        }
        num_bytes += ours;
    }
    auto body = std::make_unique<XferBody>(handle_);
    {
        const std::lock_guard lock(books_);
        body->use(local);
        body->use(remote);
    }
    auto request = std::make_shared<XferRequest>(shared_from_this(), op, peer, remote->generation_,
                                                 count, num_bytes, std::move(body));
    const Call call(*this, "make_xfer_req");
    require_fresh(peer, remote->generation_, "the remote list");
    prepare_native(*local, nullptr);
    prepare_native(*remote, nullptr);
    {
        const std::lock_guard lock(books_);
        require_registered(*request->body_, "the list");
        requests_.emplace(request.get(), request);
    }
    request->body_->native.set(addressing("make_xfer_req", peer, remote->memory_, Rows(), [&] {
        return handle_->make_xfer(op, local->handle_.get(), local_indices, remote->handle_.get(),
                                  remote_indices, peer, args.get());
    }));
    return request;
}

std::shared_ptr<XferRequest> Agent::create_request(Op op, Memory local_memory, Rows local,
                                                   Memory remote_memory, Rows remote,
                                                   const std::string& peer,
                                                   const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    require_rows(local, "local", false);
    require_rows(remote, "remote", false);
    if (local.size() != remote.size()) {
        throw Error("ConfigError", text("there are ", local.size(), " local but ", remote.size(),
                                        " remote descriptors"));
    }
    std::uint64_t num_bytes = 0;
    for (std::size_t i = 0; i < local.size(); ++i) {
        if (local[i].length != remote[i].length) {
            throw Error("ConfigError",
                        text("lengths differ at descriptor ", i, ": local has ", local[i].length,
                             " bytes, remote has ", remote[i].length));
        }
        num_bytes += local[i].length;
    }
    const std::uint64_t generation_of = generation(peer);
    auto body = std::make_unique<XferBody>(handle_);
    body->pins = pin(local_memory, local, "local");
    if (peer == name()) {
        for (Pin& more : pin(remote_memory, remote, "remote")) {
            body->pins.push_back(std::move(more));
        }
    }
    auto request = std::make_shared<XferRequest>(shared_from_this(), op, peer, generation_of,
                                                 local.size(), num_bytes, std::move(body));
    const Owned<capi::XferList> local_list = make_xfer_list(library(), local_memory, local);
    const Owned<capi::XferList> remote_list = make_xfer_list(library(), remote_memory, remote);
    const Call call(*this, "create_xfer_req");
    {
        const std::lock_guard lock(books_);
        require_registered(*request->body_, "the request");
        requests_.emplace(request.get(), request);
    }
    request->body_->native.set(addressing("create_xfer_req", peer, remote_memory, remote, [&] {
        return handle_->create_xfer(op, local_list.get(), remote_list.get(), peer, args.get());
    }));
    return request;
}

// ---- notifications

void Agent::notify(const std::string& peer, std::string_view message, const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    const Call call(*this, "gen_notif");
    addressing("gen_notif", peer, Memory::kDram, Rows(),
               [&] { handle_->notify(peer, message, args.get()); });
}

std::vector<Notification> Agent::take_notifications(const CallOptions& options) {
    const Owned<capi::OptArgs> args = checked_args(options);
    const Call call(*this, "get_notifs", &notifications_mutex_);
    return handle_->take_notifications(args.get());
}

}  // namespace pynixlkv::nixl
