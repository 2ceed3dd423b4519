/// @file
/// Regions without a remote side: open files that NIXL's storage backends read and write.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "nixl/agent_handle.hpp"
#include "transfer/driver.hpp"

namespace pynixlkv::nixl {

struct StorageOptions {
    std::string backend = {};  ///< name of the plugin; empty: the agent opens no files
    ParamMap params = {};
};

/// A NIXL agent that moves bytes between host memory and one file, or none.
///
/// A file has an agent of its own because requests of one backend share a queue: an operation that
/// fails may be reported to any of them, and those that were not begun stay in the queue. The end
/// of the agent waits for what the kernel still does, and drops the rest.
struct FileAgent {
    /// @param fd -1 to find out whether the backend works
    /// @throws NativeError, Error("ConfigError") if the backend does not move files
    FileAgent(const std::shared_ptr<const Library>& library, const StorageOptions& options, int fd);

    std::shared_ptr<AgentHandle> agent;
    std::shared_ptr<Backend> backend;
    Owned<capi::OptArgs> args;
    std::vector<RegisteredMemory> memory;
};

/// What one request of the agent's thread asks of the thread of a file.
struct FileJob {
    enum class State { kQueued, kDropped, kRunning, kDone, kFailed };

    Op op;
    std::vector<Descriptor> local;
    std::vector<Descriptor> remote;
    std::atomic<State> state{State::kQueued};
    std::exception_ptr failure;  ///< before the state becomes kFailed

    FileJob(Op direction, Rows local_rows, Rows remote_rows)
        : op(direction),
          local(local_rows.begin(), local_rows.end()),
          remote(remote_rows.begin(), remote_rows.end()) {}
};

/// An open file, and the thread that moves its bytes: a disk that hangs holds up nothing else.
class FileConnection final : public transfer::Connection, LiveCounted<FileConnection> {
  public:
    static constexpr const char* kLiveName = "nixl.FileConnection";

    /// @param fd of the file; this has a descriptor of its own
    FileConnection(std::shared_ptr<const Library> library, StorageOptions options, int fd);
    /// All requests must be quiet.
    ~FileConnection() override;

    [[nodiscard]] std::unique_ptr<transfer::NativeXfer> make(Op op,
                                                             const transfer::DescriptorPairs& rows);
    [[nodiscard]] bool has_room() const override;
    void add(std::shared_ptr<FileJob> job);

  private:
    /// Whether the descriptor is still that of the file.
    [[nodiscard]] bool is_open() const noexcept;
    void run();
    void move(const FileJob& job);
    void move_some(const FileJob& job, std::size_t first, std::size_t count);
    /// Throw unless memory and file have the same bytes.
    /// @param failure of NIXL, whose cause is looked for
    void compare(const FileJob& job, const NativeError* failure);

    const std::shared_ptr<const Library> library_;
    const StorageOptions options_;
    const int fd_;
    struct stat identity_{};
    std::optional<FileAgent> native_;  ///< of the thread, once that runs
    std::vector<char> in_file_;
    std::vector<char> in_memory_;
    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::deque<std::shared_ptr<FileJob>> jobs_;
    bool is_closed_ = false;
    std::thread thread_;
};

}  // namespace pynixlkv::nixl
