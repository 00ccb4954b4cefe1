"""How long these tests wait for anything. A sanitizer makes all of it slower: GPU_TESTS_SLOWER says how many times."""

from __future__ import annotations

import os

SLOWER = float(os.environ.get("GPU_TESTS_SLOWER", "1"))


def patient(seconds: float) -> float:
    """So long at most."""
    return seconds * SLOWER
