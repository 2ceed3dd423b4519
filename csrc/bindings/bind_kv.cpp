#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "bindings/bind.hpp"
#include "bindings/py_shared.hpp"
#include "kv/digest.hpp"
#include "kv/expansion.hpp"

namespace py = pybind11;

namespace pynixlkv::bindings {

namespace {

using kv::BlockTables;
using kv::Expansion;
using kv::Geometry;
using kv::Plan;

using IdArray = py::array_t<std::int64_t, py::array::c_style>;
using DescriptorArray = py::array_t<std::uint64_t, py::array::c_style>;
using Bounds = std::pair<std::uint64_t, std::uint64_t>;
/// Local and remote block ids, num_tokens or -1, local_start, remote_start.
using GroupTables = std::tuple<IdArray, IdArray, std::int64_t, std::int64_t, std::int64_t>;

std::uint64_t number(const py::handle& object) {
    try {
        return object.cast<std::uint64_t>();
    } catch (const py::cast_error&) {
        throw Error("LayoutError", "a number of the geometry is negative or above 2**64 - 1");
    }
}

kv::Region region_of(const py::handle& source) {
    kv::Region region{number(source.attr("span")), number(source.attr("address")), {}};
    for (std::size_t i = 0; i < kv::kNumAxes; ++i) {
        const py::object axis = source.attr(kv::kAxisNames[i]);
        region.axes[i] = {number(axis.attr("start")), number(axis.attr("count")),
                          number(axis.attr("stride"))};
    }
    return region;
}

kv::Group group_of(const py::handle& source) {
    const py::sequence dcp = source.attr("dcp");
    const std::uint64_t block_size = number(source.attr("block_size"));
    kv::Group group{number(source.attr("element_bytes")),
                    {number(source.attr("num_blocks")), block_size == 0 ? 1 : block_size,
                     number(dcp[0]), number(dcp[1]), number(source.attr("interleave")),
                     number(source.attr("tokens_per_state"))},
                    !source.attr("kv_heads").is_none()};
    group.table = source.attr("table").cast<std::string>();
    const auto opaque_axes = source.attr("opaque_axes").cast<std::string>();
    for (std::size_t i = 0; i < kv::kNumAxes; ++i) {
        if (opaque_axes.find(kv::kAxisLetters[i]) != std::string::npos) {
            group.opaque_axes |= std::uint64_t{1} << i;
        }
    }
    for (const py::handle& region : source.attr("regions")) {
        group.regions.push_back(region_of(region));
    }
    return group;
}

/// @param source a pynixlkv.geometry.Geometry
Geometry geometry_of(const py::object& source) {
    Geometry geometry;
    for (const py::handle& span : source.attr("spans")) {
        geometry.spans.push_back({number(span.attr("address")), number(span.attr("nbytes")),
                                  number(span.attr("device"))});
    }
    for (const py::handle& group : source.attr("groups")) {
        geometry.groups.push_back(group_of(group));
    }
    const GilRelease release;
    return checked(std::move(geometry));
}

std::vector<kv::Interval> intervals(const std::vector<Bounds>& bounds) {
    std::vector<kv::Interval> result;
    for (const auto& [start, stop] : bounds) {
        result.push_back({start, stop});
    }
    return result;
}

std::shared_ptr<Plan> make_plan(const Geometry& local, const Geometry& remote,
                                const std::vector<std::size_t>& local_groups,
                                const std::vector<std::size_t>& remote_groups,
                                std::optional<std::uint64_t> max_bytes,
                                const std::optional<std::vector<Bounds>>& heads,
                                const std::vector<std::vector<Bounds>>& layers) {
    const GilRelease release;
    kv::Selection selection;
    selection.max_bytes = std::min(max_bytes.value_or(kv::kMaxNumber), kv::kMaxNumber);
    if (heads) {
        selection.heads = intervals(*heads);
    }
    for (const auto& of_group : layers) {
        selection.layers.push_back(intervals(of_group));
    }
    return std::make_shared<Plan>(select(local, local_groups), select(remote, remote_groups),
                                  selection);
}

kv::Table table_of(const GroupTables& group) {
    const auto& [local, remote, num_tokens, local_start, remote_start] = group;
    return {{std::span(local.data(), static_cast<std::size_t>(local.size())),
             std::span(remote.data(), static_cast<std::size_t>(remote.size()))},
            num_tokens,
            {local_start, remote_start}};
}

std::shared_ptr<BlockTables> make_tables(const std::shared_ptr<Plan>& plan,
                                         const std::vector<GroupTables>& groups) {
    std::vector<kv::Table> tables;
    for (const GroupTables& group : groups) {
        tables.push_back(table_of(group));
    }
    const GilRelease release;
    return std::make_shared<BlockTables>(plan, tables);
}

/// @return number of rows
std::size_t emit(const Expansion& expansion, DescriptorArray& local, DescriptorArray& remote) {
    auto* const local_rows = reinterpret_cast<Descriptor*>(local.mutable_data());
    auto* const remote_rows = reinterpret_cast<Descriptor*>(remote.mutable_data());
    return without_gil([&] { return expansion.emit(local_rows, remote_rows); });
}

/// @param local, remote writable, aligned, of shape (n, 3)
std::size_t descriptors_into(const BlockTables& tables, DescriptorArray local,
                             DescriptorArray remote) {
    const auto expansion = without_gil([&] { return Expansion(tables); });
    const auto rows = static_cast<std::size_t>(std::min(local.shape(0), remote.shape(0)));
    if (rows < expansion.bound()) {
        throw Error("PlanError",
                    text("out has ", local.shape(0), " local and ", remote.shape(0),
                         " remote rows; this transfer needs room for ", expansion.bound(),
                         " of each, as before merging: give larger arrays"));
    }
    return emit(expansion, local, remote);
}

std::pair<DescriptorArray, DescriptorArray> descriptors(const BlockTables& tables) {
    const auto expansion = without_gil([&] { return Expansion(tables); });
    const std::array<std::size_t, 2> shape{expansion.bound(), 3};
    DescriptorArray local(shape);
    DescriptorArray remote(shape);
    const std::size_t count = emit(expansion, local, remote);
    // Returns the memory that merging has saved; nothing else refers to the arrays yet.
    local.resize({count, std::size_t{3}}, false);
    remote.resize({count, std::size_t{3}}, false);
    return {local, remote};
}

std::span<const std::int64_t> view(const IdArray& array) {
    return {array.data(), static_cast<std::size_t>(array.size())};
}

/// @param source a pynixlkv.digest.DigestScope
/// @param tokens the positions to count, which may be fewer than the scope's
DescriptorArray digests(const Geometry& geometry, std::size_t group, const IdArray& blocks,
                        std::uint64_t start, const py::object& source, Bounds tokens) {
    const auto numbers = [&](const char* name) { return source.attr(name).cast<IdArray>(); };
    const std::array arrays{numbers("units"), numbers("layers"), numbers("heads")};
    kv::DigestScope scope{
        tokens.first,    tokens.second,   number(source.attr("unit")),   view(arrays[0]),
        view(arrays[1]), view(arrays[2]), number(source.attr("planes")), {}};
    for (const py::handle turns : source.attr("turns")) {
        const auto [rank, ranks, interleave] = turns.cast<std::array<std::uint64_t, 3>>();
        scope.turns.push_back({rank, ranks, interleave});
    }
    DescriptorArray out(
        {scope.layers.size(), std::size_t{scope.num_kv}, scope.heads.size(), scope.units.size()});
    const std::span values(out.mutable_data(), scope.size());
    const py::gil_scoped_release release;
    std::fill(values.begin(), values.end(), 0);
    add_digests(geometry.groups.at(group), view(blocks), start, scope, values);
    return out;
}

}  // namespace

void bind_kv(py::module_ m) {
    py::classh<Geometry>(m, "Geometry")
        .def(py::init(&geometry_of), py::arg("geometry"))
        // Reads the memory: for caches of this process only.
        .def("digests", &digests, py::arg("group"), py::arg("blocks"), py::arg("start"),
             py::arg("scope"), py::arg("tokens"));

    py::classh<BlockTables>(m, "BlockTables")
        .def(
            "check_written_once",
            [](const BlockTables& tables, bool remote) {
                tables.check_written_once(remote ? kv::Side::kRemote : kv::Side::kLocal);
            },
            py::arg("remote"), py::call_guard<GilRelease>())
        .def("descriptors", &descriptors)
        .def("descriptors_into", &descriptors_into, py::arg("local").noconvert(),
             py::arg("remote").noconvert())
        .def("totals",
             [](const BlockTables& tables) {
                 const auto expansion = without_gil([&] { return Expansion(tables); });
                 return std::tuple(expansion.bytes(), expansion.num_runs());
             })
        .def("remote_blocks", [](const BlockTables& tables) {
            std::vector<std::vector<std::uint64_t>> blocks;
            for (const BlockTables::GroupTables& group : tables.groups()) {
                const std::size_t first = group.overlap.first[1];
                const auto ids =
                    std::span(group.ids[1]).subspan(first, group.overlap.last[1] - first);
                blocks.emplace_back(ids.begin(), ids.end());
            }
            return blocks;
        });

    py::classh<Plan>(m, "Plan")
        .def(py::init(&make_plan), py::arg("local"), py::arg("remote"), py::arg("local_groups"),
             py::arg("remote_groups"), py::arg("max_bytes"), py::arg("heads"), py::arg("layers"))
        .def("tables", &make_tables, py::arg("groups"))
        .def(
            "overlap",
            [](const Plan& plan, std::size_t group, const GroupTables& tables) {
                const kv::Overlap o = plan.overlap(group, table_of(tables));
                return std::tuple(Bounds(o.begin, o.end), Bounds(o.first[0], o.last[0]),
                                  Bounds(o.first[1], o.last[1]));
            },
            py::arg("group"), py::arg("tables"))
        .def("block_runs", &Plan::block_runs, py::arg("group"));
}

}  // namespace pynixlkv::bindings
