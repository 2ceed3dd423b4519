"""The hello envelope: what is refused, and that nothing else is needed to refuse it."""

from __future__ import annotations

import random
import struct

import msgspec
import pytest

from pynixlkv import wire
from pynixlkv.errors import ConfigError, HandshakeError, ProtocolVersionError, WireError

HELLO = wire.Hello(
    agent="prefill-0",
    incarnation=bytes(range(16)),
    byte_order="little",
    engine="fake",
    engine_version="1.0",
    metadata=bytes(range(256)) * 2,
    spans=[wire.SpanRecord(4096, 65536, 0, 0), wire.SpanRecord(1 << 40, 1, 3, 1)],
    geometries=[b"one", b"two"],
)
SECRET = b"0123456789abcdef"


@pytest.mark.parametrize("secret", [None, SECRET, b"k" * 65])
def test_round_trip(secret):
    assert wire.unseal(wire.seal(HELLO, secret=secret), secret=secret) == HELLO
    assert wire.unseal(memoryview(wire.seal(HELLO, secret=secret)), secret=secret) == HELLO


@pytest.mark.parametrize("secret", [None, SECRET])
def test_ten_thousand_mutations_are_all_refused(secret):
    good = wire.seal(HELLO, secret=secret)
    rng = random.Random(7)
    for _ in range(10_000):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            kind = rng.randrange(6)
            at = rng.randrange(len(bad)) if bad else 0
            if kind == 0 and bad:
                bad[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del bad[at:]
            elif kind == 2:
                bad += rng.randbytes(rng.randint(1, 40))
            elif kind == 3:
                bad[at:at] = rng.randbytes(rng.randint(1, 9))
            elif kind == 4:
                del bad[at : at + rng.randint(1, 9)]
            else:
                bad[at : at + 8] = rng.randbytes(8)
        if bytes(bad) == good:
            continue
        with pytest.raises(HandshakeError):
            wire.unseal(bytes(bad), secret=secret)


def test_a_digest_made_without_the_secret_is_refused():
    forged = bytearray(wire.seal(HELLO))
    forged[6] = 1  # claims to carry a MAC
    with pytest.raises(WireError, match="another secret"):
        wire.unseal(bytes(forged), secret=SECRET)


def test_each_refusal_says_what_it_saw():
    good = wire.seal(HELLO)
    for bad, text in [
        (b"", "0 bytes are too few"),
        (b"GET / HTTP/1.1" + bytes(60), "not a pynixlkv hello"),
        (good + b"x", "announces"),
        (good[:6] + b"\x08\x00" + good[8:], "unknown flags 0x8"),
        (good[:-1] + bytes([good[-1] ^ 1]), "digest"),
    ]:
        with pytest.raises(WireError, match=text):
            wire.unseal(bad)
    with pytest.raises(ProtocolVersionError, match="version 9, this side 1") as caught:
        wire.unseal(good[:4] + struct.pack("<H", 9) + good[6:])
    assert (caught.value.local_version, caught.value.remote_version) == ("1", "9")
    with pytest.raises(WireError, match="exceeds the limit"):
        wire.unseal(bytes(wire.MAX_HELLO_BYTES + 1))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("agent", "", "empty agent name"),
        ("incarnation", b"short", "has 5 bytes, not 16"),
        ("spans", [wire.SpanRecord(0, 0, 0, 0)], "span 0"),
        ("spans", [wire.SpanRecord(0, 1, 0, 0), wire.SpanRecord(2**64 - 1, 2, 0, 0)], "span 1"),
        ("spans", [wire.SpanRecord(0, 1, 0, 5)], "span 0"),
        ("spans", [wire.SpanRecord(-1, 1, 0, 0)], "span 0"),
        ("metadata", "not bytes", "does not decode"),
        ("geometries", [1], "does not decode"),
    ],
)
def test_wellformed_nonsense_is_refused(field, value, text):
    bad = wire.seal(msgspec.structs.replace(HELLO, **{field: value}))
    with pytest.raises(WireError, match=text):
        wire.unseal(bad)


def test_secret_from_the_environment(monkeypatch):
    monkeypatch.delenv("PYNIXLKV_SECRET", raising=False)
    assert wire.check_secret(None) is None
    monkeypatch.setenv("PYNIXLKV_SECRET", "from the environment")
    assert wire.check_secret(None) == b"from the environment"
    assert wire.check_secret("text") == b"text"
    with pytest.raises(ConfigError, match="empty"):
        wire.check_secret(b"")
