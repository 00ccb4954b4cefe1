"""Names of engines in a sentence, of a fleet too: a line is cut where it is too long, and with all of them that would
be where it says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable

NAMES_MAX = 8
"""Names that are said; further ones are counted."""


def some_of(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    told = list(names)
    left_out = len(told) - NAMES_MAX
    return ", ".join(told) if left_out <= 0 else f"{', '.join(told[:NAMES_MAX])} and {left_out} more"
