"""The options of a connector, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pynixlkv.connector.metadata import Checksums, TransferMode

_MAY_BE_0 = ("conversation_blocks", "recompute_threshold")


@dataclass(frozen=True)
class ConnectorConfig:
    """Options of `ConnectorScheduler` and `ConnectorWorker`; all times in seconds."""

    transfer_mode: TransferMode = "pull"
    """``"pull"``, the consumer reads; ``"push"``, the producer writes. The same on both sides."""
    lease_duration: float = 30.0
    """How long a producer holds blocks after the end of the prefill and after each heartbeat."""
    heartbeat_interval: float | None = None
    """Time between two heartbeats to a producer; by default a sixth of its lease duration."""
    missed_heartbeats: int = 3
    """A producer that leaves this many in a row unanswered counts as dead."""
    transfer_timeout: float = 30.0
    """Longest time to receive a request."""
    handshake_timeout: float = 5.0
    """Longest time to get a producer's metadata."""
    peer_ttl: float = 3600.0
    """Producers that are idle for this long are forgotten."""
    max_leases: int = 16384
    """Most requests that a producer holds at once."""
    conversation_blocks: int = 0
    """Most blocks of finished turns that a consumer holds for the next turns of conversations; the
    oldest turns make room for new ones. 0: none are held."""
    conversation_seconds: float = 480.0
    """Longest time that a finished turn is held for the next one."""
    recompute_threshold: int = 64
    """A producer computes fewer tokens than this itself instead of fetching them from a consumer's
    finished turn."""
    partial_blocks: bool = True
    """Hand over a last block that is not full. Otherwise prompts are cut to whole blocks, and one
    that is shorter than a block is not handed over."""
    self_test: bool = True
    """Before the first request from a producer, test that both sides mean the same by the axes of
    their caches; see `pynixlkv.connector.self_test`. Takes up to 4 MiB of the cache's memory."""
    max_bytes: int | None = None
    """Longest descriptor, see `pynixlkv.plan.TransferPlan`."""
    checksums: Checksums = "sampled"
    """Compare digests of received KV with the producer's: ``"all"`` of it, ``"sampled"``, or
    ``"off"``. The consumer's option; every producer answers."""
    checksum_fraction: float = 1 / 16
    """Part of a request's KV that ``"sampled"`` compares; at least one unit of each group."""
    compatibility: Mapping[str, str] = field(default_factory=dict)
    """What both sides must agree on beyond their geometries (model, attention backend)."""
    allow_insecure: bool = False
    """Fetch metadata beyond loopback without a shared secret."""

    def __post_init__(self) -> None:
        if self.transfer_mode not in ("pull", "push"):
            raise ConfigError(f"transfer_mode is {self.transfer_mode!r}; expected 'pull' or 'push'")
        if self.checksums not in ("off", "sampled", "all"):
            raise ConfigError(
                f"checksums is {self.checksums!r}; expected 'off', 'sampled' or 'all'"
            )
        if self.checksum_fraction > 1:
            raise ConfigError(
                f"checksum_fraction is {self.checksum_fraction}; expected a number above 0, up to 1"
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                if value == 0 and each.name in _MAY_BE_0:
                    continue
                raise ConfigError(f"{each.name} is {value}; expected a number above 0")
        if self.heartbeat_period(self.lease_duration) >= self.lease_duration:
            raise ConfigError(
                f"heartbeat_interval is {self.heartbeat_interval} s, not below lease_duration, "
                f"{self.lease_duration} s; leases would run out between two heartbeats"
            )

    def heartbeat_period(self, lease_duration: float) -> float:
        """Return the time between two heartbeats for leases of this duration."""
        return self.heartbeat_interval or lease_duration / 6
