"""Why a request is where it is: from what was recorded of it, and what engines say of it now, to an answer in words.

    records --stories--> Story \\
                                Case --explain--> Explanation
    rows of running engines ---/

`explain` is a pure function. Its first line is the cause: the kind of the failure first where there is one, otherwise
what is waited for. A failure that only follows from another one names that: a request that was refused because its peer
backs off, says why it backs off. What to do is a table by kind (`WHAT_TO_DO`).

A Case is one request of one decode engine, or a lease that no decode engine is known to have read, or a request that
came without parameters. `find` puts together those that a person may mean by a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import msgspec

from connector.observe.advice import NIXL_HANGS, NO_PARAMETERS, NOT_READ, WHAT_TO_DO, told
from connector.observe.durations import duration
from connector.observe.history import (
    DONE,
    History,
    LeaseKey,
    LeasesGiven,
    Story,
    best_named,
    deciding_rank,
    histories,
    stories,
)
from connector.wire.identity import differing_factors
from connector.wire.inspection import (
    AnyRow,
    EngineFacts,
    EngineRow,
    HoldRow,
    LeaseRow,
    LocalPrefillRow,
    PeerRow,
    QuarantineRow,
    RecordRow,
    RequestRow,
    quarantined_blocks,
)
from statemachine import hold, remote_engine
from statemachine.failures import AddressNotResolved, LeaseExpired, LeaseOver, NotAllowed, PeerLeaving
from statemachine.trace import TransitionRecord

R = TypeVar("R")

FACTORS_NAMED_MAX = 3
"""Of what makes two engines incompatible, in the first line."""
HAPPENED_MAX = 40
"""Lines of what happened; of more the middle is left out."""
QUEUED_SECONDS_MIN = 0.001
QUEUED_SHARE_MIN = 0.01
"""A shorter wait in vLLM's queue, or one that is less of the whole time, is not worth a word."""

QUARANTINED_SHARE_MIN = 0.1
"""Of an engine's KV blocks: fewer in quarantine are not why a request gets none."""


class Said(NamedTuple, Generic[R]):
    """A row and the worker that it came from."""

    engine_id: str
    rank: int
    row: R


@dataclass(frozen=True, kw_only=True)
class Silent:
    """An engine that could not be asked, or a worker of one. `engine_ids`: what it is called, as far as is known."""

    address: str
    engine_id: str | None
    kind: str
    problem: str

    @property
    def is_of_asker(self) -> bool:
        """It says where who asks stands, and which keys it has. A decode engine stands elsewhere, and finds out for
        itself whether it may speak to the engine, and knows its name."""
        return self.kind in (NotAllowed.__name__, AddressNotResolved.__name__)


@dataclass(frozen=True, kw_only=True)
class Live:
    """What running engines say. Without any, everything is empty."""

    engines: tuple[Said[EngineRow], ...] = ()
    peers: tuple[Said[PeerRow], ...] = ()
    requests: tuple[Said[RequestRow], ...] = ()
    holds: tuple[Said[HoldRow], ...] = ()
    leases: tuple[Said[LeaseRow], ...] = ()
    quarantines: tuple[Said[QuarantineRow], ...] = ()
    local_prefills: tuple[Said[LocalPrefillRow], ...] = ()
    silent: tuple[Silent, ...] = ()
    shifts: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Of traces: by how many seconds the clock of an engine's rank was moved, so that all agree."""
    leaving: tuple[str, ...] = ()
    """Engines that drain, or have drained: since then they answer prefills without parameters, and record nothing."""

    def facts(self, engine_id: str | None) -> EngineFacts | None:
        return next((each.row.facts for each in self.engines if each.engine_id == engine_id), None)

    def peer_of(self, decode_id: str | None, rank: int | None, peer_id: str | None) -> PeerRow | None:
        """The connection of this rank, for each has its own. Of two, where requests describe the engine by unlike
        sizes, the one that requests wait for or that has failed."""
        rows = [
            each.row
            for each in self.peers
            if (each.engine_id, each.rank, each.row.engine_id) == (decode_id, rank, peer_id)
        ]
        return max(rows, key=lambda row: (row.requests > 0, row.failure is not None), default=None)

    def quarantined_from(self, decode_id: str) -> str:
        """The engines because of which blocks of this one are in quarantine now, in words; empty: there are none."""
        return ", ".join(sorted({each.row.peer for each in self.quarantines if each.engine_id == decode_id}))

    def silence_of(self, engine_id: str | None, address: str | None) -> Silent | None:
        """Why nothing is known of this engine now."""
        return next(
            (
                each
                for each in self.silent
                if (each.engine_id is not None and each.engine_id == engine_id) or each.address == address
            ),
            None,
        )


@dataclass(kw_only=True, eq=False)
class Case:
    """What a person may mean: see the module's docstring."""

    story: Story = field(default_factory=Story)
    requests: list[Said[RequestRow]] = field(default_factory=list)
    leases: list[Said[LeaseRow]] = field(default_factory=list)
    local_prefill: Said[LocalPrefillRow] | None = None
    peers: list[History] = field(default_factory=list)
    """Of the connections from D to the peers of this request."""

    @property
    def name(self) -> str:
        if self.story.requests:
            return self.story.requests[0].subject
        if self.requests:
            return self.requests[0].row.request_id
        if self.local_prefill is not None:
            return self.local_prefill.row.request_id
        if self.story.leases:
            return self.story.leases[0].subject
        return self.leases[0].row.request_id if self.leases else ""

    @property
    def names(self) -> frozenset[str]:
        """Every id that it has somewhere."""
        rows = {name for each in self.requests for name in (each.row.request_id, each.row.remote_request_id)}
        rows |= {each.row.request_id for each in self.leases}
        if self.local_prefill is not None:
            rows.add(self.local_prefill.row.request_id)
        return self.story.names | rows

    @property
    def began(self) -> float:
        every = [each.records[0].wall for each in (*self.story.requests, *self.story.leases)]
        return min(every, default=0.0)


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """One line of what happened. `offset_seconds`: from the first of them; `wall`: Unix time."""

    offset_seconds: float
    wall: float
    side: str
    what: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `outcome`: served, failed, computed_locally, not_read or waiting.

    `engine_id`, `rank`: whose word it is; of several ranks, that which decides.
    `since_seconds`: for how long a running engine has had it in its state; `since_wall`: the Unix time from which on
    records have it there, which is that of its end where it has ended.
    """

    request: str
    cause: str
    outcome: str
    kind: str | None
    detail: str | None
    state: str
    side: str
    engine_id: str | None
    rank: int | None
    peer: str | None
    since_seconds: float | None
    since_wall: float | None
    waits_for: str | None
    until_seconds: float | None
    next: str
    advice: str
    happened: tuple[Happened, ...]
    facts: tuple[str, ...]
    """Further sentences that bear on it."""


# --- what there is to explain -----------------------------------------------------------------------------------------


def find(text: str, records: Iterable[TransitionRecord], live: Live) -> list[Case]:
    """The cases that a person may mean by `text` (`best_named`), in the order in which they began."""
    every = histories(records)
    connections: dict[tuple[str, str | None], list[History]] = {}
    for each in every:
        if each.machine == "peer":
            connections.setdefault((each.engine_id, each.peer), []).append(each)
    cases = [
        Case(story=story, peers=connections.get((story.requests[0].engine_id, story.requests[0].peer), []))
        if story.requests
        else Case(story=story)
        for story in stories(every)
        if any(text in name for name in story.names)
    ]
    on_p = [each.lease_key for each in every if each.machine == "lease"]
    _add_rows(text, cases, live, LeasesGiven((*on_p, *map(_key_of_lease, live.leases))))
    cases = _with_their_leases(cases)
    alone = [case for case in cases if not case.story.requests and not case.requests]
    for said in live.local_prefills:
        if text in said.row.request_id:
            # P may have lent what D was not told of.
            lent = [
                case
                for case in alone
                if case.local_prefill is None and _unwrapped(case.name) == _unwrapped(said.row.request_id)
            ]
            case = lent[0] if len(lent) == 1 else Case()
            if case not in cases:
                cases.append(case)
            case.local_prefill = said
    # Last, because what is one case may have an id that contains the text on one side only.
    return sorted(best_named(cases, lambda case: case.names, text), key=lambda case: case.began)


def _with_their_leases(cases: list[Case]) -> list[Case]:
    """Leases of requests whose parameters name them wrongly, or not at all, belong to these requests: by the id on P,
    or by the client's, which vLLM has wrapped in the same way on both sides."""
    lent = [case for case in cases if not case.story.requests and not case.requests]
    joined: list[Case] = []
    for case in cases:
        if case in lent or case.story.leases or case.leases:
            continue
        remote = {each.remote_request_id for each in case.story.requests} | {
            each.row.remote_request_id for each in case.requests
        }
        mine = [
            each
            for each in lent
            if each not in joined and (each.name in remote or _unwrapped(each.name) == _unwrapped(case.name))
        ]
        if len(mine) == 1:
            joined += mine
            holds = [*case.story.holds, *mine[0].story.holds]
            case.story = Story(requests=case.story.requests, holds=holds, leases=mine[0].story.leases)
            case.leases = mine[0].leases
    return [case for case in cases if case not in joined]


def _unwrapped(request_id: str) -> str:
    """Without what vLLM draws for each engine."""
    return request_id.rpartition("-")[0]


def _add_rows(text: str, cases: list[Case], live: Live, given: LeasesGiven) -> None:
    """What lives: with the case that is told by its records, or as a case of its own where these are gone."""
    by_request = {
        (each.engine_id, each.subject): case for case in cases for each in case.story.requests if not each.is_over
    }
    for said in live.requests:
        row = said.row
        if text not in row.request_id and text not in row.remote_request_id:
            continue
        case = by_request.get((said.engine_id, row.request_id)) or _of_lease(cases, given.lent_as(_key_on_d(row)))
        if case is None:
            case = Case()
            cases.append(case)
        by_request[said.engine_id, row.request_id] = case
        case.requests.append(said)
    for said_lease in live.leases:
        key = _key_of_lease(said_lease)
        named = [case for case in cases if key in _leases_of(case, given)]
        if not named and text in said_lease.row.request_id:
            named = [Case()]
            cases += named
        for case in named:
            case.leases.append(said_lease)


def _key_on_d(row: RequestRow | HoldRow) -> LeaseKey:
    return LeaseKey(row.peer, row.remote_request_id, row.lease_number)


def _key_of_lease(said: Said[LeaseRow]) -> LeaseKey:
    return LeaseKey(said.engine_id, said.row.request_id, said.row.lease_number)


def _of_lease(cases: Sequence[Case], key: LeaseKey) -> Case | None:
    """The case that is only this lease so far."""
    return next(
        (
            case
            for case in cases
            if not case.story.requests
            and not case.requests
            and any(each.lease_key == key for each in case.story.leases)
        ),
        None,
    )


def _leases_of(case: Case, given: LeasesGiven) -> set[LeaseKey]:
    """As P calls them."""
    known = [each.lease_key for each in (*case.story.leases, *case.story.requests)]
    known += [_key_on_d(each.row) for each in case.requests]
    known += [_key_of_lease(each) for each in case.leases]
    return set(map(given.lent_as, known))


# --- what is waited for -----------------------------------------------------------------------------------------------

WAITING: dict[str, tuple[str, str]] = {
    "queued": (
        "it waits in the queue of vLLM's scheduler on D, which has not allocated its blocks",
        "when vLLM schedules it, its READs begin; until then D keeps the lease on P alive",
    ),
    "pending_handshake": (
        "it waits for the connection to the prefill engine",
        "when P is connected its READs begin; when the attempt fails, so does the request",
    ),
    "reading": (
        "its READs from the prefill engine are under way",
        "when the last READ has ended and P is known to have kept the blocks, it is done",
    ),
    "proving": (
        "all bytes are here, and it waits for the prefill engine to confirm that it kept the blocks until then",
        "with P's answer it is done; without one it ends as LeaseNotProven",
    ),
    "draining": (
        "it has failed, and waits until none of its READs can write any more",
        "when the last READ has ended it is reported; if that takes too long its blocks are quarantined",
    ),
}
"""By state of a request that has not ended: what it waits for, and what follows."""

NO_CHECKSUMS = (
    "nothing yet; if it takes long, see whether P's engine makes steps, with which it says what it lends, and its log "
    "for an error of its checksums"
)

LEASE_WAITING: dict[str, tuple[str, str]] = {
    "computing": ("the prefill engine computes its prompt", "when the prompt is computed, its blocks are lent to D"),
    "held": (
        "the prefill engine holds its blocks, and no decode engine is known to read them",
        "when nobody asks for them in time, the lease expires and the blocks are freed",
    ),
}
"""By state of a lease, where no D is known."""


# --- the answer -------------------------------------------------------------------------------------------------------


def explain(case: Case, live: Live) -> Explanation:
    """See the module's docstring."""
    answer = _explain(case, live)
    told = (*case.story.requests, *case.story.holds, *case.story.leases)
    moved = tuple(
        f"the clock of {name} rank {rank} was moved by {live.shifts[name, rank]:+.3f} s to agree with the others"
        for name, rank in sorted({(each.engine_id, each.rank) for each in told}.intersection(live.shifts))
    )
    facts = (*_hanging(answer, live), *answer.facts, *moved)
    return msgspec.structs.replace(answer, facts=facts) if facts != answer.facts else answer


def _hanging(answer: Explanation, live: Live) -> Iterator[str]:
    """Ranks of both engines of a request in which NIXL hangs, which looks like a mistake of another engine."""
    for engine_id, rank, row in live.engines:
        if engine_id in (answer.engine_id, answer.peer) and row.nixl_lag_seconds:
            yield f"{engine_id} rank {rank}: {NIXL_HANGS % row.nixl_lag_seconds}"


def _explain(case: Case, live: Live) -> Explanation:
    worst = deciding_rank(case.story.requests) if case.story.requests else None
    if case.requests:
        said = max(case.requests, key=_how_bad)
        if worst is not None and worst.is_over and worst.outcome != DONE and said.row.failure is None:
            return _explain_end_of_one_rank(case, worst, live)
        return _explain_waiting(case, said, live)
    if worst is not None and worst.is_over:
        return _explain_end(case, worst, live)
    if worst is not None:
        return _explain_recorded(case, worst, live)
    if case.local_prefill is not None:
        return _explain_local_prefill(case, case.local_prefill, live)
    return _explain_lease(case, live)


class _Queued(NamedTuple):
    """What `why` says of a request that waits in vLLM's queue, as in `Explanation`."""

    cause: str
    kind: str | None
    advice: str
    next: str


def _explain_waiting(case: Case, said: Said[RequestRow], live: Live) -> Explanation:
    row = said.row
    waiting, follows = WAITING.get(row.state, (f"it is {row.state}", ""))
    peer = live.peer_of(said.engine_id, said.rank, row.peer)
    silence = live.silence_of(row.peer, row.address)
    kind, detail, facts = None, None, _facts_of_peer(peer, silence)
    cause = f"{_capital(waiting)}, for {_seconds(row.since_seconds)}"
    advice = "nothing yet"
    if row.state == "queued":
        cause, kind, advice, follows = _why_queued(said, live, cause)
        if kind is None and (kept := live.quarantined_from(said.engine_id)):
            facts.append(f"a few KV blocks of D are quarantined, because READs from {kept} have not ended")
    elif row.state == "pending_handshake":
        cause, kind, detail, advice = _why_not_connected(row, peer, silence, cause)
        if row.waits_for == "checksums":
            follows = "when P has said them its READs begin"
    elif row.state in ("reading", "proving"):
        reads = f"{row.reads} READ(s) of {_blocks(row.blocks)} from {row.peer}" if row.reads else row.peer
        if row.waits_for == "turn":
            behind = f"behind those of {row.queue_position} request(s)" if row.queue_position else "and are the next"
            cause = f"Its READs wait for their turn, {behind}, for {_seconds(row.since_seconds)}"
        elif silence is not None and not silence.is_of_asker:
            kind = silence.kind
            cause = (
                f"{kind}: prefill engine {row.peer} at {row.address} does not answer ({silence.problem}); "
                f"waiting for {reads} for {_seconds(row.since_seconds)}"
            )
            advice = WHAT_TO_DO.get(kind, advice)
        elif row.state == "reading":
            cause = f"Waiting for {reads}, for {_seconds(row.since_seconds)}"
            advice = "nothing yet; if it takes long, see whether P hangs, or the network between P and D"
    elif row.state == "draining" and row.failure is not None:
        kind = row.failure
        detail, advice = told(kind, row.detail, advice)
        cause = f"{kind}: {_first_clause(detail)}; its READs have not ended yet"
    if row.proven_seconds is not None:
        left = _seconds(max(0.0, row.proven_seconds))
        if peer is not None and peer.is_builtin:
            facts.append(f"P is a built-in engine, which does not say: D takes its lease to end in {left}")
        else:
            facts.append(f"P is known to keep the blocks for {left} more")
    facts += [fact for each in case.story.requests if each.rank == said.rank for fact in _queue_facts(each)]
    return Explanation(
        request=row.request_id,
        cause=cause,
        outcome="waiting",
        kind=kind,
        detail=detail,
        state=row.state,
        side="D",
        engine_id=said.engine_id,
        rank=said.rank,
        peer=row.peer,
        since_seconds=row.since_seconds,
        since_wall=None,
        waits_for=row.waits_for,
        until_seconds=row.until_seconds,
        next=follows,
        advice=advice,
        happened=_happened(case),
        facts=(*facts, *_facts_of_leases(case)),
    )


def _why_queued(said: Said[RequestRow], live: Live, cause: str) -> _Queued:
    """Its lease may be over already; and a pool whose blocks are quarantined has none for it."""
    row, facts = said.row, live.facts(said.engine_id)
    if (why := _gone(said, live)) is not None:
        kind = PeerLeaving.__name__ if why == remote_engine.LEFT else LeaseOver.__name__
        return _Queued(
            cause=(
                f"{kind}: prefill engine {row.peer} does not keep its blocks any more ({why}); it waits in vLLM's "
                f"queue, for {_seconds(row.since_seconds)}"
            ),
            kind=kind,
            advice=WHAT_TO_DO[kind],
            next=f"when vLLM schedules it, it fails, unless D has its blocks by then: {_after_failure(facts)}",
        )
    follows = WAITING[row.state][1]
    peer = live.peer_of(said.engine_id, said.rank, row.peer)
    if peer is not None and peer.failure is not None and peer.state != "ready":
        follows = (
            "D cannot tell P to keep the lease now: when vLLM schedules it, its READs begin if P is connected again "
            "and has kept the blocks; otherwise it fails"
        )
    elif peer is not None and peer.is_builtin:
        follows = (
            "when vLLM schedules it, its READs begin; it fails (LeaseOver) if they have not ended when D takes the "
            "lease of a built-in engine to be over: kv_lease_duration of D after it has heard of the request"
        )
    kept = quarantined_blocks(each.row for each in live.quarantines if each.engine_id == said.engine_id)
    if not kept or (facts is not None and kept < QUARANTINED_SHARE_MIN * facts.blocks):
        advice = "nothing yet; if it takes long, see how many requests run on D and how full its KV cache is"
        return _Queued(cause=cause, kind=None, advice=advice, next=follows)
    of = f" of {facts.blocks}" if facts is not None and facts.blocks else ""
    peers = live.quarantined_from(said.engine_id)
    cause = (
        f"Quarantined: {kept}{of} KV blocks of this engine are kept out of the pool, because READs from {peers} have "
        f"not ended; vLLM has not scheduled it for {_seconds(row.since_seconds)}"
    )
    return _Queued(cause=cause, kind="Quarantined", advice=WHAT_TO_DO["Quarantined"], next=follows)


def _gone(said: Said[RequestRow], live: Live) -> str | None:
    """Why P does not keep the blocks of this request any more; None: as far as D knows it does."""
    wanted = (said.engine_id, said.rank, _key_on_d(said.row))
    return next(
        (
            each.row.why or ""
            for each in live.holds
            if each.row.state == hold.State.GONE.value and (each.engine_id, each.rank, _key_on_d(each.row)) == wanted
        ),
        None,
    )


def _why_not_connected(
    row: RequestRow, peer: PeerRow | None, silence: Silent | None, cause: str
) -> tuple[str, str | None, str | None, str]:
    where = f"prefill engine {row.peer} at {row.address}"
    if silence is not None and not silence.is_of_asker:
        cause = f"{silence.kind}: {where}: {silence.problem}; waiting for it for {_seconds(row.since_seconds)}"
        return cause, silence.kind, None, WHAT_TO_DO.get(silence.kind, "see whether P runs")
    if row.waits_for == "checksums":
        cause = f"Waiting for the checksums of its blocks (verify) from {where}, for {_seconds(row.since_seconds)}"
        return cause, None, None, NO_CHECKSUMS
    if peer is None:
        return cause, None, None, "nothing yet"
    detail, what_to_do = told(peer.failure, peer.detail, "nothing yet")
    if peer.state == "handshaking":
        last = f" (the last attempt: {peer.failure})" if peer.failure else ""
        cause = f"Waiting for the handshake with {where}{last}, for {_seconds(peer.since_seconds)}"
        return cause, None, detail, "nothing yet; if it takes long, see whether P hangs"
    if peer.state in ("draining", "disconnecting") and peer.failure:
        cause = (
            f"{peer.failure}: {_first_clause(detail)}; the connection is rebuilt when {peer.reads} READ(s) over it "
            f"have ended"
        )
        return cause, peer.failure, detail, what_to_do
    return f"Waiting for {where}, which is {peer.state}", None, detail, "nothing yet"


def _explain_end(case: Case, ended: History, live: Live) -> Explanation:
    kind = ended.reason
    detail, advice = told(kind, ended.detail, "look at the log of D")
    peer = live.peer_of(ended.engine_id, ended.rank, ended.peer)
    facts = _facts_of_peer(peer, live.silence_of(ended.peer, peer.address if peer is not None else None))
    if ended.outcome == DONE:
        cause = f"Done: its KV was loaded in {_seconds(ended.whole_seconds)}"
        if _is_worth_a_word(ended):
            cause += f", {_seconds(ended.queued_seconds)} of them in vLLM's queue on D"
        blocks = f"{_blocks(ended.blocks)}, {ended.length_bytes / 1e6:.1f} MB"
        facts = [blocks, *_one_sided(case, live)]
        outcome, follows, advice = "served", "nothing", "nothing"
    else:
        differing = _differing_factors(kind, ended, live)
        cause = _cause_of_end(case, ended, peer, live)
        if differing:
            cause = (
                f"{kind}: prefill engine {ended.peer} and this one differ: {'; '.join(differing[:FACTORS_NAMED_MAX])}"
            )
        facts += [*differing[FACTORS_NAMED_MAX:], *_queue_facts(ended)]
        outcome, follows = "failed", _after_failure(live.facts(ended.engine_id))
    if kind == "AbortedByClient":
        follows = "nothing"
    return Explanation(
        request=ended.subject,
        cause=cause,
        outcome=outcome,
        kind=kind,
        detail=detail,
        state=ended.state,
        side="D",
        engine_id=ended.engine_id,
        rank=ended.rank,
        peer=ended.peer,
        since_seconds=None,
        since_wall=ended.visits[-1].wall,
        waits_for=None,
        until_seconds=None,
        next=follows,
        advice=advice,
        happened=_happened(case),
        facts=(*facts, *_facts_of_leases(case)),
    )


def _explain_end_of_one_rank(case: Case, ended: History, live: Live) -> Explanation:
    """It has failed, and its client does not know yet: vLLM waits for all ranks."""
    answer = _explain_end(case, ended, live)
    others = ", ".join(f"rank {each.rank} is {each.row.state}" for each in case.requests)
    return msgspec.structs.replace(
        answer,
        outcome="waiting",
        waits_for="other ranks",
        next=f"when all ranks have ended: {answer.next}",
        facts=(f"vLLM waits for the other ranks of D too: {others}", *answer.facts),
    )


def _cause_of_end(case: Case, ended: History, peer: PeerRow | None, live: Live) -> str:
    kind, clause = ended.reason or ended.state, _first_clause(ended.detail)
    if kind == "PeerBackoff":
        root = _root_of_backoff(case, ended, peer)
        if root is not None:
            return f"{kind}: {root}; P is not tried again yet"
    if kind == "DeadlineExceeded":
        phase = next((visit.state for visit in reversed(ended.visits) if visit.state not in _ENDS), "")
        waited = {"reading": "READs", "draining": "READs", "proving": "an answer"}.get(phase, "the connection")
        if phase == "pending_handshake" and _was_connected(case, ended):
            waited = "the checksums of its blocks (verify)"
        return f"{kind}: {clause}: {waited} from prefill engine {ended.peer} did not come in time"
    if kind == "Quarantined":
        return f"{kind}: READs from prefill engine {ended.peer} never ended ({clause})"
    if kind == "QuarantineFull" and (hanging := live.quarantined_from(ended.engine_id)):
        # Which need not be the engine that this request was to be read from.
        return f"{kind}: {clause}: READs from {hanging} have not ended"
    return f"{kind}: {clause}"


_ENDS = frozenset({"failed", "expired", "done"})


def _was_connected(case: Case, ended: History) -> bool:
    """Whether the connection of its rank stood when it ended, as far as is recorded."""
    ended_ns = ended.records[-1].mono_ns
    before = [
        each
        for history in case.peers
        if history.rank == ended.rank
        for each in history.records
        if each.mono_ns <= ended_ns
    ]
    return bool(before) and max(before, key=lambda each: each.mono_ns).to_state == "ready"


def _root_of_backoff(case: Case, ended: History, peer: PeerRow | None) -> str | None:
    """The failure that the back-off began with."""
    ended_ns = ended.records[-1].mono_ns
    for history in case.peers:
        if history.rank != ended.rank:
            continue
        before = [each for each in history.records if each.mono_ns <= ended_ns and each.reason]
        if before:
            return f"{before[-1].reason}: {_first_clause(before[-1].detail)}"
    if peer is not None and peer.failure:
        return f"{peer.failure}: {_first_clause(peer.detail)}"
    return None


def _after_failure(facts: EngineFacts | None) -> str:
    policy = facts.load_failure_policy if facts is not None else ""
    if policy == "recompute":
        return "D computes the prompt itself (kv_load_failure_policy: recompute)"
    if policy == "fail":
        return "nothing: the client got an error (kv_load_failure_policy: fail)"
    return "kv_load_failure_policy of D decides: the client got an error, or D computes the prompt itself"


def _differing_factors(kind: str | None, ended: History, live: Live) -> list[str]:
    """What differs of that which decides whether KV means the same, where both engines answer."""
    here, there = live.facts(ended.engine_id), live.facts(ended.peer)
    if kind != "Incompatible" or here is None or there is None:
        return []
    differing = differing_factors(here.factors, there.factors)
    return [f"{each.field}: {each.remote} on P, {each.local} on D" for each in differing]


def _explain_recorded(case: Case, open_one: History, live: Live) -> Explanation:
    """It has not ended as far as records go, and no engine knows it: they were written by processes that are gone."""
    waiting, follows = WAITING.get(open_one.state, (f"it is {open_one.state}", ""))
    is_gone = bool(live.engines) and live.facts(open_one.engine_id) is not None
    peer_failures = [each for history in case.peers for each in history.records if each.reason]
    last = f" (P: {peer_failures[-1].reason})" if peer_failures and open_one.state == "pending_handshake" else ""
    cause = f"Not ended when the records do: {waiting}{last}"
    return Explanation(
        request=open_one.subject,
        cause=cause if not is_gone else f"It ended a moment ago; before that {waiting}",
        outcome="waiting",
        kind=None,
        detail=None,
        state=open_one.state,
        side="D",
        engine_id=open_one.engine_id,
        rank=open_one.rank,
        peer=open_one.peer,
        since_seconds=None,
        since_wall=open_one.visits[-1].wall,
        waits_for=None,
        until_seconds=None,
        next=follows,
        advice="ask the running engines (without --trace), or see whether D has ended",
        happened=_happened(case),
        facts=(*_queue_facts(open_one), *_facts_of_leases(case)),
    )


def _explain_local_prefill(case: Case, said: Said[LocalPrefillRow], live: Live) -> Explanation:
    row, facts = said.row, live.facts(said.engine_id)
    had = (
        "kv_transfer_params with neither do_remote_prefill nor do_remote_decode"
        if row.has_params
        else "no kv_transfer_params"
    )
    is_prefill = facts is not None and facts.role == "kv_producer"
    where = "P, which did not lend what it computed" if is_prefill else "D, which computed the prompt itself"
    cause = f"{NO_PARAMETERS}: the request came with {had} to {where}"
    advice = WHAT_TO_DO[NO_PARAMETERS]
    if is_prefill:
        advice = 'have the router send kv_transfer_params {"do_remote_decode": true} to P'
    elif live.leaving and not (case.leases or case.story.leases):
        cause += f"; {_say_who_leaves(live.leaving)}"
    more = [f"{row.prompt_tokens} tokens of prompt, {_seconds(row.age_seconds)} ago"]
    if case.leases or case.story.leases:
        more.append("a prefill engine lent the blocks of this prompt: the router has lost the parameters on the way")
    return Explanation(
        request=row.request_id,
        cause=cause,
        outcome="computed_locally",
        kind=NO_PARAMETERS,
        detail=None,
        state="computed locally",
        side="P" if is_prefill else "D",
        engine_id=said.engine_id,
        rank=said.rank,
        peer=None,
        since_seconds=row.age_seconds,
        since_wall=None,
        waits_for=None,
        until_seconds=None,
        next="nothing: the client gets a right answer, later than it could",
        advice=advice,
        happened=_happened(case),
        facts=(*more, *_facts_of_leases(case)),
    )


def _explain_lease(case: Case, live: Live) -> Explanation:
    """Only P knows of it."""
    recorded = deciding_rank(case.story.leases) if case.story.leases else None
    said = case.leases[0] if case.leases else None
    state = said.row.state if said is not None else recorded.state if recorded is not None else ""
    teller = said or recorded
    engine_id = teller.engine_id if teller is not None else None
    since = said.row.since_seconds if said is not None else None
    until = said.row.deadline_seconds if said is not None else None
    kind, outcome, advice, follows = None, "waiting", "see whether the router sent it to a decode engine", "nothing"
    if state == "held" and said is not None and said.row.holders:
        readers = ", ".join(each.engine_id or "built-in engines" for each in said.row.holders)
        cause = f"The prefill engine holds its blocks for {readers}, for {_seconds(since)}"
        follows = "when all of them have released it, the blocks are freed"
        advice = "ask those decode engines too (--engine)"
    elif state in LEASE_WAITING:
        waiting, follows = LEASE_WAITING[state]
        cause = f"{_capital(waiting)}, for {_seconds(since)}"
    elif state == "expired":
        kind, outcome, advice = LeaseExpired.__name__, "failed", WHAT_TO_DO[LeaseExpired.__name__]
        who = f": {recorded.detail}" if recorded is not None and recorded.detail else ""
        cause = (
            f"{kind}: prefill engine {engine_id} kept its blocks until the lease ended, and they were not released{who}"
        )
    elif state == "done" and (readers := _let_go_unread(case)):
        kind, outcome, advice = NOT_READ, "not_read", WHAT_TO_DO[NOT_READ]
        cause = (
            f"{kind}: decode engine {readers} had its blocks held and released them without a READ: the client left "
            "while the request was in vLLM's queue, or D had these blocks or computed them itself"
        )
    elif state == "done":
        outcome, advice = "served", "nothing"
        cause = "Done: a decode engine released its blocks, as after a READ; its own records were not found"
    else:
        outcome, advice = "failed", "nothing: the prefill ended without lending (aborted, or nothing was computed)"
        cause = "The prefill engine ended it without lending its blocks"
    return Explanation(
        request=case.name,
        cause=cause,
        outcome=outcome,
        kind=kind,
        detail=None,
        state=state,
        side="P",
        engine_id=engine_id,
        rank=teller.rank if teller is not None else None,
        peer=None,
        since_seconds=since,
        since_wall=recorded.visits[-1].wall if recorded is not None else None,
        waits_for="a decode engine" if state == "held" else None,
        until_seconds=until,
        next=follows,
        advice=advice,
        happened=_happened(case),
        facts=(*_facts_of_leases(case), *_silent_facts(live)),
    )


def _say_who_leaves(leaving: Sequence[str]) -> str:
    return f"{', '.join(leaving)} drains, and answers prefills that come since then without kv_transfer_params"


def explain_nothing(text: str, live: Live, looked_at: Sequence[str], *, is_trace: bool = False) -> str:
    """When nothing matches: what that may mean. `is_trace`: traces were looked at, and no running engine."""
    where = ", ".join(looked_at) or "nothing"
    reach = [each.row.recorded_seconds for each in live.engines if each.row.recorded_seconds is not None]
    back = f" Their records reach back {_seconds(min(reach))}." if reach else ""
    silent = "".join(f" {each.address} could not be asked: {each.problem}." for each in live.silent)
    leaves = f" {_say_who_leaves(live.leaving)}; these are not recorded." if live.leaving else ""
    return (
        f"No request with {text!r} in its id. Looked at: {where}.{back}{silent}{leaves} Either the router never sent "
        "it to these engines, or under another id; or it waits in vLLM's queue, on a prefill engine, or on D with "
        "parameters that will be refused; or it ended before their records begin; or its client left while it was in "
        "vLLM's queue; or nothing had to be read for it: D had it cached, or its prompt goes on from one that was read "
        "before." + (TRACE_LACKS if is_trace else "")
    )


TRACE_LACKS = (
    " Or it came without kv_transfer_params and was computed where it came to: traces do not have such requests, the "
    "running engines do (without --trace)."
)


# --- inside -----------------------------------------------------------------------------------------------------------


def _is_worth_a_word(history: History) -> bool:
    """How long it was in vLLM's queue."""
    queued_seconds = history.queued_seconds or 0.0
    return queued_seconds >= max(QUEUED_SECONDS_MIN, QUEUED_SHARE_MIN * history.whole_seconds)


def _queue_facts(history: History) -> list[str]:
    if not _is_worth_a_word(history):
        return []
    return [f"before its blocks were allocated it was {_seconds(history.queued_seconds)} in vLLM's queue on D"]


def _how_bad(said: Said[RequestRow]) -> tuple[bool, float]:
    """Of the ranks of a request that lives, one that has failed decides, else the one that has waited longest."""
    return said.row.failure is not None, said.row.since_seconds if said.row.since_seconds is not None else math.inf


def _one_sided(case: Case, live: Live) -> list[str]:
    """D has loaded it, and P does not know."""
    held = [each for each in case.leases if each.row.state == "held"]
    if any(each.state == "expired" for each in case.story.leases):
        return ["P's lease expired all the same: the release did not reach it, or another reader never came"]
    if held and held[0].row.holders:
        return ["P still holds the blocks, for " + ", ".join(each.engine_id or "?" for each in held[0].row.holders)]
    return []


def _facts_of_peer(peer: PeerRow | None, silence: Silent | None) -> list[str]:
    facts = []
    if peer is not None:
        failed = f", last failure {peer.failure}: {_first_clause(peer.detail)}" if peer.failure else ""
        backoff = f", tried again in {_seconds(peer.backoff_seconds)}" if peer.backoff_seconds is not None else ""
        facts.append(f"D's connection to {peer.engine_id} at {peer.address} is {peer.state}{backoff}{failed}")
        if peer.leaving_seconds is not None:
            left = _seconds(max(0.0, peer.leaving_seconds))
            facts.append(f"{peer.engine_id} drains, and keeps what it lends for {left} more at most")
    if silence is not None:
        facts.append(f"{silence.address} was asked just now: {silence.problem}")
    return facts


def _facts_of_leases(case: Case) -> list[str]:
    facts = []
    for said in case.leases:
        row = said.row
        left = f", {_seconds(row.deadline_seconds)} until it expires" if row.deadline_seconds is not None else ""
        readers = ", ".join(
            f"{each.engine_id or 'built-in engines'} ({each.released_count} of {each.ranks} ranks done)"
            for each in row.holders
        )
        facts.append(
            f"on P ({said.engine_id}, rank {said.rank}) its lease is {row.state}{left}; held by {readers or 'nobody'}"
        )
    if not case.leases:
        facts += [f"on P ({each.engine_id}, rank {each.rank}) its lease is {each.state}" for each in case.story.leases]
    return facts


_LET_GO = frozenset({hold.State.RELEASING.value, hold.State.RELEASED.value})


def _let_go_unread(case: Case) -> str:
    """The decode engines that held a lease of which no request is recorded, and let go of it; empty: none is known.

    A request that reads is made before it lets go. So where the beginning of each hold is recorded nothing that came
    after it was overwritten, and there was no request.
    """
    holds = case.story.holds
    if any(each.records[0].from_state is not None or each.state not in _LET_GO for each in holds):
        return ""
    return ", ".join(sorted({each.engine_id for each in holds}))


def _silent_facts(live: Live) -> list[str]:
    return [f"{each.address} could not be asked: {each.problem}" for each in live.silent]


def _happened(case: Case) -> tuple[Happened, ...]:
    """Both sides in one order. Ranks that went through the same count as one."""
    lines: dict[tuple[str, str], tuple[float, int]] = {}

    def note(side: str, what: str, wall: float) -> None:
        first, ranks = lines.get((side, what), (wall, 0))
        lines[side, what] = (min(first, wall), ranks + 1)

    for side, group in (("D", case.story.requests), ("D", case.story.holds), ("P", case.story.leases)):
        for history in group:
            if _is_worth_a_word(history):
                heard = history.records[0].wall - (history.queued_seconds or 0.0)
                note(side, f"{history.machine} in vLLM's queue", heard)
            entered = 0.0
            for number, visit in enumerate(history.visits):
                # A running engine works out the time of day of each record, so two of one moment come out apart.
                entered = max(entered, visit.wall)
                reason = f" ({visit.reason})" if visit.reason else ""
                what = f"{history.machine} {visit.state}, by {visit.event}{reason}"
                # A state that is entered again is another line.
                again = sum(each.state == visit.state for each in history.visits[:number])
                note(side, what + " again" * again, entered)
    if not lines:
        return ()
    in_order = sorted(lines.items(), key=lambda item: item[1][0])
    first = in_order[0][1][0]
    happened = tuple(
        Happened(
            offset_seconds=round(wall - first, 6),
            wall=wall,
            side=side,
            what=what + (f" ({ranks} ranks)" if ranks > 1 else ""),
        )
        for (side, what), (wall, ranks) in in_order
    )
    if len(happened) <= HAPPENED_MAX:
        return happened
    half = HAPPENED_MAX // 2
    return (*happened[:half], *happened[-half:])


def live_of(
    rows: Iterable[tuple[str, int, AnyRow]], silent: Sequence[Silent] = (), leaving: Iterable[str] = ()
) -> tuple[list[TransitionRecord], Live]:
    """Rows as they came from workers (engine id, rank, row): their records, and the rest."""
    kinds: dict[type[AnyRow], list[Said[AnyRow]]] = {}
    for engine_id, rank, row in rows:
        kinds.setdefault(type(row), []).append(Said(engine_id, rank, row))

    def of(kind: type[R]) -> tuple[Said[R], ...]:
        return tuple(kinds.get(kind, ()))  # type: ignore[arg-type]

    # The newest came first; of those of one moment too.
    recorded = [each.row.record for each in reversed(of(RecordRow))]
    recorded.sort(key=lambda record: (record.engine_id, record.rank, record.mono_ns))
    return recorded, Live(
        engines=of(EngineRow),
        peers=of(PeerRow),
        requests=of(RequestRow),
        holds=of(HoldRow),
        leases=of(LeaseRow),
        quarantines=of(QuarantineRow),
        local_prefills=of(LocalPrefillRow),
        silent=tuple(silent),
        leaving=tuple(leaving),
    )


def _first_clause(detail: str | None) -> str:
    return (detail or "").split(";")[0]


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _blocks(count: int | None) -> str:
    return f"{count} block(s)" if count is not None else "its blocks"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "longer than the records reach"
    return duration(seconds)
