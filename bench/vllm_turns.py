"""The time to the first token of a conversation's second turn, with and without its hand-off.

    make bench-vllm

A prefill and a decode engine of a small model on this machine's CPU, with PyNixlKVConnector. Half
of the conversations hand the blocks of the first answer back to prefill, for the others prefill
computes the answer's tokens again; the two kinds take turns. In both, prefill has the first prompt
in its own prefix cache, and decode has both in its.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).parents[1] / "tests" / part) for part in ("support", "vllm/support")
]

import connectors  # noqa: E402
from engines import PREFILL_PARAMS, Cluster, Engine, make_model, make_prompts  # noqa: E402

PROMPT, ANSWER, NEW, ROUNDS = 300, 600, 20, 16
OPTIONS = {"bidirectional_kv_xfer": True}
TRANSPORTS = {"NIXL": connectors.OURS, "UCX": connectors.UCX}


def second_turn(
    prefill: Engine, decode: Engine, prompt: list[int], params: dict[str, Any]
) -> tuple[float, float]:
    """Return the seconds that prefill and decode take to the first token."""
    first = prefill.generate(prompt, max_tokens=1, params=params)
    answer = decode.generate(prompt, max_tokens=1, params=first.params)
    assert answer.finish == "length", answer
    return first.seconds, answer.seconds


def measure(prefill: Engine, decode: Engine) -> dict[str, list[tuple[float, float]]]:
    prompts = make_prompts([PROMPT] * ROUNDS, 12)
    news = make_prompts([NEW] * ROUNDS, 13)
    decode.start_generating(prompts, ANSWER, [prefill.prefill(prompt) for prompt in prompts])
    found: dict[str, list[tuple[float, float]]] = {"handed over": [], "computed again": []}
    for i, answer in enumerate(decode.answers(600.0)):
        kind = "computed again" if i % 2 else "handed over"
        params = PREFILL_PARAMS if i % 2 else answer.params
        assert params is not None
        prompt = [*prompts[i], *answer.tokens, *news[i]]
        found[kind].append(second_turn(prefill, decode, prompt, params))
    return {kind: times[1:] for kind, times in found.items()}  # the first contact apart


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pynixlkv-vllm-"))
    cluster = Cluster(make_model("llama", folder / "model"), folder)
    tokens = f"{PROMPT} + {ANSWER} + {NEW} tokens"
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; {tokens}\n")
    print("| | second turn | prefill | decode | to the first token (quartiles apart) |")
    print("| --- | --- | --- | --- | --- |")
    try:
        for name, connector in TRANSPORTS.items():
            connector = connector.with_(extra=OPTIONS, policy="recompute")
            prefill, decode = (
                cluster.start(role, connector, block_size=32) for role in ("prefill", "decode")
            )
            for kind, times in measure(prefill, decode).items():
                parts = [statistics.median(part) * 1e3 for part in zip(*times, strict=True)]
                totals = [sum(each) * 1e3 for each in times]
                low, middle, high = statistics.quantiles(totals, n=4)
                print(
                    f"| {name} | {kind} | {parts[0]:.0f} ms | {parts[1]:.0f} ms | "
                    f"{middle:.0f} ms ({high - low:.0f}) |",
                    flush=True,
                )
            decode.close()
            prefill.close()
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
