"""What the commands print, and the one way in which they do it.

Ids of requests come from clients, names and reasons from other machines or from files. Nothing in them may steer the
terminal, begin another line, or be taken for markup: control characters are shown as what they are.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any

import typer

LINE_LENGTH_MAX = 4000

PIPE_COLUMNS = 100_000
"""The width of what goes to a file or a pipe, where a table is as wide as it needs to be: nothing that is folded can be
searched. Long ids, and what many engines hold, take some hundreds of columns."""

_STEERS_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")
"""Control characters that JSON, other than those of ASCII, leaves as they are."""


_NOT_ASCII = re.compile("[^\x20-\x7e\n]")


def show_what_cannot_be_encoded() -> None:
    """From now on characters that stdout has no bytes for are shown as what they are, as stderr does by itself: under
    some locales that is every one that is not of ASCII."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


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
    escaped = _STEERS_IN_JSON if _can_write(text) else _NOT_ASCII
    typer.echo(escaped.sub(lambda found: json.dumps(found[0])[1:-1], text))


def _can_write(text: str) -> bool:
    """Whether stdout has bytes for it."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
