"""What the tests of the timeline page do with it: write it, fill its fields, ask what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from connector.observe.history import Story, histories, stories
from connector.tools.timeline.export import export_html
from statemachine.trace import TransitionRecord
from tests.unit.browser import Browser
from tests.unit.timeline_load import trace


def told(requests: int) -> list[Story]:
    return stories(histories(trace(requests)))


QUEUED = "cmpl-00020-0-d"
"""A request on D."""


def with_queue(records: list[TransitionRecord]) -> list[TransitionRecord]:
    """The same, where this one was in vLLM's queue for 12.8 s before its blocks were allocated."""
    return [
        msgspec.structs.replace(each, age_seconds=12.8) if each.subject == QUEUED and each.event == "Created" else each
        for each in records
    ]


def written(shown: list[Story], directory: Path, **options: Any) -> str:
    """Address of the page."""
    path = directory / "page.html"
    export_html(shown, path, title="Made up", **options)
    return path.as_uri()


def count(page: Browser) -> str:
    said: str = page.evaluate("byId('count').textContent")
    return said


def measured_ms(page: Browser, name: str) -> float:
    (duration,) = page.evaluate(f"performance.getEntriesByName('{name}').map((each) => each.duration)")
    return float(duration)


def fill(page: Browser, field: str, text: str) -> None:
    page.evaluate(f"byId('{field}').focus()")
    page.evaluate(f"byId('{field}').select()")
    page.type(text)


def middle_of(page: Browser, name: str) -> tuple[float, float]:
    """Where the bar of this request is drawn, on D."""
    x, y = page.evaluate(
        "(() => { const box = byId('lanes').getBoundingClientRect();"
        f" const bar = doc.byKey.get('{name}').deciding;"
        " return [box.x + (lanes.x(bar.start) + lanes.x(bar.end)) / 2,"
        " box.y + lanes.rowTop(bar) + lanes.rowHeight / 2]; })()"
    )
    return x, y


def chosen(page: Browser) -> str | None:
    name: str | None = page.evaluate("app.selected && app.selected.name")
    return name
