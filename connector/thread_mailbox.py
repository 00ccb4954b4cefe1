"""The way of messages from another thread into the trio thread.

Items cost one `deque.append` each. However many there are, the trio loop is woken at most once until it has taken them.
Two rules make that safe:

* `armed` is cleared before the deque is emptied. An item that is appended in between finds `armed` clear and asks for
  another (perhaps empty) drain; the other order could leave an item behind with no drain to come for it.
* The drain never raises: an exception in a callback of `run_sync_soon` would crash the whole trio run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

M = TypeVar("M")
T = TypeVar("T")


class ThreadMailbox(Generic[M]):
    """Items for one trio run, from any number of other threads.

    Args:
        deliver: called in the trio thread with each item. Items of one thread keep their order.
        on_error: called in the trio thread with what `deliver` or `on_wake_up` raised; the drain goes on.
        on_wake_up: called in the trio thread when it has woken up, with the seconds since it was asked to.
    """

    def __init__(
        self,
        deliver: Callable[[M], None],
        on_error: Callable[[BaseException], None],
        on_wake_up: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._items: deque[M] = deque()
        self._armed = threading.Lock()  # held while a drain is due; to take it is an atomic test-and-set
        self._deliver = deliver
        self._on_error = on_error
        self._on_wake_up = on_wake_up
        # When the drain that is due was asked for, by time.monotonic.
        self._asked_at = 0.0

    def __len__(self) -> int:
        """Items that have not been delivered yet."""
        return len(self._items)

    @property
    def is_waiting(self) -> bool:
        """Whether the trio loop was asked to wake up and has not."""
        return self._armed.locked()

    @property
    def waits_seconds(self) -> float:
        """For how long it has been asked to wake up; 0 when it is not."""
        return time.monotonic() - self._asked_at if self._armed.locked() else 0.0

    def append(self, item: M) -> None:
        """Any thread: queue an item. It travels with the next `flush`."""
        self._items.append(item)

    def flush(self, token: trio.lowlevel.TrioToken) -> None:
        """Any thread: wake the trio loop if there is something to deliver. Raises trio.RunFinishedError."""
        if self._items and self._armed.acquire(blocking=False):
            self._asked_at = time.monotonic()
            try:
                token.run_sync_soon(self._drain)
            except trio.RunFinishedError:
                self._armed.release()
                raise

    def _drain(self) -> None:
        waited_seconds = time.monotonic() - self._asked_at
        self._armed.release()
        self._call(self._on_wake_up, waited_seconds)
        self.drain()

    def drain(self) -> None:
        """Trio thread: deliver what has been queued until now. For a caller that handles a message from elsewhere, and
        knows that something was queued before it: it need not wait for the loop's turn."""
        while self._items:
            self._call(self._deliver, self._items.popleft())

    def _call(self, function: Callable[[T], None], argument: T) -> None:
        try:
            function(argument)
        except Exception as error:
            with contextlib.suppress(Exception):
                self._on_error(error)
