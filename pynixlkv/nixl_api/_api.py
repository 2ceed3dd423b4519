"""What ``nixl._api`` offers: `nixl_agent`, its configuration and its handles.

Names, argument forms and return values are NIXL's, the odd ones included:
`nixl_agent.get_xfer_descs` and `nixl_agent.get_reg_descs` return None for what they cannot use, and
`nixl_agent.add_remote_agent` returns bytes.
"""

from __future__ import annotations

import io
import logging
import pickle  # noqa: TID251 - to read what NIXL's package serialises, and nothing else
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pynixlkv.nixl_api import _bindings as nixlBind
from pynixlkv.nixl_api._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Text = str | bytes
    # Tensors, tuples, arrays and finished lists.
    Descs = Any

_logger = logging.getLogger("nixl.nixl_api")

DEFAULT_COMM_PORT = nixlBind.DEFAULT_COMM_PORT
nixl_backend_handle = int

# NIXL's own Python API asks for 0, with which the progress thread keeps one core busy for good.
_PROGRESS_DELAY_US = 1000
_THREADS_PARAM = {
    "UCX": "num_threads",
    "OBJ": "num_threads",
    "LIBFABRIC": "num_threads",
    "GDS_MT": "thread_count",
    "UCCL": "num_cpus",
}

_ListType = TypeVar("_ListType", nixlBind.nixlXferDList, nixlBind.nixlRegDList)


class _Handle:
    """A number of the raw agent that is released once."""

    __slots__ = ("_agent", "_handle", "_released")

    def __init__(self, agent: nixlBind.nixlAgent, value: int) -> None:
        self._handle = int(value)
        self._agent = agent
        self._released = False

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}(0x{self._handle:x}, released={self._released})"

    def release(self) -> None:
        """Release it; a second call does nothing."""
        if not self._released:
            self._release()
            self._released = True

    def __del__(self) -> None:
        if not getattr(self, "_released", True) and not self._agent.is_closed:
            self._release()

    def _release(self) -> None:
        raise NotImplementedError


class nixl_prepped_dlist_handle(_Handle):
    """A prepared descriptor list; made by `nixl_agent.prep_xfer_dlist`."""

    __slots__ = ()

    def _release(self) -> None:
        self._agent.releasedDlistH(self._handle)


class nixl_xfer_handle(_Handle):
    """A transfer; made by `nixl_agent.make_prepped_xfer` and `nixl_agent.initialize_xfer`.

    One that is released or dropped while it runs is kept by the agent, with its memory, until it
    has ended.
    """

    __slots__ = ()

    def _release(self) -> None:
        self._agent.releaseXferReq(self._handle)


class nixl_thread_sync_t(Enum):
    """Locking inside NIXL."""

    NIXL_THREAD_SYNC_NONE = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT


class nixl_agent_config:
    """Configuration of an agent."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(
                f"sync_mode must be a nixl_thread_sync_t (got {type(sync_mode).__name__!r})"
            )
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class nixl_agent:
    """An agent: registers memory, knows peers, and moves bytes between their memory and its own."""

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
    ) -> None:
        get_logger("nixl_api")  # gives the logger its handler
        if nixl_conf and instantiate_all:
            _logger.warning("instantiate_all is ignored: the configuration names the backends")
            instantiate_all = False
        conf = nixl_conf or nixl_agent_config()
        if conf.sync_mode is not None:
            sync = conf.sync_mode.value
        elif conf.enable_listen:
            sync = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        else:
            sync = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
        raw = nixlBind.nixlAgentConfig(
            conf.enable_pthread,
            conf.enable_listen,
            conf.port,
            sync,
            pthrDelay=_PROGRESS_DELAY_US,
            captureTelemetry=conf.capture_telemetry,
        )
        self.agent = nixlBind.nixlAgent(agent_name, raw)
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, int] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_b_options: dict[str, dict[str, str]] = {}
        self.plugin_mem_types: dict[str, list[str]] = {}
        self.plugin_list = self.agent.getAvailPlugins()
        mems = nixlBind.nixl_mem_t
        self.nixl_mems = {
            "DRAM": mems.DRAM_SEG,
            "VRAM": mems.VRAM_SEG,
            "FILE": mems.FILE_SEG,
            "BLOCK": mems.BLK_SEG,
            "OBJ": mems.OBJ_SEG,
            "cpu": mems.DRAM_SEG,
            "cuda": mems.VRAM_SEG,
        }
        ops = nixlBind.nixl_xfer_op_t
        self.nixl_ops = {"WRITE": ops.NIXL_WRITE, "READ": ops.NIXL_READ}
        for backend in self.plugin_list if instantiate_all else conf.backends:
            if backend not in self.plugin_list:
                _logger.warning("backend %s is left out: NIXL has no such plugin", backend)
                continue
            threads = {}
            if conf.num_threads > 0 and backend in _THREADS_PARAM:
                threads[_THREADS_PARAM[backend]] = str(conf.num_threads)
            self.create_backend(backend, threads)

    # ---- plugins and backends

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Return the kinds of memory of a plugin; empty if it cannot be loaded."""
        self._load_plugin_params(backend)
        return self.plugin_mem_types.get(backend, [])

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Return the parameters of a plugin and their defaults; empty if it cannot be loaded."""
        self._load_plugin_params(backend)
        return self.plugin_b_options.get(backend, {})

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return self.backend_mems.get(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return self.backend_options.get(backend, {})

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        self.backends[backend] = self.agent.createBackend(backend, initParams or {})
        self.backend_options[backend], self.backend_mems[backend] = self.agent.getBackendParams(
            self.backends[backend]
        )

    # ---- memory

    def register_memory(
        self, reg_list: Descs, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixlBind.nixlRegDList:
        """Register memory."""
        descs = self._make_descs(nixlBind.nixlRegDList, reg_list, mem_type)
        self.agent.registerMem(descs, self._numbers(backends))
        return descs

    def deregister_memory(
        self, dereg_list: nixlBind.nixlRegDList, backends: Sequence[str] = ()
    ) -> None:
        self.agent.deregisterMem(dereg_list, self._numbers(backends))

    def query_memory(
        self, reg_list: Descs, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """Ask a storage backend about files or objects; None for those that do not exist."""
        descs = self._make_descs(nixlBind.nixlRegDList, reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(
                f"Backend {backend!r} not found. Available backends: {list(self.backends)}"
            )
        return self.agent.queryMem(descs, self.backends[backend])

    def get_xfer_descs(
        self, descs: Descs, mem_type: str | None = None
    ) -> nixlBind.nixlXferDList | None:
        """Make a list of descriptors for transfers."""
        return self._usable_descs(nixlBind.nixlXferDList, descs, mem_type, "for a transfer")

    def get_reg_descs(
        self, descs: Descs, mem_type: str | None = None
    ) -> nixlBind.nixlRegDList | None:
        """Make a list of descriptors for registration."""
        return self._usable_descs(nixlBind.nixlRegDList, descs, mem_type, "to register")

    def get_remote_descs(
        self, descs: Descs, mem_type: str | None = None
    ) -> nixlBind.nixlRemoteDList | None:
        """Make a list of tuples of address, length, device and agent name; None if it cannot be."""
        if isinstance(descs, nixlBind.nixlRemoteDList):
            return descs
        if mem_type is None or not isinstance(descs[0], tuple) or len(descs[0]) != 4:
            _logger.error("remote descriptors need tuples of 4 elements and a mem_type")
            return None
        return nixlBind.nixlRemoteDList(self.nixl_mems[mem_type], descs)

    def get_serialized_descs(
        self, descs: nixlBind.nixlXferDList | nixlBind.nixlRegDList | None
    ) -> bytes:
        """Return a list, or None, as bytes that NIXL's own package can deserialise too."""
        if descs is None:
            return pickle.dumps(None)
        kind = descs.__class__.__name__
        if kind not in _SERIALISED:
            raise TypeError(f"expected a list of descriptors, not {descs!r}")
        state = descs.__getstate__()
        # A pickle of the class in NIXL's own package, which may not be installed here.
        return (
            b"\x80\x03cnixl._bindings\n" + kind.encode() + b"\n)\x81"
            b"B" + len(state).to_bytes(4, "little") + state + b"b."
        )

    def deserialize_descs(
        self, serialized_descs: bytes
    ) -> nixlBind.nixlXferDList | nixlBind.nixlRegDList | None:
        """Return the list of such bytes.

        NIXL unpickles whatever a peer sends. This reads pickles of descriptor lists only, and
        refuses one that names anything else.
        """
        descs = _DescsUnpickler(io.BytesIO(serialized_descs)).load()
        if descs is not None and descs.__class__.__name__ not in _SERIALISED:
            raise nixlBind.nixlMismatchError(f"the bytes are {descs!r}, not a descriptor list")
        return descs  # type: ignore[no-any-return]

    # ---- transfers

    def prep_xfer_dlist(
        self,
        agent_name: Text,
        xfer_list: Descs,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixl_prepped_dlist_handle:
        """Prepare descriptors, for transfers that choose from them by index."""
        name = "" if agent_name in ("NIXL_INIT_AGENT", b"NIXL_INIT_AGENT") else agent_name
        numbers = self._numbers(backends)
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("strided descriptors need a mem_type")
            arguments = [self.nixl_mems[mem_type], xfer_list]
        else:
            arguments = [self._make_descs(nixlBind.nixlXferDList, xfer_list, mem_type)]
        handle = self.agent.prepXferDlist(name, *arguments, numbers)
        return nixl_prepped_dlist_handle(self.agent, handle)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Sequence[int] | NDArray[Any],
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Sequence[int] | NDArray[Any],
        notif_msg: Text = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        op = self.nixl_ops[operation]
        handle = self.agent.makeXferReq(
            op,
            local_xfer_side._handle,
            local_indices,
            remote_xfer_side._handle,
            remote_indices,
            notif_msg,
            self._numbers(backends),
            skip_desc_merge,
        )
        return nixl_xfer_handle(self.agent, handle)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlBind.nixlXferDList,
        remote_descs: nixlBind.nixlXferDList,
        remote_agent: Text,
        notif_msg: Text = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        op = self.nixl_ops[operation]
        handle = self.agent.createXferReq(
            op, local_descs, remote_descs, remote_agent, notif_msg, self._numbers(backends)
        )
        return nixl_xfer_handle(self.agent, handle)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: Text = b"") -> str:
        """Start a transfer; returns "DONE" or "PROC"."""
        return _state(self.agent.postXferReq(handle._handle, notif_msg))

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Poll a transfer; returns "DONE" or "PROC"."""
        return _state(self.agent.getXferStatus(handle._handle))

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        duration, margin, method = self.agent.estimateXferCost(req_handle._handle)
        is_analytical = method == nixlBind.nixl_cost_t.NIXL_COST_ANALYTICAL_BACKEND
        return duration, margin, "ANALYTICAL_BACKEND" if is_analytical else "UNKNOWN"

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlBind.nixlXferTelemetry:
        return self.agent.getXferTelemetry(handle._handle)

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        number = self.agent.queryXferBackend(handle._handle)
        return next(name for name, other in self.backends.items() if other == number)

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Release a prepared list; transfers made from it may go on."""
        handle.release()

    def prep_mem_view(self, dlist: Descs, *, backends: Sequence[str] | None = None) -> int:
        """Refuse: memory views for GPU code are not offered."""
        return self.agent.prepMemView(dlist, self._numbers(backends or ()))

    def release_mem_view(self, mvh: int) -> None:
        """Refuse: there are no memory views."""
        self.agent.releaseMemView(mvh)

    # ---- notifications

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        return self.agent.getNotifs({}, self._numbers(backends))

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Add the notifications that have arrived to `notifs`, and return it."""
        self.notifs = self.agent.getNotifs(self.notifs, self._numbers(backends))
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: Text,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        messages = self.update_notifs(backends).get(nixlBind._as_text(remote_agent_name), [])
        for message in messages:
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                messages.remove(message)
                return True
        return False

    def send_notif(
        self, remote_agent_name: Text, notif_msg: Text, backend: str | None = None
    ) -> None:
        """Send a notification by itself. Returning means queued, not delivered."""
        numbers = self._numbers(() if backend is None else (backend,))
        self.agent.genNotif(remote_agent_name, notif_msg, numbers)

    # ---- metadata

    def make_connection(self, remote_agent: Text, backends: Sequence[str] = ()) -> None:
        self.agent.makeConnection(remote_agent, self._numbers(backends))

    def get_agent_metadata(self) -> bytes:
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self,
        descs: nixlBind.nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
    ) -> bytes:
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._numbers(backends))

    def add_remote_agent(self, metadata: Text) -> bytes:
        """Load a peer's metadata; returns the peer's name as bytes."""
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: Text) -> None:
        """Forget a peer and its connection; one that is not known is no error."""
        self.agent.invalidateRemoteMD(agent)

    def check_remote_metadata(
        self, agent: Text, descs: nixlBind.nixlXferDList | None = None
    ) -> bool:
        if descs is None:
            descs = nixlBind.nixlXferDList(nixlBind.nixl_mem_t.DRAM_SEG)
        return self.agent.checkRemoteMD(agent, descs) == nixlBind.nixl_status_t.NIXL_SUCCESS

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(
        self,
        descs: nixlBind.nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        self.agent.sendLocalPartialMD(
            descs, inc_conn_info, self._numbers(backends), ip_addr, port, label
        )

    def fetch_remote_metadata(
        self,
        remote_agent: Text,
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """Ask for a peer's metadata; poll `check_remote_metadata` to see it arrive."""
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        self.agent.invalidateLocalMD(ip_addr, port)

    # ---- private

    def _numbers(self, backends: Sequence[str]) -> list[int]:
        return [self.backends[name] for name in backends]

    def _load_plugin_params(self, plugin: str) -> None:
        if plugin in self.plugin_b_options:
            return
        try:
            self.plugin_b_options[plugin], self.plugin_mem_types[plugin] = (
                self.agent.getPluginParams(plugin)
            )
        except nixlBind.nixlNotFoundError as error:
            _logger.warning("nothing is known of plugin %s: %s", plugin, str(error))

    def _usable_descs(
        self, kind: type[_ListType], descs: Descs, mem_type: str | None, purpose: str
    ) -> _ListType | None:
        try:
            return self._make_descs(kind, descs, mem_type)
        except _UnusableError as error:
            _logger.error("no descriptors %s: %s", purpose, str(error))
            return None

    def _make_descs(self, kind: type[_ListType], descs: Descs, mem_type: str | None) -> _ListType:
        if isinstance(descs, nixlBind._DescList):
            if isinstance(descs, kind):
                return descs
            raise _UnusableError(f"a {kind.__name__} is needed, not {descs!r}")
        if torch := sys.modules.get("torch"):  # without it nothing can be a tensor
            if isinstance(descs, torch.Tensor):
                return self._make_tensor_descs(kind, [descs])
            if len(descs) and isinstance(descs[0], torch.Tensor):
                return self._make_tensor_descs(kind, list(descs))
        if mem_type is None:
            raise _UnusableError("tuples and arrays need a mem_type")
        if isinstance(descs, np.ndarray):
            if descs.ndim != 2 or descs.shape[1] != 3:
                raise _UnusableError(f"an Nx3 array is needed; its shape is {descs.shape}")
        elif len(descs) and not (isinstance(descs[0], tuple) and len(descs[0]) == kind._width):
            raise _UnusableError(f"tuples of {kind._width} elements are needed, not {descs[0]!r}")
        return kind(self.nixl_mems[mem_type], descs)

    @staticmethod
    def _make_tensor_descs(kind: type[_ListType], tensors: list[Any]) -> _ListType:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise _UnusableError(f"tensors of one device are needed, not of {devices}")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise _UnusableError("tensors must be contiguous")
        number = tensors[0].get_device()  # -1 is the host
        rows = [(t.data_ptr(), t.numel() * t.element_size(), max(0, number)) for t in tensors]
        memory = nixlBind.nixl_mem_t.DRAM_SEG if number == -1 else nixlBind.nixl_mem_t.VRAM_SEG
        descs = kind(memory, np.array(rows, dtype=np.uint64))
        descs._keepalive = tensors
        return descs


class _UnusableError(nixlBind.nixlInvalidParamError):
    """Something that no descriptors can be made of."""


_SERIALISED = {"nixlXferDList": nixlBind.nixlXferDList, "nixlRegDList": nixlBind.nixlRegDList}


class _DescsUnpickler(pickle.Unpickler):
    """Reads pickles of descriptor lists, NIXL's or ours, and nothing else."""

    def find_class(self, module: str, name: str) -> type[nixlBind._DescList]:
        """Return one of our lists for a list of any NIXL package."""
        if module.rpartition(".")[2] == "_bindings" and name in _SERIALISED:
            return _SERIALISED[name]
        raise nixlBind.nixlMismatchError(
            f"the bytes are not a descriptor list: they ask for {module}.{name}"
        )


def _state(status: nixlBind.nixl_status_t) -> str:
    return "DONE" if status == nixlBind.nixl_status_t.NIXL_SUCCESS else "PROC"
