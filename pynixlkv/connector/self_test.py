"""The self-test of two ranks at first contact: a pattern is read between a few scratch blocks.

Each rank has scratch blocks beside its cache, of the same layout. Pattern block i numbers the
elements along axis i: each byte of an element is its index there. A consumer reads the pattern as
it is going to read KV. If pattern block i arrives other than the consumer's own, the two ranks do
not mean the same elements by that axis.

That tests what the geometries say, the plan between them, and the path of the bytes. It shows that
a geometry says what the engine's kernels do only if the engine fills the pattern through them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from pynixlkv.digest import as_torch
from pynixlkv.errors import IncompatibleLayoutError, KVCorruptError
from pynixlkv.geometry import Axis, KVCache, _read_array, meetings
from pynixlkv.plan import TransferPlan
from pynixlkv.types import MemoryType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pynixlkv.agent import Agent, Peer, Transfer
    from pynixlkv.connector.tp_mapping import TransferSlice
    from pynixlkv.geometry import Geometry, Group, Region

AXES = ("layer", "kv", "head", "token", "dim")
"""One pattern block for each, in this order."""
NUM_BLOCKS = 2 * len(AXES)
"""Of a scratch cache: the pattern, and as many blocks to read it into."""
_MAX_BYTES = 4 << 20
_MAX_STEP = 4096
_MODULUS = 251


def make_scratch(cache: KVCache) -> KVCache | None:
    """Return a scratch cache, with the pattern, of at most 4 MiB: if need be of some layers.

    None if even one layer is larger.
    """
    step = 1
    while True:
        shrunk = [(group, *_shrink(group, step)) for group in cache.geometry.groups]
        if step > _MAX_STEP or sum(size for _, _, size in shrunk) <= _MAX_BYTES:
            break
        step *= 2  # so that the layers of one cache are among those of another, or the reverse
    arrays, groups = [], []
    for group, regions, size in shrunk:
        if not regions:
            continue
        memory: Any = np.zeros(size, np.uint8)
        for region in regions:
            _fill(memory, group, region)
        if cache.geometry.spans[group.regions[0].span].memory is MemoryType.VRAM:
            owner: Any = cache.owner_of(group.regions[0], group.element_bytes)
            owner = as_torch(owner)
            memory = sys.modules["torch"].from_numpy(memory).to(owner.device).view(owner.dtype)
        array = _read_array(group.name, memory)
        placed = [replace(each, address=array.address + each.address) for each in regions]
        groups.append(replace(group, num_blocks=NUM_BLOCKS, regions=tuple(placed)))
        arrays.append(array)
    return KVCache(arrays, groups) if groups else None


def _shrink(group: Group, step: int) -> tuple[list[Region], int]:
    """Return dense regions of each `step`-th layer, from address 0 on, and their size."""
    regions, size = [], 0
    for region in group.regions:
        axes = {name: getattr(region, name) for name in ("block", *AXES[1:])}
        extent = group.element_bytes
        for name, axis in sorted(axes.items(), key=lambda item: item[1].stride):
            count = NUM_BLOCKS if name == "block" else axis.count
            axes[name] = Axis(axis.start, count, extent if count > 1 else 0)
            extent *= count
        for layer in range(region.layer.start, region.layer.start + region.layer.count):
            if layer % step == 0:
                regions.append(replace(region, address=size, layer=Axis(layer), **axes))
                size += extent
    return regions, size


def _fill(memory: NDArray[np.uint8], group: Group, region: Region) -> None:
    axes = [getattr(region, name) for name in ("block", *AXES[1:])]
    shape = [*(axis.count for axis in axes), group.element_bytes]
    strides = [*(axis.stride for axis in axes), 1]
    pattern = np.ndarray(shape, np.uint8, memory, region.address, strides)
    indices = [axis.start + np.arange(axis.count) for axis in axes[1:]]
    turns, slots = np.divmod(indices[2], group.interleave)
    indices[2] = (turns * group.dcp[1] + group.dcp[0]) * group.interleave + slots
    for block, index in enumerate([np.array([region.layer.start]), *indices]):
        along = np.expand_dims(index % _MODULUS, [i for i in range(5) if i != max(block - 1, 0)])
        pattern[block] = along


def run(
    agent: Agent,
    scratch: KVCache,
    peer: Peer,
    theirs: Geometry,
    slices: Sequence[TransferSlice],
    timeout: float,
    turn: int,
    reads: list[Transfer],
) -> None:
    """Read a producer's pattern and compare it; blocks. Adds its transfers to `reads`.

    With another `turn` than the last one, each pattern arrives where another one was.

    Raises
    ------
    IncompatibleLayoutError
        If something arrives in another place than this rank expects; it names the axes.
    TransferError
        If nothing arrives.
    """
    wrong: dict[str, KVCorruptError] = {}
    for piece in slices:
        met = [
            (here, there, {*piece.layers} & {*layers})
            for here, there, layers in meetings(scratch.geometry.groups, theirs.groups)
            if here.name in piece.groups and {*piece.layers} & {*layers}
        ]
        if not met:
            continue
        plan = TransferPlan(
            scratch.geometry,
            theirs,
            groups=dict.fromkeys(here.name for here, _, _ in met),
            heads=piece.heads,
            layers=set().union(*(layers for _, _, layers in met)),
        )
        # The pattern numbers the heads as one side does.
        renumbered = {here.kind for here, there, _ in met if here.kv_heads != there.kv_heads}
        num_tokens: dict[str, int] = {}
        for here, there, _ in met:
            tokens = num_tokens.get(here.name, here.block_tokens)
            num_tokens[here.name] = min(tokens, there.block_tokens)
        pattern, remote = (
            [{pair[side]: [i] for pair in plan.pairs} for i in range(NUM_BLOCKS)]
            for side in range(2)
        )
        places = [pattern[len(AXES) + (i + turn) % len(AXES)] for i in range(len(AXES))]
        begun = [
            agent.read(peer, plan, *tables, timeout=timeout, num_tokens=num_tokens)
            for tables in zip(places, remote, strict=False)
        ]
        reads += begun
        for transfer in begun:
            transfer.wait(timeout)
        for axis, arrived, block, block_there in zip(
            AXES, places, pattern, remote, strict=False
        ):
            scopes = [
                scope
                for scope in plan.digest_scopes(arrived, block_there, num_tokens=num_tokens)
                if axis != "head" or scope.group not in renumbered
            ]
            expected = scratch.digest(block, scopes=scopes)
            try:
                scratch.digest(arrived, scopes=scopes).check(expected, peer=peer.name)
            except KVCorruptError as error:
                wrong.setdefault(axis, error)
    if wrong:
        raise IncompatibleLayoutError(
            f"the self-test with {peer.name!r} shows that the two sides do not mean the same by "
            f"axes {', '.join(wrong)}; compare the axes and the shapes that their caches were made "
            f"with: {next(iter(wrong.values()))}",
            peer=peer.name,
            differences=[
                (axis, error.mismatches[0].here, error.mismatches[0].there)
                for axis, error in wrong.items()
            ],
        )
