"""A process that ends with threads inside native calls, and its exit status."""

import subprocess
import sys
import textwrap

import pytest

SETUP = """
import functools, sys, threading, time
import numpy as np
from pynixlkv import KVCache
from pynixlkv.connector import ConnectorWorker
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing import FakeAgent, FakeNetwork
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.remote import ProcessRemote
from pynixlkv.ucx import UcxAgent

inside = threading.Semaphore(0)

def behind(call):
    def run():
        inside.release()
        call()
    threading.Thread(target=run, daemon=True).start()

def transfer_that_hangs():
    network = FakeNetwork()
    here, there = FakeAgent("here", network), FakeAgent("there", network)
    memory = np.zeros((2, 64), np.uint8)
    here.register(memory[0])
    there.register(memory[1])
    network.pause("there")
    peer = here.connect(there.hello())
    ends = [rows(part.ctypes.data, (0, 64)) for part in memory]
    return here.read_descriptors(peer, *ends)
"""

CALLS = {
    "a wait for notifications": "behind(lambda: UcxAgent('a').notifications(3600))",
    "a loop over notifications": """
        agent = UcxAgent('a')
        def loop():
            while True:
                agent.notifications(0.0001)
        behind(loop)
    """,
    "a wait for activity": "behind(lambda: NixlAgent('a').wait_activity(0, 3600))",
    "a wait for a transfer": "behind(transfer_that_hangs().wait)",
    "a wait for quiet": "t = transfer_that_hangs(); behind(lambda: t.wait_quiet(3600))",
    "calls that are short": """
        agent = UcxAgent('a')
        def loop():
            while True:
                agent.hello()
        for _ in range(4):
            behind(loop)
    """,
    "a connector's worker": """
        array = np.zeros((2, 8, 4, 16, 8), np.float16)
        cache = KVCache.from_tensors({"0": array}, axes="KBHND", kv_heads=4)
        for kind in (NixlAgent, UcxAgent):
            worker = ConnectorWorker(kind("a"), engine_id="e")
            worker.register_kv_caches(cache)
        inside.release()
    """,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("ending", ["sys.exit(7)", "raise SystemExit(7)"])
def test_a_process_keeps_its_exit_status_with_a_thread_in(call, ending):
    code = "\n".join([SETUP, textwrap.dedent(call), "inside.acquire()", ending])
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 7, done.stderr
        assert "terminate" not in done.stderr


def test_agents_with_reads_from_a_stopped_peer_do_not_add_up_at_exit():
    """One after the other, 16 agents would take 16 times as long as one."""
    code = SETUP + textwrap.dedent("""
        import atexit
        from pynixlkv import agent as module
        make = functools.partial(UcxAgent, config={"TLS": "tcp"})
        remote = ProcessRemote(make)
        there, hello = remote.address(), remote.hello()
        memory = np.zeros((16, 4096), np.uint8)
        agents = [make(f"a{i}") for i in range(16)]
        for agent, row in zip(agents, memory):
            agent.register(row)
            peer = agent.connect(hello)
            ends = rows(row.ctypes.data, (0, 4096)), rows(there, (0, 4096))
            agent.read_descriptors(peer, *ends).wait(60)
            remote.pause()
            agent.read_descriptors(peer, *ends, timeout=3600)
            remote.resume()
        remote.pause()
        waited = []
        class Spy:
            def __init__(self, native):
                self.native = native
            def close(self, timeout):
                waited.append(timeout)
                return self.native.close(timeout)
            def stop(self, timeout):
                waited.append(timeout)
                self.native.stop(timeout)
        real = [agent._native for agent in agents]
        for agent in agents:
            agent._native = Spy(agent._native)
        module._keeper.stop_all()
        for agent, native in zip(agents, real):
            agent._native = native
        print(sum(waited))
        remote.close()
        sys.exit(7)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 7, done.stderr
