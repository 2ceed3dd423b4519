"""What a plan must move, said the slow way: one element at a time, by its identity.

A `Side` is one rank's cache, built in real memory from a description of its own. Every element
has an identity, (layer, K or V, head, token position, dim), and its value follows from the
identity, so "the right byte arrived" is "this element has that value". Nothing here knows strides,
boxes or runs: numpy does the indexing, and the loops are as written.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

GUARD_BYTES = 64
GUARD = 0xA5


@dataclass(frozen=True)
class Shape:
    """Description of one rank's cache.

    `axes` are the dimensions of each tensor. `order` is the order of the axes in memory; an L
    there that the axes lack makes the tensors views of one storage, one for each layer. `before`
    and `after` are unused entries around an axis. So tensors become permuted and padded views.
    """

    axes: str
    layers: tuple[int, ...]
    heads: range
    num_blocks: int
    block_size: int
    head_dim: int
    itemsize: int = 4
    token_rank: int = 0
    token_ranks: int = 1
    interleave: int = 1
    order: str = ""
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    @property
    def has_values(self) -> bool:
        """Whether there are keys and values, and not one latent."""
        return "K" in self.axes or "C" in self.axes

    def extent(self, letter: str) -> int:
        return {
            "L": len(self.layers),
            "K": 2,
            "B": self.num_blocks,
            "H": len(self.heads),
            "N": self.block_size,
            "D": self.head_dim,
            "C": 2 * self.head_dim,
        }[letter]

    def position(self, start: int, table_idx: int, slot: int) -> int:
        """Token position of a slot in block `table_idx` of a table that begins at `start`."""
        mine = table_idx * self.block_size + slot
        turn, within = divmod(mine, self.interleave)
        return start + (turn * self.token_ranks + self.token_rank) * self.interleave + within


class Side:
    """A cache in real memory: guard bytes around each tensor, garbage everywhere at first."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.dtype = np.dtype(f"u{shape.itemsize}")
        self.names = (
            ["all_layers"] if "L" in shape.axes else [f"layer.{layer}" for layer in shape.layers]
        )
        self.order = shape.order or shape.axes
        self.extents = [
            shape.before.get(axis, 0) + shape.extent(axis) + shape.after.get(axis, 0)
            for axis in self.order
        ]
        nbytes = int(np.prod(self.extents)) * shape.itemsize
        garbage = np.random.default_rng(seed)
        self.buffers = []
        for _ in range(1 if "L" in self.order else len(shape.layers)):
            buffer = np.full(nbytes + 2 * GUARD_BYTES, GUARD, np.uint8)
            buffer[GUARD_BYTES:-GUARD_BYTES] = garbage.integers(0, 256, nbytes, np.uint8)
            self.buffers.append(buffer)

    def views(self, buffers: list[np.ndarray]) -> list[np.ndarray]:
        """Return the tensors that lie in these buffers."""
        views = []
        for buffer in buffers:
            whole = buffer[GUARD_BYTES:-GUARD_BYTES].view(self.dtype).reshape(self.extents)
            for dim, axis in enumerate(self.order):
                first = self.shape.before.get(axis, 0)
                whole = whole[
                    (slice(None),) * dim + (slice(first, first + self.shape.extent(axis)),)
                ]
            if "L" in self.order and "L" not in self.shape.axes:
                at = self.order.index("L")
                order = self.order.replace("L", "")
                for layer_idx in range(len(self.shape.layers)):
                    one = whole[(slice(None),) * at + (layer_idx,)]
                    views.append(one.transpose([order.index(axis) for axis in self.shape.axes]))
            else:
                views.append(whole.transpose([self.order.index(axis) for axis in self.shape.axes]))
        return views

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return dict(zip(self.names, self.views(self.buffers), strict=True))

    def element(self, layer: int, kv: int, block: int, head: int, slot: int, dim: int):
        """Return (tensor number, index into it) of one element."""
        shape = self.shape
        where = {
            "L": shape.layers.index(layer),
            "K": kv,
            "B": block,
            "H": head - shape.heads.start,
            "N": slot,
            "D": dim,
            "C": kv * shape.head_dim + dim,
        }
        tensor_idx = 0 if "L" in shape.axes else shape.layers.index(layer)
        return tensor_idx, tuple(where[axis] for axis in shape.axes)

    def value(self, layer: int, kv: int, head: int, position: int, dim: int) -> int:
        """Return the value of an element: its identity as a number, spread over all its bits."""
        identity = (((layer * 2 + kv) * 64 + head) * 4096 + position) * 512 + dim + 1
        return (identity * 0x9E3779B97F4A7C15 % 2**64) >> (64 - 8 * self.shape.itemsize)

    def identities(self, layers, heads, table, start):
        """Yield every (layer, kv, head, position, dim) of a block table, with where it lies."""
        shape = self.shape
        for layer, kv, head, (table_idx, block), slot, dim in itertools.product(
            (layer for layer in shape.layers if layer in layers),
            range(2 if shape.has_values else 1),
            (head for head in shape.heads if head in heads),
            list(enumerate(table)),
            range(shape.block_size),
            range(shape.head_dim),
        ):
            position = shape.position(start, table_idx, slot)
            yield (
                (layer, kv, head, position, dim),
                self.element(layer, kv, block, head, slot, dim),
            )

    def fill(self, table, start: int) -> None:
        """Give every element in the blocks of the table the value of its identity."""
        views = self.views(self.buffers)
        for identity, (tensor_idx, index) in self.identities(
            self.shape.layers, self.shape.heads, table, start
        ):
            views[tensor_idx][index] = self.value(*identity)

    def spans(self) -> list[tuple[int, int]]:
        """Return (first, one past last) address of what the views reach in each buffer."""
        spans = []
        for buffer in self.buffers:
            reached = []
            for view in self.views([buffer]):
                first = view.__array_interface__["data"][0]
                steps = zip(view.shape, view.strides, strict=True)
                last = first + sum((extent - 1) * stride for extent, stride in steps)
                reached.append((first, last + self.shape.itemsize))
            spans.append((min(first for first, _ in reached), max(end for _, end in reached)))
        return spans


def expected_bytes(
    local: Side,
    remote: Side,
    local_table,
    remote_table,
    *,
    local_start: int = 0,
    remote_start: int = 0,
    positions: range | None = None,
    heads: range | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[list[np.ndarray], int]:
    """Return what the local buffers must be after the read, and how many elements move.

    Moved is each element that both sides hold in the blocks of their tables, inside `positions`,
    `heads` and `layers`. Everything else keeps its bytes, padding and guards included.
    """
    wanted_heads = range(2**31) if heads is None else heads
    wanted_layers = range(2**31) if layers is None else layers
    wanted_positions = range(2**31) if positions is None else positions
    held = {
        identity
        for identity, _ in remote.identities(
            wanted_layers, wanted_heads, remote_table, remote_start
        )
        if identity[3] in wanted_positions
    }
    buffers = [buffer.copy() for buffer in local.buffers]
    views = local.views(buffers)
    moved = 0
    for identity, (tensor_idx, index) in local.identities(
        wanted_layers, wanted_heads, local_table, local_start
    ):
        if identity in held:
            views[tensor_idx][index] = local.value(*identity)
            moved += 1
    return buffers, moved


def apply(local_rows: np.ndarray, remote_rows: np.ndarray, *, write: bool = False) -> None:
    """Do what a transport would: copy remote to local, or local to remote, one row at a time."""
    for here, there in zip(local_rows.tolist(), remote_rows.tolist(), strict=True):
        target, source = (there, here) if write else (here, there)
        ctypes.memmove(target[0], source[0], here[1])


def check_rows(
    local: Side,
    remote: Side,
    local_rows: np.ndarray,
    remote_rows: np.ndarray,
    max_bytes: int | None,
) -> None:
    """Check the form of descriptors: paired, ascending, in the buffers' spans, merged, and cut."""
    for rows in (local_rows, remote_rows):
        assert rows.dtype == np.uint64
        assert rows.ndim == 2
        assert rows.shape[1] == 3
        assert not rows[:, 2].any()
    assert local_rows[:, 1].tolist() == remote_rows[:, 1].tolist()
    here, there = local_rows.tolist(), remote_rows.tolist()
    for side, rows in ((local, here), (remote, there)):
        for address, length, _ in rows:
            assert length > 0
            assert any(
                first <= address and address + length <= end for first, end in side.spans()
            ), (address, length, side.spans())
    for i in range(1, len(here)):
        assert here[i - 1][0] + here[i - 1][1] <= here[i][0], "not ascending, or overlapping"
        touching = (
            here[i - 1][0] + here[i - 1][1] == here[i][0]
            and there[i - 1][0] + there[i - 1][1] == there[i][0]
        )
        if touching:
            assert max_bytes is not None, "two rows that are one run"
            assert here[i - 1][1] + here[i][1] > max_bytes, "cut where it did not need to be"
    if max_bytes is not None:
        assert all(length <= max_bytes for _, length, _ in here)
