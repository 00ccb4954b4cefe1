"""What a case is, and the two ways to open one: engines that have met, or new engines for each round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.bench.sides import CHOICES, Side, both_sides, side
from tests.rig.messages import Forward

LAYERS = 32
BLOCK_TOKENS = 32
PAGE_BYTES = 65_536
"""As those of Llama 3 8B with 16-bit values and blocks of 16 tokens; what the rig's engines have by default."""
BLOCK_BYTES = LAYERS * PAGE_BYTES
LARGE_BLOCKS = 64
"""134 MB, the KV of a prompt of 2,048 tokens."""
SMALL_BLOCKS = 8
"""17 MB."""

OVER_TCP = {"UCX_TLS": "tcp,self"}
"""UCX emulates the READ: P's processor sends the bytes, and does it only while its UCX worker is polled."""

T = TypeVar("T")

Round = dict[str, float]
"""One number for each figure of a case."""
Rounds = Callable[[int], Iterator[tuple[str, Round]]]
"""One round of each side: (label, figures)."""
Measure = Callable[[Side, int], Round]
"""One round of one side; the number is another one in each round, and 0 in the round that warms up."""
Opening = Callable[[Path], AbstractContextManager[Rounds]]
"""Starts what a case needs in a directory; inside, its rounds."""


@dataclass(frozen=True)
class Case:
    """One thing that is measured.

    Attributes:
        about: one line for the table.
        is_default: it is measured when no case is named.
    """

    name: str
    about: str
    open: Opening
    is_default: bool = True


def pairs(measure: Measure, **options: Any) -> Opening:
    """Both sides, warm: round 0 has been made, so they have met, and every size was moved once."""

    @contextmanager
    def opened(directory: Path) -> Iterator[Rounds]:
        with both_sides(directory, **options) as sides:

            def rounds(number: int) -> Iterator[tuple[str, Round]]:
                for each in turns(sides, number):
                    with each.awake():
                        yield each.label, measure(each, number)

            for _ in rounds(0):
                continue
            yield rounds

    return opened


def fresh(measure: Measure, **options: Any) -> Opening:
    """New engines for every round, one connector after the other."""

    @contextmanager
    def opened(directory: Path) -> Iterator[Rounds]:
        numbers = itertools.count()

        def rounds(number: int) -> Iterator[tuple[str, Round]]:
            for choice in turns(CHOICES, number):
                (own := directory / str(next(numbers))).mkdir()
                with side(choice, own, **options) as each:
                    yield choice.label, measure(each, number)

        yield rounds

    return opened


def turns(sides: Sequence[T], number: int) -> Sequence[T]:
    """Who goes first changes, so that neither always follows the other's cache misses."""
    return sides if number % 2 else sides[::-1]


def room(requests: int, blocks: int, block_tokens: int = BLOCK_TOKENS) -> dict[str, Any]:
    """Options of engines that hold so many requests of so many blocks at once, computed in one step."""
    return {
        "layers": LAYERS,
        "block_size_tokens": block_tokens,
        "blocks": requests * blocks + 32,
        "max_batched_tokens": max(requests * blocks * block_tokens, 2048),
        "max_requests": max(requests, 64),
    }


def while_it(forward: Forward, seconds: float = 0.005) -> dict[str, Any]:
    """Options with which D does something in each step."""
    return {"decode_options": {"forward": forward, "forward_seconds": seconds}}


def percentile(values: Collection[float], percent: float) -> float:
    """The nearest rank: the smallest value that `percent` of all are not above."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
