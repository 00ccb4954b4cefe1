"""Traces for the tests of what reads them: of a simulated run, in memory and as files."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from connector.observe.trace_log import JsonLinesSink, open_trace_log
from statemachine.trace import TransitionRecord
from tests.simulation.cluster import simulate
from tests.simulation.faults import LEVEL2_KINDS, Plan, draw_plan


@cache
def calm_run() -> tuple[TransitionRecord, ...]:
    """Nothing goes wrong on purpose."""
    return tuple(simulate(Plan(seed=3, faults=[])).trace)


@cache
def faulty_run() -> tuple[TransitionRecord, ...]:
    """With failures of many kinds, restarts, and an engine that is replaced."""
    return tuple(simulate(draw_plan(9, LEVEL2_KINDS)).trace)


def write_run(directory: Path, records: Iterable[TransitionRecord]) -> None:
    """As the processes of the run would have written it."""
    sinks: dict[tuple[str, int], JsonLinesSink] = {}
    for record in records:
        key = (record.engine_id, record.rank)
        if record.seq == 0 and key in sinks:
            sinks.pop(key).close()
        if key not in sinks:
            sinks[key] = open_trace_log(directory, engine_id=record.engine_id, role=record.role, rank=record.rank)
        sinks[key].write(record)
    for sink in sinks.values():
        sink.close()
