"""`UcxAgent`: an agent with UCX, without NIXL, as its transfer backend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pynixlkv import _loader, _native
from pynixlkv._limits import check_reserve
from pynixlkv.agent import Agent, check_strings
from pynixlkv.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

# Settings that apply unless the environment has a UCX_ variable of the name. With error handling
# UCX's rendezvous falls back to TCP between processes of one host, which is several times slower.
# A blocking connect() would hold up all peers for minutes where one host drops packets. The kernel
# gives up the idle connection to a silent host after KEEPIDLE + KEEPCNT * KEEPINTVL, 11 s.
_DEFAULTS = {
    "RNDV_THRESH": "inf",
    "TCP_CONN_NB": "y",
    "TCP_KEEPIDLE": "5s",
    "TCP_KEEPINTVL": "2s",
    "TCP_KEEPCNT": "3",
}
# Settings that win over the environment: notifications would overtake each other if messages went
# out over several devices.
_FIXED = {"MAX_EAGER_RAILS": "1"}
_COPY_THREADS_VARIABLE = "PYNIXLKV_COPY_THREADS"
_MOST_COPY_THREADS = 64


def _choose_copy_threads(given: int | None) -> int:
    if given is None:
        text = os.environ.get(_COPY_THREADS_VARIABLE)
        if text is None:
            return min(max(len(os.sched_getaffinity(0)) // 8, 1), 4)
        given = int(text) if text.isdecimal() else -1
    if not 1 <= given <= _MOST_COPY_THREADS:
        raise ConfigError(
            f"copy_threads, or {_COPY_THREADS_VARIABLE}, must be 1 to {_MOST_COPY_THREADS}, not "
            f"{given}"
        )
    return given


class UcxAgent(Agent):
    """An agent that moves bytes with UCX's one-sided operations. Safe from several threads.

    Parameters
    ----------
    name : str
        Unique among the agents that talk to each other.
    config : mapping of str to str, optional
        Settings of UCX, names without the prefix ``UCX_``, over those of the environment.
        ``MAX_EAGER_RAILS`` is always 1, so that notifications keep their order.
    error_handling : bool
        Let UCX watch its connections for dead peers; both sides need the same. See Notes.
    copy_threads : int, optional
        Threads that copy large transfers between ordinary memory of two processes of this host, or
        memory of `allocate`, 1 to 64. Default: the environment variable ``PYNIXLKV_COPY_THREADS``,
        or one for each 8 processors that this process may use, at least 1 and at most 4.
    secret : bytes or str, optional
        Key of the MAC on hello bytes; both sides need the same. Default: the environment variable
        ``PYNIXLKV_SECRET``, or none.

    Raises
    ------
    LibraryNotFoundError, LibraryVersionError
        If UCX is not installed or too old; the message says what to install.
    ConfigError
        If the name is empty, or the secret, or UCX does not know a setting or it is fixed.
    UcxError
        If UCX does not start, for example because it knows no transport of ``UCX_TLS``.

    Notes
    -----
    In a forked child an agent raises `ForkError`, and so does making one if the parent had one:
    start such a child with the method ``spawn``. The agent has one thread of its own, asleep while
    idle; UCX's events wake it.

    Without error handling UCX may use shared memory for messages between processes of one host,
    which makes notifications some 7 microseconds faster there. The end of a peer's process is then
    noticed on this host only, within a quarter of a second; until then memory that the peer got
    from `allocate` can still be read, and notifications to it are lost without an error. Closing
    waits up to 0.1 s for each peer.

    Examples
    --------
    >>> with UcxAgent("decode-0") as agent:  # doctest: +SKIP
    ...     agent.register(cache)
    ...     peer = agent.connect(hello_from_prefill)
    """

    transfer_backend: ClassVar[str] = "ucx"

    def __init__(
        self,
        name: str,
        *,
        config: Mapping[str, str] | None = None,
        error_handling: bool = True,
        copy_threads: int | None = None,
        secret: bytes | str | None = None,
    ) -> None:
        check_reserve("an agent")
        check_strings("UCX setting", config or {})
        defaults = {k: v for k, v in _DEFAULTS.items() if f"UCX_{k}" not in os.environ}
        for key, value in _FIXED.items():
            if (config or {}).get(key, value) != value:
                raise ConfigError(f"UCX setting {key} must be {value!r} under a UcxAgent")
        library = _loader.load_ucx()
        self._context = _native.ucx.Context(library, defaults | dict(config or {}) | _FIXED)
        self._error_handling = error_handling
        self._copy_threads = _choose_copy_threads(copy_threads)
        super().__init__(name, backend_version=library.version, secret=secret)

    def _start(self, name: str, incarnation: bytes) -> _native.transfer.Agent:
        return _native.transfer.ucx_agent(
            name, incarnation, self._context, self._error_handling, self._copy_threads
        )

    def _transports(self) -> tuple[str, ...]:
        return _loader.transports_of(self._context)

    @property
    def config(self) -> dict[str, str]:
        """Settings of UCX beyond those of the environment."""
        return self._context.config

    @property
    def error_handling(self) -> bool:
        """Whether UCX watches its connections for dead peers."""
        return self._error_handling

    @property
    def copy_threads(self) -> int:
        """The threads that copy large transfers between processes of this host."""
        return self._copy_threads

    @property
    def transport(self) -> str:
        """The transports that UCX may choose from, ``UCX_TLS``."""
        return f"UCX, UCX_TLS={self.config.get('TLS') or os.environ.get('UCX_TLS') or 'all'}"

    def allocate(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8
    ) -> npt.NDArray[np.generic]:
        """Allocate host memory that agents in other processes of this host reach directly.

        Once the memory is registered, the peer maps it and copies at the speed of a copy inside one
        process, without this side taking part. Meant for host pools and staging buffers; any other
        memory works too, through the kernel.

        Parameters
        ----------
        shape : int or tuple of int
            Shape of the array, at least one element.
        dtype : dtype
            Type of its elements.

        Returns
        -------
        ndarray
            Zeros, C-contiguous. Register it, as a whole or in parts, like any other memory;
            ``torch.from_numpy`` makes a tensor of it. Freed with its last reference.

        Raises
        ------
        ConfigError
            If there are no elements, or more bytes than are free.
        ClosedError
            If the agent is closed.
        UcxError
            If UCX cannot allocate it.

        Notes
        -----
        Releases the GIL. Shared memory counts against the limits of the container
        (``/dev/shm`` or ``kernel.shmmax``); where those do not suffice UCX takes ordinary memory.
        The memory of a dead peer stays readable for processes that mapped it. The death is noticed
        through the connection, so a read that overlaps it can still succeed.
        """
        if self.is_closed:
            raise ClosedError(f"{self!r} is closed")
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ConfigError(f"memory that others reach cannot hold {kind}")
        nbytes = int(np.prod(sizes, dtype=np.int64)) * kind.itemsize
        if nbytes <= 0 or any(size < 0 for size in sizes):
            raise ConfigError(f"an array of shape {sizes} and type {kind} has no bytes to allocate")
        memory = _native.ucx.Memory.allocate(self._context, nbytes)
        array: npt.NDArray[np.generic] = np.frombuffer(memory.view(), dtype=kind)
        array.view(np.uint8)[...] = 0
        return array.reshape(sizes)
