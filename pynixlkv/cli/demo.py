"""The demo: prefill and decode processes move real KV blocks and compare every byte."""

from __future__ import annotations

import os
import random
import re
import secrets
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pynixlkv.cli.cache import dimension_letters
from pynixlkv.cli.models import Model, find_model
from pynixlkv.cli.rank import DemoOptions, DemoRank, Operation, RankSpec, Role, Tables
from pynixlkv.errors import ConfigError
from pynixlkv.testing.process import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_ROLES: tuple[Role, Role] = ("prefill", "decode")
# The default size of a pool: bytes of each role, and share of the free memory that both may take.
_ROLE_BYTES = 1 << 30
_FREE_SHARE = 0.15
# The share that they may take if the number of blocks is given.
_MAX_FREE_SHARE = 0.8
# Longest run of adjacent blocks in a table: pools of busy engines are scattered, not shuffled.
_LONGEST_RUN = 8
# Headings and rows (count, range of lengths, method, transport) of UCX's report on what it used.
_UCX_TABLE = re.compile(r"\| (remote memory \w+|active message) by ucp_")
_UCX_ROW = re.compile(r"\| +(\d+) \| +\S+ \| (.*?) +\| (.*?) +\|$")


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
    """The results, with the first difference of each rank; `seed` repeats the run.

    Verified bytes were moved and are equal; guard bytes are those of unused blocks, untouched.
    """

    model: str
    transfer_backend: str
    seed: int
    axes: dict[Role, str]
    sizes: dict[Role, int]
    block_tokens: int
    blocks: int
    pool_blocks: int
    cache_bytes: dict[Role, int]
    operations: list[OperationReport] = field(default_factory=list)
    verified_bytes: int = 0
    guard_bytes: int = 0
    wrong_bytes: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every compared byte is right."""
        return self.wrong_bytes == 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and ``ok`` as plain values."""
        return {"ok": self.ok, **asdict(self)}


def run_demo(options: DemoOptions, on_progress: Callable[[str, int, int], None]) -> DemoReport:
    """Run the demo; `on_progress` is called with a label, and how much of how much is done.

    Bytes that differ are in the report. `ConfigError` is raised for impossible options, `RunError`
    if a process fails or the time is up; no process is left behind.
    """
    model = find_model(options.model)
    options = replace(options, axes={**dict.fromkeys(_ROLES, model.axes), **options.axes})
    for axes in options.axes.values():
        dimension_letters(axes, model)
    blocks = _choose_blocks(model, options)
    pool_blocks = _pool_blocks(blocks)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    tables = _scatter(blocks, pool_blocks, seed)
    specs = [
        RankSpec(role, rank, options, pool_blocks, tables, seed)
        for role in _ROLES
        for rank in range(options.sizes[role])
    ]
    # UCX prints at its end which transports it used.
    env = {"UCX_PROTO_INFO": os.environ.get("UCX_PROTO_INFO", "used")}
    names = [spec.name for spec in specs]
    with ProcessGroup(dict.fromkeys(names, env), options.timeout_s, on_progress) as group:
        return _conduct(group, specs, model, blocks)


def _conduct(
    group: ProcessGroup, specs: Sequence[RankSpec], model: Model, blocks: int
) -> DemoReport:
    names = {role: [spec.name for spec in specs if spec.role == role] for role in _ROLES}
    prefill, decode = names["prefill"], names["decode"]
    everyone = [*prefill, *decode]

    for spec in specs:
        group.post([spec.name], DemoRank, spec, keep=True)
    group.gather("fill and register", everyone)
    described = group.call("describe", everyone, "describe")
    hellos = {role: [described[name][0] for name in names[role]] for role in _ROLES}
    group.call("connect and plan", everyone, "connect", hellos)

    all_moved: list[tuple[Operation, dict[str, dict[str, Any]]]] = []
    checks: list[dict[str, tuple[int, str]]] = []
    phases: list[tuple[Operation, list[str], list[str]]] = [
        ("read", decode, prefill),
        ("write", prefill, decode),
    ]
    for operation, initiators, targets in phases:
        group.post(targets, "await_notifications")
        all_moved.append((operation, group.call(operation, initiators, "move")))
        group.gather(f"notifications of {operation}", targets)
        done = [moved[0] for moved in all_moved]
        checks.append(group.call(f"compare after {operation}", everyone, "check", done))
    own_transports = group.call("name the transports", everyone, "own_transports")
    outputs = group.join()

    options, pool_blocks = specs[0].options, specs[0].num_blocks
    cache_bytes = {role: sum(described[name][1] for name in names[role]) for role in _ROLES}
    moved_blocks = 2 * blocks  # read, and written
    return DemoReport(
        model=model.name,
        transfer_backend=options.transfer_backend,
        seed=specs[0].seed,
        axes=options.axes,
        sizes=options.sizes,
        block_tokens=model.block_size,
        blocks=blocks,
        pool_blocks=pool_blocks,
        cache_bytes=cache_bytes,
        operations=[
            _summarise(
                operation,
                blocks,
                list(moved.values()),
                ", ".join(sorted(set().union(*(own_transports[name] for name in moved))))
                or _used_transports(operation, [outputs[name] for name in moved]),
            )
            for operation, moved in all_moved
        ],
        verified_bytes=cache_bytes["decode"] * moved_blocks // pool_blocks,
        guard_bytes=sum(cache_bytes.values()) * (pool_blocks - moved_blocks) // pool_blocks,
        wrong_bytes=sum(wrong for phase in checks for wrong, _ in phase.values()),
        differences=[
            f"{name}: {difference}"
            for phase in checks
            for name, (_, difference) in phase.items()
            if difference
        ],
    )


def _used_transports(operation: Operation, outputs: Iterable[list[str]]) -> str:
    """Find in UCX's own output what moved the bytes of an operation.

    Where nothing is one-sided, messages did.
    """
    used: dict[str, set[str]] = defaultdict(set)
    for output in outputs:
        table = ""
        for line in output:
            if heading := _UCX_TABLE.search(line):
                table = heading[1]
            elif (row := _UCX_ROW.search(line)) and int(row[1]):
                used[table].add(f"{row[3]} ({row[2]})")
    messages = {f"{name}, by messages" for name in used["active message"]}
    return ", ".join(sorted(used[f"remote memory {operation}"] or messages)) or "not reported"


def _summarise(
    operation: Operation, blocks: int, moved: Sequence[dict[str, Any]], transport: str
) -> OperationReport:
    """Combine the results of the ranks of one operation, which ran at the same time."""
    combined = {
        key: (max if key.endswith("_s") else sum)(each[key] for each in moved) for key in moved[0]
    }
    return OperationReport(
        operation=operation,
        transport=transport,
        blocks=blocks,
        gb_per_s=combined["bytes"] / combined["elapsed_s"] / 1e9,
        **combined,
    )


def _pool_blocks(blocks: int) -> int:
    """Return the blocks of a pool: read, written, and guards, two of them at the ends."""
    return 2 * blocks + max(4, blocks // 4)


def _choose_blocks(model: Model, options: DemoOptions) -> int:
    """Return the blocks to move each way, checked against the memory of the machine."""
    per_block = {
        role: sum(model.block_bytes(rank, size) for rank in range(size))
        for role, size in options.sizes.items()
    }
    free = _free_bytes()
    if options.blocks is None:
        blocks = 1
        while True:
            pool = {role: _pool_blocks(blocks + 1) * each for role, each in per_block.items()}
            if max(pool.values()) > _ROLE_BYTES or sum(pool.values()) > _FREE_SHARE * free:
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
    """Return the bytes that can be allocated without swapping."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Only this file counts the pages of cached files as available.
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


def _scatter(blocks: int, pool_blocks: int, seed: int) -> dict[Role, Tables]:
    """Lay out both pools: short runs of adjacent blocks in an order of each role's own.

    The first and the last block are guards, as are others in between.
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
    tables: dict[Role, Tables] = {}
    for role in _ROLES:
        rng.shuffle(runs)
        places = {"read": [0] * blocks, "write": [0] * blocks, "guard": [0]}
        block = 1
        for name, numbers in runs:
            for number in numbers:
                places[name][number] = block
                block += 1
        tables[role] = {"read": places["read"], "write": places["write"]}
    return tables
