"""One request in one time line: what happened on D and on P, in the order in which it happened.

The wall clocks of two machines differ. `timeline/clocks.py` brings them together as far as what one side heard from the
other says; what is left over is within `Clock.error_ns`. So that no answer is shown before its question, moments that
are known to follow each other are put in that order where the clocks still say otherwise:

    P makes the lease        before   D makes the request
    P's first `Held`         before   D's first `HeldByPeer`
    D lets go                before   P's lease is done
    P's first `ReaderDone`   before   D hears `ReleaseConfirmed`
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from connector.clock import NS_PER_SECOND
from connector.observe.history import History, Story
from connector.observe.timeline.clocks import Clock
from statemachine import hold, lease, peer
from statemachine.trace import TransitionRecord

CREATED = "Created"

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
    at_ns = {id(record): clock_of[id(history)].at(record.mono_ns) for history in own for record in history.records}
    _keep_known_order(story, at_ns)
    seen = [(at_ns[id(record)], history, record) for history in own for record in history.records]
    seen += _of_peers(story, clock_of, histories)
    # Of one instant: P's first, then in the order of the process.
    seen.sort(key=lambda each: (each[0], each[1].machine != lease.MACHINE.name, each[2].seq))
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


# --- inside -----------------------------------------------------------------------------------------------------------


def _keep_known_order(story: Story, at_ns: dict[int, int]) -> None:
    """Move what is shown too late on the side that it is known to come first on, and what lies before it there."""
    for lent in story.leases:
        for each in story.requests:
            _put_before(lent, _first(lent, CREATED), _first(each, CREATED), at_ns)
        for held in story.holds:
            if not held.subject.endswith(f"/{lent.rank}"):
                continue
            told, confirmed = _first(held, hold.HeldByPeer.__name__), _first(held, hold.ReleaseConfirmed.__name__)
            _put_before(lent, _first(lent, lease.Held.__name__), told, at_ns)
            _put_before(lent, _first(lent, lease.ReaderDone.__name__), confirmed, at_ns)
            if told is not None and lent.state == lease.State.DONE.value:
                _put_before(held, _first(held, hold.LetGo.__name__), lent.records[-1], at_ns)


def _put_before(
    history: History, before: TransitionRecord | None, after: TransitionRecord | None, at_ns: dict[int, int]
) -> None:
    if before is None or after is None:
        return
    latest_ns = at_ns[id(after)]
    for record in history.records:
        at_ns[id(record)] = min(at_ns[id(record)], latest_ns)
        if record is before:
            return


def _first(history: History, event: str) -> TransitionRecord | None:
    return next((record for record in history.records if record.event == event), None)


def _of_peers(
    story: Story, clock_of: Mapping[int, Clock], histories: Iterable[History]
) -> list[tuple[int, History, TransitionRecord]]:
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
