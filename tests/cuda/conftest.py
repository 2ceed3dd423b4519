"""Fixtures for tests with the CUDA driver of tests/cuda_stub."""

import pytest


@pytest.fixture(scope="session")
def hosts():
    """Share processes between the remotes of many tests."""
    idle = []
    yield idle
    for host in idle:
        assert host.end() == 0
