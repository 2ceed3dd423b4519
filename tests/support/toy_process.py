"""A toy engine in a child process, which makes steps all the time, also between calls."""

from __future__ import annotations

import functools
import logging
import time

from spoiled import SpoiledVerification
from toy_engine import Model, ToyEngine

from pynixlkv.connector import receiver
from pynixlkv.connector.metadata import ConnectorConfig
from pynixlkv.handshake import Handshake
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.process import ChildProcess
from pynixlkv.ucx import UcxAgent

STEP_S = 0.002
ENGINES = {
    "nixl": NixlAgent,
    "ucx": UcxAgent,
    "nixl-tcp": functools.partial(NixlAgent, backend_params={"engine_config": "TLS=tcp"}),
    "ucx-tcp": functools.partial(UcxAgent, config={"TLS": "tcp"}),
}


class Driver:
    """What a test can ask of the engine."""

    def __init__(self):
        logging.disable(logging.WARNING)
        self.engine = self.handshake = None
        self.outcome = {}
        self.watched = {}
        self.aborted = set()
        self.skipped_s = 0.0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def clock(self):
        return time.monotonic() + self.skipped_s

    def pass_time(self, seconds):
        """Move the clock of the engine's workers."""
        self.skipped_s += seconds
        for rank in self.engine.ranks:
            rank.agent.wake()

    def make(self, transport, engine_id, model, config, **options):
        """Begin an engine in place of the one before."""
        self.close()
        config = ConnectorConfig(**config)
        self.engine = ToyEngine(
            engine_id,
            Model(**model),
            ENGINES[transport],
            None,
            config=config,
            background=True,
            clock=self.clock,
            **options,
        )
        for rank in self.engine.ranks:
            rank.agent.notify = self._counted(rank.agent.notify)
        self.num_messages = 0
        self.handshake = Handshake(
            engine_id, self.engine.hellos, compatibility=config.compatibility
        )
        self.engine.scheduler.address = self.handshake.host, self.handshake.port
        return self.engine.scheduler.address

    def close(self):
        if self.handshake is not None:
            self.handshake.close()
            self.handshake = None
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        self.outcome, self.watched, self.aborted = {}, {}, set()

    def fetch(self, request_id, prompt, num_tokens, params, num_computed=0):
        """Let a request arrive, and schedule it."""
        self.engine.arrive(request_id, prompt, num_tokens, params)
        return self.engine.schedule(request_id, num_computed)

    def finish(self, request_id):
        self.engine.finish(request_id)
        if request_id in self.engine.requests:
            self.aborted.add(request_id)  # its blocks are free when its end is reported

    def spoil(self):
        """Let a bit of the next request that is received with checksums of all go wrong."""
        receiver.Verification = SpoiledVerification
        SpoiledVerification.count += 1

    def overwrite(self, blocks, prompt):
        """Let another request have blocks."""
        for rank in self.engine.ranks:
            rank.write(prompt, blocks, range(len(blocks) * self.engine.block_size))

    def poison(self, request_id):
        """Overwrite the blocks of a request that has ended, and watch them."""
        self.watched[request_id] = blocks = self.engine.requests[request_id].blocks
        for rank in self.engine.ranks:
            rank.poison(blocks)

    def is_poisoned(self, request_id):
        blocks = self.watched[request_id]
        tokens = range(len(blocks) * self.engine.block_size)
        return all((rank.read(blocks, tokens) == 0xDEAD).all() for rank in self.engine.ranks)

    def ends(self):
        """What has become of requests so far, by id: a word, or the name of an error's class."""
        return self.outcome

    def _counted(self, notify):
        def count(peer, message):
            self.num_messages += 1
            notify(peer, message)

        return count

    def costs(self):
        """Messages sent, bytes of KV received, and connections to producers and to consumers."""
        seen = [rank.worker.stats.snapshot() for rank in self.engine.ranks]
        peers = sum(each.peers + each.consumers for each in seen)
        return self.num_messages, sum(each.bytes for each in seen), peers

    def num_pushes(self):
        return sum(rank.worker.stats.snapshot().pushes for rank in self.engine.ranks)

    def num_running(self):
        return self.engine.num_running

    def errors(self):
        return sum(
            rank.worker.stats.snapshot().events.get("errors", 0) for rank in self.engine.ranks
        )

    def idle(self):
        if self.engine is not None:
            self._step()
        return STEP_S

    def _step(self):
        new = self.engine.step()
        self.outcome |= dict.fromkeys(new.sent, "sent")
        for request_id in new.received:
            # It is what the engine would go on with at once.
            self.outcome[request_id] = "received" if self.engine.holds(request_id) else "wrong"
        for request_id, ends in new.failed.items():
            self.outcome[request_id] = {
                end.state.value if end.state.value != "failed" else type(end.error).__name__
                for end in ends
            }
        for request_id in self.aborted & self.outcome.keys():
            self.aborted.remove(request_id)
            self.engine._drop(request_id)


class RemoteEngine(ChildProcess):
    """The test's end: methods are those of `Driver`."""

    def __init__(self):
        super().__init__("the process of an engine")
        self.call(Driver, keep=True)

    def __getattr__(self, name):
        return functools.partial(self.call, name)

    def until(self, reached, pass_time=0.0):
        """Ask for the ends, and move the clock, until they are as they should be; returns them."""
        while True:
            ends = self.ends()
            if reached(ends):
                return ends
            if pass_time:
                self.pass_time(pass_time)
