"""What the stories of a trace come to: outcomes, time per state, peers, the slowest requests and the failures.

Pure: from stories and histories to values, which the command line renders and `--json` writes as they are. A time in a
state is one visit of one machine instance; the wait in vLLM's queue before the first record is a state of its own here
(`traced.QUEUED`). What is not over at the end of the trace is counted as open, and its last state is not among the
times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from connector.clock import NS_PER_SECOND
from connector.observe.advice import WHAT_TO_DO
from connector.observe.clocks import lives
from connector.observe.history import DONE, OPEN, History, Story, deciding_rank
from connector.observe.traced import MACHINES, QUEUED
from statemachine import lease, peer, request
from statemachine.failures import LeaseExpired
from statemachine.trace import TransitionRecord

EXAMPLES_MAX = 3
ENDS_APART_SECONDS = 60.0
"""Processes that work together end their traces closer to each other than this, by clocks that agree."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took that happened many times, in seconds. Percentiles are times that occurred."""

    count: int
    total: float
    p50: float
    p95: float
    p99: float
    longest: float


class StateTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Visits of one state of one machine."""

    machine: str
    state: str
    open: int
    """Instances that are in it at the end of the trace."""
    times: Times


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is one of OUTCOMES; `reason` the kind of the failure, or of what is open the state that it is in."""

    state: str
    reason: str | None
    count: int


class PeerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one D read from one P, over all ranks of D. `seconds`: from a request's first record to its end."""

    engine_id: str
    peer: str
    requests: int
    done: int
    bytes: int
    seconds: Times
    connections: int
    """How often the peer became ready."""
    failures: dict[str, int]
    """How many attempts to connect, and connections, failed, by the kind of the failure."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What one trace comes to. `seconds`: from its first record to its last. Requests and leases count once, not
    once for each rank."""

    records: int
    engines: tuple[str, ...]
    seconds: float
    requests: int
    requests_per_second: float
    bytes: int
    bytes_per_second: float
    outcomes: tuple[Outcome, ...]
    lease_outcomes: tuple[Outcome, ...]
    queued: Times
    """On D, before the blocks were allocated."""
    kv_wait: Times
    """On D, from when the blocks were allocated to when vLLM could be told."""
    states: tuple[StateTimes, ...]
    peers: tuple[PeerSummary, ...]


class SlowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request by the rank of D that took longest. `state` cost the most of the time, `state_seconds`; `outcome` and
    `reason` are those of the rank that decides, which may be another."""

    request_id: str
    remote_request_id: str | None
    engine_id: str
    rank: int
    peer: str | None
    outcome: str
    reason: str | None
    seconds: float
    state: str
    state_seconds: float
    parts: tuple[tuple[str, float], ...]


class FailureExample(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    engine_id: str
    peer: str | None
    wall: float
    detail: str | None


class FailureSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong in one way. `of`: `request` on D, `lease` on P, `peer`."""

    kind: str
    of: str
    count: int
    first_wall: float
    last_wall: float
    peers: tuple[str, ...]
    advice: str
    examples: tuple[FailureExample, ...]


class ProcessEnd(NamedTuple):
    """The last record of a process, by the clock of its machine."""

    engine_id: str
    rank: int
    wall: float


class Ends(NamedTuple):
    """What --since may have left out because clocks differ.

    Attributes:
        newest: the process whose last record is of the latest time of day.
        earlier: those that have older records than --since asks for, and whose last one is much earlier than that of
            `newest`; the latest first.
    """

    newest: ProcessEnd
    earlier: tuple[ProcessEnd, ...]


def ends(processes: Iterable[Sequence[TransitionRecord]], since_wall: float) -> Ends | None:
    """`processes`: the records of each. Of several lives of one rank the last counts. None: there are no records."""
    last: dict[tuple[str, int], tuple[float, float]] = {}
    for records in processes:
        if records:
            name = records[0].engine_id, records[0].rank
            last[name] = max(last.get(name, (-math.inf, 0.0)), (records[-1].wall, records[0].wall))
    if not last:
        return None
    found = sorted((ProcessEnd(*name, wall) for name, (wall, _) in last.items()), key=lambda each: -each.wall)
    newest = found[0]
    earlier = (
        each
        for each in found
        if newest.wall - each.wall > ENDS_APART_SECONDS and last[each.engine_id, each.rank][1] < since_wall
    )
    return Ends(newest, tuple(earlier))


def summarize(histories: Sequence[History], stories: Sequence[Story]) -> Summary:
    """All of a trace."""
    walls = [wall for each in histories for wall in (each.records[0].wall, each.records[-1].wall)]
    seconds = max(walls, default=0.0) - min(walls, default=0.0)
    last = [_last_rank(story.requests) for story in stories if story.requests]
    length_bytes = sum(each.length_bytes for story in stories for each in story.requests if each.outcome == DONE)
    return Summary(
        records=sum(len(each.records) for each in histories),
        engines=tuple(sorted({each.engine_id for each in histories})),
        seconds=seconds,
        requests=len(last),
        requests_per_second=len(last) / seconds if seconds else 0.0,
        bytes=length_bytes,
        bytes_per_second=length_bytes / seconds if seconds else 0.0,
        outcomes=_outcomes(story.requests for story in stories),
        lease_outcomes=_outcomes(_distinct_leases(stories)),
        queued=_times([each.queued_seconds for each in last if each.queued_seconds is not None]),
        kv_wait=_times([each.seconds for each in last if each.is_over]),
        states=_states(histories),
        peers=_peers(histories),
    )


def slow(stories: Iterable[Story], count: int, *, since_wall: float = -math.inf) -> list[SlowRequest]:
    """The requests that took longest on D, the slowest first: queue, peer, READ, proof, until vLLM could be told. One
    that has not ended counts until the last record of its process, or one that hangs would be among the quickest.

    `since_wall`: of those alone that have ended since then, or have not.
    """
    stories = list(stories)
    last_ns: dict[int, int] = {}
    for life in lives(stories):
        ends_ns = max(history.records[-1].mono_ns for history in life)
        last_ns |= {id(history): ends_ns for history in life if not history.is_over}
    found = [_slow_request(story, last_ns) for story in stories if story.requests and _reaches(story, since_wall)]
    return sorted(found, key=lambda each: -each.seconds)[:count]


def failures(histories: Iterable[History], *, since_wall: float = -math.inf) -> list[FailureSummary]:
    """Those since then by kind, the most frequent first. Every rank counts. The examples are the last ones in time."""
    groups: dict[tuple[str, str], list[FailureExample]] = {}
    for history in histories:
        for kind, example in _failures_of(history):
            if example.wall >= since_wall:
                groups.setdefault((kind, history.machine), []).append(example)
    found = [
        FailureSummary(
            kind=kind,
            of=machine,
            count=len(examples),
            first_wall=min(each.wall for each in examples),
            last_wall=max(each.wall for each in examples),
            peers=tuple(sorted({each.peer for each in examples if each.peer})),
            advice=WHAT_TO_DO.get(kind, ""),
            examples=tuple(sorted(examples, key=lambda each: each.wall)[-EXAMPLES_MAX:]),
        )
        for (kind, machine), examples in groups.items()
    ]
    return sorted(found, key=lambda each: (each.of != request.MACHINE.name, -each.count, each.kind))


# --- inside -----------------------------------------------------------------------------------------------------------


def _times(seconds: Iterable[float]) -> Times:
    found = sorted(seconds)
    if not found:
        return Times(count=0, total=0.0, p50=0.0, p95=0.0, p99=0.0, longest=0.0)

    def percentile(share: float) -> float:
        # The nearest rank, as the timeline page has it.
        return found[math.ceil(share * len(found)) - 1]

    return Times(
        count=len(found),
        total=sum(found),
        p50=percentile(0.5),
        p95=percentile(0.95),
        p99=percentile(0.99),
        longest=found[-1],
    )


def _last_rank(requests: Sequence[History]) -> History:
    """The rank that vLLM waited for, however it ended: one that has not ended, else the last."""
    return max(requests, key=lambda each: (not each.is_over, each.whole_seconds))


def _outcomes(groups: Iterable[Sequence[History]]) -> tuple[Outcome, ...]:
    counted: Counter[tuple[str, str | None]] = Counter()
    for ranks in groups:
        if ranks:
            deciding = deciding_rank(ranks)
            counted[deciding.outcome, deciding.state if deciding.outcome == OPEN else deciding.reason] += 1
    return tuple(Outcome(state=state, reason=reason, count=count) for (state, reason), count in counted.most_common())


def _distinct_leases(stories: Iterable[Story]) -> Iterable[Sequence[History]]:
    """Samples of one prompt share theirs."""
    seen: set[int] = set()
    for story in stories:
        if story.leases and id(story.leases[0]) not in seen:
            seen.add(id(story.leases[0]))
            yield story.leases


def _states(histories: Iterable[History]) -> tuple[StateTimes, ...]:
    found: dict[tuple[str, str], list[float]] = {}
    still_open: Counter[tuple[str, str]] = Counter()
    for history in histories:
        machine = history.machine
        if history.queued_seconds is not None:
            found.setdefault((machine, QUEUED), []).append(history.queued_seconds)
        for visit in history.visits:
            if visit.seconds is not None:
                found.setdefault((machine, visit.state), []).append(visit.seconds)
        if not history.is_over:
            found.setdefault((machine, history.state), [])
            still_open[machine, history.state] += 1
    states = [
        StateTimes(machine=machine, state=state, open=still_open[machine, state], times=_times(seconds))
        for (machine, state), seconds in found.items()
    ]
    return tuple(sorted(states, key=lambda each: (_place_of(each.machine), each.machine, -each.times.total)))


def _place_of(machine: str) -> int:
    """In the order of the machines; of a later version's, the last."""
    order = [each.name for each in MACHINES]
    return order.index(machine) if machine in order else len(order)


def _peers(histories: Sequence[History]) -> tuple[PeerSummary, ...]:
    requests: dict[tuple[str, str], list[History]] = {}
    peers: dict[tuple[str, str], list[History]] = {}
    for history in histories:
        if history.machine == request.MACHINE.name and history.peer is not None:
            requests.setdefault((history.engine_id, history.peer), []).append(history)
        elif history.machine == peer.MACHINE.name:
            peers.setdefault((history.engine_id, history.subject), []).append(history)
    found = []
    for key in sorted({*requests, *peers}):
        pulled, met = requests.get(key, []), peers.get(key, [])
        failed: Counter[str] = Counter(kind for each in met for kind, _ in _failures_of(each))
        found.append(
            PeerSummary(
                engine_id=key[0],
                peer=key[1],
                requests=len(pulled),
                done=sum(each.outcome == DONE for each in pulled),
                bytes=sum(each.length_bytes for each in pulled if each.outcome == DONE),
                seconds=_times(each.seconds for each in pulled if each.is_over),
                connections=sum(visit.state == peer.State.READY.value for each in met for visit in each.visits),
                failures=dict(failed),
            )
        )
    return tuple(found)


def _reaches(story: Story, since_wall: float) -> bool:
    """Whether some rank of D has not ended, or has since then."""
    return any(not each.is_over or each.records[-1].wall >= since_wall for each in story.requests)


def _slow_request(story: Story, last_ns: Mapping[int, int]) -> SlowRequest:
    """`last_ns`: the last moment of which the process of a request that has not ended tells, by its `id`."""
    history, deciding = _last_rank(story.requests), story.deciding
    parts: dict[str, float] = {}
    if history.queued_seconds is not None:
        parts[QUEUED] = history.queued_seconds
    for visit in history.visits:
        if visit.seconds is not None:
            parts[visit.state] = parts.get(visit.state, 0.0) + visit.seconds
    if not history.is_over:
        last = history.visits[-1]
        parts[last.state] = parts.get(last.state, 0.0) + (last_ns[id(history)] - last.entered_ns) / NS_PER_SECOND
    state, state_seconds = max(parts.items(), key=lambda part: part[1], default=("", 0.0))
    return SlowRequest(
        request_id=history.subject,
        remote_request_id=history.remote_request_id,
        engine_id=history.engine_id,
        rank=history.rank,
        peer=history.peer,
        outcome=deciding.outcome,
        reason=deciding.reason,
        seconds=sum(parts.values()),
        state=state,
        state_seconds=state_seconds,
        parts=tuple(parts.items()),
    )


class _Failed(NamedTuple):
    kind: str
    example: FailureExample


def _failures_of(history: History) -> Iterable[_Failed]:
    """The end of a request that failed; the end of a lease that nobody released, unless it lent an answer back; each
    loss of a peer."""
    match history.machine:
        case request.MACHINE.name:
            if history.is_over and history.outcome != DONE:
                yield _failed(history, history.reason or history.state, -1)
        case lease.MACHINE.name:
            if history.state == lease.State.EXPIRED.value and history.reason != lease.LENT_BACK:
                yield _failed(history, LeaseExpired.__name__, -1)
        case peer.MACHINE.name:
            for number, record in enumerate(history.records):
                if record.reason is not None and record.event in _PEER_FAILURES:
                    yield _failed(history, record.reason, number)


_PEER_FAILURES = frozenset({peer.HandshakeFailed.__name__, peer.ConnectionSuspect.__name__})


def _failed(history: History, kind: str, number: int) -> _Failed:
    record = history.records[number]
    return _Failed(
        kind,
        FailureExample(
            subject=history.subject,
            engine_id=history.engine_id,
            peer=history.peer,
            wall=record.wall,
            detail=record.detail,
        ),
    )
