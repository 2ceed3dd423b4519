"""vLLM's NixlConnector and PyNixlKVConnector between the same two engines, in one run.

    make bench-vllm

For each connector: a prefill and a decode engine of a small model on this machine's CPU. First
contact is the first request that is handed over; hand-off is the time that decode takes for one
token of a prompt that prefill has computed, beside the time of a prompt that it computes itself;
idle CPU is what all processes of the decode engine use while nothing is asked of it, and CPU with a
lease what those of the prefill engine use while a prompt waits for its reader.

On the CPU, NixlConnector pins the main thread of each worker to the last core, where the threads
that it starts later stay as well. "Not pinned" is the same without `os.sched_setaffinity`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parents[1] / "tests" / part) for part in ("support", "vllm/support")
]

import connectors  # noqa: E402
from engines import Cluster, Connector, Engine, make_model, make_prompts  # noqa: E402

PROMPT, ROUNDS, IDLE_S = 300, 12, 5.0
CONNECTORS = {
    "NixlConnector": connectors.NIXL,
    "NixlConnector, not pinned": connectors.NIXL,
    "NixlConnector on pynixlkv.nixl_api": connectors.NIXL_API,
    "NixlConnector on pynixlkv.nixl_api, not pinned": connectors.NIXL_API,
    "PyNixlKVConnector, NIXL": connectors.OURS,
    "PyNixlKVConnector, UCX": connectors.UCX,
}
COUNTERS = ("vllm:pynixlkv_bytes_transferred", "vllm:nixl_bytes_transferred")


def cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def cores(engine: Engine) -> float:
    """Return how many cores all processes of an engine use while nothing is asked of it."""
    pids = engine.pids()
    before, began = cpu_seconds(pids), time.monotonic()
    time.sleep(IDLE_S)
    return (cpu_seconds(pids) - before) / (time.monotonic() - began)


def measure(cluster: Cluster, connector: Connector) -> dict[str, float]:
    prefill, decode = cluster.prefill(connector), cluster.decode(connector)
    prompts = make_prompts([PROMPT] * (2 * ROUNDS + 4), 11)

    def fetch(prompt: list[int]) -> float:
        params = prefill.prefill(prompt)
        answer = decode.generate(prompt, max_tokens=1, params=params)
        assert answer.finish == "length", answer
        return answer.seconds

    # An engine's first step takes long whatever it does.
    for engine in (prefill, decode):
        engine.generate(prompts.pop(), max_tokens=1)
    first = fetch(prompts.pop())
    fetched, computed = [], []
    for _ in range(ROUNDS):
        fetched.append(fetch(prompts.pop()))
        computed.append(decode.generate(prompts.pop(), max_tokens=1).seconds)
    metrics = decode.metrics()
    moved = next(metrics[name] for name in COUNTERS if name in metrics)
    idle = cores(decode)
    prefill.prefill(prompts.pop())
    held = cores(prefill)
    decode.close()
    prefill.close()
    quartiles = statistics.quantiles(fetched, n=4)
    return {
        "first": first * 1e3,
        "median": statistics.median(fetched) * 1e3,
        "spread": (quartiles[2] - quartiles[0]) * 1e3,
        "computed": statistics.median(computed) * 1e3,
        "bytes": moved / (ROUNDS + 1),
        "idle": idle,
        "held": held,
    }


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pynixlkv-vllm-"))
    cluster = Cluster(make_model("llama", folder / "model"), folder)
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; prompt {PROMPT} tokens\n")
    print(
        "| | first contact | hand-off, median (quartiles apart) | computed instead | bytes "
        "| idle CPU | CPU with a lease |"
    )
    print("| --- " * 7 + "|")
    unpinned = folder / "unpinned"
    unpinned.mkdir()
    (unpinned / "sitecustomize.py").write_text(
        "import os\n\nos.sched_setaffinity = lambda pid, mask: None\n"
    )
    try:
        for name, connector in CONNECTORS.items():
            if name.endswith("not pinned"):
                connector = connector.with_(env={"PYTHONPATH": str(unpinned)})
            found = measure(cluster, connector)
            print(
                f"| {name} | {found['first']:.0f} ms | {found['median']:.0f} ms "
                f"({found['spread']:.0f}) | {found['computed']:.0f} ms | {found['bytes']:,.0f} | "
                f"{found['idle']:.2f} cores | {found['held']:.2f} cores |",
                flush=True,
            )
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
