"""What a forward pass does to the machine while KV is on its way: a choice of `messages.Forward`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tests.rig.messages import Forward

MATRIX_SIDE = 256
"""A product takes about a millisecond on one core."""


def forward_pass(forward: Forward, seconds: float) -> Callable[[], None]:
    """The work of one step."""
    match forward:
        case Forward.NOTHING:
            return lambda: None
        case Forward.SLEEPS:
            return lambda: time.sleep(seconds)
        case Forward.HOLDS:
            return lambda: _spin(lambda: None, seconds)
        case Forward.MULTIPLIES:
            left, right = torch.rand(MATRIX_SIDE, MATRIX_SIDE), torch.rand(MATRIX_SIDE, MATRIX_SIDE)
            product = torch.empty_like(left)
            return lambda: _spin(lambda: torch.mm(left, right, out=product), seconds)


def _spin(piece: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        piece()
