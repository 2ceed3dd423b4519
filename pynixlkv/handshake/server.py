"""The serving side: a listener on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.auth import Authenticator
from zmq.utils.monitor import parse_monitor_message

from pynixlkv._closeable import Closeable
from pynixlkv._limits import check_reserve
from pynixlkv.errors import ConfigError, HandshakeError, HandshakeTimeout, WireError
from pynixlkv.handshake import message as msg
from pynixlkv.handshake.security import Address, Keys, find_keys, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pynixlkv.types import Rank

_MAX_WAITING_CONNECTIONS = 1024
_MAX_CLIENTS = 1024
MAX_STRANGERS = 128
"""Clients that have asked nothing yet; with more, all clients are dropped."""
_GREETING_MS = 5000
_PAUSE_MS = 100
_CLIENT_EVENTS = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)
_MAX_FRAMES = 3  # routing id, empty delimiter, message
_ZAP_DOMAIN = "pynixlkv"
_log = logging.getLogger("pynixlkv.handshake")


class Handshake(Closeable):
    """Serves the hello bytes of one engine's ranks until closed; a context manager.

    Parameters
    ----------
    engine_id : str
        Id of the engine; clients must name it.
    hellos : mapping of (int, int) to bytes
        Hello of every rank of the engine, by pipeline and tensor-parallel rank; at least one.
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
    on_contact : callable, optional
        Called on the listener's thread before each answer with hellos. Must not block.

    Raises
    ------
    ConfigError
        If there are no hellos, an argument is wrong, the port is taken, or there is no secret where
        one is needed.
    ResourceExhausted
        If the process is about to run out of file descriptors or threads.

    Notes
    -----
    Listens when the constructor returns. All methods are thread-safe. A forked child cannot use it,
    and does not keep the port. A client has 5 s for ZeroMQ's greeting. With more than 128 clients
    that have asked nothing yet, or 1,024 in all, everybody is cut off, and `fetch` asks again.
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
        on_contact: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener: _Listener | None = None
        identity = msg.check_identity(engine_id, compatibility)
        if not hellos:
            raise ConfigError("hellos is empty; give the hello of at least one rank")
        served = {msg.check_rank(rank): bytes(hello) for rank, hello in hellos.items()}
        keys = find_keys(secret)
        address = resolve(host, port, keys=keys, allow_insecure=allow_insecure)[0]
        check_reserve("a Handshake")
        listener = _Listener(identity, served, address, keys, on_contact)
        self.host = host.strip("[]")
        """The host as given; for a wildcard, tell peers a name of this machine instead."""
        self.port = listener.port
        """The port, also if 0 was asked for."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # The thread must not reference this object: `__del__` reports a listener left open.
        self._thread = threading.Thread(
            target=listener.run, name=f"pynixlkv-handshake-{engine_id}", daemon=True
        )
        self._thread.start()
        self._listener = listener

    @property
    def address(self) -> str:
        """``host:port``, as `fetch` takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self, timeout: float = 5.0) -> None:
        """Stop listening; does nothing the second time, or in a forked child.

        Raises `HandshakeTimeout` if the listener's thread has not ended within `timeout` seconds.
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


class _Port:
    """A listening socket, and the clients that ZeroMQ has accepted from it.

    ZeroMQ cannot close a single client. When there are too many, all of them lose their connection;
    `fetch` asks again.
    """

    def __init__(self, router: zmq.Socket[bytes], address: Address) -> None:
        self._router = router
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._accepting = -1  # ZeroMQ's copy
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            self._socket.bind(place[0][4])
            self._socket.listen(_MAX_WAITING_CONNECTIONS)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]
        self._endpoint = Address(address.host, self.number).endpoint
        self._clients: set[int] = set()  # descriptors
        self._strangers: set[int] = set()  # of clients that have proved nothing yet
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_clients = min(_MAX_CLIENTS, limit // 2)
        self.monitor = router.context.socket(zmq.PAIR)
        self.monitor.rcvhwm = 0  # no event may be lost: a client would count for ever
        router.monitor("inproc://events", _CLIENT_EVENTS)
        self.monitor.connect("inproc://events")
        self._accept()
        _ports.add(self)

    def _accept(self) -> None:
        self._accepting = os.dup(self._socket.fileno())
        self._router.use_fd = self._accepting
        self._router.bind(self._endpoint)

    def take_event(self) -> None:
        """Note a client that came, proved itself, or went."""
        event = parse_monitor_message(self.monitor.recv_multipart())
        kind, descriptor = event["event"], event["value"]
        if kind == zmq.EVENT_CLOSED:  # the last event of what `unbind` ends
            self._clients.clear()
            self._strangers.clear()
            self.accept_again()
        elif kind == zmq.EVENT_ACCEPTED:
            self._clients.add(descriptor)
            self._strangers.add(descriptor)
            if len(self._strangers) > MAX_STRANGERS or len(self._clients) > self._max_clients:
                self._drop_all()
        else:
            self._strangers.discard(descriptor)
            self._clients.discard(descriptor)

    def proved(self, descriptor: int) -> None:
        """Note that a client has asked something: it has the secret, if there is one."""
        self._strangers.discard(descriptor)

    def accept_again(self) -> bool:
        """Accept clients if there are none; return whether that is possible now."""
        if self._accepting < 0 and not self._clients:
            try:
                self._accept()
            except (OSError, zmq.ZMQError) as error:
                self._accepting = -1
                _log.warning("handshake: no client can be accepted for now: %s", error)
        return self._accepting >= 0

    def _drop_all(self) -> None:
        if self._accepting >= 0:
            _log.warning(
                "handshake: dropped %d clients, %d of which had asked nothing",
                len(self._clients),
                len(self._strangers),
            )
            self._accepting = -1
            self._router.unbind(self._endpoint)

    def close(self) -> None:
        self._socket.close()

    def close_in_child(self) -> None:
        """Let go of the port, which a forked child would otherwise keep from a successor."""
        self._socket.close()
        if self._accepting >= 0:
            os.close(self._accepting)


_ports: weakref.WeakSet[_Port] = weakref.WeakSet()


def _let_go() -> None:
    for port in _ports:
        port.close_in_child()


os.register_at_fork(after_in_child=_let_go)


class _Listener:
    """The sockets. Made in the caller's thread, so that errors surface there; then the thread's."""

    def __init__(
        self,
        identity: msg.Envelope,
        served: Mapping[Rank, bytes],
        address: Address,
        keys: Keys | None,
        on_contact: Callable[[], None],
    ) -> None:
        self.served = served
        self._on_contact = on_contact
        self._identity = identity
        self._keys = keys
        # A context of its own: an authenticator answers for all sockets of its context.
        self._context = zmq.Context()
        # Its DEBUG records hold the keys of clients.
        gate_log = _log.getChild("gate")
        gate_log.setLevel(logging.INFO)
        self._authenticator = Authenticator(self._context, log=gate_log)
        try:
            self._waker, self._stop = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
            self._waker.bind("inproc://stop")
            self._stop.connect("inproc://stop")
            self._router = self._context.socket(zmq.ROUTER)
            self._router.ipv6 = ":" in address.host
            self._router.handshake_ivl = _GREETING_MS
            self._router.maxmsgsize = msg.MAX_REQUEST_BYTES
            self._router.sndhwm = self._router.rcvhwm = 4  # of each peer, which needs only one
            if keys is not None:
                self._authenticator.configure_curve_callback(_ZAP_DOMAIN, self)
                self._authenticator.start()
                self._router.curve_server = True
                self._router.curve_publickey = keys.server_public
                self._router.curve_secretkey = keys.server_secret
                self._router.zap_domain = _ZAP_DOMAIN.encode()
            self._port = _Port(self._router, address)
        except (zmq.ZMQError, OSError) as error:
            self._authenticator.stop()
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen on {address}: {error}; port 0 is any free") from error
        self.port = self._port.number

    def stop(self) -> None:
        """Let `run` return; does not wait. Called once."""
        self._stop.send(b"", zmq.DONTWAIT)

    def run(self) -> None:
        """Answer until `stop`; the thread's function."""
        poller = zmq.Poller()
        gate = self._authenticator.zap_socket
        sockets = self._waker, self._router, self._port.monitor, *([gate] if self._keys else [])
        for each in sockets:
            poller.register(each, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(None if self._port.accept_again() else _PAUSE_MS))
                if self._waker in ready:
                    return
                if self._port.monitor in ready:
                    self._port.take_event()
                if gate in ready:
                    self._authenticate(gate.recv_multipart())
                if self._router in ready:
                    self._serve()
        finally:
            self._close()

    def _close(self) -> None:
        self._port.close()
        self._authenticator.stop()
        self._context.destroy(linger=0)

    def _authenticate(self, request: list[bytes]) -> None:
        self._client = request[3].decode()
        # pyzmq's coroutine suspends only for a callback that is one, too: it ends at once.
        with contextlib.suppress(StopIteration):
            self._authenticator.handle_zap_message(request).send(None)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Admit a client by its public key; called by pyzmq's authenticator."""
        admitted = self._keys is not None and key == self._keys.client_public
        if not admitted:
            _log.warning("handshake: refused a client at %s with an unknown key", self._client)
        return admitted

    def _serve(self) -> None:
        frames = self._router.recv_multipart(copy=False)
        if len(frames) > _MAX_FRAMES:
            _log.warning("handshake: ignored a message of %d frames", len(frames))
            return
        with contextlib.suppress(zmq.ZMQError):  # libzmq does not always know it
            self._port.proved(int(frames[-1].get(zmq.SRCFD)))
        peer = _peer_address(frames[-1])
        try:
            reply = self._answer(frames[-1].bytes, peer)
        except Exception:  # one bad question must not silence the listener for everybody else
            _log.exception("handshake: failed to answer %s", peer)
            reply = msg.Refusal("internal", "the listener failed to answer; its log says why")
        message = msgspec.structs.replace(self._identity, payload=msg.encode(reply))
        # ROUTER drops replies to clients that have gone or do not read.
        self._router.send_multipart([*frames[:-1], msg.encode(message)], zmq.DONTWAIT, copy=False)

    def _answer(self, data: bytes, peer: str) -> msg.Reply:
        try:
            envelope = msg.decode(data, msg.Envelope)
            msg.compare(self._identity, envelope, peer)
            question = msg.decode(envelope.payload, msg.Question)
        except HandshakeError as error:
            _log.warning("handshake: refused %s: %s", peer, error)
            kind = "malformed" if isinstance(error, WireError) else "mismatch"
            return msg.Refusal(kind, str(error))  # type: ignore[arg-type]
        ranks = sorted(self.served)
        wanted = ranks if question.ranks is None else question.ranks
        missing = [rank for rank in wanted if rank not in self.served]
        if missing:
            _log.warning("handshake: %s asks for ranks %s of %s", peer, missing, ranks)
            return msg.Refusal("ranks", f"there are no ranks {missing}", ranks)
        hellos = [(rank, self.served[rank]) for rank in dict.fromkeys(wanted)]
        total = sum(len(hello) for _, hello in hellos)
        if total > msg.MAX_REPLY_BYTES - msg.MAX_REQUEST_BYTES:
            text = f"{len(hellos)} hellos of {total} bytes; ask for fewer at once"
            return msg.Refusal("size", text)
        self._on_contact()
        return msg.Answer(ranks, hellos)


def _peer_address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # libzmq does not always know it
        return "a client"
