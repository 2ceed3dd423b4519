"""What has to hold at every moment of a run, and the audits that look for what has grown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pynixlkv.testing.fleet.engine import Engine, FleetRank

_SPARE = 64
"""Entries that a part of a connector may have beside those of what is active."""
_WINDOW_S = 10.0
_MOST_CONTACTS = 15
"""Of one address by one worker in ten seconds; after a failure the connector waits for one."""


class Violation(AssertionError):
    """An invariant does not hold; the run ends."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


def note_contact(rank: FleetRank, address: tuple[str, int]) -> None:
    """Count a handshake; raise if a worker asks one address again and again."""
    now = rank.events.now
    began, count = rank.contacts.get(address, (now, 0))
    if now - began > _WINDOW_S:
        began, count = now, 0
    rank.contacts[address] = began, count + 1
    if count >= _MOST_CONTACTS:
        raise Violation(
            "retry without limit",
            f"rank {rank.rank} of {rank.engine.id} has asked {address} {count + 1} times in "
            f"{now - began:.1f} s",
        )


def audit(engine: Engine) -> None:
    """Raise if an engine has state that nothing needs, or sends more than its requests need."""
    now, config = engine.events.now, engine.options.config
    seconds = now - engine.counted_at
    active = len(engine.jobs) + len(engine.held)
    _check_sizes(engine, "its scheduler", engine.scheduler, active)
    handed, engine.num_counted = engine.num_handed - engine.num_counted, engine.num_handed
    engine.counted_at = now
    beats = seconds / config.heartbeat_period(config.lease_duration) + 1
    for rank in engine.ranks:
        native = rank.native
        rank.contacts = {k: v for k, v in rank.contacts.items() if now - v[0] <= _WINDOW_S}
        ttl = config.peer_ttl * 1.1 / engine.rate
        for peer in native.links.values():
            unused = now - max(peer.last_used, peer.last_heard)
            if unused > 2 * (ttl + config.lease_duration) + engine.fleet.network.detection:
                raise Violation(
                    "peer state",
                    f"{native.name} is connected to {peer.name}, unused for {unused:.0f} s",
                )
        worker = rank.worker
        for part in ("_receiver", "_sender", "_engines"):
            _check_sizes(engine, part, getattr(worker, part), active + 2 * len(native.links))
        peers = len(native.links) + len(native.users)
        done = native.num_sent, native.num_submitted
        sent, reads = (now - before for now, before in zip(done, rank.counted, strict=True))
        rank.counted = done
        requests = handed + active + 4
        for what, count, limit in (
            ("messages", sent, 16 * requests + 8 * peers * beats),
            ("transfers", reads, 64 * requests),
        ):
            if count > limit:
                raise Violation(
                    what, f"{count} by {native.name} in {seconds:.0f} s; at most {limit:.0f}"
                )


def _check_sizes(engine: Engine, part: str, owner: object, active: int) -> None:
    """Raise if a container has more entries than what is active explains."""
    for name, value in vars(owner).items():
        if not isinstance(value, (dict, set, list)) or name in _FIXED:
            continue
        # Things of the past are remembered, up to a number.
        if type(value).__name__ != "_Recent" and len(value) > _SPARE + 4 * active:
            raise Violation(
                "state",
                f"{part.strip('_')} of {engine.id} has {len(value)} entries in {name}, with "
                f"{active} requests and peers",
            )


_FIXED = {"_free_words"}
