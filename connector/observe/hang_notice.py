"""Says in the log that a thread hangs, once, and when it goes on.

A thread that hangs is not dead: it may go on at any time, and so may the READs that it has begun. So nothing that it
has in hand is failed on its behalf. What is open waits, and somebody has to know.
"""

from __future__ import annotations

import os

from connector.observe.log import get_logger

HANGS_SECONDS = 10.0
"""A thread that has not come for so long is said to hang. Nothing that one does takes a second."""


class HangNotice:
    """Told now and then for how long a thread has not come to what it has to do; 0 when it has.

    Args:
        thread_name: as debuggers show it.
        who: what goes on when it goes on.
        hangs: in a sentence, with the seconds as `%.0f`: what is seen of it, and what follows.
    """

    def __init__(self, thread_name: str, who: str, hangs: str) -> None:
        self._thread_name = thread_name
        self._who = who
        self._hangs = hangs
        # For how long it has hung, if that was said.
        self._said_seconds = 0.0

    def note(self, seconds: float) -> None:
        if seconds >= HANGS_SECONDS:
            if not self._said_seconds:
                get_logger().error(
                    self._hangs + ". `py-spy dump --pid %d` shows where %s is; keep its output. Restart the engine if "
                    "this does not end",
                    seconds,
                    os.getpid(),
                    self._thread_name,
                )
            self._said_seconds = seconds
        elif self._said_seconds:
            get_logger().warning("%s go on, after %.0f s", self._who, self._said_seconds)
            self._said_seconds = 0.0
