"""The demo: prefill and decode processes move real KV blocks and compare every byte."""

from __future__ import annotations

import os
import random
import re
import secrets
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pynixlkv.cli.cache import dimension_letters
from pynixlkv.cli.group import ProcessGroup
from pynixlkv.cli.messages import (
    Await,
    Check,
    Checked,
    Connect,
    Connected,
    Fault,
    Finish,
    Finished,
    Move,
    Moved,
    Notified,
    Operation,
    RankSpec,
    Ready,
    Side,
    Tables,
    decode,
)
from pynixlkv.cli.models import Model, find_model
from pynixlkv.cli.rank import load_engine
from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["DemoOptions", "DemoReport", "OperationReport", "run_demo"]

_SIDES: tuple[Side, Side] = ("prefill", "decode")
# By default each side's pool is at most this large, and both together at most this share of what
# is free.
_SIDE_BYTES = 1 << 30
_FREE_SHARE = 0.15
# Asked for explicitly, the pools may take this share.
_MAX_FREE_SHARE = 0.8
# Longest run of adjacent blocks in a table: pools of busy engines are scattered, not shuffled.
_LONGEST_RUN = 8
# Headings and rows (count, range of lengths, method, transport) of UCX's report on what it used.
_UCX_TABLE = re.compile(r"\| (remote memory \w+|active message) by ucp_")
_UCX_ROW = re.compile(r"\| +(\d+) \| +\S+ \| (.*?) +\| (.*?) +\|$")


@dataclass(frozen=True)
class DemoOptions:
    """What to move between whom.

    Parameters
    ----------
    model : str
        Name of a geometry in `pynixlkv.cli.models`.
    axes : dict of str to str
        Order of the dimensions of each side's tensors; missing ones are the model's own.
    sizes : dict of str to int
        Tensor-parallel size of each side.
    blocks : int, optional
        Blocks to move each way, at least 1; by default as many as fit the machine.
    engine : str
        ``"nixl"`` or ``"ucx"``.
    timeout_s : float
        Seconds after which everything is given up.
    seed : int, optional
        Seed of all contents and block tables; random by default.
    fault : str, optional
        What to spoil on purpose in decode rank 0, to see that it is noticed.
    """

    model: str
    axes: dict[Side, str]
    sizes: dict[Side, int]
    blocks: int | None = None
    engine: str = "nixl"
    timeout_s: float = 300.0
    seed: int | None = None
    fault: Fault | None = None


@dataclass(frozen=True)
class OperationReport:
    """What one operation moved; times are the longest of its ranks, in seconds."""

    operation: Operation
    transport: str
    bytes: int
    blocks: int
    descriptors_unmerged: int
    descriptors: int
    plan_s: float
    post_s: float
    transfer_s: float
    elapsed_s: float
    gb_per_s: float


@dataclass(frozen=True)
class DemoReport:
    """What happened, for people and programs.

    Parameters
    ----------
    model, engine : str
        Names.
    seed : int
        Repeats the run when given as an option.
    axes, sizes : dict
        Each side's dimension order and tensor-parallel size.
    block_tokens, blocks, pool_blocks : int
        Tokens in a block, blocks moved each way, blocks in each pool.
    cache_bytes : dict of str to int
        Bytes of each side's pools.
    operations : list of OperationReport
        The read and the write.
    verified_bytes : int
        Bytes that were moved and found equal, in both directions together.
    guard_bytes : int
        Bytes of blocks that nobody was to write, found untouched at the end, on both sides.
    wrong_bytes : int
        Bytes that differ, anywhere.
    differences : list of str
        The first difference of each rank.
    """

    model: str
    engine: str
    seed: int
    axes: dict[Side, str]
    sizes: dict[Side, int]
    block_tokens: int
    blocks: int
    pool_blocks: int
    cache_bytes: dict[Side, int]
    operations: list[OperationReport] = field(default_factory=list)
    verified_bytes: int = 0
    guard_bytes: int = 0
    wrong_bytes: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every byte that was looked at is right."""
        return self.wrong_bytes == 0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values.

        Returns
        -------
        dict
            Field names and values, and ``ok``.
        """
        return {"ok": self.ok, **asdict(self)}


def run_demo(options: DemoOptions, on_progress: Callable[[str, int, int], None]) -> DemoReport:
    """Run the demo.

    Parameters
    ----------
    options : DemoOptions
        What to do.
    on_progress : callable
        Called with what is being done, and how much of how much of it is.

    Returns
    -------
    DemoReport
        What happened. Bytes that differ are in it, not an exception.

    Raises
    ------
    ConfigError
        If the options are impossible or do not fit the memory.
    RunError
        If a process fails or the time is up. No process is left behind.

    Notes
    -----
    Blocks until the end, for at most ``timeout_s``.
    """
    model = find_model(options.model)
    axes = {side: options.axes.get(side, model.axes) for side in _SIDES}
    for side in _SIDES:
        dimension_letters(axes[side], model)
    load_engine(options.engine)
    blocks = _choose_blocks(model, options)
    pool_blocks = _pool_blocks(blocks)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    tables = _scatter(blocks, pool_blocks, seed)
    specs = [
        RankSpec(
            side=side,
            rank=rank,
            sizes=options.sizes,
            axes=axes[side],
            model=model.name,
            engine=options.engine,
            num_blocks=pool_blocks,
            tables=tables,
            seed=seed,
            timeout_s=options.timeout_s,
            fault=options.fault if (side, rank) == ("decode", 0) else None,
        )
        for side in _SIDES
        for rank in range(options.sizes[side])
    ]
    with ProcessGroup("pynixlkv.cli.rank", decode, specs, options.timeout_s, on_progress) as group:
        return _conduct(group, specs, model, blocks)


def _conduct(
    group: ProcessGroup, specs: Sequence[RankSpec], model: Model, blocks: int
) -> DemoReport:
    """Lead the ranks through both operations and add up what they say."""
    names = {side: [spec.name for spec in specs if spec.side == side] for side in _SIDES}
    prefill, decode = names["prefill"], names["decode"]
    everyone = [*prefill, *decode]

    ready = group.gather("fill and register", dict.fromkeys(everyone, Ready))
    hellos = {side: [ready[name].hello for name in names[side]] for side in _SIDES}
    connects = {spec.name: Connect(hellos[spec.other_side]) for spec in specs}
    group.ask("connect and plan", connects, Connected)

    all_moved, checks = [], []
    done: list[Operation] = []
    phases: list[tuple[Operation, list[str], list[str]]] = [
        ("read", decode, prefill),
        ("write", prefill, decode),
    ]
    for operation, movers, waiters in phases:
        group.send(dict.fromkeys(waiters, Await()))
        moved = group.ask(operation, dict.fromkeys(movers, Move()), Moved)
        group.gather(f"notifications of {operation}", dict.fromkeys(waiters, Notified))
        all_moved.append((operation, moved))

        done.append(operation)
        comparisons = {
            **dict.fromkeys(prefill, Check(["read", "write"])),
            **dict.fromkeys(decode, Check(done)),
        }
        checks.append(group.ask(f"compare after {operation}", comparisons, Checked))
    group.ask("close", dict.fromkeys(everyone, Finish()), Finished)
    outputs = group.join()

    found = [check for phase in checks for check in phase.values()]
    last = checks[-1]
    spec = specs[0]
    return DemoReport(
        model=model.name,
        engine=spec.engine,
        seed=spec.seed,
        axes={spec.side: spec.axes for spec in specs},
        sizes=spec.sizes,
        block_tokens=model.block_size,
        blocks=blocks,
        pool_blocks=spec.num_blocks,
        cache_bytes={side: sum(ready[name].cache_bytes for name in names[side]) for side in _SIDES},
        operations=[
            _summarise(
                operation,
                blocks,
                list(moved.values()),
                _used_transports(operation, [outputs[name] for name in moved]),
            )
            for operation, moved in all_moved
        ],
        verified_bytes=sum(last[name].moved_bytes for name in decode),
        guard_bytes=sum(check.guard_bytes for check in last.values()),
        wrong_bytes=sum(check.wrong_bytes for check in found),
        differences=[
            f"{name}: {check.difference}"
            for phase in checks
            for name, check in phase.items()
            if check.wrong_bytes
        ],
    )


def _used_transports(operation: Operation, outputs: Iterable[str]) -> str:
    """Find in UCX's own words what moved the bytes of an operation.

    Where nothing is one-sided, messages did.
    """
    used: dict[str, set[str]] = defaultdict(set)
    for output in outputs:
        table = ""
        for line in output.splitlines():
            if heading := _UCX_TABLE.search(line):
                table = heading[1]
            elif (row := _UCX_ROW.search(line)) and int(row[1]):
                used[table].add(f"{row[3]} ({row[2]})")
    messages = {f"{name}, by messages" for name in used["active message"]}
    return ", ".join(sorted(used[f"remote memory {operation}"] or messages)) or "not reported"


def _summarise(
    operation: Operation, blocks: int, moved: Sequence[Moved], transport: str
) -> OperationReport:
    """Add up what the ranks of one operation moved; they ran at the same time."""
    num_bytes = sum(reply.num_bytes for reply in moved)
    elapsed_s = max(reply.elapsed_s for reply in moved)
    return OperationReport(
        operation=operation,
        transport=transport,
        bytes=num_bytes,
        blocks=blocks,
        descriptors_unmerged=sum(reply.descriptors_unmerged for reply in moved),
        descriptors=sum(reply.descriptors for reply in moved),
        plan_s=max(reply.plan_s for reply in moved),
        post_s=max(reply.post_s for reply in moved),
        transfer_s=max(reply.transfer_s for reply in moved),
        elapsed_s=elapsed_s,
        gb_per_s=num_bytes / elapsed_s / 1e9,
    )


def _pool_blocks(blocks: int) -> int:
    """Blocks of a pool: those read, those written, and guards, two of them at the ends."""
    return 2 * blocks + max(4, blocks // 4)


def _choose_blocks(model: Model, options: DemoOptions) -> int:
    """Return the blocks to move each way, checked against the memory of the machine."""
    per_block = {
        side: sum(model.block_bytes(rank, size) for rank in range(size))
        for side, size in options.sizes.items()
    }
    free = _free_bytes()
    if options.blocks is None:
        blocks = 1
        while True:
            pool = {side: _pool_blocks(blocks + 1) * each for side, each in per_block.items()}
            if max(pool.values()) > _SIDE_BYTES or sum(pool.values()) > _FREE_SHARE * free:
                return blocks
            blocks += 1
    if options.blocks < 1:
        raise ConfigError(f"--blocks is {options.blocks}; expected at least 1")
    needed = _pool_blocks(options.blocks) * sum(per_block.values())
    if needed > _MAX_FREE_SHARE * free:
        raise ConfigError(
            f"--blocks {options.blocks} needs {needed / 2**30:.1f} GiB for both sides' pools, "
            f"more than {_MAX_FREE_SHARE:.0%} of the {free / 2**30:.1f} GiB that are free; "
            "use fewer blocks or a smaller model"
        )
    return options.blocks


def _free_bytes() -> int:
    """Return the memory that can be had without swapping, in bytes."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Pages that hold cached files can be had too, but only this file counts them.
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        used = int((limit.parent / "memory.current").read_text())
        free = min(free, int(text) - used)
    return free


def _scatter(blocks: int, pool_blocks: int, seed: int) -> dict[Side, Tables]:
    """Lay out both pools: short runs of adjacent blocks in an order of each side's own.

    The first and the last block belong to nobody, and so do others in between.
    """
    rng = random.Random(seed)
    runs: list[tuple[str, range]] = []
    for name in ("read", "write"):
        start = 0
        while start < blocks:
            stop = min(start + rng.randint(1, _LONGEST_RUN), blocks)
            runs.append((name, range(start, stop)))
            start = stop
    runs += [("guard", range(1))] * (pool_blocks - 2 - 2 * blocks)
    tables: dict[Side, Tables] = {}
    for side in _SIDES:
        rng.shuffle(runs)
        places = {"read": [0] * blocks, "write": [0] * blocks, "guard": [0]}
        block = 1
        for name, numbers in runs:
            for number in numbers:
                places[name][number] = block
                block += 1
        tables[side] = {"read": places["read"], "write": places["write"]}
    return tables
