"""Says in the log that the actors' thread hangs, once, and when it goes on.

A thread that hangs is not dead: it may go on at any time, and so may the READs that it has begun. So nothing that it
has in hand is failed on its behalf. What is open waits, and somebody has to know.
"""

from __future__ import annotations

import os

from connector.observe.log import get_logger

HANGS_SECONDS = 10.0
"""Actors that were called so long ago and have not come are said to hang. Nothing that they do takes a second."""


class HangNotice:
    """Told by the engine thread, with its steps, for how long the actors have been called; 0 when they have come."""

    def __init__(self, thread_name: str) -> None:
        self._thread_name = thread_name
        # For how long they have hung, if that was said.
        self._said_seconds = 0.0

    def note(self, seconds: float) -> None:
        if seconds >= HANGS_SECONDS:
            if not self._said_seconds:
                get_logger().error(
                    "the KV transfer actors were called %.0f s ago and have not come: a call of theirs does not "
                    "return, or something keeps the interpreter. No KV is transferred until they go on, leases are not "
                    "renewed, and what waits for KV does not end, because READs may still write. `py-spy dump --pid "
                    "%d` shows where %s is; keep its output. Restart the engine if they do not go on",
                    seconds,
                    os.getpid(),
                    self._thread_name,
                )
            self._said_seconds = seconds
        elif self._said_seconds:
            get_logger().warning("the KV transfer actors go on, after %.0f s", self._said_seconds)
            self._said_seconds = 0.0
