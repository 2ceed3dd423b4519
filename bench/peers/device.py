"""Memory of torch or of the CUDA driver, for the ends of `pynixlkv bench`."""

from dataclasses import dataclass

import numpy as np

from pynixlkv.cli.bench.cases import Case, Series
from pynixlkv.cli.bench.transfers import BenchWorker, Memory


@dataclass(frozen=True)
class DeviceCase(Case):
    """A case whose ends have memory of a device, or of numpy if the device is None.

    The device is torch's, or as "card:0" the driver's, where torch has no CUDA.
    """

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
        self.device = self.buffer.device.index or 0

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


class CardMemory(Memory):
    """Memory of the driver of tests/cuda_stub; copies inside the card pass through the host."""

    def __init__(self, nbytes, device):
        from cuda_memory import DeviceArray

        self.buffer = DeviceArray([nbytes], np.uint8, device)
        self.address, self.device = self.buffer.address, device

    def fill(self, *values):
        self.buffer.write(*values or (np.full(self.buffer.shape, 0xA5),))

    def count_wrong(self, expected):
        return int(np.count_nonzero(self.buffer.read() != expected))

    def make_copier(self, source, order, piece_bytes):
        return lambda: self.fill(source.buffer.read().reshape(-1, piece_bytes)[order].reshape(-1))


class DeviceWorker(BenchWorker):
    def make_memory(self, case, role, series):
        device = case.initiator_device if role == "initiator" else case.target_device
        if series is Series.memcpy:  # inside the GPU if an end is there
            device = case.initiator_device or case.target_device
        if device is None:
            return Memory(case.memory_bytes)
        if device.startswith("card:"):
            return CardMemory(case.memory_bytes, int(device.partition(":")[2]))
        return DeviceMemory(case.memory_bytes, device)
