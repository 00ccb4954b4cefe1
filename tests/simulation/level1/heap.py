"""Virtual time: a heap of events, in nanoseconds.

An event is a plain call with one argument. Events that fall due together happen in the order in which they were
entered, so a run is a function of what is entered. Events are never taken back: what an event is about says whether it
still matters, which is cheaper than to search the heap.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

Call: TypeAlias = Callable[[Any], None]

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
MICROSECOND = 1_000

FOREVER = 1 << 62
"""Later than everything that happens."""


class EventHeap:
    """`now_ns` is the time of the event that is happening."""

    __slots__ = ("_entered", "_events", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, Call, Any]] = []
        self._entered = 0

    def at(self, at_ns: int, call: Call, argument: Any) -> None:
        """Enter `call(argument)` for `at_ns`, which is not before now."""
        self._entered = entered = self._entered + 1
        heappush(self._events, (at_ns, entered, call, argument))

    def after(self, delay_ns: int, call: Call, argument: Any) -> None:
        self._entered = entered = self._entered + 1
        heappush(self._events, (self.now_ns + delay_ns, entered, call, argument))

    def run_until(self, end_ns: int) -> None:
        """Let happen what is due until `end_ns`, and move time there."""
        events = self._events
        while events and events[0][0] <= end_ns:
            self.now_ns, _entered, call, argument = heappop(events)
            call(argument)
        self.now_ns = end_ns
