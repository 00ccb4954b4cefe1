"""What a piece of code costs, in what does not depend on the machine: calls, and memory taken meanwhile."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from types import FrameType
from typing import Any


class Work:
    """Counts calls, and the most memory that was taken meanwhile."""

    def __init__(self) -> None:
        self.calls = 0
        self.peak_bytes = 0

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")

    def __enter__(self) -> Work:
        # What others have left is not collected meanwhile: its finalizers would be counted, and who asks to hear of it.
        self._collects = gc.isenabled()
        gc.disable()
        tracemalloc.start()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if self._collects:
            gc.enable()
