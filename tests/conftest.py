"""Settings and fixtures that all tests share."""

import gc
import sys

import hypothesis
import pytest
from peers import Peer

# Examples may take long under sanitizers, coverage and load; the test's own limit still holds.
hypothesis.settings.register_profile("pynixlkv", deadline=None)
hypothesis.settings.load_profile("pynixlkv")


def live_counts():
    """Live native owners; nothing if no test has loaded the native module yet."""
    native = sys.modules.get("pynixlkv._native")
    return {} if native is None else {k: n for k, n in native.live_counts().items() if n}


def leaked_since(before):
    """Kinds of owners that there are more of than before, and how many."""
    return {name: n for name, n in live_counts().items() if n > before.get(name, 0)}


@pytest.fixture(autouse=True)
def no_native_leaks(request):
    """Every native owner that a test makes is gone after it."""
    failed_before = request.session.testsfailed
    before = live_counts()
    yield
    if request.session.testsfailed == failed_before and request.node.funcargs is not None:
        request.node.funcargs.clear()  # pytest holds the values of fixtures until later
        if leaked_since(before):
            gc.collect()  # cycles go later; collecting after every test would take most of the time
        assert not leaked_since(before)


@pytest.fixture
def start_peer():
    """Start functions in other processes; kills those that are left."""
    peers = []

    def start(function, *args, **options):
        peers.append(Peer(function, *args, **options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()
