"""Diagrams of the machines, made from their tables: Mermaid for places that render it, SVG for everywhere else.

`python -m diagrams.draw` writes them beside this script; tests/unit/test_diagrams.py fails when the files differ from
what the tables say. A diagram shows every transition; arrows between the same two states share one line, labelled with
all their events.

The SVG is a ladder: each state is a vertical line, each arrow has a row of its own, so that nothing crosses a label
however many transitions there are. Rows are grouped by the state that they leave, from top to bottom.
"""

from __future__ import annotations

import enum
from html import escape
from pathlib import Path
from typing import Any

from statemachine import draining, grant, introduction, lease, load, remote_engine
from statemachine.kernel import Machine

DIRECTORY = Path(__file__).parent

COLUMN_WIDTH = 190
BOX_WIDTH, BOX_HEIGHT = 160, 34
MARGIN = 30
LINE_HEIGHT = 14
ROW_GAP = 16
LABEL_LENGTH_MAX = 34
"""Characters that fit between two neighbouring lines."""

Arrow = tuple[enum.Enum, enum.Enum]


MACHINES: tuple[Machine[Any, Any], ...] = (
    *remote_engine.MACHINES,
    lease.MACHINE,
    draining.MACHINE,
    introduction.MACHINE,
    load.MACHINE,
    grant.MACHINE,
)


def arrows(machine: Machine[Any, Any]) -> dict[Arrow, list[str]]:
    """Names of the events that lead from one state to another (or back to itself), in the order of the table."""
    found: dict[Arrow, list[str]] = {}
    for (source, event), transition in machine.table.items():
        for target in sorted(transition.targets, key=_position):
            found.setdefault((source, target), []).append(event.__name__)
    return found


def mermaid(machine: Machine[Any, Any]) -> str:
    """The machine as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    direction LR", f"    [*] --> {machine.initial.value}"]
    for (source, target), events in arrows(machine).items():
        lines.append(f"    {source.value} --> {target.value}: {', '.join(events)}")
    lines += [f"    {state.value} --> [*]" for state in machine.states if state in machine.terminal]
    return "\n".join(lines) + "\n"


def svg(machine: Machine[Any, Any]) -> str:
    """The machine as a picture of its own."""
    columns = {state: MARGIN + BOX_WIDTH // 2 + index * COLUMN_WIDTH for index, state in enumerate(machine.states)}
    rows: list[str] = []
    y = MARGIN + 40 + BOX_HEIGHT + 10
    for source in machine.states:
        leaving = [(target, events) for (start, target), events in arrows(machine).items() if start is source]
        for target, events in sorted(leaving, key=lambda row: _position(row[0])):
            span = max(1, abs(_position(target) - _position(source)))
            lines = _wrapped(events, span * LABEL_LENGTH_MAX)
            y += len(lines) * LINE_HEIGHT + ROW_GAP
            rows.append(_arrow(columns[source], columns[target], y, lines))
        if leaving:
            y += ROW_GAP // 2
    width = max(columns.values()) + BOX_WIDTH // 2 + COLUMN_WIDTH // 2 + MARGIN
    height = y + MARGIN
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L10,5 L0,10 z" fill="#135"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 8}" font-size="16" font-weight="bold">{escape(machine.name)}</text>',
    ]
    return "\n".join([*head, *(_lane(machine, s, x, height) for s, x in columns.items()), *rows, "</svg>"]) + "\n"


def _position(state: enum.Enum) -> int:
    return list(type(state)).index(state)


def _wrapped(events: list[str], length_max: int) -> list[str]:
    """The names of events, in as many lines as they need."""
    lines = [events[0]]
    for event in events[1:]:
        if len(lines[-1]) + len(event) + 2 <= length_max:
            lines[-1] += f", {event}"
        else:
            lines.append(event)
    return lines


def _lane(machine: Machine[Any, Any], state: enum.Enum, x: int, height: int) -> str:
    """A state: its name in a box, and its line down the page. Terminal states have a heavy frame."""
    fill = "#dde6f5" if state is machine.initial else "#e8e8e8" if state in machine.terminal else "#ffffff"
    weight = 2.5 if state in machine.terminal else 1
    top = MARGIN + 30
    name = escape(state.value)
    return (
        f'<line x1="{x}" y1="{top + BOX_HEIGHT}" x2="{x}" y2="{height - 10}" stroke="#bbb"/>'
        f'<rect x="{x - BOX_WIDTH // 2}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" fill="{fill}" '
        f'stroke="#333" stroke-width="{weight}"/>'
        f'<text x="{x}" y="{top + BOX_HEIGHT // 2 + 5}" text-anchor="middle" font-size="13">{name}</text>'
    )


def _arrow(x1: int, x2: int, y: int, lines: list[str]) -> str:
    """One arrow with its label above it; one that returns to its state is a hook to the right of the line."""
    if x1 == x2:
        shape = f'<path d="M{x1},{y - 12} h22 v12 h-20" fill="none" stroke="#135" marker-end="url(#head)"/>'
        return shape + _label(x1 + 28, y, lines, anchor="start")
    gap = 2 if x2 > x1 else -2
    shape = f'<line x1="{x1}" y1="{y}" x2="{x2 - gap}" y2="{y}" stroke="#135" marker-end="url(#head)"/>'
    return shape + f'<circle cx="{x1}" cy="{y}" r="3" fill="#135"/>' + _label((x1 + x2) // 2, y - 5, lines)


def _label(x: int, bottom: int, lines: list[str], *, anchor: str = "middle") -> str:
    top = bottom - (len(lines) - 1) * LINE_HEIGHT
    return "".join(
        f'<text x="{x}" y="{top + index * LINE_HEIGHT}" text-anchor="{anchor}" stroke="white" stroke-width="3" '
        f'paint-order="stroke" fill="#222">{escape(line)}</text>'
        for index, line in enumerate(lines)
    )


def render_all() -> dict[str, str]:
    """Contents of every file, by name."""
    files: dict[str, str] = {}
    for machine in MACHINES:
        files[f"{machine.name}.mmd"] = mermaid(machine)
        files[f"{machine.name}.svg"] = svg(machine)
    return files


def main() -> None:
    for name, text in render_all().items():
        (DIRECTORY / name).write_text(text)


if __name__ == "__main__":
    main()
