"""Move blocks between two agents of each transfer backend that is named, in that order."""

import sys

import numpy as np

import pynixlkv
from pynixlkv import KVCache, TransferPlan

assert "site-packages" in pynixlkv.__file__, pynixlkv.__file__


def make_agent(backend, name):
    if backend == "nixl":
        from pynixlkv.nixl import NixlAgent as Agent
    else:
        from pynixlkv.ucx import UcxAgent as Agent
    return Agent(name)


for number, backend in enumerate(sys.argv[1:]):
    theirs = np.random.default_rng(number).random((2, 32, 8, 16, 64)).astype("f2")
    ours = np.zeros((2, 32, 16, 8, 64), "f2")
    source = KVCache.from_tensors({"0": theirs}, axes="KBHND", kv_heads=8)
    target = KVCache.from_tensors({"0": ours}, axes="KBNHD", kv_heads=8)
    with make_agent(backend, f"{backend}-a") as a, make_agent(backend, f"{backend}-b") as b:
        a.register(source)
        b.register(target)
        peer = b.connect(a.hello(source))
        plan = TransferPlan(target.geometry, peer.geometry)
        b.read(peer, plan, [3, 4, 9], [10, 31, 5], notify=b"done").wait(timeout=20.0)
        (notification,) = a.notifications(timeout=20.0)
        assert notification.message == b"done"
    expected = np.zeros_like(ours)
    expected[:, [3, 4, 9]] = theirs[:, [10, 31, 5]].swapaxes(2, 3)
    assert np.array_equal(ours, expected)
    print(f"{backend}: {np.count_nonzero(ours)} elements moved")
