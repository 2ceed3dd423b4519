"""The conformance suite on the in-process fake."""

from __future__ import annotations

import pytest

from pynixlkv.testing import FakeAgent, FakeNetwork
from pynixlkv.testing.conformance import HungPeerConformance
from pynixlkv.testing.remote import LocalRemote


class TestFakeAgent(HungPeerConformance):
    @pytest.fixture
    def network(self):
        return FakeNetwork()

    @pytest.fixture
    def make_agent(self, network):
        made = []

        def make(name, **options):
            made.append(FakeAgent(name, network, **options))
            return made[-1]

        yield make
        for agent in made:
            agent.close()

    @pytest.fixture
    def remote(self, network):
        remote = LocalRemote(network)
        yield remote
        remote.close()
