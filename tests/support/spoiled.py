"""Bytes that go wrong on the way to a consumer."""

from __future__ import annotations

import ctypes

import numpy as np

from pynixlkv.connector.verification import Verification


class SpoiledVerification(Verification):
    """Flips a bit of the first token of the next `count` requests that this process receives."""

    count = 0

    def begin(self) -> None:
        if SpoiledVerification.count > 0 and self._ctx.config.checksums == "all":
            SpoiledVerification.count -= 1
            group = self._ctx.cache.groups[0]
            block = int(np.asarray(self._tables[group.name])[0])
            address = group.regions[0].address + block * group.regions[0].block.stride
            ctypes.c_uint8.from_address(address).value ^= 1
        super().begin()
