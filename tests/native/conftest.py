"""Fixtures for tests with the real libraries."""

import pytest

from pynixlkv.nixl import Agent


@pytest.fixture
def make_agent():
    """Make agents with a UCX backend; closes them all, and expects nothing to run by then."""
    agents = []

    def make(name="a", config=None, backend="UCX", params=None):
        agent = Agent(name, config)
        agents.append(agent)
        if backend is not None:
            agent.create_backend(backend, params)
        return agent

    yield make
    for agent in agents:
        assert agent.close()
