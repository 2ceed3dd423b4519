"""Host buffers: vLLM's own function copies device memory that cannot be registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pynixlkv.connector.staging import COMPLETED, TensorCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pynixlkv.connector.metadata import BlockLists
    from pynixlkv.connector.staging import DeviceEvent, Direction
    from pynixlkv.geometry import Geometry


def work_so_far(device: torch.device | None) -> DeviceEvent | None:
    """Return an event after all work launched on a device's current stream; None for the CPU."""
    if device is None or device.type == "cpu":
        return None
    event: DeviceEvent = getattr(torch, device.type).current_stream(device).record_event()
    return event


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
