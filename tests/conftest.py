"""Settings and fixtures that all tests share."""

import contextlib
import gc
import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import pytest
from peers import Peer

# Examples may take long under sanitizers, coverage and load; the test's own limit still holds.
hypothesis.settings.register_profile("pynixlkv", deadline=None)
hypothesis.settings.load_profile("pynixlkv")


# Folders with an environment of their own: what is missing elsewhere, and the target that has it.
ENVIRONMENTS = {"vllm": ("vllm", "make test-vllm"), "wheel": ("elftools", "make test-wheel")}
LEFT_OUT = {
    folder: f"tests/{folder} not collected: {module} is not installed; run {target}"
    for folder, (module, target) in ENVIRONMENTS.items()
    if importlib.util.find_spec(module) is None
}
has_card = "PYNIXLKV_TEST_CARD" in os.environ  # bench.gpu_report runs the tests
if not has_card and "cuda_stub" not in os.environ.get("LD_LIBRARY_PATH", ""):
    LEFT_OUT["cuda"] = (
        "tests/cuda not collected: needs the driver of tests/cuda_stub; run make test"
    )


def pytest_ignore_collect(collection_path):
    """Leave out the folders that cannot be imported here."""
    here = Path(__file__).parent
    return (
        True
        if {here / folder for folder in LEFT_OUT} & {collection_path, *collection_path.parents}
        else None
    )


def pytest_terminal_summary(terminalreporter, config):
    """Say which folders were left out, and why, if they were asked for."""
    asked = {Path(argument).resolve() for argument in config.args}
    for folder, reason in LEFT_OUT.items():
        if asked & {Path(__file__).parent, Path(__file__).parent / folder}:
            terminalreporter.line(f"SKIPPED {reason}")


@pytest.fixture(scope="session")
def hosts():
    """Share processes between the remotes of many tests."""
    idle = []
    yield idle
    for host in idle:
        assert host.end() == 0


def live_counts():
    """Live native owners; empty if the native module is not loaded."""
    native = sys.modules.get("pynixlkv._native")
    return {} if native is None else {k: n for k, n in native.live_counts().items() if n}


def leaked_since(before):
    """Kinds of owners whose number has grown."""
    return {name: n for name, n in live_counts().items() if n > before.get(name, 0)}


@pytest.fixture(autouse=True)
def no_native_leaks(request):
    """Fail if a native owner outlives the test that made it."""
    failed_before = request.session.testsfailed
    before = live_counts()
    yield
    if request.session.testsfailed == failed_before and request.node.funcargs is not None:
        request.node.funcargs.clear()  # pytest holds the values of fixtures until later
        if leaked_since(before):
            gc.collect()  # cycles go later; collecting after each test is slow
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


@pytest.fixture
def closing():
    """Return a function that takes what the test makes, to close it after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda made: stack.enter_context(contextlib.closing(made))
