/// @file
/// Objects that nobody destroys.
#pragma once

#include <utility>

namespace pynixlkv {

/// Make an object that lives as long as the process: what static destruction must not end, or what
/// somebody may still write to.
template <class T, class... Arguments>
T& keep_for_ever(Arguments&&... arguments) {
    return *new T{
        std::forward<Arguments>(arguments)...};  // NOLINT(cppcoreguidelines-owning-memory)
}

}  // namespace pynixlkv
