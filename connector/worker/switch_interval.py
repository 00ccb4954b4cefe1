"""How soon the connector's threads get the interpreter while the engine thread keeps it busy.

A thread that wants the interpreter waits until the one that has it lets go, and asks it to after the switch interval:
5 ms, unless told otherwise. From a command to its report the connector's threads need it several times, because each
NIXL call and each turn of the trio loop gives it away (docs/performance.md has figures). Behind an engine thread that
computes in Python that would be tens of milliseconds for a READ of five. So the interval is shorter while transfers are
open. What the engine pays is a switch of threads for each of those times, and nothing while no other thread wants the
interpreter.

The interval belongs to the process. A shorter one that was set before is left alone, and so is one that is set
meanwhile.
"""

from __future__ import annotations

import sys

_RESOLUTION_SECONDS = 1e-6


class SwitchInterval:
    """Keeps the interval at `seconds` for as long as it is wanted. 0: does nothing. Used by one thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._before: float | None = None

    def shorten(self, wanted: bool) -> None:
        """Say whether transfers are open. Cheap when nothing changes."""
        if wanted == (self._before is not None) or not self._seconds:
            return
        now = sys.getswitchinterval()
        if wanted and now > self._seconds + _RESOLUTION_SECONDS:
            self._before = now
            sys.setswitchinterval(self._seconds)
        elif not wanted and self._before is not None:
            before, self._before = self._before, None
            if abs(now - self._seconds) <= _RESOLUTION_SECONDS:
                sys.setswitchinterval(before)
