"""The clock of the shell.

Machines never read a clock. Actors read this one, so that the simulator can replace it. Times are integer nanoseconds
of a monotonic clock of this process; they are comparable to nothing outside of it. What crosses a process is a
duration, or is converted with the offset that a handshake measures (`ClockSample`).
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

NS_PER_SECOND = 1_000_000_000

RELATIVE_DRIFT = 100e-6
"""Bound on how far two machines' clocks drift apart: two crystals of 50 ppm, pulling in opposite directions."""


class Clock(Protocol):
    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        ...

    def wall(self) -> float:
        """Unix time in seconds, for people."""
        ...


class MonotonicClock:
    """`time.perf_counter_ns`: the clock that the built-in connector's side channel reports too."""

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def wall(self) -> float:
        return time.time()


class ClockSample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a remote clock.

    Attributes:
        offset_ns: remote clock minus ours, taken at the middle of the round trip.
        error_ns: half the round trip: the true offset lies within +- this, at `measured_ns`.
        measured_ns: our clock when the reply came.
    """

    offset_ns: int
    error_ns: int
    measured_ns: int

    @classmethod
    def from_round_trip(cls, *, sent_ns: int, received_ns: int, remote_ns: int) -> ClockSample:
        return cls(
            offset_ns=remote_ns - (sent_ns + received_ns) // 2,
            error_ns=(received_ns - sent_ns + 1) // 2,
            measured_ns=received_ns,
        )

    def earliest_local_ns(self, remote_ns: int) -> int:
        """The earliest local time at which the remote clock can show `remote_ns`, drift until then included."""
        # The clocks have been drifting apart since some moment of the round trip, and go on until the deadline.
        latest_ns = remote_ns - self.offset_ns + self.error_ns
        sent_ns = self.measured_ns - 2 * self.error_ns
        drift_ns = int(abs(latest_ns - sent_ns) * RELATIVE_DRIFT) + 1
        return remote_ns - self.offset_ns - self.error_ns - drift_ns


def to_ns(seconds: float) -> int:
    return round(seconds * NS_PER_SECOND)
