"""Calls beside the trio loop that may wait, for a file system or a name server.

Each call has a thread of its own, because one that hangs keeps it. Where the process may have no more threads the call
is not made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from connector.thread_limit import NoThreadLeft

T = TypeVar("T")


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
        raise NoThreadLeft(error) from error
