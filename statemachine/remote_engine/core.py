"""The core itself: what each event leads to. See the package's docstring for the rules."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, assert_never

import msgspec

from statemachine import departure, hold, peer, request
from statemachine.deadlines import NS_PER_SECOND, Deadlines, earliest
from statemachine.failures import (
    ActorCrashed,
    BadParams,
    BlocksConsumed,
    ConnectionRefused,
    ControlLinkLost,
    Failure,
    Incompatible,
    NotAllowed,
    PeerBackoff,
    PeerLeaving,
    PeerRetired,
    PeerSilent,
    PreviousReadsInFlight,
    ReadNeverEnded,
    RegistrationReplaced,
    is_transport_lost,
)
from statemachine.kernel import Event, Machine, ProtocolError
from statemachine.lease import LeaseName
from statemachine.outcome import Outcome
from statemachine.pauses import doubled_ns, spread_ns
from statemachine.remote_engine.claims import ASSUMED_OVER, LEFT, RESTARTED, Claim, Claims
from statemachine.remote_engine.connections import Connection, Connections
from statemachine.remote_engine.messages import (
    AbortAsked,
    Address,
    Announced,
    BlocksRejected,
    BlocksResolved,
    CheckRead,
    Connected,
    ConnectFailed,
    Crashed,
    EngineEffect,
    EngineLimits,
    FromEngine,
    HoldAnswered,
    LeavingSaid,
    LetGo,
    LiftQuarantine,
    LinkLost,
    MeetAsked,
    NoteHandshakeFailure,
    NoteLeaving,
    NoteNotMet,
    NotificationFailed,
    PassToSuccessor,
    PostReads,
    ReadChecked,
    ReadEnded,
    Recall,
    ReleaseAnswered,
    ReleaseUnread,
    Report,
    ResolveBlocks,
    Retire,
    SharedAgentsLost,
    Started,
    StartHandshake,
    Stop,
    TearDown,
    TimerKey,
    TornDown,
    Unwatched,
    WithdrawReads,
)
from statemachine.remote_engine.views import ClaimView, EngineView, RequestView, waits_for
from statemachine.trace import Observer

ATTEMPTS_PER_LEASE = 6
"""Handshakes with an engine that is away, to say releases."""
FAILURES_ALIKE = 8
"""For the explorer: from so many attempts on that failed in a row, pauses are taken to be alike."""


class RemoteEngine:
    """See the package's docstring.

    Args:
        identity: of this rank; makes the jitter of its back-off its own.
        observe: told of every step; that the machine of the connection was made is said with the first event.
    """

    def __init__(
        self,
        engine_id: str,
        address: Address,
        limits: EngineLimits,
        *,
        identity: str = "",
        observe: Observer | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.address = address
        """Requests may name the engine at different addresses; the newest is tried next. A working connection is kept
        whatever they say: if the engine did move, READs fail or its control sockets are reset."""
        self._limits = limits
        self._identity = identity
        self._peer = peer.Peer(engine_id=engine_id)
        self._is_stopped = False
        self._departure = departure.Departure()
        # Requests that have not ended. Removed in the step that reports them, so each is reported exactly once.
        self._requests: dict[str, request.Request] = {}
        # Of these, the ids in pending_handshake, and those in proving; in order of arrival.
        self._waiting: dict[str, None] = {}
        self._proving: dict[str, None] = {}
        # For the successor, with when it came. Empty unless nobody is left in a core that is given up.
        self._parked: list[tuple[int, FromEngine]] = []
        # Of the latest connection; None before the first.
        self._life: str | None = None
        # The newest registration of P's KV cache that a request has named, and the one when the last attempt began.
        self._registration, self._attempted_registration = 0, 0
        # Where the last attempt to connect looks for the engine, and where the connection led over which it said last
        # that it leaves.
        self._attempted_address = self._leaves_address = address
        self._backoff_until_ns = 0
        self._timers: Deadlines[TimerKey] = Deadlines()
        self._outcome: Outcome[EngineEffect] = Outcome(observe)
        self._outcome.steps.append(("peer", engine_id, None, None, self._peer))
        self._connections = Connections()
        self._claims = Claims(limits, self._timers, self._outcome)

    # --- driving ----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> int | None:
        return earliest(self._timers.next_ns(), self._claims.dues.next_ns())

    def advance(self, now_ns: int) -> list[EngineEffect]:
        """Do what is due. One deadline at a time: if one raises, the others stay due."""
        while (due_ns := self._timers.next_ns()) is not None and (key := self._timers.take_due(now_ns)) is not None:
            self._fire(key, due_ns, now_ns)
            self._follow_up(now_ns)
        self._claims.send_due(now_ns)
        return self._outcome.take(now_ns)

    def handle(self, event: Event, now_ns: int) -> list[EngineEffect]:
        """Take one event in; returns what to do, in order."""
        match event:
            case ReadEnded():
                self._end_read(event, now_ns)
            case ReadChecked():
                self._end_check(event, now_ns)
            case Announced() | Started() | ReleaseUnread() | LetGo() | MeetAsked() | AbortAsked():
                self._handle_from_engine(event, now_ns)
            case BlocksResolved():
                self._resolve(event, now_ns)
            case BlocksRejected(request_id=request_id, failure=failure):
                if request_id in self._waiting:
                    self._step_request(request_id, request.ParamsRejected(failure=failure), now_ns)
            case HoldAnswered():
                self._take_hold_answer(event, now_ns)
            case ReleaseAnswered():
                self._take_release_answer(event)
            case Connected():
                self._connect(event, now_ns)
            case ConnectFailed(failure=failure):
                self._fail_handshake(failure, now_ns, is_awaited=self._is_awaited)
            case TornDown(connection=number):
                self._end_tear_down(number, now_ns)
            case LinkLost(connection=number, detail=detail):
                self._suspect(number, ControlLinkLost(**self._of_peer(), detail=detail), now_ns)
            case LeavingSaid(connection=number, grace_ns=grace_ns):
                current = self._connections.current
                if current is not None and current.number == number:
                    self._leaves_address = current.address
                    self._step_departure(departure.LeavingAnnounced(until_ns=now_ns + grace_ns), now_ns)
            case NotificationFailed(connection=number, failure=failure):
                if failure.transport_lost:
                    self._suspect(number, failure, now_ns)
            case SharedAgentsLost(connection=number, failure=failure):
                self._suspect(number, failure, now_ns)
            case Retire():
                self._step_peer(peer.Retired(), now_ns)
            case Recall(address=address):
                if self.may_be_recalled:
                    self.address = address
                    self._peer = peer.Peer(engine_id=self.engine_id)
                    self._outcome.steps.append(("peer", self.engine_id, None, None, self._peer))
            case Stop(failure=failure):
                self._is_stopped = True
                self._take_parked(now_ns)
                self._fail_requests(failure, now_ns)
                self._claims.drop_all()
                self._step_peer(peer.Retired(), now_ns)
            case Unwatched():
                self._give_up_on_reads(now_ns)
            case Crashed(failure=crash):
                is_awaited = self._is_awaited
                self._fail_requests(crash, now_ns)
                self._fail_handshake(crash, now_ns, is_awaited=is_awaited)
            case _:
                raise TypeError(f"{type(event).__name__} is not an event of this core")
        self._follow_up(now_ns)
        return self._outcome.take(now_ns)

    @property
    def state(self) -> peer.State:
        """The state of the connection."""
        return self._peer.state

    @property
    def is_unused(self) -> bool:
        """Nobody waits for this engine or reads from it. Releases may be owed: their leases end by themselves too."""
        return not (self._requests or self._claims.are_wanted) and self._connections.are_unused

    @property
    def is_connected(self) -> bool:
        return self._connections.current is not None

    @property
    def is_shaking_hands(self) -> bool:
        return self._peer.state is peer.State.HANDSHAKING

    @property
    def is_retired(self) -> bool:
        """Given up already; READs that hang may keep it for long."""
        return self._peer.is_retiring or self._peer.state is peer.State.GONE

    @property
    def may_be_recalled(self) -> bool:
        """Retired, and nothing but its connections is left to end: READs over them may hang for ever. Not when the
        connector stops."""
        is_left_over = self._peer.state is peer.State.GONE and not (self._requests or self._connections.are_over)
        return is_left_over and not self._is_stopped

    @property
    def is_finished(self) -> bool:
        """Given up, and everything that touched it has ended."""
        return self._peer.state is peer.State.GONE and not self._requests and self._connections.are_over

    def wants(self, request_id: str) -> bool:
        """Whether a READ of this request is still to be posted; asked when its turn has come. Not if its connection has
        become suspect since it was ordered."""
        found = self._requests.get(request_id)
        is_reading = found is not None and found.state is request.State.READING
        return self._peer.state is peer.State.READY and is_reading

    # --- what the engine wants --------------------------------------------------------------------------------------

    def _handle_from_engine(self, event: FromEngine, now_ns: int) -> None:
        if self._passes_to_successor:
            self._parked.append((now_ns, event))
            return
        match event:
            case Announced():
                if event.registration > self._registration:
                    self._note_registration(event.registration, now_ns)
                self._announce(event, now_ns)
            case Started():
                if event.registration > self._registration:
                    self._note_registration(event.registration, now_ns)
                self._start(event, now_ns)
            case ReleaseUnread():
                self._release_unread(event, now_ns)
            case LetGo(lease=lease):
                self._claims.end_keeping(lease, now_ns)
            case MeetAsked(address=address):
                self.address = address
                if self._peer.state is peer.State.IDLE:
                    self._step_peer(peer.Wanted(), now_ns)
                elif self._peer.state in (peer.State.BACKOFF, peer.State.INCOMPATIBLE):
                    assert self._peer.failure is not None
                    self._outcome.effects.append(NoteNotMet(failure=self._refusal(self._peer.failure, now_ns)))
            case AbortAsked(request_id=request_id):
                self._step_request(request_id, request.Aborted(), now_ns)
            case _:
                assert_never(event)

    @property
    def _passes_to_successor(self) -> bool:
        """Given up, and nobody is left in it. There is no successor when the connector stops. Not while an attempt to
        connect is in flight, which has no bound of its own here: whoever comes then has its deadline, and is told."""
        is_connecting = self._peer.state is peer.State.HANDSHAKING
        is_left = self.is_retired and not (self._is_stopped or is_connecting)
        return is_left and (self.is_finished or self.is_unused)

    def _take_parked(self, now_ns: int) -> None:
        """One at a time: if one raises, the others are still there."""
        while self._parked:
            self._handle_from_engine(self._unpark(now_ns), now_ns)

    def _unpark(self, now_ns: int) -> FromEngine:
        """The first that is parked, as if it came now."""
        came_ns, event = self._parked.pop(0)
        if isinstance(event, Announced | Started):
            return msgspec.structs.replace(event, age_ns=event.age_ns + now_ns - came_ns)
        return event

    # --- requests ---------------------------------------------------------------------------------------------------

    def _announce(self, event: Announced, now_ns: int) -> None:
        if self._claims.is_consumed(event.lease):
            return  # it is told so when it starts
        self.address = event.address
        self._claims.want(event.lease, event.request_id, event.address, now_ns - event.age_ns, now_ns)

    def _start(self, event: Started, now_ns: int) -> None:
        request_id = event.request_id
        fresh = request.Request(
            request_id=request_id,
            lease=event.lease,
            peer=self.engine_id,
            retries_left=self._limits.retries,
            age_ns=event.age_ns,
        )
        self._requests[request_id] = fresh
        self._waiting[request_id] = None
        self._outcome.steps.append(("request", request_id, None, None, fresh))
        if self._claims.is_consumed(event.lease):
            consumed = BlocksConsumed(**self._of_peer(), remote_request_id=event.lease.request_id)
            self._step_request(request_id, request.PeerFailed(failure=consumed), now_ns)
            return
        self.address = event.address
        heard_ns = now_ns - event.age_ns
        claim = self._claims.want(event.lease, request_id, event.address, heard_ns, now_ns, keeps=event.keeps_lease)
        if claim.gone is not None:
            has_left = claim.gone == LEFT
            ended = request.PeerFailed(failure=self._left()) if has_left else self._lease_gone(claim, claim.gone)
            self._step_request(request_id, ended, now_ns)
            return
        self._timers.set(("deadline", request_id), now_ns + self._limits.request_ns)
        self._await_peer(request_id, now_ns)

    def _release_unread(self, event: ReleaseUnread, now_ns: int) -> None:
        if self._claims.is_consumed(event.lease):
            return
        self.address = event.address
        self._claims.want(event.lease, event.request_id, event.address, now_ns, now_ns, keeps=event.keeps_lease)
        self._claims.leave(event.lease, event.request_id, now_ns)

    def _await_peer(self, request_id: str, now_ns: int) -> None:
        """Offer the connection if there is one; otherwise it comes, or its failure does."""
        if self._peer.state is peer.State.READY:
            self._offer(request_id)
        else:
            self._step_peer(peer.Wanted(), now_ns)

    def _offer(self, request_id: str) -> None:
        current = self._connections.current
        assert current is not None
        self._outcome.effects.append(ResolveBlocks(request_id=request_id, connection=current.number))

    def _resolve(self, event: BlocksResolved, now_ns: int) -> None:
        is_ready = self._peer.state is peer.State.READY and self._connections.is_current(event.connection)
        if not is_ready or event.request_id not in self._waiting:
            return  # it ended meanwhile, or waits for the next connection
        ready = request.PeerReady(connection=event.connection, reads=event.reads, are_checked=event.are_checked)
        self._step_request(event.request_id, ready, now_ns)

    def _step_request(self, request_id: str, event: Event, now_ns: int) -> None:
        """Step a request, if it has not ended."""
        before = self._requests.get(request_id)
        if before is None:
            return
        try:
            after, effects = request.MACHINE.step(before, event)
        except ProtocolError as error:
            if isinstance(event, request.ShellFailed):
                raise  # every living state takes it
            # A bug in this package costs the one request that it concerns, which ends as after a crash: all see it.
            crash = ActorCrashed(actor="request machine", error=str(error))
            self._step_request(request_id, request.ShellFailed(failure=crash), now_ns)
            match event:
                case request.ReadCompleted(read=read) | request.ReadFailed(read=read, is_quiescent=True):
                    self._step_request(request_id, request.ReadQuiesced(read=read), now_ns)
            return
        self._requests[request_id] = after
        self._outcome.steps.append(("request", request_id, before, event, after))
        if after.state is not before.state:
            self._move_between_indexes(request_id, after.state)
        for effect in effects:
            match effect:
                case request.PostReads():
                    self._post_reads(after)
                case request.CheckRead(read=read):
                    check = CheckRead(request_id=request_id, read=read, connection=after.connection)
                    self._outcome.effects.append(check)
                case request.AskForProof():
                    self._ask_for_proof(after, now_ns)
                case request.StartQuiesceTimer():
                    if self._peer.state is peer.State.READY:  # otherwise they were, with its connection
                        self._outcome.effects.append(WithdrawReads(request_id=request_id))
                    self._timers.set(("quiesce", request_id), now_ns + self._limits.quiesce_ns)
                case request.AwaitPeer():
                    self._timers.cancel(("quiesce", request_id))
                    self._await_peer(request_id, now_ns)
                case request.Report(failure=failure):
                    self._end_request(after, failure, now_ns)
                case _:
                    assert_never(effect)

    def _move_between_indexes(self, request_id: str, state: request.State) -> None:
        self._waiting.pop(request_id, None)
        self._proving.pop(request_id, None)
        if state is request.State.PENDING_HANDSHAKE:
            self._waiting[request_id] = None
        elif state is request.State.PROVING:
            self._proving[request_id] = None

    def _end_request(self, ended: request.Request, failure: Failure | None, now_ns: int) -> None:
        """Report it once, and let go of what it wanted. Where READs may still write, its blocks are quarantined."""
        request_id = ended.request_id
        del self._requests[request_id]
        self._waiting.pop(request_id, None)
        self._proving.pop(request_id, None)
        self._timers.cancel(("deadline", request_id))
        self._timers.cancel(("quiesce", request_id))
        self._timers.cancel(("proof", request_id))
        if ended.in_flight:
            self._connections.quarantine(request_id, ended.in_flight)
        report = Report(request_id=request_id, failure=failure, is_quarantined=bool(ended.in_flight))
        self._outcome.effects.append(report)
        self._claims.leave(ended.lease, request_id, now_ns)
        if ended.in_flight:
            waited_seconds = self._limits.quiesce_ns / NS_PER_SECOND
            self._suspect(ended.connection, ReadNeverEnded(**self._of_peer(), waited_seconds=waited_seconds), now_ns)

    def _fail_requests(self, failure: Failure, now_ns: int) -> None:
        for request_id in list(self._requests):
            self._step_request(request_id, request.ShellFailed(failure=failure), now_ns)

    def _give_up_on_reads(self, now_ns: int) -> None:
        """Requests that wait for READs have waited long enough: they end in quarantine."""
        for request_id in list(self._requests):
            self._step_request(request_id, self._quiesce_timeout, now_ns)

    @property
    def _quiesce_timeout(self) -> request.QuiesceTimeout:
        return request.QuiesceTimeout(waited_seconds=self._limits.quiesce_ns / NS_PER_SECOND)

    # --- reads ------------------------------------------------------------------------------------------------------

    def _post_reads(self, reading: request.Request) -> None:
        current = self._connections.current
        assert current is not None
        current.open_reads.update(((reading.request_id, read), None) for read in sorted(reading.in_flight))
        self._outcome.effects.append(PostReads(request_id=reading.request_id, connection=reading.connection))

    def _end_read(self, event: ReadEnded, now_ns: int) -> None:
        connection = self._connections.get(event.connection)
        if connection is None or (event.request_id, event.read) not in connection.open_reads:
            return  # told again, by an executor that crashed over it
        self._take_read_end(connection, event, now_ns)
        del connection.open_reads[event.request_id, event.read]

    def _take_read_end(self, connection: Connection, event: ReadEnded, now_ns: int) -> None:
        failure = event.failure
        # The peer first: a request that may try again must find it draining, not ready on a broken connection.
        if failure is not None and (is_transport_lost(failure) or not event.is_quiescent):
            self._suspect(event.connection, failure, now_ns)
        if not event.is_quiescent:
            connection.unsettled[event.request_id, event.read] = None
        elif failure is None and event.was_wanted:
            connection.was_of_use = True
        found = self._requests.get(event.request_id)
        if found is None or found.connection != event.connection or event.read not in found.in_flight:
            if event.is_quiescent:
                self._quiesce_quarantined(event.request_id, event.read)
        elif not event.was_wanted:
            if found.state is request.State.READING:
                # Not wanted on this connection: it was given up after the READ was ordered.
                assert self._peer.failure is not None
                self._step_request(event.request_id, request.PeerLost(failure=self._peer.failure), now_ns)
            self._step_request(event.request_id, request.ReadQuiesced(read=event.read), now_ns)
        elif failure is not None:
            self._step_request(
                event.request_id,
                request.ReadFailed(read=event.read, failure=failure, is_quiescent=event.is_quiescent),
                now_ns,
            )
        else:
            proven_until_ns = self._proven_until_ns(found)
            self._step_request(
                event.request_id,
                request.ReadCompleted(read=event.read, completed_ns=event.ended_ns, proven_until_ns=proven_until_ns),
                now_ns,
            )

    def _end_check(self, event: ReadChecked, now_ns: int) -> None:
        found = self._requests.get(event.request_id)
        if found is None or found.connection != event.connection or event.read not in found.unchecked:
            return  # the request, or this attempt of it, has ended meanwhile
        if event.failure is not None:
            failed = request.ReadFailed(read=event.read, failure=event.failure, is_quiescent=True)
            self._step_request(event.request_id, failed, now_ns)
        else:
            checked = request.ReadChecked(read=event.read, proven_until_ns=self._proven_until_ns(found))
            self._step_request(event.request_id, checked, now_ns)

    def _proven_until_ns(self, reading: request.Request) -> int:
        claim = self._claims.get(reading.lease)
        return claim.proven_until_ns if claim is not None else -1

    def _quiesce_quarantined(self, request_id: str, read: int) -> None:
        if self._connections.quiesce(request_id, read):
            self._outcome.effects.append(LiftQuarantine(request_id=request_id))

    def _settle_reads(self, number: int, now_ns: int) -> None:
        """The back end's grace is over: what failed on this connection writes no more."""
        connection = self._connections.get(number)
        assert connection is not None
        self._connections.forget(connection)
        for request_id, read in connection.unsettled:
            found = self._requests.get(request_id)
            if found is not None and found.connection == connection.number:
                self._step_request(request_id, request.ReadQuiesced(read=read), now_ns)
            else:
                self._quiesce_quarantined(request_id, read)

    # --- the connection ---------------------------------------------------------------------------------------------

    def _step_peer(self, event: Event, now_ns: int) -> None:
        before = self._peer
        self._peer, effects = peer.MACHINE.step(before, event)
        self._outcome.steps.append(("peer", self.engine_id, before, event, self._peer))
        for effect in effects:
            match effect:
                case peer.StartHandshake():
                    self._attempted_registration, self._attempted_address = self._registration, self.address
                    self._outcome.effects.append(StartHandshake(address=self.address))
                case peer.AnnounceReady():
                    self._announce_ready(now_ns)
                case peer.AnnounceFailed(failure=failure):
                    self._announce_failed(failure, now_ns)
                case peer.Refuse(failure=failure):
                    self._announce_failed(self._refusal(failure, now_ns), now_ns)
                case peer.StartBackoff():
                    self._back_off(effect, now_ns)
                case peer.DrainReads():
                    self._withdraw_reads()
                    self._claims.fall_silent()
                    self._timers.set(("drain", None), now_ns + self._limits.quiesce_ns)
                case peer.TearDown():
                    assert self._connections.current is not None
                    self._timers.set(("drain", None), now_ns + self._limits.quiesce_ns)
                    self._tear_down(self._connections.current)
                case peer.Abandon(failure=failure):
                    self._abandon(failure, now_ns)
                case _:
                    assert_never(effect)

    def _connect(self, event: Connected, now_ns: int) -> None:
        of_use_from_ns = now_ns + self._limits.backoff_max_ns
        connection = Connection(
            event.connection,
            event.workers,
            of_use_from_ns,
            address=self._attempted_address,
            is_builtin=event.is_builtin,
            registration=self._attempted_registration,
        )
        self._connections.add(connection)
        if self._peer.state is not peer.State.HANDSHAKING:
            return  # its executor crashed meanwhile, and the attempt was answered for; `_follow_up` tears it down
        self._connections.current = connection
        self._step_departure(departure.Connected(), now_ns)
        was_another, self._life = self._life not in (None, event.life), event.life
        if was_another:
            # What we have heard of so far may all be of the process before. This one knows its leases by their numbers,
            # if it is no built-in one, which says nothing about them.
            for claim in self._claims.lose_all(RESTARTED, connection.ranks, but_numbered=not event.is_builtin):
                self._tell_gone(claim, now_ns)
            # It counts from the beginning, and may have come to any number: the next request that names one is not
            # believed to be of this connection.
            self._registration = connection.registration = 0
        self._step_peer(peer.HandshakeSucceeded(), now_ns)
        self._require_registration(now_ns)

    def _note_registration(self, registration: int, now_ns: int) -> None:
        """A request names a newer one. Over a connection that was made before, who knows what would be read."""
        self._registration = registration
        self._require_registration(now_ns)

    def _require_registration(self, now_ns: int) -> None:
        """Of a built-in P alone: one of ours that registers anew is another process for us, and what a request says of
        it may be a client's invention, which must not cost others their connection."""
        current = self._connections.current
        if current is not None and current.is_builtin and current.registration < self._registration:
            replaced = RegistrationReplaced(**self._of_peer(), registration=self._registration)
            self._suspect(current.number, replaced, now_ns)

    def _fail_handshake(self, failure: Failure, now_ns: int, *, is_awaited: bool) -> None:
        if self._peer.state is peer.State.HANDSHAKING:
            # A request may name another place than that where the engine was: that of a new process, or a wrong one.
            # What happens there says nothing of what was announced, nor of what others wait for.
            was_there = self._attempted_address == self._leaves_address
            has_left, cause = was_there and self._departure.state is not departure.State.STAYS, failure
            # That it has left explains what happens, but for what somebody says who is there instead.
            if has_left and not isinstance(failure, Incompatible | BadParams | NotAllowed):
                cause = self._left(failure)
            if has_left:
                self._step_departure(departure.AttemptFailed(), now_ns, cause)
            if is_awaited:
                self._outcome.effects.append(NoteHandshakeFailure())
            self._outcome.effects.append(NoteNotMet(failure=cause))
            # A new process may come where one has left; while the port refuses, asking costs nothing.
            begins_backoff = is_awaited and not (has_left and isinstance(failure, ConnectionRefused))
            if not (is_awaited or has_left):
                self._timers.set(("release_retry", None), now_ns + self._limits.lease_ns // ATTEMPTS_PER_LEASE)
            self._step_peer(peer.HandshakeFailed(failure=cause, begins_backoff=begins_backoff), now_ns)

    def _suspect(self, number: int, failure: Failure, now_ns: int) -> None:
        """Nothing may be read over this connection any more, if it is the current one."""
        connection = self._connections.get(number)
        if connection is None:
            return
        if connection.failure is None:
            connection.failure = failure
        if self._connections.is_current(number):
            has_ended = isinstance(failure, ControlLinkLost) or is_transport_lost(failure)
            if has_ended and self._departure.state is departure.State.LEAVING:
                failure = self._left(failure)
            was_of_use = (
                connection.was_of_use
                or isinstance(failure, RegistrationReplaced)
                or (has_ended and connection.has_stood_idle(now_ns))
            )
            self._step_peer(peer.ConnectionSuspect(failure=failure, was_of_use=was_of_use), now_ns)
            if has_ended:
                self._step_departure(departure.ConnectionEnded(), now_ns)

    def _step_departure(self, event: Event, now_ns: int, cause: Failure | None = None) -> None:
        """`cause`: why what is lost with it is lost, if not because it has left."""
        self._departure, effects = departure.MACHINE.step(self._departure, event)
        for effect in effects:
            match effect:
                case departure.NoteLeaving():
                    self._outcome.effects.append(NoteLeaving(grace_ns=self._departure.until_ns - now_ns))
                case departure.LoseEverything():
                    self._lose_everything(cause or self._left(), now_ns)
                case _:
                    assert_never(effect)

    def _lose_everything(self, cause: Failure, now_ns: int) -> None:
        """The engine has left. What waits in the scheduler's queue is told when it starts."""
        for claim in self._claims.lose_all(LEFT, ranks=1):
            self._claims.drop_if_over(claim)
        self._fail_requests(cause, now_ns)
        self._claims.want_none()

    def _left(self, failure: Failure | None = None) -> PeerLeaving:
        """Why nothing can be had of an engine that has left; `failure`: what has shown it."""
        return PeerLeaving(**self._of_peer(), detail=failure.kind if failure is not None else "")

    def _announce_ready(self, now_ns: int) -> None:
        """Ask for every lease that somebody wants, say every release that is owed, and offer the connection."""
        connection = self._connections.current
        assert connection is not None
        for claim in self._claims.speak_over(connection, now_ns):
            self._tell_gone(claim, now_ns)
        self._claims.send_due(now_ns)
        for request_id in list(self._waiting):
            self._offer(request_id)

    def _refusal(self, failure: Failure, now_ns: int) -> Failure:
        """What who comes during the delay after this failure is told."""
        if self._peer.state is peer.State.INCOMPATIBLE:
            return failure
        retry_in_seconds = max(0, self._backoff_until_ns - now_ns) / NS_PER_SECOND
        return PeerBackoff(**self._of_peer(), retry_in_seconds=retry_in_seconds, last=failure.kind)

    def _announce_failed(self, failure: Failure, now_ns: int) -> None:
        for request_id in (*self._waiting, *self._proving):
            self._step_request(request_id, request.PeerFailed(failure=failure), now_ns)

    def _back_off(self, effect: peer.StartBackoff, now_ns: int) -> None:
        limits = self._limits
        if effect.is_incompatible:
            delay_ns = limits.incompatible_ns
        elif isinstance(self._peer.failure, ConnectionRefused) or self._departure.state is departure.State.LEFT:
            # Asking again costs a round trip, and an engine that is started again is to be served at once.
            delay_ns = limits.backoff_first_ns
        else:
            delay_ns = doubled_ns(limits.backoff_first_ns, limits.backoff_max_ns, effect.failures - 1)
        self._backoff_until_ns = now_ns + spread_ns(delay_ns, self._identity, self.engine_id, effect.failures)
        self._timers.set(("backoff", None), self._backoff_until_ns)

    def _withdraw_reads(self) -> None:
        """Nothing more is read over the current connection; requests of which nothing was try the next one."""
        connection = self._connections.current
        assert connection is not None
        for reading in self._reading_over(connection):
            self._outcome.effects.append(WithdrawReads(request_id=reading.request_id))

    def _tear_down(self, connection: Connection) -> None:
        connection.is_tearing_down = True
        self._outcome.effects.append(TearDown(connection=connection.number, failure=connection.failure))

    def _end_tear_down(self, number: int, now_ns: int) -> None:
        connection = self._connections.get(number)
        assert connection is not None
        connection.is_torn_down = True
        if connection.unsettled:
            self._timers.set(("grace", number), now_ns + self._limits.grace_ns)
        else:
            self._connections.forget(connection)
        if connection is self._connections.current:
            self._connections.current = None
            self._timers.cancel(("drain", None))
            self._step_peer(peer.TornDown(), now_ns)
        elif self._peer.state is peer.State.BACKOFF and isinstance(self._peer.failure, PreviousReadsInFlight):
            # What the last attempt failed for is over: the engine need not wait for the rest of a pause that has grown.
            self._timers.cancel(("backoff", None))
            self._step_peer(peer.BackoffElapsed(), now_ns)

    def _abandon(self, failure: Failure, now_ns: int) -> None:
        """READs on the current connection, or on its agents, did not end in time: it stays until they do, and nobody
        waits for them."""
        connection, self._connections.current = self._connections.current, None
        assert connection is not None
        self._timers.cancel(("drain", None))
        for reading in self._reading_over(connection):
            self._step_request(reading.request_id, request.PeerLost(failure=failure), now_ns)
            # It has waited as long as a request that failed by itself.
            self._step_request(reading.request_id, self._quiesce_timeout, now_ns)

    def _reading_over(self, connection: Connection) -> list[request.Request]:
        return [
            each
            for each in self._requests.values()
            if each.state is request.State.READING and each.connection == connection.number
        ]

    # --- leases -----------------------------------------------------------------------------------------------------

    def _ask_for_proof(self, proving: request.Request, now_ns: int) -> None:
        self._timers.set(("proof", proving.request_id), now_ns + self._limits.lease_ns)
        self._claims.ask_for_proof(proving.lease, proving.last_completed_ns, now_ns)

    def _take_hold_answer(self, event: HoldAnswered, now_ns: int) -> None:
        if not self._connections.is_current(event.connection) or event.sent_ns > now_ns:
            return
        self._claims.note_answer(event.rank)
        for lease, remaining_ns in event.held:
            claim = self._claims.prove(lease, event.rank, event.sent_ns, remaining_ns, now_ns)
            if claim is not None and self._proving:
                self._tell_proven(claim, now_ns)
        for lease, why in event.gone:
            claim = self._claims.lose(lease, event.rank, why)
            if claim is not None:
                self._tell_gone(claim, now_ns)

    def _tell_proven(self, claim: Claim, now_ns: int) -> None:
        proven = request.LeaseProven(proven_until_ns=claim.proven_until_ns)
        for user in [each for each in claim.users if each in self._proving]:
            self._step_request(user, proven, now_ns)

    def _tell_gone(self, claim: Claim, now_ns: int) -> None:
        """Each of its users, for the reason of the first rank that does not keep it. One that was only announced is
        told when it starts."""
        if claim.gone is not None:  # else it was being released: nobody wants it
            gone = self._lease_gone(claim, claim.gone)
            for user in list(claim.users):
                self._step_request(user, gone, now_ns)
        self._claims.drop_if_over(claim)

    def _lease_gone(self, claim: Claim, why: str) -> request.LeaseGone:
        """Two engines may have one id: whoever is connected does not know what the other one has lent."""
        current = self._connections.current
        if current is None:
            return request.LeaseGone(why=why)
        asked, named = str(current.address), str(claim.address)
        return request.LeaseGone(why=why, address=asked, named=named if named != asked else "")

    def _take_release_answer(self, event: ReleaseAnswered) -> None:
        if self._connections.is_current(event.connection):
            self._claims.note_answer(event.rank)
        for lease in event.leases:
            self._claims.confirm_release(lease, event.rank)

    # --- time, and what follows -------------------------------------------------------------------------------------

    def _fire(self, key: TimerKey, due_ns: int, now_ns: int) -> None:
        kind, subject = key
        limits = self._limits
        match kind:
            case "deadline":
                timeout = request.DeadlinePassed(
                    timeout_seconds=limits.request_ns / NS_PER_SECOND, late_seconds=(now_ns - due_ns) // NS_PER_SECOND
                )
                self._step_request(subject, timeout, now_ns)
            case "quiesce":
                self._step_request(subject, self._quiesce_timeout, now_ns)
            case "proof":
                unproven = request.ProofTimeout(waited_seconds=limits.lease_ns / NS_PER_SECOND)
                self._step_request(subject, unproven, now_ns)
            case "answer":
                # It may be that it was us who stood still, and that its answer waits to be heard.
                self._timers.set(("answer_grace", subject), now_ns + self._claims.resend_ns)
            case "answer_grace":
                current = self._connections.current
                assert current is not None
                silent = PeerSilent(
                    **self._of_peer(),
                    worker=current.workers[subject],
                    waited_seconds=limits.lease_ns / NS_PER_SECOND,
                )
                self._suspect(current.number, silent, now_ns)
            case "assumed":
                self._tell_gone(self._claims.lose_everywhere(subject, ASSUMED_OVER), now_ns)
            case "release_given_up":
                self._claims.give_up(subject)
            case "grace":
                self._settle_reads(subject, now_ns)
            case "release_retry":
                pass  # the timer kept `_follow_up` from it
            case "backoff":
                self._step_peer(peer.BackoffElapsed(), now_ns)
            case "drain":
                self._step_peer(peer.QuiesceTimeout(), now_ns)
            case _:
                assert_never(kind)

    def _follow_up(self, now_ns: int) -> None:
        """After every event: what follows from the counts, and nobody may wait for something that will not come."""
        if self._parked and not self._passes_to_successor:
            self._take_parked(now_ns)
        current = self._connections.current
        if current is not None and self._peer.state is peer.State.DRAINING and not current.open_reads:
            self._step_peer(peer.ReadsDrained(), now_ns)
        for connection in self._connections.given_up():
            if not (connection.open_reads or connection.is_tearing_down):
                self._tear_down(connection)
        if self._peer.state is peer.State.IDLE and (self._waiting or self._proving or self._has_something_to_say):
            self._step_peer(peer.Wanted(), now_ns)
        elif (self._waiting or self._proving) and self.is_retired:
            self._announce_failed(PeerRetired(peer=self.engine_id), now_ns)
        if self.is_finished:
            self._claims.drop_all()
            while self._parked:
                self._outcome.effects.append(PassToSuccessor(event=self._unpark(now_ns)))

    @property
    def _has_something_to_say(self) -> bool:
        """Whether leases alone are worth a handshake: somebody wants one, or is owed its release and the last attempt
        to say so was a while ago."""
        is_owed = len(self._claims) > 0 and self._departure.state is not departure.State.LEFT
        return self._claims.are_wanted or (is_owed and ("release_retry", None) not in self._timers)

    @property
    def _is_awaited(self) -> bool:
        return bool(self._waiting or self._proving or self._claims.are_wanted)

    def _of_peer(self) -> dict[str, Any]:
        return {"peer": self.engine_id, "address": str(self.address)}

    # --- for people -------------------------------------------------------------------------------------------------

    def view(self) -> EngineView:
        connections, current = self._connections, self._connections.current
        is_backing_off = self._peer.state in (peer.State.BACKOFF, peer.State.INCOMPATIBLE)
        return EngineView(
            peer=self._peer,
            is_builtin=current is not None and current.is_builtin,
            ranks=current.ranks if current is not None else 0,
            backoff_until_ns=self._backoff_until_ns if is_backing_off else None,
            leaves_ns=self._departure.until_ns if self._departure.state is departure.State.LEAVING else None,
            requests=len(self._requests),
            claims=len(self._claims),
            reads=sum(len(each.open_reads) for each in connections),
            unsettled=sum(len(each.unsettled) for each in connections),
            quarantined=len(connections.quarantined()),
        )

    def request_ids(self) -> list[str]:
        """The ids of the requests that have not ended, in order of arrival."""
        return list(self._requests)

    def view_request(self, request_id: str) -> RequestView | None:
        """None: it has ended, or was never started."""
        value = self._requests.get(request_id)
        if value is None:
            return None
        deadline_ns = self._timers.get(("deadline", request_id))
        until_ns = None
        if value.state is request.State.DRAINING:
            until_ns = self._timers.get(("quiesce", request_id))
        elif value.state is request.State.PROVING:
            until_ns = self._timers.get(("proof", request_id))
        return RequestView(
            value=value,
            waits_for=waits_for(value, self._peer.state),
            started_ns=deadline_ns - self._limits.request_ns if deadline_ns is not None else None,
            until_ns=until_ns if until_ns is not None else deadline_ns,
        )

    def queued(self) -> list[tuple[str, LeaseName]]:
        """The requests that were announced and not started, with the leases that they want."""
        return [(user, claim.lease) for claim in self._claims for user in claim.users if user not in self._requests]

    def claimed(self) -> list[LeaseName]:
        """The leases that somebody here wants, or that are owed a release."""
        return [claim.lease for claim in self._claims]

    def view_claim(self, lease: LeaseName) -> ClaimView | None:
        claim = self._claims.get(lease)
        if claim is None:
            return None
        return ClaimView(
            lease=lease,
            heard_ns=claim.heard_ns,
            users=tuple(claim.users),
            queued=tuple(user for user in claim.users if user not in self._requests),
            holds=tuple(claim.holds),
        )

    def quarantined(self) -> list[tuple[str, int]]:
        """Requests that ended while READs might still write into their blocks, with how many of these are left."""
        return self._connections.quarantined()

    # --- for the explorer -------------------------------------------------------------------------------------------

    def copy(self) -> RemoteEngine:
        other = type(self)(
            self.engine_id, self.address, self._limits, identity=self._identity, observe=self._outcome.observe
        )
        other._peer = self._peer
        other._departure = self._departure
        other._requests = dict(self._requests)
        other._waiting, other._proving = dict(self._waiting), dict(self._proving)
        other._parked = list(self._parked)
        other._life = self._life
        other._registration, other._attempted_registration = self._registration, self._attempted_registration
        other._attempted_address, other._leaves_address = self._attempted_address, self._leaves_address
        other._is_stopped = self._is_stopped
        other._backoff_until_ns = self._backoff_until_ns
        other._timers = self._timers.copy()
        other._connections = self._connections.copy()
        other._claims = self._claims.copy(other._timers, other._outcome, other._connections.current)
        return other

    def freeze(self, now_ns: int) -> Hashable:
        """Equal for two cores that behave alike from `now_ns` on, but for the jitter of the longest pauses. Times are
        relative to it."""
        return (
            self.address,
            msgspec.structs.replace(self._peer, failures=min(self._peer.failures, FAILURES_ALIKE)),
            self._departure.state,
            tuple((now_ns - came_ns, event) for came_ns, event in self._parked),
            self._life,
            (self._registration, self._attempted_registration, self._attempted_address, self._leaves_address),
            self._is_stopped,
            frozenset(self._freeze_request(each, now_ns) for each in self._requests.values()),
            self._timers.freeze(now_ns),
            self._connections.freeze(now_ns),
            self._claims.freeze(now_ns),
        )

    def _freeze_request(self, value: request.Request, now_ns: int) -> request.Request:
        if not (value.last_completed_ns or value.age_ns):
            return value
        last_completed_ns = value.last_completed_ns and value.last_completed_ns - now_ns
        return msgspec.structs.replace(value, last_completed_ns=last_completed_ns, age_ns=0)


MACHINES: tuple[Machine[Any, Any], ...] = (request.MACHINE, peer.MACHINE, hold.MACHINE, departure.MACHINE)
"""What is composed here."""
