"""The conformance suite on NIXL: our agent here, the other side in a process of its own."""

from __future__ import annotations

import functools

import pytest

from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import AgentConformance, HungPeerConformance
from pynixlkv.testing.remote import ProcessRemote


class _OnNixl:
    backend_params: dict[str, str]

    @pytest.fixture
    def make_agent(self):
        made = []

        def make(name, **options):
            made.append(NixlAgent(name, backend_params=self.backend_params, **options))
            return made[-1]

        yield make
        for agent in made:
            agent.close()

    @pytest.fixture
    def remote(self, hosts):
        make = functools.partial(NixlAgent, backend_params=self.backend_params)
        remote = ProcessRemote(make, hosts=hosts)
        yield remote
        remote.close()


class TestNixlOverTcp(_OnNixl, HungPeerConformance):
    """Emulated one-sided operations: the target's process must take part."""

    backend_params = {"engine_config": "TLS=tcp"}  # noqa: RUF012


class TestNixlByDefault(_OnNixl, AgentConformance):
    """Same-host copies through the kernel: the post does the whole copy."""

    backend_params = {}  # noqa: RUF012
