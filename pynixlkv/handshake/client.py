"""The asking side: one call, one connection, one deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from pynixlkv._clock import ObservedClock
from pynixlkv.errors import ConfigError, HandshakeError, HandshakeTimeout, RankNotFound, WireError
from pynixlkv.handshake import message as msg
from pynixlkv.handshake.security import Keys, find_keys, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pynixlkv.types import Rank

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# The first of these events that was seen explains a time-out.
_SYMPTOMS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hangs up on the way: is the secret the same there?",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "it took the question and gave no answer",
    zmq.EVENT_CONNECTED: "it accepted the connection and said nothing",
    zmq.EVENT_CLOSED: "nobody listens there",
}
_EVENTS = _REFUSED | sum(_SYMPTOMS)


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
        ``"host:port"``, or the two apart.
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

    Notes
    -----
    Blocks, without the GIL. Thread-safe; every call has a connection of its own. An address where
    nothing listens yet is tried again until the deadline.
    """
    identity = msg.check_identity(engine_id, compatibility)
    host, port = _split_address(address)
    if not 0 < timeout < math.inf:
        raise ConfigError(f"timeout is {timeout!r}; expected seconds above 0")
    wanted = None if ranks is None else [msg.check_rank(rank) for rank in ranks]
    keys = find_keys(secret)
    endpoint, is_wildcard = resolve(host, port, keys=keys, allow_insecure=allow_insecure)
    if is_wildcard or port == 0:
        raise ConfigError(f"{host}:{port} is not where a listener is, only what it may bind to")
    question = msgspec.structs.replace(identity, payload=msg.encode(msg.Question(wanted)))
    peer = endpoint.removeprefix("tcp://")
    envelope = msg.decode(_exchange(endpoint, question, keys, timeout), msg.Envelope)
    msg.compare(identity, envelope, peer)
    answer = _checked(msg.decode(envelope.payload, msg.Reply), wanted, engine_id, peer)
    return HandshakeReply(engine_id, tuple(answer.served), dict(answer.hellos))


def _split_address(address: str | tuple[str, int]) -> tuple[str, int]:
    if not isinstance(address, str):
        host, port = address
        return host, port
    host, _, digits = address.removeprefix("tcp://").rpartition(":")
    if not host or not digits.isdecimal():
        raise ConfigError(f"address is {address!r}; expected 'host:port'")
    return host.removeprefix("[").removesuffix("]"), int(digits)


def _exchange(endpoint: str, question: msg.Envelope, keys: Keys | None, timeout: float) -> bytes:
    """Send a question on a connection of its own and return the reply."""
    peer = endpoint.removeprefix("tcp://")
    clock = ObservedClock()
    deadline = clock() + timeout
    seen = 0  # events of the connection
    # A shared context closes sockets later, so that they pile up under load, and cannot be used in
    # a forked child.
    context = zmq.Context()
    try:
        socket, monitor = _connect(context, endpoint, keys)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        socket.send(msg.encode(question))
        while (left := deadline - clock()) > 0:
            ready = dict(poller.poll(math.ceil(min(left, 1.0) * 1000)))
            if socket in ready:
                return socket.recv()
            if monitor in ready:
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                if event & _REFUSED:
                    mine = "does not have" if keys is None else "has"
                    raise HandshakeError(
                        f"{peer} does not talk like this side, which {mine} a shared secret: give "
                        "both sides the same one, and see that a Handshake listens there",
                        peer=peer,
                    )
                seen |= event
    finally:
        context.destroy(linger=0)
    symptom = next((text for event, text in _SYMPTOMS.items() if event & seen), "")
    raise HandshakeTimeout(
        f"no answer from {peer} about engine {question.engine_id!r} within "
        f"{timeout} s: {symptom or 'it cannot be reached'}",
        peer=peer,
    )


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: Keys | None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return a connected socket and the socket with its events."""
    try:
        socket = context.socket(zmq.REQ)
        socket.ipv6 = "[" in endpoint
        socket.maxmsgsize = msg.MAX_REPLY_BYTES
        if keys is not None:
            socket.curve_serverkey = keys.server_public
            socket.curve_publickey = keys.client_public
            socket.curve_secretkey = keys.client_secret
        monitor = socket.get_monitor_socket(_EVENTS)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        peer = endpoint.removeprefix("tcp://")
        raise HandshakeError(
            f"no connection to {peer} can be opened: {error}", peer=peer
        ) from error
    return socket, monitor


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
