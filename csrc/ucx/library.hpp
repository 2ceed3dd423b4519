#pragma once

#include <memory>
#include <string>

#include "ucx/capi.hpp"

namespace pynixlkv::ucx {

/// The loaded UCX library: its function table. Every owner of a handle holds it.
class Library {
  public:
    /// Open a library and resolve its functions.
    /// @throws Error LibraryNotFoundError, LibraryVersionError (missing symbol, too old)
    [[nodiscard]] static std::shared_ptr<const Library> open(const std::string& path);

    /// Wrap a table of other origin; tests use this.
    Library(std::string path, const capi::Functions& functions);

    [[nodiscard]] const std::string& path() const noexcept { return path_; }
    [[nodiscard]] const capi::Functions& fn() const noexcept { return functions_; }
    /// Version that the library reports, as "1.22.0".
    [[nodiscard]] const std::string& version() const noexcept { return version_; }

    /// Throw unless a call succeeded. `detail` is a callable, so that success costs nothing.
    template <class Detail>
    void check(Status status, const char* call, Detail&& detail) const {
        if (status != Status::kOk) [[unlikely]] {
            throw make_error(status, call, detail());
        }
    }

  private:
    std::string path_;
    capi::Functions functions_;
    std::string version_;
};

}  // namespace pynixlkv::ucx
