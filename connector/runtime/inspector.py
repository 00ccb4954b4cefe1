"""The inspector: answers the questions of tools about what lives in this worker (`connector/wire/inspection.py`).

    control socket --Inspect--> ask --> mailbox --> one task: looks at the cores, a slice at a time --> Inspected

It changes nothing: it reads the views of the cores (`RemoteEngine.view`, `Lending.leases`, `Roster.view`), what `Reads`
was given, and the recorder. One question is answered at a time, and at most QUESTIONS_WAITING_MAX wait, of one tool
QUESTIONS_OF_ONE_MAX; one that does not fit is dropped, as if it had been lost on its way. The tool is charged for the
work (`Listener.charge`), so that tools cannot keep the thread busy.

No other task waits for it. What a question is about is listed in one go (references, some 10 ns each), and then looked
through and rendered in slices of at most ROWS_PER_SLICE rows or LOOKED_AT_PER_SLICE others, between which every other
task has its turn (`tests/bench/bench_inspection.py` says how long a slice takes). So rows of one answer may be of
different moments; each row is of one. What has ended when its turn comes is left out.

What is listed is kept until its last row is told, for the questions that go on from there: in a list that is made
again, what follows the rows that were told stands elsewhere. At most LISTS_KEPT lists, those that were asked for last,
are kept, for LIST_KEPT_SECONDS each; a tool that goes on in one that is not kept any more is told all of a new one.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeAlias

import msgspec
import trio

from connector.clock import NS_PER_SECOND
from connector.observe.flight_recorder import Step, is_about
from connector.observe.traced import QUEUED
from connector.ports.side_channel import Listener, ReplyAddress
from connector.protocol import LoadFailed, LocalPrefill, LocalPrefillsSeen, RoomLacking
from connector.runtime.context import ActorContext
from connector.runtime.introducer import BUILTIN, Introducer, answered_by, kind_of
from connector.runtime.lease_keeper import LeaseKeeper
from connector.runtime.mailbox import Mailbox
from connector.runtime.peer_actor import PeerActor
from connector.wire import inspection
from connector.wire.inspection import (
    DETAIL_LENGTH_MAX,
    LIST_LENGTH_MAX,
    AnswerBuilder,
    AnyRow,
    EngineCounts,
    EngineFacts,
    Inspect,
    optional_text,
    text,
)
from statemachine import hold, lease, request
from statemachine.failures import Failure
from statemachine.lease import LeaseName
from statemachine.remote_engine import ClaimView
from statemachine.roster import PeerKey, Roster
from statemachine.trace import Observer, TransitionRecord

QUESTIONS_WAITING_MAX = 64
QUESTIONS_OF_ONE_MAX = 4
QUESTION_UNITS, REFUSED_QUESTION_UNITS, ROW_UNITS, LOOKED_AT_PER_UNIT = 32, 8, 3, 64
"""What a question costs who asks it; see `Listener.charge`."""
ROWS_PER_SLICE = 16
LOOKED_AT_PER_SLICE = 1024
CLAIMS_PER_SLICE = 256
LOCAL_PREFILLS_KEPT = 1024
FAILED_LOADS_KEPT = 1024
LISTS_KEPT = 16
"""Lists of references: of the steps of the flight recorder 74 KiB, and what was overwritten meanwhile."""
LIST_KEPT_SECONDS = 3.0
"""Since it was asked for last; a tool asks on at once."""

_AFTER = Step._fields.index("after")

UNMET = "unmet"
"""State of a hold on an engine that has not been connected since it was wanted."""


class _Source(NamedTuple):
    """The rows of one kind: what there is, what of it a question is about, and what it looks like."""

    candidates: Sequence[Any]
    is_about: Callable[[Any, str], bool]
    row: Callable[[Any], AnyRow | None]


_ListKey: TypeAlias = tuple[ReplyAddress, str, str]
"""Who has asked, and for what (`Inspect.match`)."""


class _Kept(NamedTuple):
    """A list of which more is to be told: until when it is kept, and for which question it was made."""

    until: float
    number: int
    source: _Source


class Inspector:
    """See the module's docstring. All methods are called in the trio thread.

    Args:
        peers: the actors of this worker.
        deferred: commands that wait for the device.
        stopped: why this worker serves no more; None: it does.
    """

    def __init__(
        self,
        *,
        facts: EngineFacts,
        context: ActorContext,
        peers: Mapping[PeerKey, PeerActor],
        roster: Roster,
        lease_keeper: LeaseKeeper,
        introducer: Introducer,
        control: Listener,
        deferred: Sized,
        stopped: Callable[[], str | None],
    ) -> None:
        self._facts = facts
        self._context = context
        self._peers = peers
        self._roster = roster
        self._lease_keeper = lease_keeper
        self._introducer = introducer
        self._control = control
        self._deferred = deferred
        self._stopped = stopped
        self._clock = context.clock
        self._started_ns = self._clock.now_ns()
        self._questions: Mailbox[tuple[Inspect, ReplyAddress]] = Mailbox()
        self._local_prefills: deque[tuple[int, LocalPrefill]] = deque(maxlen=LOCAL_PREFILLS_KEPT)
        self._local_prefills_count = 0
        # Requests that lack room in the engine's cache, and since when; as long as they do.
        self._without_room: dict[str, tuple[int, RoomLacking]] = {}
        # Requests that were read, and could not be finished: when this was told, and why. The oldest first.
        self._failed_loads: OrderedDict[str, tuple[int, Failure]] = OrderedDict()
        # What is to be told on, and until when it is kept. What was asked for last is last.
        self._lists: OrderedDict[_ListKey, _Kept] = OrderedDict()
        # For the question in hand.
        self._looked_at = self._rendered = 0

    def note_local_prefills(self, seen: LocalPrefillsSeen) -> None:
        """Requests have come that say nothing of where their KV is."""
        now_ns = self._clock.now_ns()
        self._local_prefills_count += seen.count
        self._local_prefills.extend((now_ns, each) for each in seen.named)

    def note_no_room(self, lacking: RoomLacking) -> None:
        """A request waits because it lacks room in the engine's cache."""
        self._without_room[lacking.request_id] = self._clock.now_ns(), lacking

    def note_room(self, request_id: str) -> None:
        """It has its blocks, or has ended."""
        self._without_room.pop(request_id, None)

    def note_load_failed(self, told: LoadFailed) -> None:
        """Its machine has ended as done, for its READs have; what came after that is told with this end."""
        self._failed_loads[told.request_id] = self._clock.now_ns(), told.failure
        if len(self._failed_loads) > FAILED_LOADS_KEPT:
            self._failed_loads.popitem(last=False)

    def ask(self, question: Inspect, reply_to: ReplyAddress) -> None:
        """Answer in time, unless too many questions wait already."""
        of_this_one = sum(each == reply_to for _, each in self._questions)
        if len(self._questions) < QUESTIONS_WAITING_MAX and of_this_one < QUESTIONS_OF_ONE_MAX:
            self._questions.put((question, reply_to))
        else:
            self._control.charge(reply_to, REFUSED_QUESTION_UNITS)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._questions.wait(LIST_KEPT_SECONDS if self._lists else math.inf)
            self._forget_lists()
            while (asked := self._questions.take_one()) is not None:
                question, reply_to = asked
                self._looked_at = self._rendered = 0
                frames = await self._answer(question, reply_to)
                work = QUESTION_UNITS + ROW_UNITS * self._rendered + self._looked_at // LOOKED_AT_PER_UNIT
                self._control.charge(reply_to, work)
                self._control.reply(reply_to, frames)

    def _forget_lists(self) -> None:
        now = trio.current_time()
        while self._lists and next(iter(self._lists.values())).until <= now:
            self._lists.popitem(last=False)

    async def _answer(self, question: Inspect, reply_to: ReplyAddress) -> tuple[bytes]:
        await trio.lowlevel.checkpoint()
        key = (reply_to, question.what, question.match)
        kept = self._lists.pop(key, None)
        # A first question that comes twice was sent again because its answer was late: the list is the same.
        if kept is not None and (question.first or question.number == kept.number):
            first, source = question.first, kept.source
            number = kept.number
        else:
            first, source = 0, await self._source(question)
            number = question.number
        answer = AnswerBuilder(question.rows)
        looked_at = rendered = 0
        position, total = first, len(source.candidates)
        while position < total and not answer.is_full:
            candidate = source.candidates[position]
            position += 1
            looked_at += 1
            if not question.match or source.is_about(candidate, question.match):
                rendered += 1
                self._rendered += 1
                row = source.row(candidate)
                if row is not None:
                    answer.add(row)
            if looked_at >= LOOKED_AT_PER_SLICE or rendered >= ROWS_PER_SLICE:
                looked_at = rendered = 0
                await trio.lowlevel.checkpoint()
        next_row = position if position < total else None
        self._looked_at += position - first
        if next_row is not None:
            self._lists[key] = _Kept(trio.current_time() + LIST_KEPT_SECONDS, number, source)
            if len(self._lists) > LISTS_KEPT:
                self._lists.popitem(last=False)
        return answer.frames(question, wall=self._clock.wall(), total=total, first=first, next_row=next_row)

    async def _source(self, question: Inspect) -> _Source:
        match question.what:
            case "engine":
                row = await self._engine_row()
                return _Source([row], _anything, lambda row: row)
            case "peers":
                return _Source(list(self._peers), _is_of_engine, self._peer_row)
            case "requests":
                return await self._requests()
            case "holds":
                return await self._holds()
            case "leases":
                leases = self._lease_keeper.leases()
                return _Source(leases, is_about, lambda value: self._lease_row(value.name))
            case "reads":
                reads = self._context.reads.in_hand()
                return _Source(reads, lambda each, what: what in each[0].request_id, self._read_row)
            case "quarantines":
                quarantines = [
                    (actor, *each) for actor in list(self._peers.values()) for each in actor.core.quarantined()
                ]
                return _Source(quarantines, lambda each, what: what in each[1], self._quarantine_row)
            case "local_prefills":
                named = list(reversed(self._local_prefills))
                return _Source(named, lambda each, what: what in each[1].request_id, self._local_prefill_row)
            case "without_room":
                lacking = list(self._without_room)
                return _Source(lacking, lambda request_id, what: what in request_id, self._without_room_row)
            case "introductions":
                places = [value.place for value in self._introducer.unmet()]
                return _Source(places, lambda place, what: what in place, self._introduction_row)
            case "records":
                steps = self._context.recorder.flight.newest_first()
                return _Source(
                    range(len(steps)),
                    lambda number, what: is_about(steps[number][_AFTER], what),
                    lambda number: self._record_row(number, steps[number]),
                )
            case _:  # of a newer tool
                return _Source((), _anything, _no_row)

    async def _requests(self) -> _Source:
        """Lists of names, not of pairs: so many small objects at once would call for the collector of garbage."""
        positions = {name: place for place, name in enumerate(self._context.reads.waiting())}
        actors: list[PeerActor] = []
        subjects: list[str | tuple[str, LeaseName]] = []
        for actor in list(self._peers.values()):
            subjects += actor.core.request_ids()
            await trio.lowlevel.checkpoint()
            subjects += actor.core.queued()
            actors += [actor] * (len(subjects) - len(actors))
            await trio.lowlevel.checkpoint()
        return _Source(
            range(len(subjects)),
            lambda number, what: _is_request_about(actors[number], subjects[number], what),
            lambda number: self._request_row(actors[number], subjects[number], positions),
        )

    async def _holds(self) -> _Source:
        actors: list[PeerActor] = []
        leases: list[LeaseName] = []
        ranks: list[int] = []
        for actor in list(self._peers.values()):
            claimed = actor.core.claimed()
            self._looked_at += len(claimed)
            for first in range(0, len(claimed), CLAIMS_PER_SLICE):
                for name in claimed[first : first + CLAIMS_PER_SLICE]:
                    # A claim has its holds also while no rank of P is connected.
                    claim = actor.core.view_claim(name)
                    holds = max(1, len(claim.holds)) if claim is not None else 0
                    leases += [name] * holds
                    ranks += range(holds)
                actors += [actor] * (len(leases) - len(actors))
                await trio.lowlevel.checkpoint()
        return _Source(
            range(len(leases)),
            lambda number, what: _is_hold_about(actors[number], leases[number], what),
            lambda number: self._hold_row(actors[number], leases[number], ranks[number]),
        )

    # --- rows -------------------------------------------------------------------------------------------------------

    async def _engine_row(self) -> AnyRow:
        layout, recorder, trace = self._context.local.layout, self._context.recorder, self._context.trace
        oldest_ns = recorder.flight.oldest_ns()
        counts, peers, leases = await self._counts()
        return inspection.EngineRow(
            engine_id=text(layout.engine_id),
            rank=recorder.rank,
            tp_rank=layout.tp_rank,
            pp_rank=layout.pp_rank,
            tp_size=layout.tp_size,
            uptime_seconds=self._passed(self._started_ns),
            recorded_seconds=self._passed(oldest_ns) if oldest_ns is not None else None,
            stopped=optional_text(self._stopped()),
            facts=self._facts,
            counts=counts,
            peers_by_state=peers,
            leases_by_state=leases,
            trace_interrupted=optional_text(trace.interrupted if trace is not None else None),
        )

    async def _counts(self) -> tuple[EngineCounts, Counter[str], Counter[str]]:
        """All, then peers and leases by their states."""
        peers, leases = Counter[str](), Counter[str]()
        requests = claims = quarantined_requests = quarantined_blocks = lent_blocks = 0
        for actor in list(self._peers.values()):
            view = actor.core.view()
            peers[view.peer.state.value] += 1
            requests += view.requests
            claims += view.claims
            quarantined_requests += view.quarantined
            quarantined_blocks += actor.quarantined_blocks()
            await trio.lowlevel.checkpoint()
        lent = self._lease_keeper.leases()
        self._looked_at += len(lent)
        for first in range(0, len(lent), LOOKED_AT_PER_SLICE):
            for each in lent[first : first + LOOKED_AT_PER_SLICE]:
                leases[each.state.value] += 1
                lent_blocks += each.blocks
            await trio.lowlevel.checkpoint()
        reads = self._context.reads
        held, trace = reads.port.counts(), self._context.trace
        counts = EngineCounts(
            peers=peers.total(),
            requests=requests,
            claims=claims,
            quarantined_requests=quarantined_requests,
            quarantined_blocks=quarantined_blocks,
            leases=len(lent),
            lent_blocks=lent_blocks,
            commands_that_wait_for_the_device=len(self._deferred),
            reads_in_flight=reads.in_flight,
            read_handles=held.reads,
            nixl_lag_seconds=int(held.lag_seconds),
            remote_agents=held.remote_agents,
            local_descriptor_lists=reads.local_lists,
            remote_descriptor_lists=held.descriptor_lists - reads.local_lists,
            local_prefills=self._local_prefills_count,
            late_releases=self._lease_keeper.late_releases,
            notifications_dropped=self._lease_keeper.notifications_dropped,
            trace_records_missing=trace.missing if trace is not None else 0,
        )
        return counts, peers, leases

    def _peer_row(self, key: PeerKey) -> AnyRow | None:
        actor, member = self._peers.get(key), self._roster.view(key)
        if actor is None or member is None:
            return None
        view = actor.core.view()
        value, failure = view.peer, view.peer.failure
        return inspection.PeerRow(
            engine_id=text(key.engine_id),
            address=text(member.place),
            state=value.state.value,
            since_seconds=self._since(actor.observer, value),
            failure=failure.kind if failure is not None else None,
            detail=optional_text(failure, DETAIL_LENGTH_MAX),
            failures=max(value.failures, value.losses),
            backoff_seconds=self._left(view.backoff_until_ns),
            is_builtin=view.is_builtin,
            is_retiring=value.is_retiring or member.is_retired,
            ranks=view.ranks,
            requests=view.requests,
            queued=len(actor.core.queued()),
            holds=view.claims,
            reads=view.reads,
            quarantined_requests=view.quarantined,
            quarantined_blocks=actor.quarantined_blocks(),
            unasked_seconds=self._passed(member.asked_ns),
            leaving_seconds=self._left(view.leaves_ns),
            loading_blocks=actor.loading_blocks(),
        )

    def _request_row(
        self, actor: PeerActor, subject: str | tuple[str, LeaseName], positions: Mapping[str, int]
    ) -> AnyRow | None:
        if not isinstance(subject, str):
            return self._queued_row(actor, *subject)
        view = actor.core.view_request(subject)
        if view is None:
            return None
        value = view.value
        position = positions.get(subject) if value.state is request.State.READING else None
        blocks, length_bytes, _ = actor.amounts(subject)
        return inspection.RequestRow(
            request_id=text(subject),
            remote_request_id=text(value.lease.request_id),
            lease_number=value.lease.number,
            peer=text(value.peer),
            address=text(actor.core.address),
            state=value.state.value,
            waits_for=view.waits_for if position is None else "turn",
            since_seconds=self._since(actor.observer, value),
            age_seconds=self._passed(view.started_ns) if view.started_ns is not None else None,
            until_seconds=self._left(view.until_ns),
            queue_position=position,
            blocks=blocks,
            reads=len(value.awaited),
            bytes=length_bytes,
            proven_seconds=self._proven(actor.core.view_claim(value.lease)),
            retries_left=value.retries_left,
            ending=value.ending.value if value.ending is not None else None,
            failure=value.failure.kind if value.failure is not None else None,
            detail=optional_text(value.failure, DETAIL_LENGTH_MAX),
        )

    def _queued_row(self, actor: PeerActor, request_id: str, name: LeaseName) -> AnyRow | None:
        claim = actor.core.view_claim(name)
        if claim is None or request_id not in claim.queued:
            return None
        heard_seconds = self._passed(claim.heard_ns)
        return inspection.RequestRow(
            request_id=text(request_id),
            remote_request_id=text(name.request_id),
            lease_number=name.number,
            peer=text(actor.core.engine_id),
            address=text(actor.core.address),
            state=QUEUED,
            waits_for="scheduler",
            since_seconds=heard_seconds,
            age_seconds=heard_seconds,
            until_seconds=None,
            queue_position=None,
            blocks=None,
            reads=0,
            bytes=None,
            proven_seconds=self._proven(claim),
            retries_left=0,
            ending=None,
            failure=None,
            detail=None,
        )

    def _hold_row(self, actor: PeerActor, name: LeaseName, rank: int) -> AnyRow | None:
        claim = actor.core.view_claim(name)
        if claim is None or rank >= max(1, len(claim.holds)):
            return None
        value = claim.holds[rank] if claim.holds else None
        is_proven = value is not None and value.state is not hold.State.GONE
        proven_until_ns = value.proven_until_ns if value is not None and is_proven else -1
        return inspection.HoldRow(
            remote_request_id=text(name.request_id),
            lease_number=name.number,
            peer=text(actor.core.engine_id),
            rank=rank,
            state=value.state.value if value is not None else UNMET,
            since_seconds=(self._since(actor.observer, value) if value is not None else self._passed(claim.heard_ns)),
            proven_seconds=self._left(proven_until_ns) if proven_until_ns >= 0 else None,
            why=optional_text(value.why if value is not None else None),
            users=tuple(text(each) for each in claim.users[:LIST_LENGTH_MAX]),
            users_count=len(claim.users),
        )

    def _lease_row(self, name: LeaseName) -> AnyRow | None:
        value = self._lease_keeper.lease(name)
        if value is None:
            return None
        is_held = value.state is lease.State.HELD
        holders = tuple(
            inspection.HolderRow(
                engine_id=text(each.engine_id),
                ranks=each.ranks,
                released=tuple(sorted(text(rank) for rank in each.released))[:LIST_LENGTH_MAX],
                released_count=len(each.released),
                others=each.unreleased_incarnations,
                address=text(self._lease_keeper.heard_from(each.engine_id)),
                is_connected=self._lease_keeper.is_connected(each.engine_id),
            )
            for each in value.holders[:LIST_LENGTH_MAX]
        )
        return inspection.LeaseRow(
            request_id=text(value.name.request_id),
            lease_number=value.name.number,
            state=value.state.value,
            since_seconds=self._since(self._lease_keeper.observer, value),
            deadline_seconds=self._left(value.deadline_ns) if is_held else None,
            limit_seconds=self._left(value.latest_ns) if is_held else None,
            blocks=value.blocks,
            holders=holders,
            holders_count=len(value.holders),
            is_lent_back=value.fixed_ns is not None,
        )

    def _read_row(self, in_hand: tuple[Any, int, bool]) -> AnyRow:
        order, since_ns, is_posted = in_hand
        return inspection.ReadRow(
            request_id=text(order.request_id),
            read=order.read,
            peer=text(order.peer),
            age_seconds=self._passed(since_ns),
            descriptors=int(order.local_ids.size),
            is_posted=is_posted,
        )

    def _quarantine_row(self, quarantine: tuple[PeerActor, str, int]) -> AnyRow | None:
        actor, request_id, reads = quarantine
        found = actor.quarantine(request_id)
        if found is None:
            return None
        blocks, remote_request_id, since_ns = found
        return inspection.QuarantineRow(
            request_id=text(request_id),
            remote_request_id=text(remote_request_id),
            peer=text(actor.core.engine_id),
            blocks=blocks,
            reads=reads,
            since_seconds=self._passed(since_ns),
        )

    def _local_prefill_row(self, noted: tuple[int, LocalPrefill]) -> AnyRow:
        seen_ns, seen = noted
        return inspection.LocalPrefillRow(
            request_id=text(seen.request_id),
            reason=text(seen.reason),
            tokens=seen.tokens,
            age_seconds=self._passed(seen_ns),
        )

    def _without_room_row(self, request_id: str) -> AnyRow | None:
        noted = self._without_room.get(request_id)
        if noted is None:
            return None
        since_ns, lacking = noted
        return inspection.WithoutRoomRow(
            request_id=text(lacking.request_id),
            tokens=lacking.num_tokens,
            quarantined_blocks=lacking.quarantined,
            lent_back_blocks=lacking.lent_back,
            since_seconds=self._passed(since_ns),
        )

    def _introduction_row(self, place: str) -> AnyRow | None:
        value = self._introducer.get(place)
        if value is None:
            return None
        return inspection.IntroductionRow(
            place=text(place),
            state=value.state.value,
            engine_id=text(answered_by(value)),
            failures=value.failures,
            failure=kind_of(value.problem) or None,
            detail=optional_text(value.problem, DETAIL_LENGTH_MAX),
            is_builtin=value.problem == BUILTIN,
        )

    def _record_row(self, number: int, fields: tuple[Any, ...]) -> AnyRow:
        record = self._with_what_followed(self._context.recorder.render(fields, number))
        bounded = {
            name: optional_text(getattr(record, name), DETAIL_LENGTH_MAX)
            for name in ("subject", "peer", "remote_request_id", "reason", "detail")
        }
        return inspection.RecordRow(
            record=inspection.with_texts(record, bounded), age_seconds=self._passed(record.mono_ns)
        )

    def _with_what_followed(self, record: TransitionRecord) -> TransitionRecord:
        if record.machine != request.MACHINE.name or record.to_state != request.State.DONE.value:
            return record
        told_ns, failure = self._failed_loads.get(record.subject, (0, None))
        if failure is None or record.mono_ns > told_ns:
            return record
        return msgspec.structs.replace(record, reason=failure.kind, detail=str(failure))

    # --- times ------------------------------------------------------------------------------------------------------

    def _since(self, observer: Observer, value: object) -> float | None:
        """For how long a living value of the core that tells `observer` of its steps has been in its state."""
        entered_ns = self._context.recorder.entered_ns(observer, value)
        return self._passed(entered_ns) if entered_ns is not None else None

    def _passed(self, since_ns: int) -> float:
        return (self._clock.now_ns() - since_ns) / NS_PER_SECOND

    def _left(self, until_ns: int | None) -> float | None:
        return (until_ns - self._clock.now_ns()) / NS_PER_SECOND if until_ns is not None else None

    def _proven(self, claim: ClaimView | None) -> float | None:
        if claim is None or not claim.holds or any(each.state is hold.State.GONE for each in claim.holds):
            return None
        proven_until_ns = min(each.proven_until_ns for each in claim.holds)
        return self._left(proven_until_ns) if proven_until_ns >= 0 else None


def _anything(candidate: Any, match: str) -> bool:
    return True


def _no_row(candidate: Any) -> None:
    return None


def _is_of_engine(key: PeerKey, match: str) -> bool:
    return match in key.engine_id


def _is_request_about(actor: PeerActor, subject: str | tuple[str, LeaseName], match: str) -> bool:
    if not isinstance(subject, str):
        request_id, name = subject
        return match in request_id or match in name.request_id
    if match in subject:
        return True
    view = actor.core.view_request(subject)
    return view is not None and match in view.value.lease.request_id


def _is_hold_about(actor: PeerActor, name: LeaseName, match: str) -> bool:
    if match in name.request_id:
        return True
    claim = actor.core.view_claim(name)
    return claim is not None and any(match in user for user in claim.users)
