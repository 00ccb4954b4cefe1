"""How much work a stretch of Python does, in counts: they are the same on a busy machine.

    with Counted() as work:
        ...
    assert work.calls <= 40

Only the calling thread is looked at, and only what runs in Python or is called from there: a loop inside a C function
(a copy of a list, an operation of numpy) is one call. No garbage is collected meanwhile: when that happens is chance,
and who has asked to hear of it (`gc.callbacks`; Hypothesis does) is called in whatever thread it happens.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any


class Counted:
    """Counts what its thread does while it is entered.

    Attributes:
        calls: Python functions that were entered, or gone on with (generators), and C functions called.
        lines: lines that were run; a loop counts with each round, also that of a comprehension.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.lines = 0

    def __enter__(self) -> Counted:
        self._collects = gc.isenabled()
        gc.disable()
        self._tracer_before = sys.gettrace()
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)
        sys.settrace(self._tracer_before)
        if self._collects:
            gc.enable()

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_code not in _OWN:
            self.calls += 1

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code in _OWN:
            return None
        if event == "line":
            self.lines += 1
        return self._trace


_OWN = (Counted.__enter__.__code__, Counted.__exit__.__code__)
