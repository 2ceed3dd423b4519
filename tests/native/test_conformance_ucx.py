"""The conformance suite on UCX: our agent here, the other side in a process of its own."""

from __future__ import annotations

import functools

import pytest

from pynixlkv.testing.conformance import AgentConformance, HungPeerConformance
from pynixlkv.testing.remote import ProcessRemote
from pynixlkv.ucx import UcxAgent


class _OnUcx:
    config: dict[str, str]
    error_handling = True

    @property
    def make(self):
        return functools.partial(UcxAgent, config=self.config, error_handling=self.error_handling)

    @pytest.fixture
    def make_agent(self, closing):
        return lambda name, **options: closing(self.make(name, **options))

    @pytest.fixture
    def remote(self, closing, hosts):
        return closing(ProcessRemote(self.make, hosts=hosts))


class TestUcxOverTcp(_OnUcx, HungPeerConformance):
    """Emulated one-sided operations: the target's process must take part."""

    config = {"TLS": "tcp"}  # noqa: RUF012


class TestUcxByDefault(_OnUcx, AgentConformance):
    """Same-host copies through the kernel: the post does the whole copy."""

    config = {}  # noqa: RUF012


class TestUcxWithoutErrorHandling(_OnUcx, AgentConformance):
    """The kernel notices a death when it is asked to copy memory of the dead process."""

    config = {}  # noqa: RUF012
    error_handling = False
