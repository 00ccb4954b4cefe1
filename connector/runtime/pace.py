"""How much of the interpreter the planning of handshakes may take from the engine, however many there are at once.

The engine thread may compute in Python, and whatever the actors compute meanwhile makes its steps longer. A handshake
is in no such hurry as a step, on which the next token of every running request depends. So what takes a handshake long
goes in pieces, each shorter than the switch interval that is set while transfers are open, with pauses after them, and
one handshake at a time. Figures are in docs/performance.md.
"""

from __future__ import annotations

from typing import TypeVar

import trio

from connector.clock import NS_PER_SECOND, Clock
from connector.layout.steps import Steps

T = TypeVar("T")

PIECE_NS = 400_000
"""A piece ends with the step in which this time is over."""

PIECE_COUNTED_NS_MAX = 4 * PIECE_NS
"""A step that seems to last longer did something else: others had the processor, or the machine was suspended."""

SHARE = 3
"""A pause is so long that the piece before it is this part of both together."""


class Pace:
    """Shared by all handshakes of a trio run; they take turns in the order in which they asked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = trio.Lock()
        # Of the piece that is not full yet: how much was computed, and when that ended.
        self._spent_ns = 0
        self._ended_ns = 0

    async def run(self, steps: Steps[T]) -> T:
        """What `steps` return, or raise. When this is cancelled, the rest of them is not run."""
        try:
            async with self._turn:
                while True:
                    await self._pause_if_due()
                    began_ns = now_ns = self._clock.now_ns()
                    left_ns = PIECE_NS - self._spent_ns
                    try:
                        while now_ns - began_ns < left_ns:
                            next(steps)
                            now_ns = self._clock.now_ns()
                    finally:
                        self._ended_ns = self._clock.now_ns()
                        self._spent_ns = min(self._spent_ns + self._ended_ns - began_ns, PIECE_COUNTED_NS_MAX)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    async def _pause_if_due(self) -> None:
        pause_ns = self._spent_ns * (SHARE - 1)
        left_ns = self._ended_ns + pause_ns - self._clock.now_ns()
        if left_ns <= 0:
            self._spent_ns = 0
        elif self._spent_ns >= PIECE_NS:
            await trio.sleep(left_ns / NS_PER_SECOND)
            self._spent_ns = 0
