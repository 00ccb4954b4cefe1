"""What a check finds, and what several checks ask of an engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from connector.addresses import unbracketed
from connector.tools.live import EngineReport
from connector.wire.inspection import (
    EngineFacts,
    EngineRow,
)

Level = Literal["problem", "warning", "note"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`check`: stable name of the check. `engines`: engine ids, or addresses of those that have none."""

    level: Level
    check: str
    engines: tuple[str, ...]
    what: str
    advice: str = ""


UNSET = "(not set)"


def facts_of(engine: EngineReport) -> list[EngineFacts]:
    return [row.facts for row in engine.of(EngineRow)]


def first_facts(engine: EngineReport) -> EngineFacts | None:
    return next(iter(facts_of(engine)), None)


def host_of(address: str) -> str:
    return unbracketed(address.rpartition(":")[0])


def about(engine: EngineReport, check: str, level: Level, what: str, advice: str = "") -> Finding:
    """About one engine, which is named before `what`."""
    return Finding(level=level, check=check, engines=(engine.name,), what=f"{engine.name}: {what}", advice=advice)
