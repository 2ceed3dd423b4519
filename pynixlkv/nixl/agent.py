"""`NixlAgent`: an agent with NIXL as its transfer backend."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from pynixlkv import _loader, _native
from pynixlkv._limits import check_reserve
from pynixlkv.agent import Agent, check_strings, span_arrays
from pynixlkv.errors import ConfigError, NixlError
from pynixlkv.nixl import files, objects
from pynixlkv.nixl.files import BlockFile
from pynixlkv.transfer import CLOSE_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

    from pynixlkv.geometry import Geometry, KVCache
    from pynixlkv.plan import TransferPlan
    from pynixlkv.transfer import Peer, Transfer
    from pynixlkv.types import Operation

_STORAGE = frozenset({"POSIX", "OBJ"})
"""Backends without a remote side that files are opened with."""
_SECRETS = frozenset({"access_key", "secret_key", "session_token"})
"""Parameters that no message shows."""

# Period of the timer of NIXL's progress thread, which serves peers whose transport needs this
# side's processor (TCP) and also wakes on events. The period of NIXL's Python API burns a core.
_PROGRESS_DELAY_US = 100_000

# NIXL applies these unless the environment has a UCX_ variable of the name. UCX's registration
# cache grows without bound where memory is mapped and unmapped often. A blocking connect() would
# hold up all peers for minutes where one host drops packets.
# The kernel gives up the idle connection to a silent host after KEEPIDLE + KEEPCNT * KEEPINTVL.
_UCX_CONFIG = (
    "RCACHE_MAX_UNRELEASED=1024,TCP_CONN_NB=y,TCP_KEEPIDLE=5s,TCP_KEEPINTVL=2s,TCP_KEEPCNT=3"
)


class NixlAgent(Agent):
    """An agent that moves bytes with NIXL. Safe from several threads.

    Parameters
    ----------
    name : str
        Unique among the agents that talk to each other.
    backend : str
        NIXL backend that reaches peers; registered memory and transfers with peers use it alone.
        One of storage for an agent of files alone: `hello` and `connect` then raise `ConfigError`.
    backend_params : mapping of str to str, optional
        Parameters of the backend, over the defaults that `default_backend_params` shows.
    storage : str, optional
        NIXL backend that files are opened with, beside that for peers: ``"POSIX"``, or ``"OBJ"``,
        whose files are objects of a store that speaks S3.
    storage_params : mapping of str to str, optional
        Parameters of that backend, such as ``{"use_uring": "true"}``, or ``bucket``,
        ``endpoint_override``, ``access_key`` and ``secret_key`` of the store.
    secret : bytes or str, optional
        Key of the MAC on hello bytes; both sides need the same. Default: the environment variable
        ``PYNIXLKV_SECRET``, or none.

    Raises
    ------
    LibraryNotFoundError, LibraryVersionError
        If NIXL is not installed or too old; the message says what to install.
    ConfigError
        If the name is empty, or the secret, or if a backend cannot do what it is named for.
    NixlError
        If NIXL does not start the agent or the backend.

    Notes
    -----
    In a forked child an agent raises `ForkError`, and so does making one if the parent had one:
    start such a child with the method ``spawn``. The agent has one thread of its own, asleep while
    idle, and one of NIXL's.

    Examples
    --------
    >>> with NixlAgent("decode-0") as agent:  # doctest: +SKIP
    ...     agent.register(cache)
    ...     peer = agent.connect(hello_from_prefill)
    """

    transfer_backend: ClassVar[str] = "nixl"

    def __init__(
        self,
        name: str,
        *,
        backend: str = "UCX",
        backend_params: Mapping[str, str] | None = None,
        storage: str | None = None,
        storage_params: Mapping[str, str] | None = None,
        secret: bytes | str | None = None,
    ) -> None:
        check_reserve("an agent")
        if backend in _STORAGE:
            if storage not in (None, backend) or (backend_params and storage_params):
                raise ConfigError(
                    f"backend {backend!r} reaches no peer, and names the storage; give it, and its "
                    "parameters, once"
                )
            storage, storage_params = backend, backend_params or storage_params
        if storage is not None and storage not in _STORAGE:
            raise ConfigError(
                f"storage is {storage!r}; expected one of {sorted(_STORAGE)}, or None for no files"
            )
        check_strings("storage parameter", storage_params or {})
        self._storage = storage
        self._storage_params = dict(storage_params or {})
        self._files: weakref.WeakSet[BlockFile] = weakref.WeakSet()
        self._paths: Counter[str] = Counter()
        self._library = _loader.load_nixl()
        params = self.default_backend_params(backend) | dict(backend_params or {})
        check_strings("backend parameter", params)
        self._backend = backend
        self._backend_params = params
        super().__init__(name, backend_version=_loader.nixl_version(), secret=secret)

    def _start(self, name: str, incarnation: bytes) -> _native.transfer.Agent:
        backend, params = self._backend, self._backend_params
        storage, storage_params = self._storage or "", self._storage_params
        reaches_peers = backend not in _STORAGE
        try:
            if storage == "OBJ":
                objects.Store("", self._storage_params).close()  # finds out whether it works
                storage, storage_params = "POSIX", {}  # moves the bytes of their file in memory
            return _native.transfer.nixl_agent(
                name,
                incarnation,
                self._library,
                backend if reaches_peers else "",
                params if reaches_peers else {},
                storage,
                storage_params,
                _PROGRESS_DELAY_US,
            )
        except NixlError as error:
            shown, of_files = map(_without_secrets, (params, self._storage_params))
            with_files = f", {self._storage} with {of_files}" if self._storage else ""
            raise type(error)(
                f"{error}; {backend} was started with {shown} and {_ucx_environment()}"
                f"{with_files}. See pynixlkv.native_report() for the plugins and transports that "
                "work here",
                library=error.library,
                status=error.status,
                call=error.call,
                detail=error.detail,
            ) from error

    def _transports(self) -> tuple[str, ...]:
        if self._backend != "UCX":
            return ()
        items = self._backend_params.get("engine_config", "").split(",")
        pairs = (item.split("=", 1) for item in items if "=" in item)
        config = {key: value for key, value in pairs if f"UCX_{key}" not in os.environ}
        return _loader.transports_of_nixl(tuple(sorted(config.items())))

    @staticmethod
    def default_backend_params(backend: str) -> dict[str, str]:
        """Return the default parameters of a backend."""
        return {"engine_config": _UCX_CONFIG} if backend == "UCX" else {}

    @property
    def backend(self) -> str:
        """Name of the NIXL backend."""
        return self._backend

    @property
    def storage(self) -> str | None:
        """Name of the NIXL backend that files are opened with; None if the agent opens none."""
        return self._storage

    def create_file(
        self,
        path: str | os.PathLike[str],
        like: KVCache | Geometry,
        num_blocks: int | Mapping[str, int],
    ) -> BlockFile:
        """Make a file of KV blocks, none of them valid, and open it as its writer.

        Parameters
        ----------
        path : str or path-like
            Where; there must be nothing. Only this user can read it. Of objects, how their keys
            begin.
        like : KVCache or Geometry
            Whose layers, heads, tokens per block and order of axes the file shall have; only its
            pool has another size. Need not be the cache that is written.
        num_blocks : int or mapping of str to int
            Blocks of each group, or by the group's name or table; at most 2**22 in all.

        Returns
        -------
        BlockFile
            Takes the place of a peer: make a plan from ``file.geometry``.

        Raises
        ------
        StorageError
            If the path exists, the file system refuses it, or there is too little space, all of
            which is taken now.
        ConfigError
            If an argument is wrong, or the agent has no storage backend.

        Notes
        -----
        Blocks until the file is on the disk.
        """
        name = self._check_path(path)
        if self._storage == "OBJ":
            store = objects.create(name, self._storage_params, like, num_blocks)
            return self._open(name, store, writable=True)
        return self._open(name, files.create(name, like, num_blocks), writable=True)

    def open_file(self, path: str | os.PathLike[str], *, writable: bool = False) -> BlockFile:
        """Open a file that `create_file` made.

        Parameters
        ----------
        path : str or path-like
            Its path. The file is untrusted; all of its header is checked.
        writable : bool
            Whether to be its writer, of which it has one at a time; nothing sees to that if blocks
            are objects. It may have any number of readers beside the writer.

        Raises
        ------
        StorageError
            If the file is missing, short, damaged, of another program, may not be opened, or has a
            writer already.
        ConfigError
            If the agent has no storage backend.
        """
        name = self._check_path(path)
        if self._storage == "OBJ":
            store = objects.open_existing(name, self._storage_params)
            return self._open(name, store, writable=writable)
        return self._open(name, files.open_existing(name, writable=writable), writable=writable)

    def _check_path(self, path: str | os.PathLike[str]) -> str:
        if self._storage is None:
            raise ConfigError(
                f"agent {self.name!r} has no storage backend; make it with "
                'NixlAgent(..., storage="POSIX")'
            )
        check_reserve("a file")
        name = os.fspath(path)
        if not isinstance(name, str):
            raise ConfigError(f"path is {path!r}; expected text")
        return name

    def _open(self, path: str, opened: int | objects.Store, *, writable: bool) -> BlockFile:
        self._paths[path] += 1
        name = path if self._paths[path] == 1 else f"{path} ({self._paths[path]})"
        try:
            if isinstance(opened, int):
                file = BlockFile(self, name, opened, path=path, writable=writable)
            else:
                file = objects.BlockObjects(self, name, opened, path=path, writable=writable)
        except BaseException:
            os.close(opened) if isinstance(opened, int) else opened.close()
            raise
        self._files.add(file)
        return file

    def _submit(
        self,
        op: Operation,
        peer: Peer,
        plan: TransferPlan,
        tables: _native.kv.BlockTables,
        notify: bytes | None,
        timeout: float,
    ) -> Transfer:
        if not isinstance(peer, BlockFile):
            return super()._submit(op, peer, plan, tables, notify, timeout)
        self._check_plan(peer, plan)
        self._native.check_registered(span_arrays(plan.local.spans)[0])
        # The bytes move by the same checks, deadlines and end states as those of a peer.
        return peer.submit(self, op, plan, tables, notify, timeout, super()._submit)

    def _submit_descriptors(
        self,
        op: Operation,
        peer: Peer,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        notify: bytes | None,
        timeout: float,
    ) -> Transfer:
        if isinstance(peer, BlockFile):
            raise ConfigError(
                "files are read and written by plans: descriptors do not say which blocks they "
                "make valid"
            )
        return super()._submit_descriptors(op, peer, local, remote, notify, timeout)

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> bool:
        """As `Agent.close`; open files are closed first."""
        deadline = time.monotonic() + timeout
        is_quiet = [file.close(max(deadline - time.monotonic(), 0.0)) for file in list(self._files)]
        return super().close(max(deadline - time.monotonic(), 0.0)) and all(is_quiet)

    @property
    def backend_params(self) -> dict[str, str]:
        """Parameters that the backend was made with."""
        return dict(self._backend_params)

    @property
    def transport(self) -> str:
        """The transports that UCX may choose from; NIXL does not say which it chose for a peer.

        ``UCX_TLS`` of the environment, which wins, or ``TLS`` of the backend's ``engine_config``.
        """
        if self._backend != "UCX":
            return self._backend
        config = self._backend_params.get("engine_config", "").split(",")
        choice = [item.removeprefix("TLS=") for item in config if item.startswith("TLS=")]
        return f"UCX, UCX_TLS={os.environ.get('UCX_TLS') or (choice or ['all'])[0]}"


def _without_secrets(params: Mapping[str, str]) -> dict[str, str]:
    return {key: "…" if key in _SECRETS else value for key, value in params.items()}


def _ucx_environment() -> str:
    """Return UCX's variables, the usual reason why no transport works."""
    found = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key[:4] == "UCX_"]
    return " ".join(found) or "no UCX_ variable in the environment"
