"""What a forward pass does to the machine while KV is on its way: a choice of `messages.Forward`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tests.rig.messages import EngineOptions, Forward

MATRIX_SIDE = 256
"""A piece of `MULTIPLIES` is one product, which takes some hundred microseconds on one core."""
COUNT = 2_000
"""A piece of `HOLDS` counts to this, which takes some ten microseconds."""


def forward_pass(options: EngineOptions) -> Callable[[], None]:
    """The work of one step."""
    match options.forward:
        case Forward.NOTHING:
            return lambda: None
        case Forward.SLEEPS:
            return lambda: time.sleep(options.forward_seconds)
        case Forward.HOLDS:
            return _repeated(_count, options)
        case Forward.MULTIPLIES:
            left, right = torch.rand(MATRIX_SIDE, MATRIX_SIDE), torch.rand(MATRIX_SIDE, MATRIX_SIDE)
            product = torch.empty_like(left)
            return _repeated(lambda: torch.mm(left, right, out=product), options)


def _repeated(piece: Callable[[], object], options: EngineOptions) -> Callable[[], None]:
    """For so long, or so often."""
    if (pieces := options.forward_pieces) is None:
        return lambda: _spin(piece, options.forward_seconds)
    return lambda: _repeat(piece, pieces)


def _count() -> None:
    for _ in range(COUNT):
        pass


def _repeat(piece: Callable[[], object], times: int) -> None:
    for _ in range(times):
        piece()


def _spin(piece: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        piece()
