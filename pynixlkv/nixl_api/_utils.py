"""What ``nixl._utils`` offers: raw memory for examples and tests."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def malloc_passthru(size: int) -> int:
    """Return the address of new memory."""
    address = _libc.malloc(size)
    if not address:
        raise MemoryError(f"{size} bytes")
    return int(address)


def free_passthru(address: int) -> None:
    """Free such memory."""
    _libc.free(address)


def ba_buf(address: int, size: int) -> None:
    """Fill memory with bytes of 0xba."""
    ctypes.memset(address, 0xBA, size)


def verify_transfer(address1: int, address2: int, size: int) -> None:
    """Compare memory."""
    if ctypes.string_at(address1, size) != ctypes.string_at(address2, size):
        raise AssertionError(f"{size} bytes at {address1:#x} and {address2:#x} differ")
