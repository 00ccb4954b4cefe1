"""Threads that start, or do not because the process may have no more of them.

That is no bug of ours, and the same may be tried later, so it is raised as a type of its own. libzmq and UCX start
threads of their own, and end the process where one does not start: so it is asked before whether there is room.
"""

from __future__ import annotations

import os
import threading
import time

NO_THREAD_LEFT = "this process may have no more threads (`ulimit -u`, or pids.max of its container)"

THREAD_GONE_SECONDS_MAX = 1.0
"""How long the kernel has for taking away a thread that has ended, and counts until then."""


class NoThreadLeft(Exception):
    """The thread was not started, or the call not made.

    Args:
        said: by Python, which has one exception for this and for much else; so the text is kept.
    """

    def __init__(self, said: Exception) -> None:
        super().__init__(f"{NO_THREAD_LEFT}: {said}")


def start_thread(thread: threading.Thread) -> None:
    """Raises NoThreadLeft."""
    try:
        thread.start()
    except RuntimeError as error:  # all that Python says of a thread that does not start
        raise NoThreadLeft(error) from error


def require_threads(count: int) -> None:
    """Raises NoThreadLeft unless the process may have so many more at once. None is left when it returns."""
    enough = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=enough.wait, name="room-for-threads", daemon=True)
            start_thread(thread)
            started.append(thread)
    finally:
        enough.set()
        for thread in started:
            thread.join()
        _wait_until_gone(started)


def _wait_until_gone(threads: list[threading.Thread]) -> None:
    """Python says that a thread has ended a moment before the kernel has room for another one."""
    deadline = time.monotonic() + THREAD_GONE_SECONDS_MAX
    while any(os.path.exists(f"/proc/self/task/{each.native_id}") for each in threads):
        if time.monotonic() > deadline:
            return
        time.sleep(0.0001)
