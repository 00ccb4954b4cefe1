"""The model of a peer actor: one peer machine, the request machines of those who read from it, and their effects.

It does with every effect what `connector.runtime.peer_actor` does, in the same order, but where that waits for a child
task, this enters an event. What concerns the agent (the end of READs, descriptors, their quarantine) is the rank's,
in `decode`. A message that comes while the actor is down or its engine is paused waits until `closed_until_ns`; one
that comes after its end is lost, as its timers are.

Left out, because no machine sees it: what a message looks like on the wire, built-in peers (a lease is always granted
with a deadline), and the bounds on what is remembered of released requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from connector.runtime.clock import ClockSample
from connector.runtime.peer_actor import (
    CLOCK_SAMPLE_AGE_SECONDS,
    HEARTBEATS_PER_LEASE,
)
from connector.runtime.supervisor import RESTART_DELAY_SECONDS_MAX, RESTART_FORGIVEN_SECONDS
from statemachine import peer, request
from statemachine.failures import (
    ActorCrashed,
    BadParams,
    BlocksConsumed,
    Failure,
    HandshakeRefused,
    HandshakeTimeout,
    Incompatible,
    PeerBackoff,
    PeerRestarted,
    PeerRetired,
    TransferError,
    WrongEngine,
)
from statemachine.kernel import Effects, Event, ProtocolError
from tests.simulation.level1.heap import FOREVER, MICROSECOND, SECOND, Call
from tests.simulation.level1.transport import Connection, Read

if TYPE_CHECKING:
    from tests.simulation.level1.decode import DecodeRank, Pull
    from tests.simulation.level1.prefill import PrefillEngine, PrefillLife

SEND_NS = 20 * MICROSECOND
"""How long it takes to learn that a notification cannot be sent."""
_SAMPLE_AGE_NS = round(CLOCK_SAMPLE_AGE_SECONDS * SECOND)
_FORGIVEN_NS = round(RESTART_FORGIVEN_SECONDS * SECOND)
_RESTART_NS_MAX = round(RESTART_DELAY_SECONDS_MAX * SECOND)

_PENDING, _READING = request.State.PENDING_HANDSHAKE, request.State.READING
_READY, _DRAINING, _IDLE = peer.State.READY, peer.State.DRAINING, peer.State.IDLE
_REQUEST_ENDED = request.MACHINE.terminal
_PEER_ENDED = peer.MACHINE.terminal

_WANTED = peer.Wanted()
_CONNECTED = peer.HandshakeSucceeded()
_DRAINED = peer.ReadsDrained()
_DRAIN_TIMEOUT = peer.QuiesceTimeout()
_BACKOFF_ELAPSED = peer.BackoffElapsed()
_RETIRED = peer.Retired()
_ABORTED = request.Aborted()
_BAD_PARAMS = BadParams(field="remote_block_ids", expected="blocks that the engine has", found="others")


class Attempt:
    """The READs of one attempt of one request. `is_quarantined`: nobody waits for them any more."""

    __slots__ = ("is_quarantined", "open_reads", "posted")

    def __init__(self, reads: int) -> None:
        self.open_reads = reads
        self.posted: list[Read] = []
        self.is_quarantined = False


class Run:
    """One request on one rank."""

    __slots__ = (
        "actor",
        "attempt",
        "clock_asked",
        "clock_awaited",
        "is_over",
        "lease_until_ns",
        "probed",
        "probing",
        "pull",
        "rank",
        "value",
    )

    def __init__(self, rank: DecodeRank, pull: Pull, retries: int) -> None:
        prompt = pull.prompt
        self.rank = rank
        self.pull = pull
        self.value = request.Request(
            request_id=pull.request_id,
            remote_request_id=prompt.request_id,
            peer=prompt.life.engine_id,
            awaited=pull.awaited,
            retries_left=retries,
        )
        self.actor: PeerActor | None = None
        self.attempt: Attempt | None = None
        self.is_over = False
        self.probed = False
        self.probing = False
        self.clock_asked = False
        self.clock_awaited = False
        self.lease_until_ns = 0

    def names(self) -> tuple[str, int, str]:
        return self.rank.life.engine.name, self.rank.number, self.pull.request_id


class Question:
    """One question on the side channel: a handshake, a look at the incarnation for `run`, or at the clock."""

    __slots__ = ("actor", "is_handshake", "is_over", "run", "sent_ns")

    def __init__(self, actor: PeerActor, run: Run | None, *, is_handshake: bool) -> None:
        self.actor = actor
        self.run = run
        self.is_handshake = is_handshake
        self.is_over = False
        self.sent_ns = 0


class PeerActor:
    """See the module's docstring. `engine` stands for the address."""

    __slots__ = (
        "_backoff_at_ns",
        "_beats",
        "_clock",
        "_connection",
        "_crashes",
        "_drain_at_ns",
        "_heap",
        "_lingering",
        "_log",
        "_measuring_clock",
        "_owed_releases",
        "_pending_releases",
        "_questions",
        "_runs",
        "_started_ns",
        "_step_peer_machine",
        "_step_request",
        "_world",
        "closed_until_ns",
        "engine",
        "engine_id",
        "holders",
        "last_used_ns",
        "rank",
        "value",
    )

    def __init__(self, rank: DecodeRank, engine: PrefillEngine, engine_id: str) -> None:
        world = rank.world
        self.rank = rank
        self.engine = engine
        self.engine_id = engine_id
        self.value = peer.Peer(engine_id=engine_id)
        self.holders: dict[str, set[Pull]] = {}
        self.closed_until_ns = 0
        self.last_used_ns = world.heap.now_ns
        self._world = world
        self._heap = world.heap
        self._clock = rank.life.engine.clock
        self._log = world.log.extend
        self._step_peer_machine = world.step_peer
        self._step_request = world.step_request
        self._runs: dict[Pull, Run] = {}
        self._connection: Connection | None = None
        self._lingering: list[Connection] = []
        self._owed_releases: set[str] = set()
        self._pending_releases: dict[str, None] = {}
        self._questions: dict[Question, None] = {}
        self._measuring_clock = False
        self._beats = False
        self._backoff_at_ns = 0
        self._drain_at_ns = 0
        self._crashes = 0
        self._started_ns = world.heap.now_ns

    def names(self) -> tuple[str, int, str]:
        return self.rank.life.engine.name, self.rank.number, self.engine_id

    @property
    def is_unused(self) -> bool:
        """Nobody waits for this peer or reads from it."""
        return not self._runs and not self.holders and not self._lingering

    @property
    def is_connected(self) -> bool:
        return self.value.state in (_READY, _DRAINING)

    @property
    def is_clean(self) -> bool:
        """Nothing is left over of earlier requests."""
        return self.is_unused and not self._owed_releases and not self._questions

    def defer(self, call: Call, argument: Any) -> None:
        """It is down, or its engine is paused, or it is no more."""
        if self.closed_until_ns < FOREVER:
            self._heap.at(self.closed_until_ns, call, argument)

    # --- commands; the rank has looked whether the actor is open ----------------------------------------------------

    def start(self, run: Run) -> None:
        heap = self._heap
        pull = run.pull
        self.last_used_ns = heap.now_ns
        run.actor = self
        self._runs[pull] = run
        remote_id = pull.prompt.request_id
        if pull.awaited and remote_id in self.rank.consumed:
            consumed = BlocksConsumed(peer=self.engine_id, remote_request_id=remote_id)
            self._apply(run, request.PeerFailed(failure=consumed))
        else:
            self._hold(remote_id, pull)
            heap.unless_over(heap.now_ns + self._world.limits.request_ns, self._pass_deadline, run, run)
            self._step_peer(_WANTED)
        if self.value.state is not _READY or self._lingering:
            self._settle()

    def abort(self, run: Run) -> None:
        if not run.is_over:
            self._apply(run, _ABORTED)
            self._settle()

    def track(self, pull: Pull) -> None:
        """The request waits in the scheduler's queue."""
        self.last_used_ns = self._heap.now_ns
        self._hold(pull.prompt.request_id, pull)
        if self.value.state is _IDLE:
            self._step_peer(_WANTED)
        self._settle()

    def retire(self, _: None) -> None:
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self.retire, None)
            return
        self._step_peer(_RETIRED)
        self._settle()

    def stop(self, failure: Failure) -> None:
        """The connector stops."""
        for run in list(self._runs.values()):
            self._apply(run, request.ShellFailed(failure=failure))
        self.holders.clear()
        self._step_peer(_RETIRED)
        self._settle()

    def crash(self) -> None:
        """An exception ends its loop: what it had in hand fails, and it is down until it is started again."""
        heap = self._heap
        now_ns = heap.now_ns
        self._crashes = self._crashes + 1 if now_ns - self._started_ns < _FORGIVEN_NS else 1
        self._started_ns = now_ns + min(_RESTART_NS_MAX, 1_000_000 << self._crashes)
        self.closed_until_ns = self._started_ns
        for question in self._questions:
            question.is_over = True
        self._questions.clear()
        self._measuring_clock = False
        failure = ActorCrashed(actor=self.engine_id, error="a fault of the plan")
        if self.value.state is peer.State.HANDSHAKING:
            refused = HandshakeRefused(peer=self.engine_id, detail=str(failure))
            heap.at(self.closed_until_ns, self._end_handshake, refused)
        for run in list(self._runs.values()):
            self._apply(run, request.ShellFailed(failure=failure))

    # --- the peer machine -------------------------------------------------------------------------------------------

    def _step_peer(self, event: Event) -> None:
        before = self.value
        self._log((self._heap.now_ns, self, before.state, event.__class__))
        self.value, effects = self._step_peer_machine(before, event)
        for effect in effects:
            kind = effect.__class__
            if kind is peer.AnnounceReady:
                for run in self._waiting():
                    self._offer(run)
                if self._pending_releases:
                    self._flush_releases()
            elif kind is peer.AnnounceFailed:
                self._fail_waiting(effect, is_rejection=event is _WANTED)  # type: ignore[arg-type]
            elif kind is peer.StartHandshake:
                self._ask(Question(self, None, is_handshake=True))
            elif kind is peer.DrainReads:
                self._drain_at_ns = self._heap.now_ns + self._world.limits.quiesce_ns
                self._heap.at(self._drain_at_ns, self._end_drain, self._drain_at_ns)
            elif kind is peer.TearDownConnection:
                self._drain_at_ns = 0
                self._disconnect(self._give_up_connection())
            elif kind is peer.AbandonConnection:
                self._abandon_connection()
            elif kind is peer.StartBackoff:
                self._start_backoff(effect.failures)  # type: ignore[attr-defined]

    def _settle(self) -> None:
        """After every message: what follows from the counts, and nobody may wait for something that will not come."""
        connection = self._connection
        if self.value.state is _DRAINING and connection is not None and connection.open_reads == 0:
            self._step_peer(_DRAINED)
        if self._lingering:
            for lingering in [each for each in self._lingering if each.open_reads == 0]:
                self._lingering.remove(lingering)
                self._disconnect(lingering)
        is_over = self.value.state in _PEER_ENDED
        if self.value.state is _IDLE and self._waiting():
            self._step_peer(_WANTED)
        elif is_over or self.value.retiring:
            retired = request.PeerFailed(failure=PeerRetired(peer=self.engine_id))
            for run in self._waiting():
                self._apply(run, retired)
        if is_over and not self._runs and not self._lingering:
            self.closed_until_ns = FOREVER
            self.rank.forget(self)

    def _waiting(self) -> list[Run]:
        return [run for run in self._runs.values() if run.value.state is _PENDING]

    def _fail_waiting(self, effect: peer.AnnounceFailed, *, is_rejection: bool) -> None:
        failure = effect.failure
        if is_rejection and self.value.state is peer.State.BACKOFF:
            remaining_ns = max(0, self._backoff_at_ns - self._heap.now_ns)
            failure = PeerBackoff(peer=self.engine_id, retry_in_seconds=remaining_ns / SECOND, last=failure.kind)
        event: Event
        if effect.incompatible:
            event = request.PeerIncompatible(failure=failure)
        else:
            event = request.PeerFailed(failure=failure)
        for run in self._waiting():
            self._apply(run, event)
        self._pending_releases.clear()

    def _start_backoff(self, failures: int) -> None:
        limits = self._world.limits
        if self.value.state is peer.State.INCOMPATIBLE:
            delay_ns = round(self._world.options.incompatible_backoff_seconds * SECOND)
        else:
            delay_ns = min(limits.backoff_max_ns, limits.backoff_first_ns << min(failures - 1, 30))
        delay_ns = int(delay_ns * (0.5 + 0.5 * self.rank.random()))
        self._backoff_at_ns = self._heap.now_ns + delay_ns
        self._heap.at(self._backoff_at_ns, self._end_backoff, self._backoff_at_ns)

    def _end_backoff(self, at_ns: int) -> None:
        if self._backoff_at_ns != at_ns:
            return
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self._end_backoff, at_ns)
            return
        self._step_peer(_BACKOFF_ELAPSED)
        self._settle()

    def _end_drain(self, at_ns: int) -> None:
        if self._drain_at_ns != at_ns:
            return
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self._end_drain, at_ns)
            return
        self._step_peer(_DRAIN_TIMEOUT)
        self._settle()

    # --- connections ------------------------------------------------------------------------------------------------

    def _give_up_connection(self) -> Connection:
        connection, self._connection = self._connection, None
        assert connection is not None
        return connection

    def _abandon_connection(self) -> None:
        self._lingering.append(self._give_up_connection())
        failure = self.value.failure
        assert failure is not None
        for run in list(self._runs.values()):
            if run.value.state is _READING:
                self._apply(run, request.PeerLost(failure=failure))

    def _disconnect(self, connection: Connection) -> None:
        if connection.flying:
            self._world.oracles.complain("agent", f"{connection.life.incarnation} is removed under a READ")
        del self.rank.agents[connection.life]
        del connection.life.connections[connection]

    def _connect(self, life: PrefillLife, sample: ClockSample) -> None:
        if life in self.rank.agents:
            detail = "READs of the previous connection to it have not ended"
            self._end_handshake(HandshakeRefused(peer=self.engine_id, detail=detail))
            return
        connection = Connection(self.rank, life, sample)
        self.rank.agents[life] = connection
        life.connections[connection] = None
        self._connection = connection
        self.rank.retire_others(self)
        self._step_peer(_CONNECTED)
        self._settle()

    def _end_handshake(self, failure: Failure) -> None:
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self._end_handshake, failure)
            return
        if isinstance(failure, Incompatible):
            self._step_peer(peer.HandshakeIncompatible(failure=failure))
        else:
            self._step_peer(peer.HandshakeFailed(failure=failure))
        self._settle()

    # --- the side channel -------------------------------------------------------------------------------------------

    def _ask(self, question: Question) -> None:
        self._questions[question] = None
        question.sent_ns = self._clock.local_ns(self._heap.now_ns)
        link = self._world.links[self.rank.life.engine.name, self.engine.name]
        link.send(self.engine.answer, question)
        timeout_ns = self._heap.now_ns + self._world.limits.handshake_ns
        self._heap.unless_over(timeout_ns, self._give_up_asking, question, question)

    def hear(self, reply: tuple[Question, PrefillLife, bool, int]) -> None:
        """An answer, perhaps one that comes twice or too late."""
        question, life, is_incompatible, remote_ns = reply
        if question.is_over:
            return
        now_ns = self._heap.now_ns
        if self.closed_until_ns > now_ns:
            self.defer(self.hear, reply)
            return
        question.is_over = True
        del self._questions[question]
        sample = ClockSample.from_round_trip(
            sent_ns=question.sent_ns, received_ns=self._clock.local_ns(now_ns), remote_ns=remote_ns
        )
        failure: Failure | None = None
        if life.engine_id != self.engine_id:
            failure = WrongEngine(peer=self.engine_id, found=life.engine_id)
        elif is_incompatible:
            failure = Incompatible(peer=self.engine_id, field="model", local="one", remote="another")
        if not question.is_handshake:
            self._end_probe(question, life if failure is None else None, sample, failure)
        elif failure is None:
            self._connect(life, sample)
        else:
            self._end_handshake(failure)

    def _give_up_asking(self, question: Question) -> None:
        if question.is_over:
            return
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self._give_up_asking, question)
            return
        question.is_over = True
        del self._questions[question]
        timeout = HandshakeTimeout(peer=self.engine_id, timeout_seconds=self._world.options.handshake_timeout_seconds)
        if question.is_handshake:
            self._end_handshake(timeout)
        else:
            self._end_probe(question, None, None, timeout)

    def _end_probe(
        self, question: Question, life: PrefillLife | None, sample: ClockSample | None, failure: Failure | None
    ) -> None:
        connection = self._connection if self.value.state is _READY else None
        run = question.run
        if run is None:
            self._measuring_clock = False
            if connection is not None and life is connection.life and sample is not None:
                connection.clock_sample = sample
            unproven = [each for each in self._waiting() if each.clock_awaited]
            for each in unproven:
                each.clock_awaited = False
            if connection is not None:
                for each in unproven:
                    self._offer(each)
                self._settle()
            return
        run.probing = False
        if connection is None or run.is_over or run.value.state is not _PENDING:
            return  # A new handshake is on its way; it answers the same question.
        if failure is not None:
            self._apply(run, request.PeerFailed(failure=failure))
        elif life is connection.life:
            self._apply(run, request.PeerFailed(failure=self._restarted(run, life)))
        else:
            assert life is not None
            self._step_peer(peer.ConnectionSuspect(failure=self._restarted(run, life)))
            self._step_peer(_WANTED)
        self._settle()

    def _restarted(self, run: Run, found: PrefillLife) -> PeerRestarted:
        return PeerRestarted(
            peer=self.engine_id,
            expected_incarnation=run.pull.prompt.life.incarnation,
            found_incarnation=found.incarnation,
        )

    # --- request machines -------------------------------------------------------------------------------------------

    def _apply(self, run: Run, event: Event) -> None:
        before = run.value
        self._log((self._heap.now_ns, run, before.state, event.__class__))
        try:
            run.value, effects = self._step_request(before, event)
        except ProtocolError as error:
            self._world.oracles.complain("health", str(error))
            self._end_without_machine(run, ActorCrashed(actor="request machine", error=str(error)))
            return
        if effects:
            self._execute(run, effects)
        if run.value.state in _REQUEST_ENDED and not run.is_over:
            self._forget(run)

    def _execute(self, run: Run, effects: Effects) -> None:
        for effect in effects:
            kind = effect.__class__
            if kind is request.SendRelease:
                self._owed_releases.add(run.pull.prompt.request_id)
            elif kind is request.Report:
                self._report(run, effect)  # type: ignore[arg-type]
            elif kind is request.PostReads:
                self._post_reads(run, effect.reads)  # type: ignore[attr-defined]
            elif kind is request.StartQuiesceTimer:
                timeout_ns = self._heap.now_ns + self._world.limits.quiesce_ns
                self._heap.unless_over(timeout_ns, self._end_quiescing, (run, run.attempt), run)
            elif kind is request.AwaitPeer:
                self._step_peer(_WANTED)

    def _report(self, run: Run, effect: request.Report) -> None:
        attempt = run.attempt
        # The end of a READ may wait for an actor that is down, while timers that waited longer come first.
        is_quarantined = effect.quarantined and attempt is not None and attempt.open_reads > 0
        if is_quarantined:
            assert attempt is not None
            self.rank.quarantine(attempt)
        self.rank.life.hear_report(run.pull, self.rank.number, effect.failure, is_quarantined=is_quarantined)

    def _forget(self, run: Run) -> None:
        run.is_over = True
        del self._runs[run.pull]
        self._leave(run.pull.prompt.request_id, run.pull)

    def _end_without_machine(self, run: Run, failure: ActorCrashed) -> None:
        """The machine cannot go on: report what is safe to say, and keep the blocks if anything may write to them."""
        open_reads = run.attempt.open_reads if run.attempt is not None else 0
        if run.pull.awaited and run.value.state not in _REQUEST_ENDED:
            self._report(run, request.Report(failure=failure, quarantined=open_reads > 0))
        if not run.is_over:
            self._forget(run)

    def _offer(self, run: Run) -> None:
        """The peer is ready: can this request read from it?"""
        connection = self._connection
        assert connection is not None
        pull = run.pull
        if pull.prompt.life is not connection.life:
            self._doubt(run, connection.life)
            return
        if pull.has_bad_params:
            self._apply(run, request.ParamsRejected(failure=_BAD_PARAMS))
            return
        now_ns = self._heap.now_ns
        local_ns = self._clock.local_ns(now_ns)
        sample = connection.clock_sample
        proven_ns = sample.earliest_local_ns(pull.prompt.expires_at_ns) - self._world.limits.margin_ns
        if proven_ns <= local_ns and self._is_clock_to_blame(run, proven_ns + 2 * sample.error_ns, local_ns):
            self._measure_clock()
            return
        run.lease_until_ns = proven_ns
        at_ns = max(now_ns, self._clock.true_ns(proven_ns))
        self._heap.unless_over(at_ns, self._pass_lease, (run, proven_ns), run)
        if local_ns - sample.measured_ns > _SAMPLE_AGE_NS:
            self._measure_clock()
        reads = len(connection.sources) if pull.blocks else 0
        proof = request.Proof(proven_until_ns=proven_ns, basis="granted")
        self._apply(run, request.PeerReady(now_ns=local_ns, reads=reads, proof=proof))

    def _is_clock_to_blame(self, run: Run, latest_ns: int, now_ns: int) -> bool:
        """Whether a request that nothing is proven for should wait until the clock is measured anew, once."""
        if run.clock_asked:
            return run.clock_awaited
        if not run.pull.awaited or now_ns >= latest_ns:
            return False
        run.clock_asked = run.clock_awaited = True
        return True

    def _measure_clock(self) -> None:
        if not self._measuring_clock:
            self._measuring_clock = True
            self._ask(Question(self, None, is_handshake=False))

    def _doubt(self, run: Run, connected: PrefillLife) -> None:
        """The request was granted by another incarnation than the one we are connected to: which is the newer?"""
        if run.probing:
            return
        if not run.probed:
            run.probed = run.probing = True
            self._ask(Question(self, run, is_handshake=False))
            return
        self._apply(run, request.PeerFailed(failure=self._restarted(run, connected)))

    def _post_reads(self, run: Run, reads: int) -> None:
        connection = self._connection
        assert connection is not None
        run.attempt = attempt = Attempt(reads)
        connection.open_reads += reads
        for piece in range(reads):
            self.rank.order(Read(run, attempt, connection, piece))

    def end_read(self, read: Read) -> None:
        """An order has ended: its READ has, or it was refused or skipped."""
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self.end_read, read)
            return
        connection, run, failure = read.connection, read.run, read.failure
        connection.open_reads -= 1
        # The peer first: a request that may try again must find it draining, not ready on a broken connection.
        if failure is not None and failure.transport_lost and connection is self._connection:
            self._step_peer(peer.ConnectionSuspect(failure=failure))
        if not run.is_over:
            if read.is_skipped:
                self._apply(run, request.ReadSkipped(read=read.piece, now_ns=read.ended_ns))
            elif failure is not None:
                self._apply(run, request.ReadFailed(read=read.piece, now_ns=read.ended_ns, failure=failure))
            else:
                self._apply(run, request.ReadCompleted(read=read.piece, completed_ns=read.ended_ns))
        if self.value.state is not _READY or self._lingering:
            self._settle()

    # --- timers of requests -----------------------------------------------------------------------------------------

    def _pass_deadline(self, run: Run) -> None:
        if run.is_over:
            return
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self._pass_deadline, run)
            return
        timeout_seconds = self._world.options.request_timeout_seconds
        self._apply(run, request.DeadlinePassed(timeout_seconds=timeout_seconds))
        self._settle()

    def _pass_lease(self, timer: tuple[Run, int]) -> None:
        run, proven_ns = timer
        if run.is_over or run.lease_until_ns != proven_ns:
            return
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self._pass_lease, timer)
            return
        local_ns = self._clock.local_ns(self._heap.now_ns)
        if local_ns < proven_ns:  # The clock has slowed down since the timer was set.
            self._heap.at(self._clock.true_ns(proven_ns), self._pass_lease, timer)
            return
        self._apply(run, request.LeaseLapsed(now_ns=local_ns))
        self._settle()

    def _end_quiescing(self, timer: tuple[Run, Attempt]) -> None:
        run, attempt = timer
        if run.is_over or run.attempt is not attempt or run.value.state is _PENDING:
            return  # That attempt has drained.
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self._end_quiescing, timer)
            return
        waited_seconds = self._world.options.quiesce_timeout_seconds
        self._apply(run, request.QuiesceTimeout(waited_seconds=waited_seconds))
        self._settle()

    # --- leases on the peer -----------------------------------------------------------------------------------------

    def _hold(self, remote_id: str, pull: Pull) -> None:
        """`pull` wants these blocks: their lease is kept alive, and they are not released before it ends."""
        holders = self.holders.get(remote_id)
        if holders is None:
            self.holders[remote_id] = {pull}
        else:
            holders.add(pull)
        if not self._beats:
            self._beats = True
            self._heap.after(self._world.limits.lease_ns // HEARTBEATS_PER_LEASE, self._beat, None)

    def _beat(self, _: None) -> None:
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self._beat, None)
            return
        self._beats = False
        if not self.holders:
            return
        self._beats = True
        self._heap.after(self._world.limits.lease_ns // HEARTBEATS_PER_LEASE, self._beat, None)
        if self.value.state is _READY:
            connection = self._connection
            assert connection is not None
            if self._can_notify(connection):
                held = tuple(self.holders)
                for source in connection.sources:
                    connection.link.notify(source.hear_heartbeat, held)
        elif self.value.state is _IDLE:
            self._step_peer(_WANTED)
        self._settle()

    def _leave(self, remote_id: str, pull: Pull) -> None:
        """One request less wants these blocks; the last one lets go of them."""
        holders = self.holders.get(remote_id)
        if holders is None:
            return
        holders.discard(pull)
        if holders:
            return
        del self.holders[remote_id]
        if remote_id not in self._owed_releases:
            return
        self._owed_releases.discard(remote_id)
        self.rank.consumed.add(remote_id)
        self._pending_releases[remote_id] = None
        if self.value.state is _READY:
            self._flush_releases()

    def _flush_releases(self) -> None:
        connection = self._connection
        assert connection is not None
        if self._can_notify(connection):
            sender = self.rank.name
            for remote_id in self._pending_releases:
                release = (sender, remote_id, connection.consumers)
                for source in connection.sources:
                    connection.link.notify(source.hear_release, release)
        self._pending_releases.clear()

    def _can_notify(self, connection: Connection) -> bool:
        """On a broken connection a notification fails, and the actor hears of it a moment later."""
        if connection.is_broken:
            self._heap.after(SEND_NS, self._fail_to_send, connection)
            return False
        return True

    def _fail_to_send(self, connection: Connection) -> None:
        if self.closed_until_ns > self._heap.now_ns:
            self.defer(self._fail_to_send, connection)
            return
        if connection is self._connection:
            lost = TransferError(peer=self.engine_id, operation="notify", error="lost", transport_lost=True)
            self._step_peer(peer.ConnectionSuspect(failure=lost))
        self._settle()
