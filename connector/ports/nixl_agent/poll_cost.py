"""Whether a poll of NIXL has moved data, as far as its cost tells; NIXL says nothing.

UCX has no thread of its own here, so it moves data while it is polled, and a poll that moved some should be followed by
the next one at once. Such a poll computes for longer than one that finds nothing. What that one costs depends on the
machine, and is a multiple after a pause, when caches are cold (docs/nixl.md fact 41). So both are learned: the median
of polls that reported nothing and asked about no READ. While data is moved the median rises; its bound keeps that from
hiding the data.
"""

from __future__ import annotations

_STEP = 1.02
PER_READ = 0.25
"""What each READ that a poll asks about may cost in addition, in polls that find nothing."""


class _Empty:
    """What a poll costs that finds nothing, in seconds of processor time, between two bounds; and how many times as
    much one has to cost that has moved data."""

    def __init__(self, least: float, most: float, factor: float) -> None:
        self._seconds = self._least = least
        self._most = most
        self._factor = factor

    def is_exceeded(self, cpu_seconds: float, reads: int) -> bool:
        return cpu_seconds > self._seconds * self._factor * (1 + PER_READ * reads)

    def learn(self, cpu_seconds: float) -> None:
        learned = self._seconds * _STEP if cpu_seconds > self._seconds else self._seconds / _STEP
        self._seconds = min(max(learned, self._least), self._most)


class PollCost:
    """See the module's docstring. Lives on the agent's thread. Costs are seconds of its processor time: waiting, for a
    core or for the interpreter, does not count."""

    def __init__(self) -> None:
        self._warm = _Empty(8e-6, 40e-6, 2.5)
        # They vary more. Taken for work, one makes an idle port poll thirty times more.
        self._cold = _Empty(16e-6, 60e-6, 4.0)

    def has_worked(self, cpu_seconds: float, reads: int, *, after_pause: bool) -> bool:
        """Of a poll that asked about so many READs."""
        return (self._cold if after_pause else self._warm).is_exceeded(cpu_seconds, reads)

    def may_have_worked(self, cpu_seconds: float, reads: int) -> bool:
        """Of a poll after a pause. The next one tells, without a pause."""
        return self._warm.is_exceeded(cpu_seconds, reads)

    def learn(self, cpu_seconds: float, *, after_pause: bool) -> None:
        """Of a poll that reported nothing and asked about no READ."""
        (self._cold if after_pause else self._warm).learn(cpu_seconds)
