"""One rank of the demo, in a process of its own: ``python -m pynixlkv.cli.rank FD``.

It obeys the commands that arrive on the socket, one reply each. When the socket closes, the demo is
gone and so is this process. A watchdog thread that needs no GIL ends it at its deadline.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv.cli.cache import Contents, Placement, RankCache
from pynixlkv.cli.messages import (
    Await,
    Check,
    Checked,
    Connect,
    Connected,
    Failed,
    Fault,
    Finish,
    Finished,
    Message,
    Move,
    Moved,
    Notified,
    Operation,
    Progress,
    RankSpec,
    Ready,
    RunError,
    decode,
    encode,
)
from pynixlkv.cli.models import find_model
from pynixlkv.errors import ConfigError
from pynixlkv.geometry import KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.topology import expected_readers, read_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

    from pynixlkv.topology import Reader, Source

__all__ = ["Rank", "load_engine", "main"]

_ENGINES = {"nixl": "NixlAgent", "ucx": "UcxAgent"}


def load_engine(name: str) -> Callable[[str], Any]:
    """Return the agent class of an engine.

    Parameters
    ----------
    name : str
        ``"nixl"`` or ``"ucx"``.

    Returns
    -------
    callable
        Makes an agent of a name.

    Raises
    ------
    ConfigError
        If this version has no such engine.
    """
    try:
        agent: Callable[[str], Any] = getattr(
            importlib.import_module(f"pynixlkv.{name}"), _ENGINES[name]
        )
    except ModuleNotFoundError as error:
        if error.name != f"pynixlkv.{name}":
            raise
        raise ConfigError(
            f"this version of pynixlkv has no engine {name!r}; use --engine nixl"
        ) from None
    return agent


class Rank:
    """A rank's cache, agent and expectations.

    Parameters
    ----------
    spec : RankSpec
        What this rank is.
    report : callable
        Called with a `Progress` now and then.
    """

    def __init__(self, spec: RankSpec, report: Callable[[msgspec.Struct], None]) -> None:
        self._spec = spec
        self._report = report
        self._deadline = time.monotonic() + spec.timeout_s
        self._model = find_model(spec.model)
        self._tables = spec.tables[spec.side]
        size = spec.sizes[spec.side]
        self._cache = RankCache(self._model, spec.axes, spec.rank, size, spec.num_blocks)
        num_moved = len(self._tables["read"])
        self._contents: dict[Operation, Contents] = {
            "read": Contents((spec.seed, 0), self._model, num_moved),
            "write": Contents((spec.seed, 1), self._model, num_moved),
        }
        # What a block holds before anything is moved into it differs on every rank.
        side = ("prefill", "decode").index(spec.side)
        self._unused = Contents((spec.seed, 2, side, spec.rank), self._model, spec.num_blocks)
        self._fill()

        self._kv = KVCache.from_tensors(
            {f"layer.{i}": tensor for i, tensor in enumerate(self._cache.tensors)},
            dtype="bfloat16",
            axes=self._cache.letters,
            kv_heads=self._model.kv_heads,
            tp=(spec.rank, size),
        )
        self._agent = load_engine(spec.engine)(spec.name)
        self._registration = self._agent.register(self._kv)
        self._peers: list[tuple[Any, TransferPlan]] = []

    def close(self) -> None:
        """Deregister and close the agent."""
        self._registration.close()
        self._agent.close()

    def obey(self, command: Message) -> msgspec.Struct:
        """Carry out a command.

        Parameters
        ----------
        command : Message
            What to do.

        Returns
        -------
        msgspec.Struct
            The reply.
        """
        match command:
            case Connect():
                return self._connect(command.hellos)
            case Move():
                return self._move()
            case Await():
                return self._await_notes()
            case Check():
                return self._check(command)
            case _:
                raise RunError(f"{self._spec.name} does not know the command {command!r}")

    @property
    def _operation(self) -> Operation:
        return "read" if self._spec.side == "decode" else "write"

    def ready(self) -> Ready:
        """Describe this rank to the other side."""
        return Ready(hello=self._agent.hello(self._kv), cache_bytes=self._cache.num_bytes)

    def _fill(self) -> None:
        """Fill the whole pool, so that no block is without a known content."""
        holds: list[Operation] = ["read", "write"] if self._spec.side == "prefill" else []
        layers = self._model.layers
        for layer in range(layers):
            for placement in self._expected(holds):
                self._cache.fill(layer, placement)
            self._report(Progress(layer + 1, layers))

    def _expected(self, holds: Sequence[Operation]) -> list[Placement]:
        """Return what must be in each block of the pool, guard blocks last."""
        guards = np.ones(self._spec.num_blocks, dtype=bool)
        placements = []
        for name in holds:
            blocks = np.asarray(self._tables[name], dtype=np.intp)
            placements.append(Placement(self._contents[name], np.arange(len(blocks)), blocks))
            guards[blocks] = False
        (unused,) = np.nonzero(guards)
        return [*placements, Placement(self._unused, unused, unused)]

    def _connect(self, hellos: list[bytes]) -> Connected:
        """Connect to the ranks of the other side that hold some of the same heads, and plan."""
        spec, kv_heads = self._spec, self._model.kv_heads
        me, others = (spec.rank, spec.sizes[spec.side]), spec.sizes[spec.other_side]
        partners: Sequence[Source | Reader]
        if spec.side == "decode":
            partners = read_sources(kv_heads, local=me, remote_size=others)
        else:
            partners = expected_readers(kv_heads, local=me, remote_size=others)
        for partner in partners:
            if len(partner.heads):
                peer = self._agent.connect(hellos[partner.rank])
                heads = None if kv_heads is None else partner.heads
                plan = TransferPlan(self._kv.geometry, peer.geometry, heads=heads)
                self._peers.append((peer, plan))
        return Connected([peer.name for peer, _ in self._peers])

    def _move(self) -> Moved:
        """Read from all peers at once, or write to them."""
        self._misbehave()
        spec = self._spec
        operation = self._operation
        local, remote = (spec.tables[side][operation] for side in (spec.side, spec.other_side))
        post = self._agent.read if operation == "read" else self._agent.write
        started = time.perf_counter()
        transfers = [
            post(peer, plan, local, remote, notify=_note(spec.name, peer.name), timeout=left)
            for (peer, plan), left in ((pair, self._left()) for pair in self._peers)
        ]
        for transfer in transfers:
            transfer.wait(timeout=self._left())
        elapsed_s = time.perf_counter() - started
        results = [transfer.result for transfer in transfers]
        costs = [plan.describe(local, remote) for _, plan in self._peers]
        return Moved(
            num_bytes=sum(result.bytes for result in results),
            descriptors_unmerged=sum(cost.num_runs for cost in costs),
            descriptors=sum(result.descriptors for result in results),
            plan_s=max((result.plan_s for result in results), default=0.0),
            post_s=max((result.post_s for result in results), default=0.0),
            transfer_s=max((result.transfer_s for result in results), default=0.0),
            elapsed_s=elapsed_s,
        )

    def _await_notes(self) -> Notified:
        """Take notifications until each peer's has come; any other is an error."""
        spec = self._spec
        missing = {(peer.name, _note(peer.name, spec.name)) for peer, _ in self._peers}
        num_notes = len(missing)
        while missing:
            for note in self._agent.notifications(timeout=self._left()):
                if (note.peer, note.message) not in missing:
                    raise RunError(f"{spec.name} got an unexpected notification: {note!r}")
                missing.remove((note.peer, note.message))
        return Notified(num_notes)

    def _check(self, command: Check) -> Checked:
        """Compare the whole pool with what must be in it."""
        self._corrupt(command.holds)
        *moved, guards = placements = self._expected(command.holds)
        wrong_bytes, difference = 0, ""
        layers = self._model.layers
        for layer in range(layers):
            for placement in placements:
                wrong, where = self._cache.compare(layer, placement)
                wrong_bytes += wrong
                difference = difference or where
            self._report(Progress(layer + 1, layers))
        block_bytes = self._cache.num_bytes // self._spec.num_blocks
        return Checked(
            moved_bytes=sum(len(placement.blocks) for placement in moved) * block_bytes,
            guard_bytes=len(guards.blocks) * block_bytes,
            wrong_bytes=wrong_bytes,
            difference=difference,
        )

    def _left(self) -> float:
        """Return the seconds until the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise RunError(f"{self._spec.name} did not end within {self._spec.timeout_s} s")
        return left

    def _misbehave(self) -> None:
        """Die or stop in the middle, if that is what is being tested."""
        if self._spec.fault is Fault.crash:
            os._exit(3)
        if self._spec.fault is Fault.hang:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _corrupt(self, holds: Sequence[Operation]) -> None:
        """Flip a bit behind the demo's back, if that is what is being tested."""
        fault = self._spec.fault
        if fault is Fault.guard:
            self._cache.layer(0)[0, 0, 0, 0, 0] ^= 1
        for operation in holds:
            if fault is not None and fault.value == operation:
                self._cache.layer(0)[self._tables[operation][0], 0, 0, 0, 0] ^= 1


def _note(sender: str, receiver: str) -> bytes:
    return f"from {sender} to {receiver}".encode()


def _serve(connection: Connection, spec: RankSpec) -> None:
    """Obey commands until told to finish."""

    def send(message: msgspec.Struct) -> None:
        connection.send_bytes(encode(message))

    try:
        rank = Rank(spec, send)
        try:
            send(rank.ready())
            while not isinstance(command := decode(connection.recv_bytes()), Finish):
                send(rank.obey(command))
        finally:
            rank.close()
        send(Finished())
    except (EOFError, BrokenPipeError):
        sys.exit("the demo that started this process is gone")
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        sys.exit(1)


def main() -> None:
    """Serve the demo that is on the other end of the socket whose number is the first argument."""
    faulthandler.enable()
    connection = Connection(int(sys.argv[1]))
    spec = decode(connection.recv_bytes())
    if not isinstance(spec, RankSpec):
        raise RunError(f"expected a RankSpec first, got {spec!r}")
    # The demo has the same deadline and ends this process itself; this is for when it cannot.
    faulthandler.dump_traceback_later(spec.timeout_s + 5, exit=True)
    _serve(connection, spec)


if __name__ == "__main__":
    main()
