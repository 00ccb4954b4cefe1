"""Virtual time: a heap of events, in nanoseconds.

An event is a plain call with one argument. Events that fall due together happen in the order in which they were
entered, so a run is a function of what is entered. Events are never taken back: what an event is about says whether it
still matters, which is cheaper than to search the heap.

Most timers are for nothing, because what they would end ends by itself long before: a deadline of seconds for a request
of milliseconds. `unless_over` keeps such a timer aside for a moment, and enters it only if its subject is still alive
then. That keeps the heap small, and changes nothing of what happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol, TypeAlias

Call: TypeAlias = Callable[[Any], None]

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
MICROSECOND = 1_000

FOREVER = 1 << 62
"""Later than everything that happens."""

LOOK_NS = 50 * MILLISECOND
"""How often timers are looked at that are probably for nothing."""


class Mortal(Protocol):
    """What a timer is about. Once `is_over` it needs no timer any more."""

    @property
    def is_over(self) -> bool: ...


class EventHeap:
    """`now_ns` is the time of the event that is happening."""

    __slots__ = ("_aside", "_entered", "_events", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._aside: deque[tuple[int, int, Call, Any, Mortal]] = deque()
        self._events: list[tuple[int, int, Call, Any]] = []
        self._entered = 0

    def at(self, at_ns: int, call: Call, argument: Any) -> None:
        """Enter `call(argument)` for `at_ns`, which is not before now."""
        self._entered = entered = self._entered + 1
        heappush(self._events, (at_ns, entered, call, argument))

    def after(self, delay_ns: int, call: Call, argument: Any) -> None:
        self._entered = entered = self._entered + 1
        heappush(self._events, (self.now_ns + delay_ns, entered, call, argument))

    def unless_over(self, at_ns: int, call: Call, argument: Any, subject: Mortal) -> None:
        """Enter `call(argument)` for `at_ns`; it may be left out when `subject` is over by then."""
        now_ns = self.now_ns
        if at_ns < now_ns + 2 * LOOK_NS:
            self.at(at_ns, call, argument)
            return
        if not self._aside:
            self.at(now_ns + LOOK_NS, self._look, None)
        self._aside.append((now_ns, at_ns, call, argument, subject))

    def _look(self, _: None) -> None:
        """Enter the timers that have been aside for a while and whose subjects are still alive."""
        aside = self._aside
        since_ns = self.now_ns - LOOK_NS
        while aside and aside[0][0] <= since_ns:
            _since_ns, at_ns, call, argument, subject = aside.popleft()
            if not subject.is_over:
                self.at(at_ns, call, argument)
        if aside:
            self.at(self.now_ns + LOOK_NS, self._look, None)

    def run_until(self, end_ns: int) -> None:
        """Let happen what is due until `end_ns`, and move time there."""
        events = self._events
        while events and events[0][0] <= end_ns:
            self.now_ns, _entered, call, argument = heappop(events)
            call(argument)
        self.now_ns = end_ns
