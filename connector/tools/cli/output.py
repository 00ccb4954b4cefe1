"""What the commands print, and the one way in which they do it.

Ids of requests come from clients, names and reasons from other machines or from files. Nothing in them may steer the
terminal, begin another line, or be taken for markup: control characters are shown as what they are.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from typing import Any

import typer

LINE_LENGTH_MAX = 4000

_STEERS_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")
"""Control characters that JSON, other than those of ASCII, leaves as they are."""


def plain(value: object) -> str:
    """The text of it, fit for a line or a cell."""
    from connector.wire.bounded import shorten

    return shorten(str(value), LINE_LENGTH_MAX)


def wall_clock(wall: float) -> str:
    """Unix time as date and time here; as a number where no calendar has it, which a damaged trace may say."""
    try:
        return datetime.fromtimestamp(wall, UTC).astimezone().isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{wall:.3f} (Unix time)"


def say(line: object, **style: Any) -> None:
    """One line; `style` is typer's. Those who have set NO_COLOR to anything get none (no-color.org)."""
    typer.secho(plain(line), color=False if os.environ.get("NO_COLOR") else None, **style)


def say_json(value: Any, *, is_one_of_many: bool = False) -> None:
    """A document, for people and programs; one of many takes a line, so that a program sees where it ends."""
    import msgspec

    encoded = msgspec.json.encode(value)
    text = (encoded if is_one_of_many else msgspec.json.format(encoded, indent=2)).decode()
    typer.echo(_STEERS_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
