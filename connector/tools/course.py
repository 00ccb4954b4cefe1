"""One request in one time line: what happened on D and on P, in the order in which it happened.

The wall clocks of two machines differ. `connector/observe/clocks.py` brings them together as far as what one side heard
from the other says; what is left over is within `Clock.error_ns`. So that no answer is shown before its question,
moments that are known to follow each other (`known_order`, and P makes the lease before D makes the request) are put in
that order where the clocks still say otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TypeAlias

import msgspec

from connector.clock import NS_PER_SECOND
from connector.observe.clocks import (
    Clock,
    all_histories,
    clocks,
    first_record,
    known_order,
    lease_of_each_hold,
)
from connector.observe.history import History, Story, histories, stories
from connector.observe.traced import CREATED
from statemachine import lease, peer
from statemachine.trace import TransitionRecord

SIDES = {lease.MACHINE.name: "P"}
"""Whose machine it is, by name; all others are D's."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One record. `offset_seconds`: since the first moment of the time line; `at`: Unix time, by the clocks as they
    were brought together. `dwell_seconds`: for how long its instance then stayed in `state`, if it left."""

    offset_seconds: float
    at: float
    side: str
    history: History
    record: TransitionRecord
    dwell_seconds: float | None

    @property
    def state(self) -> str:
        return self.record.to_state


@dataclass(frozen=True, kw_only=True)
class Course:
    """`shifts`: by how many seconds the clock of each process was moved, where it was."""

    moments: tuple[Moment, ...]
    shifts: dict[str, float]


def course(story: Story, clock_of: Mapping[int, Clock], histories: Iterable[History]) -> Course:
    """`clock_of`: `clocks` of all stories; `histories`: of the trace, for what became of D's connection meanwhile."""
    own = [*story.leases, *story.holds, *story.requests]
    seen = [(clock_of[id(each)].at(record.mono_ns), each, record) for each in own for record in each.records]
    seen = _in_known_order(seen + _of_peers(story, clock_of, histories), _known_order(story))
    begin_ns = seen[0][0]
    dwells = {id(record): seconds for _, history, _ in seen for record, seconds in _dwells(history)}
    clocks = {id(clock): clock for each in own if (clock := clock_of[id(each)]).shift_ns}
    return Course(
        moments=tuple(
            Moment(
                offset_seconds=(at - begin_ns) / NS_PER_SECOND,
                at=at / NS_PER_SECOND,
                side=SIDES.get(history.machine, "D"),
                history=history,
                record=record,
                dwell_seconds=dwells.get(id(record)),
            )
            for at, history, record in seen
        ),
        shifts={f"{each.engine_id} rank {each.rank}": each.shift_ns / NS_PER_SECOND for each in clocks.values()},
    )


def brought_together(
    records: Sequence[TransitionRecord],
) -> tuple[list[TransitionRecord], dict[tuple[str, int], float]]:
    """The same with times of day by clocks that agree, and by how many seconds those of which engine and rank moved."""
    told = stories(histories(records))
    clock_of = clocks(told)
    moved: dict[int, float] = {}
    shifts: dict[tuple[str, int], float] = {}
    for history in all_histories(told):
        clock = clock_of[id(history)]
        if clock.shift_ns:
            shifts[clock.engine_id, clock.rank] = clock.shift_ns / NS_PER_SECOND
            moved |= {id(record): clock.shift_ns / NS_PER_SECOND for record in history.records}
    return [
        msgspec.structs.replace(each, wall=each.wall + moved[id(each)]) if id(each) in moved else each
        for each in records
    ], shifts


_Seen: TypeAlias = tuple[int, History, TransitionRecord]
"""Unix time in nanoseconds, and what was seen then."""


# --- inside -----------------------------------------------------------------------------------------------------------


def _known_order(story: Story) -> Iterator[tuple[TransitionRecord, TransitionRecord]]:
    """What came before what on the other side."""
    for lent in story.leases:
        for each in story.requests:
            before, after = first_record(lent, CREATED), first_record(each, CREATED)
            if before is not None and after is not None:
                yield before, after
    for held, known in zip(story.holds, lease_of_each_hold(story), strict=True):
        if known is not None:
            yield from known_order(known, held)


def _in_known_order(seen: Iterable[_Seen], known: Iterable[tuple[TransitionRecord, TransitionRecord]]) -> list[_Seen]:
    """By time, but nothing before what is known to come first, or what its process wrote before it."""
    moments = {id(each[2]): each for each in seen}
    followers: dict[int, list[int]] = {each: [] for each in moments}
    awaited = dict.fromkeys(moments, 0)
    pairs = [(id(before), id(after)) for before, after in known]
    processes: dict[tuple[str, str, int], list[TransitionRecord]] = {}
    for _, _, record in moments.values():
        processes.setdefault((record.engine_id, record.role, record.rank), []).append(record)
    for records in processes.values():
        records.sort(key=lambda record: (record.mono_ns, record.seq))
        pairs += [(id(before), id(after)) for before, after in pairwise(records)]
    for before, after in pairs:
        followers[before].append(after)
        awaited[after] += 1
    ready = [(moments[each][0], each) for each, count in awaited.items() if not count]
    heapify(ready)
    found: list[_Seen] = []
    latest_ns = 0
    while ready:
        _, key = heappop(ready)
        at_ns, history, record = moments[key]
        latest_ns = max(latest_ns, at_ns)
        found.append((latest_ns, history, record))
        for each in followers[key]:
            awaited[each] -= 1
            if not awaited[each]:
                heappush(ready, (moments[each][0], each))
    # Only records that contradict each other are left (trace check names them).
    shown = {id(record) for _, _, record in found}
    return found + [each for key, each in moments.items() if key not in shown]


def _of_peers(story: Story, clock_of: Mapping[int, Clock], histories: Iterable[History]) -> list[_Seen]:
    """What D's connection to P went through while the request was there."""
    if not story.requests:
        return []
    clocks = {(each.engine_id, each.rank): (each, clock_of[id(each)]) for each in story.requests}
    found = []
    for history in histories:
        if history.machine != peer.MACHINE.name or (history.engine_id, history.rank) not in clocks:
            continue
        of_request, clock = clocks[history.engine_id, history.rank]
        if history.subject != of_request.peer:
            continue
        begin_ns = of_request.records[0].mono_ns - round((of_request.queued_seconds or 0.0) * NS_PER_SECOND)
        end_ns = of_request.records[-1].mono_ns
        found += [
            (clock.at(record.mono_ns), history, record)
            for record in history.records
            if begin_ns <= record.mono_ns <= end_ns
        ]
    return found


def _dwells(history: History) -> Iterable[tuple[TransitionRecord, float]]:
    entered = [each for each in history.records if each.to_state != each.from_state]
    for visit_record, following in itertools.pairwise(entered):
        yield visit_record, (following.mono_ns - visit_record.mono_ns) / NS_PER_SECOND
