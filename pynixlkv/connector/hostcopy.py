"""Host tensors like those of a device, and copying blocks between tensors of the CPU.

Engines with a device give `pynixlkv.connector.staging.HostStaging` a copy function of their own,
which starts copies on a stream; `TensorCopy` is the plain one, for tests and for devices whose
tensors the CPU can address.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv.connector.fences import DONE
from pynixlkv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pynixlkv.connector.metadata import BlockLists
    from pynixlkv.connector.staging import DeviceEvent, Direction

__all__ = ["TensorCopy", "make_host_tensors"]


def make_host_tensors(tensors: Mapping[str, Any], *, axes: str, num_blocks: int) -> dict[str, Any]:
    """Make host tensors like those of a device, with another number of blocks.

    Parameters
    ----------
    tensors : mapping of str to tensor or pair of tensors
        As `pynixlkv.geometry.KVCache.from_tensors` takes them, of one group of layers.
    axes : str
        The dimensions of each tensor, one letter each, ``B`` for the block; or ``"MLA"``.
    num_blocks : int
        Blocks of the host tensors, at least 1.

    Returns
    -------
    dict of str to tensor or pair of tensors
        Same names, types and order of dimensions in memory, without gaps, all zero. Torch tensors
        where the others are, in pinned memory if torch has CUDA; numpy arrays otherwise.

    Raises
    ------
    LayoutError
        If `axes` does not say which dimension is the block, or `num_blocks` is below 1.
    """
    if num_blocks < 1:
        raise LayoutError(f"num_blocks is {num_blocks}; expected at least 1")
    return {
        name: tuple(_make_like(each, axes, num_blocks) for each in value)
        if isinstance(value, (tuple, list))
        else _make_like(value, axes, num_blocks)
        for name, value in tensors.items()
    }


def _make_like(tensor: Any, axes: str, num_blocks: int) -> Any:  # noqa: ANN401
    shape = list(tensor.shape)
    shape[_block_dim(axes, tensor)] = num_blocks
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(tensor, torch.Tensor)
    strides = tensor.stride() if is_torch else tensor.strides
    order = sorted(range(len(shape)), key=lambda dim: -abs(strides[dim]))
    ordered, back = [shape[dim] for dim in order], np.argsort(order).tolist()
    if torch is not None and is_torch:
        pinned = torch.cuda.is_available()
        made = torch.zeros(ordered, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return made.permute(back)
    return np.zeros(ordered, tensor.dtype).transpose(back)


def _block_dim(axes: str, tensor: Any) -> int:  # noqa: ANN401
    letters = "BND" if axes == "MLA" else axes
    if "B" not in letters or len(letters) != len(tensor.shape):
        raise LayoutError(
            f"axes {axes!r} for a tensor of shape {tuple(tensor.shape)}; expected one letter for "
            "each dimension, B among them"
        )
    return letters.index("B")


class TensorCopy:
    """A copy function for numpy arrays and torch tensors of the CPU; has copied when it returns.

    Parameters
    ----------
    *groups : tuple of (mapping, mapping, str)
        For each group of layers, in the cache's order: its device tensors, the host tensors of the
        same names, and the `axes` of both, as in `make_host_tensors`.

    Raises
    ------
    LayoutError
        If the tensors of a group do not have the same names, or are not in the CPU's memory.
    """

    def __init__(self, *groups: tuple[Mapping[str, Any], Mapping[str, Any], str]) -> None:
        self._groups = []
        for device, host, axes in groups:
            if device.keys() != host.keys():
                raise LayoutError(f"tensors {sorted(device)} and {sorted(host)} are not the same")
            pairs = zip(_by_block(device, axes), _by_block(host, axes), strict=True)
            self._groups.append(list(pairs))

    def __call__(
        self, direction: Direction, device_blocks: BlockLists, host_blocks: BlockLists
    ) -> DeviceEvent:
        """Copy; as `pynixlkv.connector.staging.CopyFunction` says."""
        for pairs, mine, theirs in zip(self._groups, device_blocks, host_blocks, strict=True):
            here, there = np.asarray(mine, np.intp), np.asarray(theirs, np.intp)
            for device, host in pairs:
                if direction == "d2h":
                    host[there] = device[here]
                else:
                    device[here] = host[there]
        return DONE


def _by_block(tensors: Mapping[str, Any], axes: str) -> Iterator[Any]:
    """Give each tensor as a view whose first dimension is the block, in the order of the names."""
    for name in sorted(tensors):
        value: Sequence[Any] | Any = tensors[name]
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if str(getattr(tensor, "device", "cpu")) != "cpu":
                raise LayoutError(f"tensor {name!r} is on {tensor.device}; expected the CPU")
            block = _block_dim(axes, tensor)
            rest = [dim for dim in range(len(tensor.shape)) if dim != block]
            is_numpy = isinstance(tensor, np.ndarray)
            yield tensor.transpose(block, *rest) if is_numpy else tensor.permute(block, *rest)
