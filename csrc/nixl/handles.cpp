#include "nixl/handles.hpp"

#include <numeric>

#include "base/error.hpp"
#include "nixl/agent_handle.hpp"

namespace pynixlkv::nixl {

namespace {

constexpr std::size_t kSmallList = 64;

std::string no_detail() {
    return "plain object";
}

template <class Item, class Native, class List>
std::vector<Item> read_list(const Library& library, List list, auto size_of, const char* size_call,
                            auto get, const char* get_call) {
    std::size_t size = 0;
    library.check(size_of(list, &size), size_call, no_detail);
    std::vector<Item> result;
    for (std::size_t i = 0; i < size; ++i) {
        Native item{};
        library.check(get(list, i, &item), get_call, no_detail);
        result.push_back(static_cast<Item>(item));
    }
    return result;
}

}  // namespace

Owned<capi::Params> make_params(const Library& library, const ParamMap& params) {
    const capi::Functions& fn = library.fn();
    auto owned = own<capi::Params>(library, fn.destroy_params, "create_params", no_detail,
                                   [&](capi::Params* out) { return fn.create_params(out); });
    for (const auto& [key, value] : params) {
        library.check(fn.params_add(owned.get(), key.c_str(), value.c_str()), "params_add",
                      [&] { return text("parameter ", key); });
    }
    return owned;
}

ParamMap read_params(const Library& library, capi::Params params) {
    const capi::Functions& fn = library.fn();
    ParamMap result;
    bool empty = true;
    library.check(fn.params_is_empty(params, &empty), "params_is_empty", no_detail);
    if (empty) {
        return result;
    }
    const auto iterator = own<capi::ParamIterator>(
        library, fn.params_destroy_iterator, "params_create_iterator", no_detail,
        [&](capi::ParamIterator* out) { return fn.params_create_iterator(params, out); });
    for (bool more = true; more;) {
        const char* key = nullptr;
        const char* value = nullptr;
        library.check(fn.params_iterator_next(iterator.get(), &key, &value, &more),
                      "params_iterator_next", no_detail);
        result.emplace(key, value);
    }
    return result;
}

std::vector<Memory> read_memory_types(const Library& library, capi::MemList list) {
    return read_list<Memory, int>(library, list, library.fn().mem_list_size, "mem_list_size",
                                  library.fn().mem_list_get, "mem_list_get");
}

std::vector<std::string> read_strings(const Library& library, capi::StringList list) {
    return read_list<std::string, const char*>(library, list, library.fn().string_list_size,
                                               "string_list_size", library.fn().string_list_get,
                                               "string_list_get");
}

template <class Rows>
Owned<capi::XferList> make_xfer_list(const Library& library, Memory memory, const Rows& rows) {
    const capi::Functions& fn = library.fn();
    auto owned = own<capi::XferList>(
        library, fn.destroy_xfer_dlist, "create_xfer_dlist", no_detail,
        [&](capi::XferList* out) { return fn.create_xfer_dlist(static_cast<int>(memory), out); });
    std::size_t count = rows.size();
    if constexpr (std::is_same_v<Rows, Runs>) {
        count = std::accumulate(rows.begin(), rows.end(), std::size_t{0},
                                [](std::size_t sum, const Run& run) { return sum + run.count; });
    }
    // A list that was longer keeps its room, and does not grow step by step.
    if (count > kSmallList) {
        library.check(fn.xfer_dlist_resize(owned.get(), count), "xfer_dlist_resize",
                      [&] { return text(count, " descriptors"); });
        library.check(fn.xfer_dlist_clear(owned.get()), "xfer_dlist_clear", no_detail);
    }
    const auto add = [&](const Descriptor& row) {
        library.check(fn.xfer_dlist_add_desc(owned.get(), row.address, row.length, row.device),
                      "xfer_dlist_add_desc", [&] { return row.str(); });
    };
    for (const auto& item : rows) {
        if constexpr (std::is_same_v<Rows, Runs>) {
            for (std::uint64_t i = 0; i < item.count; ++i) {
                add(item.at(i));
            }
        } else {
            add(item);
        }
    }
    return owned;
}
template Owned<capi::XferList> make_xfer_list(const Library&, Memory, const Rows&);
template Owned<capi::XferList> make_xfer_list(const Library&, Memory, const Runs&);

Owned<capi::RegList> make_reg_list(const Library& library, Memory memory, Rows rows,
                                   std::span<const std::string> blobs) {
    if (!blobs.empty() && blobs.size() != rows.size()) {
        throw Error("ConfigError", text(blobs.size(), " metadata strings for ", rows.size(),
                                        " descriptors; give one for each or none"));
    }
    const capi::Functions& fn = library.fn();
    auto owned = own<capi::RegList>(
        library, fn.destroy_reg_dlist, "create_reg_dlist", no_detail,
        [&](capi::RegList* out) { return fn.create_reg_dlist(static_cast<int>(memory), out); });
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const Descriptor& row = rows[i];
        const char* blob = blobs.empty() ? nullptr : blobs[i].data();
        const std::size_t blob_size = blobs.empty() ? 0 : blobs[i].size();
        library.check(fn.reg_dlist_add_desc(owned.get(), row.address, row.length, row.device, blob,
                                            blob_size),
                      "reg_dlist_add_desc", [&] { return row.str(); });
    }
    return owned;
}

Owned<capi::OptArgs> make_opt_args(const Library& library, const CallOptions& options) {
    const capi::Functions& fn = library.fn();
    if (options.backends.empty() && !options.notification && !options.skip_merge &&
        options.address.ip.empty() && options.address.port == 0) {
        return {};
    }
    auto owned = own<capi::OptArgs>(library, fn.destroy_opt_args, "create_opt_args", no_detail,
                                    [&](capi::OptArgs* out) { return fn.create_opt_args(out); });
    capi::OptArgs args = owned.get();
    for (const auto& backend : options.backends) {
        library.check(fn.opt_args_add_backend(args, backend->native()), "opt_args_add_backend",
                      [&] { return text("backend ", backend->type()); });
    }
    if (options.notification) {
        const std::string& message = *options.notification;
        library.check(fn.opt_args_set_notif_msg(args, message.data(), message.size()),
                      "opt_args_set_notif_msg", [&] { return text(message.size(), " bytes"); });
        library.check(fn.opt_args_set_has_notif(args, true), "opt_args_set_has_notif", no_detail);
    }
    if (options.skip_merge) {
        library.check(fn.opt_args_set_skip_desc_merge(args, true), "opt_args_set_skip_desc_merge",
                      no_detail);
    }
    if (!options.address.ip.empty()) {
        library.check(fn.opt_args_set_ip_addr(args, options.address.ip.c_str()),
                      "opt_args_set_ip_addr", [&] { return options.address.ip; });
    }
    if (options.address.port != 0) {
        library.check(fn.opt_args_set_port(args, options.address.port), "opt_args_set_port",
                      [&] { return text("port ", options.address.port); });
    }
    return owned;
}

}  // namespace pynixlkv::nixl
