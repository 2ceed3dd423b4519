#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <set>

#include "base/error.hpp"
#include "base/live_count.hpp"
#include "check.hpp"
#include "fake_nixl.hpp"
#include "nixl/agent.hpp"
#include "nixl/driver.hpp"
#include "nixl/prepared_list.hpp"
#include "nixl/registration.hpp"
#include "nixl/xfer_request.hpp"

using namespace pynixlkv;
using namespace pynixlkv::nixl;
using std::chrono::milliseconds;

namespace {

constexpr Duration kNoPatience{0};

/// Kind and message of the Error that a callable throws.
template <class Body>
Error error_of(Body&& body) {
    try {
        body();
    } catch (const Error& e) {
        return e;
    }
    throw std::runtime_error("nothing was thrown");
}

bool has(const Error& e, const std::string& part) {
    return std::string(e.what()).find(part) != std::string::npos;
}

void check_nothing_alive() {
    for (const auto& [name, count] : LiveCounters::snapshot()) {
        if (count != 0) {
            throw std::runtime_error(text(name, " has ", count, " live objects"));
        }
    }
    if (!fake::state().misuse.empty()) {
        throw std::runtime_error("misused handle in " + fake::state().misuse.front());
    }
    CHECK_EQ(fake::state().live.size(), 0U);
    CHECK_EQ(fake::state().unreleased.size(), 0U);
}

const std::array<Descriptor, 4> kRows{Descriptor{0x1000, 64, 0}, Descriptor{0x1040, 64, 0},
                                      Descriptor{0x1080, 64, 0}, Descriptor{0x10c0, 64, 0}};
const std::array<Descriptor, 1> kRegion{Descriptor{0x1000, 256, 0}};
const std::array<std::int32_t, 2> kIndices{0, 3};

std::shared_ptr<Agent> make_agent(const AgentConfig& config = {}) {
    return std::make_shared<Agent>(fake::library(), "a", config);
}

std::shared_ptr<Registration> register_region(Agent& agent,
                                              std::shared_ptr<void> buffer = nullptr) {
    return agent.register_memory(Memory::kDram, kRegion, {}, std::move(buffer), {});
}

std::shared_ptr<XferRequest> read_rows(Agent& agent) {
    return agent.create_request(Op::kRead, Memory::kDram, kRows, Memory::kDram, kRows, "p", {});
}

/// Every verb once, in the way an application uses them.
void use_everything(const std::shared_ptr<const Library>& library) {
    const auto agent = std::make_shared<Agent>(library, "a");
    (void)agent->available_plugins();
    (void)agent->plugin_info("UCX");
    const auto backend = agent->create_backend("UCX", {{"num_workers", "1"}});
    (void)agent->backend_info(*backend);
    const CallOptions options{.backends = {backend}, .notification = "note"};
    const std::array<std::string, 1> blobs{"name"};
    (void)agent->query_memory(Memory::kFile, kRegion, blobs, options);
    const auto region = agent->register_memory(Memory::kDram, kRegion, {}, nullptr, options);
    (void)agent->local_metadata();
    (void)agent->local_partial_metadata(Memory::kDram, kRegion, options);
    const std::string peer = agent->load_remote_metadata("p");
    CHECK(agent->check_remote_metadata(peer, Memory::kDram, kRows));
    agent->make_connection(peer, options);
    agent->send_local_metadata({"127.0.0.1", 1});
    agent->send_local_partial_metadata(Memory::kDram, kRegion, options);
    agent->fetch_remote_metadata(peer, {"127.0.0.1", 1});
    agent->invalidate_local_metadata({});
    const auto local = agent->prepare("", Memory::kDram, kRows, options);
    const auto remote = agent->prepare(peer, Memory::kDram, kRows, options);
    const auto made = agent->make_request(Op::kRead, local, kIndices, remote, kIndices, options);
    const auto created = agent->create_request(Op::kWrite, Memory::kDram, kRows, Memory::kDram,
                                               kRows, peer, options);
    for (const auto& request : {made, created}) {
        (void)request->estimate_cost();
        (void)request->backend();
        fake::state().transfer = Status::kInProgress;
        CHECK(request->post("again") == XferState::kPending);
        CHECK(request->poll() == XferState::kPending);
        fake::state().transfer = Status::kSuccess;
        CHECK(request->poll() == XferState::kDone);
        (void)request->telemetry();
        CHECK(request->post() == XferState::kDone);
        CHECK(request->release(kNoPatience));
    }
    agent->notify(peer, "hello", options);
    fake::state().incoming = {{"p", "one"}, {"q", std::string("t\0wo", 4)}};
    const auto notes = agent->take_notifications({});
    CHECK_EQ(notes.size(), 2U);
    CHECK_EQ(notes[1].message, std::string("t\0wo", 4));
    local->release();
    remote->release();
    agent->invalidate_remote_metadata(peer);
    region->release();
    CHECK(agent->close(kNoPatience));
}

}  // namespace

TEST_CASE("everything that is made is destroyed once") {
    use_everything(fake::library());
    check_nothing_alive();
}

TEST_CASE("a failure of any one call leaves nothing behind") {
    std::set<std::string> failed;
    int step = 0;
    for (;; ++step) {
        const auto library = fake::library();
        fake::state().countdown = step;
        try {
            use_everything(library);
        } catch (const NativeError& e) {
            CHECK_EQ(e.library(), "nixl");
            failed.insert(e.call());
        }
        if (!fake::state().has_failed) {
            break;
        }
        fake::state().countdown = -1;
        check_nothing_alive();
    }
    CHECK(step > 100);
    CHECK(failed.size() > 50);
}

TEST_CASE("the same addresses of another kind of memory or device are other memory") {
    const auto agent = make_agent();
    const auto region = register_region(*agent);
    const std::array<Descriptor, 1> other{Descriptor{0x1000, 256, 1}};
    const auto device = agent->register_memory(Memory::kDram, other, {}, nullptr, {});
    const auto vram = agent->register_memory(Memory::kVram, kRegion, {}, nullptr, {});
    vram->release();
    CHECK_EQ(agent->prepare("", Memory::kDram, kRows, {})->size(), 4U);
    CHECK_EQ(error_of([&] { (void)agent->prepare("", Memory::kVram, kRows, {}); }).kind(),
             "NotRegisteredError");
}

TEST_CASE("a registration keeps its buffer, and its users keep it") {
    const auto agent = make_agent();
    auto buffer = std::make_shared<int>(7);
    const std::weak_ptr<int> watch = buffer;
    auto region = register_region(*agent, std::move(buffer));
    auto request = read_rows(*agent);
    region.reset();
    CHECK(!watch.expired());
    CHECK_EQ(fake::state().calls["deregister_mem"], 0);
    request.reset();
    CHECK(watch.expired());
    CHECK_EQ(fake::state().calls["deregister_mem"], 1);
}

TEST_CASE("a buffer whose deregistration fails in a destructor lives as long as the agent") {
    auto agent = make_agent();
    auto buffer = std::make_shared<int>(7);
    const std::weak_ptr<int> watch = buffer;
    auto region = register_region(*agent, std::move(buffer));
    fake::state().countdown = 0;
    region.reset();
    CHECK(!watch.expired());
    agent.reset();
    CHECK(watch.expired());
    check_nothing_alive();
}

TEST_CASE("a larger registration that starts earlier covers what a smaller one does not") {
    const auto agent = make_agent();
    const auto region = register_region(*agent);
    const std::array<Descriptor, 2> beyond{Descriptor{0x1000, 64, 0}, Descriptor{0x10f0, 17, 0}};
    CHECK_EQ(error_of([&] { (void)agent->prepare("", Memory::kDram, beyond, {}); }).kind(),
             "NotRegisteredError");
    CHECK_EQ(fake::state().calls["prep_xfer_dlist"], 0);
    const std::array<Descriptor, 1> wide{Descriptor{0x800, 0x1000, 0}};
    const auto more = agent->register_memory(Memory::kDram, wide, {}, nullptr, {});
    CHECK_EQ(agent->prepare("", Memory::kDram, beyond, {})->size(), 2U);
}

TEST_CASE("a failure of any one call leaves counted registrations whole") {
    for (int step = 0;; ++step) {
        const auto library = fake::library();
        fake::state().countdown = step;
        std::shared_ptr<Agent> agent;
        try {
            agent = std::make_shared<Agent>(library, "a");
            (void)agent->create_backend("UCX", {});
            const Rows some = Rows(kRows).first(2);
            agent->register_counted(Memory::kDram, kRows, {}, nullptr, {});
            agent->register_counted(Memory::kDram, some, {}, nullptr, {});
            const auto list = agent->prepare("", Memory::kDram, some, {});
            agent->deregister_counted(Memory::kDram, kRows, {});
            CHECK_EQ(agent->prepare("", Memory::kDram, some, {})->size(), 2U);
            agent->deregister_counted(Memory::kDram, some, {});
            CHECK_EQ(error_of([&] { agent->deregister_counted(Memory::kDram, some, {}); }).kind(),
                     "NotRegisteredError");
            CHECK(agent->end(kNoPatience));
        } catch (const NativeError&) {
            CHECK(fake::state().has_failed);
        }
        const bool has_failed = fake::state().has_failed;
        fake::state().countdown = -1;
        if (agent != nullptr) {
            CHECK(agent->end(kNoPatience));
            agent.reset();
        }
        check_nothing_alive();
        if (!has_failed) {
            break;
        }
    }
}

TEST_CASE("an unknown peer is told from other failures") {
    const auto agent = make_agent();
    fake::state().unknown_peers = {"p"};
    fake::state().countdown = 0;
    CHECK_EQ(error_of([&] { agent->notify("p", "x", {}); }).kind(), "UnknownPeerError");
    fake::state().countdown = 0;
    CHECK_EQ(error_of([&] { agent->notify("q", "x", {}); }).kind(), "backend");
}

TEST_CASE("a request knows its state without asking NIXL") {
    const auto agent = make_agent();
    const auto region = register_region(*agent);
    const auto request = read_rows(*agent);
    CHECK(request->poll() == XferState::kNotPosted);
    CHECK_EQ(error_of([&] { (void)request->telemetry(); }).kind(), "StateError");
    CHECK_EQ(fake::state().calls["get_xfer_status"], 0);
    fake::state().transfer = Status::kInProgress;
    CHECK(request->post() == XferState::kPending);
    CHECK_EQ(error_of([&] { (void)request->post(); }).kind(), "StateError");
    fake::state().transfer = Status::kBackend;
    const Error failure = error_of([&] { (void)request->poll(); });
    CHECK_EQ(failure.kind(), "backend");
    CHECK(has(failure, "get_xfer_status failed (agent 'a', peer 'p', READ of 256 bytes in 4"));
    CHECK(request->state() == XferState::kFailed);
    const int polls = fake::state().calls["get_xfer_status"];
    CHECK_EQ(error_of([&] { (void)request->poll(); }).kind(), "backend");
    CHECK_EQ(fake::state().calls["get_xfer_status"], polls);
    CHECK(request->release(kNoPatience));
}

TEST_CASE("a running request that is given up is quarantined with its buffer until it is quiet") {
    const auto agent = make_agent();
    auto buffer = std::make_shared<int>(7);
    const std::weak_ptr<int> watch = buffer;
    auto region = register_region(*agent, std::move(buffer));
    const auto create = [&] {
        auto request = read_rows(*agent);
        (void)request->post();
        return request;
    };
    fake::state().transfer = Status::kInProgress;
    auto released = create();
    CHECK(!released->release(milliseconds(1)));
    auto dropped = create();
    dropped.reset();
    CHECK_EQ(agent->num_quarantined(), 2U);
    CHECK_EQ(error_of([&] { region->release(); }).kind(), "RegistrationInUseError");
    region.reset();
    CHECK_EQ(agent->reap(), 2U);
    CHECK(!watch.expired());
    CHECK_EQ(fake::state().calls["release_xfer_req"], 0);
    fake::state().transfer = Status::kBackend;  // a failed transfer is quiet, too
    CHECK_EQ(agent->reap(), 0U);
    CHECK(watch.expired());
    CHECK_EQ(fake::state().calls["release_xfer_req"], 2);
    CHECK(agent->close(kNoPatience));
}

TEST_CASE("a request that cannot be freed is quarantined and tried again") {
    const auto agent = make_agent();
    const auto region = register_region(*agent);
    auto request = read_rows(*agent);
    fake::state().countdown = 0;
    CHECK_THROWS(NativeError, request->release(kNoPatience));
    fake::state().countdown = 0;
    request.reset();
    CHECK_EQ(agent->num_quarantined(), 1U);
    CHECK_EQ(agent->reap(), 0U);
}

TEST_CASE("closing waits for quarantined requests and says what keeps the agent open") {
    const auto agent = make_agent();
    auto region = register_region(*agent);
    auto request = read_rows(*agent);
    CHECK(has(error_of([&] { agent->close(kNoPatience); }), "1 of its requests"));
    CHECK(request->release(kNoPatience));
    CHECK(has(error_of([&] { agent->close(kNoPatience); }), "1 registrations"));
    region->release();
    CHECK(agent->close(kNoPatience));
    CHECK(agent->close(kNoPatience));
    CHECK_EQ(error_of([&] { (void)agent->local_metadata(); }).kind(), "ClosedError");
    CHECK_EQ(fake::state().calls["destroy_agent"], 1);
}

TEST_CASE("a driver whose agent cannot be made again tells every later caller why") {
    const transfer::Span span{.row = kRegion[0], .memory = Memory::kVram};
    for (const int num_successes : {1, 2, 3}) {  // the first call destroys
        NixlDriver driver(fake::library(), "a", {});
        fake::state().countdown = num_successes;
        std::vector<Notification> arrived;
        const std::string why = error_of([&] { (void)driver.register_memory({&span, 1}); }).what();
        fake::state().countdown = -1;
        for (const Error& error : {error_of([&] { (void)driver.register_memory({&span, 1}); }),
                                   error_of([&] { (void)driver.metadata(); }),
                                   error_of([&] { (void)driver.connect("p", "metadata", {}); }),
                                   error_of([&] { driver.expect_device_memory(); }),
                                   error_of([&] { (void)driver.receive(arrived); })}) {
            CHECK_EQ(std::string(error.what()), why);
        }
    }
    check_nothing_alive();
}

TEST_CASE("configuration is laid out as the library expects") {
    const AgentConfig config{.progress_thread = false,
                             .listen_thread = true,
                             .listen_port = 0x1234,
                             .thread_sync = ThreadSync::kReadWrite,
                             .progress_delay_us = 5};
    auto agent = make_agent(config);
    capi::AgentConfig classic;
    std::memcpy(&classic, fake::state().config.data(), sizeof classic);
    CHECK(!classic.enable_progress_thread && classic.enable_listen_thread);
    CHECK_EQ(classic.listen_port, 0x1234);
    CHECK_EQ(classic.thread_sync, 2);
    CHECK_EQ(classic.progress_delay_us, 5U);
    agent.reset();
    (void)fake::library();
    capi::Functions functions = fake::table();
    functions.get_version = [](int* major, int* minor, int* patch) {
        *major = 2;
        *minor = 0;
        *patch = 1;
    };
    const auto library = std::make_shared<const Library>("fake", functions);
    CHECK_EQ(library->version(), "2.0.1");
    agent = std::make_shared<Agent>(library, "a", config);
    capi::AgentConfigVersioned versioned;
    std::memcpy(&versioned, fake::state().config.data(), sizeof versioned);
    CHECK_EQ(versioned.listen_port, 0x1234);
    CHECK_EQ(versioned.thread_sync, 2);
    CHECK_EQ(versioned.progress_delay_us, 5U);
}

TEST_CASE("a stub build is refused") {
    (void)fake::library();
    fake::state().is_stub = true;
    CHECK_EQ(error_of([] { (void)Library("fake", fake::table()); }).kind(), "LibraryVersionError");
}

TEST_CASE("notifications that could not all be read are read again, not lost") {
    const auto agent = make_agent();
    fake::state().incoming = {{"p", "one"}, {"q", "two"}};
    fake::state().countdown = 6;
    CHECK_THROWS(NativeError, agent->take_notifications({}));
    CHECK_EQ(agent->take_notifications({}).size(), 2U);
    CHECK_EQ(agent->take_notifications({}).size(), 0U);
}

TEST_CASE("a forked child can drop and close but not use or destroy") {
    auto agent = make_agent();
    auto region = register_region(*agent);
    auto request = read_rows(*agent);
    const pid_t child = ::fork();
    if (child == 0) {
        int wrong = 0;
        for (const auto& use : std::vector<std::function<void()>>{
                 [&] { (void)agent->local_metadata(); }, [&] { (void)request->post(); },
                 [&] { (void)request->release(kNoPatience); }, [&] { region->release(); }}) {
            wrong += error_of(use).kind() != "ForkError";
        }
        fake::state().calls.clear();
        wrong += !agent->close(kNoPatience);
        request.reset();
        region.reset();
        agent.reset();
        wrong += !fake::state().calls.empty();
        ::_exit(wrong);
    }
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK(request->post() == XferState::kDone);
    request.reset();
    region.reset();
    agent.reset();
    check_nothing_alive();
}

TEST_CASE("an unlisted status is an error too") {
    CHECK(has(error_of([] { fake::library()->fail(static_cast<Status>(-99), "f", "d"); }),
              "unlisted status (-99)"));
}

TEST_CASE("an agent with requests that never become quiet is abandoned, not destroyed") {
    // Last: what it leaves behind stays for good, on purpose.
    auto agent = make_agent();
    auto buffer = std::make_shared<int>(7);
    const std::weak_ptr<int> watch = buffer;
    auto region = register_region(*agent, std::move(buffer));
    fake::state().transfer = Status::kInProgress;
    auto request = read_rows(*agent);
    (void)request->post();
    CHECK(!request->release(kNoPatience));
    CHECK(!agent->close(milliseconds(2)));
    CHECK(!agent->close(kNoPatience));
    CHECK_EQ(error_of([&] { (void)agent->local_metadata(); }).kind(), "ClosedError");
    request.reset();
    region.reset();
    agent.reset();
    CHECK(!watch.expired());
    CHECK_EQ(fake::state().calls["destroy_agent"], 0);
    CHECK_EQ(fake::state().calls["release_xfer_req"], 0);
}

int main() {
    return check::run();
}
