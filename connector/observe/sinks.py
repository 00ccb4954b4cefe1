"""Several readers of the same transition records."""

from __future__ import annotations

from collections.abc import Sequence

from statemachine.trace import TraceSink, TransitionRecord


def combined(sinks: Sequence[TraceSink]) -> TraceSink | None:
    """One sink that writes to all of them; None for none, so that nothing is recorded."""
    if len(sinks) < 2:
        return next(iter(sinks), None)
    return _Combined(tuple(sinks))


class _Combined:
    def __init__(self, sinks: tuple[TraceSink, ...]) -> None:
        self._sinks = sinks

    def write(self, *records: TransitionRecord) -> None:
        for sink in self._sinks:
            sink.write(*records)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
