"""What hand-offs of a model cost: bytes, descriptors, time, held blocks and connections.

Bytes and descriptors come from the planner, over tensors that are allocated and never touched.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from pynixlkv import KVCache, TransferPlan
from pynixlkv.cli.cache import RankCache
from pynixlkv.cli.models import find_model
from pynixlkv.errors import ConfigError
from pynixlkv.topology import read_sources, release_targets

if TYPE_CHECKING:
    from pynixlkv.cli.models import Model

_FDS_OF_PEER = 11  # of UcxAgent to another host over TCP, the most, see docs/guides/size-a-fleet.md


@dataclass(frozen=True)
class SizeOptions:
    """A fleet and its load."""

    model: str
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_axes: str | None = None
    decode_axes: str | None = None
    prefill_block_size: int | None = None
    decode_block_size: int | None = None
    prompt: int = 8192
    """Tokens of a request."""
    link: float = 100.0
    """Gb/s of the link of one rank."""
    rate: float = 1.0
    """Requests in a second, of all engines together."""
    prefill_engines: int = 1
    decode_engines: int = 1
    wait: float = 0.5
    """Seconds that a request waits between the end of its prefill and the begin of its transfer."""


@dataclass(frozen=True)
class SizeReport:
    """The costs."""

    options: SizeOptions
    bytes_per_token: int
    """KV of one token, in all ranks of decode."""
    request_bytes: int
    """Read for one request by all ranks of decode together."""
    rank_bytes: int
    """Read for one request by a rank of decode."""
    sources: int
    """Ranks of prefill that a rank of decode reads from."""
    descriptors: int
    """Of one request at a rank of decode, for scattered blocks."""
    shortest_run: int
    """Bytes of the shortest of them."""
    transfer_s: float
    """At the speed of the busiest link, with nothing else on it."""
    load_gb_per_s: float
    """GB/s of the whole load."""
    prefill_links: int
    """Links that all of prefill needs for the load."""
    decode_links: int
    """Links that all of decode needs for the load."""
    leases: float
    """Requests that prefill holds on average, all engines together."""
    held_blocks: float
    """Their blocks, in all engines of prefill together; those of a rank are as many."""
    decode_peers: int
    """Peers of a rank of decode."""
    prefill_peers: int
    """Peers of the busiest rank of prefill."""
    decode_fds: int
    """File descriptors of a rank of decode for its peers, over TCP."""
    prefill_fds: int
    """The same for prefill."""
    ok: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible data."""
        return asdict(self)


def link_speed(text: str) -> float:
    """Return the Gb/s that a text such as ``"100Gb"`` names."""
    digits = text.lower().removesuffix("/s").removesuffix("gb").strip()
    try:
        return float(digits)
    except ValueError:
        raise ConfigError(f"link is {text!r}; expected a speed such as '100Gb'") from None


def size_fleet(options: SizeOptions) -> SizeReport:
    """Compute the costs; raises `ConfigError` for options that are impossible."""
    for name in ("prompt", "link", "rate", "prefill_engines", "decode_engines"):
        if not 0 < getattr(options, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(options, name)}; expected a number above 0")
    model, size = find_model(options.model), options.prefill_tp
    prefill = replace(model, block_size=options.prefill_block_size or model.block_size)
    decode = replace(model, block_size=options.decode_block_size or model.block_size)
    num_blocks = [-(-options.prompt // each.block_size) for each in (prefill, decode)]
    # Blocks that are neighbours at one side are none at the other, so nothing merges.
    tables = [_scattered(num_blocks[0]), list(range(num_blocks[1]))]
    local = _cache(decode, options.decode_axes, 0, options.decode_tp, num_blocks[1])
    rank_bytes = descriptors = 0
    shortest, busiest = math.inf, 0
    sources = read_sources(model.kv_heads, local=(0, options.decode_tp), remote_size=size)
    for source in sources:
        remote = _cache(
            prefill, options.prefill_axes, source.rank, options.prefill_tp, num_blocks[0]
        )
        heads = None if model.kv_heads is None else source.heads
        plan = TransferPlan(local.geometry, remote.geometry, heads=heads)
        cost = plan.describe(tables[1], tables[0], num_tokens=options.prompt)
        rank_bytes += cost.num_bytes
        descriptors += cost.num_descriptors
        shortest = min(shortest, *(group.shortest_run for group in cost.groups))
        busiest = max(busiest, cost.num_bytes)
    ranks = [(rank, options.decode_tp) for rank in range(options.decode_tp)]
    read = [
        each for me in ranks for each in read_sources(model.kv_heads, local=me, remote_size=size)
    ]
    told = [list(release_targets(model.kv_heads, local=me, remote_size=size)) for me in ranks]
    # A rank of prefill serves every rank of decode that reads from it.
    busiest *= max(Counter(source.rank for source in read).values())
    gb_per_link = options.link / 8
    transfer_s = max(rank_bytes, busiest) / (gb_per_link * 1e9)
    request_bytes = rank_bytes * options.decode_tp
    load = options.rate * request_bytes / 1e9
    leases = options.rate * (options.wait + transfer_s)
    decode_peers = max(map(len, told)) * options.prefill_engines
    prefill_peers = max(Counter(chain(*told)).values()) * options.decode_engines
    return SizeReport(
        options=options,
        bytes_per_token=request_bytes // options.prompt,
        request_bytes=request_bytes,
        rank_bytes=rank_bytes,
        sources=len(sources),
        descriptors=descriptors,
        shortest_run=int(shortest),
        transfer_s=transfer_s,
        load_gb_per_s=load,
        prefill_links=math.ceil(load / gb_per_link),
        decode_links=math.ceil(load / gb_per_link),
        leases=leases,
        held_blocks=leases * num_blocks[0],
        decode_peers=decode_peers,
        prefill_peers=prefill_peers,
        decode_fds=decode_peers * _FDS_OF_PEER,
        prefill_fds=prefill_peers * _FDS_OF_PEER,
    )


def _scattered(count: int) -> list[int]:
    """Return block numbers of which no two neighbours are."""
    return [*range(1, count, 2), *range(0, count, 2)][::-1] if count > 1 else [0]


def _cache(model: Model, axes: str | None, rank: int, size: int, num_blocks: int) -> KVCache:
    made = RankCache(model, axes or model.axes, rank, size, num_blocks)
    names = [f"layer {i}" for i in range(len(made.tensors))]
    return KVCache.from_tensors(
        dict(zip(names, made.tensors, strict=True)),
        axes=made.letters,
        kv_heads=model.kv_heads,
        tp=(rank, size),
        dtype="bfloat16",
    )
