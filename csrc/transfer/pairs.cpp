#include "transfer/pairs.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace pynixlkv::transfer {

void check_pairs(const std::vector<Row>& local, const std::vector<Row>& remote, Op op) {
    if (local.size() != remote.size()) {
        throw Error("PlanError", std::to_string(local.size()) + " local rows do not pair with " +
                                     std::to_string(remote.size()) + " remote rows");
    }
    for (std::size_t i = 0; i < local.size(); ++i) {
        if (local[i].length != remote[i].length) {
            throw Error("PlanError", "row " + std::to_string(i) + ": the local length " +
                                         std::to_string(local[i].length) +
                                         " differs from the remote length " +
                                         std::to_string(remote[i].length));
        }
        if (local[i].length == 0) {
            throw Error("PlanError",
                        "row " + std::to_string(i) + " has length 0; leave empty rows out");
        }
    }
    const std::vector<Row>& written = op == Op::kRead ? local : remote;
    const auto overlap = [](const Row& a, const Row& b) {
        return a.device == b.device && b.address < a.address + a.length;
    };
    bool ascending = true;
    for (std::size_t i = 1; ascending && i < written.size(); ++i) {
        ascending = std::pair(written[i - 1].device, written[i - 1].address) <
                        std::pair(written[i].device, written[i].address) &&
                    !overlap(written[i - 1], written[i]);
    }
    if (ascending) {
        return;
    }
    std::vector<std::size_t> order(written.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return std::pair(written[a].device, written[a].address) <
               std::pair(written[b].device, written[b].address);
    });
    for (std::size_t i = 1; i < order.size(); ++i) {
        if (overlap(written[order[i - 1]], written[order[i]])) {
            throw Error("PlanError", "rows " + std::to_string(order[i - 1]) + " and " +
                                         std::to_string(order[i]) +
                                         " overlap on the written side; each destination byte may "
                                         "be written once");
        }
    }
}

}  // namespace pynixlkv::transfer
