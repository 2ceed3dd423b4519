"""Toy engines on fake agents, one network, and a clock that the test moves."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from toy_engine import Model, Outcome, ToyEngine

from pynixlkv.connector import messages
from pynixlkv.connector.leases import LEASE_GROUP
from pynixlkv.connector.metadata import ConnectorConfig
from pynixlkv.errors import HandshakeError
from pynixlkv.testing import FakeAgent, FakeNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pynixlkv.agent import Agent, Peer, Transfer
    from pynixlkv.plan import TransferPlan
    from pynixlkv.types import Rank

DEADLINE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeEvent:
    """Work on a device that ends, or fails, when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_done


class World:
    """Engines that can reach each other; nothing in them moves unless `round` is called.

    `config` are options of `ConnectorConfig`.
    """

    engine_class = ToyEngine

    def __init__(self, mode: str = "pull", **config: object) -> None:
        self.network, self.clock = FakeNetwork(), Clock()
        config.setdefault("self_test", False)
        self.config = ConnectorConfig(transfer_mode=mode, **config)  # type: ignore[arg-type]
        self.engines: dict[str, ToyEngine] = {}
        self._order: dict[str, int] = {}
        self.book: dict[str, Mapping[Rank, bytes]] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.unreachable: set[str] = set()
        self.num_fetches = 0
        self.has_blocked_threads = False
        self._seen: dict[str, int] = {}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for engine_id in list(self.engines):
            self.close(engine_id)

    def engine(self, engine_id: str, model: Model | None = None, **options: object) -> ToyEngine:
        options.setdefault("config", self.config)
        engine = self.engine_class(
            engine_id,
            model or Model(),
            self.make_agent,
            self._fetch,
            clock=self.clock,
            **options,  # type: ignore[arg-type]
        )
        engine.scheduler.address = (f"host-{engine_id}", 5600)
        self._order.setdefault(engine_id, len(self._order))
        self.engines[engine_id] = engine
        self.book[engine_id] = engine.hellos
        self.outcomes[engine_id] = Outcome()
        return engine

    def make_agent(self, name: str) -> Agent:
        """Make the agent of a rank."""
        return FakeAgent(name, self.network)

    def close(self, engine_id: str) -> None:
        """End an engine as it should end."""
        engine = self.engines.pop(engine_id)
        for rank in engine.ranks:
            if isinstance(rank.agent, FakeAgent):
                self.network.resume(rank.agent.name)
        engine.close()
        del self.book[engine_id], self.outcomes[engine_id]

    def kill(self, engine_id: str) -> None:
        """End an engine as if its processes were killed."""
        for rank in self.engines[engine_id].ranks:
            self.network.kill(rank.agent.name)
        engine = self.engines.pop(engine_id)
        engine.close()
        del self.book[engine_id], self.outcomes[engine_id]

    def _fetch(
        self, address: tuple[str, int], *, engine_id: str, ranks: list[Rank], timeout: float
    ) -> Mapping[Rank, bytes]:
        self.num_fetches += 1
        assert timeout == self.config.handshake_timeout
        if engine_id in self.unreachable or engine_id not in self.book:
            raise TimeoutError(f"nobody answers at {address}")
        return {rank: hello for rank, hello in self.book[engine_id].items() if rank in ranks}

    # ---- time

    def round(self) -> None:
        """Let every engine make a step, and note what has become of requests."""
        # A successor keeps its place: a producer grants leases before its consumer looks for them,
        # which would wait for the clock to look again.
        for engine_id in sorted(self.engines, key=self._order.__getitem__):
            self.step(engine_id)

    def step(self, engine_id: str) -> Outcome:
        """Let one engine make a step."""
        new, all_of_it = self.engines[engine_id].step(), self.outcomes[engine_id]
        ended = all_of_it.received | all_of_it.failed.keys()
        assert not ended & (new.received | new.failed.keys()), "a request has ended twice"
        assert not all_of_it.sent & new.sent, "a request was sent twice"
        all_of_it.sent |= new.sent
        all_of_it.received |= new.received
        all_of_it.failed |= new.failed
        return new

    def _is_active(self, timeout: float) -> bool:
        """Whether something happens at an agent within a time; waits no longer than that."""
        active = False
        for engine in self.engines.values():
            for rank in engine.ranks:
                name = rank.agent.name
                seen = rank.agent.wait_activity(self._seen.get(name, 0), timeout)
                active |= seen != self._seen.get(name, 0)
                self._seen[name] = seen
        return active

    def until(self, reached: Callable[[], object]) -> None:
        """Make rounds until something is so."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.round()
            if reached():
                return
            assert time.monotonic() < deadline, {
                rank.agent.name: rank.worker.stats.snapshot()
                for engine in self.engines.values()
                for rank in engine.ranks
            }
            self._is_active(0.0005)

    def quiet(self) -> None:
        """Make rounds until nothing more happens."""
        idle = 0
        while idle < 3:
            self.round()
            for engine in self.engines.values():
                engine.flush()
            is_busy = self._is_active(0.001) or self._has_running_threads()
            idle = 0 if is_busy else idle + 1

    def _has_running_threads(self) -> bool:
        if self.has_blocked_threads:
            return False
        return any(r.worker.unfinished for engine in self.engines.values() for r in engine.ranks)

    def pass_time(self, seconds: float, steps: int = 1) -> None:
        """Move the clock, in steps, with rounds between them."""
        for _ in range(steps):
            self.clock.now += seconds / steps
            self.quiet()

    def before_reads(self, engine_id: str, action: Callable[[str], None]) -> list[str]:
        """Call a function with the name of the peer before blocks are read from it.

        The returned list grows by the peer of each such read.
        """
        begun: list[str] = []

        def act(name: str) -> None:
            begun.append(name)
            action(name)

        for rank in self.engines[engine_id].ranks:
            rank.agent.read = self._hook_read(rank.agent.read, act)  # type: ignore[method-assign, assignment]
        return begun

    @staticmethod
    def _hook_read(read: Callable[..., Transfer], action: Callable[[str], None]) -> object:
        def hooked(peer: Peer, plan: TransferPlan, *args: object, **options: object) -> Transfer:
            if LEASE_GROUP not in plan.groups:
                action(peer.name)
            return read(peer, plan, *args, **options)

        return hooked

    # ---- looking

    def count(self, engine_id: str, event: str) -> int:
        """Return how often all ranks of an engine counted an event."""
        return sum(
            rank.worker.stats.snapshot().events.get(event, 0)
            for rank in self.engines[engine_id].ranks
        )

    def leases(self, engine_id: str) -> list[int]:
        """Return how many leases each rank of an engine has."""
        return [rank.worker.stats.snapshot().live_leases for rank in self.engines[engine_id].ranks]

    def end_of(self, engine_id: str, request_id: str) -> list[object]:
        """Return the end states of a request at the ranks where it failed."""
        return [end.state for end in self.outcomes[engine_id].failed[request_id]]

    def deliver(self, engine_id: str, sender: str, message: messages.Message) -> None:
        """Give the first rank of an engine a message, as if it came from an agent."""
        worker = self.engines[engine_id].ranks[0].worker
        worker._on_notification(sender, messages.encode(message), self.clock.now)

    def listen(self, engine_id: str) -> Inbox:
        """Record the messages that reach an engine, and still deliver them."""
        return Inbox(self.engines[engine_id])


class Inbox:
    """Messages that have reached the ranks of an engine: (rank index, sender, message)."""

    def __init__(self, engine: ToyEngine) -> None:
        self.messages: list[tuple[int, str, messages.Message]] = []
        for index, rank in enumerate(engine.ranks):
            rank.worker._on_notification = self._hook(index, rank.worker._on_notification)  # type: ignore[method-assign, assignment]

    def _hook(
        self, index: int, deliver: Callable[[str, bytes, float], None]
    ) -> Callable[[str, bytes, float], None]:
        def hear(agent: str, data: bytes, now: float) -> None:
            with contextlib.suppress(HandshakeError):  # the worker is to make sense of it
                self.messages.append((index, agent, messages.decode(data)))
            deliver(agent, data, now)

        return hear

    def of(self, kind: type) -> list[messages.Message]:
        return [message for _, _, message in self.messages if isinstance(message, kind)]

    def releases(self) -> list[tuple[int, str]]:
        """Return (rank index, request id) of all releases."""
        return [
            (index, request.request_id)
            for index, _, message in self.messages
            if isinstance(message, messages.Release)
            for request in message.requests
        ]
