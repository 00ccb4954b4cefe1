"""What a request went through, put together from transition records of several processes.

    records --histories--> one History for each machine instance --stories--> one Story for each request

A request is seen from several sides: by the machine `request` on each rank of D, by `hold` (D's knowledge of P's
lease), by `peer` (D's knowledge of the engine), and by the machine `lease` on each rank of P. D's and P's sides join
on the request id that P gave and the number of the lease: the subject of the lease is the `remote_request_id` of the
request, whose `peer` is P's engine id.
vLLM wraps the id that the client sent (`cmpl-<id>-0-<random>`), differently on P and on D, so a person's name for a
request is looked for inside of these.

It does not matter where the records come from: files, a running engine, or a simulated run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from connector.clock import NS_PER_SECOND
from connector.observe.traced import TERMINAL
from statemachine import hold, lease, request
from statemachine.failures import AbortedByClient
from statemachine.trace import TransitionRecord

OUTCOMES = ("failed", "expired", "aborted", "open", "withdrawn", "done")
"""What one rank came to, the worst first. `open`: it was not over when the records end; `aborted`: its client left;
`withdrawn`: P never lent it, and no D asked for it."""
FAILED, EXPIRED, ABORTED, OPEN, WITHDRAWN, DONE = OUTCOMES

_OUTCOME_OF_END = {
    (request.MACHINE.name, request.State.DONE.value): DONE,
    (request.MACHINE.name, request.State.FAILED.value): FAILED,
    (request.MACHINE.name, request.State.EXPIRED.value): EXPIRED,
    (hold.MACHINE.name, hold.State.RELEASED.value): DONE,
    (hold.MACHINE.name, hold.State.GONE.value): EXPIRED,
    (lease.MACHINE.name, lease.State.DONE.value): DONE,
    (lease.MACHINE.name, lease.State.EXPIRED.value): EXPIRED,
    (lease.MACHINE.name, lease.State.WITHDRAWN.value): WITHDRAWN,
    (lease.MACHINE.name, lease.State.SUPERSEDED.value): EXPIRED,
}

_OF_PROMPTS = "cmpl-"
_WRAPPED = re.compile("(?:[0-9]+_)?((?:chat)?cmpl-)?(.+?)(-[0-9]+)?-[0-9a-f]{8}")

K = TypeVar("K")
V = TypeVar("V")


class LeaseKey(NamedTuple):
    """What joins the two sides: engine id of P, request id there, number of the lease (0: the parameters carried
    none)."""

    engine_id: str | None
    request_id: str | None
    number: int

    @classmethod
    def of(cls, record: TransitionRecord) -> LeaseKey:
        """The key of the lease that a record of P is about, or that a request or a hold of D names."""
        if record.machine == lease.MACHINE.name:
            return cls(record.engine_id, record.subject, record.lease_number or 0)
        return cls(record.peer, record.remote_request_id, record.lease_number or 0)


class LeasesGiven:
    """Leases that P is known to have made, by what P calls them."""

    def __init__(self, keys: Iterable[LeaseKey]) -> None:
        self._numbers: dict[tuple[str | None, str | None], set[int]] = {}
        for engine_id, request_id, number in keys:
            self._numbers.setdefault((engine_id, request_id), set()).add(number)

    def lent_as(self, key: LeaseKey) -> LeaseKey:
        """What P calls the lease that D calls `key`: without a number it is the one of that id, if P has given the id
        once, as P takes it too. `key` itself where no such lease is known."""
        given = self._numbers.get((key.engine_id, key.request_id), set())
        return key._replace(number=next(iter(given))) if key.number == 0 and len(given) == 1 else key


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One state that an instance was in, from `entered_ns` on its process's monotonic clock and `wall` in Unix time.

    `seconds`: how long, None for the state that it was in last. `event` led here; `reason` and `detail` are what the
    value carried then.
    """

    state: str
    event: str
    wall: float
    entered_ns: int
    seconds: float | None
    reason: str | None
    detail: str | None


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything that one machine instance went through. `records` are in the order in which they were written."""

    records: tuple[TransitionRecord, ...]
    visits: tuple[Visit, ...]

    @property
    def machine(self) -> str:
        return self.records[0].machine

    @property
    def subject(self) -> str:
        return self.records[0].subject

    @property
    def engine_id(self) -> str:
        """The engine that wrote it."""
        return self.records[0].engine_id

    @property
    def rank(self) -> int:
        return self.records[0].rank

    @property
    def peer(self) -> str | None:
        return next((record.peer for record in self.records if record.peer), None)

    @property
    def remote_request_id(self) -> str | None:
        return next((record.remote_request_id for record in self.records if record.remote_request_id), None)

    @property
    def lease_key(self) -> LeaseKey:
        """The lease that this request, hold or lease is about."""
        return LeaseKey.of(self.records[0])

    @property
    def states(self) -> tuple[str, ...]:
        """The states in order, each stay counted once."""
        return tuple(visit.state for visit in self.visits)

    @property
    def state(self) -> str:
        """The last one."""
        return self.visits[-1].state

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL.get(self.machine, frozenset())

    @property
    def outcome(self) -> str:
        """One of OUTCOMES. Of a request, a hold or a lease."""
        found = _OUTCOME_OF_END.get((self.machine, self.state), OPEN)
        if self.machine != request.MACHINE.name or found not in (DONE, FAILED):
            return found
        if self.reason == AbortedByClient.__name__:
            return ABORTED
        # One that was read may have failed after that: a running engine tells why with its end.
        return FAILED if self.reason is not None else found

    @property
    def reason(self) -> str | None:
        return self.records[-1].reason

    @property
    def detail(self) -> str | None:
        return self.records[-1].detail

    @property
    def seconds(self) -> float:
        """From the first record to the last."""
        return (self.records[-1].mono_ns - self.records[0].mono_ns) / NS_PER_SECOND

    @property
    def queued_seconds(self) -> float | None:
        """For how long the engine knew this request or lease before its first record: it waited in vLLM's queue."""
        return self.records[0].age_seconds

    @property
    def whole_seconds(self) -> float:
        """All that is known of it: the wait in vLLM's queue, and from the first record to the last."""
        return (self.queued_seconds or 0.0) + self.seconds

    @property
    def blocks(self) -> int:
        return max(record.blocks or 0 for record in self.records)

    @property
    def length_bytes(self) -> int:
        return max(record.bytes or 0 for record in self.records)


class Rank(Protocol):
    """What a request or a lease went through on one rank, as far as `deciding_rank` asks."""

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        ...

    @property
    def reason(self) -> str | None: ...

    @property
    def whole_seconds(self) -> float:
        """From when its engine heard of it to the last that is known. The engine's ranks hear of it together, so this
        compares moments without comparing clocks."""
        ...


R = TypeVar("R", bound=Rank)


def deciding_rank(ranks: Iterable[R]) -> R:
    """The rank whose outcome is that of the whole: the worst of OUTCOMES. `ranks`: one at least.

    Of several that failed it is the first that did, because others may have failed in consequence. Of several that are
    open, one that has failed and still waits for its READs; otherwise the one in which nothing has happened for
    longest. Of several that are done, the last, for which vLLM waited.
    """

    def order(rank: R) -> tuple[int, bool, float]:
        seconds = -rank.whole_seconds if rank.outcome == DONE else rank.whole_seconds
        return OUTCOMES.index(rank.outcome), rank.reason is None, seconds

    return min(ranks, key=order)


@dataclass(kw_only=True)
class Story:
    """One request of one D engine, or one lease that no D is known to have read: all ranks, both sides.

    A lease without a request may have holds all the same: a request that ends in vLLM's queue on D, or needs nothing
    of P's blocks, is no request's machine there, and its lease was held from when D heard of it.
    """

    requests: list[History] = field(default_factory=list)
    """On D, a rank each."""
    holds: list[History] = field(default_factory=list)
    leases: list[History] = field(default_factory=list)
    """On P, a rank each."""

    @property
    def names(self) -> frozenset[str]:
        """Every id that the request has somewhere."""
        own = {each.subject for each in (*self.requests, *self.leases)}
        return frozenset(own | {each.remote_request_id for each in self.requests if each.remote_request_id})

    @property
    def is_over(self) -> bool:
        """On D; where D's side is not known, on P."""
        return all(each.is_over for each in self.requests or self.leases)

    @property
    def deciding(self) -> History:
        """The rank whose outcome is that of the story: of D; where D's side is not known, of P."""
        return deciding_rank(self.requests or self.leases)


def histories(records: Iterable[TransitionRecord]) -> list[History]:
    """One history for each machine instance, in the order of their first records.

    The records of one process have to be in the order in which they were written; processes may be mixed. A subject
    whose `from_state` is None once more is another instance.
    """
    latest: dict[tuple[object, ...], list[TransitionRecord]] = {}
    instances: list[list[TransitionRecord]] = []
    for record in records:
        # With the number: D may still release a lease of this id when P has lent under it once more.
        names = (record.machine, record.peer, record.subject, record.lease_number)
        key = (record.engine_id, record.role, record.rank, *names)
        if record.from_state is None or key not in latest:
            latest[key] = []
            instances.append(latest[key])
        latest[key].append(record)
    return [History(records=tuple(instance), visits=_visits(instance)) for instance in instances]


def begins_process(seq: int, seq_before: int) -> bool:
    """Whether the record number `seq` of an engine's rank is of another process than the one before it, whose number is
    `seq_before`. Each process counts its records up from 0; its first ones may be missing, after rotation or in an
    excerpt, so that any number lower than the one before begins another one."""
    return seq == 0 or seq < seq_before


def stories(all_histories: Iterable[History]) -> list[Story]:
    """One story for each request on D and for each lease that nobody on a known D has asked for, in the order in which
    they began by the wall clock.

    A request whose parameters carried no number belongs to the lease of that id, if P has given the id once. Parallel
    samples of one prompt are a story each, with the same leases. A D that is asked twice with the same ids and
    parameters has two stories: its first instance on each rank belongs to the first.
    """
    of_machine: dict[str, list[History]] = {}
    for history in all_histories:
        of_machine.setdefault(history.machine, []).append(history)
    leases = _grouped((each.lease_key, each) for each in of_machine.get("lease", ()))
    holds = _grouped(((each.engine_id, each.lease_key), each) for each in of_machine.get("hold", ()))
    requests = _grouped(
        ((each.engine_id, each.subject, each.lease_key), each) for each in of_machine.get("request", ())
    )
    given = LeasesGiven(leases)
    holds_of = _grouped((given.lent_as(lease_key), each) for (_, lease_key), group in holds.items() for each in group)
    found: list[Story] = []
    read: set[LeaseKey] = set()
    for (engine_id, _, lease_key), instances in requests.items():
        lent_as = given.lent_as(lease_key)
        read.add(lent_as)
        known_holds, known_leases = holds.get((engine_id, lease_key), []), leases.get(lent_as, [])
        found.extend(
            Story(requests=on_ranks, holds=known_holds, leases=known_leases) for on_ranks in _rounds(instances)
        )
    found.extend(
        Story(holds=holds_of.get(key, []), leases=on_ranks) for key, on_ranks in leases.items() if key not in read
    )
    return sorted(found, key=lambda story: (story.requests or story.leases)[0].records[0].wall)


def matching(all_stories: Iterable[Story], name: str) -> list[Story]:
    """The stories of what a person calls `name`; see `best_named`."""
    return best_named(all_stories, lambda story: story.names, name)


def best_named(candidates: Iterable[V], names_of: Callable[[V], Iterable[str]], name: str) -> list[V]:
    """Those that a person means by `name`: an id that they have somewhere; or what the client sent or was told, which
    vLLM has wrapped into these; or whole parts of it; or any part of one. What fits better hides what fits worse:
    `req-1` is not `req-1-again`, nor `req-10`."""
    named = [(each, tuple(names_of(each))) for each in candidates]
    for fits in (
        lambda own: name == own,
        lambda own: name in _unwrapped(own),
        lambda own: f"-{name}-" in f"-{own}-",
        lambda own: name in own,
    ):
        if found := [each for each, names in named if any(map(fits, names))]:
            return found
    return []


# --- inside -----------------------------------------------------------------------------------------------------------


def _unwrapped(request_id: str) -> tuple[str, ...]:
    """What the client may call a request of vLLM's: without the number of the sample and what vLLM draws for each
    engine; of /v1/completions without the number of the prompt; and without the name of the call."""
    wrapped = _WRAPPED.fullmatch(request_id)
    if wrapped is None:
        return ()
    call, rest, number = wrapped.groups(default="")
    whole = rest + number
    return (whole, call + whole, rest, call + rest) if call == _OF_PROMPTS else (whole, call + whole)


def _grouped(items: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for key, value in items:
        groups.setdefault(key, []).append(value)
    return groups


def _rounds(instances: Sequence[History]) -> list[list[History]]:
    """The first instance of every rank, then the second of every rank, and so on."""
    by_rank: dict[int, list[History]] = {}
    for instance in instances:
        by_rank.setdefault(instance.rank, []).append(instance)
    rounds = zip_longest(*(by_rank[rank] for rank in sorted(by_rank)))
    return [[each for each in one_round if each is not None] for one_round in rounds]


def _visits(records: Sequence[TransitionRecord]) -> tuple[Visit, ...]:
    entered = [records[0]]
    if records[0].from_state is not None:  # the creation is missing; show what is known
        entered.insert(0, msgspec.structs.replace(records[0], to_state=records[0].from_state, event="(not recorded)"))
    entered += [record for record in records[1:] if record.to_state != record.from_state]
    ends_ns = [*(record.mono_ns for record in entered[1:]), None]
    return tuple(
        Visit(
            state=record.to_state,
            event=record.event,
            wall=record.wall,
            entered_ns=record.mono_ns,
            seconds=None if end_ns is None else (end_ns - record.mono_ns) / NS_PER_SECOND,
            reason=record.reason,
            detail=record.detail,
        )
        for record, end_ns in zip(entered, ends_ns, strict=True)
    )
