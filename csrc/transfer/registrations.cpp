#include "transfer/registrations.hpp"

#include <mutex>

#include "base/error.hpp"

namespace pynixlkv::transfer {

void Registrations::add(const Registration& registration) {
    const std::unique_lock lock(mutex_);
    memory_.add(registration.id(), registration.spans());
}

void Registrations::enable(const std::shared_ptr<Registration>& registration) {
    const std::unique_lock lock(mutex_);
    by_id_.emplace(registration->id(), registration);
}

void Registrations::abort(const Registration& registration) {
    const std::unique_lock lock(mutex_);
    memory_.remove(registration.id());
}

void Registrations::remove(Registration& registration) {
    const std::unique_lock lock(mutex_);
    const auto found = by_id_.find(registration.id());
    if (found == by_id_.end() || found->second.get() != &registration) {
        throw Error("ClosedError", "the registration is not one of agent '" + agent_ +
                                       "', or was deregistered before");
    }
    if (const std::size_t uses = registration.uses(); uses > 0) {
        throw Error("RegistrationInUseError",
                    std::to_string(uses) +
                        " transfers that are not quiet still use the memory; wait for them");
    }
    registration.close();
    memory_.remove(registration.id());
    by_id_.erase(found);
}

void Registrations::close_all() {
    const std::unique_lock lock(mutex_);
    for (auto& [id, registration] : by_id_) {
        registration->close();
    }
    by_id_.clear();
    memory_.clear();
}

void Registrations::check(std::span<const Row> rows) const {
    const std::shared_lock lock(mutex_);
    (void)memory_.cover(rows, whose_);
}

std::pair<Memory, Uses> Registrations::use(std::span<const Row> rows) const {
    const std::shared_lock lock(mutex_);
    const auto cover = memory_.cover(rows, whose_);
    std::vector<std::shared_ptr<Registration>> used;
    used.reserve(cover.owners.size());
    for (const MemoryMap::Owner owner : cover.owners) {
        used.push_back(by_id_.at(owner));
    }
    return {cover.memory, Uses(std::move(used))};
}

}  // namespace pynixlkv::transfer
