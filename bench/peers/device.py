"""Memory of torch, on a GPU or on the host, for the ends of `pynixlkv bench`."""

from dataclasses import dataclass

import numpy as np

from pynixlkv.cli.bench.cases import Case, Series
from pynixlkv.cli.bench.transfers import BenchWorker, Memory


@dataclass(frozen=True)
class DeviceCase(Case):
    """A case whose ends have memory of a device of torch, or of numpy if the device is None."""

    initiator_device: str | None = None
    target_device: str | None = None

    def describe(self):
        arrow = "<-" if self.direction == "get" else "->"
        ends = f"{self.initiator_device or 'cpu'} {arrow} {self.target_device or 'cpu'}"
        return f"{super().describe()}, {ends}"


class DeviceMemory(Memory):
    def __init__(self, nbytes, device):
        import torch

        self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.address = int(self.buffer.data_ptr())

    def fill(self, *values):
        import torch

        if values:
            self.buffer.copy_(torch.from_numpy(values[0].copy()))
        else:
            self.buffer[:] = 0xA5
        self._synchronize()

    def count_wrong(self, expected):
        return int(np.count_nonzero(self.buffer.cpu().numpy() != expected))

    def _synchronize(self):
        import torch

        if self.buffer.device.type != "cpu":
            torch.cuda.synchronize(self.buffer.device)

    def make_copier(self, source, order, piece_bytes):
        import torch

        index = torch.from_numpy(order).to(self.buffer.device)
        # torch copies bytes one at a time, words faster.
        words = torch.int64 if piece_bytes % 8 == 0 else torch.uint8
        remote, local = (
            m.buffer.view(words).view(len(m.buffer) // piece_bytes, -1) for m in (source, self)
        )

        def copy():
            torch.index_select(remote, 0, index, out=local)
            self._synchronize()

        return copy


class DeviceWorker(BenchWorker):
    def make_memory(self, case, role, series):
        device = case.initiator_device if role == "initiator" else case.target_device
        if series is Series.memcpy:  # inside the GPU if an end is there
            device = case.initiator_device or case.target_device
        return DeviceMemory(case.memory_bytes, device) if device else Memory(case.memory_bytes)
