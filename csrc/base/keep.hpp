#pragma once

#include <utility>

namespace pynixlkv {

/// Make an object that lives as long as the process, beyond static destruction, or because a
/// library may still write to it.
template <class T, class... Arguments>
T& keep_for_ever(Arguments&&... arguments) {
    return *new T{
        std::forward<Arguments>(arguments)...};  // NOLINT(cppcoreguidelines-owning-memory)
}

}  // namespace pynixlkv
