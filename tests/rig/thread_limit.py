"""A process that may have no more threads, for as long as a test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from trio._core._thread_cache import THREAD_CACHE

REFUSED = "can't start new thread"
"""What Python says."""


@contextmanager
def no_thread_left() -> Iterator[None]:
    """No thread starts, and trio has none left over from calls before."""
    refused = RuntimeError(REFUSED)
    with (
        mock.patch.object(threading.Thread, "start", side_effect=refused),
        mock.patch.object(THREAD_CACHE, "_idle_workers", {}),
    ):
        yield
