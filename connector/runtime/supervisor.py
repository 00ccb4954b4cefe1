"""The supervisor of one worker process: starts the actors, routes commands to them, restarts them when they crash.

    engine thread --commands--> supervisor --> peer actors (one per remote engine) --> Reads --> NIXL port
                                          \\-> lease keeper <-- control socket, notifications
    engine thread <--worker events------------- all of them

`deliver` is called in the trio thread by the engine's mailbox, once per command, and never blocks.

It is the executor of the `Roster` core (`statemachine/roster.py`), which decides which peer actors there are and which
of them a command goes to.

An actor that raises is a bug; it must not take the engine with it. The supervisor logs it, lets the actor fail what it
had in hand, and runs it again. The restart costs a growing delay, so that an actor that crashes on every message does
not spin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

import trio

from connector.clock import NS_PER_SECOND, to_ns
from connector.observe.event_log import request_subject
from connector.ports.nixl import NotificationReceived
from connector.ports.side_channel import Listener
from connector.protocol import (
    AbortPull,
    AfterSteps,
    Command,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    LetGo,
    LoadFailed,
    LocalPrefillsSeen,
    MeetPeer,
    PeerAddress,
    ReceiveEnded,
    RejectPull,
    ReleaseUnread,
    RoomFound,
    RoomLacking,
    StartPull,
    SumsFound,
    TrackLease,
    WarmedUp,
    WorkerStopped,
)
from connector.runtime.context import ActorContext, WorkerContext
from connector.runtime.deferred_commands import DeferredCommands
from connector.runtime.inspector import Inspector
from connector.runtime.introducer import Introducer
from connector.runtime.lease_keeper import LeaseKeeper
from connector.runtime.peer_actor import PeerActor
from connector.runtime.reads import DESCRIPTORS_AHEAD_MAX, Reads
from connector.runtime.restarts import keep_running
from connector.wire.administration import Meet, MeetReport
from connector.wire.inspection import EngineFacts
from statemachine import remote_engine as core
from statemachine import roster
from statemachine.failures import ActorCrashed, ConnectorStopped, UcxPortClosed
from statemachine.kernel import Event
from statemachine.quarantine import limit_of
from statemachine.roster import PeerKey, Roster
from statemachine.trace import StepSeen

SHUTDOWN_GRACE_SECONDS = 2.0
"""How long a stop waits for READs in flight, and NIXL's thread for them after that, before the memory under them is
given up as still in use. The engine thread waits for all of it, for `STOP_TIMEOUT_SECONDS` of the worker at most."""


class Supervisor:
    """See the module's docstring.

    Args:
        control: the control socket, of the side channel.
        leave_secret: what an engine's own message to leave has to carry.
        deliver_posted: calls `deliver` with the commands that the engine thread has posted and that are on their way.
        facts: what tools are told of this worker that does not change.
        descriptors_ahead_max: as for `Reads`. A simulator, whose requests are small, passes less, so that READs wait.
        ids_repeat: vLLM adds nothing to clients' request ids (`VLLM_DISABLE_REQUEST_ID_RANDOMIZATION`).
        is_warm: whether the engine has been warmed up; if not, `WarmedUp` says so, and engines are met from then on.
    """

    def __init__(
        self,
        worker: WorkerContext,
        *,
        control: Listener,
        leave_secret: bytes,
        deliver_posted: Callable[[], None],
        facts: EngineFacts,
        descriptors_ahead_max: int = DESCRIPTORS_AHEAD_MAX,
        ids_repeat: bool = False,
        is_warm: bool = True,
    ) -> None:
        options, event_log = worker.options, worker.event_log
        self._log_crash = worker.log_crash
        self._reads = Reads(
            port=worker.nixl_port,
            clock=worker.clock,
            figures=worker.figures,
            emit=worker.emit,
            on_notification=self._route_notification,
            on_unreachable=self._stop_lending,
            on_broken=self._stop_everything,
            log_crash=worker.log_crash,
            descriptors_ahead_max=descriptors_ahead_max,
        )
        self._context = ActorContext.of(worker, self._reads)
        self._lease_keeper = LeaseKeeper(
            worker,
            ids_repeat=ids_repeat,
            control=control,
            leave_secret=leave_secret,
            deliver_posted=deliver_posted,
            inspect=lambda question, reply_to: self._inspector.ask(question, reply_to),
            meet=self._meet,
        )
        self._introducer = Introducer(
            options=options,
            own_engine_id=worker.local.layout.engine_id,
            identity=worker.identity,
            side_channel=worker.side_channel,
            clock=worker.clock,
            meet=self.deliver,
            is_connected=lambda key: key in self._peers and self._peers[key].is_connected,
            say=lambda line: event_log.write("known peers", line),
            log_crash=worker.log_crash,
        )
        # Those of the members of the roster.
        self._peers: dict[PeerKey, PeerActor] = {}
        self._idle_ns = to_ns(options.engine_ttl) if options.engine_ttl > 0 else None
        self._roster = Roster(
            members_max=options.peer_limit,
            idle_ns=self._idle_ns,
            quarantine_blocks_max=limit_of(options.quarantine_limit, worker.local.layout.num_blocks),
            member=self._peers.__getitem__,
        )
        self._deferred = DeferredCommands(self._deliver_now, self._on_device_failed)
        self._stopped: ConnectorStopped | None = None
        self._unreachable: UcxPortClosed | None = None
        self._inspector = Inspector(
            facts=facts,
            context=self._context,
            peers=self._peers,
            roster=self._roster,
            lease_keeper=self._lease_keeper,
            introducer=self._introducer,
            control=control,
            deferred=self._deferred,
            stopped=self._why_stopped,
        )
        self._is_warm = is_warm
        self._introduces = False
        self._stop_requested = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until `stop`. Returns after every actor has ended and both doors are closed: not while a call of NIXL that an
        actor has to wait for hangs."""
        keeper = self._lease_keeper
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(keep_running, "lease keeper", keeper.run, self._log_crash)
                nursery.start_soon(keep_running, "inspector", self._inspector.run, self._log_crash)
                nursery.start_soon(keep_running, "deferred commands", self._deferred.run, self._log_crash)
                self._introduce()
                if self._idle_ns is not None:
                    retire = partial(self._retire_idle, self._idle_ns)
                    nursery.start_soon(keep_running, "retirement of idle peers", retire, self._log_crash)
                task_status.started()
                await self._stop_requested.wait()
                await self._wind_down()
                nursery.cancel_scope.cancel()
                # One of its tasks may wait for a call of NIXL that hangs. The sockets do not wait for that, but for the
                # turn in which each task hears that it is cancelled: none finds them closed.
                for _ in range(2):
                    await trio.lowlevel.cancel_shielded_checkpoint()
                self._context.side_channel.close()
        finally:
            try:
                self._close_roster()
            finally:
                self._context.side_channel.close()
                with trio.CancelScope(shield=True):
                    await self._context.nixl_port.aclose(SHUTDOWN_GRACE_SECONDS)

    def stop(self) -> None:
        """Trio thread: end. Open requests fail, READs in flight are waited for a moment."""
        self._stop_requested.set()

    def _on_device_failed(self, error: Exception) -> None:
        self._log_crash("steps of the device", error)
        self._stop_everything(f"its device cannot be asked: {error}")

    async def _wind_down(self) -> None:
        # First, so that it is on its way before the sockets close. An engine that misses it sees a lost connection.
        self._lease_keeper.leave_now()
        self._stop_everything("it is shutting down")
        with trio.move_on_after(SHUTDOWN_GRACE_SECONDS):
            while self._peers or self._reads.in_flight:
                await trio.sleep(0.01)
        assert self._stopped is not None
        for actor in list(self._peers.values()):
            actor.end(self._stopped)
        self._close_roster()
        with trio.move_on_after(SHUTDOWN_GRACE_SECONDS):
            await self._reads.release_local_lists()

    def _why_stopped(self) -> str | None:
        """Why nothing is lent any more, for tools; None: it is."""
        failure = self._stopped or self._unreachable
        return failure.detail if failure is not None else None

    def _stop_lending(self, detail: str) -> None:
        """Nobody can connect any more who has not before. Those who have read on, and so does this engine."""
        self._unreachable = UcxPortClosed(detail=detail)
        self._context.log_failure("connector", self._unreachable)
        self._context.emit(WorkerStopped(reason=detail))

    def _stop_everything(self, detail: str) -> None:
        if self._stopped is not None:
            return
        self._stopped = ConnectorStopped(detail=detail)
        if not self._stop_requested.is_set():
            self._context.log_failure("connector", self._stopped)
            self._context.emit(WorkerStopped(reason=detail))
        self._tell_roster(roster.Stopped(failure=self._stopped))
        self._deferred.release()
        for actor in self._peers.values():
            actor.tell(core.Stop(failure=self._stopped))

    def _close_roster(self) -> None:
        """No actor is left to answer for a request: those that come from here on are refused."""
        self._tell_roster(roster.Stopped(failure=self._stopped or ConnectorStopped(detail="its actors have crashed")))
        for key in list(self._peers):
            self._forget(key)

    # --- routing ------------------------------------------------------------------------------------------------

    def deliver(self, command: Command | AfterSteps) -> None:
        """Trio thread: hand a command to the actor that it concerns, when it may be. Never raises."""
        self._deferred.take(command)

    def _deliver_now(self, command: Command) -> None:
        try:
            self._hand_out(command)
        except Exception as error:
            self._log_crash("supervisor", error)
            if isinstance(command, StartPull | RejectPull):
                self._report_lost(command, error)

    def _report_lost(self, command: StartPull | RejectPull, error: Exception) -> None:
        """A bug costs the request that it occurred with. If it has an actor, it is not known whether a READ of it
        has begun. If it is reported by that as well, the engine thread tells only one of them."""
        failure = ActorCrashed(actor="supervisor", error=repr(error))
        self._context.log_failure(f"request {command.request_id}", failure)
        self._context.emit(
            ReceiveEnded(
                request_id=command.request_id,
                failure=failure,
                local_block_ids=command.local_block_ids,
                quarantined=isinstance(command, StartPull) and _key(command.peer) in self._peers,
            )
        )

    def _hand_out(self, command: Command) -> None:
        match command:
            case StartPull():
                self._ask(command, is_awaited=True)
            case TrackLease() | ReleaseUnread():
                self._ask(command, is_awaited=False)
            case MeetPeer(peer=peer):
                self._tell_roster(roster.MeetAsked(key=_key(peer), place=str(peer), message=command))
            case LetGo(peer=peer):
                self._tell_roster(roster.LetGo(key=_key(peer), message=command))
            case AbortPull(request_id=request_id):
                self._tell_roster(roster.AbortAsked(request_id=request_id, message=command))
            case RejectPull(request_id=request_id, failure=failure):
                self._tell_roster(
                    roster.Rejected(
                        request_id=request_id,
                        failure=failure,
                        lease=command.lease,
                        peer=command.engine_id,
                        message=command,
                        age_ns=to_ns(command.age_seconds),
                    )
                )
            case LeaseComputing() | LeaseGranted() | LeaseWithdrawn():
                self._lease_keeper.deliver(command)
            case LocalPrefillsSeen():
                self._inspector.note_local_prefills(command)
            case RoomLacking():
                self._inspector.note_no_room(command)
            case RoomFound(request_id=request_id):
                self._inspector.note_room(request_id)
            case LoadFailed():
                self._inspector.note_load_failed(command)
            case WarmedUp():
                self._is_warm = True
                self._introduce()
            case SumsFound():
                self._context.sums.deliver(command)
            case _:
                assert_never(command)

    def _route_notification(self, event: NotificationReceived) -> None:
        self._lease_keeper.notify(event.sender, event.message_untrusted)

    # --- the roster ---------------------------------------------------------------------------------------------

    def _ask(self, command: StartPull | ReleaseUnread | TrackLease, *, is_awaited: bool) -> None:
        peer = command.peer
        self._tell_roster(
            roster.Asked(
                key=_key(peer),
                place=str(peer),
                request_id=command.request_id,
                lease=command.lease,
                is_awaited=is_awaited,
                message=command,
                age_ns=to_ns(command.age_seconds),
            )
        )

    def _introduce(self) -> None:
        """Begin to meet engines before requests need them, if any are named, and no CUDA graph is being captured.

        A capture fails when another thread of its process does to the device what UCX does for the first READ from an
        engine: opens the memory of that engine. Requests come later, so only engines that are named could do that.
        """
        if self._introduces or not self._is_warm or not self._introducer.has_places:
            return
        assert self._nursery is not None
        self._introduces = True
        self._nursery.start_soon(keep_running, "introductions", self._introducer.run, self._log_crash)

    def _meet(self, message: Meet) -> tuple[MeetReport, int]:
        """The answer, and how many are asked because of it."""
        answer = self._introducer.name(message.places)
        self._introduce()
        return answer

    def _tell_roster(self, event: Event) -> None:
        match event:
            case roster.Connected(key=key):
                self._introducer.note_connected(key)
            case roster.Ended(key=key):
                self._introducer.note_lost(key)
        self._carry_out(self._roster.handle(event, self._context.clock.now_ns()))

    def _carry_out(self, effects: list[roster.RosterEffect]) -> None:
        """As `effects.carry_out`, with no call for an effect but that of its executor. What was raised first is raised
        when all have been tried. Whom it kept from being admitted the roster forgets again."""
        errors: list[Exception] = []
        not_admitted: list[PeerKey] = []
        for effect in effects:
            try:
                match effect:
                    case roster.HandOver(key=key, message=command):
                        self._peers[key].put(command)
                    case roster.Admit(key=key, message=command):
                        self._admit(key, command.peer)
                    case roster.Retire(key=key):
                        self._peers[key].tell(core.Retire())
                    case roster.Recall(key=key, message=command):
                        self._peers[key].tell(core.Recall(address=command.peer))
                    case roster.Refuse():
                        self._refuse(effect)
                    case roster.TellUnread(key=key, message=command):
                        self._peers[key].put(
                            ReleaseUnread(
                                request_id=command.request_id,
                                lease=command.lease,
                                peer=command.peer,
                                age_seconds=command.age_seconds,
                                keeps_lease=isinstance(command, StartPull) and command.keeps_lease,
                            )
                        )
                    case roster.NoteNotMet(key=key, failure=failure):
                        self._introducer.note_not_met(key, failure)
                    case roster.NoteQuarantine(is_full=is_full, blocks=blocks, limit_blocks=limit):
                        self._context.event_log.quarantine(blocks, limit, is_full=is_full)
                    case _:
                        assert_never(effect)
            except Exception as error:
                errors.append(error)
                if isinstance(effect, roster.Admit):
                    not_admitted.append(effect.key)
        for key in not_admitted:
            self._tell_roster(roster.Ended(key=key))
        if errors:
            raise errors[0]

    def _admit(self, key: PeerKey, address: PeerAddress) -> None:
        assert self._nursery is not None
        lost, not_met = partial(self._introducer.note_lost, key), partial(self._introducer.note_not_met, key)
        actor = PeerActor(self._context, key, address, self._tell_roster, lost, not_met)
        self._nursery.start_soon(self._run_peer, key, actor)
        self._peers[key] = actor

    async def _run_peer(self, key: PeerKey, actor: PeerActor) -> None:
        await keep_running(f"peer actor of {key.engine_id}", actor.run, self._log_crash, actor.recover)
        try:
            self._forget(key)
        except Exception as error:  # must not end the other actors, which are in the same nursery
            self._log_crash("supervisor", error)
        # What arrived after its last look at the inbox goes to its successor, before what has come since of the same
        # requests and waits for the device.
        for command in actor.take_unhandled():
            self._deliver_now(command)

    def _forget(self, key: PeerKey) -> None:
        if self._peers.pop(key, None) is not None:
            self._tell_roster(roster.Ended(key=key))

    def _refuse(self, effect: roster.Refuse) -> None:
        command: StartPull | RejectPull = effect.message
        fresh, ended = effect.fresh, effect.ended
        recorder, request_id = self._context.recorder, fresh.request_id
        observe = recorder.observer(fresh.peer or None, lambda _: (len(command.local_block_ids), None, None))
        steps: list[StepSeen] = [
            ("request", request_id, None, None, fresh),
            ("request", request_id, fresh, effect.event, ended),
        ]
        observe(self._context.clock.now_ns(), steps)
        recorder.catch_up()
        self._context.emit(
            ReceiveEnded(
                request_id=fresh.request_id,
                failure=ended.failure,
                local_block_ids=command.local_block_ids,
                quarantined=False,
            )
        )
        assert ended.failure is not None
        detail = f"engine {command.peer.engine_id} at {command.peer}" if isinstance(command, StartPull) else ""
        self._context.log_failure(request_subject(fresh.request_id, command.age_seconds, detail), ended.failure)

    async def _retire_idle(self, idle_ns: int) -> None:
        clock = self._context.clock
        while True:
            deadline_ns, now_ns = self._roster.next_deadline(), clock.now_ns()
            # Nothing can become due earlier: an engine that is admitted meanwhile has `idle_ns` from then.
            sleep_ns = idle_ns if deadline_ns is None else max(0, deadline_ns - now_ns)
            await trio.sleep(sleep_ns / NS_PER_SECOND)
            self._carry_out(self._roster.advance(clock.now_ns()))


def _key(peer: PeerAddress) -> PeerKey:
    return PeerKey(peer.engine_id, peer.tp_size, peer.dcp_size, peer.pp_size)
