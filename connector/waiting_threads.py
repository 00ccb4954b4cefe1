"""Threads beside the trio loop, and calls in them that may wait, for a file system or a name server.

Each call has a thread of its own, because one that hangs keeps it. Where the process may have no more threads none is
started, and the call is not made. That is no bug of ours, and the same may be tried later, so it is raised as a
type of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")

NO_THREAD_LEFT = "this process may have no more threads (`ulimit -u`, or pids.max of its container)"


class NoThreadLeft(Exception):
    """The thread was not started, or the call not made."""

    def __init__(self) -> None:
        super().__init__(NO_THREAD_LEFT)


def start_thread(thread: threading.Thread) -> None:
    """Raises NoThreadLeft."""
    try:
        thread.start()
    except RuntimeError as error:  # all that Python says of a thread that does not start
        raise NoThreadLeft from error


async def call_in_thread(call: Callable[[], T]) -> T:
    """What it returns or raises; once cancelled, nobody waits for it any more. Raises NoThreadLeft."""
    has_begun = False

    def begin() -> T:
        nonlocal has_begun
        has_begun = True
        return call()

    try:
        return await trio.to_thread.run_sync(begin, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
    except RuntimeError as error:  # as in `start_thread`
        if has_begun:
            raise
        raise NoThreadLeft from error
