"""Memory with guard bytes, and running a request of the thin binding to its end."""

import time

import numpy as np

from pynixlkv.nixl import XferState

GUARD = 64


class Area:
    """Random bytes between guard bytes, of which only the inside is registered."""

    def __init__(self, num_bytes, seed):
        rng = np.random.default_rng(seed)
        self.whole = rng.integers(0, 256, num_bytes + 2 * GUARD, dtype=np.uint8)
        self.inside = self.whole[GUARD:-GUARD]
        self.expected = self.whole.copy()

    def rows(self, blocks, block_bytes):
        base = self.inside.ctypes.data
        return np.array([(base + b * block_bytes, block_bytes, 0) for b in blocks], dtype=np.uint64)

    def check(self):
        """All bytes, guards included, are as expected."""
        assert np.array_equal(self.whole, self.expected)


def run(agent, request, timeout=60.0, notification=None):
    """Post and poll to the end."""
    deadline = time.monotonic() + timeout
    state = agent.post_xfer_req(request, notification)
    while state == XferState.PENDING:
        assert time.monotonic() < deadline, f"{request!r} did not end"
        state = agent.get_xfer_status(request)
    assert state == XferState.DONE
    assert request.state == XferState.DONE


def take_notifications(agent, count, timeout=60.0):
    """Wait for a number of notifications."""
    notes = []
    deadline = time.monotonic() + timeout
    while len(notes) < count:
        assert time.monotonic() < deadline, f"got only {notes}"
        notes += agent.get_notifs()
    return notes
