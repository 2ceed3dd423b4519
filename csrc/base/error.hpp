/// @file
/// Exceptions of the native code. Each names the Python class it becomes; the translation itself
/// lives in bindings/py_error.hpp and nowhere else.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace pynixlkv {

/// A failure with the name of the class in `pynixlkv.errors` that it is raised as.
class Error : public std::runtime_error {
  public:
    /// @param kind name of a class of pynixlkv.errors, for example "PlanError"
    /// @param message what failed, on what, what was seen, what to do
    Error(std::string kind, const std::string& message)
        : std::runtime_error(message), kind_(std::move(kind)) {}

    [[nodiscard]] const std::string& kind() const noexcept { return kind_; }

  private:
    std::string kind_;
};

/// A failure that a native library reported.
class NativeError : public Error {
  public:
    /// @param library "nixl" or "ucx"
    /// @param kind kind of the status, from the library's status table
    /// @param status code in the numbering of the library's C interface
    /// @param call the native function
    /// @param detail what was being done, on what
    NativeError(std::string library, std::string kind, int status, std::string call,
                std::string detail, const std::string& message)
        : Error(std::move(kind), message),
          library_(std::move(library)),
          status_(status),
          call_(std::move(call)),
          detail_(std::move(detail)) {}

    [[nodiscard]] const std::string& library() const noexcept { return library_; }
    [[nodiscard]] int status() const noexcept { return status_; }
    [[nodiscard]] const std::string& call() const noexcept { return call_; }
    [[nodiscard]] const std::string& detail() const noexcept { return detail_; }

  private:
    std::string library_;
    int status_;
    std::string call_;
    std::string detail_;
};

}  // namespace pynixlkv
