"""Every call of NIXL's Python API that programs repeat, in NIXL's own package and in ours.

    python -m bench.nixl_api [ROUNDS]

Each package is measured in processes of its own, in turns. The table shows the medians of the
rounds in microseconds of CPU time a call, and the median of the rounds' ratios: on a machine with
other work, the clock on the wall measures that work.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = {"NIXL": "nixl_cu12", "pynixlkv": "pynixlkv.nixl_api"}
SIZES, LENGTH, BUDGET_S = (1, 1000, 30_000), 64, 0.1


def microseconds(call: Callable[[Any], object], prepare: Callable[[], Any] = lambda: None) -> float:
    """Median time of a call in batches; what `prepare` makes is not timed."""
    took, spent, batch = [], 0.0, 1
    while spent < BUDGET_S or len(took) < 5:
        arguments = [prepare() for _ in range(batch)]
        start = time.thread_time()
        for argument in arguments:
            call(argument)
        end = time.thread_time() - start
        spent += end
        if end < 2e-3 and batch < 200:
            batch *= 2
        else:
            took.append(end / batch * 1e6)
    return statistics.median(took)


def measure_size(a: Any, memory: list[Any], size: int, result: dict[str, float]) -> None:
    def case(name: str, *timed: Any) -> None:
        result[f"{name} {size}"] = microseconds(*timed)

    steps = np.arange(size, dtype=np.uint64)
    mine, theirs, other = (
        np.stack([p.ctypes.data + 2 * LENGTH * steps, 0 * steps + LENGTH, 0 * steps], axis=1)
        for p in memory
    )
    tuples = [tuple(row) for row in mine.tolist()]
    to_register = [(*row, "") for row in other.tolist()]
    shuffled = np.random.default_rng(1).permutation(mine)
    strided = np.array([[mine[0, 0], LENGTH, 0, 2 * LENGTH, size]], dtype=np.uint64)
    descs, remote_descs = (a.get_xfer_descs(rows, "DRAM") for rows in (mine, theirs))
    to_register_descs = a.get_reg_descs(to_register, "DRAM")
    data = a.get_serialized_descs(descs)
    local = a.prep_xfer_dlist("", mine, "DRAM")
    remote = a.prep_xfer_dlist("b", theirs, "DRAM")
    chosen = np.random.default_rng(2).permutation(size)

    def make(indices: Any, local: Any = local, remote: Any = remote) -> Any:
        return a.make_prepped_xfer("READ", local, indices, remote, indices)

    case("get_xfer_descs, tuples", lambda _: a.get_xfer_descs(tuples, "DRAM"))
    case("get_xfer_descs, array", lambda _: a.get_xfer_descs(mine, "DRAM"))
    case("get_reg_descs, tuples", lambda _: a.get_reg_descs(to_register, "DRAM"))
    case("get_serialized_descs", lambda _: a.get_serialized_descs(descs))
    case("deserialize_descs", lambda _: a.deserialize_descs(data))
    for name, rows in (("array", mine), ("shuffled", shuffled), ("strided", strided)):
        case(f"prep_xfer_dlist, {name}", lambda _, r=rows: a.prep_xfer_dlist("", r, "DRAM"))
    case("prep_xfer_dlist, remote", lambda _: a.prep_xfer_dlist("b", theirs, "DRAM"))
    for name, indices in (
        ("int32", chosen.astype(np.int32)),
        ("int64", chosen),
        ("list", chosen.tolist()),
        ("in order", np.arange(size, dtype=np.int32)),
    ):
        case(f"make_prepped_xfer, {name}", lambda _, i=indices: make(i))
    case(
        "initialize_xfer",
        lambda _: a.initialize_xfer("READ", descs, remote_descs, "b"),
    )
    case("release_xfer_handle", a.release_xfer_handle, lambda: make(chosen))
    own = a.initialize_xfer("READ", descs, descs, "a")
    a.transfer(own)
    while a.check_xfer_state(own) != "DONE":
        pass
    case("check_xfer_state", lambda _: a.check_xfer_state(own))
    case("query_xfer_backend", lambda _: a.query_xfer_backend(own))
    case("check_remote_metadata", lambda _: a.check_remote_metadata("b", remote_descs))
    case("get_new_notifs", lambda _: a.get_new_notifs())
    started = time.thread_time()
    a.register_memory(to_register, "DRAM")
    middle = time.thread_time()
    a.deregister_memory(to_register_descs)
    ended = time.thread_time()
    result[f"register_memory {size}"] = (middle - started) * 1e6
    result[f"deregister_memory {size}"] = (ended - middle) * 1e6


def measure(package: str) -> dict[str, float]:
    api, bindings = (importlib.import_module(f"{package}.{name}") for name in ("_api", "_bindings"))
    sys.modules.setdefault("nixl._bindings", bindings)  # where NIXL's package unpickles from
    sys.modules.setdefault("nixl", importlib.import_module(package))
    config = api.nixl_agent_config(enable_prog_thread=False)
    a, b = (api.nixl_agent(name, config) for name in "ab")
    memory = [np.zeros(2 * SIZES[-1] * LENGTH, dtype=np.uint8) for _ in range(3)]
    for agent, pool in zip((a, b), memory, strict=False):
        agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    a.add_remote_agent(b.get_agent_metadata())
    result: dict[str, float] = {}

    for size in SIZES:
        measure_size(a, memory, size, result)
    return result


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
        return
    rounds = []
    for _ in range(int(sys.argv[1]) if sys.argv[1:] else 3):
        times = {}
        for name, package in PACKAGES.items():
            command = [sys.executable, "-m", "bench.nixl_api", "--measure", package]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            times[name] = json.loads(output.splitlines()[-1])
        rounds.append(times)
    print("| call | descriptors | NIXL | pynixlkv | ratio |\n| --- | --: | --: | --: | --: |")
    for key in rounds[0]["NIXL"]:
        call, _, size = key.rpartition(" ")
        theirs, ours = (statistics.median(r[name][key] for r in rounds) for name in PACKAGES)
        ratio = statistics.median(r["pynixlkv"][key] / r["NIXL"][key] for r in rounds)
        print(f"| {call} | {size} | {theirs:.1f} | {ours:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
