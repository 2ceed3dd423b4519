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
    def make_agent(self, closing, network):
        return lambda name, **options: closing(FakeAgent(name, network, **options))

    @pytest.fixture
    def remote(self, closing, network):
        return closing(LocalRemote(network))
