#include <pybind11/chrono.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "bindings/py_shared.hpp"
#include "bindings/py_wait.hpp"
#include "kv/expansion.hpp"
#include "nixl/driver.hpp"
#include "nixl/library.hpp"
#include "transfer/agent.hpp"
#include "transfer/fake_driver.hpp"
#include "transfer/plan_source.hpp"
#include "ucx/driver.hpp"

namespace py = pybind11;

namespace pynixlkv::bindings {

namespace {

using transfer::Agent;
using transfer::AgentOptions;
using transfer::FakeDriver;
using transfer::FakeNetwork;
using transfer::Memory;
using transfer::Op;
using transfer::Peer;
using transfer::Registration;
using transfer::Span;
using transfer::Submission;
using transfer::TimePoint;
using transfer::Transfer;

using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using RowArray = py::array_t<std::uint64_t, py::array::c_style>;

std::vector<Row> copy_rows(const RowArray& array) {
    if (array.ndim() != 2 || array.shape(1) != 3) {
        throw Error("PlanError", "descriptors must be a uint64 array of shape (n, 3)");
    }
    std::vector<Row> rows(static_cast<std::size_t>(array.shape(0)));
    if (!rows.empty()) {
        std::memcpy(rows.data(), array.data(), rows.size() * sizeof(Row));
    }
    return rows;
}

std::vector<Span> copy_spans(const RowArray& rows, const std::vector<int>& memories) {
    std::vector<Span> spans;
    const std::vector<Row> copied = copy_rows(rows);
    if (copied.size() != memories.size()) {
        throw Error("ConfigError", "as many memory types as rows are needed");
    }
    for (std::size_t i = 0; i < copied.size(); ++i) {
        spans.push_back({copied[i], static_cast<Memory>(memories[i])});
    }
    return spans;
}

py::list notification_list(const std::vector<transfer::Notification>& notes) {
    py::list result;
    for (const auto& note : notes) {
        result.append(py::make_tuple(name_of(note.peer), py::bytes(note.message)));
    }
    return result;
}

py::list take_notifications(Agent& agent, double timeout) {
    std::vector<transfer::Notification> notes;
    wait_in_slices(timeout, [&](TimePoint until) {
        notes = agent.take_notifications(until);
        return !notes.empty();
    });
    return notification_list(notes);
}

py::object cause(const Transfer& t) {
    const auto error = t.cause();
    if (!error) {
        return py::none();
    }
    return py::make_tuple(error->kind(), error->what(), error->library(), error->status(),
                          error->call(), error->detail());
}

py::dict stats(const Transfer& t) {
    const transfer::TransferStats s = t.stats();
    py::dict d;
    d["bytes"] = s.bytes;
    d["bytes_done"] = s.bytes_done;
    d["descriptors"] = s.descriptors;
    d["batches"] = s.batches;
    d["queued_ns"] = s.queued_ns;
    d["prepared"] = s.prepared;
    d["expand_ns"] = s.expand_ns;
    d["make_ns"] = s.make_ns;
    d["post_ns"] = s.post_ns;
    d["total_ns"] = s.total_ns;
    return d;
}

Submission make_submission(int op, std::shared_ptr<Peer> peer, std::optional<py::bytes> notify,
                           double timeout) {
    Submission submission;
    submission.op = static_cast<Op>(op);
    submission.peer = std::move(peer);
    if (notify) {
        submission.notify = std::string(*notify);
    }
    submission.timeout = duration(timeout);
    return submission;
}

std::shared_ptr<Transfer> submit_descriptors(Agent& agent, int op, std::shared_ptr<Peer> peer,
                                             const RowArray& local, const RowArray& remote,
                                             std::optional<py::bytes> notify, double timeout) {
    Submission submission = make_submission(op, std::move(peer), std::move(notify), timeout);
    submission.local_extents = copy_rows(local);
    submission.remote_extents = copy_rows(remote);
    const py::gil_scoped_release release;
    return agent.submit(std::move(submission));
}

std::shared_ptr<Transfer> submit_plan(Agent& agent, int op, std::shared_ptr<Peer> peer,
                                      const std::shared_ptr<kv::BlockTables>& tables,
                                      std::optional<py::bytes> notify, double timeout) {
    Submission submission = make_submission(op, std::move(peer), std::move(notify), timeout);
    const py::gil_scoped_release release;
    transfer::set_plan(submission, tables);
    return agent.submit(std::move(submission));
}

}  // namespace

void bind_transfer(py::module_ m) {
    py::classh<Registration>(m, "Registration")
        .def_property_readonly("uses", &Registration::uses)
        .def_property_readonly("is_open", &Registration::is_open);

    py::classh<Peer>(m, "Peer")
        .def_property_readonly("name", &Peer::name)
        .def_property_readonly("generation", &Peer::generation)
        .def_property_readonly("state", [](const Peer& p) { return static_cast<int>(p.state()); })
        .def_property_readonly("reason", &Peer::reason);

    py::classh<Transfer>(m, "Transfer")
        .def_property_readonly("id", &Transfer::id)
        .def_property_readonly("state",
                               [](const Transfer& t) { return static_cast<int>(t.state()); })
        .def_property_readonly("is_quiet", &Transfer::is_quiet)
        .def_property_readonly("message", &Transfer::message)
        .def_property_readonly("cause", &cause)
        .def_property_readonly("stats", &stats)
        .def(
            "wait",
            [](const Transfer& t, double timeout, bool for_quiet) {
                return wait_in_slices(timeout,
                                      [&](TimePoint until) { return t.wait(until, for_quiet); });
            },
            py::arg("timeout"), py::arg("for_quiet") = false);

    py::classh<Agent>(m, "Agent")
        .def_property_readonly("name", &Agent::name)
        .def("register_memory",
             [](Agent& e, const RowArray& rows, const std::vector<int>& memories) {
                 auto spans = copy_spans(rows, memories);
                 const py::gil_scoped_release release;
                 return e.register_memory(std::move(spans));
             })
        .def("deregister", &Agent::deregister, ReleaseGil())
        .def("check_registered",
             [](const Agent& e, const RowArray& rows) {
                 const auto copied = copy_rows(rows);
                 const py::gil_scoped_release release;
                 e.check_registered(copied);
             })
        .def("metadata",
             [](Agent& e) {
                 std::string metadata;
                 {
                     const py::gil_scoped_release release;
                     metadata = e.metadata();
                 }
                 return py::bytes(metadata);
             })
        .def("connect",
             [](Agent& e, const std::string& name, const py::bytes& incarnation,
                const py::bytes& metadata, const RowArray& rows, const std::vector<int>& memories) {
                 const std::string incarnation_bytes(incarnation);
                 const std::string metadata_bytes(metadata);
                 const auto spans = copy_spans(rows, memories);
                 const py::gil_scoped_release release;
                 return e.connect(name, incarnation_bytes, metadata_bytes, spans);
             })
        .def("is_alive", &Agent::is_alive, ReleaseGil())
        .def("disconnect", &Agent::disconnect, ReleaseGil())
        .def("submit_descriptors", &submit_descriptors, py::arg("op"), py::arg("peer"),
             py::arg("local"), py::arg("remote"), py::arg("notify"), py::arg("timeout"))
        .def("submit_plan", &submit_plan, py::arg("op"), py::arg("peer"), py::arg("tables"),
             py::arg("notify"), py::arg("timeout"))
        .def("cancel", &Agent::cancel, ReleaseGil())
        .def("watch", &Agent::watch, ReleaseGil())
        .def("take_completed", &Agent::take_completed, ReleaseGil())
        .def_property_readonly("completion_fd", &Agent::completion_fd)
        .def("notify",
             [](Agent& e, const std::shared_ptr<Peer>& peer, const py::bytes& message) {
                 std::string bytes(message);
                 const py::gil_scoped_release release;
                 e.notify(peer, std::move(bytes));
             })
        .def("take_notifications", &take_notifications, py::arg("timeout"))
        .def(
            "wait_activity",
            [](const Agent& e, std::uint64_t seen, double timeout) {
                std::uint64_t count = seen;
                wait_in_slices(timeout, [&](TimePoint until) {
                    count = e.wait_activity(seen, until);
                    return count != seen;
                });
                return count;
            },
            py::arg("seen"), py::arg("timeout"))
        .def("wake_waiters", &Agent::wake_waiters, ReleaseGil())
        .def_property_readonly("quarantined", &Agent::quarantined)
        .def_property_readonly("running", &Agent::running)
        .def("close",
             [](Agent& e, double timeout) {
                 return wait_in_slices(timeout, [&](TimePoint until) { return e.close(until); });
             })
        .def_property_readonly("is_closed", &Agent::is_closed)
        .def("stop", [](Agent& e, double timeout) { e.stop(after(timeout)); }, ReleaseGil());

    py::classh<FakeNetwork>(m, "FakeNetwork")
        .def(py::init<>())
        .def(
            "set_delay",
            [](FakeNetwork& n, const std::string& name, double seconds) {
                n.set_delay(name, duration(seconds));
            },
            ReleaseGil())
        .def("pause", &FakeNetwork::pause, ReleaseGil())
        .def("resume", &FakeNetwork::resume, ReleaseGil())
        .def("kill", &FakeNetwork::kill, ReleaseGil())
        .def("fail_next", &FakeNetwork::fail_next, ReleaseGil())
        .def("drop_notifications", &FakeNetwork::drop_notifications, ReleaseGil());

    m.def("fake_agent", [](const std::string& name, const py::bytes& incarnation,
                           const std::shared_ptr<FakeNetwork>& network) {
        AgentOptions options;
        options.incarnation = std::string(incarnation);
        const py::gil_scoped_release release;
        return std::make_shared<Agent>(
            name, [name, network] { return std::make_unique<FakeDriver>(name, network); }, options);
    });

    m.def(
        "nixl_agent",
        [](const std::string& name, const py::bytes& incarnation,
           const Shared<const nixl::Library>& library, const std::string& backend,
           const std::map<std::string, std::string>& backend_params,
           std::uint64_t progress_delay_us) {
            nixl::DriverOptions driver;
            driver.agent.progress_thread = true;
            driver.agent.progress_delay_us = progress_delay_us;
            driver.backend = backend;
            driver.backend_params = backend_params;
            AgentOptions options;
            options.incarnation = std::string(incarnation);
            const py::gil_scoped_release release;
            return std::make_shared<Agent>(
                name,
                [library = library.ptr(), name, driver] {
                    return std::make_unique<nixl::NixlDriver>(library, name, driver);
                },
                options);
        },
        py::arg("name"), py::arg("incarnation"), py::arg("library"), py::arg("backend"),
        py::arg("backend_params"), py::arg("progress_delay_us"));

    m.def(
        "ucx_agent",
        [](const std::string& name, const py::bytes& incarnation,
           const Shared<ucx::Context>& context, bool error_handling) {
            AgentOptions options;
            options.incarnation = std::string(incarnation);
            const py::gil_scoped_release release;
            return std::make_shared<Agent>(
                name,
                [context = context.ptr(), name, error_handling] {
                    return std::make_unique<ucx::UcxDriver>(
                        context, name,
                        error_handling ? ucx::capi::kErrorPeer : ucx::capi::kErrorNone);
                },
                options);
        },
        py::arg("name"), py::arg("incarnation"), py::arg("context"), py::arg("error_handling"));
}

}  // namespace pynixlkv::bindings
