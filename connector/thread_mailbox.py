"""The way of messages from another thread into the trio thread.

Items cost one `deque.append` each. However many there are, the trio loop is woken at most once until it has taken them.
Two rules make that safe:

* `armed` is cleared before the deque is emptied. An item that is appended in between finds `armed` clear and asks for
  another (perhaps empty) drain; the other order could leave an item behind with nobody coming for it.
* The drain never raises: an exception in a callback of `run_sync_soon` would crash the whole trio run.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

M = TypeVar("M")


class ThreadMailbox(Generic[M]):
    """Items for one trio run, from any number of other threads.

    Args:
        deliver: called in the trio thread with each item. Items of one thread keep their order.
        on_error: called in the trio thread with what `deliver` raised; the drain goes on with the next item.
    """

    def __init__(self, deliver: Callable[[M], None], on_error: Callable[[BaseException], None]) -> None:
        self._items: deque[M] = deque()
        self._armed = threading.Lock()  # held while a drain is due; to take it is an atomic test-and-set
        self._deliver = deliver
        self._on_error = on_error

    def __len__(self) -> int:
        """Items that have not been delivered yet."""
        return len(self._items)

    def append(self, item: M) -> None:
        """Any thread: queue an item. It travels with the next `flush`."""
        self._items.append(item)

    def flush(self, token: trio.lowlevel.TrioToken) -> None:
        """Any thread: wake the trio loop if there is something to deliver. Raises trio.RunFinishedError."""
        if self._items and self._armed.acquire(blocking=False):
            try:
                token.run_sync_soon(self._drain)
            except trio.RunFinishedError:
                self._armed.release()
                raise

    def _drain(self) -> None:
        self._armed.release()
        self.drain()

    def drain(self) -> None:
        """Trio thread: deliver what has been queued until now. Who knows that something was said before what he hears
        from elsewhere does not wait for the loop's turn."""
        while self._items:
            try:
                self._deliver(self._items.popleft())
            except Exception as error:
                with contextlib.suppress(Exception):
                    self._on_error(error)
