"""Links between engines, and what the faults of a plan do to what goes over them.

A fault begins and ends as an event of the run, so a link that no fault touches costs one look at an empty dict. What
faults do to engines (crashes, pauses, clocks) is in `run`.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tests.simulation.faults import DECODE_LINK_KINDS, LATENCY_SECONDS, MESSAGE_KINDS, READ_SLOWDOWN, Fault, Kind
from tests.simulation.level1.heap import MILLISECOND, SECOND, Call, EventHeap

LINK_KINDS = frozenset(DECODE_LINK_KINDS + MESSAGE_KINDS)
LATENCY_NS = round(LATENCY_SECONDS * SECOND)


def end_ns(fault: Fault) -> int:
    return round(fault.end_seconds * SECOND)


class Link:
    """One direction between two engines. `active`: the faults that are on."""

    __slots__ = ("_chance", "_fired", "_heap", "_latest_ns", "active")

    def __init__(self, heap: EventHeap, chance: random.Random, fired: Counter[Kind]) -> None:
        self._heap = heap
        self._chance = chance.random
        self._fired = fired
        self._latest_ns = 0
        self.active: dict[Kind, Fault] = {}

    def begin(self, fault: Fault) -> None:
        self.active[fault.kind] = fault

    def end(self, fault: Fault) -> None:
        if self.active.get(fault.kind) is fault:
            del self.active[fault.kind]

    def hit(self, kind: Kind) -> Fault | None:
        """The fault that is on, if it strikes this time."""
        fault = self.active.get(kind)
        if fault is None or self._chance() >= fault.probability:
            return None
        self._fired[kind] += 1
        return fault

    def send(self, call: Call, argument: Any) -> None:
        """A message to a socket: `call(argument)` when it arrives, if it does, and as often as it does.

        Messages keep their order; those that a fault hits may lose it.
        """
        delay_ns = LATENCY_NS // 2 + int(self._chance() * (2.5 * LATENCY_NS))
        if not self.active:
            self._latest_ns = at_ns = max(self._latest_ns, self._heap.now_ns + delay_ns)
            self._heap.at(at_ns, call, argument)
            return
        if self.hit(Kind.MESSAGE_LOSS) or self.hit(Kind.PARTITION):
            return
        if self.hit(Kind.MESSAGE_DELAY):
            delay_ns += int((0.1 + 1.9 * self._chance()) * SECOND)
        if self.hit(Kind.MESSAGE_REORDER):
            delay_ns += int(self._chance() * 50 * MILLISECOND)
        clog = self.hit(Kind.CLOG)
        if clog is not None:
            delay_ns = max(delay_ns, end_ns(clog) - self._heap.now_ns)
        self._heap.after(delay_ns, call, argument)
        if self.hit(Kind.MESSAGE_DUPLICATE):
            self._heap.after(delay_ns + int(self._chance() * SECOND / 2), call, argument)

    def notify(self, call: Call, argument: Any) -> None:
        """A NIXL notification, as `send`. Notifications keep no order among themselves."""
        delay_ns = LATENCY_NS // 2 + int(self._chance() * (2.5 * LATENCY_NS))
        if not self.active:
            self._heap.after(delay_ns, call, argument)
            return
        if self.hit(Kind.NOTIFICATION_LOSS) or self.hit(Kind.PARTITION):
            return
        if self.hit(Kind.NOTIFICATION_DELAY):
            delay_ns += int((0.1 + 2.9 * self._chance()) * SECOND)
        self._heap.after(delay_ns, call, argument)
        if self.hit(Kind.NOTIFICATION_DUPLICATE):
            self._heap.after(delay_ns + int(self._chance() * SECOND), call, argument)

    def slowdown(self) -> int:
        return READ_SLOWDOWN if self.hit(Kind.READ_SLOW) else 1

    def stalled_until_ns(self) -> int:
        """The moment until which READs over this link do not move on."""
        found = (self.hit(Kind.READ_STALL), self.active.get(Kind.PARTITION))
        return max((end_ns(fault) for fault in found if fault is not None), default=0)
