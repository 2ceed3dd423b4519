"""What a run has shown: a report, its table, and a drawing."""

from __future__ import annotations

import resource
import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pynixlkv.testing.fleet.simulation import Fleet, FleetOptions

_PEER_MIB = 0.07
"""Of a connection, at most; measured with real processes, see the page "Size a fleet"."""


@dataclass(frozen=True)
class FleetReport:
    """The results of a run; times in seconds, of virtual time unless they say otherwise."""

    options: FleetOptions
    simulated_s: float
    wall_s: float
    cpu_s: float
    events: int
    requests: int
    ends: dict[str, int]
    """Requests by their end."""
    failures: dict[str, int]
    """Attempts that have failed, by cause; the router tries again."""
    ghosts: dict[str, int]
    engines: dict[str, int]
    """What has happened to engines."""
    hand_offs: int
    hand_offs_per_s: float
    hand_off_s: dict[str, float]
    """Time of a hand-off: median, 90 %, 99 %, longest."""
    first_contacts: int
    first_contact_s: dict[str, float]
    """Time of a handshake, with the waiting at its server and the pauses before asking again."""
    handshake_load: dict[str, int]
    """Connections to handshake servers, those that were dropped because there were too many at
    once, and the most at one server in a tenth of a second."""
    messages: int
    messages_per_hand_off: float
    message_bytes_per_hand_off: float
    transfers_per_hand_off: float
    descriptors_per_hand_off: float
    bytes_per_hand_off: float
    """Of the simulator's small blocks."""
    held_blocks: dict[str, float]
    """Blocks held by leases in the whole fleet, over time: mean and most."""
    connections: int
    """Made in the whole run, one direction each."""
    engine_connections: dict[str, float]
    """Connections of an engine, all ranks together, at the end: mean and most."""
    engine_connection_mib: float
    """Memory for the most connections of an engine, as measured with real processes."""
    checks: int
    """Audits of an engine; other checks are made at each end of a request and of a lease."""
    max_rss_mib: float

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible data."""
        made = {each.name: getattr(self, each.name) for each in fields(self)}
        made["options"] = asdict(self.options)
        return made


def make_report(fleet: Fleet, cpu_s: float) -> FleetReport:
    """Sum a run up."""
    counts, network, options = fleet.counts, fleet.network, fleet.options
    done = max(len(counts.hand_offs), 1)
    blocks = [sample.blocks for sample in counts.samples]
    peers = [
        sum(len(rank.native.links) + len(rank.native.users) for rank in slot.engine.ranks)
        for slot in fleet.slots
        if slot.engine is not None
    ] or [0]
    return FleetReport(
        options=options,
        simulated_s=fleet.events.now,
        wall_s=time.perf_counter() - fleet.began_at,
        cpu_s=cpu_s,
        events=fleet.events.num_done,
        requests=sum(counts.ends.values()),
        ends=dict(counts.ends.most_common()),
        failures=dict(counts.reasons.most_common()),
        ghosts=dict(counts.ghosts.most_common()),
        engines=dict(counts.events.most_common()),
        hand_offs=len(counts.hand_offs),
        hand_offs_per_s=len(counts.hand_offs) / options.duration,
        hand_off_s=_spread(counts.hand_offs),
        first_contacts=len(counts.contacts),
        first_contact_s=_spread(counts.contacts),
        handshake_load={
            "asked": counts.connections_asked,
            "dropped": counts.dropped,
            "most": counts.most_asked,
        },
        messages=network.num_notifications,
        messages_per_hand_off=network.num_notifications / done,
        message_bytes_per_hand_off=network.num_notification_bytes / done,
        transfers_per_hand_off=network.num_transfers / done,
        descriptors_per_hand_off=network.num_rows / done,
        bytes_per_hand_off=network.num_moved / done,
        held_blocks={"mean": sum(blocks) / max(len(blocks), 1), "most": max(blocks, default=0)},
        connections=network.num_connects,
        engine_connections={"mean": sum(peers) / len(peers), "most": max(peers)},
        engine_connection_mib=max(peers) * _PEER_MIB,
        checks=counts.audits,
        max_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    parts = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
    return {name: ordered[round(last * part)] for name, part in parts.items()}


def render(report: FleetReport) -> str:
    """Return the report as a table."""
    options, load = report.options, report.handshake_load
    rows = [
        (
            "fleet",
            f"{options.prefill} prefill and {options.decode} decode engines of TP {options.tp}, "
            f"{(options.prefill + options.decode) * options.tp} ranks",
        ),
        (
            "time",
            f"{report.simulated_s:.0f} s simulated in {report.wall_s:.0f} s, {report.cpu_s:.0f} s "
            f"of one core, {report.events} events, {report.max_rss_mib:.0f} MiB",
        ),
        ("requests", f"{report.requests}: {_listed(report.ends)}"),
        ("engines", _listed(report.engines) or "all live"),
        ("failed attempts", _listed(report.failures) or "none"),
        ("hand-offs", f"{report.hand_offs}, {report.hand_offs_per_s:.1f} a second"),
        ("their time", _times(report.hand_off_s)),
        ("first contacts", f"{report.first_contacts}: {_times(report.first_contact_s)}"),
        (
            "handshakes",
            f"{load['asked']} connections, {load['dropped']} of them dropped; at most "
            f"{load['most']} at a server in 0.1 s",
        ),
        (
            "of a hand-off",
            f"{report.messages_per_hand_off:.1f} messages of "
            f"{report.message_bytes_per_hand_off:.0f} bytes together, "
            f"{report.transfers_per_hand_off:.1f} transfers, "
            f"{report.descriptors_per_hand_off:.0f} descriptors",
        ),
        (
            "held by leases",
            f"{report.held_blocks['mean']:.0f} blocks, at most {report.held_blocks['most']:.0f}",
        ),
        (
            "connections",
            f"{report.engine_connections['mean']:.0f} of an engine, at most "
            f"{report.engine_connections['most']:.0f}, {report.engine_connection_mib:.0f} MiB",
        ),
        ("invariants", f"all held; {report.checks} audits of an engine"),
    ]
    if report.ghosts:
        rows.insert(5, ("repeated hand-offs", _listed(report.ghosts)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def _times(spread: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in spread.items()) or "none"


def check_plot() -> None:
    """Raise before a run if it cannot be drawn."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "--plot needs the package matplotlib, which is not installed; install it with: "
            'pip install "pynixlkv[bench]"'
        ) from None


def draw(fleet: Fleet, path: Path) -> None:
    """Draw a run over its time, and the times of its hand-offs."""
    from matplotlib.figure import Figure

    samples, counts = fleet.counts.samples, fleet.counts
    times = [sample.at for sample in samples]
    figure = Figure(figsize=(9.0, 6.4), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for name in ("requests", "blocks", "peers"):
        axes = next(panels)
        axes.plot(times, [getattr(sample, name) for sample in samples], lw=1)
        axes.set_title({"blocks": "blocks held by leases", "peers": "connections"}.get(name, name))
        axes.set_xlabel("simulated seconds")
        axes.grid(visible=True, alpha=0.3)
    axes = next(panels)
    for label, values in (("hand-off", counts.hand_offs), ("first contact", counts.contacts)):
        ordered = sorted(values)
        parts = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axes.plot([1e3 * value for value in ordered], parts, label=label, lw=1)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_title("part that is done within a time")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=96)
