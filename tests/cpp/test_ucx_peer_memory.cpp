// Memory of other processes: moved by the kernel, and never that of a process which is not the
// peer.
#include <linux/sched.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "ucx/copies.hpp"
#include "ucx/peer_memory.hpp"

using namespace pynixlkv;
using ucx::PeerMemory;
using Result = ucx::PeerMemory::Result;
using transfer::Op;

namespace {

constexpr std::size_t kPiece = 300;
constexpr std::size_t kPieces = 1000;
constexpr std::size_t kPage = 4096;

/// What a child has at the same addresses as this process.
std::uint64_t secret = 0x1234;
unsigned char pool[kPiece * kPieces];

PeerMemory::Proof proof(std::uint64_t number) {
    return {reinterpret_cast<std::uint64_t>(&secret), number};
}

/// A process with other contents, until it is killed; with a given id if it is not 0.
class Child {
  public:
    explicit Child(std::uint64_t its_secret, unsigned char fill, pid_t wanted = 0) {
        int ready[2];
        CHECK(::pipe(ready) == 0);
        clone_args args{};
        args.exit_signal = SIGCHLD;
        args.set_tid = wanted == 0 ? 0 : reinterpret_cast<std::uint64_t>(&wanted);
        args.set_tid_size = wanted == 0 ? 0 : 1;
        id = static_cast<pid_t>(::syscall(SYS_clone3, &args, sizeof args));
        if (id == 0) {
            secret = its_secret;
            std::memset(pool, fill, sizeof pool);
            (void)!::write(ready[1], "r", 1);
            for (;;) ::pause();
        }
        CHECK(id > 0);
        char byte = 0;
        CHECK(::read(ready[0], &byte, 1) == 1);
        ::close(ready[0]);
        ::close(ready[1]);
    }
    ~Child() { end(); }
    void end() {
        if (id > 0) {
            ::kill(id, SIGKILL);
            ::waitpid(id, nullptr, 0);
        }
        id = 0;
    }

    pid_t id;
};

std::vector<iovec> pieces(unsigned char* base) {
    std::vector<iovec> all;
    for (std::size_t i = 0; i < kPieces; ++i) {
        all.push_back({base + i * 7 % kPieces * kPiece, kPiece});
    }
    return all;
}

bool holds(const std::vector<unsigned char>& bytes, unsigned char value) {
    return std::all_of(bytes.begin(), bytes.end(), [=](unsigned char b) { return b == value; });
}

/// Run checks in a child process; the test fails if they do.
template <class Body>
void in_child(Body body) {
    const pid_t child = ::fork();
    if (child == 0) {
        try {
            body();
        } catch (const std::exception& e) {
            std::fprintf(stderr, "%s\n", e.what());
            ::_exit(1);
        }
        ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
}

}  // namespace

TEST_CASE("pieces move both ways, into their places") {
    Child child(0x99, 5);
    const auto memory = PeerMemory::open(child.id, proof(0x99));
    CHECK(memory.has_value());
    std::vector<unsigned char> here(sizeof pool, 1);
    for (std::size_t i = 0; i < here.size(); ++i) here[i] = static_cast<unsigned char>(i % 251);
    const std::vector<unsigned char> sent = here;
    CHECK(memory->move(Op::kWrite, pieces(here.data()), pieces(pool)) == Result::kMoved);
    std::fill(here.begin(), here.end(), 1);
    CHECK(memory->move(Op::kRead, pieces(here.data()), pieces(pool)) == Result::kMoved);
    CHECK(here == sent);
}

TEST_CASE("memory that is not mapped is told, on either side") {
    Child child(0x99, 5);
    const auto memory = PeerMemory::open(child.id, proof(0x99));
    auto* gone = static_cast<unsigned char*>(
        ::mmap(nullptr, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    unsigned char byte = 1;
    const iovec good_here{&byte, 1};
    const iovec good_there{pool, 1};
    const iovec bad{gone, 1};
    for (const Op op : {Op::kRead, Op::kWrite}) {
        CHECK(memory->move(op, {&bad, 1}, {&good_there, 1}) == Result::kUnmapped);
        CHECK(memory->move(op, {&good_here, 1}, {&bad, 1}) == Result::kUnmapped);
    }
    CHECK_EQ(byte, 1);
    ::munmap(gone, kPage);
}

TEST_CASE("a process without the secret is no peer") {
    Child child(0x99, 5);
    CHECK(!PeerMemory::open(child.id, proof(0x98)));
    CHECK(!PeerMemory::open(child.id, {8, 0x99}));
}

TEST_CASE("a process that took the place of a dead one under its id is neither read nor written") {
    in_child([] {
        // Who may choose the ids of processes: root of a namespace.
        CHECK(::unshare(CLONE_NEWPID | (::geteuid() == 0 ? 0 : CLONE_NEWUSER)) == 0);
        in_child([] {
            Child first(0x99, 5);
            const auto memory = PeerMemory::open(first.id, proof(0x99));
            CHECK(memory.has_value());
            const pid_t id = first.id;
            first.end();
            std::vector<unsigned char> here(sizeof pool, 1);
            CHECK(memory->move(Op::kRead, pieces(here.data()), pieces(pool)) == Result::kLost);
            const Child second(0x77, 6, id);
            CHECK_EQ(second.id, id);
            for (const Op op : {Op::kRead, Op::kWrite}) {
                CHECK(memory->move(op, pieces(here.data()), pieces(pool)) == Result::kLost);
            }
            CHECK(holds(here, 1));
            const auto other = PeerMemory::open(id, proof(0x77));
            CHECK(other->move(Op::kRead, pieces(here.data()), pieces(pool)) == Result::kMoved);
            CHECK(holds(here, 6));
        });
    });
}

TEST_CASE("where the system refuses, there is no memory to copy") {
    CHECK(::prctl(PR_SET_DUMPABLE, 0) == 0);
    in_child([] {
        if (::geteuid() == 0) CHECK(::setresuid(65534, 65534, 65534) == 0);
        CHECK(!PeerMemory::open(::getppid(), proof(secret)));
    });
    CHECK(::prctl(PR_SET_DUMPABLE, 1) == 0);
}

TEST_CASE("every step runs once, on any number of threads") {
    for (const std::size_t count : {1U, 2U, 5U}) {
        ucx::CopyThreads threads(count);
        for (const std::size_t steps : {0U, 1U, 2U, 100U}) {
            std::vector<std::atomic<int>> runs(steps);
            for (int round = 0; round < 20; ++round) {
                threads.run(steps, [&](std::size_t i) { ++runs[i]; });
            }
            CHECK(std::all_of(runs.begin(), runs.end(), [](const auto& n) { return n == 20; }));
        }
    }
}

int main() {
    return check::run();
}
