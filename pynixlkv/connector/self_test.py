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

import msgspec
import numpy as np

from pynixlkv.errors import IncompatibleLayoutError, KVCorruptError
from pynixlkv.geometry import Axis, KVCache, _read_array
from pynixlkv.plan import TransferPlan
from pynixlkv.types import MemoryType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pynixlkv.agent import Agent, Peer
    from pynixlkv.connector.tp_mapping import TransferSlice
    from pynixlkv.geometry import Geometry, Group, Region

AXES = ("layer", "kv", "head", "token", "dim")
"""One pattern block for each, in this order."""
NUM_BLOCKS = 2 * len(AXES)
"""Of a scratch cache: the pattern, and as many blocks to read it into."""
_MAX_BYTES = 8 << 20
_MODULUS = 251
_ALIGNMENT = 64


def make_scratch(cache: KVCache) -> KVCache:
    """Return a scratch cache, with the pattern, of at most 8 MiB: if need be of some layers."""
    groups = [(group, _shrink(group, 1)) for group in cache.geometry.groups]
    step = 1
    while sum(size for _, (_, size) in groups) > _MAX_BYTES and step < 4096:
        step *= 2  # so that the layers of two caches are some of each other's
        groups = [(group, _shrink(group, step)) for group in cache.geometry.groups]
    arrays, made = [], []
    for group, (regions, size) in groups:
        if not regions:
            continue
        host = np.zeros(size, np.uint8)
        for region in regions:
            _fill(host, group, region)
        memory: Any = host
        if cache.geometry.spans[group.regions[0].span].memory is MemoryType.VRAM:
            torch = sys.modules["torch"]
            owner: Any = cache.owner_of(group.regions[0], group.element_bytes)
            memory = torch.from_numpy(host).to(owner.device).view(owner.dtype)
        array = _read_array(group.name, memory)
        placed = [
            msgspec.structs.replace(each, address=array.address + each.address) for each in regions
        ]
        made.append(msgspec.structs.replace(group, num_blocks=NUM_BLOCKS, regions=tuple(placed)))
        arrays.append(array)
    return KVCache(arrays, made)


def _shrink(group: Group, step: int) -> tuple[list[Region], int]:
    """Return regions of few blocks, from address 0 on, for each `step`-th layer, and their size."""
    regions, size = [], 0
    for region in group.regions:
        strides = {name: getattr(region, name).stride for name in AXES[1:]}
        page = region.block.stride or max(strides.values()) + 1
        inside = [name for name in AXES[1:] if strides[name] < page]
        # What is inside a page stays; pages, and what is larger, move together.
        extent = group.element_bytes
        extent += sum((getattr(region, name).count - 1) * strides[name] for name in inside)
        strides["block"] = extent = _aligned(extent)
        extent *= NUM_BLOCKS
        for name in sorted(set(AXES[1:]) - set(inside), key=lambda name: strides[name]):
            strides[name] = extent
            extent *= getattr(region, name).count
        axes = {
            name: msgspec.structs.replace(getattr(region, name), stride=strides[name])
            for name in AXES[1:]
        }
        for layer in range(region.layer.start, region.layer.start + region.layer.count):
            if layer % step == 0:
                regions.append(
                    msgspec.structs.replace(
                        region,
                        address=size,
                        layer=Axis(layer, 1, 0),
                        block=Axis(0, NUM_BLOCKS, strides["block"]),
                        **axes,
                    )
                )
                size += extent
    return regions, size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _fill(host: NDArray[np.uint8], group: Group, region: Region) -> None:
    axes = [region.block, *(getattr(region, name) for name in AXES[1:])]
    view = np.ndarray(
        [*(axis.count for axis in axes), group.element_bytes],
        np.uint8,
        host,
        region.address,
        [*(axis.stride for axis in axes), 1],
    )
    slots = np.arange(region.token.count)
    turn, rest = np.divmod(slots, group.interleave)
    indices = [
        np.array([region.layer.start]),
        *(
            getattr(region, name).start + np.arange(getattr(region, name).count)
            for name in AXES[1:]
        ),
    ]
    indices[3] = (turn * group.dcp[1] + group.dcp[0]) * group.interleave + rest
    for i, index in enumerate(indices):
        shape = [1] * 5
        shape[max(i - 1, 0)] = -1
        view[i] = (index % _MODULUS).reshape(shape)


def run(
    agent: Agent,
    scratch: KVCache,
    peer: Peer,
    theirs: Geometry,
    slices: Sequence[TransferSlice],
    timeout: float,
) -> None:
    """Read a producer's pattern and compare it; blocks.

    Raises
    ------
    IncompatibleLayoutError
        If something arrives in another place than this rank expects; it names the axes.
    TransferError
        If nothing arrives.
    """
    ours, other = ({g.name: g for g in side.groups} for side in (scratch.geometry, theirs))
    wrong: dict[str, KVCorruptError] = {}
    for piece in slices:
        layers = {
            name: {*piece.layers} & {*ours[name].layers} & {*other[name].layers}
            for name in piece.groups
            if name in ours and name in other
        }
        names = [name for name in layers if layers[name]]
        if not names:
            continue
        plan = TransferPlan(
            scratch.geometry,
            theirs,
            groups=names,
            heads=piece.heads,
            layers=set().union(*layers.values()),
        )
        num_tokens = {n: min(ours[n].block_tokens, other[n].block_tokens) for n in names}
        pattern = [{name: [i] for name in names} for i in range(NUM_BLOCKS)]
        here = pattern[len(AXES) :]
        for transfer in [
            agent.read(peer, plan, *tables, timeout=timeout, num_tokens=num_tokens)
            for tables in zip(here, pattern, strict=False)
        ]:
            transfer.wait(timeout)
        for axis, arrived, block in zip(AXES, here, pattern, strict=False):
            scopes = plan.digest_scopes(arrived, block, num_tokens=num_tokens)
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
