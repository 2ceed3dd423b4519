"""The host: buffers for device memory that cannot be registered, streams, and processors."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import torch

from pynixlkv.connector.staging import COMPLETED, TensorCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pynixlkv.connector.metadata import BlockLists
    from pynixlkv.connector.staging import DeviceEvent, Direction
    from pynixlkv.geometry import Geometry


class StreamFence:
    """The work launched so far on the calling thread's stream of a device.

    Any thread may query it. The device is made current for that: CUDA would otherwise make a
    context on the first GPU for the connector's thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        with torch.accelerator.device_index(self._index):
            self._event = torch.Event(device.type)
            self._event.record(torch.accelerator.current_stream())

    def query(self) -> bool:
        """Return whether the work has completed; raise if it has failed. Does not block."""
        with torch.accelerator.device_index(self._index):
            return bool(self._event.query())


def work_so_far(device: torch.device | None) -> DeviceEvent | None:
    """Return a fence after all work launched on a device's current stream; None for the CPU.

    vLLM launches a step's kernels on one stream of the worker's main thread. The same thread calls
    the connector: `start_load_kv` with the previous steps launched, `save_kv_layer` with the layer.
    """
    return None if device is None or device.type == "cpu" else StreamFence(device)


class BlockCopy:
    """Copies blocks between vLLM's tensors and host tensors, both by layer name."""

    def __init__(
        self,
        device: Mapping[str, torch.Tensor],
        host: Mapping[str, torch.Tensor],
        geometry: Geometry,
    ) -> None:
        self.operation: Callable[..., None] | None = None
        """vLLM's copy function, once it is known."""
        self._device = next(iter(device.values())).device
        self._groups = []
        for group in geometry.groups:
            names = sorted({region.name for region in group.regions})
            pair = {name: device[name] for name in names}, {name: host[name] for name in names}
            self._groups.append(pair)

    def __call__(
        self, direction: Direction, device_blocks: BlockLists, host_blocks: BlockLists
    ) -> DeviceEvent:
        """Start to copy; a `pynixlkv.connector.staging.CopyFunction`."""
        if self.operation is None:
            plain = TensorCopy(*((device, host, "BHND") for device, host in self._groups))
            return plain(direction, device_blocks, host_blocks)
        for (device, host), mine, theirs in zip(
            self._groups, device_blocks, host_blocks, strict=True
        ):
            ids, other = list(mine), list(theirs)
            if direction == "d2h":
                self.operation(device, host, ids, other, direction)
            else:
                self.operation(host, device, other, ids, direction)
        return work_so_far(self._device) or COMPLETED


@contextlib.contextmanager
def processors_of_parent() -> Iterator[None]:
    """Let threads that are started inside use all processors that this process was given.

    vLLM binds the main thread of a CPU worker to the processors that compute, and threads inherit
    that. An agent's would compete there with OpenMP's, which spin.
    """
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, bound | os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
