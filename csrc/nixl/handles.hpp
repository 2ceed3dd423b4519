/// @file
/// Owners of NIXL's short-lived C objects (lists, maps, arguments) and their conversion.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/unique_handle.hpp"
#include "nixl/library.hpp"
#include "nixl/types.hpp"

namespace pynixlkv::nixl {

/// Owner of a C object that one function without further arguments frees.
template <class Handle>
using Owned = UniqueHandle<Handle, Status (*)(Handle)>;

/// Call `make(&handle)` and own what it made.
/// @throws NativeError if the call fails; nothing is owned then
template <class Handle, class Make, class Detail>
[[nodiscard]] Owned<Handle> own(const Library& library, Status (*destroy)(Handle), const char* call,
                                Detail&& detail, Make&& make) {
    Handle handle = nullptr;
    library.check(make(&handle), call, std::forward<Detail>(detail));
    return Owned<Handle>(handle, destroy);
}

[[nodiscard]] Owned<capi::Params> make_params(const Library& library, const ParamMap& params);
[[nodiscard]] ParamMap read_params(const Library& library, capi::Params params);
[[nodiscard]] std::vector<Memory> read_memory_types(const Library& library, capi::MemList list);
[[nodiscard]] std::vector<std::string> read_strings(const Library& library, capi::StringList list);

/// Descriptors of a transfer, in the order of the rows.
template <class Rows>
[[nodiscard]] Owned<capi::XferList> make_xfer_list(const Library& library, Memory memory,
                                                   const Rows& rows);

/// Descriptors of memory to register.
/// @param blobs one string of backend-specific metadata per row, or none at all
[[nodiscard]] Owned<capi::RegList> make_reg_list(const Library& library, Memory memory, Rows rows,
                                                 std::span<const std::string> blobs);

/// Optional arguments; empty (a null handle) if the options are all defaults.
[[nodiscard]] Owned<capi::OptArgs> make_opt_args(const Library& library,
                                                 const CallOptions& options);

}  // namespace pynixlkv::nixl
