"""A queue with one consumer, which waits for very short times.

Not `queue.SimpleQueue`: in CPython up to 3.13 at least, its `get(timeout)` can wait for ever. When its lock is free and
the queue is empty it goes round a second time with what is left of the time, and if the thread lost its core in between
that is less than nothing, which the lock takes for "no limit". With waits of half a millisecond that was one READ in
three thousand, whose end was not asked for until the next call came. `threading.Lock.acquire` has no such gap.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class CallQueue(Generic[T]):
    """Any thread puts and rings; one thread takes and waits."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell = threading.Lock()  # free while somebody has rung and nobody has waited since
        self._bell.acquire()

    def put(self, item: T) -> None:
        self._items.append(item)
        self.ring()

    def ring(self) -> None:
        """End a wait, this one or the next."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def take(self) -> T | None:
        """The oldest item; None when there is none."""
        return self._items.popleft() if self._items else None

    @property
    def is_empty(self) -> bool:
        """Nothing can be taken now."""
        return not self._items

    def wait(self, seconds: float) -> None:
        """Until somebody rings, at most so long. May end early; what was put before it ended can be taken."""
        self._bell.acquire(timeout=seconds)
