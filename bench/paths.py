"""Scattered blocks between two processes of one host: ordinary memory, `allocate`, and TCP.

``python -m bench.paths`` moves 64 MiB in blocks of each size, compares every byte, and prints GB/s
beside what limits each path and beside NIXL's own Python API. Medians of 7 interleaved rounds.
"""

import argparse
import json
import sys

from rich.console import Console

from bench.peers.paths import PathWorker, Peer
from pynixlkv.cli.bench.cases import Case, Series
from pynixlkv.cli.bench.run import run_cases
from pynixlkv.cli.render import show_bench

TOTAL_BYTES = 64 << 20
SIZES = [4 << 10, 16 << 10, 64 << 10, 1 << 20]
ROUNDS = 7
TIMEOUT_S = 1000
AGENTS = (Peer.nixl_api, Series.nixl, Series.ucx)
# The first of each is the limit.
SERIES = {
    "cma": (Series.memcpy, *AGENTS, Series.ucx_allocated),
    "tcp": (Peer.socket, *AGENTS),
}


def make_cases(transports=tuple(SERIES), sizes=tuple(SIZES), total_bytes=TOTAL_BYTES):
    return [
        Case(transport, direction, "scattered", size, total_bytes // size, 64, SERIES[transport])
        for transport in transports
        for direction in ("get", "put")
        for size in sizes
    ]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=SERIES, action="append", help="default: all")
    parser.add_argument("--size", type=int, action="append", help="KiB; default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    sizes = [size << 10 for size in options.size or ()] or SIZES
    report = run_cases(
        make_cases(options.path or tuple(SERIES), sizes), options.rounds, TIMEOUT_S,
        lambda label, done, total: print(f"{done}/{total} {label}", file=sys.stderr),
        worker=PathWorker,
    )  # fmt: skip
    if options.json:
        print(json.dumps(report.as_dict()))
    else:
        show_bench(report, Console(width=100))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
