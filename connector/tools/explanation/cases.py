"""What a person may mean by a text: records and rows, put together to requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from connector.observe.history import (
    History,
    LeaseKey,
    LeasesGiven,
    Story,
    best_named,
    histories,
    stories,
)
from connector.tools.explanation.rows import Live, Said, key_on_d
from connector.wire.inspection import (
    LeaseRow,
    LocalPrefillRow,
    RequestRow,
    WithoutRoomRow,
)
from statemachine.lease import LENT_BACK
from statemachine.trace import TransitionRecord


@dataclass(kw_only=True, eq=False)
class Case:
    """What a person may mean: see the module's docstring."""

    story: Story = field(default_factory=Story)
    requests: list[Said[RequestRow]] = field(default_factory=list)
    leases: list[Said[LeaseRow]] = field(default_factory=list)
    local_prefill: Said[LocalPrefillRow] | None = None
    without_room: Said[WithoutRoomRow] | None = None
    peers: list[History] = field(default_factory=list)
    """The histories of the connections from D to the peers of this request."""
    read_back: list[Case] = field(default_factory=list)
    """Leases under which its own engine keeps its blocks for read-back."""

    @property
    def name(self) -> str:
        if self.story.requests:
            return self.story.requests[0].subject
        if self.requests:
            return self.requests[0].row.request_id
        if self.local_prefill is not None:
            return self.local_prefill.row.request_id
        if self.without_room is not None:
            return self.without_room.row.request_id
        if self.story.leases:
            return self.story.leases[0].subject
        return self.leases[0].row.request_id if self.leases else ""

    @property
    def names(self) -> frozenset[str]:
        """Every id that it has somewhere."""
        rows = {name for each in self.requests for name in (each.row.request_id, each.row.remote_request_id)}
        rows |= {each.row.request_id for each in self.leases}
        for said in (self.local_prefill, self.without_room):
            if said is not None:
                rows.add(said.row.request_id)
        return self.story.names | rows

    @property
    def is_lent_back(self) -> bool:
        """It is a lease and nothing else, of an answer whose blocks the engine that gave it keeps for read-back."""
        if self.story.requests or self.requests:
            return False
        records = (record for each in self.story.leases for record in each.records)
        return any(each.row.is_lent_back for each in self.leases) or any(each.reason == LENT_BACK for each in records)

    @property
    def on_engines(self) -> frozenset[tuple[str, str]]:
        """Engine id and request id, for each engine that has it in hand or had; of leases, those of P."""
        of_requests = {(each.engine_id, each.subject) for each in self.story.requests}
        of_requests |= {(each.engine_id, each.row.request_id) for each in self.requests}
        for said in (self.local_prefill, self.without_room):
            if said is not None:
                of_requests.add((said.engine_id, said.row.request_id))
        of_leases = {(each.engine_id, each.subject) for each in self.story.leases}
        of_leases |= {(each.engine_id, each.row.request_id) for each in self.leases}
        return frozenset(of_requests or of_leases)

    @property
    def began(self) -> float:
        every = [each.records[0].wall for each in (*self.story.requests, *self.story.leases)]
        return min(every, default=0.0)


def find(text: str, records: Iterable[TransitionRecord], live: Live) -> list[Case]:
    """The cases that a person may mean by `text` (`best_named`), in the order in which they began."""
    every = histories(records)
    cases = _told_by_records(text, every)
    on_p = [each.lease_key for each in every if each.machine == "lease"]
    _add_rows(text, cases, live, LeasesGiven((*on_p, *map(_key_of_lease, live.of(LeaseRow)))))
    lent_back, others = list[Case](), list[Case]()
    for case in cases:
        (lent_back if case.is_lent_back else others).append(case)
    cases = _with_their_leases(others)
    _add_local_prefills(text, cases, live)
    _add_waits_without_room(text, cases, live)
    _add_read_back(lent_back, cases)
    # Last, because what is one case may have an id that contains the text on one side only.
    return sorted(best_named(cases, lambda case: case.names, text), key=lambda case: case.began)


def _told_by_records(text: str, every: list[History]) -> list[Case]:
    connections: dict[tuple[str, str | None], list[History]] = {}
    for each in every:
        if each.machine == "peer":
            connections.setdefault((each.engine_id, each.peer), []).append(each)
    return [
        Case(story=story, peers=connections.get((story.requests[0].engine_id, story.requests[0].peer), []))
        if story.requests
        else Case(story=story)
        for story in stories(every)
        if any(text in name for name in story.names)
    ]


def _add_local_prefills(text: str, cases: list[Case], live: Live) -> None:
    """Prompts that D computes. P may have lent what D was not told of: then the lease is a case already."""
    alone = _grouped((case for case in cases if _is_unread(case)), _unwrapped)
    for said in live.of(LocalPrefillRow):
        if text not in said.row.request_id:
            continue
        lent = [case for case in alone.get(_unwrapped(said.row.request_id), ()) if case.local_prefill is None]
        case = lent[0] if len(lent) == 1 else Case()
        if len(lent) != 1:
            cases.append(case)
        case.local_prefill = said


def _add_waits_without_room(text: str, cases: list[Case], live: Live) -> None:
    places = {place: case for case in cases for place in case.on_engines}
    for waits in live.of(WithoutRoomRow):
        if text in waits.row.request_id:
            case = places.setdefault((waits.engine_id, waits.row.request_id), Case())
            if case not in cases:
                cases.append(case)
            case.without_room = waits


def _add_read_back(lent_back: list[Case], cases: list[Case]) -> None:
    """What is lent of an answer, with the request that it answers; or as a case of its own."""
    on_engines: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        for place in case.on_engines:
            on_engines.setdefault(place, []).append(case)
    for kept in lent_back:
        owners = dict.fromkeys(case for place in kept.on_engines for case in on_engines.get(place, ()))
        for case in owners:
            case.read_back.append(kept)
        if not owners:
            cases.append(kept)


def _with_their_leases(cases: list[Case]) -> list[Case]:
    """Leases of requests whose parameters name them wrongly, or not at all, belong to these requests: by the id on P,
    or by the client's, which vLLM has wrapped in the same way on both sides."""
    lent = [case for case in cases if _is_unread(case)]
    by_name, by_unwrapped = _grouped(lent, lambda name: name), _grouped(lent, _unwrapped)
    joined: set[Case] = set()
    for case in cases:
        if _is_unread(case) or case.story.leases or case.leases:
            continue
        remote = {each.remote_request_id for each in case.story.requests} | {
            each.row.remote_request_id for each in case.requests
        }
        alike = [*by_unwrapped.get(_unwrapped(case.name), ())]
        alike += [each for name in remote if name is not None for each in by_name.get(name, ())]
        mine = [
            each
            for each in dict.fromkeys(alike)
            if each not in joined
            # An engine that has read back lends what it computes next under the id of the request that read.
            and not each.on_engines & case.on_engines
        ]
        if len(mine) == 1:
            joined.update(mine)
            holds = [*case.story.holds, *mine[0].story.holds]
            case.story = Story(requests=case.story.requests, holds=holds, leases=mine[0].story.leases)
            case.leases = mine[0].leases
    return [case for case in cases if case not in joined]


def _is_unread(case: Case) -> bool:
    """It is a lease and nothing else: no request is known to have read it."""
    return not case.story.requests and not case.requests


def _grouped(cases: Iterable[Case], key: Callable[[str], str]) -> dict[str, list[Case]]:
    """By what `key` makes of their names."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(key(case.name), []).append(case)
    return groups


def _unwrapped(request_id: str) -> str:
    """Without what vLLM draws for each engine."""
    return request_id.rpartition("-")[0]


def _add_rows(text: str, cases: list[Case], live: Live, given: LeasesGiven) -> None:
    """What lives: with the case that is told by its records, or as a case of its own where these are gone.

    Both may be ten thousand: each row finds its case by a key.
    """
    only_lent = {each.lease_key: case for case in cases if _is_unread(case) for each in case.story.leases}
    by_request = {
        (each.engine_id, each.subject): case for case in cases for each in case.story.requests if not each.is_over
    }
    # One rank may have ended while another, whose records were overwritten meanwhile, still waits for its READs.
    by_rank_that_ended = {
        (each.engine_id, each.subject, each.lease_key): case for case in cases for each in case.story.requests
    }
    for said in live.of(RequestRow):
        row = said.row
        if text not in row.request_id and text not in row.remote_request_id:
            continue
        case = by_request.get((said.engine_id, row.request_id))
        ended = by_rank_that_ended.get((said.engine_id, row.request_id, key_on_d(row)))
        if case is None and ended is not None and all(each.rank != said.rank for each in ended.story.requests):
            case = ended
        if case is None and (lent := only_lent.get(given.lent_as(key_on_d(row)))) is not None and _is_unread(lent):
            case = lent
        if case is None:
            case = Case()
            cases.append(case)
        by_request[said.engine_id, row.request_id] = case
        case.requests.append(said)
    by_lease: dict[LeaseKey, list[Case]] = {}
    for case in cases:
        for key in _leases_of(case, given):
            by_lease.setdefault(key, []).append(case)
    for said_lease in live.of(LeaseRow):
        key = _key_of_lease(said_lease)
        if key not in by_lease and text in said_lease.row.request_id:
            by_lease[key] = [Case()]
            cases += by_lease[key]
        for case in by_lease.get(key, ()):
            case.leases.append(said_lease)


def _key_of_lease(said: Said[LeaseRow]) -> LeaseKey:
    return LeaseKey(said.engine_id, said.row.request_id, said.row.lease_number)


def _leases_of(case: Case, given: LeasesGiven) -> set[LeaseKey]:
    """The leases of a case whose leases no row was put to yet, by the names that P has for them."""
    known = [each.lease_key for each in (*case.story.leases, *case.story.requests)]
    known += [key_on_d(each.row) for each in case.requests]
    return set(map(given.lent_as, known))
