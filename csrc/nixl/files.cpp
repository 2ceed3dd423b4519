#include "nixl/files.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"

namespace pynixlkv::nixl {

namespace {

/// Operations of a NIXL request: what its backends submit in one go.
constexpr std::size_t kOperations = 64;
/// Requests that may wait for the thread of a file, beside the one that runs.
constexpr std::size_t kWaiting = 2;
constexpr std::size_t kPieceBytes = 1U << 20U;
constexpr auto kPollInterval = std::chrono::microseconds(20);
/// Storage backends take host memory as it is. Which ranges may move is checked by the agent.
constexpr Descriptor kAllHostMemory{1, 1ULL << 62U, 0};

std::string errno_text(int number) {
    return text(std::generic_category().message(number), " (errno ", number, ')');
}

/// Copy memory of this process that may be gone.
bool copy_here(std::uint64_t address, char* into, std::size_t length) {
    iovec local{into, length};
    iovec remote{reinterpret_cast<void*>(address), length};  // NOLINT(performance-no-int-to-ptr)
    const ssize_t copied = ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0);
    if (copied < 0 && (errno == EPERM || errno == ENOSYS)) {  // forbidden in this container
        std::memcpy(into, remote.iov_base, length);
        return true;
    }
    return copied == static_cast<ssize_t>(length);
}

class FileXfer final : public transfer::NativeXfer {
  public:
    FileXfer(FileConnection& file, std::shared_ptr<FileJob> job)
        : file_(file), job_(std::move(job)) {}

    void post() override { file_.add(job_); }
    bool poll() override {
        const FileJob::State state = job_->state.load();
        if (state == FileJob::State::kFailed) {
            std::rethrow_exception(job_->failure);
        }
        return state == FileJob::State::kDone;
    }
    /// The agent asks in order to drop a request that has not begun, so from now on it must not.
    [[nodiscard]] bool has_begun() const override {
        auto expected = FileJob::State::kQueued;
        return !job_->state.compare_exchange_strong(expected, FileJob::State::kDropped);
    }

  private:
    FileConnection& file_;
    const std::shared_ptr<FileJob> job_;
};

}  // namespace

FileAgent::FileAgent(const std::shared_ptr<const Library>& library, const StorageOptions& options,
                     int fd)
    : agent(std::make_shared<AgentHandle>(library, "files", AgentConfig{.progress_thread = false})),
      backend(agent->create_backend(options.backend, options.params)),
      args(make_opt_args(*library, {.backends = {backend}})) {
    const auto& kinds = backend->memory();
    for (const Memory kind : {Memory::kDram, Memory::kFile}) {
        if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) {
            throw Error("ConfigError",
                        text("NIXL's ", options.backend, " backend does not move ",
                             memory_name(kind), " memory; expected one that does, such as POSIX"));
        }
    }
    if (fd < 0) {
        return;
    }
    const Descriptor file{0, 1ULL << 62U, static_cast<std::uint64_t>(fd)};
    const std::pair<Memory, Descriptor> ranges[] = {{Memory::kDram, kAllHostMemory},
                                                    {Memory::kFile, file}};
    for (const auto& [kind, row] : ranges) {
        RegisteredMemory range(agent, kind, {&row, 1}, {}, {.backends = {backend}});
        range.add();
        memory.push_back(std::move(range));
    }
}

FileConnection::FileConnection(std::shared_ptr<const Library> library, StorageOptions options,
                               int fd)
    : library_(std::move(library)),
      options_(std::move(options)),
      fd_(::fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
    if (fd_ < 0 || ::fstat(fd_, &identity_) != 0) {
        throw Error("ResourceExhausted", "a file cannot be opened: " + errno_text(errno));
    }
    try {
        native_.emplace(library_, options_, fd_);
        in_file_.resize(kPieceBytes);
        in_memory_.resize(kPieceBytes);
        thread_ = std::thread([this] { run(); });  // all signals are blocked, as in this thread
    } catch (...) {
        ::close(fd_);
        throw;
    }
}

FileConnection::~FileConnection() {
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
    native_.reset();
    if (is_open()) {
        ::close(fd_);
    }
}

bool FileConnection::is_open() const noexcept {
    struct stat now{};
    return ::fstat(fd_, &now) == 0 && now.st_ino == identity_.st_ino &&
           now.st_dev == identity_.st_dev;
}

std::unique_ptr<transfer::NativeXfer> FileConnection::make(Op op,
                                                           const transfer::DescriptorPairs& rows) {
    if (rows.local_memory != Memory::kDram) {
        throw Error("ConfigError", text("blocks in ", memory_name(rows.local_memory),
                                        " memory do not move to or from files; copy them to host "
                                        "memory, and register that"));
    }
    auto job = std::make_shared<FileJob>(op, rows.local, rows.remote);
    for (Descriptor& row : job->remote) {
        row.device = static_cast<std::uint64_t>(fd_);
    }
    return std::make_unique<FileXfer>(*this, std::move(job));
}

bool FileConnection::has_room() const {
    const std::lock_guard lock(mutex_);
    return jobs_.size() < kWaiting;
}

void FileConnection::add(std::shared_ptr<FileJob> job) {
    {
        const std::lock_guard lock(mutex_);
        jobs_.push_back(std::move(job));
    }
    changed_.notify_all();
}

void FileConnection::run() {
    ::pthread_setname_np(::pthread_self(), "pnkv-file");
    for (;;) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return is_closed_ || !jobs_.empty(); });
        if (jobs_.empty()) {
            return;
        }
        const auto job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        auto expected = FileJob::State::kQueued;
        if (!job->state.compare_exchange_strong(expected, FileJob::State::kRunning)) {
            continue;  // dropped
        }
        try {
            move(*job);
            job->state = FileJob::State::kDone;
        } catch (...) {
            job->failure = std::current_exception();
            job->state = FileJob::State::kFailed;
        }
    }
}

void FileConnection::move(const FileJob& job) {
    if (!is_open()) {
        throw Error("StorageError",
                    "another part of this process has closed the file's descriptor; open it again");
    }
    if (!native_) {  // could not be made again
        native_.emplace(library_, options_, fd_);
    }
    try {
        for (std::size_t first = 0; first < job.local.size(); first += kOperations) {
            move_some(job, first, std::min(kOperations, job.local.size() - first));
        }
    } catch (const NativeError& e) {
        native_.reset();  // from here on none of its operations runs
        compare(job, &e);
        throw;
    }
    compare(job, nullptr);
}

void FileConnection::move_some(const FileJob& job, std::size_t first, std::size_t count) {
    AgentHandle& agent = *native_->agent;
    const auto part = [&](const auto& rows) { return Rows(rows).subspan(first, count); };
    const auto local = make_xfer_list(*library_, Memory::kDram, part(job.local));
    const auto remote = make_xfer_list(*library_, Memory::kFile, part(job.remote));
    XferHandle request(native_->agent, agent.create_xfer(job.op, local.get(), remote.get(),
                                                         agent.name(), native_->args.get()));
    Status status = request.post(nullptr);
    while (status == Status::kInProgress) {
        std::this_thread::sleep_for(kPollInterval);
        status = request.poll();
    }
    library_->check(status, "post_xfer_req", [&] {
        return text(op_name(job.op), " of ", count, " ranges of a file by the backend ",
                    options_.backend);
    });
}

void FileConnection::compare(const FileJob& job, const NativeError* failure) {
    const auto refuse = [&](std::uint64_t at, const std::string& why) {
        throw Error("StorageError",
                    text(why, ", at byte ", at, " of the file",
                         failure != nullptr ? text("; NIXL: ", failure->what()) : std::string()));
    };
    for (std::size_t i = 0; i < job.local.size(); ++i) {
        const Descriptor& row = job.local[i];
        for (std::uint64_t done = 0; done < row.length; done += kPieceBytes) {
            const std::size_t length = std::min<std::uint64_t>(kPieceBytes, row.length - done);
            const std::uint64_t at = job.remote[i].address + done;
            if (!copy_here(row.address + done, in_memory_.data(), length)) {
                refuse(at, "the memory of the blocks is no longer mapped");
            }
            if (failure != nullptr && job.op == Op::kWrite) {
                // NIXL does not say what the system said, so ask it again. The blocks stay invalid.
                const ssize_t put =
                    ::pwrite(fd_, in_memory_.data(), length, static_cast<off_t>(at));
                if (put != static_cast<ssize_t>(length)) {
                    refuse(at, put < 0 ? "writing failed: " + errno_text(errno)
                                       : text("only ", put, " of ", length, " bytes were written"));
                }
            }
            const ssize_t got = ::pread(fd_, in_file_.data(), length, static_cast<off_t>(at));
            if (got != static_cast<ssize_t>(length)) {
                refuse(at, got < 0 ? "reading failed: " + errno_text(errno)
                                   : text("the file is short: ", got, " of ", length,
                                          " bytes were read"));
            }
            // Before 1.5 NIXL counts an operation as done that moved a part of its bytes.
            if (failure == nullptr &&
                std::memcmp(in_file_.data(), in_memory_.data(), length) != 0) {
                refuse(at,
                       "file and memory differ after the transfer: NIXL moved less than it "
                       "said, or somebody has written to one of them meanwhile");
            }
        }
    }
}

}  // namespace pynixlkv::nixl
