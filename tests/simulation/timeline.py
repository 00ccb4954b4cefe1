"""A simulated run as a timeline page: `python -m tests.simulation --seed N --html FILE`.

Its times are those of the simulator, not of the clocks of its processes, which drift and jump. So faults, and what the
oracles found, stand where they happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from connector.clock import to_ns
from connector.observe.history import histories, stories
from connector.tools.timeline.export import Complaint, Fault, SimulatedRun, export_html
from statemachine.trace import TransitionRecord
from tests.simulation.faults import Plan
from tests.simulation.verdict import Violation

ZERO_WALL = 1.7e9
"""Unix time at which every simulated run begins."""


class Ran(Protocol):
    """The result of a run, of any level."""

    @property
    def plan(self) -> Plan: ...

    @property
    def violations(self) -> list[Violation]: ...

    def timed_trace(self) -> Iterable[tuple[float, TransitionRecord]]:
        """Every record, with the second of virtual time in which it was written."""
        ...


def write_page(result: Ran, path: Path, *, command: str) -> None:
    """`command` plays the run again."""
    plan = result.plan
    run = SimulatedRun(
        zero_wall=ZERO_WALL,
        command=command,
        faults=tuple(
            Fault(
                kind=fault.kind.value,
                target=fault.target,
                at_seconds=fault.at_seconds,
                duration_seconds=fault.duration_seconds,
                probability=fault.probability,
            )
            for fault in plan.faults
        ),
        complaints=tuple(
            Complaint(oracle=each.oracle, detail=each.detail, at_seconds=each.at_seconds) for each in result.violations
        ),
    )
    records = [in_true_time(record, seconds) for seconds, record in result.timed_trace()]
    title = f"Seed {plan.seed} of the simulator"
    if result.violations:
        title += ", which fails"
    export_html(stories(histories(records)), path, title=title, simulated=run)


def in_true_time(record: TransitionRecord, seconds: float) -> TransitionRecord:
    """What it would be if no clock were wrong."""
    mono_ns, kept_ns = to_ns(seconds), record.kept_until_ns
    return msgspec.structs.replace(
        record,
        wall=ZERO_WALL + seconds,
        mono_ns=mono_ns,
        kept_until_ns=None if kept_ns is None else kept_ns - record.mono_ns + mono_ns,
    )
