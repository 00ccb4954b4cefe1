"""The agenda of the fakes: what happens at which moment of trio's clock.

One heap and one task for a whole simulated world, instead of a task per message: cheaper, and things that fall due at
the same moment happen in the order in which they were entered. Under a `MockClock` that jumps, an hour of virtual time
costs only what happens in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import trio


class Agenda:
    """Entries are plain calls that must not raise. `run` carries them out until it is cancelled or `stop` is called."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0
        self._news = trio.Event()
        self._stopped = False

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Enter `call` for `seconds` from now (0: as soon as the current task waits)."""
        self.at(trio.current_time() + seconds, call)

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Enter `call` for the moment `seconds` of trio's clock."""
        self._entered += 1
        heapq.heappush(self._heap, (seconds, self._entered, call))
        if self._heap[0][1] == self._entered:
            self._news.set()

    def stop(self) -> None:
        """Nothing that is entered happens any more."""
        self._stopped = True
        self._news.set()

    async def run(self) -> None:
        while not self._stopped:
            now = trio.current_time()
            if self._heap and self._heap[0][0] <= now:
                heapq.heappop(self._heap)[2]()
                continue
            self._news = trio.Event()
            with trio.move_on_at(self._heap[0][0] if self._heap else float("inf")):
                await self._news.wait()
