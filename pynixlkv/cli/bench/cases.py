"""What is measured: transports, and cases on them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Direction = Literal["get", "put"]

_KIB, _MIB = 1 << 10, 1 << 20
_DIRECTIONS: tuple[Direction, ...] = ("get", "put")
# Bytes and window of one piece again and again.
_REPEATED = (
    *((size, 1) for size in (4 * _KIB, 16 * _KIB, 64 * _KIB, _MIB, 64 * _MIB)),
    *((size, 16) for size in (4 * _KIB, 64 * _KIB, _MIB)),
)
_REPEATED_POINTS = [(direction, *point) for direction in _DIRECTIONS for point in _REPEATED]
_SCATTERED_POINTS: list[tuple[Direction, int]] = [
    ("get", 16 * _KIB), ("get", 64 * _KIB), ("get", _MIB), ("put", 16 * _KIB)
]  # fmt: skip
_QUICK_REPEATED_POINTS: list[tuple[Direction, int, int]] = [
    ("get", 4 * _KIB, 1), ("get", 64 * _KIB, 1), ("put", _MIB, 16)
]  # fmt: skip
_SCATTERED_BYTES = 64 * _MIB
# Of one piece again and again: enough that the start and the end of a run do not count.
_REPEATED_BYTES = 256 * _MIB
_MOST_PIECES, _FEWEST_PIECES = 16384, 4
# On a busy machine each of these can wait for the other process to be scheduled.
_MOST_LATENCY_PIECES = 128


class Series(str, Enum):
    """What moves the bytes; the first two are limits that the others are compared with."""

    memcpy = "memcpy"
    perftest = "ucx_perftest"
    binding = "pynixlkv.ucx"
    ucx = "UcxAgent"
    ucx_allocated = "UcxAgent, allocated"
    nixl = "NixlAgent"


_SCATTERED = (Series.memcpy, Series.binding, Series.ucx, Series.nixl)
_SCATTERED_SHARED = (Series.memcpy, Series.ucx_allocated, Series.binding, Series.ucx)


@dataclass(frozen=True)
class Transport:
    """A way for bytes to go. Where UCX cannot send its own messages over a transport, tcp does.

    `scattered` has what is compared on scattered blocks. Shared memory has no error handling: it
    cannot notice the death of a peer. With `one_process` a worker reaches only itself. `absent` is
    the reason why a transport is not measured.
    """

    ucx_tls: str
    scattered: tuple[Series, ...] = _SCATTERED
    error_handling: bool = True
    one_process: bool = False
    absent: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the transport, the same for everything that is compared.

        With error handling UCX's rendezvous goes over tcp between processes of one host. Agents
        switch rendezvous off themselves, so it is off for all.
        """
        return {"UCX_TLS": self.ucx_tls, "UCX_RNDV_THRESH": "inf", "UCX_WARN_UNUSED_ENV_VARS": "n"}


TRANSPORTS = {
    "tcp": Transport("tcp"),
    "cma": Transport("cma,tcp"),
    "sysv": Transport("sysv,tcp", _SCATTERED_SHARED, error_handling=False),
    "posix": Transport("posix,tcp", _SCATTERED_SHARED, error_handling=False),
    "self": Transport(
        "self", (Series.memcpy, Series.binding), error_handling=False, one_process=True
    ),
    "cuda_ipc": Transport(
        "cuda_ipc,cuda_copy,cma,tcp",
        absent="needs memory of a GPU; bench/gpu.py of the sources measures it (make gpu)",
    ),
    "rc": Transport("rc,tcp"),
}


@dataclass(frozen=True)
class Case:
    """One thing to measure: one piece again and again, or blocks that are scattered at the target.

    At most `window` pieces are in flight at a time (of the thin binding and ucx_perftest).
    """

    transport: str
    direction: Direction
    pattern: Literal["repeated", "scattered"]
    piece_bytes: int
    count: int
    window: int
    series: tuple[Series, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that one run moves."""
        return self.piece_bytes * self.count

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory on each side."""
        return self.piece_bytes * (1 if self.pattern == "repeated" else self.count)

    @property
    def is_latency(self) -> bool:
        """Whether each piece waits for the one before it."""
        return self.pattern == "repeated" and self.window == 1

    def describe(self) -> str:
        """Return a name for people."""
        unit, name = (_MIB, "MiB") if self.piece_bytes >= _MIB else (_KIB, "KiB")
        how = f"window {self.window}" if self.pattern == "repeated" else "scattered"
        return f"{self.transport}: {self.direction} {self.piece_bytes // unit} {name}, {how}"


def make_cases(
    transports: Iterable[str] | None, *, quick: bool, series: Sequence[Series]
) -> list[Case]:
    """Return the cases of a run, grouped by transport; `series` has what can be compared here."""
    if transports is None:
        transports = (
            ("cma", "posix") if quick else (n for n, t in TRANSPORTS.items() if not t.absent)
        )
    cases = []
    for name in transports:
        if name not in TRANSPORTS:
            raise ConfigError(f"there is no transport {name!r}; use one of {', '.join(TRANSPORTS)}")
        transport = TRANSPORTS[name]
        if transport.absent:
            raise ConfigError(f"transport {name} cannot be measured: {transport.absent}")
        repeated = (Series.perftest, Series.binding)
        if set(repeated) <= set(series):
            for direction, size, window in _QUICK_REPEATED_POINTS if quick else _REPEATED_POINTS:
                most = _MOST_LATENCY_PIECES if window == 1 else _MOST_PIECES
                count = max(_FEWEST_PIECES, min(most, _REPEATED_BYTES // size))
                cases.append(Case(name, direction, "repeated", size, count, window, repeated))
        scattered = tuple(s for s in transport.scattered if s in series)
        if len(scattered) > 1:
            for direction, size in _SCATTERED_POINTS[:1] if quick else _SCATTERED_POINTS:
                count = _SCATTERED_BYTES // size
                cases.append(Case(name, direction, "scattered", size, count, 64, scattered))
    return cases
