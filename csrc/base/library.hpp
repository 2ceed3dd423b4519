#pragma once

#include <dlfcn.h>

#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv {

/// A shared library opened at run time. It is never closed: plugins and thread-locals of the
/// libraries that we use do not survive an unload.
class SharedLibrary {
  public:
    /// @param path file name for the dynamic loader; symbols stay local to the library
    /// @throws Error LibraryNotFoundError with the loader's own words
    explicit SharedLibrary(std::string path) : path_(std::move(path)) {
        handle_ = ::dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle_ == nullptr) {
            const char* reason = ::dlerror();
            throw Error("LibraryNotFoundError",
                        text("cannot open ", path_, ": ", reason != nullptr ? reason : "unknown"));
        }
    }

    [[nodiscard]] const std::string& path() const noexcept { return path_; }

    /// Address of a function, null if the library does not have it.
    template <class Function>
    [[nodiscard]] Function* find(const char* name) const noexcept {
        return reinterpret_cast<Function*>(::dlsym(handle_, name));
    }

    /// Address of a function that must be there.
    /// @throws Error LibraryVersionError naming library and symbol
    template <class Function>
    [[nodiscard]] Function* require(const char* name) const {
        auto* function = find<Function>(name);
        if (function == nullptr) {
            throw Error("LibraryVersionError", text(path_, " has no symbol ", name));
        }
        return function;
    }

  private:
    std::string path_;
    void* handle_ = nullptr;
};

}  // namespace pynixlkv
