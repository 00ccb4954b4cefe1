"""How long something took or has lasted, for people: the same words in every command; and what people write.

Moments of a time line are no durations: they have a fixed number of decimals, so that what follows each other can be
compared.
"""

from __future__ import annotations

import re

DIGITS = 3

_WRITTEN = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[a-z]*)")
_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def duration(seconds: float, digits: int = DIGITS) -> str:
    """In milliseconds below a second, from a minute on in minutes and seconds, from an hour on in hours and minutes.

    `digits`: how many count, of one below a minute; zeros behind the point are left out.
    """
    size = float(f"{abs(seconds):.{digits}g}")  # first, or what is nearly a second would be 1000 ms
    if size < 1:
        shown = f"{round(size * 1e3, digits):.{digits}g} ms"
    elif size < 60:
        shown = f"{size:.{digits}g} s"
    elif (whole := round(abs(seconds))) < 3600:
        shown = _both(whole // 60, "min", whole % 60, "s")
    else:
        minutes = round(abs(seconds) / 60)
        shown = _both(minutes // 60, "h", minutes % 60, "min")
    return f"-{shown}" if seconds < 0 and shown != "0 ms" else shown


def _both(many: int, unit: str, few: int, below: str) -> str:
    return f"{many} {unit} {few} {below}" if few else f"{many} {unit}"


def parse_duration(text: str) -> float:
    """Seconds of what people write: `90`, `90s`, `15min`, `1h`, `2d`. Raises ValueError."""
    written = _WRITTEN.fullmatch(text.strip())
    if written is None or written["unit"] not in _UNIT_SECONDS:
        raise ValueError(f"{text!r} is no duration: write a number and s, min, h or d, as in 1h")
    return float(written["number"]) * _UNIT_SECONDS[written["unit"]]
