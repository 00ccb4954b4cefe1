"""Pauses between attempts: they double, up to a bound, and who waits for the same does not come back together."""

from __future__ import annotations

import zlib

DOUBLINGS_MAX = 30


def doubled_ns(first_ns: int, max_ns: int, doublings: int) -> int:
    """`first_ns` doubled so often, and `max_ns` at most."""
    return min(max_ns, first_ns << min(doublings, DOUBLINGS_MAX))


def spread_ns(pause_ns: int, *by: object) -> int:
    """Between half and all of a pause, by who asks whom how often: two decode ranks do not come back together, and the
    same run comes out the same."""
    draw = zlib.crc32("/".join(map(str, by)).encode()) / 2**32
    return round(pause_ns * (0.5 + draw / 2))
