#pragma once

#include <memory>
#include <string>

#include "base/library.hpp"
#include "nixl/capi.hpp"

namespace pynixlkv::nixl {

/// The loaded NIXL library: its function table. Every owner of a handle holds it.
class Library {
  public:
    /// Open a library and resolve its functions.
    /// @throws Error LibraryNotFoundError, LibraryVersionError (missing symbol, stub build)
    [[nodiscard]] static std::shared_ptr<const Library> open(const std::string& path);

    /// Wrap a table that came from elsewhere; tests use this.
    Library(std::string path, const capi::Functions& functions);

    [[nodiscard]] const std::string& path() const noexcept { return path_; }
    [[nodiscard]] const capi::Functions& fn() const noexcept { return functions_; }

    /// Empty if the library does not tell.
    [[nodiscard]] std::string version() const;

    /// Throw unless a call succeeded. `detail` is a callable that makes the text, so that success
    /// costs nothing.
    template <class Detail>
    void check(Status status, const char* call, Detail&& detail) const {
        if (status != Status::kSuccess) [[unlikely]] {
            fail(status, call, detail());
        }
    }

    /// Throw the NativeError of a failed call.
    /// @param call function without the `nixl_capi_` prefix
    /// @param detail what was being done, on what, with which peer
    [[noreturn]] void fail(Status status, const char* call, const std::string& detail) const;

    /// Free memory that the library allocated for us.
    void free(void* memory) const noexcept;

  private:
    std::string path_;
    capi::Functions functions_;
};

}  // namespace pynixlkv::nixl
