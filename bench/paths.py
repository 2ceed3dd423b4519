"""Scattered blocks between two processes of one host: ordinary memory, `allocate`, and TCP.

``python -m bench.paths`` moves 64 MiB in blocks of each size, compares every byte, and prints GB/s
beside what limits each path and beside NIXL's own Python API. Medians of interleaved rounds. Each
series has two processes of its own, which stand still while others have their turn: threads of NIXL
and of agents that wait would take their processors. In its turn each moves the bytes twice, and the
second time counts: after a rest the first copies run up to four times slower on a virtual machine,
whatever makes them.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

from bench.peers.paths import PathWorker, Peer
from pynixlkv.cli.bench.cases import TRANSPORTS, Case, Series
from pynixlkv.cli.bench.transfers import has_target
from pynixlkv.testing.process import ChildProcess

TOTAL_BYTES = 64 << 20
DIRECTIONS = ("get", "put")
SIZES = [4 << 10, 16 << 10, 64 << 10, 1 << 20]
ROUNDS = 7
AGENTS = (Peer.nixl_api, Series.nixl, Series.ucx)
# The first of each is the limit.
SERIES = {
    "cma": (
        Series.memcpy,
        Peer.two_copies,
        *AGENTS,
        Peer.two_threads,
        Peer.served,
        Series.ucx_allocated,
    ),
    "tcp": (Peer.socket, *AGENTS),
}
ENVIRONMENTS = {
    Peer.two_threads: {"PYNIXLKV_COPY_THREADS": "2"},
    Peer.served: TRANSPORTS["tcp"].environment,
    Series.ucx_allocated: TRANSPORTS["sysv"].environment,
}


class Pair:
    """The two processes of a series."""

    def __init__(self, stack, series, case):
        self.series = series
        # Ends of other series would have threads here.
        self.case = case = replace(case, series=(series,))
        environment = TRANSPORTS[case.transport].environment | ENVIRONMENTS.get(series, {})
        start = lambda name: stack.enter_context(ChildProcess(name, env=environment))  # noqa: E731
        self._target, self._initiator = start("target"), start("initiator")
        for process in (self._target, self._initiator):
            process.call(PathWorker, keep=True)
        stack.callback(self.signal, signal.SIGCONT)
        # CPUCLOCK of Linux's clock_getcpuclockid(3): the processor time of a process.
        self._target_clock = (~self._target.process.pid << 3) | 2
        self._has_target = series is not Peer.two_copies and has_target(series)
        offers = self._target.call("offer", case) if self._has_target else {}
        self._initiator.call("open", case, offers)
        self.signal(signal.SIGSTOP)

    def signal(self, number):
        for child in (self._target, self._initiator):
            os.kill(child.process.pid, number)

    def spread(self):
        """Put the two processes on processors of their own, and leave them free from there.

        Linux wakes both where the signal came from, and takes long to part them.
        """
        every = os.sched_getaffinity(0)
        for child, processor in zip((self._target, self._initiator), cycle(every)):
            for where in ({processor}, every):
                for thread in Path(f"/proc/{child.process.pid}/task").iterdir():
                    with contextlib.suppress(ProcessLookupError):  # it has ended
                        os.sched_setaffinity(int(thread.name), where)

    def run(self, *, compare):
        """Return the seconds of one run, and the processors that the target took meanwhile."""
        self.signal(signal.SIGCONT)
        self.spread()
        is_write = self.case.direction == "put"
        if self._has_target:
            self._target.call("serve", self.series, clear=compare and is_write)
        move = partial(self._initiator.call, "run", self.series)
        before = time.clock_gettime(self._target_clock)
        warm_up = move(compare=False)[0]
        seconds, wrong, error = move(compare=compare and not (is_write and self._has_target))
        busy = (time.clock_gettime(self._target_clock) - before) / (warm_up + seconds)
        if self._has_target:
            wrong += self._target.call("rest", compare=compare and is_write)
        self.signal(signal.SIGSTOP)
        if wrong or error:
            raise SystemExit(f"{self.case.describe()}, {self.series.value}: {wrong} wrong {error}")
        return seconds, busy


def measure(case, rounds):
    """Return for each series the seconds of each round, and the processors of the target."""
    with contextlib.ExitStack() as stack:
        pairs = [Pair(stack, series, case) for series in case.series]
        times = {series.value: [] for series in case.series}
        for number in range(rounds + 2):  # the first and the last compare, and are not timed
            for pair in pairs if number % 2 else pairs[::-1]:
                result = pair.run(compare=number in (0, rounds + 1))
                if 0 < number <= rounds:
                    times[pair.series.value].append(result)
    return times


def make_cases(transports, directions, sizes, total_bytes):
    return [
        Case(transport, direction, "scattered", size, total_bytes // size, 64, SERIES[transport])
        for transport in transports
        for direction in directions
        for size in sizes
    ]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=SERIES, action="append", help="default: all")
    parser.add_argument("--direction", choices=DIRECTIONS, action="append", help="default: both")
    parser.add_argument("--size", type=int, action="append", help="KiB; default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--mib", type=int, default=TOTAL_BYTES >> 20, help="bytes of a run, in MiB")
    parser.add_argument("--json", action="store_true", help="also print all times as JSON")
    options = parser.parse_args(arguments)
    sizes = [size << 10 for size in options.size or ()] or SIZES
    results = {}
    directions = options.direction or DIRECTIONS
    for case in make_cases(options.path or SERIES, directions, sizes, options.mib << 20):
        before = os.getloadavg()[0]
        measured = results[case.describe()] = measure(case, options.rounds)
        times = {name: [seconds for seconds, _ in rounds] for name, rounds in measured.items()}
        limit, nixl = (times[s.value] for s in (case.series[0], Peer.nixl_api))
        print(f"{case.describe()}; load {before:.0f}")
        for name, seconds in times.items():
            busy = median(busy for _, busy in measured[name])
            of_limit = median(a / b for a, b in zip(limit, seconds, strict=True))
            of_nixl = median(a / b for a, b in zip(nixl, seconds, strict=True))
            print(
                f"  {name:24}{case.num_bytes / median(seconds) / 1e9:6.2f} GB/s, best "
                f"{case.num_bytes / min(seconds) / 1e9:6.2f};{of_limit:6.2f} of the limit,"
                f"{of_nixl:6.2f} of NIXL's API; target's processors {busy:.2f}",
                flush=True,
            )
    if options.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
