"""Time as far as this process was there to observe it."""

from __future__ import annotations

import time
from random import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def retry_pause(
    first_s: float, attempt: int = 0, longest_s: float = 0.0, draw: Callable[[], float] = random
) -> float:
    """Return the seconds until another attempt: they double, up to a longest, and are spread.

    Those who have failed together come back between half and one and a half of that time, not
    together. `draw` returns numbers from 0 to 1.
    """
    # A power that no longest pause reaches would overflow after some thousand attempts.
    return min(first_s * 2.0 ** min(attempt, 64), max(longest_s, first_s)) * (0.5 + draw())


class ObservedClock:
    """Seconds for deadlines of what others do; a pause of this process does not count.

    A reader looks at the clock often. Readings further apart than `longest_gap` show that
    the process was stopped, or starved by a busy host. What others sent meanwhile is still to be
    received, so a gap counts as `longest_gap` and no more: deadlines longer than that do not pass
    before the reader has looked. A reader that is slow itself does not stop time.

    Parameters
    ----------
    clock : callable
        Seconds that only grow.
    longest_gap : float
        Above the reader's longest planned pause.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, longest_gap: float = 2.0
    ) -> None:
        self._clock = clock
        self._longest_gap = longest_gap
        self._last = clock()
        self._left_out = 0.0
        self.was_paused = False
        """Whether the last reading came after a pause."""

    def __call__(self) -> float:
        """Return the observed time."""
        now = self._clock()
        gap, self._last = now - self._last, now
        self.was_paused = gap > self._longest_gap
        if self.was_paused:
            self._left_out += gap - self._longest_gap
        return now - self._left_out
