"""Names of engines in a sentence, of a fleet too: a line is cut where it is too long, and with all of them that would
be where it says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable

from connector.observe.advice import whereabouts
from connector.wire.inspection import HolderRow

NAMES_MAX = 8
"""Names that are said; further ones are counted."""


def some_of(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    told = list(names)
    left_out = len(told) - NAMES_MAX
    return ", ".join(told) if left_out <= 0 else f"{', '.join(told[:NAMES_MAX])} and {left_out} more"


def named_holder(holder: HolderRow, builtin: str) -> str:
    """A decode engine that holds a lease, with where it is; `builtin`: what those of that kind are called."""
    where = whereabouts(holder.address, is_connected=holder.is_connected)
    return f"{holder.engine_id or builtin}{f' at {where}' if where else ''}"
