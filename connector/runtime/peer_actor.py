"""The actor of one remote engine: its connection, and every request that reads from it.

A dead or hung engine costs only its own requests, because nothing here is shared with the actors of other engines but
the NIXL owner, which never waits for a peer.

The actor is a loop over one mailbox and one timer queue. Handling a message is synchronous: it steps machines and
executes their effects. What takes time (handshakes, notifications, tearing down) runs in a child task that ends by
sending a message to the same mailbox. So there is no await between looking at a machine and stepping it.

Machines: one `peer` machine, one `request` machine per request. Who waits for the peer is read off the request
machines (state pending_handshake), not kept twice.

Releasing. Several requests may name the same blocks (parallel samples of one prompt carry the same parameters). The
peer is told that they may be freed when the last request that this engine knows of has ended or is settled otherwise;
a request that comes later is refused, because what it names may be somebody else's KV by then.

Proof of the lease. The prefill engine says when the lease ends, on its own clock; the handshake measured that clock.
`_proof` converts the deadline to the earliest local time it can mean (half a round trip, drift since then), and takes
off the configured margin. A handshake that was slow measures badly, which may cost a short lease all of its proof;
then the clock is measured anew, once per request, before a request is told that nothing is proven.

A built-in prefill engine says nothing: then the lease is assumed to have begun when this engine first heard of the
request, which is what its default settings make likely, not certain (basis `assumed`).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import msgspec
import trio

from connector.layout.geometry import BlockIdError
from connector.ports.nixl import NixlCallFailed, PortClosed
from connector.runtime.block_tables import Resolved, resolve
from connector.runtime.clock import NS_PER_SECOND, ClockSample, to_ns
from connector.runtime.consumed import ConsumedBlocks
from connector.runtime.context import ActorContext
from connector.runtime.handshake import Connection, RemoteRank, connect, disconnect, exchange
from connector.runtime.mailbox import Mailbox
from connector.runtime.messages import (
    AbortPull,
    HandshakeFailureNoted,
    NotificationFailureNoted,
    PeerAddress,
    PullCommand,
    ReceiveEnded,
    StartPull,
    TrackLease,
)
from connector.runtime.nixl_owner import Quarantine, ReadEnded, ReadOrder
from connector.runtime.request_run import RequestRun, start_run
from connector.runtime.timers import TimerQueue
from connector.runtime.tracked import Tracked
from connector.wire.handshake import HandshakeError
from connector.wire.notifications import encode_heartbeats, encode_release
from statemachine import peer, request
from statemachine.failures import (
    ActorCrashed,
    BadParams,
    BlocksConsumed,
    Failure,
    HandshakeRefused,
    Incompatible,
    PeerBackoff,
    PeerFailure,
    PeerRestarted,
    PeerRetired,
    TransferError,
)
from statemachine.kernel import Effect, Effects, Event, ProtocolError

HEARTBEATS_PER_LEASE = 6
CLOCK_SAMPLE_AGE_SECONDS = 60.0
"""An older sample is renewed in the background when a request uses it."""
PENDING_RELEASES_MAX = 1024
"""Releases kept for a peer that is not connected; beyond that its leases end by themselves."""


class HandshakeEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The handshake task is over."""

    connection: Connection | None
    failure: PeerFailure | None


class ReadMoved(msgspec.Struct, frozen=True, kw_only=True):
    """A READ order on `connection` has ended."""

    connection: Connection
    ended: ReadEnded


class ProbeEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The side channel was asked again: on behalf of a request for the incarnation, or of nobody for the clock."""

    request_id: str | None
    address: PeerAddress
    incarnation: str | None
    clock_sample: ClockSample | None
    failure: PeerFailure | None


class SendFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A notification on `connection` could not be sent."""

    connection: Connection
    failure: TransferError


class RetirePeer(msgspec.Struct, frozen=True, kw_only=True):
    """Give this engine up."""


class StopPeer(msgspec.Struct, frozen=True, kw_only=True):
    """The connector stops: fail every request."""

    failure: Failure


PeerMessage: TypeAlias = PullCommand | HandshakeEnded | ReadMoved | ProbeEnded | SendFailed | RetirePeer | StopPeer

TimerKey: TypeAlias = tuple[Literal["deadline", "lease", "quiesce"], str] | Literal["backoff", "drain", "heartbeat"]

_HEARTBEAT: TimerKey = "heartbeat"


class PeerActor:
    """See the module's docstring.

    Args:
        consumed: what was released before, by this actor or by one before it; this one adds to it.
        on_request_ended: called with the id of every request that this actor is done with.
        on_connected: called with the address when a handshake has succeeded.
    """

    def __init__(
        self,
        context: ActorContext,
        address: PeerAddress,
        *,
        consumed: ConsumedBlocks,
        on_request_ended: Callable[[str], None],
        on_connected: Callable[[PeerAddress], None],
    ) -> None:
        self._context = context
        self.address = address
        self._consumed = consumed
        self._on_request_ended = on_request_ended
        self._on_connected = on_connected
        self.inbox: Mailbox[PeerMessage] = Mailbox()
        self.last_used_ns = context.clock.now_ns()
        self._timers: TimerQueue[TimerKey] = TimerQueue()
        self._peer = Tracked(
            peer.MACHINE,
            peer.Peer(engine_id=address.engine_id),
            context.recorder,
            subject=address.engine_id,
            peer=address.engine_id,
        )
        self._runs: dict[str, RequestRun] = {}
        self._connection: Connection | None = None
        self._lingering: list[Connection] = []
        self._disconnects: dict[trio.Event, None] = {}
        self._holders: dict[str, set[str]] = {}
        self._owed_releases: set[str] = set()
        self._pending_releases: dict[str, None] = {}
        self._measuring_clock = False
        self._backoff_until_ns = 0
        self._nursery: trio.Nursery | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    @property
    def is_unused(self) -> bool:
        """Nobody waits for this peer or reads from it."""
        return not self._runs and not self._holders and not self._lingering and len(self.inbox) == 0

    @property
    def is_connected(self) -> bool:
        return self._peer.value.state in (peer.State.READY, peer.State.DRAINING)

    @property
    def _is_finished(self) -> bool:
        return self._peer.is_terminal and not self._runs and not self._lingering

    async def run(self) -> None:
        """Until the peer is gone and everything that touched it has ended."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while not self._is_finished:
                await self.inbox.wait(self._timers.seconds_to_next(self._context.clock.now_ns()))
                while (message := self.inbox.take_one()) is not None:
                    self._handle(message)
                    self._settle()
                for key in self._timers.pop_due(self._context.clock.now_ns()):
                    self._fire(key)
                    self._settle()

    def recover(self, error: BaseException) -> None:
        """After `run` raised: fail what was in hand, so that the actor can run again."""
        failure = ActorCrashed(actor=f"peer actor of {self.address.engine_id}", error=repr(error))
        self._measuring_clock = False
        if self._peer.value.state is peer.State.HANDSHAKING:
            # Its task was cancelled with the nursery, and took back what it had loaded.
            refused = HandshakeRefused(peer=self.address.engine_id, address=str(self.address), detail=str(failure))
            self.inbox.put(HandshakeEnded(connection=None, failure=refused))
        for run in list(self._runs.values()):
            try:
                self._apply(run, request.ShellFailed(failure=failure))
            except Exception as second_error:
                self._end_without_machine(run, ActorCrashed(actor=failure.actor, error=repr(second_error)))

    # --- messages -----------------------------------------------------------------------------------------------

    def _handle(self, message: PeerMessage) -> None:
        match message:
            case StartPull():
                self._start(message)
            case AbortPull(request_id=request_id):
                if (run := self._runs.get(request_id)) is not None:
                    self._apply(run, request.Aborted())
            case TrackLease():
                self._track(message)
            case HandshakeEnded():
                self._end_handshake(message)
            case ReadMoved():
                self._end_read(message.connection, message.ended)
            case ProbeEnded():
                self._end_probe(message)
            case SendFailed():
                self._context.emit(NotificationFailureNoted())
                if message.failure.transport_lost and message.connection is self._connection:
                    self._step_peer(peer.ConnectionSuspect(failure=message.failure))
            case RetirePeer():
                self._step_peer(peer.Retired())
            case StopPeer(failure=failure):
                for run in list(self._runs.values()):
                    self._apply(run, request.ShellFailed(failure=failure))
                self._holders.clear()
                self._step_peer(peer.Retired())

    def _fire(self, key: TimerKey) -> None:
        match key:
            case (kind, request_id):
                # Several timers of one request may be due together, and the first may end it.
                if (run := self._runs.get(request_id)) is not None:
                    self._apply(run, self._timer_event(kind))
            case "backoff":
                self._step_peer(peer.BackoffElapsed())
            case "drain":
                self._step_peer(peer.QuiesceTimeout())
            case "heartbeat":
                self._beat()

    def _timer_event(self, kind: Literal["deadline", "lease", "quiesce"]) -> Event:
        options = self._context.options
        match kind:
            case "deadline":
                return request.DeadlinePassed(timeout_seconds=options.request_timeout_seconds)
            case "lease":
                return request.LeaseLapsed(now_ns=self._context.clock.now_ns())
            case "quiesce":
                return request.QuiesceTimeout(waited_seconds=options.quiesce_timeout_seconds)

    def _start(self, command: StartPull) -> None:
        context = self._context
        now_ns = context.clock.now_ns()
        self.last_used_ns = now_ns
        run = start_run(
            command,
            retries=context.options.transfer_retries,
            heard_ns=now_ns - to_ns(command.age_seconds),
            recorder=context.recorder,
        )
        self._runs[command.request_id] = run
        if command.awaited and (self.address.engine_id, command.remote_request_id) in self._consumed:
            consumed = BlocksConsumed(
                peer=self.address.engine_id, address=str(self.address), remote_request_id=command.remote_request_id
            )
            self._apply(run, request.PeerFailed(failure=consumed))
            return
        self._hold(command.remote_request_id, command.request_id)
        self._timers.set(("deadline", command.request_id), now_ns + to_ns(context.options.request_timeout_seconds))
        self._want()

    def _want(self) -> None:
        """Requests are waiting. In back-off they are told at once that the peer failed, and when it is tried again."""
        self._step_peer(peer.Wanted())

    # --- peer machine -------------------------------------------------------------------------------------------

    def _step_peer(self, event: Event) -> None:
        for effect in self._peer.apply(event):
            self._execute_for_peer(effect, event)

    def _execute_for_peer(self, effect: Effect, cause: Event) -> None:
        match effect:
            case peer.StartHandshake():
                # Requests may name the engine at different addresses; the latest one that waits is tried. A working
                # connection is kept whatever they say: if the engine did move, READs fail or its incarnation differs.
                for run in self._waiting():
                    self.address = run.command.peer
                self._spawn(self._handshake, self.address)
            case peer.AnnounceReady():
                for run in self._waiting():
                    self._offer(run)
                self._flush_releases()
            case peer.AnnounceFailed():
                self._fail_waiting(effect, rejected=isinstance(cause, peer.Wanted))
            case peer.StartBackoff(failures=failures):
                self._start_backoff(failures)
            case peer.DrainReads():
                delay_ns = to_ns(self._context.options.quiesce_timeout_seconds)
                self._timers.set("drain", self._context.clock.now_ns() + delay_ns)
            case peer.TearDownConnection():
                connection, self._connection = self._connection, None
                assert connection is not None
                self._timers.cancel("drain")
                self._start_disconnect(connection)
            case peer.AbandonConnection():
                self._abandon_connection()

    def _waiting(self) -> list[RequestRun]:
        return [run for run in self._runs.values() if run.state is request.State.PENDING_HANDSHAKE]

    def _fail_waiting(self, effect: peer.AnnounceFailed, *, rejected: bool) -> None:
        failure = effect.failure
        if rejected and self._peer.value.state is peer.State.BACKOFF:
            remaining_ns = max(0, self._backoff_until_ns - self._context.clock.now_ns())
            failure = PeerBackoff(
                peer=self.address.engine_id,
                address=str(self.address),
                retry_in_seconds=remaining_ns / NS_PER_SECOND,
                last=failure.kind,
            )
        for run in self._waiting():
            if effect.incompatible:
                self._apply(run, request.PeerIncompatible(failure=failure))
            else:
                self._apply(run, request.PeerFailed(failure=failure))
        self._pending_releases.clear()

    def _start_backoff(self, failures: int) -> None:
        options = self._context.options
        if self._peer.value.state is peer.State.INCOMPATIBLE:
            delay_seconds = options.incompatible_backoff_seconds
        else:
            doublings = min(failures - 1, 30)
            delay_seconds = min(options.backoff_max_seconds, options.backoff_initial_seconds * math.pow(2, doublings))
        delay_seconds *= self._context.jitter.uniform(0.5, 1.0)
        self._backoff_until_ns = self._context.clock.now_ns() + to_ns(delay_seconds)
        self._timers.set("backoff", self._backoff_until_ns)

    def _end_handshake(self, message: HandshakeEnded) -> None:
        if self._peer.value.state is not peer.State.HANDSHAKING:
            # The actor crashed while the task was ending, and `recover` has answered for it.
            if message.connection is not None:
                self._start_disconnect(message.connection)
            return
        if message.connection is not None:
            self._connection = message.connection
            self._on_connected(self.address)
            self._step_peer(peer.HandshakeSucceeded())
            return
        failure = message.failure
        assert failure is not None
        self._context.emit(HandshakeFailureNoted())
        self._context.log_failure(f"handshake with {self.address.engine_id}", failure)
        if isinstance(failure, Incompatible):
            self._step_peer(peer.HandshakeIncompatible(failure=failure))
        else:
            self._step_peer(peer.HandshakeFailed(failure=failure))

    def _settle(self) -> None:
        """After every message: what follows from the counts, and nobody may wait for something that will not come."""
        connection = self._connection
        if self._peer.value.state is peer.State.DRAINING and connection is not None and connection.open_reads == 0:
            self._step_peer(peer.ReadsDrained())
        for lingering in [each for each in self._lingering if each.open_reads == 0]:
            self._lingering.remove(lingering)
            self._start_disconnect(lingering)
        if self._peer.value.state is peer.State.IDLE and self._waiting():
            self._want()
        elif self._peer.value.retiring or self._peer.is_terminal:
            for run in self._waiting():
                self._apply(run, request.PeerFailed(failure=PeerRetired(peer=self.address.engine_id)))

    def _abandon_connection(self) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        self._lingering.append(connection)
        failure = self._peer.value.failure
        assert failure is not None
        for run in list(self._runs.values()):
            if run.state is request.State.READING:
                self._apply(run, request.PeerLost(failure=failure))

    # --- request machines ---------------------------------------------------------------------------------------

    def _apply(self, run: RequestRun, event: Event) -> None:
        try:
            effects = run.machine.apply(event)
        except ProtocolError as error:
            # A bug in the shell costs the one request that it concerns.
            self._end_without_machine(run, ActorCrashed(actor="request machine", error=str(error)))
            return
        self._execute(run, effects)

    def _execute(self, run: RequestRun, effects: Effects) -> None:
        request_id = run.request_id
        for effect in effects:
            match effect:
                case request.PostReads():
                    self._post_reads(run)
                case request.StartQuiesceTimer():
                    delay_ns = to_ns(self._context.options.quiesce_timeout_seconds)
                    self._timers.set(("quiesce", request_id), self._context.clock.now_ns() + delay_ns)
                case request.AwaitPeer():
                    self._timers.cancel(("quiesce", request_id))
                    self._want()
                case request.SendRelease():
                    self._owed_releases.add(run.command.remote_request_id)
                case request.Report():
                    self._report(run, effect)
        if run.machine.is_terminal and request_id in self._runs:
            self._forget(run)

    def _forget(self, run: RequestRun) -> None:
        request_id = run.request_id
        del self._runs[request_id]
        for key in ("deadline", "lease", "quiesce"):
            self._timers.cancel((key, request_id))
        self._leave(run.command.remote_request_id, request_id)
        self._on_request_ended(request_id)

    def _report(self, run: RequestRun, effect: request.Report) -> None:
        if effect.failure is not None:
            self._context.log_failure(run.request_id, effect.failure)
        # An actor that crashed on the end of a READ never saw it; the owner did, and would lift no quarantine any more.
        quarantined = effect.quarantined and run.quarantine is not None and run.quarantine.open_reads > 0
        if quarantined:
            assert run.quarantine is not None
            self._context.nixl.quarantine(run.quarantine)
        self._context.emit(
            ReceiveEnded(
                request_id=run.request_id,
                failure=effect.failure,
                local_block_ids=run.command.local_block_ids,
                quarantined=quarantined,
                landed=run.resolved.landed if run.resolved is not None else None,
                unfilled=run.resolved.unfilled if run.resolved is not None else None,
            )
        )

    def _end_without_machine(self, run: RequestRun, failure: ActorCrashed) -> None:
        """The machine cannot go on: report what is safe to say, and keep the blocks if anything may write to them."""
        open_reads = run.quarantine.open_reads if run.quarantine is not None else 0
        if run.command.awaited and not run.machine.is_terminal:
            self._report(run, request.Report(failure=failure, quarantined=open_reads > 0))
        if run.request_id in self._runs:
            self._forget(run)

    def _offer(self, run: RequestRun) -> None:
        """The peer is ready: can this request read from it?"""
        connection = self._connection
        assert connection is not None
        expected = run.command.incarnation
        if expected is not None and connection.incarnation is not None and expected != connection.incarnation:
            self._doubt(run, connection.incarnation)
            return
        resolved = self._resolve_blocks(run, connection)
        if resolved is None:
            return
        now_ns = self._context.clock.now_ns()
        proof = self._proof(run, connection)
        if self._is_clock_to_blame(run, proof, connection, now_ns):
            self._measure_clock()
            return
        self._timers.set(("lease", run.request_id), proof.proven_until_ns)
        sample_age_ns = now_ns - connection.clock_sample.measured_ns
        if sample_age_ns > to_ns(CLOCK_SAMPLE_AGE_SECONDS):
            self._measure_clock()
        self._apply(run, request.PeerReady(now_ns=now_ns, reads=len(resolved.reads), proof=proof))

    def _is_clock_to_blame(self, run: RequestRun, proof: request.Proof, connection: Connection, now_ns: int) -> bool:
        """Whether a request that nothing is proven for should wait until the clock is measured anew. Only once: the
        second time it takes what there is."""
        if run.clock_asked:
            return run.clock_awaited
        # The error was taken off once, and the true end may lie as far on the other side of what was measured.
        latest_ns = proof.proven_until_ns + 2 * connection.clock_sample.error_ns
        if not (run.command.awaited and proof.basis == "granted" and proof.proven_until_ns <= now_ns < latest_ns):
            return False
        run.clock_asked = run.clock_awaited = True
        return True

    def _measure_clock(self) -> None:
        if not self._measuring_clock:
            self._measuring_clock = True
            self._spawn(self._ask_again, self.address, None)

    def _resolve_blocks(self, run: RequestRun, connection: Connection) -> Resolved | None:
        """Look up the descriptors of the request's blocks. None when the peer does not have them: it has failed."""
        try:
            run.resolved = resolve(connection.plan, run.command)
        except BlockIdError as error:
            failure = BadParams(field="remote_block_ids", expected="blocks that the engine has", found=str(error))
            self._apply(run, request.ParamsRejected(failure=failure))
            return None
        return run.resolved

    def _proof(self, run: RequestRun, connection: Connection) -> request.Proof:
        options = self._context.options
        margin_ns = to_ns(options.lease_margin_seconds)
        expires_at = run.command.lease_expires_at
        if expires_at is None or connection.incarnation is None:
            lease_ns = to_ns(options.kv_lease_duration)
            return request.Proof(proven_until_ns=run.heard_ns + lease_ns - margin_ns, basis="assumed")
        earliest_ns = connection.clock_sample.earliest_local_ns(to_ns(expires_at))
        return request.Proof(proven_until_ns=earliest_ns - margin_ns, basis="granted")

    def _post_reads(self, run: RequestRun) -> None:
        connection = self._connection
        assert connection is not None
        resolved = run.resolved
        assert resolved is not None
        local_block_ids = run.command.local_block_ids
        quarantine = Quarantine(local_block_ids=local_block_ids, open_reads=len(resolved.reads))
        run.quarantine = quarantine
        connection.open_reads += len(resolved.reads)
        for number, read in enumerate(resolved.reads):
            source = connection.sources[read.source]
            self._context.nixl.order(
                ReadOrder(
                    request_id=run.request_id,
                    read=number,
                    peer=self.address.engine_id,
                    blocks=len(local_block_ids),
                    local=source.local_list,
                    local_ids=read.local_ids,
                    remote=source.remote_list,
                    remote_ids=read.remote_ids,
                    quarantine=quarantine,
                    is_wanted=lambda: run.state is request.State.READING,
                    on_end=lambda ended: self._post_read_end(connection, ended),
                )
            )

    def _post_read_end(self, connection: Connection, ended: ReadEnded) -> None:
        self.inbox.put(ReadMoved(connection=connection, ended=ended))

    def _end_read(self, connection: Connection, ended: ReadEnded) -> None:
        connection.open_reads -= 1
        failure = ended.failure
        # The peer first: a request that may try again must find it draining, not ready on a broken connection.
        if failure is not None and failure.transport_lost and connection is self._connection:
            self._step_peer(peer.ConnectionSuspect(failure=failure))
        run = self._runs.get(ended.request_id)
        if run is None:
            return
        if ended.skipped:
            self._apply(run, request.ReadSkipped(read=ended.read, now_ns=ended.ended_ns))
        elif failure is not None:
            self._apply(run, request.ReadFailed(read=ended.read, now_ns=ended.ended_ns, failure=failure))
        else:
            run.machine.bytes = (run.machine.bytes or 0) + ended.bytes
            run.machine.descriptors = (run.machine.descriptors or 0) + ended.descriptors
            self._apply(run, request.ReadCompleted(read=ended.read, completed_ns=ended.ended_ns))

    # --- restarted peers ----------------------------------------------------------------------------------------

    def _doubt(self, run: RequestRun, connected: str) -> None:
        """The request was granted by another incarnation than the one we are connected to: which is the newer?

        The connected one is, if it has answered since we heard of the request; otherwise the peer is asked again.
        """
        connection = self._connection
        assert connection is not None
        if run.probing:
            return
        if not run.probed and connection.clock_sample.measured_ns <= run.heard_ns:
            run.probed = run.probing = True
            self._spawn(self._ask_again, run.command.peer, run.request_id)
            return
        self._apply(run, request.PeerFailed(failure=self._restarted(run, connected)))

    def _restarted(self, run: RequestRun, found: str) -> PeerRestarted:
        return PeerRestarted(
            peer=self.address.engine_id,
            address=str(self.address),
            expected_incarnation=run.command.incarnation or "",
            found_incarnation=found,
        )

    def _end_probe(self, message: ProbeEnded) -> None:
        connection = self._connection if self._peer.value.state is peer.State.READY else None
        if message.request_id is None:
            self._measuring_clock = False
            same_process = connection is not None and message.incarnation == connection.incarnation
            if connection is not None and same_process and message.clock_sample is not None:
                connection.clock_sample = message.clock_sample
            unproven = [each for each in self._waiting() if each.clock_awaited]
            for each in unproven:
                each.clock_awaited = False
            if connection is not None:
                for each in unproven:
                    self._offer(each)
            return
        run = self._runs.get(message.request_id)
        if run is None:
            return
        run.probing = False
        if connection is None or run.state is not request.State.PENDING_HANDSHAKE:
            return  # A new handshake is on its way; it answers the same question.
        if message.failure is not None:
            self._apply(run, request.PeerFailed(failure=message.failure))
        elif message.incarnation == connection.incarnation:
            self._apply(run, request.PeerFailed(failure=self._restarted(run, str(message.incarnation))))
        else:
            failure = PeerRestarted(
                peer=self.address.engine_id,
                address=str(message.address),
                expected_incarnation=str(connection.incarnation),
                found_incarnation=str(message.incarnation),
            )
            self._step_peer(peer.ConnectionSuspect(failure=failure))
            self._want()

    # --- leases on the peer -------------------------------------------------------------------------------------

    def _track(self, command: TrackLease) -> None:
        self.last_used_ns = self._context.clock.now_ns()
        if self._peer.value.state is peer.State.IDLE:
            self.address = command.peer
        self._hold(command.remote_request_id, command.request_id)
        # Connecting now takes the handshake off the request's way.
        if self._peer.value.state is peer.State.IDLE:
            self._want()

    def _hold(self, remote_request_id: str, request_id: str) -> None:
        """`request_id` wants these blocks: their lease is kept alive, and they are not released before it ends."""
        self._holders.setdefault(remote_request_id, set()).add(request_id)
        if _HEARTBEAT not in self._timers:
            self._schedule_heartbeat()

    def _schedule_heartbeat(self) -> None:
        interval_ns = to_ns(self._context.options.kv_lease_duration / HEARTBEATS_PER_LEASE)
        self._timers.set(_HEARTBEAT, self._context.clock.now_ns() + interval_ns)

    def _beat(self) -> None:
        if not self._holders:
            return
        self._schedule_heartbeat()
        if self._peer.value.state is peer.State.READY:
            for message in encode_heartbeats(self._holders):
                for rank in self._connected_ranks():
                    self._notify(rank, message)
        elif self._peer.value.state is peer.State.IDLE:
            self._want()

    def _leave(self, remote_request_id: str, request_id: str) -> None:
        """One request less wants these blocks; the last one lets go of them."""
        holders = self._holders.get(remote_request_id)
        if holders is None:
            return
        holders.discard(request_id)
        if holders:
            return
        del self._holders[remote_request_id]
        if remote_request_id not in self._owed_releases:
            return
        self._owed_releases.discard(remote_request_id)
        self._consumed.add(self.address.engine_id, remote_request_id)
        if len(self._pending_releases) < PENDING_RELEASES_MAX:
            self._pending_releases[remote_request_id] = None
        if self._peer.value.state is peer.State.READY:
            self._flush_releases()

    def _flush_releases(self) -> None:
        for remote_request_id in self._pending_releases:
            for rank in self._connected_ranks():
                self._notify(rank, encode_release(remote_request_id, rank.consumers))
        self._pending_releases.clear()

    def _connected_ranks(self) -> tuple[RemoteRank, ...]:
        assert self._connection is not None
        return self._connection.ranks

    def _notify(self, rank: RemoteRank, message: bytes) -> None:
        connection = self._connection
        assert connection is not None
        self._spawn(self._send, connection, rank, message)

    # --- child tasks --------------------------------------------------------------------------------------------

    def _spawn(self, task: Callable[..., Awaitable[None]], *args: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(task, *args)

    async def _handshake(self, address: PeerAddress) -> None:
        connection: Connection | None = None
        failure: PeerFailure | None = None
        try:
            # The same agent can be added only after it was removed.
            for done in list(self._disconnects):
                await done.wait()
            connection = await connect(self._context, address)
        except HandshakeError as error:
            failure = error.failure
        except Exception as error:
            failure = _internal_error(address, error)
        self.inbox.put(HandshakeEnded(connection=connection, failure=failure))

    async def _ask_again(self, address: PeerAddress, request_id: str | None) -> None:
        incarnation: str | None = None
        clock_sample: ClockSample | None = None
        failure: PeerFailure | None = None
        try:
            exchanged = await exchange(self._context, address)
            incarnation, clock_sample = exchanged.incarnation, exchanged.clock_sample
        except HandshakeError as error:
            failure = error.failure
        except Exception as error:
            failure = _internal_error(address, error)
        self.inbox.put(
            ProbeEnded(
                request_id=request_id,
                address=address,
                incarnation=incarnation,
                clock_sample=clock_sample,
                failure=failure,
            )
        )

    async def _send(self, connection: Connection, rank: RemoteRank, message: bytes) -> None:
        try:
            await self._context.nixl.port.send_notification(rank.agent, message)
        except NixlCallFailed as error:
            failure = TransferError(
                peer=self.address.engine_id,
                operation=error.operation,
                error=error.error,
                transport_lost=error.transport_lost,
            )
            self.inbox.put(SendFailed(connection=connection, failure=failure))
        except PortClosed:
            return  # The owner reports a broken port to everybody.

    def _start_disconnect(self, connection: Connection) -> None:
        done = trio.Event()
        self._disconnects[done] = None
        self._spawn(self._disconnect, connection, done)

    async def _disconnect(self, connection: Connection, done: trio.Event) -> None:
        try:
            # An agent that stays loaded by accident could never be loaded again.
            with trio.CancelScope(shield=True):
                await disconnect(self._context, connection)
        finally:
            done.set()
            del self._disconnects[done]


def _internal_error(address: PeerAddress, error: Exception) -> HandshakeRefused:
    """A bug in the handshake costs the requests that wait for it, not the actor."""
    detail = f"internal error: {error!r}; please report it"
    return HandshakeRefused(peer=address.engine_id, address=str(address), detail=detail)
