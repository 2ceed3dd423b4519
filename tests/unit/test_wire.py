"""The hello envelope: what is refused, and that nothing else is needed to refuse it."""

from __future__ import annotations

import contextlib
import functools
import random
import struct

import msgspec
import numpy as np
import pytest
from mutations import mutate

from pynixlkv import wire
from pynixlkv._secret import check_secret
from pynixlkv.connector import messages
from pynixlkv.connector.metadata import Lease, ParallelSizes
from pynixlkv.errors import ConfigError, HandshakeError, ProtocolVersionError, WireError
from pynixlkv.geometry import KVCache
from pynixlkv.handshake import message
from pynixlkv.hello import Hello
from pynixlkv.types import MemorySpan, MemoryType

ENVELOPE = message.Envelope(wire.VERSION, "prefill", {"model": "m"}, b"payload")


class Note(msgspec.Struct):
    """Another kind of record."""


HELLO = Hello(
    agent="prefill-0",
    incarnation=bytes(range(16)),
    byte_order="little",
    transfer_backend="fake",
    backend_version="1.0",
    metadata=bytes(range(256)) * 2,
    spans=[
        MemorySpan(4096, 65536, MemoryType.DRAM, 0),
        MemorySpan(1 << 40, 1, MemoryType.VRAM, 3),
    ],
    geometries=[
        KVCache.from_tensors({"x": np.zeros((2, 4, 8))}, axes="MLA", kv_heads=None).geometry
    ],
)
SECRET = b"0123456789abcdef"


@pytest.mark.parametrize("secret", [None, SECRET, b"k" * 65])
def test_round_trip(secret):
    assert Hello.unseal(HELLO.seal(secret), secret) == HELLO
    assert Hello.unseal(memoryview(HELLO.seal(secret)), secret) == HELLO


@pytest.mark.parametrize("secret", [None, SECRET])
def test_ten_thousand_mutations_are_all_refused(secret):
    good = HELLO.seal(secret)
    rng = random.Random(7)
    for _ in range(10_000):
        with pytest.raises(HandshakeError):
            Hello.unseal(mutate(good, rng), secret)


PUSH = messages.Push(
    messages.ConsumerRank("decode", (0, 1), ParallelSizes(1, 2)), 7, "r", Lease(1, 2),
    ((1, 2),), (0,), (16,), 32,
)  # fmt: skip


@pytest.mark.parametrize(
    ("read", "good"),
    [
        (messages.decode, messages.encode(PUSH)),
        (functools.partial(message.decode, kind=message.Envelope), message.encode(ENVELOPE)),
    ],
    ids=["connector", "handshake"],
)
def test_damaged_messages_are_read_or_refused(read, good):
    rng = random.Random(8)
    for _ in range(10_000):
        with contextlib.suppress(WireError):
            read(mutate(good, rng))
    with pytest.raises(WireError, match="does not decode"):
        read(b"\x91" * 100_000)  # nested too deeply


def test_a_digest_made_without_the_secret_is_refused():
    forged = bytearray(HELLO.seal())
    forged[6] = 1  # claims to carry a MAC
    with pytest.raises(WireError, match="another secret"):
        Hello.unseal(bytes(forged), SECRET)


def test_each_refusal_says_what_it_saw():
    good = HELLO.seal()
    for bad, text in [
        (b"", "0 bytes are too few"),
        (b"GET / HTTP/1.1" + bytes(60), "not a pynixlkv hello"),
        (good + b"x", "announces"),
        (good[:6] + b"\x08\x00" + good[8:], "unknown flags 0x8"),
        (good[:-1] + bytes([good[-1] ^ 1]), "digest"),
    ]:
        with pytest.raises(WireError, match=text):
            Hello.unseal(bad)
    text = f"version 9, this side {wire.VERSION}"
    with pytest.raises(ProtocolVersionError, match=text) as caught:
        Hello.unseal(good[:4] + struct.pack("<H", 9) + good[6:])
    assert (caught.value.local_version, caught.value.remote_version) == (
        str(wire.VERSION),
        "9",
    )
    with pytest.raises(WireError, match="exceeds the limit"):
        Hello.unseal(bytes(wire.MAX_BYTES + 1))


def span(address, nbytes, *, memory=0, device=0):
    return MemorySpan(address, nbytes, memory, device)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("agent", "", r"`str` of length >= 1 - at `\$.agent`"),
        ("incarnation", b"short", r"`bytes` of length >= 16 - at `\$.incarnation`"),
        ("spans", [span(0, 0)], r">= 1 - at `\$.spans\[0\]\[1\]`"),
        ("spans", [span(0, 1), span(2**60, 2)], r"at `\$.spans\[1\]\[0\]`"),
        ("spans", [span(0, 1, memory=5)], r"Invalid enum value 5 - at `\$.spans\[0\]\[2\]`"),
        ("spans", [span(-1, 1)], r">= 0 - at `\$.spans\[0\]\[0\]`"),
        ("metadata", "not bytes", "does not decode"),
        ("geometries", [1], "does not decode"),
    ],
)
def test_wellformed_nonsense_is_refused(field, value, text):
    bad = msgspec.structs.replace(HELLO, **{field: value}).seal()
    with pytest.raises(WireError, match=text):
        Hello.unseal(bad)


def test_one_kind_of_record_does_not_pass_for_another():
    with pytest.raises(WireError, match="the note's digest does not fit"):
        wire.unseal(HELLO.seal(), Note, "note")


def test_secret_from_the_environment(monkeypatch):
    monkeypatch.delenv("PYNIXLKV_SECRET", raising=False)
    assert check_secret(None) is None
    monkeypatch.setenv("PYNIXLKV_SECRET", "from the environment")
    assert check_secret(None) == b"from the environment"
    assert check_secret("text") == b"text"
    with pytest.raises(ConfigError, match="empty"):
        check_secret(b"")
