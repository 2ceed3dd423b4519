#include "transfer/inherited.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "transfer/wake_socket.hpp"

namespace pynixlkv::transfer {

namespace {

struct Socket {
    int fd;
    bool is_broken;  ///< its connection has ended
};

using Sockets = std::unordered_map<ino_t, Socket>;

/// How often to look although the number of descriptors is the same.
constexpr auto kLookEvery = std::chrono::seconds(5);

/// Looks take at most this part of an agent's time: one takes longer the more descriptors there
/// are.
constexpr int kMostPart = 50;

std::mutex mutex;  ///< a fork holds it
Sockets sockets;
std::uint64_t num_broken = 0;
off_t num_seen = 0;
std::chrono::steady_clock::time_point last_look;
std::chrono::steady_clock::duration look_took{};

/// The inode of a socket; none of another file.
std::optional<ino_t> socket_inode(int fd) {
    struct stat info{};
    return ::fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode) ? std::optional(info.st_ino)
                                                             : std::nullopt;
}

/// Note a socket that children must not have.
void note_socket(int fd, ino_t inode) {
    tcp_info tcp{};
    socklen_t size = sizeof tcp;
    const bool is_broken = ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &tcp, &size) == 0 &&
                           (tcp.tcpi_state == TCP_CLOSE || tcp.tcpi_state == TCP_CLOSE_WAIT);
    sockets.insert({inode, {fd, is_broken}});
}

bool is_epoll(int fd) {
    std::array<char, 32> target{};
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    return ::readlink(path.c_str(), target.data(), target.size() - 1) > 0 &&
           std::string_view(target.data()) == "anon_inode:[eventpoll]";
}

/// Only UCX makes these without close-on-exec. They stay marked, by an owner for signals that they
/// never send, when they have got it.
bool is_of_ucx(int epoll) {
    if ((::fcntl(epoll, F_GETFD) & FD_CLOEXEC) == 0) {
        (void)::fcntl(epoll, F_SETOWN, ::getpid());
        (void)::fcntl(epoll, F_SETFD, FD_CLOEXEC);
        return true;
    }
    return ::fcntl(epoll, F_GETOWN) == ::getpid();
}

/// Look through all descriptors: what UCX waits for is registered with its epolls.
void look() {
    DIR* const folder = ::opendir("/proc/self/fd");
    if (folder == nullptr) {
        return;
    }
    const Sockets before = std::exchange(sockets, {});
    while (const dirent* const entry = ::readdir(folder)) {
        const int fd = std::atoi(entry->d_name);
        if (entry->d_name[0] == '.' || fd == ::dirfd(folder)) {
            continue;
        }
        if (const auto inode = socket_inode(fd)) {
            if (is_of_agent(fd)) {
                note_socket(fd, *inode);
            }
        } else if (is_epoll(fd) && is_of_ucx(fd)) {
            std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));
            for (std::string word; info >> word;) {
                int target = -1;
                if (word != "tfd:" || !(info >> target)) {
                    continue;
                }
                const auto its = socket_inode(target);
                if (its || !is_epoll(target)) {
                    (void)::fcntl(target, F_SETFD, FD_CLOEXEC);
                }
                if (its) {
                    note_socket(target, *its);
                }
            }
        }
    }
    ::closedir(folder);
    const auto count = [](const Sockets& of, bool is_broken, const Sockets& beside) {
        return static_cast<std::uint64_t>(
            std::count_if(of.begin(), of.end(), [&](const auto& each) {
                const auto other = beside.find(each.first);
                return each.second.is_broken == is_broken &&
                       (other == beside.end() || (is_broken && !other->second.is_broken));
            }));
    };
    num_broken += count(sockets, true, before) + count(before, false, sockets);
}

/// Put something else in the place of each socket. UCX in the child may still close its number,
/// which must not become that of another file.
void let_go() {
    const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (const auto& [inode, socket] : sockets) {
        if (socket_inode(socket.fd) == inode && ::dup3(nothing, socket.fd, O_CLOEXEC) < 0) {
            ::close(socket.fd);
        }
    }
    ::close(nothing);
    mutex.unlock();
}

}  // namespace

std::uint64_t keep_from_children() {
    static const int registered = ::pthread_atfork(
        [] {
            mutex.lock();
            look();
        },
        [] { mutex.unlock(); }, let_go);
    (void)registered;
    const std::lock_guard lock(mutex);
    struct stat info{};
    (void)::stat("/proc/self/fd", &info);  // its size is their number, since Linux 6.2
    const auto now = std::chrono::steady_clock::now();
    const bool has_changed = info.st_size == 0 || info.st_size != num_seen;
    if ((has_changed && now - last_look > kMostPart * look_took) || now - last_look > kLookEvery) {
        num_seen = info.st_size;
        last_look = now;
        look();
        look_took = std::chrono::steady_clock::now() - now;
    }
    return num_broken;
}

}  // namespace pynixlkv::transfer
