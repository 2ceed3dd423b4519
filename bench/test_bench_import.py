"""How long ``import pynixlkv`` takes in a fresh process that has numpy already."""

import statistics
import subprocess
import sys

PROBE = """
import time
import numpy
started = time.perf_counter_ns()
import pynixlkv
print(time.perf_counter_ns() - started)
"""
LIMIT_S = 0.060


def test_import(benchmark):
    seconds = []

    def import_in_fresh_process():
        output = subprocess.check_output([sys.executable, "-c", PROBE], timeout=60)
        seconds.append(int(output) * 1e-9)

    benchmark.pedantic(import_in_fresh_process, rounds=9, warmup_rounds=1)
    benchmark.extra_info["import_s"] = statistics.median(seconds)
    benchmark.extra_info["import_limit_s"] = LIMIT_S
    assert all(each > 0 for each in seconds)
