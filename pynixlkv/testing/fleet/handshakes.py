"""Handshakes in virtual time: servers with a limit of clients, and clients that ask again."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pynixlkv._clock import retry_pause
from pynixlkv.errors import HandshakeError, HandshakeTimeout
from pynixlkv.handshake.client import pause_after
from pynixlkv.handshake.server import MAX_STRANGERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pynixlkv.testing.fleet.engine import Engine, FleetRank
    from pynixlkv.testing.fleet.simulation import Fleet, Slot

_SYN_S = 1.0
"""Seconds until TCP tries again to connect to a host that does not answer."""
_RECONNECT_S = 0.15
"""Seconds until ZeroMQ connects again to a port without a listener; ZeroMQ spreads them too."""
_WINDOW_S = 0.1
"""Seconds over which the connections to a server are counted for `Counts.most_asked`."""


class Ask:
    """A call of `pynixlkv.handshake.fetch`."""

    def __init__(self, fleet: Fleet, rank: FleetRank, slot: Slot, engine_id: str) -> None:
        self.fleet, self.rank, self.slot, self.engine_id = fleet, rank, slot, engine_id
        self.answer: Engine | Exception | None = None
        self._began, self._num_drops = fleet.events.now, 0

    def begin(self, timeout: float, resume: Callable[[], None]) -> None:
        """Ask until there is an answer, then call a function."""
        self._resume = resume
        late = HandshakeTimeout(f"no answer from {self.slot.address}", peer=self.engine_id)
        self.fleet.events.after(timeout, self.end, late)
        self._call()

    def _call(self) -> None:
        fleet, here, there = self.fleet, self.rank.native.host, self.slot.host
        if self.answer is not None:
            return
        if fleet.network.reaches(here, there):
            fleet.events.after(fleet.network.latency(here, there), self.slot.server.take, self)
        else:
            fleet.events.after(_SYN_S, self._call)

    def again(self, *, is_dropped: bool) -> None:
        """Ask anew after a pause: nothing listens, or the server has hung up."""
        if is_dropped:
            pause = pause_after(self._num_drops, self.fleet.draw)
            self._num_drops += 1
        else:
            pause = retry_pause(_RECONNECT_S, draw=self.fleet.draw)
        self.fleet.events.after(pause, self._call)

    def reply(self, answer: Engine | Exception) -> None:
        """Let an answer be on its way."""
        way = self.fleet.network.latency(self.rank.native.host, self.slot.host)
        self.fleet.events.after(way, self.end, answer)

    def end(self, answer: Engine | Exception) -> None:
        """Take the first answer."""
        if self.answer is None:
            self.answer = answer
            if not isinstance(answer, Exception):
                self.fleet.counts.contacts.append(self.fleet.events.now - self._began)
            self._resume()


class HandshakeServer:
    """The handshake server of a slot's engine: it answers one question after another."""

    def __init__(self, fleet: Fleet, slot: Slot) -> None:
        self.fleet, self.slot = fleet, slot
        self.busy_at = 0.0
        """When it was last seen with a question."""
        self._waiting: deque[Ask] = deque()
        self._is_busy = False
        self._window, self._num_asked = 0, 0

    def take(self, ask: Ask) -> None:
        """Take a connection; too many at once are all dropped, as the real server does."""
        now, engine, counts = self.fleet.events.now, self.slot.engine, self.fleet.counts
        counts.connections_asked += 1
        window = int(now / _WINDOW_S)
        self._num_asked = self._num_asked + 1 if window == self._window else 1
        self._window = window
        counts.most_asked = max(counts.most_asked, self._num_asked)
        self.busy_at = now
        if engine is None:
            ask.again(is_dropped=False)
        elif engine.id != ask.engine_id:
            text = f"{self.slot.address} is {engine.id!r}"
            ask.reply(HandshakeError(text, peer=ask.engine_id))
        else:
            self._waiting.append(ask)
            if len(self._waiting) > MAX_STRANGERS:
                self.drop_all()
            elif not self._is_busy:
                self._is_busy = True
                self._serve_later()

    def stall(self, seconds: float) -> None:
        """Answer nothing for a while."""
        if not self._is_busy:
            self._is_busy = True
            self.fleet.events.after(seconds, self._serve)

    def _serve_later(self) -> None:
        self.fleet.events.after(self.fleet.options.handshake * self.slot.host.slowness, self._serve)

    def _serve(self) -> None:
        engine = self.slot.engine
        if self._waiting and engine is not None:
            self.busy_at = self.fleet.events.now
            engine.scheduler.consumer_comes()
            engine.step_soon()
            self._waiting.popleft().reply(engine)
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            self._serve_later()

    def drop_all(self) -> None:
        """Close all connections; the clients notice it, unless the host is silent."""
        dropped, self._waiting = self._waiting, deque()
        self.fleet.counts.dropped += len(dropped)
        if not self.slot.host.is_silent:
            for ask in dropped:
                ask.again(is_dropped=True)
