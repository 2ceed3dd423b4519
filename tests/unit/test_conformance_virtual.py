"""The conformance suite on the agents of virtual time, as far as it applies to them."""

from __future__ import annotations

import pytest

from pynixlkv.testing.conformance import HungPeerConformance
from pynixlkv.testing.fleet.virtual import Events, Host, Link, Network, VirtualAgent
from pynixlkv.testing.remote import Remote

ONE_THREAD = "virtual time has one thread"
NO_LOOP = "virtual time wakes no event loop"
ONLY_PLANS = "rows of a caller are checked by native code; the simulator moves plans"
DOES_NOT_APPLY = {
    "test_a_large_transfer_is_cut_and_arrives_whole": "virtual transfers have no batches",
    "test_whatever_happens_wakes_who_waits_for_activity": ONE_THREAD,
    "test_the_same_blocks_may_be_read_and_written_at_once": ONE_THREAD,
    "test_threads_pull_while_notifications_are_drained": ONE_THREAD,
    "test_await_and_gather": NO_LOOP,
    "test_awaiting_a_failure_raises_it": NO_LOOP,
    "test_lengths_that_differ": ONLY_PLANS,
    "test_bad_rows": ONLY_PLANS,
    "test_use_after_fork_raises": "virtual agents have no handles of their process",
}


class VirtualRemote(Remote):
    """An agent on another host, in another rack."""

    def __init__(self, network, host):
        self.network = network
        super().__init__(lambda name: VirtualAgent(name, network, host))

    def pause(self):
        self.network.split = frozenset([1])
        self.network.changed()

    def resume(self):
        self.network.split = frozenset()
        self.network.changed()

    def kill(self):
        self.network.split = frozenset()
        self._agent.native.kill()
        self.close()


class TestVirtualAgent(HungPeerConformance):
    @pytest.fixture
    def network(self):
        return Network(Events(), detection=1e6)

    @pytest.fixture
    def make_agent(self, closing, network):
        host = Host(0, Link(100.0), 1e-5)
        return lambda name, **options: closing(VirtualAgent(name, network, host, **options))

    @pytest.fixture
    def remote(self, closing, network):
        return closing(VirtualRemote(network, Host(1, Link(100.0), 1e-5)))


for name in DOES_NOT_APPLY:
    assert callable(getattr(HungPeerConformance, name))
    setattr(TestVirtualAgent, name, None)
