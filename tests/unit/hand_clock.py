"""A clock that tests move by hand."""

from __future__ import annotations

from connector.clock import NS_PER_SECOND


class HandClock:
    """Implements `connector.clock.Clock`: stands at `ns` until somebody moves it."""

    def __init__(self) -> None:
        self.ns = 100 * NS_PER_SECOND

    def now_ns(self) -> int:
        return self.ns

    def wall(self) -> float:
        return self.ns / NS_PER_SECOND
