"""The clock of a simulated engine: true time from another zero, a little fast or slow, at a rate that may change.

It goes on while its engine is paused, as CLOCK_BOOTTIME does. Crystals are off by some tens of millionths. A time
server may slew a clock much faster than that, and the proofs of the product allow for as much as `SLEW_PPB_MAX`.
"""

from __future__ import annotations

import random

from tests.simulation.level1.heap import SECOND

CRYSTAL_PPB_MAX = 45_000
SLEW_PPB_MAX = 83_333_000
"""The most that chrony slews by."""

WALL_EPOCH_SECONDS = 1.7e9


class DriftingClock:
    """Converts between true and local nanoseconds. `rate_ppb`: by how many parts in 10**9 it runs fast.

    Wall time is for people who read a trace: it jumps, and nothing may depend on it.
    """

    __slots__ = ("_local_ns", "_rate_ppb", "_true_ns", "_wall_jumps")

    def __init__(self, *, zero_ns: int, rate_ppb: int) -> None:
        self._true_ns = 0
        self._local_ns = zero_ns
        self._rate_ppb = rate_ppb
        self._wall_jumps: list[tuple[int, float]] = []

    def local_ns(self, true_ns: int) -> int:
        passed_ns = true_ns - self._true_ns
        return self._local_ns + passed_ns + passed_ns * self._rate_ppb // SECOND

    def true_ns(self, local_ns: int) -> int:
        """The first true moment at which the clock shows at least `local_ns`, if its rate stays what it is."""
        return self._true_ns - (self._local_ns - local_ns) * SECOND // (SECOND + self._rate_ppb)

    def change_rate(self, true_ns: int, rate_ppb: int) -> None:
        """From `true_ns` on it runs at another rate."""
        self._local_ns, self._true_ns = self.local_ns(true_ns), true_ns
        self._rate_ppb = rate_ppb

    def jump_wall(self, true_ns: int, seconds: float) -> None:
        """Somebody sets the wall clock; the monotonic one does not notice."""
        self._wall_jumps.append((true_ns, seconds))

    def wall(self, true_ns: int) -> float:
        """Unix time in seconds."""
        jumped = sum(seconds for at_ns, seconds in self._wall_jumps if at_ns <= true_ns)
        return WALL_EPOCH_SECONDS + true_ns / SECOND + jumped


def draw_clock(chance: random.Random) -> DriftingClock:
    rate_ppb = chance.randint(-CRYSTAL_PPB_MAX, CRYSTAL_PPB_MAX)
    return DriftingClock(zero_ns=chance.randrange(10**15), rate_ppb=rate_ppb)
