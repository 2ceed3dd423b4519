"""``python -m bench.peer_costs``: what each peer costs an agent, with real agents in few processes.

One process has the agent that is measured, and connects to agents in others, one after another.
The others stand still except the one whose agents are connected to: idle agents take time, too, and
in a fleet they take that of other hosts. Prints a line for each number of peers: memory,
descriptors and threads of a peer; the time of a core that the idle agents of one process take; and
the medians over the first and the last peers of the time to connect, of the first read and this
process's time of a core for it, and of a message with its answer.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from functools import partial

import numpy as np
import psutil

from pynixlkv import KVCache, TransferPlan
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.process import ChildProcess
from pynixlkv.ucx import UcxAgent

OWNERS = f"bench.peer_costs:Owners:{__file__}"
_LAST = 16
_TIMEOUT_S = 60.0
_IDLE_S = 2.0


def make_agent(backend, transport, name):
    """Make an agent; returns it and a cache that is registered with it."""
    if backend == "nixl":
        params = {"engine_config": "TLS=tcp"} if transport == "tcp" else {}
        agent = NixlAgent(name, backend_params=params)
    else:
        agent = UcxAgent(name, config={"TLS": "tcp"} if transport == "tcp" else {})
    cache = KVCache.from_tensors({"l": np.ones((4, 16384), np.uint8)}, axes="BD", kv_heads=None)
    agent.register(cache)
    return agent, cache


class Owners:
    """Agents of one process, which answer messages."""

    def __init__(self, backend, transport, first, count):
        made = [make_agent(backend, transport, f"o{first + i}") for i in range(count)]
        self.agents = [agent for agent, _ in made]
        self._hellos = [agent.hello(cache) for agent, cache in made]
        self._peers = []

    def hellos(self):
        """Return what a peer needs of each agent."""
        return self._hellos

    def attach(self, number, hello):
        """Let an agent connect to the one that is measured."""
        self._peers.append(self.agents[number].connect(hello))
        self._last = self.agents[number]

    def idle(self):
        """Answer the messages that have come to the last one."""
        for note in self._last.notifications() if self._peers else ():
            self._last.notify(self._peers[-1], note.message)
        return 0.0005

    def close(self):
        """End all agents."""
        for agent in self.agents:
            agent.close()


def raise_limit():
    """Allow as many descriptors as the system does."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def usage():
    """Return memory, descriptors and threads of this process."""
    process = psutil.Process()
    return process.memory_full_info().uss, process.num_fds(), process.num_threads()


def core_time(pid):
    """Return the seconds that the agents' threads of a process have run."""
    threads = psutil.Process(pid).threads()
    return sum(each.user_time + each.system_time for each in threads if each.id != pid)


def contact(agent, cache, hello, attach):
    """Connect to a peer; returns the times of the parts."""
    began = time.perf_counter()
    peer = agent.connect(hello)
    connected, used = time.perf_counter(), time.process_time()
    plan = TransferPlan(cache.geometry, peer.geometry)
    agent.read(peer, plan, [0, 1], [2, 3], timeout=_TIMEOUT_S).wait()
    read, used = time.perf_counter(), time.process_time() - used
    attach()
    sent = time.perf_counter()
    agent.notify(peer, b"x")
    if not agent.notifications(_TIMEOUT_S):
        raise TimeoutError(f"{peer.name} has not answered a message")
    return connected - began, read - connected, used, time.perf_counter() - sent


def measure(backend, transport, num_peers, num_processes):
    """Connect to so many peers; returns the costs of one."""
    agent, cache = make_agent(backend, transport, "measured")
    owners = [ChildProcess(f"owners {i}") for i in range(min(num_processes, num_peers))]
    try:
        per = -(-num_peers // len(owners))
        counts = [min(per, num_peers - i * per) for i in range(len(owners))]
        hellos = []
        for i, (owner, count) in enumerate(zip(owners, counts, strict=True)):
            owner.call(OWNERS, backend, transport, i * per, count, keep=True)
            hellos.append(owner.call("hellos"))
            owner.stop()
        mine, before = agent.hello(cache), usage()
        times = {"connect": [], "first read": [], "core of the read": [], "message": []}
        for owner, its in zip(owners, hellos, strict=True):
            owner.resume()
            for number, hello in enumerate(its):
                attach = partial(owner.call, "attach", number, mine)
                spent = contact(agent, cache, hello, attach)
                for values, seconds in zip(times.values(), spent, strict=True):
                    values.append(seconds)
            used = core_time(owner.process.pid)
            time.sleep(_IDLE_S)
            idle = (core_time(owner.process.pid) - used) / _IDLE_S / len(its)
            owner.stop()
        memory, fds, threads = (b - a for a, b in zip(before, usage(), strict=True))
        late = {
            f"{name} ({when}), ms": 1e3 * statistics.median(each[part])
            for name, each in times.items()
            for when, part in (
                (("first", slice(1, 1 + _LAST)), ("last", slice(-_LAST, None)))
                if len(each) > _LAST
                else (("all", slice(None)),)
            )
        }
        return {
            "KiB": memory / num_peers / 1024,
            "descriptors": fds / num_peers,
            "threads": threads / num_peers,
            "% of a core for an idle agent": 100 * idle,
            **late,
        }
    finally:
        for owner in owners:
            owner.kill()
        agent.close()


def main():
    """Print the table."""
    raise_limit()  # of the owners as well, who inherit it
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 16, 128, 1000])
    parser.add_argument("--backends", nargs="+", default=["ucx", "nixl"])
    parser.add_argument("--transport", default="", help="tcp, or what the library chooses")
    parser.add_argument("--processes", type=int, default=16, help="of the peers")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for backend in given.backends:
        for num_peers in given.peers:
            found = measure(backend, given.transport, num_peers, given.processes)
            listed = ", ".join(f"{value:.2f} {name}" for name, value in found.items())
            where = f"{backend} {given.transport or 'default'}, {num_peers} peers"
            print(f"{where}: {listed}", flush=True)


if __name__ == "__main__":
    main()
