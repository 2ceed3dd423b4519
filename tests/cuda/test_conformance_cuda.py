"""The conformance suite over device memory: of one card, of unlike cards, and of the host."""

from __future__ import annotations

import functools

import pytest
from cuda_memory import DevicePool

from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import WAIT_S, AgentConformance, HungPeerConformance
from pynixlkv.testing.remote import Pool, ProcessRemote
from pynixlkv.ucx import UcxAgent


class _OnCards:
    make = None
    make_pool = DevicePool
    make_remote_pool = DevicePool

    @pytest.fixture
    def make_agent(self):
        made = []

        def make(name, **options):
            made.append(self.make(name, **options))
            return made[-1]

        yield make
        for agent in made:
            assert agent.close(WAIT_S)

    @pytest.fixture
    def remote(self, closing, hosts):
        return closing(ProcessRemote(self.make, make_pool=self.make_remote_pool, hosts=hosts))


class TestUcx(_OnCards, AgentConformance):
    """From card to card by cuda_ipc."""

    make = staticmethod(functools.partial(UcxAgent))


class TestUcxThroughTheHost(_OnCards, HungPeerConformance):
    """Between hosts without RDMA: cuda_copy on both sides, TCP between."""

    make = staticmethod(functools.partial(UcxAgent, config={"TLS": "tcp,cuda_copy"}))


class TestUcxFromTheHost(_OnCards, AgentConformance):
    """Host memory here, device memory at the peer."""

    make = staticmethod(functools.partial(UcxAgent))
    make_pool = Pool


class TestUcxToTheHost(_OnCards, AgentConformance):
    """Device memory here, host memory at the peer."""

    make = staticmethod(functools.partial(UcxAgent))
    make_remote_pool = Pool


class TestNixl(_OnCards, AgentConformance):
    """From card to card by cuda_ipc."""

    make = staticmethod(functools.partial(NixlAgent))


class TestNixlThroughTheHost(_OnCards, HungPeerConformance):
    """Between hosts without RDMA."""

    make = staticmethod(
        functools.partial(NixlAgent, backend_params={"engine_config": "TLS=^cuda_ipc"})
    )
