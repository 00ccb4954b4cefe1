"""The timers of one actor: a heap of deadlines, one per key.

An actor waits for its mailbox or for its next deadline, whichever comes first; so timers cost no task. Setting a key
again moves it; cancelled and moved entries stay in the heap until they come up, and are rebuilt away when they become
the majority.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from connector.runtime.clock import NS_PER_SECOND

K = TypeVar("K")

_REBUILD_AT = 1024


class TimerQueue(Generic[K]):
    """Deadlines in monotonic nanoseconds. Keys that fall due together come up in the order in which they were set."""

    def __init__(self) -> None:
        self._deadlines: dict[K, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._set_count = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: K) -> bool:
        return key in self._deadlines

    def set(self, key: K, deadline_ns: int) -> None:
        self._set_count += 1
        entry = (deadline_ns, self._set_count)
        self._deadlines[key] = entry
        heapq.heappush(self._heap, (*entry, key))
        if len(self._heap) > _REBUILD_AT and len(self._heap) > 2 * len(self._deadlines):
            self._heap = [(*when, each) for each, when in self._deadlines.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: K) -> None:
        self._deadlines.pop(key, None)

    def seconds_to_next(self, now_ns: int) -> float:
        """Time to the next deadline, 0.0 when one is due, infinity when there is none."""
        self._drop_stale()
        if not self._heap:
            return float("inf")
        return max(0, self._heap[0][0] - now_ns) / NS_PER_SECOND

    def pop_due(self, now_ns: int) -> list[K]:
        due: list[K] = []
        self._drop_stale()
        while self._heap and self._heap[0][0] <= now_ns:
            key = heapq.heappop(self._heap)[2]
            del self._deadlines[key]
            due.append(key)
            self._drop_stale()
        return due

    def _drop_stale(self) -> None:
        while self._heap and self._deadlines.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
