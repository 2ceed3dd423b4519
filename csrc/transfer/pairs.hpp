/// @file
#pragma once

#include <vector>

#include "transfer/types.hpp"

namespace pynixlkv::transfer {

/// Refuse rows of a caller that cannot be moved: pairs that do not match, empty rows, and rows that
/// overlap on the written side.
/// @throws Error("PlanError") naming index and values
void check_pairs(const std::vector<Row>& local, const std::vector<Row>& remote, Op op);

}  // namespace pynixlkv::transfer
