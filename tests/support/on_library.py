"""The conformance suite on a real library: our agent here, the other side in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pynixlkv.testing.conformance import WAIT_S
from pynixlkv.testing.remote import Pool, ProcessRemote

if TYPE_CHECKING:
    from collections.abc import Callable

    from pynixlkv.agent import Agent


class OnLibrary:
    make: Callable[..., Agent]
    make_remote_pool: Callable[[str], Pool] = Pool

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
