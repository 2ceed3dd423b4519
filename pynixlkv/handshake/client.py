"""The asking side: one call, one connection, one deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from pynixlkv._clock import ObservedClock
from pynixlkv._closeable import Closeable
from pynixlkv.errors import (
    ConfigError,
    HandshakeError,
    HandshakeTimeout,
    RankNotFound,
    WireError,
)
from pynixlkv.handshake import message as msg
from pynixlkv.handshake.security import Keys, find_keys, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pynixlkv.handshake.message import Rank

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
    """What `fetch` learned about an engine.

    Parameters
    ----------
    engine_id : str
        The engine's id, as asked for.
    ranks : tuple of (int, int)
        Pipeline and tensor-parallel rank of every rank that the engine serves, ascending.
    hellos : mapping of (int, int) to bytes
        The hello of each rank that was asked for, for `pynixlkv.agent.Agent.connect`.
    """

    engine_id: str
    ranks: tuple[Rank, ...]
    hellos: Mapping[Rank, bytes] = field(repr=False)


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
    with _Asker(endpoint, identity, keys, timeout) as asker:
        answer = asker.ask(wanted)
    return HandshakeReply(engine_id, tuple(answer.served), dict(answer.hellos))


def _split_address(address: str | tuple[str, int]) -> tuple[str, int]:
    if not isinstance(address, str):
        host, port = address
        return host, port
    host, _, digits = address.removeprefix("tcp://").rpartition(":")
    if not host or not digits.isdecimal():
        raise ConfigError(f"address is {address!r}; expected 'host:port'")
    return host.removeprefix("[").removesuffix("]"), int(digits)


class _Asker(Closeable):
    """A connection with a deadline."""

    def __init__(
        self, endpoint: str, identity: msg.Envelope, keys: Keys | None, timeout: float
    ) -> None:
        self._peer = endpoint.removeprefix("tcp://")
        self._identity = identity
        self._has_secret = keys is not None
        self._timeout = timeout
        self._clock = ObservedClock()
        self._deadline = self._clock() + timeout
        self._seen = 0  # events of the connection
        # A shared context closes sockets later, so that they pile up under load, and cannot be used
        # in a forked child.
        self._context = zmq.Context()
        try:
            self._open(endpoint, keys)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise HandshakeError(
                f"no connection to {self._peer} can be opened: {error}", peer=self._peer
            ) from error

    def _open(self, endpoint: str, keys: Keys | None) -> None:
        self._socket = self._context.socket(zmq.REQ)
        self._socket.ipv6 = "[" in endpoint
        self._socket.maxmsgsize = msg.MAX_REPLY_BYTES
        if keys is not None:
            keys.apply_to_client(self._socket)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def ask(self, ranks: list[Rank] | None) -> msg.Answer:
        payload = msg.encode(msg.Question(ranks))
        self._socket.send(msg.encode(msgspec.structs.replace(self._identity, payload=payload)))
        envelope = msg.decode_envelope(self._receive())
        msg.compare(self._identity, envelope, self._peer)
        reply = msg.decode_reply(envelope.payload)
        if isinstance(reply, msg.Answer):
            return self._check(reply, ranks)
        if reply.kind == "ranks":
            missing = [rank for rank in ranks or () if rank not in reply.served]
            raise RankNotFound(
                f"engine {envelope.engine_id!r} at {self._peer} has no (pp, tp) rank "
                f"{_listed(missing)}; it serves {_listed(reply.served)}",
                missing=missing,
                available=reply.served,
                peer=self._peer,
            )
        raise HandshakeError(f"{self._peer} refuses: {reply.message}", peer=self._peer)

    def _check(self, answer: msg.Answer, ranks: list[Rank] | None) -> msg.Answer:
        given = {rank for rank, _ in answer.hellos}
        if not answer.served or given != set(answer.served if ranks is None else ranks):
            raise WireError(
                f"{self._peer} answers with ranks {_listed(sorted(given))} of "
                f"{_listed(answer.served)} instead of those that were asked for",
                peer=self._peer,
            )
        return answer

    def _receive(self) -> bytes:
        while (left := self._deadline - self._clock()) > 0:
            ready = dict(self._poller.poll(math.ceil(min(left, 1.0) * 1000)))
            if self._socket in ready:
                return self._socket.recv()
            if self._monitor in ready:
                self._note(parse_monitor_message(self._monitor.recv_multipart()))
        symptom = next((s for event, s in _SYMPTOMS.items() if event & self._seen), "")
        raise HandshakeTimeout(
            f"no answer from {self._peer} about engine {self._identity.engine_id!r} within "
            f"{self._timeout} s: {symptom or 'it cannot be reached'}",
            peer=self._peer,
        )

    def _note(self, message: Any) -> None:  # noqa: ANN401
        self._seen |= message["event"]
        if message["event"] & _REFUSED:
            mine = "has" if self._has_secret else "does not have"
            raise HandshakeError(
                f"{self._peer} does not talk like this side, which {mine} a shared secret: give "
                "both sides the same one, and see that a Handshake listens there",
                peer=self._peer,
            )


def _listed(ranks: list[Rank]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown}, … ({len(ranks)})" if len(ranks) > 16 else shown or "none"
