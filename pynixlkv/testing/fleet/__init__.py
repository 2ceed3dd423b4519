"""A fleet of engines on one thread: the connector's real code on virtual time and networks."""

from pynixlkv.testing.fleet.checks import Violation
from pynixlkv.testing.fleet.simulation import SCENARIOS, Fleet, FleetOptions
from pynixlkv.testing.fleet.trace import TracedRequest, read_mooncake, synthetic

__all__ = [
    "SCENARIOS",
    "Fleet",
    "FleetOptions",
    "TracedRequest",
    "Violation",
    "read_mooncake",
    "synthetic",
]
