"""The conformance suite on NIXL and UCX: our agent here, the other side in a process of its own."""

from __future__ import annotations

import functools

from on_library import OnLibrary

from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import AgentConformance, HungPeerConformance
from pynixlkv.ucx import UcxAgent


class TestNixlOverTcp(OnLibrary, HungPeerConformance):
    """Emulated one-sided operations: the target's process must take part."""

    make = staticmethod(functools.partial(NixlAgent, backend_params={"engine_config": "TLS=tcp"}))


class TestNixlByDefault(OnLibrary, AgentConformance):
    """Same-host copies through the kernel: the post does the whole copy."""

    make = staticmethod(functools.partial(NixlAgent))


class TestUcxOverTcp(OnLibrary, HungPeerConformance):
    """Emulated one-sided operations: the target's process must take part."""

    make = staticmethod(functools.partial(UcxAgent, config={"TLS": "tcp"}))


class TestUcxByDefault(OnLibrary, AgentConformance):
    """Same-host copies through the kernel: the post does the whole copy."""

    make = staticmethod(functools.partial(UcxAgent))


class TestUcxWithoutErrorHandling(OnLibrary, AgentConformance):
    """The kernel notices a death when it is asked to copy memory of the dead process."""

    make = staticmethod(functools.partial(UcxAgent, error_handling=False))


class TestUcxWithSeveralThreads(OnLibrary, AgentConformance):
    """Several threads copy each transfer."""

    make = staticmethod(functools.partial(UcxAgent, copy_threads=3))
