"""Deadlines of one core: a heap with one entry for each key.

A core has one next deadline, whatever the number of things that it waits for, so its executor needs one timer. Due
keys are taken one at a time: if handling one of them raises, the others are still there.

Setting a key again moves it. Entries that were moved or cancelled stay in the heap until they come up, or until a key
is set when they are the majority: the heap is rebuilt then.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

NS_PER_SECOND = 1_000_000_000

_REBUILD_FROM = 64


def earliest(one_ns: int | None, other_ns: int | None) -> int | None:
    """Of two deadlines that there may be."""
    if one_ns is None or other_ns is None:
        return other_ns if one_ns is None else one_ns
    return min(one_ns, other_ns)


class Deadlines(Generic[K]):
    """In nanoseconds of the clock that the core is driven by. Keys due together come up in the order of setting."""

    __slots__ = ("_entries", "_heap", "_set_count")

    def __init__(self) -> None:
        self._entries: dict[K, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._set_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def set(self, key: K, at_ns: int) -> None:
        self._set_count += 1
        entry = (at_ns, self._set_count)
        self._entries[key] = entry
        heapq.heappush(self._heap, (*entry, key))
        if len(self._heap) > _REBUILD_FROM and len(self._heap) > 2 * len(self._entries):
            self._heap = [(*when, each) for each, when in self._entries.items()]
            heapq.heapify(self._heap)

    def get(self, key: K) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def cancel(self, key: K) -> None:
        self._entries.pop(key, None)

    def clear(self) -> None:
        self._entries.clear()
        self._heap.clear()

    def next_ns(self) -> int | None:
        """The earliest deadline, or None."""
        heap, entries = self._heap, self._entries
        while heap:
            at_ns, set_count, key = heap[0]
            entry = entries.get(key)
            if entry is not None and entry[1] == set_count:
                return at_ns
            heapq.heappop(heap)  # moved or cancelled
        return None

    def take_due(self, now_ns: int) -> K | None:
        """Remove and return the earliest key whose deadline is at or before `now_ns`; None when there is none."""
        at_ns = self.next_ns()
        if at_ns is None or at_ns > now_ns:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._entries[key]
        return key

    def copy(self) -> Deadlines[K]:
        other: Deadlines[K] = Deadlines()
        other._entries = dict(self._entries)
        other._heap = list(self._heap)
        other._set_count = self._set_count
        return other

    def freeze(self, now_ns: int) -> frozenset[tuple[K, int]]:
        """What is due when, relative to `now_ns`; what is overdue counts as due now."""
        return frozenset((key, max(0, at_ns - now_ns)) for key, (at_ns, _) in self._entries.items())
