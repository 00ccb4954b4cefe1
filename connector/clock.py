"""The clock of the connector.

State machines never read a clock. The code around them reads this one, so that the simulator can replace it. Times are
integer nanoseconds that mean something on this machine only: no clock reading is ever compared with one of another
machine. What crosses the network is a duration, or a reading that the other side sends back unchanged. (Built-in
engines are told readings of another clock, because they want them: `wire.handshake`, `wire.params`.)

The clock counts while the machine is suspended (`CLOCK_BOOTTIME`): a decode engine that slept must not go on reading
under a lease that ran out in the meantime.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from statemachine.deadlines import NS_PER_SECOND as NS_PER_SECOND

CLOCK_ID: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux has CLOCK_BOOTTIME. Elsewhere CLOCK_MONOTONIC has to do, whether or not it counts while suspended."""


class Clock(Protocol):
    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary moment; never goes backwards."""
        ...

    def wall(self) -> float:
        """Unix time in seconds, for people. It may jump in either direction: never compute with it."""
        ...


class BootClock:
    """Nanoseconds since the machine was started, time spent suspended included. Implements `Clock`."""

    def __init__(self) -> None:
        # No methods: they are read for every step of every machine, and a call of Python's would be half of their cost.
        self.now_ns: Callable[[], int] = partial(time.clock_gettime_ns, CLOCK_ID)
        self.wall: Callable[[], float] = time.time


def to_ns(seconds: float) -> int:
    """The nearest whole number of nanoseconds."""
    return round(seconds * NS_PER_SECOND)


def seconds_until(deadline_ns: int | None, now_ns: int) -> float:
    """For how long to wait: 0 if the deadline has passed, infinite if there is none."""
    return math.inf if deadline_ns is None else max(0, deadline_ns - now_ns) / NS_PER_SECOND
