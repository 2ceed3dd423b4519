"""Files of KV blocks, which plans read and write like a peer's memory.

A file holds, in this order: a header with the geometry, one record for each block, and the blocks.
The record of a block says whether it is valid. It is made invalid, and flushed, before a byte of
the block changes, and made valid, with a digest of the block, after all bytes are flushed. So a
writer that dies, and a machine that loses power, leave blocks that are refused or right.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import itertools
import math
import os
import queue
import stat
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

import msgspec

from pynixlkv import wire
from pynixlkv._arrays import is_integer
from pynixlkv._closeable import Closeable
from pynixlkv.errors import (
    ConfigError,
    HandshakeError,
    InvalidBlocksError,
    KVCorruptError,
    LayoutError,
    PlanError,
    PynixlkvError,
    StorageError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from pynixlkv.geometry import Axis, Geometry, KVCache, for_group
from pynixlkv.transfer import CLOSE_TIMEOUT_S, Peer, Transfer, TransferResult
from pynixlkv.types import MemorySpan, MemoryType, Operation, TransferState

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from pynixlkv import _native
    from pynixlkv.geometry import Group
    from pynixlkv.nixl.agent import NixlAgent
    from pynixlkv.plan import TransferPlan

__all__ = ["BlockFile", "FileTransfer"]

Blocks = dict[str, list[int]]
"""Ascending block numbers by group name."""

_MAGIC = b"PNKVFILE"
PREFIX = struct.Struct("<8sQ")  # magic, bytes of the sealed header
RECORD = struct.Struct("<Q16s8s")  # generation, digest of the block, digest of the record
_PAGE = 4096
_PIECE = 1 << 20
_MAX_BLOCKS = 1 << 22  # valid_blocks looks at each, and a sparse file is as long as it says
_SHOWN = 20  # block numbers in an error
_INNER = ("layer", "kv", "head", "token", "dim")

# Beside the numbers of the agent's transfers with peers, from 1 on.
_ids = itertools.count(1 << 32)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file says about itself; sealed as a message of `pynixlkv.wire`."""

    byte_order: str
    geometry: Geometry
    """Offsets count from the first byte of the blocks."""
    identity: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Random: records of another file are none of this one."""


# ---- where things are


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def block_bytes(group: Group) -> int:
    counts: list[list[int]] = [[getattr(r, name).count for name in _INNER] for r in group.regions]
    return group.element_bytes * sum(math.prod(each) for each in counts)


def _lay_out(like: Geometry, counts: Sequence[int], base: int, tail: int = 0) -> Geometry:
    """Return the geometry of a file from an offset on: each block is contiguous, with a tail.

    Inside a block regions follow each other, with the order of their axes kept.
    """
    groups, at = [], base
    for group, count in zip(like.groups, counts, strict=True):
        step, regions, address = block_bytes(group) + tail, [], at
        for region in group.regions:
            axes = {"block": Axis(0, count, step if count > 1 else 0)}
            inside = group.element_bytes
            for name in sorted(_INNER, key=lambda name: getattr(region, name).stride):
                axis: Axis = getattr(region, name)
                axes[name] = Axis(axis.start, axis.count, inside if axis.count > 1 else 0)
                inside *= axis.count
            regions.append(msgspec.structs.replace(region, span=0, address=address, **axes))
            address += inside
        at += _pages(count * step)
        groups.append(msgspec.structs.replace(group, num_blocks=count, regions=tuple(regions)))
    return Geometry((MemorySpan(base, at - base, MemoryType.FILE, 0),), tuple(groups))


def _counts(like: Geometry, num_blocks: int | Mapping[str, int]) -> list[int]:
    """Return the number of blocks of each group."""
    found = [
        for_group(num_blocks, group) if isinstance(num_blocks, Mapping) else num_blocks
        for group in like.groups
    ]
    counts = [int(count) for count in found if count and is_integer(count) and count > 0]
    if len(counts) < len(found):
        raise ConfigError(
            f"num_blocks is {num_blocks!r}; expected a number from 1 on, or one for each of the "
            f"groups {like.names}"
        )
    if sum(counts) > _MAX_BLOCKS:
        raise ConfigError(f"num_blocks is {num_blocks!r}; a file has at most {_MAX_BLOCKS} blocks")
    return counts


# ---- files


_E = TypeVar("_E", bound=StorageError)


def storage_error(kind: type[_E], path: str, message: str, blocks: Blocks | None = None) -> _E:
    return kind(message, peer=path, path=path, blocks=blocks or {})


@contextlib.contextmanager
def system_errors(path: str, what: str) -> Iterator[None]:
    """Turn what the system says of a file into a `StorageError`."""
    remedies = {
        errno.ENOENT: "create it with agent.create_file, or correct the path",
        errno.EEXIST: "open it with agent.open_file(path, writable=True), or remove it",
        errno.EACCES: "give this user the right",
        errno.EROFS: "open it without writable=True",
        errno.ENOSPC: "free space, or make fewer blocks",
        errno.EDQUOT: "free space, or make fewer blocks",
        errno.EFBIG: "raise the limit of file sizes (ulimit -f), or make fewer blocks",
        errno.EAGAIN: "it has a writer already, here or in another process, and a file has one "
        "at a time: close that one, or make a file of your own",
        errno.EBADF: "another part of this process has closed its descriptor; open it again",
    }
    try:
        yield
    except OSError as error:
        remedy = remedies.get(error.errno or 0, "see the log of the system")
        seen = f"{what} failed: {error.strerror} (errno {error.errno}); {remedy}"
        found = storage_error(StorageError, path, f"file {path!r}: {seen}")
        found.errno = error.errno
        raise found from error


def make_header(
    like: KVCache | Geometry, num_blocks: int | Mapping[str, int], tail: int = 0
) -> tuple[bytes, int]:
    """Return how a file begins, and its bytes in all."""
    geometry = like.geometry if isinstance(like, KVCache) else like
    if not isinstance(geometry, Geometry):
        raise ConfigError(f"like is a {type(like).__name__}; expected a KVCache or a Geometry")
    counts = _counts(geometry, num_blocks)
    header = _Header(sys.byteorder, _lay_out(geometry, counts, 0, tail), os.urandom(16))
    sealed = wire.seal(header, "file")
    begin = PREFIX.pack(_MAGIC, len(sealed)) + sealed
    data = _pages(_pages(len(begin)) + sum(counts) * RECORD.size)
    return begin, data + header.geometry.spans[0].nbytes


def create(path: str, like: KVCache | Geometry, num_blocks: int | Mapping[str, int]) -> int:
    """Make a file without valid blocks, locked for writing; return its descriptor."""
    begin, nbytes = make_header(like, num_blocks)
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    with system_errors(path, f"making a file of {nbytes} bytes"):
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, nbytes)  # a disk is full now, not later
            os.pwrite(fd, begin, 0)
            os.fsync(fd)
            os.link(temporary, path)  # unlike a rename it replaces no other file
        except BaseException:
            os.close(fd)
            raise
        finally:
            Path(temporary).unlink()
        folder = os.open(Path(path).absolute().parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return fd


def open_existing(path: str, *, writable: bool) -> int:
    """Open a file, and lock it for writing if it is to be written; return its descriptor."""
    with system_errors(path, "opening it for writing" if writable else "opening it"):
        # A pipe would be waited for.
        flags = os.O_CLOEXEC | os.O_NONBLOCK | (os.O_RDWR if writable else os.O_RDONLY)
        fd = os.open(path, flags)
        try:
            if writable:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
    return fd


class _Facts(msgspec.Struct, frozen=True):
    """What was read of a file when it was opened."""

    geometry: Geometry
    table: int
    """Offset of the first record."""
    identity: bytes
    inode: tuple[int, int]


def _read_facts(fd: int, path: str, tail: int) -> _Facts:
    """Read and check the header, which is untrusted."""

    def refuse(seen: str) -> StorageError:
        what = f"{path!r} is no file of KV blocks that can be used here: {seen}"
        return storage_error(StorageError, path, f"{what}; make one with agent.create_file")

    with system_errors(path, "reading its header"):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise refuse("it is no regular file")
        prefix = os.pread(fd, PREFIX.size, 0)
        if len(prefix) < PREFIX.size or prefix[:8] != _MAGIC:
            raise refuse(f"it begins with {prefix[:8]!r}, not {_MAGIC!r}")
        length = PREFIX.unpack(prefix)[1]
        if length > min(wire.MAX_BYTES, status.st_size):
            raise refuse(f"its header announces {length} bytes, the file has {status.st_size}")
        sealed = os.pread(fd, length, PREFIX.size)
    try:
        header = wire.unseal(sealed, _Header, "file")
        stored = header.geometry
        counts = [group.num_blocks for group in stored.groups]
        if sum(counts) > _MAX_BLOCKS:
            raise refuse(f"it has {sum(counts)} blocks, more than {_MAX_BLOCKS}")
        if stored.spans[0].nbytes > status.st_size:
            raise refuse(f"its blocks take {stored.spans[0].nbytes} bytes, it has {status.st_size}")
        if header.byte_order != sys.byteorder:
            raise refuse(f"it was written on a {header.byte_order}-endian machine")
        if _lay_out(stored, counts, 0, tail) != stored:
            raise refuse("its geometry is none of a file")
        table = _pages(PREFIX.size + length)
        geometry = _lay_out(stored, counts, _pages(table + sum(counts) * RECORD.size), tail)
    except (HandshakeError, LayoutError) as error:
        raise refuse(f"its header is damaged, or of another release: {error}") from error
    end = geometry.spans[0].address + geometry.spans[0].nbytes
    if status.st_size < end:
        raise refuse(f"it is short, with {status.st_size} of {end} bytes")
    return _Facts(geometry, table, header.identity, (status.st_dev, status.st_ino))


class BlockFile(Peer, Closeable):
    """A file of KV blocks, taken by `Agent.read` and `Agent.write` in place of a peer.

    Made by `NixlAgent.create_file` and `NixlAgent.open_file`. The transfers of a file run one after
    another; those of several files do not wait for each other. Safe from several threads.
    """

    tail: ClassVar[int] = 0
    """Bytes behind each block."""

    def __init__(self, agent: NixlAgent, name: str, fd: int, *, path: str, writable: bool) -> None:
        self._path = path
        self._facts = facts = _read_facts(fd, path, self.tail)
        self._is_writable = writable
        self._agent = agent
        first = [0, *itertools.accumulate(group.num_blocks for group in facts.geometry.groups)]
        self._first = dict(zip(facts.geometry.names, first, strict=False))
        self._groups = dict(zip(facts.geometry.names, facts.geometry.groups, strict=True))
        self._jobs: queue.SimpleQueue[FileTransfer | None] = queue.SimpleQueue()
        self._transfers: weakref.WeakSet[FileTransfer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()
        span = facts.geometry.spans[0]
        native = agent._native.open_file(name, fd, span.address, span.nbytes, not writable)
        super().__init__(native, [facts.geometry])
        threading.Thread(target=_work, args=(self._jobs,), name="pnkv-file", daemon=True).start()
        self._fd = fd  # from here on this object's to close

    @property
    def path(self) -> str:
        """Path that the file was opened by."""
        return self._path

    @property
    def is_writable(self) -> bool:
        """Whether this is the file's writer."""
        return self._is_writable

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def valid_blocks(self, group: str | None = None) -> list[int]:
        """Return the blocks of a group that can be read, ascending.

        Reads the records of the group. `group` may be left out if there is one.

        Raises
        ------
        ConfigError
            If there is no such group.
        StorageError
            If the file cannot be read.
        """
        names = self.geometry.names
        name = names[0] if group is None and len(names) == 1 else group
        if name not in self._groups:
            raise ConfigError(f"group is {group!r}; the file has {names}")
        return [
            block
            for block, record in enumerate(self._records(name))
            if self._digest_in(name, block, record) is not None
        ]

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> bool:
        """Cancel the file's transfers, wait for quiet, and close. Idempotent.

        Returns whether all is quiet. If not within `timeout` seconds (a disk hangs), the file stays
        locked until another call returns True.
        """
        if os.getpid() != self._pid:
            return True  # only the parent can close its file
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        deadline = time.monotonic() + timeout
        running = list(self._transfers)
        for transfer in running:
            transfer.cancel()
        for transfer in running:
            if not transfer.wait_quiet(max(deadline - time.monotonic(), 0.0)):
                return False
        if self._fd >= 0:
            if not self._agent.is_closed:
                self._agent.disconnect(self)
            # The number may be that of another file, if somebody has closed this one.
            with contextlib.suppress(OSError, StorageError):
                self.check_descriptor()
                if self._is_writable:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)  # the agent's thread drops its copy later
                os.close(self._fd)
            self._fd = -1
        return True

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0 and os.getpid() == self._pid and not sys.is_finalizing():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2)
            self.close(0.0)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "writer" if self._is_writable else "reader"
        return f"<BlockFile {self._path!r}: {self.geometry.names}, {state}>"

    # ---- transfers

    def submit(
        self,
        agent: NixlAgent,
        op: Operation,
        plan: TransferPlan,
        tables: _native.kv.BlockTables,
        notify: bytes | None,
        timeout: float,
        move: Callable[..., Transfer],
    ) -> FileTransfer:
        """Start a transfer, whose bytes `move` moves; called by `Agent.read` and `Agent.write`."""
        if agent is not self._agent:
            raise ConfigError(f"file {self._path!r} was opened by agent {self._agent.name!r}")
        if notify is not None:
            raise ConfigError("a file receives no notifications; leave notify out")
        if not timeout > 0:
            raise ConfigError(f"the timeout of a transfer must be positive, not {timeout} s")
        tables.check_written_once(remote=op is Operation.WRITE)
        touched: dict[str, set[int]] = {}
        for (_, group), ids in zip(plan.pairs, tables.remote_blocks(), strict=True):
            touched.setdefault(group, set()).update(ids)
        blocks = {group: sorted(ids) for group, ids in touched.items() if ids}
        if op is Operation.WRITE:
            self._check_write(blocks, tables.totals()[0])

        def start(timeout: float) -> Transfer:
            return move(op, self, plan, tables, None, timeout)

        with self._lock:
            if self._is_closed:
                raise storage_error(
                    StorageError, self._path, f"file {self._path!r} is closed; open it again"
                )
            transfer = FileTransfer(self, op, blocks, start, timeout)
            self._transfers.add(transfer)
            self._jobs.put(transfer)
        return transfer

    def _check_write(self, blocks: Blocks, num_bytes: int) -> None:
        if not self._is_writable:
            message = f"file {self._path!r} is open for reading; open it with writable=True"
            raise storage_error(StorageError, self._path, message)
        whole = sum(len(ids) * block_bytes(self._groups[name]) for name, ids in blocks.items())
        if num_bytes != whole:
            raise PlanError(
                f"the transfer writes {num_bytes} of the {whole} bytes of blocks {named(blocks)} "
                f"of file {self._path!r}, which is written in whole blocks: all layers and heads, "
                "and all tokens"
            )

    def check_descriptor(self) -> None:
        """Raise `StorageError` unless the descriptor is still that of the file."""
        with system_errors(self._path, "using it"):
            status = os.fstat(self._fd)
            if (status.st_dev, status.st_ino) != self._facts.inode:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    # ---- records

    def _at(self, group: str, block: int) -> int:
        return self._facts.table + (self._first[group] + block) * RECORD.size

    def _offset(self, group: str, block: int) -> int:
        """Return where a block begins."""
        region = self._groups[group].regions[0]
        return region.address + block * region.block.stride

    def _records(self, group: str) -> Iterator[bytes]:
        """Return the records of all blocks of a group."""
        return (self._record(group, block) for block in range(self._groups[group].num_blocks))

    def _record(self, group: str, block: int) -> bytes:
        with system_errors(self._path, "reading its records"):
            return os.pread(self._fd, RECORD.size, self._at(group, block))

    def _seal(self, group: str, block: int, generation: int, digest: bytes) -> bytes:
        facts = struct.pack("<QQ16s", self._first[group] + block, generation, digest)
        salt = self._facts.identity
        check = hashlib.blake2b(facts, digest_size=8, salt=salt, person=b"pynixlkv-record")
        return RECORD.pack(generation, digest, check.digest())

    def _digest_in(self, group: str, block: int, record: bytes) -> bytes | None:
        """Return the digest in the record of a valid block, None of any other."""
        if len(record) != RECORD.size:
            return None
        generation, digest, _ = RECORD.unpack(record)
        is_valid = generation % 2 == 0 and record == self._seal(group, block, generation, digest)
        return digest if is_valid else None

    def _digest(self, group: str, block: int) -> bytes:
        """Digest the bytes of a block."""
        nbytes = block_bytes(self._groups[group])
        at = self._offset(group, block)
        digest = hashlib.sha256()  # in hardware twice as fast as BLAKE2
        piece = bytearray(min(_PIECE, nbytes))
        with system_errors(self._path, "reading its blocks"):
            for done in range(0, nbytes, len(piece)):
                view = memoryview(piece)[: nbytes - done]
                got = os.preadv(self._fd, [view], at + done)
                if got != len(view):
                    seen = f"is short: it ends at byte {at + done + got}, inside block {block}"
                    message = f"file {self._path!r} {seen}; remove it"
                    raise storage_error(StorageError, self._path, message, {group: [block]})
                digest.update(view)
        return digest.digest()[:16]

    def begin_read(self, transfer: FileTransfer) -> dict[tuple[str, int], bytes]:
        """Return the records of its blocks; raise unless all are valid."""
        records = {each: self._record(*each) for each in transfer.each_block()}
        invalid = [
            each for each, record in records.items() if self._digest_in(*each, record) is None
        ]
        if invalid:
            blocks = grouped(invalid)
            message = (
                f"file {self._path!r} holds no valid blocks {named(blocks)}: they were never "
                "written, or their writer has not finished; see file.valid_blocks()"
            )
            raise storage_error(InvalidBlocksError, self._path, message, blocks)
        return records

    def end_read(self, records: Mapping[tuple[str, int], bytes]) -> None:
        """Raise unless the blocks are what their records say, and nobody has written meanwhile."""
        wrong = [
            each
            for each, record in records.items()
            if self._digest(*each) != self._digest_in(*each, record)
        ]
        self.check_unchanged(records)
        if wrong:
            raise KVCorruptError(
                f"blocks {named(grouped(wrong))} of file {self._path!r} differ from what was "
                "written; the file is damaged, remove it",
                peer=self.name,
                num_mismatches=len(wrong),
            )

    def check_unchanged(self, records: Mapping[tuple[str, int], bytes]) -> None:
        """Raise `InvalidBlocksError` if blocks were written since their records were read."""
        changed = [each for each, record in records.items() if self._record(*each) != record]
        if changed:
            blocks = grouped(changed)
            what = f"blocks {named(blocks)} of file {self._path!r} were written while they"
            message = f"{what} were read; read them again"
            raise storage_error(InvalidBlocksError, self._path, message, blocks)

    def begin_write(self, transfer: FileTransfer) -> None:
        """Make the records of its blocks invalid, so that even a loss of power leaves them so."""
        was_used = False
        for group, block in transfer.each_block():
            record = self._record(group, block)
            generation = RECORD.unpack(record)[0] if len(record) == RECORD.size else 0
            was_used |= generation != 0
            self._write_record(group, block, (generation | 1) % 2**64, bytes(16))
        if was_used:
            self._flush()

    def end_write(self, transfer: FileTransfer) -> None:
        """Make its blocks valid, whose bytes are all written."""
        self._flush()
        for group, block in transfer.each_block():
            generation = RECORD.unpack(self._record(group, block))[0]
            self._write_record(group, block, (generation + 1) % 2**64, self._digest(group, block))

    def settle(self) -> None:
        """Drop what the last transfer needed, which is quiet."""

    def _write_record(self, group: str, block: int, generation: int, digest: bytes) -> None:
        with system_errors(self._path, "writing its records"):
            os.pwrite(
                self._fd, self._seal(group, block, generation, digest), self._at(group, block)
            )

    def _flush(self) -> None:
        with system_errors(self._path, "flushing it"):
            os.fdatasync(self._fd)


def grouped(each: Sequence[tuple[str, int]]) -> Blocks:
    found: Blocks = {}
    for group, block in each:
        found.setdefault(group, []).append(block)
    return found


def named(blocks: Blocks) -> str:
    def some(ids: list[int]) -> str:
        return ", ".join(map(str, ids[:_SHOWN])) + (", …" if len(ids) > _SHOWN else "")

    if len(blocks) == 1:
        return some(next(iter(blocks.values())))
    return "; ".join(f"{group!r}: {some(ids)}" for group, ids in blocks.items())


# ---- transfers

_STATES: dict[type[TransferError], TransferState] = {
    TransferTimeout: TransferState.TIMED_OUT,
    TransferCancelled: TransferState.CANCELLED,
}


class FileTransfer(Transfer):
    """A transfer between memory and a file, with the promises of `Transfer`.

    It is DONE when a read's bytes have been verified, and when a write's blocks are valid.
    """

    def __init__(
        self,
        file: BlockFile,
        op: Operation,
        blocks: Blocks,
        start: Callable[[float], Transfer],
        timeout: float,
    ) -> None:
        self._peer = file
        self._file = file
        self._op = op
        self._blocks = blocks
        self._start = start
        self._timeout = timeout
        self._submitted = time.monotonic()
        self._id = next(_ids)
        self._lock = threading.Lock()
        self._inner: Transfer | None = None  # moves the bytes
        self._ended: Future[TransferState] = Future()
        self._settled = threading.Event()
        self._error: TransferError | None = None
        self._result: TransferResult | None = None

    def run(self) -> None:
        """Do all of it, on the thread of the file."""
        try:
            self._file.check_descriptor()
            if self._op is Operation.READ:
                records = self._file.begin_read(self)
                try:
                    self._move()
                except StorageError:
                    self._file.check_unchanged(records)  # it may have been the writer
                    raise
                self._file.end_read(records)
            else:
                self.check_running()
                self._file.begin_write(self)
                self._move()
                self._file.end_write(self)
            self._finish(None)
        except TransferError as error:
            self._finish(error)
        except Exception as error:
            self._finish(self._failure(f"{self!r} failed: {error}", error))
        finally:
            while self._inner is not None and not self._inner.wait_quiet(1.0):
                pass
            self._file.settle()
            self._settled.set()

    def each_block(self) -> Iterator[tuple[str, int]]:
        """Return the blocks that it reads or writes."""
        return ((group, block) for group, ids in self._blocks.items() for block in ids)

    def _move(self) -> None:
        """Move the bytes, and wait for that."""
        with self._lock:
            self.check_running()
            self._inner = self._start(max(self._remaining(), 1e-9))
        try:
            self._result = self._inner.wait()
        except (TransferTimeout, TransferCancelled):
            raise
        except TransferError as error:
            raise self._failure(str(error), error.__cause__) from error
        self.check_running()

    def _failure(self, message: str, cause: BaseException | None) -> StorageError:
        error = storage_error(StorageError, self._file.path, message, self._blocks)
        error.__cause__ = cause
        return error

    def _remaining(self) -> float:
        return self._submitted + self._timeout - time.monotonic()

    def check_running(self) -> None:
        """Raise if the transfer has ended, or has to."""
        if self._ended.done():
            raise self._error or TransferCancelled("the transfer was cancelled")
        if self._remaining() <= 0:
            raise self._late()

    def _late(self) -> TransferTimeout:
        return TransferTimeout(
            f"{self._op.name} of file {self._file.path!r} (transfer {self.id}) did not end within "
            f"{self._timeout:.3g} s",
            peer=self._file.name,
            transfer_id=self.id,
        )

    def _finish(self, error: TransferError | None) -> None:
        """End, unless it has ended."""
        with self._lock:
            if self._ended.done():
                return
            if error is None:
                state = TransferState.DONE
            else:
                error.transfer_id = self.id
                self._error = error
                state = _STATES.get(type(error), TransferState.FAILED)
            if self._result is not None:
                total = time.monotonic() - self._submitted
                values = {**vars(self._result), "transfer_s": total}
                self._result = TransferResult(**values)
            self._ended.set_result(state)
        with contextlib.suppress(PynixlkvError):  # the agent is closed
            self._file._agent.wake()

    def _look(self) -> bool:
        """Return whether it has ended. A system call that hangs does not keep it from that."""
        if not self._ended.done() and self._remaining() <= 0:
            inner = self._inner
            if inner is None or inner.state.is_end:  # else the agent's thread sees to it
                self._finish(self._late())
        return self._ended.done()

    @property
    def id(self) -> int:
        """Number of the transfer within its agent."""
        return self._id

    @property
    def state(self) -> TransferState:
        """Current state; never raises."""
        if self._look():
            return self._ended.result()
        return TransferState.QUEUED if self._inner is None else TransferState.RUNNING

    @property
    def is_quiet(self) -> bool:
        """Whether the transfer can no longer move any byte."""
        return self.wait_quiet(0.0)

    @property
    def error(self) -> TransferError | None:
        """Why the transfer failed; None while it runs and after success."""
        return self._error if self._look() else None

    @property
    def result(self) -> TransferResult:
        """Bytes moved, and times; raises `error`, or `StateError` before the end."""
        if self.done() and self._result is not None:
            return self._result
        return super().result

    def wait(self, timeout: float | None = None) -> TransferResult:
        """Wait for the end, `timeout` seconds or until the transfer's own deadline.

        Raises as `Transfer.wait`, and the errors of files.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self._look():
            left = until - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    f"transfer {self.id} with file {self._file.path!r} has not ended after waiting "
                    f"{timeout} s; it goes on until its own deadline",
                    peer=self._file.name,
                    transfer_id=self.id,
                )
            wait_for([self._ended], min(left, max(self._remaining(), 0.05), 1.0))
        return self.result

    def wait_quiet(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until `is_quiet`; return whether it is."""
        return self._settled.wait(timeout)

    def cancel(self) -> None:
        """End the transfer as cancelled unless it has ended. Does not block."""
        self._finish(
            TransferCancelled(
                f"{self._op.name} of file {self._file.path!r} (transfer {self.id}) was cancelled",
                peer=self._file.name,
            )
        )
        inner = self._inner
        if inner is not None and not inner.state.is_end:
            inner.cancel()

    def __await__(self) -> Generator[None, None, TransferResult]:
        yield from self._wait_async().__await__()
        return self.result

    async def _wait_async(self) -> None:
        ended = asyncio.wrap_future(self._ended)
        while not self._look():
            await asyncio.wait([ended], timeout=min(max(self._remaining(), 0.05), 1.0))


def _work(jobs: queue.SimpleQueue[FileTransfer | None]) -> None:
    """Run the transfers of a file, one after another."""
    while (job := jobs.get()) is not None:
        job.run()
        del job
