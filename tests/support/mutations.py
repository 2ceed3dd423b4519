"""Damaged copies of a message."""

from __future__ import annotations

import random


def mutate(good: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one to three damages, never the same bytes."""
    bad = bytearray(good)
    while bytes(bad) == good:
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(bad)) if bad else 0
            length = rng.randint(1, 30)
            kind = rng.randrange(6)
            if kind == 0 and bad:
                bad[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del bad[at:]
            elif kind == 2:
                bad += rng.randbytes(length)
            elif kind == 3:
                bad[at:at] = rng.randbytes(length)
            elif kind == 4:
                del bad[at : at + length]
            else:
                bad[at : at + 8] = rng.randbytes(8)
    return bytes(bad)
