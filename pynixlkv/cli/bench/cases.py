"""What is measured: transports, and cases on them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

import msgspec

from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["TRANSPORTS", "Case", "Fault", "Operation", "Series", "Transport", "make_cases"]

Operation = Literal["get", "put"]

_KIB, _MIB = 1 << 10, 1 << 20
_TOTAL_BYTES = 64 * _MIB
# Of one piece again and again: long enough that beginning and end do not count.
_REPEATED_BYTES = 256 * _MIB
_MOST_PIECES, _FEWEST_PIECES = 16384, 4
# On a busy machine each of these can wait for the other process to get its turn.
_MOST_LATENCY_PIECES = 128


class Series(str, Enum):
    """What moves the bytes; the first three are limits that the others are compared with.

    ucx_perftest uses memory that UCX has allocated. Where that is not shared memory nobody has ever
    written it, and for that Linux has one page of zeros that stays in the cache. Both kinds are
    measured too, to compare like with like.
    """

    memcpy = "memcpy"
    memcpy_mapped = "memcpy, same blocks"
    perftest = "ucx_perftest"
    binding = "pynixlkv.ucx"
    binding_unwritten = "pynixlkv.ucx, unwritten"
    binding_allocated = "pynixlkv.ucx, allocated"
    ucx = "UcxAgent"
    ucx_allocated = "UcxAgent, allocated"
    nixl = "NixlAgent"
    nixl_python = "nixl"


class Fault(str, Enum):
    """What to spoil on purpose: one run in ten, or a byte that has arrived."""

    run = "run"
    byte = "byte"


@dataclass(frozen=True)
class Transport:
    """A way for bytes to go, and how to make UCX take it.

    Parameters
    ----------
    ucx_tls : str
        Value of ``UCX_TLS``. Where a transport cannot carry UCX's own messages, tcp does.
    repeated, scattered : tuple of Series
        What is compared on it, the limit first: for one piece again and again, and for blocks.
    error_handling : bool
        Whether connections notice the death of a peer, of which shared memory is not capable.
        `Series.ucx_allocated` does not need it to be: its own connections do in any case.
    one_process : bool
        Whether it reaches nothing but the worker itself: there is no other process then.
    absent : str
        Why it is not measured; empty if it is.
    """

    ucx_tls: str
    repeated: tuple[Series, ...] = ()
    scattered: tuple[Series, ...] = ()
    error_handling: bool = True
    one_process: bool = False
    absent: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for it, the same for everything that is compared.

        With error handling UCX's rendezvous goes over tcp between processes of one host; agents
        switch it off by themselves, so it is off for all.
        """
        return {"UCX_TLS": self.ucx_tls, "UCX_RNDV_THRESH": "inf", "UCX_WARN_UNUSED_ENV_VARS": "n"}

    def repeated_series(self, operation: Operation) -> tuple[Series, ...]:
        """Return what is compared for one piece; nothing that is written to is unwritten."""
        unwritten = Series.binding_unwritten
        return tuple(s for s in self.repeated if operation == "get" or s is not unwritten)

    def scattered_series(self, operation: Operation) -> tuple[Series, ...]:
        """Return what is compared for blocks; only reads are repeated on the same blocks."""
        mapped = Series.memcpy_mapped
        return tuple(s for s in self.scattered if operation == "get" or s is not mapped)


_REPEATED = (Series.perftest, Series.binding_unwritten, Series.binding)
_SCATTERED = (Series.memcpy, Series.binding, Series.ucx, Series.nixl, Series.nixl_python)
_REPEATED_SHARED = (Series.perftest, Series.binding_allocated, Series.binding)
_SCATTERED_SHARED = (
    Series.memcpy_mapped, Series.memcpy, Series.ucx_allocated, Series.binding, Series.ucx
)  # fmt: skip

TRANSPORTS = {
    "tcp": Transport("tcp", _REPEATED, _SCATTERED),
    "cma": Transport("cma,tcp", _REPEATED, _SCATTERED),
    "sysv": Transport("sysv,tcp", _REPEATED_SHARED, _SCATTERED_SHARED, error_handling=False),
    "posix": Transport("posix,tcp", _REPEATED_SHARED, _SCATTERED_SHARED, error_handling=False),
    "self": Transport(
        "self", _REPEATED, (Series.memcpy, Series.binding), error_handling=False, one_process=True
    ),
    "cuda_ipc": Transport(
        "cuda_ipc,cuda_copy,cma,tcp",
        absent="needs memory of a GPU; bench/gpu.py of the sources measures it (make gpu)",
    ),
    "rc": Transport("rc,tcp", _REPEATED, _SCATTERED),
}


class Case(msgspec.Struct, frozen=True):
    """One thing to measure.

    Attributes are the transport (of `TRANSPORTS`), ``"get"`` or ``"put"``, whether one piece moves
    again and again or blocks move that are scattered at the target, bytes of a piece, how many of
    them, how many at most at a time (of the thin binding and ucx_perftest), and what moves them. A
    device is ``"cpu"``, or one of torch: ``"torch:cuda:0"``.
    """

    transport: str
    operation: Operation
    pattern: Literal["repeated", "scattered"]
    piece_bytes: int
    count: int
    window: int
    series: tuple[Series, ...]
    initiator_device: str = "cpu"
    target_device: str = "cpu"
    fault: Fault | None = None

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
        size = (
            f"{self.piece_bytes // _MIB} MiB"
            if self.piece_bytes >= _MIB
            else f"{self.piece_bytes // _KIB} KiB"
        )
        what = f"window {self.window}" if self.pattern == "repeated" else "scattered"
        name = f"{self.transport}: {self.operation} {size}, {what}"
        ends = [
            device.removeprefix("torch:") for device in (self.initiator_device, self.target_device)
        ]
        arrow = "<-" if self.operation == "get" else "->"
        return name if set(ends) == {"cpu"} else f"{name}, {ends[0]} {arrow} {ends[1]}"


def make_cases(
    transports: Iterable[str] | None = None,
    *,
    quick: bool = False,
    series: Sequence[Series] = tuple(Series),
    fault: Fault | None = None,
) -> list[Case]:
    """Return the cases of a run.

    Parameters
    ----------
    transports : iterable of str, optional
        Names in `TRANSPORTS`; by default all that are not absent.
    quick : bool
        A few cases that take seconds.
    series : sequence of Series
        What can be compared here.
    fault : Fault, optional
        What to spoil.

    Returns
    -------
    list of Case
        Grouped by transport.

    Raises
    ------
    ConfigError
        If a transport is unknown or cannot be measured.
    """
    if transports is None:
        names = ["cma", "posix"] if quick else [n for n, t in TRANSPORTS.items() if not t.absent]
    else:
        names = list(transports)
    cases = []
    for name in names:
        if name not in TRANSPORTS:
            raise ConfigError(f"there is no transport {name!r}; use one of {', '.join(TRANSPORTS)}")
        transport = TRANSPORTS[name]
        if transport.absent:
            raise ConfigError(f"transport {name} cannot be measured: {transport.absent}")
        if Series.perftest in series:
            for operation, size, window in (
                _repeated_points(quick=quick) if transport.repeated else []
            ):
                compared = tuple(s for s in transport.repeated_series(operation) if s in series)
                most = _MOST_LATENCY_PIECES if window == 1 else _MOST_PIECES
                count = max(_FEWEST_PIECES, min(most, _REPEATED_BYTES // size))
                cases.append(
                    Case(name, operation, "repeated", size, count, window, compared, fault=fault)
                )
        for operation, size in _scattered_points(quick=quick):
            scattered = tuple(s for s in transport.scattered_series(operation) if s in series)
            if len(scattered) > 1:
                count = max(1, _TOTAL_BYTES // size)
                cases.append(
                    Case(name, operation, "scattered", size, count, 64, scattered, fault=fault)
                )
    return cases


def _repeated_points(*, quick: bool) -> list[tuple[Operation, int, int]]:
    """Return operation, bytes and window."""
    if quick:
        return [("get", 4 * _KIB, 1), ("get", 64 * _KIB, 1), ("put", _MIB, 16)]
    points = [(size, 1) for size in (4 * _KIB, 16 * _KIB, 64 * _KIB, _MIB, 64 * _MIB)]
    points += [(size, 16) for size in (4 * _KIB, 64 * _KIB, _MIB)]
    operations: tuple[Operation, ...] = ("get", "put")
    return [(operation, *point) for operation in operations for point in points]


def _scattered_points(*, quick: bool) -> list[tuple[Operation, int]]:
    """Return operation and bytes."""
    if quick:
        return [("get", 16 * _KIB)]
    sizes = [16 * _KIB, 64 * _KIB, _MIB]
    return [*(("get", size) for size in sizes), ("put", 16 * _KIB)]
