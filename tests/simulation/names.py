"""Names that a process draws, and that are the same in each run of a seed."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable


def names_drawn_by(owner: str) -> Callable[[], str]:
    """A new name with each call, 32 hex digits, which nobody draws but this owner."""
    drawn = itertools.count()
    return lambda: uuid.uuid5(uuid.NAMESPACE_OID, f"{owner} {next(drawn)}").hex
