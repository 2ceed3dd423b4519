// Two agents on UCX in one process, each with a thread of its own, over a real libucp: the one
// that PYNIXLKV_UCX_LIBRARY names.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.hpp"
#include "base/live_count.hpp"
#include "check.hpp"
#include "transfer/agent.hpp"
#include "ucx/driver.hpp"
#include "ucx/request.hpp"

using namespace pynixlkv;
using namespace std::chrono_literals;
using transfer::Agent;
using transfer::Op;
using transfer::Span;
using transfer::State;
using ucx::ConfigMap;

namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::size_t kBlocks = 256;
constexpr std::size_t kBytes = kBlock * kBlocks;

transfer::TimePoint in(transfer::Clock::duration d) {
    return transfer::Clock::now() + d;
}

std::shared_ptr<const ucx::Library> library() {
    static const auto opened = ucx::Library::open(std::getenv("PYNIXLKV_UCX_LIBRARY"));
    return opened;
}

/// An agent with a pool of memory, ordinary or UCX's own.
struct Side {
    Side(std::string its_name, const ConfigMap& config, bool allocate)
        : name(std::move(its_name)), context(std::make_shared<ucx::Context>(library(), config)) {
        static int count = 0;
        incarnation = std::to_string(::getpid()) + "-" + std::to_string(++count);
        transfer::AgentOptions options;
        options.incarnation = incarnation;
        agent = std::make_unique<Agent>(
            name, [this] { return std::make_unique<ucx::UcxDriver>(context, name); }, options);
        if (allocate) {
            allocated = ucx::MemoryHandle::allocate(context, kBytes);
            pool = reinterpret_cast<unsigned char*>(allocated->address());  // NOLINT
        } else {
            ordinary.resize(kBytes);
            pool = ordinary.data();
        }
        spans = {{{reinterpret_cast<std::uint64_t>(pool), kBytes, 0}, transfer::Memory::kDram}};
        registration = agent->register_memory(spans);
    }
    Side(const Side&) = delete;
    Side& operator=(const Side&) = delete;
    ~Side() {
        registration.reset();
        CHECK(agent->close(in(20s)));
    }

    std::shared_ptr<transfer::Peer> connect(const Side& other) const {
        return agent->connect(other.name, other.incarnation, other.agent->metadata(), other.spans);
    }
    Descriptor row(std::size_t block) const {
        return {spans[0].row.address + block * kBlock, kBlock, 0};
    }
    bool holds(std::size_t block, unsigned char value) const {
        return std::all_of(pool + block * kBlock, pool + (block + 1) * kBlock,
                           [value](unsigned char byte) { return byte == value; });
    }

    const std::string name;
    std::string incarnation;
    std::shared_ptr<ucx::Context> context;
    std::shared_ptr<ucx::MemoryHandle> allocated;
    std::vector<unsigned char> ordinary;
    unsigned char* pool = nullptr;
    std::vector<Span> spans;
    std::unique_ptr<Agent> agent;
    std::shared_ptr<transfer::Registration> registration;
};

/// What threads of both sides do at the same time: reads by block, with notifications.
void pull_from_both_sides(const ConfigMap& config, bool allocate) {
    Side a("a", config, allocate);
    Side b("b", config, allocate);
    for (std::size_t i = 0; i < kBytes / 2; ++i) {
        a.pool[i] = static_cast<unsigned char>(i / kBlock);
        b.pool[i] = static_cast<unsigned char>(i / kBlock + 100);
    }
    const auto to_b = a.connect(b);
    const auto to_a = b.connect(a);
    constexpr std::size_t kEach = 64;
    std::atomic<std::size_t> done{0};
    const auto pull = [&done](const Side& here, const Side& there,
                              const std::shared_ptr<transfer::Peer>& peer, std::size_t first) {
        for (std::size_t i = first; i < first + kEach; ++i) {
            transfer::Submission request;
            request.op = Op::kRead;
            request.peer = peer;
            request.local = {here.row(kBlocks / 2 + i)};
            request.remote = {there.row(i)};
            request.notify = std::to_string(i);
            request.timeout = 60s;
            const auto t = here.agent->submit(request);
            if (t->wait(in(60s)) && t->state() == State::kDone) ++done;
        }
    };
    std::vector<std::thread> threads;
    for (const std::size_t first : {std::size_t{0}, kEach}) {
        threads.emplace_back([&, first] { pull(a, b, to_b, first); });
        threads.emplace_back([&, first] { pull(b, a, to_a, first); });
    }
    std::size_t notes = 0;
    const auto until = in(90s);
    while (notes < 4 * kEach && transfer::Clock::now() < until) {
        notes += a.agent->take_notifications(in(10ms)).size();
        notes += b.agent->take_notifications(in(10ms)).size();
    }
    for (auto& thread : threads) thread.join();
    CHECK_EQ(done.load(), 4 * kEach);
    CHECK_EQ(notes, 4 * kEach);
    for (std::size_t i = 0; i < kBlocks / 2; ++i) {
        CHECK(a.holds(kBlocks / 2 + i, static_cast<unsigned char>(i + 100)));
        CHECK(b.holds(kBlocks / 2 + i, static_cast<unsigned char>(i)));
    }
}

}  // namespace

TEST_CASE("both sides read at once, from several threads, over tcp") {
    pull_from_both_sides({{"TLS", "tcp"}, {"RNDV_THRESH", "inf"}}, false);
}

TEST_CASE("both sides read at once, from several threads, by default") {
    pull_from_both_sides({{"RNDV_THRESH", "inf"}}, false);
}

TEST_CASE("both sides read memory of UCX at once") {
    pull_from_both_sides({{"RNDV_THRESH", "inf"}}, true);
}

TEST_CASE("a write is there before its notification") {
    Side a("a", {{"TLS", "tcp"}}, false);
    Side b("b", {{"TLS", "tcp"}}, false);
    const auto to_b = a.connect(b);
    for (unsigned char value = 1; value < 50; ++value) {
        std::fill_n(a.pool, kBlock, value);
        transfer::Submission request;
        request.op = Op::kWrite;
        request.peer = to_b;
        request.local = {a.row(0)};
        request.remote = {b.row(value)};
        request.notify = "written";
        request.timeout = 60s;
        const auto t = a.agent->submit(request);
        CHECK_EQ(b.agent->take_notifications(in(60s)).size(), 1U);
        CHECK(b.holds(value, value));
        CHECK(t->wait(in(60s)));
    }
}

TEST_CASE("an agent that goes away ends what its peer asks of it") {
    Side a("a", {{"TLS", "tcp"}}, false);
    std::shared_ptr<transfer::Peer> peer;
    std::vector<std::shared_ptr<transfer::Transfer>> transfers;
    {
        Side b("b", {{"TLS", "tcp"}}, false);
        peer = a.connect(b);
        for (std::size_t i = 0; i < 32; ++i) {
            transfer::Submission request;
            request.op = Op::kRead;
            request.peer = peer;
            request.local = {a.row(i)};
            request.remote = {b.row(i)};
            request.timeout = 60s;
            transfers.push_back(a.agent->submit(request));
        }
    }
    for (const auto& t : transfers) {
        CHECK(t->wait(in(60s), true));
        CHECK(t->state() == State::kDone || t->state() == State::kPeerLost);
    }
}

TEST_CASE("an agent without error handling refuses one with it") {
    const Side a("a", {{"TLS", "tcp"}}, false);
    const auto context = std::make_shared<ucx::Context>(library(), ConfigMap{{"TLS", "tcp"}});
    ucx::UcxDriver driver(context, "b", ucx::capi::kErrorNone);
    CHECK_THROWS(Error, driver.connect("a", a.agent->metadata(), std::nullopt));
}

TEST_CASE("a connection made anew stands, although the peer connected at the same time") {
    // Both make their first endpoint before they hear of the other, so UCX pairs these two. Of the
    // second ones, which it pairs as well, b's answers a connection that a has closed.
    const auto context = std::make_shared<ucx::Context>(library(), ConfigMap{{"TLS", "tcp"}});
    const auto from = ucx::MemoryHandle::allocate(context, kBlock);
    const auto into = ucx::MemoryHandle::allocate(context, kBlock);
    const auto a = std::make_unique<ucx::UcxDriver>(context, "a");
    const auto b = std::make_unique<ucx::UcxDriver>(context, "b");
    auto first = a->connect("b", b->metadata(), std::nullopt);
    const auto back = b->connect("a", a->metadata(), std::nullopt);
    std::vector<transfer::Notification> received;
    for (int i = 0; i < 1'000; ++i) {
        (void)a->is_alive(*first);  // progresses, but does not answer b's connection
        (void)b->receive(received);
    }
    first.reset();
    const auto second = a->connect("b", b->metadata(), std::nullopt);
    const auto pump = [&](auto is_over) {
        const auto until = in(20s);
        while (!is_over() && !second->has_failed() && transfer::Clock::now() < until) {
            (void)a->receive(received);
            (void)b->receive(received);
        }
        return is_over();
    };
    a->notify(*second, "after its kClose");
    CHECK(pump([&] { return !received.empty(); }));
    const auto endpoint = dynamic_cast<ucx::UcxConnection&>(*second).endpoint;
    const ucx::RemoteKey key(endpoint, from->pack());
    ucx::Completion completion(*library());
    endpoint->move(completion, Op::kRead, into->address(), kBlock, into->handle(), from->address(),
                   key);
    CHECK(pump([&] { return completion.is_quiet(); }));  // the answer finds its way
    CHECK(!second->has_failed());
}

TEST_CASE("forged messages write nothing, and do not stop the owner") {
    Side owner("owner", {{"TLS", "tcp"}}, false);
    Side reader("reader", {{"TLS", "tcp"}}, false);
    for (std::size_t i = 0; i < kBytes; ++i) {
        owner.pool[i] = static_cast<unsigned char>(i / kBlock);
    }
    const std::vector<unsigned char> before = owner.ordinary;
    const auto peer = reader.connect(owner);

    std::mt19937_64 random(4);  // NOLINT(cert-msc32-c,cert-msc51-cpp)
    const auto pick = [&random](auto... values) {
        const std::uint64_t all[] = {static_cast<std::uint64_t>(values)...};
        return all[random() % std::size(all)];
    };
    const auto worker = std::make_shared<ucx::Worker>(owner.context);
    const auto token = ucx::read_description(owner.agent->metadata()).token;
    const auto endpoint = std::make_shared<ucx::Endpoint>(
        worker, ucx::read_description(owner.agent->metadata()).address, ucx::capi::kErrorPeer);
    for (int i = 0; i < 2'000; ++i) {
        ucx::MessageHeader header{.kind = static_cast<ucx::MessageKind>(random() % 9)};
        header.token = pick(token, token, token, random());
        header.connection = pick(1, random());
        std::string data(pick(0, 1, 100, 16U << 10U), '\0');
        std::generate(data.begin(), data.end(), [&] { return static_cast<char>(random()); });
        const std::string_view whole = ucx::make_header(header);
        const auto sent =
            ucx::Request::start(endpoint, "ucp_am_send_nbx", {}, [&](auto& completion) {
                const std::size_t size = pick(whole.size(), whole.size(), random() % whole.size());
                endpoint->send(completion, whole.substr(0, size), data);
            });
        CHECK(worker->progress_until(in(20s), true, [&] { return sent->check(); }));
    }
    endpoint->close();
    CHECK(owner.ordinary == before);
    transfer::Submission request;
    request.op = Op::kRead;
    request.peer = peer;
    request.local = {reader.spans[0].row};
    request.remote = {owner.spans[0].row};
    request.timeout = 60s;
    const auto t = reader.agent->submit(request);
    CHECK(t->wait(in(60s)));
    CHECK(t->state() == State::kDone);
    CHECK(reader.ordinary == before);
}

TEST_CASE("nothing is left alive") {
    for (const auto& [name, count] : LiveCounters::snapshot()) {
        if (count != 0)
            std::printf("      %s: %lld\n", name.c_str(), static_cast<long long>(count));
        CHECK_EQ(count, 0);
    }
}

int main() {
    if (std::getenv("PYNIXLKV_UCX_LIBRARY") == nullptr) {
        std::printf("skipped: PYNIXLKV_UCX_LIBRARY names no libucp.so.0\n");
        return 77;
    }
    return check::run();
}
