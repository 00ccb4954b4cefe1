"""From stories to the timeline page.

    stories --document--> one Document --page--> one HTML file, with everything that it needs inside

The document is compact: each history is a row of whole numbers, times are microseconds since the one before, and what
repeats is a number that stands for a text in `strings`. Ten thousand requests are about 4 MB. `data.js` reads it.

The page fetches nothing, and its policy (Content-Security-Policy) forbids that it does: only the style and the script
that are in it may run. Ids of requests come from outside, so the document cannot end its element early, and the page
never takes a text for markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from connector.clock import NS_PER_SECOND
from connector.observe.clocks import Clock, all_histories, clocks, lease_of_each_hold
from connector.observe.history import OUTCOMES, History, Story
from connector.observe.traced import MACHINES
from statemachine import peer
from statemachine.kernel import Machine
from statemachine.trace import TransitionRecord

SCRIPTS = ("data.js", "chart.js", "lanes.js", "panel.js", "page.js")
NS_PER_US = 1_000
US_PER_SECOND = NS_PER_SECOND // NS_PER_US

EXPLAIN = "nixl-actor why REQUEST --trace DIRECTORY"
"""The command that says why a request took so long, or has failed."""

SHOWN = tuple(machine for machine in MACHINES if machine is not peer.MACHINE)
"""The machines that stories are made of: connections are of many requests."""

_NUMBERS = {machine.name: number for number, machine in enumerate(SHOWN)}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that the simulator did: what, to whom, and when in seconds of its virtual time."""

    kind: str
    target: str
    at_seconds: float
    duration_seconds: float
    probability: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """Something that an oracle of the simulator found wrong."""

    oracle: str
    detail: str
    at_seconds: float


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """What else is known of stories that a simulator told. `zero_wall`: Unix time of its virtual time 0; `command`
    plays it again."""

    zero_wall: float
    command: str
    faults: tuple[Fault, ...] = ()
    complaints: tuple[Complaint, ...] = ()


# --- the document -----------------------------------------------------------------------------------------------------


class MachineChart(msgspec.Struct, frozen=True, kw_only=True):
    """The table of a machine. `arrows`: from, to, names of the events."""

    states: list[str]
    initial: str
    terminal: list[str]
    arrows: list[tuple[str, str, list[str]]]


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a process, and what was done to its clock, in microseconds."""

    engine: str
    rank: int
    shift: int
    pairs: int
    error: int


class HistoryRow(msgspec.Struct, frozen=True, array_like=True):
    """One machine instance. `machine`, `process`, `outcome`: which of the document's; texts are numbers of strings, 0
    for none.

    `queued`: how many microseconds its engine knew it before the first record, in vLLM's queue; None where that is not
    known.

    `steps`: of every record the microseconds since the one before (of the first: since the document's beginning),
    event, state that it led to, reason, detail, and how many microseconds longer the blocks are kept, None where
    nothing is promised.
    """

    machine: int
    process: int
    outcome: int
    subject: int
    peer: int
    remote: int
    blocks: int
    length_bytes: int
    descriptors: int
    queued: int | None
    steps: list[int | None]


class StoryRow(msgspec.Struct, frozen=True, array_like=True):
    """Which histories. `deciding`: the one whose outcome is that of the story; `held`: the lease of each hold, -1 where
    P's side is not known."""

    deciding: int
    requests: list[int]
    holds: list[int]
    leases: list[int]
    held: list[int]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows. Times are microseconds since `zero_wall`, which is Unix time in seconds."""

    title: str
    zero_wall: float
    command: str | None
    explain: str
    outcomes: tuple[str, ...]
    machines: dict[str, MachineChart]
    strings: list[str | None]
    processes: list[ProcessRow]
    histories: list[HistoryRow]
    stories: list[StoryRow]
    faults: list[Fault]
    complaints: list[Complaint]


def document(stories: Iterable[Story], *, title: str, simulated: SimulatedRun | None = None) -> Document:
    """Everything that the page shows. The clocks of the processes are brought together (`clocks.py`)."""
    stories = list(stories)
    histories = list(all_histories(stories))
    clock_of = clocks(stories)
    zero_ns = min(
        (clock_of[id(each)].at(each.records[0].mono_ns) - _queued_us(each) * NS_PER_US for each in histories), default=0
    )
    if simulated is not None:
        zero_ns = round(simulated.zero_wall * NS_PER_SECOND)
    strings = _Strings()
    processes: dict[int, tuple[int, Clock]] = {}
    rows = []
    numbers = {}
    for number, history in enumerate(histories):
        numbers[id(history)] = number
        clock = clock_of[id(history)]
        process, _ = processes.setdefault(id(clock), (len(processes), clock))
        rows.append(_row(history, process, clock.zero_ns - zero_ns, strings))
    return Document(
        title=title,
        zero_wall=zero_ns / NS_PER_SECOND,
        command=None if simulated is None else simulated.command,
        explain=EXPLAIN,
        outcomes=OUTCOMES,
        machines={machine.name: _chart(machine) for machine in SHOWN},
        strings=strings.texts,
        processes=[_process_row(clock) for _, clock in processes.values()],
        histories=rows,
        stories=[
            StoryRow(
                numbers[id(story.deciding)],
                [numbers[id(each)] for each in story.requests],
                [numbers[id(each)] for each in story.holds],
                [numbers[id(each)] for each in story.leases],
                [-1 if each is None else numbers[id(each)] for each in lease_of_each_hold(story)],
            )
            for story in stories
        ],
        faults=[] if simulated is None else list(simulated.faults),
        complaints=[] if simulated is None else list(simulated.complaints),
    )


# --- the page ---------------------------------------------------------------------------------------------------------


def page(shown: Document) -> str:
    """The whole HTML file."""
    here = files(__package__)
    style = (here / "page.css").read_text(encoding="utf-8")
    script = "\n".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS)
    # `<` occurs inside of strings only, where JSON may write it otherwise. So nothing in it ends the element.
    data = msgspec.json.encode(shown).decode().replace("<", "\\u003c")
    parts = {
        "TITLE": _as_text(shown.title),
        "POLICY": f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:",
        "STYLE": style,
        "DATA": data,
        "SCRIPT": script,
    }
    text = (here / "page.html").read_text(encoding="utf-8")
    before, *rest = text.split("{{")
    pieces = [before]
    for each in rest:
        name, _, after = each.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def export_html(stories: Iterable[Story], path: Path, *, title: str, simulated: SimulatedRun | None = None) -> None:
    """Write the page. Raises OSError."""
    path.write_text(page(document(stories, title=title, simulated=simulated)), encoding="utf-8")


# --- inside -----------------------------------------------------------------------------------------------------------


class _Strings:
    """Texts by number. 0 is None."""

    def __init__(self) -> None:
        self.texts: list[str | None] = [None]
        self._numbers: dict[str | None, int] = {None: 0}

    def number(self, text: str | None) -> int:
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.texts)
            assert text is not None
            # A lone surrogate, which a JSON document can smuggle into any string but UTF-8 cannot express.
            self.texts.append(text.encode("utf-8", "backslashreplace").decode())
        return found


def _process_row(clock: Clock) -> ProcessRow:
    return ProcessRow(
        engine=clock.engine_id,
        rank=clock.rank,
        shift=clock.shift_ns // NS_PER_US,
        pairs=clock.pairs,
        error=clock.error_ns // NS_PER_US,
    )


def _row(history: History, process: int, offset_ns: int, strings: _Strings) -> HistoryRow:
    number = strings.number
    steps: list[int | None] = []
    last_us = 0
    records: Sequence[TransitionRecord] = history.records
    if records[0].from_state is not None:  # its creation is missing; the state that it was in is known
        begun_us = (records[0].mono_ns + offset_ns) // NS_PER_US
        steps += [begun_us, number("(not recorded)"), number(records[0].from_state), 0, 0, None]
        last_us = begun_us
    for record in records:
        at_us = (record.mono_ns + offset_ns) // NS_PER_US
        kept_ns = record.kept_until_ns
        steps += [
            at_us - last_us,
            number(record.event),
            number(record.to_state),
            number(record.reason),
            number(record.detail),
            None if kept_ns is None else (kept_ns - record.mono_ns) // NS_PER_US,
        ]
        last_us = at_us
    return HistoryRow(
        _NUMBERS[history.machine],
        process,
        OUTCOMES.index(history.outcome),
        number(history.subject),
        number(history.peer),
        number(history.remote_request_id),
        history.blocks,
        history.length_bytes,
        max(record.descriptors or 0 for record in records),
        None if history.queued_seconds is None else _queued_us(history),
        steps,
    )


def _queued_us(history: History) -> int:
    return round((history.queued_seconds or 0.0) * US_PER_SECOND)


def _chart(machine: Machine[Any, Any]) -> MachineChart:
    order = list(machine.states)
    events: dict[tuple[str, str], list[str]] = {}
    for (source, event), transition in machine.table.items():
        for target in sorted(transition.targets, key=order.index):
            events.setdefault((source.value, target.value), []).append(event.__name__)
    return MachineChart(
        states=[state.value for state in order],
        initial=machine.initial.value,
        terminal=[state.value for state in order if state in machine.terminal],
        arrows=[(source, target, names) for (source, target), names in events.items()],
    )


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _as_text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
