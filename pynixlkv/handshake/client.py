"""The asking side: one call, one connection, one deadline."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import Counter
from dataclasses import dataclass, field
from random import random
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from pynixlkv._clock import ObservedClock, retry_pause
from pynixlkv._limits import check_reserve
from pynixlkv.errors import ConfigError, HandshakeError, HandshakeTimeout, RankNotFound, WireError
from pynixlkv.handshake import message as msg
from pynixlkv.handshake.security import Address, Keys, find_keys, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pynixlkv.types import Rank

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# The first of these events that was seen explains a time-out.
_SYMPTOMS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hangs up on the way: is the secret the same there?",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "it took the question and gave no answer",
    zmq.EVENT_CONNECTED: "it accepted the connection and said nothing",
    zmq.EVENT_CLOSED: "nobody listens there",
}
_EVENTS = _REFUSED | sum(_SYMPTOMS) | zmq.EVENT_DISCONNECTED
_PAUSE_S = 0.1
"""Before the first new question to a listener that has hung up; it doubles."""
_LONGEST_PAUSE_S = 1.0
_MAX_SOCKETS = 1 << 15


@dataclass(frozen=True)
class HandshakeReply:
    """What `fetch` learned about an engine."""

    engine_id: str
    ranks: tuple[Rank, ...]
    """All ranks that the engine serves, ascending."""
    hellos: Mapping[Rank, bytes] = field(repr=False)
    """The hello of each rank that was asked for, for `pynixlkv.agent.Agent.connect`."""


def fetch(
    address: str | tuple[str, int],
    *,
    engine_id: str,
    compatibility: Mapping[str, str],
    ranks: Iterable[Rank] | None = None,
    timeout: float = 5.0,
    secret: bytes | str | None = None,
    allow_insecure: bool = False,
) -> HandshakeReply:
    """Ask an engine's `Handshake` for hellos.

    Parameters
    ----------
    address : str or tuple of (str, int)
        ``"host:port"``, or the two apart; an IPv6 address in brackets or not, with its scope.
    engine_id : str
        The engine that is meant; another one is refused.
    compatibility : mapping of str to str
        Named facts that must be equal on both sides.
    ranks : iterable of (int, int), optional
        Pipeline and tensor-parallel ranks whose hellos to fetch; by default all.
    timeout : float
        Seconds until the whole call has ended, name look-ups not counted.
    secret : bytes or str, optional
        As in `Handshake`; both sides need the same.
    allow_insecure : bool
        Ask at other than loopback addresses although there is no secret.

    Returns
    -------
    HandshakeReply
        The ranks and the hellos. The hellos are not verified.

    Raises
    ------
    ConfigError
        If an argument is wrong, or there is no secret where one is needed.
    HandshakeTimeout
        If there is no whole answer by the deadline; says how far it got. A wrong secret ends so.
    ProtocolVersionError, EngineIdMismatch, CompatMismatch, RankNotFound
        If the other side is not what was asked for.
    WireError
        If its answer does not decode.
    HandshakeError
        If it refuses for another reason, or only one of the sides has a secret.
    ResourceExhausted
        If the process is about to run out of file descriptors or threads.

    Notes
    -----
    Blocks, without the GIL. Thread-safe; every call has connections of its own, to all addresses
    that the host's name has. An address where nothing listens yet is tried again until the
    deadline.
    """
    identity = msg.check_identity(engine_id, compatibility)
    host, port = _split_address(address)
    if not 0 < timeout < math.inf:
        raise ConfigError(f"timeout is {timeout!r}; expected seconds above 0")
    wanted = None if ranks is None else [msg.check_rank(rank) for rank in ranks]
    keys = find_keys(secret)
    addresses = resolve(host, port, keys=keys, allow_insecure=allow_insecure)
    if any(each.is_wildcard or each.port == 0 for each in addresses):
        raise ConfigError(f"{host}:{port} is not where a listener is, only what it may bind to")
    question = msgspec.structs.replace(identity, payload=msg.encode(msg.Question(wanted)))

    def read(reply: bytes, peer: str) -> HandshakeReply:
        envelope = msg.decode(reply, msg.Envelope)
        msg.compare(identity, envelope, peer)
        answer = _checked(msg.decode(envelope.payload, msg.Reply), wanted, engine_id, peer)
        return HandshakeReply(engine_id, tuple(answer.served), dict(answer.hellos))

    check_reserve("a handshake")
    return _ask(addresses, question, keys, timeout, read)


def pause_after(attempt: int, draw: Callable[[], float] = random) -> float:
    """Return the seconds until a listener that has hung up is asked again."""
    return retry_pause(_PAUSE_S, attempt, _LONGEST_PAUSE_S, draw)


def _split_address(address: object) -> tuple[object, object]:
    if isinstance(address, (tuple, list)) and len(address) == 2:
        return address[0], address[1]
    host, _, digits = str(address).removeprefix("tcp://").rpartition(":")
    if not isinstance(address, str) or not host or not digits.isdecimal():
        raise ConfigError(f"address is {address!r}; expected 'host:port' or (host, port)")
    return host, digits


@functools.cache
def _context(pid: int) -> zmq.Context[zmq.Socket[bytes]]:  # noqa: ARG001 - one for each process
    """Return the process's ZeroMQ context; a forked child cannot use that of its parent."""
    context = zmq.Context()
    context.max_sockets = _MAX_SOCKETS
    return context


class _Connection:
    """A connection to one address, with the question on its way."""

    def __init__(self, address: Address, keys: Keys | None, question: bytes) -> None:
        self.address = address
        self.peer = str(address)
        self.is_greeted = False
        context = _context(os.getpid())
        self.socket = context.socket(zmq.REQ)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        try:
            self.socket.linger = 0
            self.socket.ipv6 = ":" in address.host
            self.socket.maxmsgsize = msg.MAX_REPLY_BYTES
            if keys is not None:
                self.socket.curve_serverkey = keys.server_public
                self.socket.curve_publickey = keys.client_public
                self.socket.curve_secretkey = keys.client_secret
            self.socket.connect(address.endpoint)
            # If the listener has already refused, ZeroMQ has no peer to send to and the monitor
            # reports the refusal.
            with contextlib.suppress(zmq.Again):
                self.socket.send(question, zmq.DONTWAIT)
        except BaseException:
            self.close()
            raise

    def take_event(self, *, has_secret: bool) -> int:
        event: int = parse_monitor_message(self.monitor.recv_multipart())["event"]
        if event & _REFUSED:
            mine = "has" if has_secret else "does not have"
            raise HandshakeError(
                f"{self.peer} does not talk like this side, which {mine} a shared secret: give "
                "both sides the same one, and see that a Handshake listens there",
                peer=self.peer,
            )
        self.is_greeted |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return event

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


def _ask(
    addresses: list[Address],
    question: msg.Envelope,
    keys: Keys | None,
    timeout: float,
    read: Callable[[bytes, str], HandshakeReply],
) -> HandshakeReply:
    """Ask at all addresses of a host at once; the first answer that `read` takes counts."""
    clock = ObservedClock()
    deadline = clock() + timeout
    errors: list[HandshakeError] = []
    seen = 0  # events of all connections
    poller = zmq.Poller()
    waiting: dict[object, _Connection] = {}  # by both of its sockets
    lost: list[tuple[float, Address]] = []  # when to ask again: the listener has hung up
    attempts: Counter[Address] = Counter()
    opening = list(addresses)
    text = ", ".join(map(str, addresses))

    def drop(connection: _Connection) -> None:
        for socket in (connection.socket, connection.monitor):
            poller.unregister(socket)
            del waiting[socket]
        connection.close()

    def note(address: object, error: Exception) -> None:
        if not isinstance(error, HandshakeError):
            why = f"no connection to {address} can be used: {error}"
            error = HandshakeError(why, peer=str(address))
        errors.append(error)

    try:
        while (left := deadline - clock()) > 0:
            for address in opening:
                try:
                    connection = _Connection(address, keys, msg.encode(question))
                except zmq.ZMQError as error:
                    note(address, error)
                    continue
                for socket in (connection.socket, connection.monitor):
                    waiting[socket] = connection
                    poller.register(socket, zmq.POLLIN)
            if not waiting and not lost:
                break
            for socket, _ in poller.poll(math.ceil(min(left, 0.1 if lost else 1.0) * 1000)):
                if socket not in waiting:
                    continue  # dropped in this round
                connection = waiting[socket]
                try:
                    if socket is connection.socket:
                        return read(connection.socket.recv(), connection.peer)
                    event = connection.take_event(has_secret=keys is not None)
                    seen |= event
                    if event == zmq.EVENT_DISCONNECTED and connection.is_greeted:
                        drop(connection)
                        address = connection.address
                        lost.append((clock() + pause_after(attempts[address]), address))
                        attempts[address] += 1
                except (HandshakeError, zmq.ZMQError) as error:
                    note(connection.peer, error)
                    drop(connection)
            opening = [address for due, address in lost if due <= clock()]
            lost = [each for each in lost if each[1] not in opening]
    finally:
        for connection in set(waiting.values()):
            connection.close()
    if errors:
        raise errors[0]
    symptom = next((why for event, why in _SYMPTOMS.items() if event & seen), "")
    raise HandshakeTimeout(
        f"no answer from {text} about engine {question.engine_id!r} within "
        f"{timeout} s: {symptom or 'it cannot be reached'}",
        peer=text,
    )


def _checked(reply: msg.Reply, ranks: list[Rank] | None, engine_id: str, peer: str) -> msg.Answer:
    if isinstance(reply, msg.Refusal):
        if reply.kind != "ranks":
            raise HandshakeError(f"{peer} refuses: {reply.message}", peer=peer)
        missing = [rank for rank in ranks or () if rank not in reply.served]
        raise RankNotFound(
            f"engine {engine_id!r} at {peer} has no (pp, tp) rank {_listed(missing)}; it serves "
            f"{_listed(reply.served)}",
            missing=missing,
            available=reply.served,
            peer=peer,
        )
    given = {rank for rank, _ in reply.hellos}
    if not reply.served or given != set(reply.served if ranks is None else ranks):
        raise WireError(
            f"{peer} answers with ranks {_listed(sorted(given))} of {_listed(reply.served)} "
            "instead of those that were asked for",
            peer=peer,
        )
    return reply


def _listed(ranks: list[Rank]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown}, … ({len(ranks)})" if len(ranks) > 16 else shown or "none"
