"""What every level of the simulator says of a run."""

from __future__ import annotations

import msgspec


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """Something was wrong at that moment of virtual time, as this oracle found."""

    oracle: str
    detail: str
    at_seconds: float
