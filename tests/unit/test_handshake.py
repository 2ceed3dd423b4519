"""The side channel: what it serves, what it refuses, and what it keeps secret."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from interpreter import run_python
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

import pynixlkv
from pynixlkv import wire
from pynixlkv.errors import (
    CompatMismatch,
    ConfigError,
    EngineIdMismatch,
    HandshakeError,
    HandshakeTimeout,
    ProtocolVersionError,
    RankNotFound,
    ResourceExhausted,
    WireError,
)
from pynixlkv.handshake import Handshake, fetch
from pynixlkv.handshake import client as handshake_client
from pynixlkv.handshake import server as handshake_server
from pynixlkv.handshake.client import pause_after
from pynixlkv.handshake.message import MAX_REQUEST_BYTES, Envelope, Question, Refusal
from pynixlkv.handshake.security import Address, find_keys, resolve

SECRET = b"sixteen or more random bytes"
FIELDS = {"model": "m", "dtype": "bfloat16"}
HELLOS = {(0, tp): f"hello of rank {tp} ".encode() * 40 for tp in range(4)}
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def no_secret_of_the_environment(monkeypatch):
    monkeypatch.delenv("PYNIXLKV_SECRET", raising=False)
    monkeypatch.delenv("PYNIXLKV_SECRET_FILE", raising=False)


def serve(engine_id="prefill", hellos=HELLOS, **options):
    return Handshake(engine_id, hellos, **{"compatibility": FIELDS, **options})


def ask(listener, **options):
    address = getattr(listener, "address", listener)
    defaults = {"engine_id": "prefill", "compatibility": FIELDS, "timeout": TIMEOUT_S}
    return fetch(address, **{**defaults, **options})


@contextmanager
def time_out_after(event):
    """Let the time of `fetch` stand still until something has happened to its connection."""

    now = [0.0]

    def parse(message):
        parsed = parse_monitor_message(message)
        if parsed["event"] & event:
            now[0] = 2 * TIMEOUT_S
        return parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake_client, "parse_monitor_message", parse)
        patch.setattr(handshake_client, "ObservedClock", lambda: lambda: now[0])
        yield


@contextmanager
def raw_client(listener, kind=zmq.REQ, keys=None):
    """A bare ZeroMQ client; `keys` are server, own public, own secret."""
    with zmq.Context() as context, context.socket(kind) as client:
        client.linger = 0
        if keys is not None:
            client.curve_serverkey, client.curve_publickey, client.curve_secretkey = keys
        client.connect(f"tcp://{listener.address}")
        yield client


def envelope(**changes):
    fields = {"protocol": wire.VERSION, "engine_id": "prefill", "compatibility": FIELDS}
    fields["payload"] = msgspec.msgpack.encode(Question(None))
    return msgspec.msgpack.encode(Envelope(**{**fields, **changes}))


def exchange(client, message):
    client.send(message)
    assert client.poll(TIMEOUT_S * 1000), "no reply"
    return msgspec.msgpack.decode(client.recv(), type=Envelope)


def refusal(client, message):
    return msgspec.msgpack.decode(exchange(client, message).payload, type=Refusal)


@contextmanager
def fake_listener(reply):
    """A ROUTER that answers every question with the same bytes."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        stop = threading.Event()

        def run():
            while not stop.is_set():
                if router.poll(20):
                    router.send_multipart([*router.recv_multipart()[:-1], reply])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            stop.set()
            thread.join()


class Proxy:
    """Forwards TCP connections and keeps every byte that passes, in both directions."""

    def __init__(self, port):
        self.recorded = bytearray()
        self._target = port
        self._accepting = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._accepting.getsockname()[1]}"
        self._sockets = [self._accepting]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                near, _ = self._accepting.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source, sink):
        try:
            while data := source.recv(65536):
                self.recorded += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # closed at the end of the test

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._accepting.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for each in self._sockets:
            with suppress(OSError):  # the other side may have closed it
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads[1:]:
            thread.join()


# --- what is handed out ---------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET, "a secret as text"])
def test_all_ranks(secret):
    with serve(secret=secret) as listener:
        engine = ask(listener, secret=secret)
    assert engine.engine_id == "prefill"
    assert engine.hellos == HELLOS
    assert engine.ranks == ((0, 0), (0, 1), (0, 2), (0, 3))
    assert "hello of" not in repr(engine)


def test_the_listener_tells_of_contacts_with_peers_that_fit():
    contacts = []
    with serve(on_contact=lambda: contacts.append(1)) as listener:
        with pytest.raises(CompatMismatch):
            ask(listener, compatibility={**FIELDS, "model": "another"})
        assert not contacts
        ask(listener)
        assert contacts == [1]


def test_some_ranks():
    hellos = {(pp, tp): b"%d%d" % (pp, tp) for pp in range(2) for tp in range(3)}
    with serve(hellos=hellos) as listener:
        assert ask(listener, ranks=[(1, 2)]).hellos == {(1, 2): b"12"}
        none = ask(listener, ranks=[])
    assert none.hellos == {}
    assert none.ranks == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))


def test_forms_of_the_address():
    with serve() as listener:
        for address in (
            listener.address,
            f"tcp://{listener.address}",
            ("localhost", listener.port),
            ("localhost", np.uint16(listener.port)),
            ["localhost", str(listener.port)],
        ):
            assert ask(address).hellos == HELLOS


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6(host):
    with serve(host=host) as listener:
        assert listener.address == f"[::1]:{listener.port}"
        assert ask(listener).hellos == HELLOS
        assert ask((host, listener.port)).hellos == HELLOS


def test_a_wildcard_serves_both_families():
    with serve(host="::", allow_insecure=True) as listener:
        for host in ("::1", "127.0.0.1"):
            assert ask((host, listener.port)).hellos == HELLOS


@pytest.mark.parametrize("address", [":7000", "tcp://:7000", "host", "host:", "host:x", 7000])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="expected 'host:port'"):
        ask(address)


def test_link_local_addresses_keep_their_scope():
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, scope, _, name = line.split()
        if scope == "20":
            address = ":".join(digits[i : i + 4] for i in range(0, 32, 4))
            with serve(host=f"{address}%{name}", allow_insecure=True) as listener:
                assert ask(listener, allow_insecure=True).hellos == HELLOS
            return
    # A host without one: the scope reaches the endpoint unchanged.
    assert Address("fe80::1%eth0", 7).endpoint == "tcp://[fe80::1%eth0]:7"


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_all_addresses_of_a_name_are_tried(monkeypatch, host):
    look_up = socket.getaddrinfo

    def both(name, *args, **kwargs):
        if name != "both.example":
            return look_up(name, *args, **kwargs)
        return look_up("::1", *args, **kwargs) + look_up("127.0.0.1", *args, **kwargs)

    with serve(host=host) as listener:
        # What listens at the other address, if anything does, is another engine.
        other = {"::1": "127.0.0.1", "127.0.0.1": "::1"}[host]
        monkeypatch.setattr(socket, "getaddrinfo", both)
        address = ("both.example", listener.port)
        found = resolve(*address, keys=None, allow_insecure=False)
        assert [each.host for each in found] == ["127.0.0.1", "::1"]
        assert ask(address).hellos == HELLOS
        with serve("decode", host=other, port=listener.port):
            assert ask(address).hellos == HELLOS
            with pytest.raises(EngineIdMismatch, match="this side about 'nobody'"):
                ask(address, engine_id="nobody")


def test_an_address_without_a_socket_leaves_the_others(monkeypatch):
    connect = handshake_client._Connection

    def fail_for_one(address, *rest):
        if address.host == "127.0.0.2":
            raise zmq.ZMQError(errno.EMFILE)
        return connect(address, *rest)

    addresses = [Address(f"127.0.0.{i}", 0) for i in (2, 1)]
    monkeypatch.setattr(handshake_client, "_Connection", fail_for_one)
    with serve() as listener:
        places = [replace(each, port=listener.port) for each in addresses]
        monkeypatch.setattr(handshake_client, "resolve", lambda *_, **__: places)
        assert ask(listener).hellos == HELLOS
        del places[1]
        with pytest.raises(HandshakeError, match=r"127\.0\.0\.2:\d+ can be used: Too many open"):
            ask(listener)


def test_strangers_do_not_keep_clients_out(monkeypatch, caplog):
    monkeypatch.setattr(handshake_server, "MAX_STRANGERS", 8)
    with serve() as listener, ExitStack() as stack:
        descriptors = Path("/proc/self/fd")
        used = len(list(descriptors.iterdir()))
        for _ in range(64):
            stranger = stack.enter_context(socket.socket())
            stranger.connect(("127.0.0.1", listener.port))
        assert ask(listener).hellos == HELLOS
        assert len(list(descriptors.iterdir())) < used + 64 + 32
        assert "dropped 9 clients" in caplog.text


def test_clients_that_have_asked_are_no_strangers(monkeypatch, caplog):
    monkeypatch.setattr(handshake_server, "MAX_STRANGERS", 2)
    with serve() as listener, ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(raw_client(listener))
            exchange(client, envelope())
        assert not caplog.text


def test_a_listener_that_cannot_accept_tries_again(monkeypatch):
    accept = handshake_server._Port._accept
    with serve() as listener:
        tried = []

        def fail_once(port):
            tried.append(port)
            if len(tried) == 1:
                raise OSError("too many open files")
            accept(port)

        monkeypatch.setattr(handshake_server._Port, "_accept", fail_once)
        listener._listener._port._drop_all()
        assert ask(listener).hellos == HELLOS
        assert len(tried) == 2


def test_a_client_that_is_cut_off_asks_again(monkeypatch):
    serve_once = handshake_server._Listener._serve
    cut_off = []

    def cut_off_once(listener):
        if not cut_off:
            cut_off.append(listener._port._drop_all())
        serve_once(listener)  # its answer goes to nobody the first time

    monkeypatch.setattr(handshake_server._Listener, "_serve", cut_off_once)
    with serve() as listener:
        assert ask(listener).hellos == HELLOS
    assert cut_off


def test_a_client_that_is_cut_off_again_and_again_waits_ever_longer(monkeypatch):
    attempts = []
    serve_once = handshake_server._Listener._serve

    def cut_off(listener):
        if len(attempts) >= 3:
            return serve_once(listener)
        listener._router.recv_multipart()
        return listener._port._drop_all()

    def note(attempt):
        attempts.append(attempt)
        return 0.0

    monkeypatch.setattr(handshake_server._Listener, "_serve", cut_off)
    monkeypatch.setattr(handshake_client, "pause_after", note)
    with serve() as listener:
        assert ask(listener).hellos == HELLOS
    assert attempts[:3] == [0, 1, 2]


def test_pauses_double_up_to_a_longest_and_are_spread():
    drawn = iter((0.0, 0.5, 1.0, 0.5, 0.5, 0.5))
    pauses = [pause_after(attempt, lambda: next(drawn)) for attempt in (0, 1, 2, 3, 9, 5000)]
    assert pauses == pytest.approx([0.05, 0.2, 0.6, 0.8, 1.0, 1.0])


def serve_in_a_process(channel, secret):
    with serve(secret=secret) as listener:
        channel.send(listener.address)
        channel.receive()


def test_two_processes(start_peer):
    process = start_peer(serve_in_a_process, SECRET)
    address = process.receive()
    assert ask(address, secret=SECRET).hellos == HELLOS
    process.send("done")
    process.finish()


# --- wrong peers and bad bytes --------------------------------------------------------------------


def test_another_engine_answers():
    with serve("prefill-1") as wrong, pytest.raises(EngineIdMismatch) as caught:
        ask(wrong, engine_id="prefill-0")
    assert (caught.value.wanted, caught.value.seen) == ("prefill-0", "prefill-1")
    assert "'prefill-0'" in str(caught.value)
    assert "'prefill-1'" in str(caught.value)


def test_a_fixed_port_is_kept_and_a_taken_one_refused():
    with serve() as first:
        port = first.port
        with pytest.raises(ConfigError, match=f"{port}.*in use"):
            serve(port=port)
    with serve(port=port) as second:
        assert second.port == port
        assert ask(("127.0.0.1", port)).hellos == HELLOS


def test_eight_listeners_at_once():
    with ThreadPoolExecutor(8) as pool:
        listeners = list(pool.map(lambda i: serve(f"e{i}", {(0, 0): b"%d" % i}), range(8)))
        ports = {listener.port for listener in listeners}
        engines = list(pool.map(lambda i: ask(listeners[i], engine_id=f"e{i}"), range(8)))
        list(pool.map(Handshake.close, listeners))
    assert len(ports) == 8
    assert [engine.engine_id for engine in engines] == [f"e{i}" for i in range(8)]
    assert [engine.hellos for engine in engines] == [{(0, 0): b"%d" % i} for i in range(8)]


def test_a_rank_that_is_not_there():
    with serve() as listener, pytest.raises(RankNotFound) as caught:
        ask(listener, ranks=[(0, 1), (0, 5)])
    assert caught.value.missing == [(0, 5)]
    assert caught.value.available == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert "(0, 5); it serves (0, 0), (0, 1), (0, 2), (0, 3)" in str(caught.value)


def test_no_hellos():
    with pytest.raises(ConfigError, match="hellos is empty") as caught:
        serve(hellos={})
    assert isinstance(caught.value, ValueError)


def test_dtype_differs(caplog):
    caplog.set_level(logging.WARNING, "pynixlkv.handshake")
    with serve() as listener, pytest.raises(CompatMismatch) as caught:
        ask(listener, compatibility={**FIELDS, "dtype": "float16"})
    assert caught.value.fields == ["dtype"]
    assert caught.value.differences == [("dtype", "float16", "bfloat16")]
    assert "dtype is 'float16' here, 'bfloat16' there" in str(caught.value)
    assert "dtype is 'bfloat16' here, 'float16' there" in caplog.text  # the other side's log


def test_a_field_that_one_side_lacks():
    with serve() as listener, pytest.raises(CompatMismatch) as caught:
        ask(listener, compatibility={"model": "m", "backend": "x"})
    assert caught.value.differences == [("backend", "x", None), ("dtype", None, "bfloat16")]


def test_payload_is_not_looked_at_before_the_rest_fits():
    for changes, error in (
        ({"protocol": 78}, ProtocolVersionError),
        ({"engine_id": "other"}, EngineIdMismatch),
        ({"compatibility": {}}, CompatMismatch),
        ({}, WireError),
    ):
        reply = envelope(**changes, payload=b"\xc1 no msgpack")
        with fake_listener(reply) as address, pytest.raises(HandshakeError) as caught:
            ask(address)
        assert type(caught.value) is error


def test_a_newer_protocol_is_told_apart():
    with serve() as listener, raw_client(listener) as client:
        reply = exchange(client, envelope(protocol=77))
        assert reply.protocol == wire.VERSION
        told = msgspec.msgpack.decode(reply.payload, type=Refusal)
        assert told.kind == "mismatch"
        assert f"version 77, this side {wire.VERSION}" in told.message
    future = msgspec.msgpack.decode(envelope(protocol=77)) | {"a field of the future": [1]}
    with (
        fake_listener(msgspec.msgpack.encode(future)) as address,
        pytest.raises(ProtocolVersionError) as caught,
    ):
        ask(address)
    assert caught.value.local_version == str(wire.VERSION)
    assert caught.value.remote_version == "77"


class Evil:
    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return (os.mkdir, (self.file,))


def test_a_pickle_is_not_run(tmp_path):
    from pickle import dumps  # what an attacker would do

    trap = tmp_path / "trap"
    pickled = dumps(Evil(trap))
    with serve() as listener:
        with raw_client(listener) as client:
            assert refusal(client, pickled).kind == "malformed"
            assert refusal(client, envelope(payload=pickled)).kind == "malformed"
        assert ask(listener).hellos == HELLOS
    for reply in (pickled, envelope(payload=pickled)):
        with fake_listener(reply) as address, pytest.raises(WireError, match="does not decode"):
            ask(address)
    assert not trap.exists()
    package = Path(pynixlkv.__file__).parent
    users = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if re.search(r"\b(import|from) (c?pickle|marshal|shelve|dill)\b", path.read_text())
    }
    # The twin of NIXL's Python API reads NIXL's descriptor lists, and no other class, from pickles.
    assert users <= {"nixl_api"}


GARBAGE = {
    "empty": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "truncated": envelope()[:-1],
    "padded": envelope() + b"\x00",
    "not a map": msgspec.msgpack.encode([1, "prefill", {}, b""]),
    "wrong types": msgspec.msgpack.encode({"protocol": "1", "engine_id": 3}),
    "bad UTF-8": b"\x81\xa4\xff\xff\xff\xff\x01",
    "deep": b"\x91" * 100_000,
    "huge length": b"\xdf\xff\xff\xff\xff",
    "negative rank": envelope(payload=msgspec.msgpack.encode({"ranks": [[0, -1]]})),
    "rank of a bool": envelope(payload=msgspec.msgpack.encode({"ranks": [[0, True]]})),
    "huge rank": envelope(payload=msgspec.msgpack.encode({"ranks": [[0, 2**63]]})),
}


def test_garbage_is_refused_and_the_listener_goes_on(caplog):
    with serve() as listener:
        with raw_client(listener) as client:
            for name, message in GARBAGE.items():
                assert refusal(client, message).kind == "malformed", name
        with raw_client(listener, zmq.DEALER) as client:  # no empty delimiter, many frames
            client.send_multipart([b"a", b"b", b"c", b"d"])
            client.send(envelope())
            assert client.poll(TIMEOUT_S * 1000)
            assert b"hello of rank 3" in client.recv()
        with raw_client(listener) as client:  # too long: the connection is closed
            client.send(bytes(MAX_REQUEST_BYTES + 1))
        with socket.create_connection((listener.host, listener.port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
        assert ask(listener).hellos == HELLOS
    assert "failed to answer" not in caplog.text  # each was refused; none raised


def test_a_defect_in_an_answer_does_not_stop_the_listener(caplog):
    with serve() as listener:
        listener._listener.served = None
        with pytest.raises(HandshakeError, match="its log says why"):
            ask(listener)
        listener._listener.served = HELLOS
        assert ask(listener).hellos == HELLOS
    assert "Traceback" in caplog.text


def test_an_answer_with_other_ranks_is_refused():
    answer = {"type": "answer", "served": [[0, 0]], "hellos": []}
    reply = envelope(payload=msgspec.msgpack.encode(answer))
    with fake_listener(reply) as address, pytest.raises(WireError, match="instead of those"):
        ask(address, ranks=[(0, 0)])


def test_hellos_beyond_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr("pynixlkv.handshake.message.MAX_REPLY_BYTES", MAX_REQUEST_BYTES + 1000)
    with serve() as listener:
        with pytest.raises(HandshakeError, match="ask for fewer"):
            ask(listener)
        assert ask(listener, ranks=[(0, 1)]).hellos == {(0, 1): HELLOS[0, 1]}


def test_3200_concurrent_requests_get_identical_replies():
    with serve() as listener, ThreadPoolExecutor(64) as pool:

        def fifty(_):
            return [ask(listener, timeout=300.0) for _ in range(50)]

        replies = [engine for engines in pool.map(fifty, range(64)) for engine in engines]
    assert len(replies) == 3200
    assert all(engine.hellos == HELLOS for engine in replies)


def test_a_peer_that_accepts_and_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with (
            time_out_after(zmq.EVENT_CONNECTED),
            pytest.raises(HandshakeTimeout, match="accepted the connection and said nothing"),
        ):
            ask(silent.getsockname())
        started = time.monotonic()
        with pytest.raises(HandshakeTimeout):
            ask(silent.getsockname(), timeout=0.3)
        assert time.monotonic() - started >= 0.3


def test_time_outs_say_how_far_it_got():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    with (
        time_out_after(zmq.EVENT_CLOSED),
        pytest.raises(HandshakeTimeout, match="nobody listens there") as caught,
    ):
        ask(address)
    assert isinstance(caught.value, TimeoutError)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with (
            time_out_after(zmq.EVENT_HANDSHAKE_SUCCEEDED),
            pytest.raises(HandshakeTimeout, match="gave no answer"),
        ):
            ask(("127.0.0.1", port))


def test_a_listener_that_comes_later_is_found():
    with serve() as first:
        port = first.port
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, ("127.0.0.1", port))
        with serve(port=port):
            assert waiting.result().hellos == HELLOS


# --- secrets --------------------------------------------------------------------------------------


def wrong_keys():
    keys = find_keys(b"another secret")
    return keys.server_public, keys.client_public, keys.client_secret


def own_keys_with_the_right_server_key():
    return find_keys(SECRET).server_public, *zmq.curve_keypair()


TURNED_AWAY = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


@pytest.mark.parametrize("keys", [None, wrong_keys, own_keys_with_the_right_server_key])
def test_a_raw_client_without_the_secret_obtains_nothing(keys):
    with serve(secret=SECRET) as listener:
        with raw_client(listener, zmq.DEALER, keys and keys()) as client:
            monitor = client.get_monitor_socket()
            with suppress(zmq.Again):  # it may have been turned away already, and is not to wait
                client.send_multipart([b"", envelope()], zmq.DONTWAIT)
            seen = zmq.Event(0)
            while not seen & TURNED_AWAY:
                assert monitor.poll(TIMEOUT_S * 1000), f"neither served nor refused: {seen!r}"
                seen |= parse_monitor_message(monitor.recv_multipart())["event"]
            assert client.poll(0) == 0
            client.disable_monitor()
            monitor.close()
        assert zmq.Event.HANDSHAKE_SUCCEEDED not in seen
        assert ask(listener, secret=SECRET).hellos == HELLOS


def test_fetch_without_the_secret_or_with_another():
    with serve(secret=SECRET) as listener:
        with pytest.raises(HandshakeError, match="does not have a shared secret"):
            ask(listener)
        with (
            time_out_after(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
            pytest.raises(HandshakeTimeout, match="is the secret the same there"),
        ):
            ask(listener, secret=b"another")
    with serve() as listener, pytest.raises(HandshakeError, match="this side, which has a shared"):
        ask(listener, secret=SECRET)


def test_with_a_secret_nothing_crosses_the_wire_in_clear():
    telltale = [b"hello of rank", b"prefill", b"bfloat16", SECRET]
    with serve() as listener, Proxy(listener.port) as proxy:
        assert ask(proxy.address).hellos == HELLOS
        assert [text in proxy.recorded for text in telltale] == [True, True, True, False]
    with serve(secret=SECRET) as listener, Proxy(listener.port) as proxy:
        assert ask(proxy.address, secret=SECRET).hellos == HELLOS
        assert len(proxy.recorded) > sum(map(len, HELLOS.values()))
        assert not [text for text in telltale if text in proxy.recorded]


def test_keys_are_derived_alike_and_apart():
    keys = find_keys(SECRET)
    assert keys == find_keys(SECRET.decode())
    assert keys.server_public != keys.client_public
    assert zmq.curve_public(keys.server_secret) == keys.server_public
    assert keys != find_keys(SECRET + b"x")
    assert len(z85.decode(keys.client_secret)) == 32
    assert keys.client_secret.decode() not in repr(keys)


def test_secret_of_the_environment_or_of_a_file(monkeypatch, tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    monkeypatch.setenv("PYNIXLKV_SECRET_FILE", str(file))
    with serve() as listener:
        assert ask(listener).hellos == HELLOS
        assert ask(listener, secret=SECRET).hellos == HELLOS
    monkeypatch.setenv("PYNIXLKV_SECRET", SECRET.decode())
    with pytest.raises(ConfigError, match="both set"):
        serve()
    monkeypatch.delenv("PYNIXLKV_SECRET_FILE")
    with serve() as listener:
        assert ask(listener, secret=SECRET).hellos == HELLOS
    monkeypatch.delenv("PYNIXLKV_SECRET")
    monkeypatch.setenv("PYNIXLKV_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        serve()


def test_beyond_loopback_a_secret_or_an_explicit_no_is_needed():
    with pytest.raises(ConfigError, match="set PYNIXLKV_SECRET"):
        serve(host="0.0.0.0")
    with pytest.raises(ConfigError, match="set PYNIXLKV_SECRET"):
        ask(("192.0.2.1", 5600), timeout=0.1)
    with serve(host="0.0.0.0", secret=SECRET) as listener:
        assert ask(("127.0.0.1", listener.port), secret=SECRET).hellos == HELLOS
        with pytest.raises(ConfigError, match="only what it may bind to"):
            ask(listener, secret=SECRET)
    with serve(host="0.0.0.0", allow_insecure=True) as listener:
        assert ask(("127.0.0.1", listener.port)).hellos == HELLOS


def test_endpoints():
    address = Address("127.0.0.1", 7)
    assert resolve("127.0.0.1", 7, keys=None, allow_insecure=False) == [address]
    assert (address.endpoint, address.is_wildcard) == ("tcp://127.0.0.1:7", False)
    (wildcard,) = resolve("::", 7, keys=None, allow_insecure=True)
    assert (wildcard.endpoint, wildcard.is_wildcard) == ("tcp://[::]:7", True)
    with pytest.raises(ConfigError, match="cannot be resolved"):
        resolve("no.such.host.invalid", 7, keys=None, allow_insecure=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine_id": ""}, "engine_id is ''"),
        ({"compatibility": {"tp": 4}}, "'tp' is 4"),
        ({"ranks": [5]}, "rank is 5"),
        ({"ranks": [(0, -1)]}, r"rank is \(0, -1\)"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"secret": ""}, "secret is empty"),
    ],
)
def test_wrong_arguments(options, text):
    with serve() as listener, pytest.raises(ConfigError, match=text):
        ask(listener, **options)


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":5", "h:5x", ("h", 5.0), ("h", 65536), ("", 5), (b"h", 5), ("h",), 5],
)
def test_wrong_addresses(address):
    with pytest.raises(ConfigError, match=r"expected|cannot be resolved"):
        ask(address)


# --- close, drop, fork ----------------------------------------------------------------------------


def test_close_ends_the_thread_and_frees_the_port():
    listener = serve()
    threads = [t for t in threading.enumerate() if t.name == "pynixlkv-handshake-prefill"]
    assert len(threads) == 1
    listener.close()
    listener.close()
    assert not threads[0].is_alive()
    assert "closed" in repr(listener)
    with socket.create_server(("127.0.0.1", listener.port)):
        pass


def test_a_dropped_listener_warns_and_stops():
    listeners = [serve()]
    thread = listeners[0]._thread
    with pytest.warns(ResourceWarning, match="dropped without close"):
        listeners.clear()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_call_leaves_no_file_and_no_thread_behind():
    folders = [Path("/proc/self/fd"), Path("/proc/self/task")]
    with serve(secret=SECRET) as listener:
        assert ask(listener, secret=SECRET).hellos == HELLOS  # makes the process's context
        before = [len(list(folder.iterdir())) for folder in folders]
        for _ in range(20):
            with pytest.raises(RankNotFound):
                ask(listener, secret=SECRET, ranks=[(9, 9)])
            with pytest.raises(HandshakeError):
                ask(listener)
        with pytest.raises(HandshakeTimeout):
            ask(listener, secret=b"another", timeout=0.1)
    after = [len(list(folder.iterdir())) for folder in folders]
    assert all(a <= b for a, b in zip(after, before, strict=True))


LIMITED = """
import os, resource
from pynixlkv.errors import PynixlkvError
from pynixlkv.handshake import Handshake, fetch
kind, first = os.environ["KIND"], os.environ["ORDER"] == "first"
make = lambda name: Handshake(name, {(0, 0): b"x"}, compatibility={})
server = make("e")
ask = lambda: fetch(server.address, engine_id="e", compatibility={}, timeout=60)
if not first:
    ask()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
seen = set()
for spare in range(40):
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
    try:
        ask() if kind == "fetch" else make("other").close()
        seen.add("done")
    except PynixlkvError as error:
        seen.add(type(error).__name__)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
server.close()
print(*sorted(seen))
"""


@pytest.mark.parametrize("order", ["first", "later"])
@pytest.mark.parametrize("kind", ["fetch", "serve"])
def test_too_few_descriptors_are_an_error(kind, order):
    assert run_python(LIMITED, KIND=kind, ORDER=order) == "ResourceExhausted done"


def test_too_few_threads_are_an_error(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    with serve() as listener:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(ResourceExhausted, match="can't start new thread"):
            ask(listener)
        with pytest.raises(ResourceExhausted, match="no room for a Handshake"):
            serve()


HELD = """
import os, sys, time
from pynixlkv.handshake import Handshake
listener = Handshake("e", {(0, 0): b"x"}, compatibility={})
print(listener.port, flush=True)
if os.fork() == 0:
    print(flush=True)
sys.stdin.read()
"""


def test_a_forked_child_does_not_keep_the_port():
    engine = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HELD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with engine:
        port = int(engine.stdout.readline())
        engine.stdout.readline()  # the child runs, and has let go
        assert ask(("127.0.0.1", port), engine_id="e", compatibility={}).hellos == {(0, 0): b"x"}
        engine.kill()
        engine.wait()
        with serve(port=port) as successor:
            assert ask(successor).hellos == HELLOS


CHILD = """
import json, os, sys
from pynixlkv.handshake import Handshake, fetch
listener = Handshake("e", {(0, 0): b"x"}, compatibility={})
ask = lambda: fetch(listener.address, engine_id="e", compatibility={}).hellos == {(0, 0): b"x"}
assert ask()
pid = os.fork()
if pid == 0:
    listener.close()
    os._exit(0 if ask() else 2)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps([status, ask()]))
listener.close()
"""


def test_a_forked_child_may_ask_but_not_serve():
    output = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", CHILD],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert json.loads(output.stdout) == [0, True]
    assert output.stderr == ""
