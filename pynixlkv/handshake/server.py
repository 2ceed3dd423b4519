"""The serving side: a listener on a thread of its own."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from pynixlkv._closeable import Closeable
from pynixlkv.errors import (
    ClosedError,
    ConfigError,
    ForkError,
    HandshakeError,
    HandshakeTimeout,
    WireError,
)
from pynixlkv.handshake.message import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    Answer,
    Envelope,
    Rank,
    Refusal,
    check_identity,
    check_rank,
    compare,
    decode_envelope,
    decode_question,
    encode,
)
from pynixlkv.handshake.security import Keys, find_keys, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["Handshake"]

_MAX_WAITING_CONNECTIONS = 1024
_MAX_FRAMES = 3  # routing id, empty delimiter, message
_log = logging.getLogger("pynixlkv.handshake")


class Handshake(Closeable):
    """Serves the hello bytes of one engine's ranks until it is closed; a context manager.

    Parameters
    ----------
    engine_id : str
        Id of the engine; whoever asks must name it.
    hellos : mapping of (int, int) to bytes
        Hello of each rank by pipeline and tensor-parallel rank; at least one. Whoever asks
        concludes the sizes of the engine from these ranks, so give all of them.
    compatibility : mapping of str to str
        Named facts that must be equal on both sides (model, dtype, …).
    host : str
        Address or name to listen on; ``"0.0.0.0"`` for all IPv4 interfaces.
    port : int
        Port to listen on; 0 for any free one.
    secret : bytes or str, optional
        Shared secret, at least 16 random bytes; by default that of ``PYNIXLKV_SECRET`` or of the
        file in ``PYNIXLKV_SECRET_FILE``. Encrypts on loopback as well.
    allow_insecure : bool
        Listen on other than loopback addresses although there is no secret.

    Raises
    ------
    ConfigError
        If there are no hellos, an argument is wrong, the port is taken, or there is no secret where
        one is needed.

    Notes
    -----
    Listens when the constructor returns. All methods are thread-safe. A forked child cannot use it.
    """

    def __init__(
        self,
        engine_id: str,
        hellos: Mapping[Rank, bytes],
        *,
        compatibility: Mapping[str, str],
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes | str | None = None,
        allow_insecure: bool = False,
    ) -> None:
        self._listener: _Listener | None = None
        identity = check_identity(engine_id, compatibility)
        if not hellos:
            raise ConfigError("hellos is empty; give the hello of at least one rank")
        served = {check_rank(rank): bytes(hello) for rank, hello in hellos.items()}
        keys = find_keys(secret)
        endpoint, _ = resolve(host, port, keys=keys, allow_insecure=allow_insecure)
        listener = _Listener(identity, served, endpoint, keys)
        self._host = host
        self._port = listener.port
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # The thread must not hold this object, or it would never be found to be dropped.
        self._thread = threading.Thread(
            target=listener.run, name=f"pynixlkv-handshake-{engine_id}", daemon=True
        )
        self._thread.start()
        self._listener = listener

    @property
    def host(self) -> str:
        """The host as given; where that is a wildcard, tell peers a name of this machine."""
        return self._host

    @property
    def port(self) -> int:
        """Port that it listens on, also where 0 was asked for."""
        return self._port

    @property
    def address(self) -> str:
        """``host:port``, as `fetch` takes it."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def publish(self, rank: Rank, hello: bytes) -> None:
        """Serve a rank's hello from now on, in place of its earlier one if there is one.

        Parameters
        ----------
        rank : tuple of (int, int)
            Pipeline and tensor-parallel rank.
        hello : bytes
            The rank's hello.

        Raises
        ------
        ConfigError
            If the rank is none.
        ClosedError
            If it is closed; `ForkError` in a forked child.
        """
        rank = check_rank(rank)
        if os.getpid() != self._pid:
            raise ForkError(f"{self!r} belongs to the parent process; make one in the child")
        with self._lock:
            if self._listener is None:
                raise ClosedError(f"{self!r} is closed")
            # Replaced as a whole: the listener's thread reads it without a lock.
            self._listener.served = {**self._listener.served, rank: bytes(hello)}

    def close(self, timeout: float = 5.0) -> None:
        """Stop listening; does nothing the second time, or in a forked child.

        Parameters
        ----------
        timeout : float
            Longest wait in seconds.

        Raises
        ------
        HandshakeTimeout
            If the listener's thread has not ended by then.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            listener, self._listener = self._listener, None
            if listener is not None:
                listener.stop()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise HandshakeTimeout(f"{self!r} has not stopped within {timeout} s")

    def __repr__(self) -> str:
        listener = self._listener
        state = "closed" if listener is None else f"{len(listener.served)} ranks"
        return f"<Handshake on {self.address}, {state}>"

    def __del__(self) -> None:
        if sys.is_finalizing():  # its thread has ended with the interpreter
            return
        if self._listener is not None and os.getpid() == self._pid:
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2)
            self._listener.stop()


class _Listener:
    """The sockets of a `Handshake`, and what its thread does with them."""

    def __init__(
        self, identity: Envelope, served: dict[Rank, bytes], endpoint: str, keys: Keys | None
    ) -> None:
        self.served = served
        self._identity = identity
        self._keys = keys
        # A context of its own, because the one who admits clients does so for a whole context.
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._gate = self._bind(zmq.REP, "inproc://zeromq.zap.01")
            self._waker = self._bind(zmq.PAIR, "inproc://stop")
            self._stop = self._make(zmq.PAIR)
            self._stop.connect("inproc://stop")
            self._router = self._make(zmq.ROUTER)
            self._router.ipv6 = "[" in endpoint
            self._router.backlog = _MAX_WAITING_CONNECTIONS
            self._router.maxmsgsize = MAX_REQUEST_BYTES
            self._router.sndhwm = self._router.rcvhwm = 4  # of each peer, which needs only one
            if keys is not None:
                keys.apply_to_server(self._router)
                self._router.zap_domain = b"pynixlkv"
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._close()
            raise ConfigError(
                f"cannot listen on {endpoint}: {error}; port 0 is any free"
            ) from error
        bound: Any = self._router.last_endpoint
        self.port = int(bound.rpartition(b":")[2])

    def _make(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        self._sockets.append(made)
        return made

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made = self._make(kind)
        made.bind(endpoint)
        return made

    def stop(self) -> None:
        """Let `run` return; does not wait. Called once."""
        self._stop.send(b"", zmq.DONTWAIT)

    def run(self) -> None:
        """Answer until `stop`; the thread's function."""
        poller = zmq.Poller()
        for each in (self._waker, self._gate, self._router):
            poller.register(each, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._waker in ready:
                    return
                if self._gate in ready:
                    self._admit()
                if self._router in ready:
                    self._serve()
        finally:
            self._close()

    def _close(self) -> None:
        for each in self._sockets:
            each.close()
        self._context.term()

    def _admit(self) -> None:
        """Answer libzmq's question whether a client may connect (ZeroMQ RFC 27)."""
        version, request_id, _, address, _, mechanism, *credentials = self._gate.recv_multipart()
        admitted = (
            self._keys is not None
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and self._keys.admits(credentials[0])
        )
        if not admitted:
            _log.warning("handshake: refused a client at %s with an unknown key", address.decode())
        status = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        self._gate.send_multipart([version, request_id, *status, b"", b""])

    def _serve(self) -> None:
        frames = self._router.recv_multipart(copy=False)
        if len(frames) > _MAX_FRAMES:
            _log.warning("handshake: ignored a message of %d frames", len(frames))
            return
        peer = _peer_address(frames[-1])
        try:
            reply = self._answer(frames[-1].bytes, peer)
        except Exception:  # one bad question must not silence the listener for everybody else
            _log.exception("handshake: failed to answer %s", peer)
            reply = Refusal("internal", "the listener failed to answer; its log says why")
        message = msgspec.structs.replace(self._identity, payload=encode(reply))
        # To a client that is gone, or does not read, ROUTER drops it.
        self._router.send_multipart([*frames[:-1], encode(message)], zmq.DONTWAIT, copy=False)

    def _answer(self, data: bytes, peer: str) -> Answer | Refusal:
        try:
            envelope = decode_envelope(data)
            compare(self._identity, envelope, peer)
            question = decode_question(envelope.payload)
        except HandshakeError as error:
            _log.warning("handshake: refused %s: %s", peer, error)
            kind = "malformed" if isinstance(error, WireError) else "mismatch"
            return Refusal(kind, str(error))  # type: ignore[arg-type]
        served = self.served
        ranks = sorted(served)
        wanted = ranks if question.ranks is None else question.ranks
        missing = [rank for rank in wanted if rank not in served]
        if missing:
            _log.warning("handshake: %s asks for ranks %s of %s", peer, missing, ranks)
            return Refusal("ranks", f"there are no ranks {missing}", ranks)
        hellos = [(rank, served[rank]) for rank in dict.fromkeys(wanted)]
        total = sum(len(hello) for _, hello in hellos)
        if total > MAX_REPLY_BYTES - MAX_REQUEST_BYTES:
            return Refusal("size", f"{len(hellos)} hellos of {total} bytes; ask for fewer at once")
        return Answer(ranks, hellos)


def _peer_address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # libzmq does not always know it
        return "a client"
