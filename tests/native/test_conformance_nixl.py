"""The conformance suite on NIXL: our agent here, the other side in a process of its own."""

from __future__ import annotations

import functools

import pytest

from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import AgentConformance, HungPeerConformance
from pynixlkv.testing.remote import ProcessRemote


class _OnNixl:
    backend_params: dict[str, str]

    @property
    def make(self):
        return functools.partial(NixlAgent, backend_params=self.backend_params)

    @pytest.fixture
    def make_agent(self, closing):
        return lambda name, **options: closing(self.make(name, **options))

    @pytest.fixture
    def remote(self, closing, hosts):
        return closing(ProcessRemote(self.make, hosts=hosts))


class TestNixlOverTcp(_OnNixl, HungPeerConformance):
    """Emulated one-sided operations: the target's process must take part."""

    backend_params = {"engine_config": "TLS=tcp"}  # noqa: RUF012


class TestNixlByDefault(_OnNixl, AgentConformance):
    """Same-host copies through the kernel: the post does the whole copy."""

    backend_params = {}  # noqa: RUF012
