#include <pybind11/chrono.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "bindings/py_shared.hpp"
#include "bindings/py_wait.hpp"
#include "kv/expansion.hpp"
#include "nixl/driver.hpp"
#include "nixl/library.hpp"
#include "transfer/agent.hpp"
#include "transfer/device_contexts.hpp"
#include "transfer/fake_driver.hpp"
#include "ucx/driver.hpp"

namespace py = pybind11;

namespace pynixlkv::bindings {

namespace {

using namespace transfer;

using ReleaseGil = py::call_guard<GilRelease>;
using DescriptorArray = py::array_t<std::uint64_t, py::array::c_style>;

std::vector<Descriptor> copy_rows(const DescriptorArray& array) {
    if (array.ndim() != 2 || array.shape(1) != 3) {
        throw Error("PlanError", "descriptors must be a uint64 array of shape (n, 3)");
    }
    std::vector<Descriptor> rows(static_cast<std::size_t>(array.shape(0)));
    if (!rows.empty()) {
        std::memcpy(rows.data(), array.data(), rows.size() * sizeof(Descriptor));
    }
    return rows;
}

std::vector<Span> copy_spans(const DescriptorArray& rows, const std::vector<int>& memories,
                             const std::vector<bool>& read_only) {
    std::vector<Span> spans;
    const std::vector<Descriptor> copied = copy_rows(rows);
    if (copied.size() != memories.size() || copied.size() != read_only.size()) {
        throw Error("ConfigError", "each row needs a memory type and whether it is read-only");
    }
    for (std::size_t i = 0; i < copied.size(); ++i) {
        spans.push_back({copied[i], static_cast<Memory>(memories[i]), read_only[i]});
    }
    return spans;
}

using Note = py::typing::Tuple<py::str, py::bytes>;

py::typing::List<Note> take_notifications(Agent& agent, double timeout) {
    std::vector<Notification> notes;
    wait_in_slices(timeout, [&](TimePoint until) {
        notes = agent.take_notifications(until);
        return !notes.empty();
    });
    py::typing::List<Note> result;
    for (const auto& note : notes) {
        result.append(py::make_tuple(name_of(note.peer), py::bytes(note.message)));
    }
    return result;
}

/// The arguments of pynixlkv.errors.from_native.
using Cause = py::typing::Tuple<py::str, py::str, py::str, py::int_, py::str, py::str>;

std::optional<Cause> cause(const Transfer& t) {
    const auto error = t.cause();
    if (!error) {
        return std::nullopt;
    }
    return Cause(py::make_tuple(error->kind(), error->what(), error->library(), error->status(),
                                error->call(), error->detail()));
}

/// The fields of pynixlkv.transfer.TransferResult.
auto result(const Transfer& t) {
    const TransferStats stats = t.stats();
    const auto seconds = [](std::int64_t ns) { return static_cast<double>(ns) * 1e-9; };
    return std::tuple(stats.bytes, stats.descriptors, stats.batches, stats.prepared,
                      seconds(stats.queued_ns), seconds(stats.expand_ns), seconds(stats.make_ns),
                      seconds(stats.post_ns), seconds(stats.total_ns));
}

Submission make_submission(int op, std::shared_ptr<Peer> peer, std::optional<Bytes> notify,
                           double timeout) {
    Submission submission;
    submission.op = static_cast<Op>(op);
    submission.peer = std::move(peer);
    if (notify) {
        submission.notify = std::move(notify->value);
    }
    submission.timeout = duration(timeout);
    return submission;
}

std::shared_ptr<Transfer> submit_descriptors(Agent& agent, int op, std::shared_ptr<Peer> peer,
                                             const DescriptorArray& local,
                                             const DescriptorArray& remote,
                                             std::optional<Bytes> notify, double timeout) {
    Submission submission = make_submission(op, std::move(peer), std::move(notify), timeout);
    submission.local = copy_rows(local);
    submission.remote = copy_rows(remote);
    const GilRelease release;
    return agent.submit(std::move(submission));
}

std::shared_ptr<Transfer> submit_plan(Agent& agent, int op, std::shared_ptr<Peer> peer,
                                      const std::shared_ptr<kv::BlockTables>& tables,
                                      std::optional<Bytes> notify, double timeout) {
    Submission submission = make_submission(op, std::move(peer), std::move(notify), timeout);
    submission.tables = tables;
    const GilRelease release;
    return agent.submit(std::move(submission));
}

std::shared_ptr<Agent> start(const std::string& name, const Bytes& incarnation,
                             const DriverFactory& factory) {
    AgentOptions options;
    options.incarnation = incarnation.value;
    const GilRelease release;
    return std::make_shared<Agent>(name, factory, options);
}

}  // namespace

void bind_transfer(py::module_ m) {
    py::classh<Registration>(m, "Registration")
        .def_property_readonly("uses", &Registration::uses)
        .def_property_readonly("is_open", &Registration::is_open)
        .def_property_readonly("read_only", [](const Registration& r) {
            std::vector<bool> read_only;
            for (const Span& span : r.spans()) {
                read_only.push_back(span.is_read_only);
            }
            return read_only;
        });

    py::classh<Peer>(m, "Peer")
        .def_property_readonly("name", &Peer::name)
        .def_property_readonly("generation", &Peer::generation)
        .def_property_readonly("transports", [](const Peer& p) { return p.transports(); })
        .def_property_readonly("is_local", &Peer::is_local)
        .def_property_readonly("state", [](const Peer& p) { return static_cast<int>(p.state()); });

    py::classh<Transfer>(m, "Transfer")
        .def_property_readonly("id", &Transfer::id)
        .def_property_readonly("state",
                               [](const Transfer& t) { return static_cast<int>(t.state()); })
        .def_property_readonly("is_quiet", &Transfer::is_quiet)
        .def_property_readonly("message", &Transfer::message)
        .def_property_readonly("cause", &cause)
        .def_property_readonly("bytes_done", [](const Transfer& t) { return t.stats().bytes_done; })
        .def_property_readonly("result", &result)
        .def(
            "wait",
            [](const Transfer& t, double timeout, bool for_quiet) {
                return wait_in_slices(timeout,
                                      [&](TimePoint until) { return t.wait(until, for_quiet); });
            },
            py::arg("timeout"), py::arg("for_quiet") = false);

    py::classh<Agent>(m, "Agent")
        .def_property_readonly("name", &Agent::name)
        .def(
            "register_memory",
            [](Agent& a, const DescriptorArray& rows, const std::vector<int>& memories,
               const std::vector<bool>& read_only) {
                auto spans = copy_spans(rows, memories, read_only);
                const GilRelease release;
                return a.register_memory(std::move(spans));
            },
            py::arg("rows"), py::arg("memories"), py::arg("read_only"))
        .def("deregister", &Agent::deregister, ReleaseGil(), py::arg("registration"))
        .def(
            "check_registered",
            [](const Agent& a, const DescriptorArray& rows) {
                const auto copied = copy_rows(rows);
                const GilRelease release;
                a.check_registered(copied);
            },
            py::arg("rows"))
        .def("metadata",
             [](Agent& a) { return py::bytes(without_gil([&] { return a.metadata(); })); })
        .def(
            "connect",
            [](Agent& a, const std::string& name, const Bytes& incarnation, const Bytes& metadata,
               const DescriptorArray& rows, const std::vector<int>& memories,
               const std::vector<bool>& read_only) {
                const auto spans = copy_spans(rows, memories, read_only);
                const GilRelease release;
                return a.connect(name, incarnation.value, metadata.value, spans);
            },
            py::arg("name"), py::arg("incarnation"), py::arg("metadata"), py::arg("rows"),
            py::arg("memories"), py::arg("read_only"))
        .def(
            "open_file",
            [](Agent& a, const std::string& name, int fd, std::uint64_t address,
               std::uint64_t nbytes, bool read_only) {
                return a.open_file(name, fd, {{address, nbytes, 0}, Memory::kFile, read_only});
            },
            ReleaseGil(), py::arg("name"), py::arg("fd"), py::arg("address"), py::arg("nbytes"),
            py::arg("read_only"))
        .def("is_alive", &Agent::is_alive, ReleaseGil(), py::arg("peer"))
        .def("disconnect", &Agent::disconnect, ReleaseGil(), py::arg("peer"))
        .def("submit_descriptors", &submit_descriptors, py::arg("op"), py::arg("peer"),
             py::arg("local"), py::arg("remote"), py::arg("notify"), py::arg("timeout"))
        .def("submit_plan", &submit_plan, py::arg("op"), py::arg("peer"), py::arg("tables"),
             py::arg("notify"), py::arg("timeout"))
        .def("cancel", &Agent::cancel, ReleaseGil(), py::arg("transfer"))
        .def("watch", &Agent::watch, ReleaseGil(), py::arg("transfer"))
        .def("take_completed", &Agent::take_completed, ReleaseGil())
        .def_property_readonly("completion_fd", &Agent::completion_fd)
        .def(
            "notify",
            [](Agent& a, const std::shared_ptr<Peer>& peer, const Bytes& message) {
                a.notify(peer, message.value);
            },
            ReleaseGil(), py::arg("peer"), py::arg("message"))
        .def("take_notifications", &take_notifications, py::arg("timeout"))
        .def(
            "wait_activity",
            [](const Agent& a, std::uint64_t seen, double timeout) {
                std::uint64_t count = seen;
                wait_in_slices(timeout, [&](TimePoint until) {
                    count = a.wait_activity(seen, until);
                    return count != seen;
                });
                return count;
            },
            py::arg("seen"), py::arg("timeout"))
        .def("wake_waiters", &Agent::wake_waiters, ReleaseGil())
        .def_property_readonly("quarantined", &Agent::quarantined)
        .def_property_readonly("running", &Agent::running)
        .def(
            "close",
            [](Agent& a, double timeout) {
                return wait_in_slices(timeout, [&](TimePoint until) { return a.close(until); });
            },
            py::arg("timeout"))
        .def_property_readonly("is_closed", &Agent::is_closed)
        .def(
            "stop", [](Agent& a, double timeout) { a.stop(after(timeout)); }, ReleaseGil(),
            py::arg("timeout"));

    py::classh<FakeNetwork>(
        m, "FakeNetwork",
        "The fake agents that can reach each other, and the faults between them. Thread-safe.\n\n"
        "Every method that names an agent raises `UnknownPeerError` if there is none of that name.")
        .def(py::init<>())
        .def(
            "set_delay",
            [](FakeNetwork& n, const std::string& name, double seconds) {
                n.set_delay(name, duration(seconds));
            },
            ReleaseGil(), py::arg("agent"), py::arg("seconds"),
            "Make operations to the agent take this long; half of each batch moves immediately.")
        .def("pause", &FakeNetwork::pause, ReleaseGil(), py::arg("agent"),
             "Leave operations to the agent pending, as if its process were stopped.")
        .def("resume", &FakeNetwork::resume, ReleaseGil(), py::arg("agent"),
             "Undo `pause`; pending operations go on.")
        .def("kill", &FakeNetwork::kill, ReleaseGil(), py::arg("agent"),
             "Break all connections to the agent; a new one of the same name can be made.")
        .def("fail_next", &FakeNetwork::fail_next, ReleaseGil(), py::arg("agent"),
             py::arg("count") = 1,
             "Let the next `count` operations to the agent end with a library error.")
        .def("drop_notifications", &FakeNetwork::drop_notifications, ReleaseGil(), py::arg("agent"),
             py::arg("count") = 1, "Lose the next `count` notifications to the agent.");

    m.def(
        "device_memory_kind",
        [](std::uint64_t address)
            -> std::optional<std::tuple<std::string, std::string, bool, bool>> {
            const auto kind = DeviceContexts::kind_of(address);
            if (!kind) {
                return std::nullopt;
            }
            return std::tuple(kind->name, kind->advice, kind->is_exportable, kind->is_rdma_capable);
        },
        ReleaseGil(), py::arg("address"),
        "Return how device memory was allocated, the setting to change, and whether other "
        "processes "
        "and network cards can reach the memory; None for other memory.");

    m.def(
        "fake_agent",
        [](const std::string& name, const Bytes& incarnation,
           const std::shared_ptr<FakeNetwork>& network) {
            return start(name, incarnation,
                         [name, network] { return std::make_unique<FakeDriver>(name, network); });
        },
        py::arg("name"), py::arg("incarnation"), py::arg("network"));

    m.def(
        "device_driver",
        [] {
            auto state = DeviceContexts::driver_state();
            return std::tuple(std::move(state.problem), state.has_dma_buf);
        },
        ReleaseGil(),
        "Open the CUDA driver; return why device memory cannot be used, empty if it can, and "
        "whether network cards reach all GPUs by dma-buf.");

    m.def(
        "nixl_agent",
        [](const std::string& name, const Bytes& incarnation,
           const Shared<const nixl::Library>& library, const std::string& backend,
           const std::map<std::string, std::string>& backend_params, const std::string& storage,
           const std::map<std::string, std::string>& storage_params,
           std::uint64_t progress_delay_us) {
            nixl::DriverOptions options;
            options.agent.progress_thread = true;
            options.agent.progress_delay_us = progress_delay_us;
            options.backend = backend;
            options.backend_params = backend_params;
            options.storage = {storage, storage_params};
            return start(name, incarnation, [library = library.ptr(), name, options] {
                return std::make_unique<nixl::NixlDriver>(library, name, options);
            });
        },
        py::arg("name"), py::arg("incarnation"), py::arg("library"), py::arg("backend"),
        py::arg("backend_params"), py::arg("storage"), py::arg("storage_params"),
        py::arg("progress_delay_us"));

    m.def(
        "ucx_agent",
        [](const std::string& name, const Bytes& incarnation, const Shared<ucx::Context>& context,
           bool error_handling, std::size_t copy_threads) {
            const auto mode = error_handling ? ucx::capi::kErrorPeer : ucx::capi::kErrorNone;
            return start(name, incarnation, [context = context.ptr(), name, mode, copy_threads] {
                return std::make_unique<ucx::UcxDriver>(context, name, mode, copy_threads);
            });
        },
        py::arg("name"), py::arg("incarnation"), py::arg("context"), py::arg("error_handling"),
        py::arg("copy_threads"));
}

}  // namespace pynixlkv::bindings
