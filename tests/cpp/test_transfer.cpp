#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/live_count.hpp"
#include "check.hpp"
#include "transfer/agent.hpp"
#include "transfer/fake_driver.hpp"
#include "transfer/process_identity.hpp"

namespace pynixlkv::transfer {
std::ostream& operator<<(std::ostream& out, State state) {
    return out << static_cast<int>(state);
}
}  // namespace pynixlkv::transfer

using namespace pynixlkv;
using namespace pynixlkv::transfer;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kBlock = 64;
/// Bounds what hangs; no verdict depends on it.
constexpr auto kHang = 60s;

std::uint64_t address(const void* p) {
    return reinterpret_cast<std::uint64_t>(p);
}
TimePoint in(Clock::duration d) {
    return Clock::now() + d;
}

/// Stops the agents' threads before registrations and requests while its mutex is locked.
struct Gate {
    void pass() {
        ++arrivals;
        const std::lock_guard lock(mutex);
    }
    std::mutex mutex;
    std::atomic<int> arrivals{0};
};

class GatedDriver final : public FakeDriver {
  public:
    GatedDriver(const std::string& name, std::shared_ptr<FakeNetwork> network,
                std::shared_ptr<Gate> gate)
        : FakeDriver(name, std::move(network)), gate_(std::move(gate)) {}

    std::unique_ptr<Registered> register_memory(std::span<const Span> spans) override {
        gate_->pass();
        return FakeDriver::register_memory(spans);
    }
    using FakeDriver::make;
    std::unique_ptr<NativeXfer> make(Connection& connection, Op op,
                                     const DescriptorPairs& rows) override {
        gate_->pass();
        return FakeDriver::make(connection, op, rows);
    }

  private:
    const std::shared_ptr<Gate> gate_;
};

/// Two agents with a pool of blocks each on one fake network.
struct Pair {
    explicit Pair(AgentOptions options = {}) : pool_a(64 * kBlock), pool_b(64 * kBlock) {
        std::iota(pool_b.begin(), pool_b.end(), static_cast<unsigned char>(1));
        a = make("a", options);
        b = make("b", options);
        reg_a = a->register_memory({span(pool_a)});
        reg_b = b->register_memory({span(pool_b)});
        peer = connect("incarnation-1");
    }
    ~Pair() {
        reg_a.reset();
        if (a) a->close(in(kHang));
        if (b) b->close(in(kHang));
    }

    std::unique_ptr<Agent> make(const std::string& name, AgentOptions options) {
        static int count = 0;
        options.incarnation = std::to_string(::getpid()) + "-" + std::to_string(++count);
        return std::make_unique<Agent>(
            name,
            [name, network = network, gate = gate] {
                return std::make_unique<GatedDriver>(name, network, gate);
            },
            options);
    }
    std::shared_ptr<Peer> connect(const std::string& incarnation) {
        return a->connect("b", incarnation, b->metadata(), {span(pool_b)});
    }
    static Span span(std::vector<unsigned char>& pool) {
        return {{address(pool.data()), pool.size(), 0}, Memory::kDram};
    }
    Descriptor row_a(std::size_t block) const {
        return {address(&pool_a[block * kBlock]), kBlock, 0};
    }
    Descriptor row_b(std::size_t block) const {
        return {address(&pool_b[block * kBlock]), kBlock, 0};
    }
    Submission request(Op op, const std::vector<std::size_t>& blocks,
                       Clock::duration timeout = kHang) const {
        Submission r;
        r.op = op;
        r.peer = peer;
        for (const std::size_t block : blocks) {
            r.local.push_back(row_a(block));
            r.remote.push_back(row_b(63 - block));
        }
        r.timeout = timeout;
        return r;
    }

    std::shared_ptr<FakeNetwork> network = std::make_shared<FakeNetwork>();
    std::shared_ptr<Gate> gate = std::make_shared<Gate>();
    std::vector<unsigned char> pool_a;
    std::vector<unsigned char> pool_b;
    std::unique_ptr<Agent> a;
    std::unique_ptr<Agent> b;
    std::shared_ptr<Registration> reg_a;
    std::shared_ptr<Registration> reg_b;
    std::shared_ptr<Peer> peer;
};

kv::Geometry geometry_of(std::vector<unsigned char>& pool) {
    kv::Group group{1, {pool.size() / kBlock}};
    group.regions = {{0, address(pool.data()), {}}};
    group.regions[0].axes[kv::kBlock] = {0, pool.size() / kBlock, kBlock};
    group.regions[0].axes[kv::kDim] = {0, kBlock, 1};
    return kv::checked({{Pair::span(pool).row}, {group}});
}

/// Read blocks by a plan; block i here meets block i there.
Submission plan_request(const Pair& pair, const std::shared_ptr<const kv::Plan>& plan,
                        const std::vector<std::int64_t>& blocks) {
    Submission r = pair.request(Op::kRead, {});
    const kv::Table table{blocks, blocks};
    r.tables = std::make_shared<const kv::BlockTables>(plan, std::span(&table, 1));
    return r;
}

/// The state that a transfer ends in; waits for it.
State end_of(const std::shared_ptr<Transfer>& transfer) {
    CHECK(transfer->wait(in(kHang)));
    return transfer->state();
}

template <class F>
std::string kind_of(F f) {
    try {
        f();
    } catch (const Error& e) {
        return e.kind();
    }
    return "no error";
}

}  // namespace

TEST_CASE("a read moves exactly the rows, then notifies") {
    Pair p;
    auto r = p.request(Op::kRead, {3, 9, 4});
    r.notify = "done-1";
    const auto t = p.a->submit(r);
    CHECK_EQ(end_of(t), State::kDone);
    CHECK(t->is_quiet());
    for (std::size_t block = 0; block < 64; ++block) {
        const bool wanted = block == 3 || block == 9 || block == 4;
        for (std::size_t i = 0; i < kBlock; ++i) {
            const unsigned char expected = wanted ? p.pool_b[(63 - block) * kBlock + i] : 0;
            CHECK_EQ(int{p.pool_a[block * kBlock + i]}, int{expected});
        }
    }
    const auto notes = p.b->take_notifications(in(kHang));
    CHECK_EQ(notes.size(), 1U);
    CHECK_EQ(notes[0].peer, "a");
    CHECK_EQ(notes[0].message, "done-1");
    CHECK_EQ(t->stats().bytes_done, 3 * kBlock);
    CHECK_EQ(t->stats().descriptors, 3U);
}

TEST_CASE("rows are made on the agent's thread and cut into batches") {
    AgentOptions options;
    options.batch_bytes = 16;
    options.batch_rows = 2;
    Pair p(options);
    const auto plan =
        std::make_shared<const kv::Plan>(geometry_of(p.pool_a), geometry_of(p.pool_b));
    const auto t = p.a->submit(plan_request(p, plan, {1}));
    CHECK(t->wait(in(kHang)));
    CHECK_EQ(t->stats().batches, kBlock / 16);
    CHECK_EQ(t->stats().bytes_done, kBlock);
    CHECK(std::memcmp(&p.pool_a[kBlock], &p.pool_b[kBlock], kBlock) == 0);
}

TEST_CASE("rows that keep coming are prepared once that pays, and move the same bytes") {
    AgentOptions options;
    options.batch_rows = 5;
    Pair p(options);
    const auto plan =
        std::make_shared<const kv::Plan>(geometry_of(p.pool_a), geometry_of(p.pool_b));
    bool prepared = false;
    for (int turn = 0; turn < 40; ++turn) {
        std::fill(p.pool_a.begin(), p.pool_a.end(), static_cast<unsigned char>(0));
        std::vector<std::int64_t> blocks;
        for (int i = 0; i < 16; ++i) blocks.push_back((i * 4 + turn) % 64);
        const auto t = p.a->submit(plan_request(p, plan, blocks));
        CHECK_EQ(end_of(t), State::kDone);
        CHECK_EQ(t->stats().bytes_done, 16 * kBlock);
        CHECK_EQ(t->stats().batches, 4U);
        CHECK(!prepared || t->stats().prepared);
        prepared = t->stats().prepared;
        for (std::size_t block = 0; block < 64; ++block) {
            const bool wanted = static_cast<int>(block % 4) == turn % 4;
            const int expected = wanted ? p.pool_b[block * kBlock + 5] : 0;
            CHECK_EQ(int{p.pool_a[block * kBlock + 5]}, expected);
        }
    }
    CHECK(prepared);
    p.a->deregister(p.reg_a);  // prepared rows do not keep memory registered
}

TEST_CASE("a stopped peer times the transfer out; its memory stays in use until quiet") {
    Pair p;
    p.network->pause("b");
    const auto t = p.a->submit(p.request(Op::kRead, {1, 2}, 500ms));
    CHECK_EQ(end_of(t), State::kTimedOut);
    CHECK(!t->is_quiet());
    CHECK_EQ(p.a->quarantined(), 1U);
    CHECK_EQ(kind_of([&] { p.a->deregister(p.reg_a); }), "RegistrationInUseError");
    CHECK(!p.a->close(in(30ms)));
    CHECK(!p.a->is_closed());
    p.network->resume("b");
    CHECK(t->wait(in(kHang), true));
    CHECK(p.a->close(in(kHang)));
    CHECK_EQ(t->state(), State::kTimedOut);  // sticky
}

TEST_CASE("a killed peer ends all its transfers, and comes back as a new generation") {
    Pair p;
    p.network->set_delay("b", kHang);
    const auto t1 = p.a->submit(p.request(Op::kRead, {1}));
    const auto t2 = p.a->submit(p.request(Op::kRead, {2}));
    p.network->kill("b");
    for (const auto& t : {t1, t2}) {
        CHECK(t->wait(in(kHang), true));
        CHECK_EQ(t->state(), State::kPeerLost);
    }
    CHECK(t1->cause().has_value());
    CHECK_EQ(kind_of([&] { (void)p.a->submit(p.request(Op::kRead, {1})); }), "PeerLostError");
    CHECK(p.b->close(in(kHang)));
    p.b = p.make("b", {});
    p.reg_b = p.b->register_memory({Pair::span(p.pool_b)});
    p.peer = p.connect("incarnation-2");
    CHECK_EQ(p.peer->generation(), 2U);
    const auto t = p.a->submit(p.request(Op::kRead, {1}));
    CHECK_EQ(end_of(t), State::kDone);
}

TEST_CASE("a library failure fails the transfer and not its neighbours") {
    Pair p;
    p.network->fail_next("b", 1);
    const auto bad = p.a->submit(p.request(Op::kRead, {1}));
    CHECK(bad->wait(in(kHang), true));
    CHECK_EQ(bad->state(), State::kFailed);
    const auto good = p.a->submit(p.request(Op::kRead, {1}));
    CHECK_EQ(end_of(good), State::kDone);
}

TEST_CASE("cancel ends at once and is quiet later") {
    Pair p;
    p.network->pause("b");
    const auto t = p.a->submit(p.request(Op::kRead, {1}));
    while (p.a->running() == 1 && t->state() == State::kQueued) std::this_thread::yield();
    p.a->cancel(t);
    CHECK_EQ(end_of(t), State::kCancelled);
    p.network->resume("b");
    CHECK(t->wait(in(kHang), true));
    p.a->deregister(p.reg_a);
    CHECK_EQ(kind_of([&] { p.a->deregister(p.reg_a); }), "ClosedError");
}

TEST_CASE("bad rows are refused before anything moves") {
    Pair p;
    auto r = p.request(Op::kRead, {1, 2});
    r.remote[1].length = 32;
    CHECK_EQ(kind_of([&] { (void)p.a->submit(r); }), "PlanError");
    r = p.request(Op::kRead, {1, 1});
    CHECK_EQ(kind_of([&] { (void)p.a->submit(r); }), "PlanError");
    r = p.request(Op::kWrite, {5, 1, 5});
    CHECK_EQ(kind_of([&] { (void)p.a->submit(r); }), "PlanError");
    r = p.request(Op::kRead, {1});
    r.local[0].length = r.remote[0].length = 0;
    CHECK_EQ(kind_of([&] { (void)p.a->submit(r); }), "PlanError");
    r = p.request(Op::kRead, {1, 2});
    r.local.pop_back();
    CHECK_EQ(kind_of([&] { (void)p.a->submit(r); }), "PlanError");
    r = p.request(Op::kRead, {0});
    r.remote[0].address += 1;
    CHECK_EQ(kind_of([&] { (void)p.a->submit(r); }), "NotRegisteredError");
    r = p.request(Op::kRead, {0});
    r.local[0].address -= 1;
    CHECK_EQ(kind_of([&] { (void)p.a->submit(r); }), "NotRegisteredError");
    CHECK_EQ(kind_of([&] { (void)p.a->submit(p.request(Op::kRead, {0}, 0s)); }), "ConfigError");
    CHECK_EQ(kind_of([&] { (void)p.a->register_memory({Pair::span(p.pool_a)}); }),
             "AlreadyRegisteredError");
    CHECK_EQ(kind_of([&] { (void)p.a->register_memory({}); }), "ConfigError");
    CHECK_EQ(p.reg_a->uses(), 0U);
}

TEST_CASE("memory can be used once its registration is complete, and not before") {
    Pair p;
    std::vector<unsigned char> more(kBlock);
    Submission r = p.request(Op::kRead, {0});
    r.local[0].address = address(more.data());
    std::unique_lock gate(p.gate->mutex);
    const int arrivals = p.gate->arrivals;
    auto registered =
        std::async(std::launch::async, [&] { return p.a->register_memory({Pair::span(more)}); });
    while (p.gate->arrivals == arrivals) std::this_thread::yield();
    CHECK_EQ(kind_of([&] { (void)p.a->submit(r); }), "NotRegisteredError");
    gate.unlock();
    const auto registration = registered.get();
    CHECK_EQ(end_of(p.a->submit(r)), State::kDone);
}

TEST_CASE("watched transfers are reported once") {
    Pair p;
    const auto t = p.a->submit(p.request(Op::kRead, {1}));
    CHECK(t->wait(in(kHang)));
    p.a->watch(t);
    const auto ids = p.a->take_completed();
    CHECK_EQ(ids.size(), 1U);
    CHECK_EQ(ids[0], t->id());
    CHECK(p.a->take_completed().empty());
}

TEST_CASE("four threads submit while one drains notifications") {
    Pair p;
    constexpr int kEach = 200;
    std::vector<std::thread> threads;
    std::atomic<int> done{0};
    for (std::size_t n = 0; n < 4; ++n) {
        threads.emplace_back([&p, &done, n] {
            for (int i = 0; i < kEach; ++i) {
                auto r = p.request(Op::kRead, {n * 8 + static_cast<std::size_t>(i) % 8});
                r.notify = "x";
                const auto t = p.a->submit(r);
                if (t->wait(in(10s)) && t->state() == State::kDone) ++done;
            }
        });
    }
    std::size_t notes = 0;
    const auto until = in(20s);
    while (notes < 4 * kEach && Clock::now() < until) {
        notes += p.b->take_notifications(in(100ms)).size();
    }
    for (auto& t : threads) t.join();
    CHECK_EQ(done.load(), 4 * kEach);
    CHECK_EQ(notes, std::size_t{4 * kEach});
}

TEST_CASE("a full inbox keeps neither notifications nor names of strangers") {
    constexpr std::size_t kMiB = 1U << 20U;
    Inbox inbox;
    const auto deliver = [&inbox](const std::string& peer, std::size_t size) {
        std::vector<Notification> notes;
        notes.push_back({peer, std::string(size, 'x')});
        inbox.deliver(notes);
    };
    for (const char* peer : {"a", "b", "c", "d"}) {
        deliver(peer, 60 * kMiB);
    }
    deliver(std::string(20 * kMiB, 'n'), 1);
    deliver("stranger", 1);
    deliver("a", 1);
    CHECK_EQ(inbox.take(in(kHang)).size(), 5U);
    try {
        (void)inbox.take(in(kHang));
        CHECK(false);
    } catch (const Error& e) {
        CHECK_EQ(e.kind(), "StateError");
        CHECK(std::string(e.what()).size() < 1024);
    }
    deliver("stranger", 1);
    CHECK_EQ(inbox.take(in(kHang)).size(), 1U);
}

TEST_CASE("an identity socket says when the process is out of descriptors") {
    const std::string incarnation = "identity-" + std::to_string(::getpid());
    const IdentitySocket identity(incarnation);
    CHECK(PeerProcess::of(incarnation).has_value());
    rlimit limit{};
    CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    const rlimit none{0, limit.rlim_max};
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    const bool is_cleared = identity.clear();
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK(!is_cleared);
    CHECK(identity.clear());
}

TEST_CASE("an agent dropped without close cancels and goes away by itself") {
    Pair p;
    p.network->pause("b");
    const auto t = p.a->submit(p.request(Op::kRead, {1}));
    p.a.reset();
    CHECK_EQ(end_of(t), State::kCancelled);
    p.network->resume("b");
    CHECK(t->wait(in(kHang), true));
}

TEST_CASE("a closed agent has let go of everything") {
    const auto held = std::make_shared<int>();
    for (int i = 0; i < 100; ++i) {
        Agent e(
            "x",
            [held] { return std::make_unique<FakeDriver>("x", std::make_shared<FakeNetwork>()); },
            {.incarnation = std::to_string(i)});
        CHECK(e.close(in(kHang)));
        CHECK_EQ(held.use_count(), 1);
    }
}

TEST_CASE("deadlines do not count the time in which the agent's thread did not run") {
    Pair p;
    std::unique_lock gate(p.gate->mutex);
    const int arrivals = p.gate->arrivals;
    const auto first = p.a->submit(p.request(Op::kRead, {0}, 1s));
    while (p.gate->arrivals == arrivals) std::this_thread::yield();
    // The thread is held in a step of the first; this one stays in the queue.
    const auto second = p.a->submit(p.request(Op::kRead, {1}, 1s));
    std::this_thread::sleep_for(1100ms);
    gate.unlock();
    for (const auto& t : {first, second}) {
        CHECK_EQ(end_of(t), State::kDone);
    }
}

TEST_CASE("a peer of another agent is refused") {
    Pair p;
    const auto other = p.make("c", {});
    const auto there = other->register_memory({Pair::span(p.pool_a)});
    for (const bool knows_the_name : {false, true}) {
        if (knows_the_name) {
            (void)other->connect("b", "incarnation-1", p.b->metadata(), {Pair::span(p.pool_b)});
        }
        CHECK_EQ(end_of(other->submit(p.request(Op::kRead, {0}))), State::kFailed);
        CHECK_EQ(kind_of([&] { other->notify(p.peer, "x"); }), "ConfigError");
        CHECK_EQ(kind_of([&] { (void)other->is_alive(p.peer); }), "ConfigError");
        CHECK_EQ(kind_of([&] { other->disconnect(p.peer); }), "ConfigError");
    }
    other->close(in(kHang));
}

TEST_CASE("a factory that throws makes the constructor throw") {
    CHECK_EQ(kind_of([] {
                 const Agent e(
                     "x", []() -> std::unique_ptr<Driver> { throw Error("ConfigError", "no"); },
                     {});
             }),
             "ConfigError");
}

TEST_CASE("a process that left its identity socket to a child is not found") {
    const std::string incarnation(16, 'i');
    int made[2];
    int done[2];
    CHECK(::pipe(made) == 0 && ::pipe(done) == 0);
    const pid_t parent = ::fork();
    if (parent == 0) {
        const IdentitySocket socket(incarnation);
        char byte = 0;
        ::close(done[1]);
        if (::fork() == 0) {
            (void)!::read(done[0], &byte, 1);  // until the test closes its end
            ::_exit(0);
        }
        (void)!::write(made[1], &byte, 1);
        (void)!::read(done[0], &byte, 1);
        ::_exit(0);
    }
    char byte = 0;
    CHECK_EQ(::read(made[0], &byte, 1), 1);
    auto process = PeerProcess::of(incarnation);
    CHECK(process && process->id() == parent && !process->has_ended());
    ::kill(parent, SIGKILL);
    CHECK_EQ(::waitpid(parent, nullptr, 0), parent);
    CHECK(process->has_ended());
    CHECK(!PeerProcess::of(incarnation));
    for (const int fd : {made[0], made[1], done[0], done[1]}) ::close(fd);
}

TEST_CASE("nothing is left alive") {
    const auto alive = [] {
        std::int64_t sum = 0;
        for (const auto& [name, count] : LiveCounters::snapshot()) sum += count;
        return sum;
    };
    const auto until = in(kHang);
    while (alive() != 0 && Clock::now() < until) std::this_thread::yield();
    CHECK_EQ(LiveCounters::snapshot().size(), 4U);
    CHECK_EQ(alive(), 0);
}

int main() {
    return check::run();
}
