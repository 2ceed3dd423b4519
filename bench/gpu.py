"""Blocks between two processes whose memory is on one GPU, or on the GPU and the host.

``python -m bench.gpu`` compares every byte; the limit is a copy of the same blocks inside the GPU.
Each series is measured by itself, next to that copy: one that does not start hides no other.
"""

import argparse
import json
import sys

from rich.console import Console

from bench.peers.device import DeviceCase, DeviceWorker
from pynixlkv.cli.bench.cases import Series
from pynixlkv.cli.bench.run import run_cases
from pynixlkv.cli.render import show_bench
from pynixlkv.testing.process import RunError

TOTAL_BYTES = 64 << 20
SIZES = [16 << 10, 64 << 10, 1 << 20]
SERIES = (Series.binding, Series.ucx, Series.nixl)
ROUNDS = 5
TIMEOUT_S = 100


def make_cases(device, series, total_bytes=TOTAL_BYTES, sizes=SIZES):
    """Return the cases of a device, as in `DeviceCase`; with "cpu" they run anywhere."""
    transport = "cma" if device == "cpu" else "cuda_ipc"
    return [
        DeviceCase(
            transport, direction, "scattered", size, total_bytes // size, 64, series,
            initiator_device=initiator, target_device=target,
        )
        for direction, initiator, target in [
            ("get", device, device), ("put", device, device),
            ("get", None, device), ("put", device, None),
        ]
        for size in sizes
    ]  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="a device of torch (default: cuda:0)")
    parser.add_argument("--quick", action="store_true", help="a few cases, in seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    size = {"total_bytes": 4 << 20, "sizes": [64 << 10]} if options.quick else {}
    console = Console(width=100)
    results = {}
    is_ok = True
    for series in SERIES[-1:] if options.quick else SERIES:
        try:
            report = run_cases(
                make_cases(options.device, (Series.memcpy, series), **size),
                *((2, 10 * TIMEOUT_S) if options.quick else (ROUNDS, TIMEOUT_S)),
                lambda label, done, total: print(f"{done}/{total} {label}", file=sys.stderr),
                worker=DeviceWorker,
            )  # fmt: skip
        except RunError as error:
            is_ok = False
            results[series.value] = {"ok": False, "error": str(error)}
            print(f"FAILED: {series.value}: {error}", file=sys.stderr)
            continue
        is_ok = is_ok and report.ok
        results[series.value] = report.as_dict()
        if not options.json:
            show_bench(report, console)
    if options.json:
        print(json.dumps(results))
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
