"""Whether the records of a trace are what the machines allow: every step against the tables, and what follows between
machines and between P and D.

A record holds no values, so a handler is not run again. What is compared of each record, in the order of its process:

* numbers have no gap, and the clock does not go back
* an instance is made once, in its initial state, and each of its records begins where the one before ended
* its table has the transition; what a table lists as ignored or impossible is shown with the table's reason
* nothing follows a terminal state, and the name of a lease is not used for another one
* a request that has failed or expired has the kind of a failure, and one that is done has none

Between the machines of one process of D:

* a request begins to read while its peer is ready
* a request that has read is done while every hold on its lease is held or assumed: that is the proof

And between D and P, where nothing but the order of what one has heard from the other can be compared:

* what D has read was not withdrawn by P before it was lent
* a lease that P ended because its readers were done is held by none of them any more
* D was told that a lease is held by a P that has made it

A lease that D calls by its request id alone is compared with none of P's: which one is meant is a guess where records
of P are missing, and a guess finds no mistake.

Sampling and rotation leave gaps, and so do a damaged line and a file system that does not take records, anywhere in a
file. Then what began before the first record that is left, or that follows such a gap, is taken as it is found, and
nothing is concluded from what is missing: of an engine that requests describe by unlike sizes there may be a peer, and
holds, that were made before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from connector.observe.catalogue import kinds
from connector.observe.history import LeaseKey, begins_process
from connector.observe.traced import CREATED, MACHINES, TERMINAL
from connector.tools.trace_reader import ProcessTrace
from statemachine import hold, lease, peer, request
from statemachine.kernel import Event, Machine
from statemachine.trace import TransitionRecord

_BY_NAME: dict[str, Machine[Any, Any]] = {machine.name: machine for machine in MACHINES}

Located: TypeAlias = tuple[Path | None, int, TransitionRecord]
"""File, line (from 1), and what stands there. Records that come from no file count as its lines."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A record that the machines do not allow, and why; or a line that is damaged, which has none."""

    path: Path | None
    line: int
    record: TransitionRecord | None
    problem: str

    def __str__(self) -> str:
        record = self.record
        place = f"{self.path}:{self.line}" if self.path is not None else f"record {self.line}"
        if record is None:
            return f"{place}: {self.problem}"
        who = f"{record.engine_id} rank {record.rank}"
        step = f"{record.machine} {record.subject}: {record.from_state} -> {record.to_state} ({record.event})"
        return f"{place}: {who}, {step}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was looked at, and what is wrong with it, in the order of the files. `missing`: records of which is known
    that they were not written."""

    processes: int
    records: int
    missing: int
    findings: tuple[Finding, ...]


def check(processes: Iterable[ProcessTrace]) -> Verdict:
    """Check what was read from files."""
    lives: list[_Life] = []
    damaged: list[Finding] = []
    missing = 0
    for process in processes:
        damaged += [
            Finding(path=file.path, line=line, record=None, problem=f"this line is damaged: {reason}")
            for file in process.files
            for line, reason in file.damaged
        ]
        missing += sum(gap.missing for file in process.files for _, gap in file.gaps)
        lives += _lives(
            _located(process),
            is_whole=process.is_whole,
            is_one=process.header is not None,
            after_gaps=_first_after_gaps(process),
        )
    return _verdict(lives, missing, damaged)


def check_records(records: Iterable[TransitionRecord], *, is_whole: bool = True) -> Verdict:
    """Check records of several processes that come from no file; each process's in its order.

    `is_whole`: they are everything that these processes did.
    """
    return _verdict(_lives(((None, line, record) for line, record in enumerate(records, start=1)), is_whole=is_whole))


# --- inside -----------------------------------------------------------------------------------------------------------


@dataclass
class _Life:
    """The records of one process. `after_gaps`: places of those before which others are missing."""

    is_whole: bool
    after_gaps: frozenset[tuple[Path | None, int]]
    located: list[Located] = field(default_factory=list)


def _located(process: ProcessTrace) -> Iterator[Located]:
    for file in process.files:
        for line, record in file.located():
            yield file.path, line, record


def _first_after_gaps(process: ProcessTrace) -> frozenset[tuple[Path | None, int]]:
    found: set[tuple[Path | None, int]] = set()
    is_after = False
    for file in process.files:
        gaps = deque(file.holes)
        for line, _ in file.located() if gaps or is_after else ():
            while gaps and gaps[0] < line:
                gaps.popleft()
                is_after = True
            if is_after:
                found.add((file.path, line))
                is_after = False
            if not gaps:
                break
        is_after = is_after or bool(gaps)
    return frozenset(found)


def _lives(
    located: Iterable[Located],
    *,
    is_whole: bool,
    is_one: bool = False,
    after_gaps: frozenset[tuple[Path | None, int]] = frozenset(),
) -> list[_Life]:
    """A process has one engine and rank. `is_one`: no other one has written these records for them, as where files have
    headers; a number that is lower than the one before is wrong then."""
    found: list[_Life] = []
    latest: dict[tuple[str, str, int], _Life] = {}
    for each in located:
        record = each[2]
        key = (record.engine_id, record.role, record.rank)
        life = latest.get(key)
        if life is None or (not is_one and begins_process(record.seq, life.located[-1][2].seq)):
            life = latest[key] = _Life(is_whole, after_gaps)
            found.append(life)
        life.located.append(each)
    return found


def _verdict(lives: list[_Life], missing: int = 0, damaged: Iterable[Finding] = ()) -> Verdict:
    checks = [_ProcessCheck(life) for life in lives]
    for each in checks:
        each.run()
    findings = [*damaged, *(finding for each in checks for finding in each.findings)]
    findings += _between(checks)
    return Verdict(
        processes=len(lives),
        records=sum(len(life.located) for life in lives),
        missing=missing,
        findings=tuple(sorted(findings, key=lambda finding: (str(finding.path or ""), finding.line))),
    )


class _Rules:
    """The tables by the names that records have."""

    def __init__(self) -> None:
        self.states = {machine.name: {str(state.value): state for state in machine.states} for machine in MACHINES}
        self.events: dict[str, dict[str, type[Event]]] = {
            machine.name: {event.__name__: event for event in machine.events} for machine in MACHINES
        }
        self.allowed = {
            (machine.name, state.value, event.__name__, target.value)
            for machine in MACHINES
            for (state, event), transition in machine.table.items()
            for target in transition.targets
        }
        self.kinds = frozenset(kinds())

    def why_not(self, record: TransitionRecord) -> str | None:
        """Why the table does not have this step; None: it does."""
        name = record.machine
        if (name, record.from_state, record.event, record.to_state) in self.allowed:
            return None
        machine = _BY_NAME.get(name)
        if machine is None:
            return f"there is no machine {name}"
        state, event = self.states[name].get(record.from_state or ""), self.events[name].get(record.event)
        if state is None or record.to_state not in self.states[name]:
            return f"{record.to_state if state is not None else record.from_state} is no state of this machine"
        if event is None:
            return f"{record.event} is no event of this machine"
        pair = (state, event)
        if pair in machine.table:
            targets = ", ".join(sorted(str(target.value) for target in machine.table[pair].targets))
            return f"this event leads to {targets}"
        if pair in machine.ignored:
            return f"this event changes nothing in that state ({machine.ignored[pair]})"
        return f"this event is impossible in that state ({machine.impossible[pair]})"


_RULES = _Rules()
_READ = frozenset({request.State.READING.value, request.State.PROVING.value})
_PROVEN = frozenset({hold.State.HELD.value, hold.State.ASSUMED.value})
_UNSUCCESSFUL = frozenset({request.State.FAILED.value, request.State.EXPIRED.value})
_REQUEST, _HOLD, _PEER, _LEASE = (each.MACHINE.name for each in (request, hold, peer, lease))

CLOCKS_DIFFER_SECONDS = 1.0
"""How much the clocks of two machines may, for what is concluded from the order of what they recorded."""

_InstanceKey: TypeAlias = tuple[str, str | None, str, int | None]
"""Machine, peer, subject, number of the lease."""


class _ProcessCheck:
    """Goes through the records of one process.

    `live`: the states that the living instances of a key are in. There may be several: requests that describe an engine
    by unlike sizes each have a peer of their own with it, and holds.
    """

    def __init__(self, life: _Life) -> None:
        self.findings: list[Finding] = []
        self.is_whole = life.is_whole
        self.after_gaps = life.after_gaps
        self.located = life.located
        self.live: dict[_InstanceKey, list[str]] = {}
        self.lease_names: set[LeaseKey] = set()
        # Subjects of holds, by lease.
        self.holds_on: dict[LeaseKey, set[_InstanceKey]] = {}
        # Requests that were read, by lease: where they were done.
        self.read: dict[LeaseKey, Located] = {}
        # Leases that P said it holds: where.
        self.told_held: dict[LeaseKey, Located] = {}
        # P: where each lease was last seen, and all its events.
        self.leases: dict[LeaseKey, tuple[Located, set[str]]] = {}

    def run(self) -> None:
        seq, mono_ns = -1, 0
        for where in self.located:
            record = where[2]
            if where[:2] in self.after_gaps:
                self._forget()
            if record.seq != seq + 1 and (self.is_whole or record.seq <= seq):
                before = f"that of the record before {seq}" if seq >= 0 else "it is the first of its process"
                self._object(where, f"its number is {record.seq}, and {before}")
            if record.mono_ns < mono_ns:
                self._object(where, "the clock of its process went back")
            seq, mono_ns = record.seq, max(mono_ns, record.mono_ns)
            if record.machine not in _BY_NAME:
                self._object(where, f"there is no machine {record.machine}")
            elif record.from_state is None:
                self._make(where)
            else:
                self._step(where)

    def _forget(self) -> None:
        """What instances went through next is missing."""
        self.live.clear()
        self.holds_on.clear()

    def _object(self, where: Located, problem: str) -> None:
        path, line, record = where
        self.findings.append(Finding(path=path, line=line, record=record, problem=problem))

    def _make(self, where: Located) -> None:
        record = where[2]
        name, key = record.machine, _instance(record)
        initial = str(_BY_NAME[name].initial.value)
        if record.event != CREATED or record.to_state != initial:
            self._object(where, f"an instance of this machine is made in state {initial}, by {CREATED}")
        states = self.live.setdefault(key, [])
        if states and name in (_REQUEST, _LEASE):
            self._object(where, f"it is in state {states[-1]} already")
            states.clear()
        states.append(record.to_state)
        if name == _LEASE:
            lease_name = LeaseKey.of(record)
            if lease_name in self.lease_names and lease_name.number:
                self._object(where, "a lease of this name is over, and a lease that is over never comes back")
            self.lease_names.add(lease_name)
            self._note_lease(where)
        elif name == _HOLD:
            self.holds_on.setdefault(LeaseKey.of(record), set()).add(key)

    def _step(self, where: Located) -> None:
        record = where[2]
        name, key = record.machine, _instance(record)
        states = self.live.setdefault(key, [])
        if record.from_state in states:
            states.remove(record.from_state)
        elif states and (self.is_whole or name in (_REQUEST, _LEASE)):
            self._object(where, f"it was in state {states.pop()}")
        elif self.is_whole:
            self._object(where, f"it is over, or was never made: {record.from_state} is not the state that it is in")
        problem = _RULES.why_not(record)
        if problem is not None:
            self._object(where, problem)
        if name == _REQUEST:
            self._check_request(where)
        elif name == _HOLD:
            self.holds_on.setdefault(LeaseKey.of(record), set()).add(key)
            if record.event == hold.HeldByPeer.__name__:
                self.told_held.setdefault(LeaseKey.of(record), where)
        elif name == _LEASE:
            self._note_lease(where)
        if record.to_state not in TERMINAL[name]:
            states.append(record.to_state)

    def _note_lease(self, where: Located) -> None:
        record = where[2]
        _, events = self.leases.get(LeaseKey.of(record), (where, set()))
        events.add(record.event)
        self.leases[LeaseKey.of(record)] = (where, events)

    def _check_request(self, where: Located) -> None:
        record = where[2]
        if record.to_state in _UNSUCCESSFUL and record.reason not in _RULES.kinds:
            self._object(where, f"its reason is {record.reason}, which is no kind of failure")
        if record.event == request.PeerReady.__name__ and record.to_state in _READ:
            peers = self.live.get((_PEER, record.peer, record.peer or "", None))
            if self.is_whole and peer.State.READY.value not in (peers or ()):
                self._object(where, f"its peer is not ready ({', '.join(peers or ['never met'])})")
        if record.to_state == request.State.DONE.value:
            if record.reason is not None:
                self._object(where, f"it is done, and has a reason ({record.reason})")
            if record.from_state in _READ:
                self.read[LeaseKey.of(record)] = where
                self._check_proof(where)

    def _check_proof(self, where: Located) -> None:
        keys = self.holds_on.get(LeaseKey.of(where[2]), ())
        if not keys and self.is_whole:
            self._object(where, "it is done, and nothing was asked about its lease: there is no hold")
        for key in sorted(keys, key=str):
            states = self.live.get(key, [])
            if not _PROVEN.intersection(states):
                found = states[-1] if states else "over"
                self._object(where, f"it is done, and its lease is not proven: hold {key[2]} is {found}")


def _instance(record: TransitionRecord) -> _InstanceKey:
    number = record.lease_number if record.machine in (_HOLD, _LEASE) else None
    return record.machine, record.peer, record.subject, number


def _between(checks: list[_ProcessCheck]) -> Iterator[Finding]:
    """What D says against what P says."""
    lent: dict[LeaseKey, list[tuple[_ProcessCheck, Located, set[str]]]] = {}
    for each in checks:
        for key, (where, events) in each.leases.items():
            lent.setdefault(key, []).append((each, where, events))
    spans = [_Numbers(each) for each in checks if each.leases and each.is_whole]
    for decode in checks:
        for key, where in decode.read.items():
            for _, _, events in lent.get(key, ()):
                if lease.Withdrawn.__name__ in events and lease.Granted.__name__ not in events:
                    yield _finding(where, "it has read a lease that P withdrew before it was lent")
        for key, where in decode.told_held.items():
            if key not in lent and any(numbers.includes(key) for numbers in spans):
                yield _finding(where, "it was told that a lease is held which P has never made")
        if not decode.is_whole:
            continue
        ends_wall = decode.located[-1][2].wall - CLOCKS_DIFFER_SECONDS
        for key, holds in decode.holds_on.items():
            # What comes after its last record is not known: of its last moments on a full disk, of a copied file, of an
            # engine that crashed. Which rank of P a hold is on is not known either, so one rank's end decides nothing.
            ranks = lent.get(key, [])
            were_done = all(_is_done(where) and where[2].wall < ends_wall for _, where, _ in ranks)
            still_held = sorted(each[2] for each in holds if decode.live.get(each) == [hold.State.HELD.value])
            if still_held and were_done and len(ranks) >= len(holds):
                reader = decode.located[0][2]
                who = f"{reader.engine_id} rank {reader.rank}"
                yield _finding(ranks[0][1], f"its readers were done, and {who} still holds {still_held[0]}")


class _Numbers:
    """The leases that one life of a P has made have numbers in a row."""

    def __init__(self, prefill: _ProcessCheck) -> None:
        numbers = [key.number for key in prefill.leases]
        self._engine_id = prefill.located[0][2].engine_id
        self._first, self._last = min(numbers), max(numbers)

    def includes(self, key: LeaseKey) -> bool:
        return key.engine_id == self._engine_id and 0 < self._first <= key.number <= self._last


def _is_done(where: Located) -> bool:
    return where[2].to_state == lease.State.DONE.value


def _finding(where: Located, problem: str) -> Finding:
    path, line, record = where
    return Finding(path=path, line=line, record=record, problem=problem)
