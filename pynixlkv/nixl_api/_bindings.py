"""What ``nixl._bindings`` offers: enumerations, exceptions, descriptor lists and the raw agent.

Names, argument forms and return values are NIXL's. Below them is `pynixlkv.nixl`, which checks what
NIXL does not. A handle is a number here too, but a number that is never used again: after its
release it is refused, where NIXL would follow a dangling pointer.
"""

from __future__ import annotations

import datetime
import enum
import functools
import inspect
import itertools
import operator
import re
import weakref
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np

from pynixlkv import nixl
from pynixlkv._kernels import number_rows
from pynixlkv.errors import (
    AlreadyRegisteredError,
    ClosedError,
    ConfigError,
    ForkError,
    LibraryNotFoundError,
    NativeError,
    NixlInvalidParamError,
    NixlNotFoundError,
    NixlTelemetryError,
    NotRegisteredError,
    PynixlkvError,
    RegistrationInUseError,
    StalePeerError,
    StateError,
    UnknownPeerError,
)
from pynixlkv.nixl import XferState
from pynixlkv.types import MemoryType, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import ParamSpec

    Params = ParamSpec("Params")
    Rows = NDArray[np.uint64]
    Text = str | bytes

Result = TypeVar("Result")

NIXL_INIT_AGENT = ""
DEFAULT_COMM_PORT = 8888
HAVE_UCX_GPU_DEVICE_API = False
"""Memory views for GPU code are not offered, whatever the installed NIXL can do."""


# ---- enumerations


class _NativeEnum(enum.IntEnum):
    """Prints like the enumerations of NIXL's extension module."""

    __str__ = enum.Enum.__str__


class nixl_thread_sync_t(_NativeEnum):
    """Locking inside NIXL."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


class nixl_mem_t(_NativeEnum):
    """Kinds of memory."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(_NativeEnum):
    """Directions; READ is remote to local."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_cost_t(_NativeEnum):
    """How a cost was estimated."""

    NIXL_COST_ANALYTICAL_BACKEND = 0


class nixl_status_t(_NativeEnum):
    """What calls return; failures are raised instead."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9
    NIXL_ERR_REMOTE_DISCONNECT = -10
    NIXL_ERR_CANCELED = -11
    NIXL_ERR_NO_TELEMETRY = -12


# The members are names of the module too.
for _enum in (nixl_thread_sync_t, nixl_mem_t, nixl_xfer_op_t, nixl_cost_t, nixl_status_t):
    globals().update(_enum.__members__)

# By number: to look a member up takes longer than to poll a transfer.
_OPERATIONS = (Operation.READ, Operation.WRITE)
_MEMORY = tuple(MemoryType(memory) for memory in nixl_mem_t)
_SUCCESS, _IN_PROGRESS = nixl_status_t.NIXL_SUCCESS, nixl_status_t.NIXL_IN_PROG
_DONE, _NOT_POSTED = XferState.DONE, XferState.NOT_POSTED
_UINT64, _INT64 = np.dtype(np.uint64), np.dtype(np.int64)


# ---- exceptions


class nixlNotPostedError(PynixlkvError):
    """A transfer that has not been posted, or is not done."""


class nixlInvalidParamError(PynixlkvError):
    """A wrong argument, or a handle that was released."""


class nixlBackendError(PynixlkvError):
    """A backend failed."""


class nixlNotFoundError(PynixlkvError):
    """An agent, a plugin or registered memory that is not known."""


class nixlMismatchError(PynixlkvError):
    """Metadata that is damaged, this agent's own, or another agent's of a known name."""


class nixlNotAllowedError(PynixlkvError):
    """Something that others still use."""


class nixlRepostActiveError(PynixlkvError):
    """A transfer posted while it runs."""


class nixlUnknownError(PynixlkvError):
    """Anything else."""


class nixlNotSupportedError(PynixlkvError):
    """Something that this implementation does not offer."""


class nixlRemoteDisconnectError(PynixlkvError):
    """A transfer or notification failed; the connection to the peer is gone."""


class nixlCancelledError(PynixlkvError):
    """A transfer was cancelled; here for those who catch it."""


class nixlNoTelemetryError(PynixlkvError):
    """The agent was made without telemetry."""


_KINDS: tuple[tuple[tuple[type[PynixlkvError], ...], type[PynixlkvError]], ...] = (
    ((NotRegisteredError, UnknownPeerError, StalePeerError, NixlNotFoundError), nixlNotFoundError),
    ((RegistrationInUseError,), nixlNotAllowedError),
    ((AlreadyRegisteredError,), nixlBackendError),
    ((NixlInvalidParamError, ClosedError, ConfigError), nixlInvalidParamError),
    ((NixlTelemetryError,), nixlNoTelemetryError),
)


_NATIVE_ERRORS = (NativeError, StateError, ConfigError)


def _rename(
    error: PynixlkvError,
    backend: type[PynixlkvError] = nixlBackendError,
    state: type[PynixlkvError] = nixlNotAllowedError,
) -> NoReturn:
    """Raise NIXL's exception for one of `_NATIVE_ERRORS`.

    NIXL's C interface has one status for most failures, so what was called decides what a failure
    of the backend, or a wrong state, is called.
    """
    if isinstance(error, ForkError | LibraryNotFoundError):
        raise error
    otherwise = state if isinstance(error, StateError) else backend
    named = next((to for kinds, to in _KINDS if isinstance(error, kinds)), otherwise)
    raise named(str(error)) from error


def _raises_nixl(
    *,
    backend: type[PynixlkvError] = nixlBackendError,
    state: type[PynixlkvError] = nixlNotAllowedError,
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Make a method raise NIXL's exceptions; those that programs poll catch them themselves."""

    def decorate(method: Callable[Params, Result]) -> Callable[Params, Result]:
        @functools.wraps(method)
        def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            try:
                return method(*args, **kwargs)
            except _NATIVE_ERRORS as error:
                _rename(error, backend, state)

        return call

    return decorate


_CATCHING: set[Callable[..., object]] = set()


def _catches(method: Callable[Params, Result]) -> Callable[Params, Result]:
    """Mark a method that calls `_rename` itself: programs poll it, and a wrapper takes time."""
    _CATCHING.add(method)
    return method


def _all_raise_nixl(cls: type[Result]) -> type[Result]:
    """Do so for the public methods of a class, those that are decorated already aside."""
    for name, method in list(vars(cls).items()):
        if (
            inspect.isfunction(method)
            and not name.startswith("_")
            and not hasattr(method, "__wrapped__")
            and method not in _CATCHING
        ):
            setattr(cls, name, _raises_nixl()(method))
    return cls


# ---- serialised lists and metadata

_HEADER = b"nixlSerDes|"


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data + b"|"


class _FieldReader:
    """Reads NIXL's serialised form, checking every length before it is used."""

    def __init__(self, data: bytes | memoryview, position: int = 0) -> None:
        self._data = memoryview(data)
        self.position = position
        if not position:
            self._expect(_HEADER)

    def take(self, tag: bytes) -> memoryview:
        """Read the next field, which must have this tag."""
        self._expect(tag)
        start = self.position + 8
        end = start + int.from_bytes(self._data[self.position : start], "little")
        if start > len(self._data) or end > len(self._data):
            self._fail(f"field {tag!r} is longer than the rest")
        self.position = end
        self._expect(b"|")
        return self._data[start:end]

    def _expect(self, text: bytes) -> None:
        end = self.position + len(text)
        if self._data[self.position : end] != text:
            self._fail(f"expected {text!r}")
        self.position = end

    def _fail(self, why: str) -> NoReturn:
        raise nixlMismatchError(
            f"not what NIXL serialises, or damaged at byte {self.position} of {len(self._data)}: "
            f"{why}"
        )


def _join_partial(connection: bytes, memory: bytes) -> bytes:
    """Make one piece of partial metadata of the connection's and the memory's."""
    heads = []
    for metadata in (connection, memory):
        reader = _FieldReader(metadata)
        reader.take(b"Agent")
        for _ in range(int.from_bytes(reader.take(b"Conns"), "little")):
            reader.take(b"t")
            reader.take(b"c")
        heads.append(reader.position)
    return connection[: heads[0]] + memory[heads[1] :]


# ---- descriptor lists


def _as_rows(descs: Sequence[tuple[Any, ...]]) -> Rows:
    """Return the first three of each tuple as (n, 3) uint64; never rounds or wraps around."""
    rows = np.empty((len(descs), 3), dtype=np.uint64)
    for index, desc in enumerate(descs):
        for place, (what, number) in enumerate(
            zip(("address", "length", "device"), desc, strict=False)
        ):
            value = operator.index(number) if hasattr(number, "__index__") else -1
            if not 0 <= value < 1 << 64:
                raise ValueError(
                    f"descriptor {index} has the {what} {number!r}; it must be an int from 0 to "
                    "2**64 - 1"
                )
            rows[index, place] = value
    return rows


class _DescList:
    """A list of descriptors of one kind of memory.

    Like NIXL's, it has no length and is never false: callers test ``if descs:`` for None.
    """

    _width: ClassVar[int] = 3
    _blank: ClassVar[object] = ()
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        type: nixl_mem_t,
        descs: list[tuple[Any, ...]] | NDArray[Any] | int = 0,
        init_size: int = 0,
    ) -> None:
        self._type = type if type.__class__ is nixl_mem_t else nixl_mem_t(type)
        self._keepalive: object = None
        self._extras: list[Any] = []  # empty where tuples have three elements
        if isinstance(descs, np.ndarray):
            self._rows = self._from_array(descs)
        elif isinstance(descs, list):
            rows = number_rows(descs, self._width)
            if rows is None:
                for desc in descs:
                    self._check(desc)
                rows = _as_rows(descs)
            self._rows = rows
            if self._width > 3:
                column = [desc[3] for desc in descs]
                is_blank = set(column) <= {self._blank, ""}
                self._extras = (
                    [self._blank] * len(column) if is_blank else list(map(self._extra, column))
                )
        else:
            self._rows = np.zeros((int(descs) or init_size, 3), dtype=np.uint64)
        self._count = len(self._rows)
        if self._width > 3 and not self._extras:
            self._extras = [self._blank] * self._count

    @classmethod
    def _from_array(cls, descs: NDArray[Any]) -> Rows:
        if descs.ndim != 2 or descs.shape[1] != 3:
            raise ValueError(f"descs must be a Nx3 numpy array; its shape is {descs.shape}")
        is_signed = descs.dtype == _INT64
        if not is_signed and descs.dtype != _UINT64:
            raise ValueError(
                f"descs must be a Nx3 numpy array of uint64 or int64; it is of {descs.dtype}"
            )
        if not descs.flags.c_contiguous:
            raise ValueError("descs must be a C-contiguous numpy array")
        if is_signed and len(descs) and int(descs.min()) < 0:
            index, column = (int(i) for i in np.argwhere(descs < 0)[0])
            raise ValueError(f"descs[{index}, {column}] is {descs[index, column]}, below zero")
        return descs.astype(np.uint64)

    @classmethod
    def _check(cls, desc: object) -> None:
        if not isinstance(desc, tuple):
            raise TypeError(f"each descriptor must be a tuple when provided as a list: {desc!r}")
        if len(desc) != cls._width:
            raise ValueError(
                f"each descriptor tuple must have exactly {cls._width} elements: {desc!r}"
            )

    @classmethod
    def _extra(cls, value: Any) -> object:  # noqa: ANN401
        """Return the fourth element of a tuple as it is kept."""
        return value

    @property
    def rows(self) -> Rows:
        return self._rows[: self._count]

    @property
    def memory(self) -> MemoryType:
        return _MEMORY[self._type]

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return self._count

    def isEmpty(self) -> bool:
        return self._count == 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _DescList) or self.__class__ is not other.__class__:
            return NotImplemented
        return (
            self._type == other._type
            and np.array_equal(self.rows, other.rows)
            and self._extras == other._extras
        )

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        address, length, device = self.rows[self._index(index)]
        extra = () if self._width == 3 else (self._extras[index],)
        return (int(address), int(length), int(device), *extra)

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        self._check(desc)
        self.rows[self._index(index)] = _as_rows([desc])
        if self._extras:
            self._extras[index] = self._extra(desc[3])

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        self._check(desc)
        row = _as_rows([desc])
        if self._count == len(self._rows):
            spare = np.empty((max(8, self._count), 3), dtype=np.uint64)
            self._rows = np.concatenate([self._rows, spare])
        self._rows[self._count] = row[0]
        if self._width > 3:
            self._extras.append(self._extra(desc[3]))
        self._count += 1

    append = addDesc

    def index(self, desc: tuple[Any, ...]) -> int:
        self._check(desc)
        for place in np.flatnonzero((self.rows == _as_rows([desc])).all(axis=1)):
            if not self._extras or self._extras[place] == self._extra(desc[3]):
                return int(place)
        raise nixlNotFoundError(f"{desc!r} is not in the list of {self._count} descriptors")

    def remDesc(self, index: int) -> None:
        place = self._index(index)
        self._rows = np.delete(self.rows, place, axis=0)
        del self._extras[place : place + 1]
        self._count -= 1

    def clear(self) -> None:
        self._count = 0
        self._extras.clear()

    def print(self) -> None:
        print(repr(self))  # noqa: T201

    def __repr__(self) -> str:
        shown = [self[i] for i in range(min(self._count, 4))]
        more = f", {self._count - 4} more" if self._count > 4 else ""
        return f"<{self.__class__.__name__} {self._type.name} {shown}{more}>"

    def _index(self, index: int) -> int:
        # Beyond the end NIXL reads whatever is there, so that iterating never ends.
        if not 0 <= index < self._count:
            raise IndexError(f"descriptor {index} of a list of {self._count}")
        return index


class nixlXferDList(_DescList):
    """Descriptors of a transfer: tuples of address, length in bytes, device."""

    def __getstate__(self) -> bytes:
        return b"".join(self._state())

    def _state(self) -> list[bytes | memoryview]:
        data = self.rows.data.cast("B") if self._count else b""
        return _dump(b"nixlBDList", self, [data] if data else [])

    def __setstate__(self, state: bytes | memoryview) -> None:
        mem, count, reader = _load(b"nixlBDList", state)
        data = reader.take(b"") if count else b""
        if len(data) != 24 * count:
            raise nixlMismatchError(f"{len(data)} bytes for {count} descriptors of 24 bytes each")
        rows = np.frombuffer(data, dtype="<u8").reshape(-1, 3).astype(np.uint64, copy=False)
        nixlXferDList.__init__(self, mem, rows)


class nixlRegDList(_DescList):
    """Descriptors to register: tuples of address, length in bytes, device, and text or bytes."""

    _width = 4
    _blank = b""

    @classmethod
    def _extra(cls, value: object) -> bytes:
        return _as_bytes(value, "the fourth element of a descriptor")

    def trim(self) -> nixlXferDList:
        return nixlXferDList(self._type, self.rows)

    def __getstate__(self) -> bytes:
        return b"".join(self._state())

    def _state(self) -> list[bytes | memoryview]:
        rows = zip(self.rows, self._extras, strict=True)
        return _dump(b"nixlSDList", self, [row.tobytes() + extra for row, extra in rows])

    def __setstate__(self, state: bytes | memoryview) -> None:
        mem, count, reader = _load(b"nixlSDList", state)
        descs = []
        for _ in range(count):
            data = reader.take(b"")
            if len(data) < 24:
                raise nixlMismatchError(f"a descriptor of {len(data)} bytes, below 24")
            numbers = (int.from_bytes(data[i : i + 8], "little") for i in (0, 8, 16))
            descs.append((*numbers, bytes(data[24:])))
        nixlRegDList.__init__(self, mem, descs)


class nixlRemoteDList(_DescList):
    """Descriptors of several peers: tuples of address, length in bytes, device, agent name."""

    _width = 4
    _blank = ""

    @classmethod
    def _extra(cls, value: Text) -> str:
        return _as_text(value)


def _dump(
    kind: bytes, descs: _DescList, items: Sequence[bytes | memoryview]
) -> list[bytes | memoryview]:
    """Return the parts of the serialised form."""
    parts: list[bytes | memoryview] = [
        _HEADER,
        _field(b"nixlDList", kind),
        _field(b"t", int(descs.getType()).to_bytes(4, "little")),
        _field(b"n", descs.descCount().to_bytes(8, "little")),
    ]
    for item in items:
        parts += (len(item).to_bytes(8, "little"), item, b"|")
    return parts


_LIST = re.compile(
    _HEADER.replace(b"|", rb"\|")
    + rb"nixlDList\x0a\0{7}(nixl[BS]DList)\|t\x04\0{7}(.{4})\|n\x08\0{7}(.{8})\|",
    re.DOTALL,
)
"""The head of a serialised list: its kind, its memory and its number of descriptors."""


def _load(kind: bytes, state: bytes | memoryview) -> tuple[nixl_mem_t, int, _FieldReader]:
    head = _LIST.match(state)
    if head is None:
        found = bytes(_FieldReader(state).take(b"nixlDList"))
        raise nixlMismatchError(f"a list of kind {found!r} with another head than NIXL's")
    seen, mem = head[1], int.from_bytes(head[2], "little")
    if seen != kind or mem >= len(_MEMORY):
        raise nixlMismatchError(
            f"a list of kind {bytes(seen)!r} and memory {mem}, expected {kind!r}"
        )
    count = int.from_bytes(head[3], "little")
    return nixl_mem_t(mem), count, _FieldReader(state, head.end())


# ---- the agent


@dataclass(eq=False, repr=False)
class nixlXferTelemetry:
    """What NIXL measured of a transfer; times in microseconds."""

    startTime: int = 0
    postDuration: int = 0
    xferDuration: int = 0
    totalBytes: int = 0
    descCount: int = 0


@dataclass(eq=False, repr=False)
class nixlAgentConfig:
    """Configuration of a raw agent; `pthrDelay` and `lthrDelay` are in microseconds."""

    useProgThread: bool = False
    useListenThread: bool = False
    listenPort: int = DEFAULT_COMM_PORT
    syncMode: nixl_thread_sync_t = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT
    num_workers: InitVar[int] = 1  # which NIXL does not use either
    pthrDelay: int = 0
    lthrDelay: int = 100_000
    captureTelemetry: bool = False
    etcdWatchTimeout: ClassVar = datetime.timedelta(seconds=5)


@_all_raise_nixl
class nixlAgent:
    """NIXL's agent, with numbers for handles."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        if not isinstance(name, str | bytes):
            raise TypeError(f"the name of an agent is {name!r}; it must be a str")
        try:
            self._agent = nixl.Agent(
                _as_text(name),
                nixl.AgentConfig(
                    progress_thread=config.useProgThread,
                    listen_thread=config.useListenThread,
                    listen_port=_port(config.listenPort),
                    thread_sync=nixl.ThreadSync(config.syncMode),
                    progress_delay_us=config.pthrDelay,
                    listen_delay_us=config.lthrDelay,
                    telemetry=config.captureTelemetry,
                ),
            )
        except NativeError as error:
            raise RuntimeError(str(error)) from error
        self._numbers = itertools.count(1)
        self._backends: dict[int, nixl.Backend] = {}
        self._prepared: dict[int, nixl.PreparedList] = {}
        self._requests: dict[int, nixl.XferRequest] = {}
        # At exit the interpreter can end what is released later no more; see `_end`.
        self._ended: list[bool] = []
        weakref.finalize(self, _end, self._agent, self._ended, self._prepared, self._requests)

    @property
    def is_closed(self) -> bool:
        return self._agent.is_closed

    # -- plugins and backends

    def getAvailPlugins(self) -> list[str]:
        return self._agent.get_available_plugins()

    @_raises_nixl(backend=nixlNotFoundError)
    def getPluginParams(self, plugin: str) -> tuple[dict[str, str], list[str]]:
        self._require_plugin(plugin)
        return _info(self._agent.get_plugin_params(plugin))

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        return _info(self._agent.get_backend_params(self._backend(backend)))

    @_raises_nixl(state=nixlInvalidParamError)
    def createBackend(self, plugin: str, params: Mapping[str, str]) -> int:
        self._require_plugin(plugin)
        try:
            backend = self._agent.create_backend(plugin, params)
        except NativeError:
            self.getPluginParams(plugin)  # which says so if a library of the plugin is missing
            raise
        return self._number(self._backends, backend)

    # -- memory

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        """Register memory: all descriptors or none.

        A descriptor that is registered already is counted, and has to be deregistered as often.
        """
        _require(descs, nixlRegDList)
        self._agent.register_counted(
            descs.rows,
            descs.memory,
            descs._extras if any(descs._extras) else (),
            descs._keepalive,
            self._chosen(backends),
        )
        return nixl_status_t.NIXL_SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        """Deregister memory by the descriptors with which it was registered.

        The number of backends does not matter: memory is deregistered from all of its backends.
        Refused only while a transfer moves bytes of it; lists and transfers on it become stale.
        """
        if not self._ended:
            _require(descs, nixlRegDList)
            self._agent.deregister_counted(descs.rows, descs.memory, self._chosen(backends))
        return nixl_status_t.NIXL_SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        _require(descs, nixlRegDList)
        if descs.isEmpty():
            return []
        chosen = self._chosen([backend])
        return self._agent.query_mem(
            descs.rows, descs.memory, metadata=descs._extras, backends=chosen
        )

    # -- metadata

    def makeConnection(self, peer: Text, backends: Sequence[int] = ()) -> nixl_status_t:
        self._agent.make_connection(_as_text(peer), backends=self._chosen(backends))
        return nixl_status_t.NIXL_SUCCESS

    def getLocalMD(self) -> bytes:
        return self._agent.get_local_md()

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        _require(descs, nixlRegDList)
        chosen = self._chosen(backends)
        connection = self._agent.get_local_partial_md(backends=chosen)
        if descs.isEmpty():
            return connection
        memory = self._agent.get_local_partial_md(descs.rows, descs.memory, backends=chosen)
        return _join_partial(connection, memory) if inc_conn_info else memory

    @_raises_nixl(backend=nixlMismatchError)
    def loadRemoteMD(self, metadata: Text) -> bytes:
        data = _as_bytes(metadata, "metadata")
        _FieldReader(data).take(b"Agent")  # names the fault if they are no metadata
        return self._agent.load_remote_md(data).encode()

    def invalidateRemoteMD(self, peer: Text) -> nixl_status_t:
        """Forget a peer; one that is not known is no error."""
        if self._ended:
            return _SUCCESS
        try:
            self._agent.invalidate_remote_md(_as_text(peer))
        except UnknownPeerError:
            return nixl_status_t.NIXL_ERR_NOT_FOUND
        return nixl_status_t.NIXL_SUCCESS

    def checkRemoteMD(self, peer: Text, descs: nixlXferDList) -> nixl_status_t:
        _require(descs, nixlXferDList)
        known = self._agent.check_remote_md(_as_text(peer), descs.rows, descs.memory)
        return nixl_status_t.NIXL_SUCCESS if known else nixl_status_t.NIXL_ERR_NOT_FOUND

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        self._agent.send_local_md(ip_addr, port)

    def sendLocalPartialMD(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[int] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        _require(descs, nixlRegDList)
        _require_no_label(label)
        chosen = self._chosen(backends)
        if inc_conn_info or descs.isEmpty():
            self._agent.send_local_partial_md(ip=ip_addr, port=port, backends=chosen)
        if not descs.isEmpty():
            self._agent.send_local_partial_md(
                descs.rows, descs.memory, ip_addr, port, backends=chosen
            )

    def fetchRemoteMD(
        self, remote_agent: Text, ip_addr: str = "", port: int = 0, label: str = ""
    ) -> None:
        _require_no_label(label)
        self._agent.fetch_remote_md(_as_text(remote_agent), ip_addr, port)

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        self._agent.invalidate_local_md(ip_addr, port)

    # -- transfers

    @_catches
    def prepXferDlist(
        self,
        agent_name: Text | nixlXferDList,
        *args: Any,  # noqa: ANN401 - three forms of arguments, told apart below
        **kwargs: Any,  # noqa: ANN401
    ) -> int:
        """Prepare a list: ``([agent_name], [mem_type], descs, backend=[])``.

        Without a name, or with an empty one, it is for the local side. With a kind of memory, the
        descriptors are rows of address, length, device, stride and count.
        """
        if isinstance(agent_name, nixlXferDList):
            args, agent_name = (agent_name, *args), NIXL_INIT_AGENT
        memory = kwargs.pop("mem_type", None)
        if memory is None and args and isinstance(args[0], nixl_mem_t):
            memory, *args = args  # type: ignore[assignment]
        given = dict(zip(("descs", "backend"), args, strict=False)) | kwargs
        peer, descs = _as_text(agent_name), given["descs"]
        backends = self._chosen(given.get("backend", ()))
        try:
            if memory is not None:
                prepared = self._agent.prep_xfer_runs(
                    peer, _as_runs(descs), _MEMORY[memory], backends
                )
            else:
                _require(descs, nixlXferDList)
                prepared = self._agent._prep_xfer_dlist(peer, descs.rows, descs.memory, backends)
        except _NATIVE_ERRORS as error:
            # All else has been checked, so NIXL can only refuse memory that no backend knows.
            _rename(error, nixlNotFoundError)
        return self._number(self._prepared, prepared)

    @_catches
    def makeXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_side: int,
        local_indices: Sequence[int] | NDArray[Any],
        remote_side: int,
        remote_indices: Sequence[int] | NDArray[Any],
        notif_msg: Text = "",
        backend: Sequence[int] = (),
        skip_desc_merg: bool = False,
    ) -> int:
        try:
            request = self._agent.make_xfer_req(
                _OPERATIONS[operation],
                self._prepared_list(local_side),
                local_indices,
                self._prepared_list(remote_side),
                remote_indices,
                notification=_as_bytes(notif_msg, "notif_msg") if notif_msg else None,
                skip_merge=skip_desc_merg,
                backends=self._chosen(backend),
            )
        except _NATIVE_ERRORS as error:
            _rename(error)
        return self._number(self._requests, request)

    @_raises_nixl(backend=nixlNotFoundError)
    def createXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: Text,
        notif_msg: Text = "",
        backend: Sequence[int] = (),
    ) -> int:
        _require(local_descs, nixlXferDList)
        _require(remote_descs, nixlXferDList)
        request = self._agent.create_xfer_req(
            _OPERATIONS[operation],
            local_descs.rows,
            remote_descs.rows,
            _as_text(remote_agent),
            local_memory=local_descs.memory,
            remote_memory=remote_descs.memory,
            notification=_as_bytes(notif_msg, "notif_msg") or None,
            backends=self._chosen(backend),
        )
        return self._number(self._requests, request)

    def estimateXferCost(self, req_handle: int) -> tuple[int, int, nixl_cost_t]:
        cost = self._agent.estimate_xfer_cost(self._request(req_handle))
        return cost.duration_us, cost.margin_us, nixl_cost_t(cost.method)

    @_catches
    def postXferReq(self, reqh: int, notif_msg: Text = "") -> nixl_status_t:
        """Start a transfer; an empty message keeps the one it was made with."""
        request = self._request(reqh)
        message = _as_bytes(notif_msg, "notif_msg") if notif_msg else None
        try:
            state = self._agent.post_xfer_req(request, message)
        except _NATIVE_ERRORS as error:
            _rename(error, self._lost(request), nixlRepostActiveError)
        return _SUCCESS if state is _DONE else _IN_PROGRESS

    @_catches
    def getXferStatus(self, reqh: int) -> nixl_status_t:
        request = self._request(reqh)
        try:
            state = self._agent.get_xfer_status(request)
        except _NATIVE_ERRORS as error:
            _rename(error, self._lost(request))
        if state is _NOT_POSTED:
            raise nixlNotPostedError(f"{request!r} has not been posted")
        return _SUCCESS if state is _DONE else _IN_PROGRESS

    @_raises_nixl(state=nixlNotPostedError)
    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:
        t = self._agent.get_xfer_telemetry(self._request(reqh))
        return nixlXferTelemetry(
            t.start_us, t.post_us, t.transfer_us, t.num_bytes, t.num_descriptors
        )

    def queryXferBackend(self, reqh: int) -> int:
        chosen = self._agent.query_xfer_backend(self._request(reqh))
        for number, backend in self._backends.items():
            if backend is chosen:
                return number
        raise nixlBackendError(f"NIXL does not tell which of {list(self._backends.values())} it is")

    @_catches
    def releaseXferReq(self, reqh: int) -> nixl_status_t:
        """Release a transfer.

        The bytes of one that runs still move, whatever is done with the handle. The agent keeps it
        until it has ended, and its memory registered.
        """
        if self._ended:
            return _SUCCESS
        try:
            self._agent.release_xfer_req(self._request(reqh))
        except _NATIVE_ERRORS as error:
            _rename(error)
        self._requests.pop(reqh, None)
        return _SUCCESS

    @_catches
    def releasedDlistH(self, handle: int) -> nixl_status_t:
        """Release a prepared list; transfers made from it may go on."""
        if self._ended:
            return _SUCCESS
        try:
            self._agent.release_dlist_handle(self._prepared_list(handle), when_unused=True)
        except _NATIVE_ERRORS as error:
            _rename(error)
        self._prepared.pop(handle, None)
        return _SUCCESS

    # -- notifications

    @_catches
    def getNotifs(
        self, notif_map: Mapping[str, list[bytes]], backends: Sequence[int] = ()
    ) -> dict[str, list[bytes]]:
        """Return the map with the notifications that have arrived added to it."""
        try:
            notes = self._agent._get_notifs(self._chosen(backends))
        except _NATIVE_ERRORS as error:
            _rename(error)
        merged = {peer: list(messages) for peer, messages in notif_map.items()}
        for peer, message in notes:
            merged.setdefault(peer, []).append(message)
        return merged

    @_raises_nixl(backend=nixlRemoteDisconnectError)
    def genNotif(
        self, remote_agent: Text, msg: Text, backends: Sequence[int] = ()
    ) -> nixl_status_t:
        self._agent.gen_notif(
            _as_text(remote_agent), _as_bytes(msg, "msg"), backends=self._chosen(backends)
        )
        return nixl_status_t.NIXL_SUCCESS

    # -- memory views

    def prepMemView(
        self,
        dlist: nixlXferDList | nixlRemoteDList,  # noqa: ARG002
        backends: Sequence[int] = (),  # noqa: ARG002
    ) -> int:
        raise nixlNotSupportedError(
            "memory views for GPU code are not offered (HAVE_UCX_GPU_DEVICE_API is False)"
        )

    def releaseMemView(self, mvh: int) -> None:
        raise nixlInvalidParamError(f"there is no memory view {mvh}; none can be made")

    # -- private

    def _lost(self, request: nixl.XferRequest) -> type[PynixlkvError]:
        """Return what a failure of the backend is called; files and objects have no peer."""
        is_own = request.peer == self._agent.name
        return nixlBackendError if is_own else nixlRemoteDisconnectError

    def _number(self, table: dict[int, Result], thing: Result) -> int:
        number = next(self._numbers)
        table[number] = thing
        return number

    def _backend(self, number: int) -> nixl.Backend:
        return _find(self._backends, number, "backend")

    def _prepared_list(self, number: int) -> nixl.PreparedList:
        return _find(self._prepared, number, "prepared list")

    def _request(self, number: int) -> nixl.XferRequest:
        return _find(self._requests, number, "transfer")

    def _chosen(self, backends: Sequence[int]) -> list[nixl.Backend]:
        return [self._backend(number) for number in backends] if backends else []

    def _require_plugin(self, plugin: str) -> None:
        plugins = self._agent.get_available_plugins()
        if plugin not in plugins:
            raise nixlNotFoundError(f"there is no plugin {plugin!r}; NIXL has {plugins}")


def _end(
    agent: nixl.Agent,
    ended: list[bool],
    *kept: object,  # noqa: ARG001 - what the agent has made is still there when it is closed
) -> None:
    """Close an agent; programs may release what it made after that."""
    agent.close(0.0)
    ended.append(True)


def _find(table: dict[int, Result], number: int, what: str) -> Result:
    try:
        return table[number]
    except KeyError:
        raise nixlInvalidParamError(
            f"there is no {what} {number!r}: it was released, or belongs to another agent"
        ) from None


_ListType = TypeVar("_ListType", bound=_DescList)


def _require(descs: object, kind: type[_ListType]) -> _ListType:
    if not isinstance(descs, kind):
        raise TypeError(f"expected a {kind.__name__}, not {descs!r}")
    return descs


def _require_no_label(label: str) -> None:
    if label:
        raise nixlNotSupportedError(
            f"label {label!r}: labels are for a metadata server, and NIXL's C interface has none"
        )


def _as_runs(descs: NDArray[Any]) -> NDArray[np.uint64]:
    """Return rows of address, length, device, stride and count."""
    if descs.ndim != 2 or descs.shape[1] != 5:
        raise ValueError("strided descriptors must be an Nx5 numpy array")
    is_signed = descs.dtype == _INT64
    if not (is_signed or descs.dtype == _UINT64) or (is_signed and (descs < 0).any()):
        raise ValueError("strided descriptors must be uint64 or int64, and not negative")
    return np.ascontiguousarray(descs, dtype=np.uint64)


def _as_text(name: Text) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 16:
        raise TypeError(f"listenPort is {value!r}; it must be an int from 0 to 65535")
    return value


def _as_bytes(value: object, what: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise TypeError(f"{what} must be bytes or str, not {value!r}")


def _info(info: nixl.PluginParams) -> tuple[dict[str, str], list[str]]:
    return info.params, [nixl_mem_t(memory).name for memory in info.memory_types]
