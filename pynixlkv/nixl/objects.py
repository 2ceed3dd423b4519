"""Files of KV blocks whose blocks are objects of a store, by NIXL's OBJ backend.

The keys of a file begin with its path. One object has the header, and each block is one: its bytes,
and behind them its record. Objects are put whole, so one is the old block, the new one, or absent.

NIXL moves an object from or to one piece of host memory. That piece is in a file in memory, of the
format of `pynixlkv.nixl.files`, which holds the blocks that are on their way and is else empty.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pynixlkv.errors import NixlError, StorageError
from pynixlkv.nixl import files, verbs
from pynixlkv.nixl._enums import XferState
from pynixlkv.nixl.files import BlockFile
from pynixlkv.transfer import CLOSE_TIMEOUT_S
from pynixlkv.types import MemoryType, Operation
from pynixlkv.wire import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pynixlkv._native.nixl import XferRequest
    from pynixlkv.geometry import Geometry, KVCache
    from pynixlkv.nixl.agent import NixlAgent
    from pynixlkv.nixl.files import FileTransfer

_AT_ONCE = 64
_POLL_S = 0.001
_MAX_FILE_BYTES = 1 << 62  # nothing of it takes memory until it is written
_HEADER = "header"


class Store:
    """NIXL's OBJ backend for the objects of one file, and the file in memory."""

    def __init__(self, path: str, params: Mapping[str, str]) -> None:
        self.path = path
        self.fd = -1
        self._ids = itertools.count()
        self._agent = verbs.Agent("objects", verbs.AgentConfig(progress_thread=False))
        try:
            self._agent.create_backend("OBJ", params)
            with files.system_errors(path, "making its file in memory"):
                self.fd = os.memfd_create("pnkv-objects")
                os.ftruncate(self.fd, _MAX_FILE_BYTES)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it, with the descriptor unless somebody has taken that."""
        self._agent.close()
        if self.fd >= 0:
            os.close(self.fd)

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Ask which objects there are.

        NIXL waits half a minute for each of a query, so the first is asked for alone.
        """
        found: list[bool] = []
        while len(found) < len(names):
            asked = names[len(found) :][: _AT_ONCE if found else 1]
            rows = [(0, 0, number) for number in range(len(asked))]
            keys = [f"{self.path}/{name}" for name in asked]
            try:
                answers = self._agent.query_mem(rows, MemoryType.OBJECT, metadata=keys)
            except NixlError as error:
                raise self.error("asking for objects", error) from error
            found += [answer is not None for answer in answers]
        return found

    def error(
        self, what: str, cause: NixlError, blocks: Sequence[tuple[str, int]] = ()
    ) -> StorageError:
        """Return the error for what the store did not do."""
        return files.storage_error(
            StorageError,
            self.path,
            f"{what} of file {self.path!r} failed: {cause}. NIXL does not say why: see "
            "endpoint_override, bucket, access_key and secret_key in storage_params, whether these "
            "keys may do that, and what the store says",
            files.grouped(blocks),
        )

    def move(
        self,
        op: Operation,
        names: Sequence[str],
        rows: Sequence[tuple[int, int]],
        memory: object,
        *,
        at: int = 0,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, NixlError]:
        """Put or get objects, several at a time, and return what failed. Then all is quiet.

        Rows are addresses and lengths in `memory`; reading begins at byte `at`. Each object has a
        request of its own, because one for several ends with the first that fails.
        """
        failed: dict[str, NixlError] = {}
        if not names:
            return failed
        running: dict[str, XferRequest] = {}
        local = [(address, nbytes, 0) for address, nbytes in rows]
        ids = list(itertools.islice(self._ids, len(names)))
        todo = iter(zip(names, local, ids, strict=True))
        keys = [f"{self.path}/{name}" for name in names]
        with (
            self._agent.register_mem(local, keepalive=memory),
            self._agent.register_mem([(0, 0, i) for i in ids], MemoryType.OBJECT, metadata=keys),
        ):
            while True:
                while len(running) < _AT_ONCE and not must_stop() and (each := next(todo, None)):
                    name, row, number = each
                    there = [(at, row[1], number)]
                    with _noted(failed, name):
                        running[name] = self._agent.create_xfer_req(
                            op, [row], there, "objects", remote_memory=MemoryType.OBJECT
                        )
                        self._agent.post_xfer_req(running[name])
                for name, request in list(running.items()):
                    with _noted(failed, name):
                        if request.state is XferState.PENDING:
                            self._agent.get_xfer_status(request)
                    if request.state is not XferState.PENDING:
                        request.close()
                        del running[name]
                if not running:
                    return failed
                time.sleep(_POLL_S)


@contextlib.contextmanager
def _noted(failed: dict[str, NixlError], name: str) -> Iterator[None]:
    try:
        yield
    except NixlError as error:
        failed.setdefault(name, error)


def create(
    path: str,
    params: Mapping[str, str],
    like: KVCache | Geometry,
    num_blocks: int | Mapping[str, int],
) -> Store:
    """Put a header where there is none."""
    begin, _ = files.make_header(like, num_blocks, BlockObjects.tail)
    store = Store(path, params)
    try:
        if store.exist([_HEADER])[0]:
            raise files.storage_error(
                StorageError,
                path,
                f"file {path!r} exists; open it with agent.open_file(path, writable=True), or "
                f"remove the objects whose keys begin with {path + '/'!r}",
            )
        os.pwrite(store.fd, begin, 0)
        part = np.frombuffer(begin, np.uint8)
        row = (part.ctypes.data, part.nbytes)
        for error in store.move(Operation.WRITE, [_HEADER], [row], part).values():
            raise store.error("putting the header", error) from error
    except BaseException:
        store.close()
        raise
    return store


def open_existing(path: str, params: Mapping[str, str]) -> Store:
    """Get the header."""
    store = Store(path, params)
    try:
        at, nbytes = 0, files.PREFIX.size
        while nbytes:
            part = np.zeros(nbytes, np.uint8)  # a short object leaves zeros
            row = (part.ctypes.data, nbytes)
            for error in store.move(Operation.READ, [_HEADER], [row], part, at=at).values():
                if store.exist([_HEADER])[0]:
                    raise store.error("reading the header", error) from error
                raise files.storage_error(
                    StorageError,
                    path,
                    f"there is no file {path!r} in the bucket, or no such bucket; create it with "
                    "agent.create_file, or correct the path",
                )
            os.pwrite(store.fd, part.data, at)
            at, nbytes = nbytes, 0 if at else min(files.PREFIX.unpack(part.data)[1], MAX_BYTES)
    except BaseException:
        store.close()
        raise
    return store


class BlockObjects(BlockFile):
    """A file whose blocks are objects; made by an agent with ``storage="OBJ"``."""

    tail: ClassVar[int] = files.RECORD.size

    def __init__(
        self, agent: NixlAgent, name: str, store: Store, *, path: str, writable: bool
    ) -> None:
        self._store = store
        self._memory: NDArray[np.uint8] | None = None
        super().__init__(agent, name, store.fd, path=path, writable=writable)
        store.fd = -1

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> bool:
        """As `BlockFile.close`."""
        is_quiet = super().close(timeout)
        if self._fd < 0:
            self._store.close()
        return is_quiet

    def _end(self, group: str, block: int) -> int:
        return self._offset(group, block) + files.block_bytes(self._groups[group])

    def _records(self, group: str) -> Iterator[bytes]:
        first, count = self._first[group], self._groups[group].num_blocks
        names = [str(number) for number in range(first, first + count)]
        records = np.zeros((count, self.tail), np.uint8)
        rows = [(record.ctypes.data, self.tail) for record in records]
        there = [i for i, found in enumerate(self._store.exist(names)) if found]
        self._store.move(  # what is short has no record
            Operation.READ,
            [names[i] for i in there],
            [rows[i] for i in there],
            records,
            at=files.block_bytes(self._groups[group]),
        )
        return (record.tobytes() for record in records)

    def _move(self, op: Operation, transfer: FileTransfer) -> dict[tuple[str, int], NixlError]:
        """Put or get the objects of a transfer's blocks; return what failed."""
        if self._memory is None:
            span = self.geometry.spans[0]
            with files.system_errors(self._path, "mapping its file in memory"):
                mapped = mmap.mmap(self._fd, span.address + span.nbytes)
            self._memory = np.frombuffer(mapped, np.uint8)
        base = self._memory.ctypes.data
        blocks = {
            str(self._first[group] + block): (group, block)
            for group, block in transfer.each_block()
        }
        rows = []
        for each in blocks.values():
            begin = self._offset(*each)
            rows.append((base + begin, self._end(*each) + self.tail - begin))
        failed = self._store.move(
            op, list(blocks), rows, self._memory, must_stop=lambda: transfer.state.is_end
        )
        transfer.check_running()
        return {blocks[name]: error for name, error in failed.items()}

    def begin_read(self, transfer: FileTransfer) -> dict[tuple[str, int], bytes]:
        """Get the objects of its blocks; the rest is as if the file had always had them."""
        failed = self._move(Operation.READ, transfer)
        if failed:
            names = [str(self._first[group] + block) for group, block in failed]
            there = itertools.compress(failed.items(), self._store.exist(names))
            self._refuse("getting", dict(there))
        for each in transfer.each_block():
            record = os.pread(self._fd, self.tail, self._end(*each))
            os.pwrite(self._fd, record, self._at(*each))
        return super().begin_read(transfer)

    def end_write(self, transfer: FileTransfer) -> None:
        """Make its blocks valid in the file, and put them with their records."""
        super().end_write(transfer)
        for each in transfer.each_block():
            os.pwrite(self._fd, self._record(*each), self._end(*each))
        self._refuse("putting", self._move(Operation.WRITE, transfer))

    def _refuse(self, what: str, failed: Mapping[tuple[str, int], NixlError]) -> None:
        if failed:
            blocks, cause = list(failed), next(iter(failed.values()))
            named = files.named(files.grouped(blocks))
            raise self._store.error(f"{what} blocks {named}", cause, blocks) from cause

    def settle(self) -> None:
        """Free the memory of the last transfer's blocks."""
        with contextlib.suppress(OSError, StorageError):
            self.check_descriptor()
            os.ftruncate(self._fd, self.geometry.spans[0].address)
            os.ftruncate(self._fd, _MAX_FILE_BYTES)
