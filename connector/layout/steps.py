"""Computing in small steps, so that who runs it can do something else in between.

A handshake computes for milliseconds, on a thread that shares the interpreter with the engine. So what may take long is
a generator that yields wherever it can be interrupted, and returns the result; `connector/runtime/pace.py` runs it in
pieces. A step may last as long as one region or one rank takes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]


def finish(steps: Steps[T]) -> T:
    """All of it at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
