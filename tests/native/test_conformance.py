"""The conformance suite on NIXL and UCX: our agent here, the other side in a process of its own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import WAIT_S, AgentConformance, HungPeerConformance
from pynixlkv.testing.remote import ProcessRemote
from pynixlkv.ucx import UcxAgent

if TYPE_CHECKING:
    from collections.abc import Callable

    from pynixlkv.agent import Agent


class _OnLibrary:
    make: Callable[..., Agent]

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
        return closing(ProcessRemote(self.make, hosts=hosts))


class TestNixlOverTcp(_OnLibrary, HungPeerConformance):
    """Emulated one-sided operations: the target's process must take part."""

    make = staticmethod(functools.partial(NixlAgent, backend_params={"engine_config": "TLS=tcp"}))


class TestNixlByDefault(_OnLibrary, AgentConformance):
    """Same-host copies through the kernel: the post does the whole copy."""

    make = staticmethod(functools.partial(NixlAgent))


class TestUcxOverTcp(_OnLibrary, HungPeerConformance):
    """Emulated one-sided operations: the target's process must take part."""

    make = staticmethod(functools.partial(UcxAgent, config={"TLS": "tcp"}))


class TestUcxByDefault(_OnLibrary, AgentConformance):
    """Same-host copies through the kernel: the post does the whole copy."""

    make = staticmethod(functools.partial(UcxAgent))


class TestUcxWithoutErrorHandling(_OnLibrary, AgentConformance):
    """The kernel notices a death when it is asked to copy memory of the dead process."""

    make = staticmethod(functools.partial(UcxAgent, error_handling=False))
