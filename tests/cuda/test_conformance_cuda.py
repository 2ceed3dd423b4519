"""The conformance suite over device memory: of one card, of unlike cards, and of the host."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from cuda_memory import DevicePool
from on_library import OnLibrary

from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import AgentConformance, HungPeerConformance
from pynixlkv.testing.remote import Pool
from pynixlkv.ucx import UcxAgent

if TYPE_CHECKING:
    from collections.abc import Callable


class _OnCards(OnLibrary):
    make_pool: Callable[[str], Pool] = DevicePool
    make_remote_pool: Callable[[str], Pool] = DevicePool


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


class TestNixlFromTheHost(_OnCards, AgentConformance):
    """Host memory here, where NIXL's progress thread runs, and device memory at the peer."""

    make = staticmethod(functools.partial(NixlAgent))
    make_pool = Pool


class TestNixlToTheHost(_OnCards, AgentConformance):
    """Device memory here, host memory at the peer."""

    make = staticmethod(functools.partial(NixlAgent))
    make_remote_pool = Pool


class TestNixlThroughTheHost(_OnCards, HungPeerConformance):
    """Between hosts without RDMA."""

    make = staticmethod(
        functools.partial(NixlAgent, backend_params={"engine_config": "TLS=^cuda_ipc"})
    )
