"""Traces for the tests of what reads them: of a simulated run, in memory and as files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import msgspec

from connector.observe.trace_log import JsonLinesSink, open_trace_log
from statemachine.trace import TransitionRecord
from tests.simulation.faults import LEVEL2_KINDS, Plan, draw_plan
from tests.simulation.scripted import simulate

SECONDS_BETWEEN_RUNS = 60.0


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


def write_runs(directory: Path, requests: int) -> tuple[int, int]:
    """One plan of faults after the other, until they have so many requests. How many requests and records it became."""
    written = records = seed = 0
    while written < requests:
        run = simulate(draw_plan(seed, LEVEL2_KINDS))
        write_run(directory, _apart(seed, run.trace))
        written, records, seed = written + run.requests, records + len(run.trace), seed + 1
    return written, records


def _apart(seed: int, trace: list[TransitionRecord]) -> Iterator[TransitionRecord]:
    """The engines of each run have names of their own, and live at another time."""
    for record in trace:
        named = {"engine_id": f"s{seed}-{record.engine_id}", "wall": record.wall + seed * SECONDS_BETWEEN_RUNS}
        if record.peer is not None:
            named["peer"] = f"s{seed}-{record.peer}"
        if record.machine == "peer":
            named["subject"] = f"s{seed}-{record.subject}"
        yield msgspec.structs.replace(record, **named)
