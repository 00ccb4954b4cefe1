"""The executor of one `RemoteEngine` core: what a decode rank does with one remote engine, as tasks and calls.

A dead or hung engine costs only its own requests, because nothing here is shared with the actors of other engines but
`Reads`, which never waits for a peer.

Whoever has a message tells it, and it is handled at once, in the caller's turn of the trio loop: between a command of
the engine and the READ that it leads to lies no other turn, for each may be a wait for the interpreter while the
engine keeps that busy (docs/performance.md). Each message is an event of the core; the effects that come back are
carried out in order. What is told while the actor is at work waits in its inbox until it is done. What takes time
(handshakes, links, notifications, tearing down) runs in child tasks (`connector/runtime/connections.py`), which end by
telling an event. The actor's own task sleeps until the core's next deadline. What follows from what is in
`statemachine/remote_engine/`. With the option `verify` blocks are resolved when P has said the checksums of the lease
(`_resolve_blocks`), and a READ is checked by having the engine thread sum what it has left (`_check_read`).

A bug that raises while an effect is carried out costs that effect; the others are still carried out. Then the
actor crashes, in its own task, and not whoever told it something: the supervisor lets it `recover`, which tells the
core, and runs it again. What it is told meanwhile waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import msgspec
import trio

from connector.clock import NS_PER_SECOND, seconds_until, to_ns
from connector.layout.geometry import BlockIdError
from connector.observe.catalogue import HANDSHAKES_FAILED
from connector.observe.event_log import request_subject
from connector.ports.nixl import PortReadEnded
from connector.protocol import (
    AbortPull,
    LetGo,
    MeetPeer,
    PeerAddress,
    PullCommand,
    QuarantineLifted,
    ReceiveEnded,
    ReleaseUnread,
    StartPull,
    SumsFound,
    TrackLease,
)
from connector.runtime.block_tables import Resolved, checks, resolve
from connector.runtime.connections import Connections
from connector.runtime.context import ActorContext, engine_limits
from connector.runtime.effects import internal_error
from connector.runtime.reads import ReadOrder
from connector.runtime.verification import KnownSums, SumsMissing, SumsOfPeer, failure_of, stretches
from connector.runtime.wait_notices import WaitNotices
from connector.wire.bounded import DecodeFailed
from connector.wire.notifications import encode_heartbeats, encode_release
from statemachine import remote_engine as core
from statemachine import roster
from statemachine.deadlines import earliest
from statemachine.failures import ActorCrashed, BadParams, ChecksumsMissing, Failure, TransferError
from statemachine.kernel import Event
from statemachine.roster import PeerKey


@dataclass(kw_only=True)
class _Pull:
    """What the core need not know of a request: its block tables, what they came to, and how much has arrived."""

    command: StartPull
    began_ns: int
    blocks: int
    connection: int | None = None
    """The last one that the core wanted its blocks resolved on."""
    resolved: Resolved | None = None
    """On that connection."""
    bytes: int | None = None
    descriptors: int | None = None
    tickets: list[int] = field(default_factory=list)
    """Orders of checksums of what its READs have left."""
    is_reported: bool = False
    """The engine was told that it has ended."""
    quarantined_ns: int | None = None
    """When the request ended while READs might still write into its blocks."""


class PeerActor:
    """See the module's docstring.

    Args:
        key: of this actor among those of the rank.
        tell_roster: told of what concerns the other actors: connections, and requests that this one is done with.
        on_disconnected: called when there is no connection any more; READs that hang may still stand on it.
        on_not_met: told why an attempt to connect has failed, or was not made for who wants to meet the engine.
    """

    def __init__(
        self,
        context: ActorContext,
        key: PeerKey,
        address: PeerAddress,
        tell_roster: Callable[[Event], None],
        on_disconnected: Callable[[], None],
        on_not_met: Callable[[Failure], None],
    ) -> None:
        self._context = context
        self._key = key
        self._tell_roster = tell_roster
        local = context.local.layout
        self.observer = context.recorder.observer(
            address.engine_id, self.amounts, context.event_log.observer_of_peer(self._describe)
        )
        self.core = core.RemoteEngine(
            address.engine_id,
            address,
            engine_limits(context.options),
            identity=context.identity,
            observe=self.observer,
        )
        self._notices = WaitNotices(
            context.event_log, self.core, says_who_is_queued=local.tp_rank == 0, name=self._named
        )
        self._inbox: deque[Event | PullCommand] = deque()
        self._commands_waiting = 0  # of those in the inbox
        self._pulls: dict[str, _Pull] = {}
        self._connections = Connections(
            context,
            self.tell,
            on_connected=lambda: tell_roster(roster.Connected(key=key)),
            on_sums=lambda number, rank, answer: self._sums.take(number, rank, answer),
        )
        self._on_disconnected = on_disconnected
        self._on_not_met = on_not_met
        self._was_connected = False
        self._sums = SumsOfPeer(self._connections.ask_sums)
        # What is being handled: a command, or the event that it was made into.
        self._in_hand: Event | PullCommand | None = None
        self._is_running = False
        self._is_at_work = False
        self._crash: Exception | None = None
        # When its task wakes up by itself, and what wakes it before.
        self._wakes_at_ns: int | None = None
        self._attention = trio.Event()
        self._for_successor: list[PullCommand] = []

    # --- life ---------------------------------------------------------------------------------------------------

    @property
    def is_unused(self) -> bool:
        """Nobody wants anything of this engine. What else the inbox holds (an answer, a lost link) wants nothing."""
        return self.core.is_unused and not self._commands_waiting

    @property
    def is_connected(self) -> bool:
        return self.core.is_connected

    @property
    def is_shaking_hands(self) -> bool:
        return self.core.is_shaking_hands

    @property
    def may_be_recalled(self) -> bool:
        """It was retired, and may never end: READs hang."""
        return self.core.may_be_recalled

    async def run(self) -> None:
        """Until the core is finished with this engine."""
        async with trio.open_nursery() as nursery:
            self._connections.attach(nursery)
            self._is_running = True
            try:
                await self._run()
            finally:
                self._is_running = False
                self._connections.detach()
            nursery.cancel_scope.cancel()

    async def _run(self) -> None:
        while True:
            self._attention = trio.Event()
            self._work(advance=True)
            if self._crash is not None:
                crash, self._crash = self._crash, None
                raise crash
            if self.core.is_finished:
                return
            self._wakes_at_ns = earliest(self.core.next_deadline(), self._notices.next_deadline())
            with trio.move_on_after(seconds_until(self._wakes_at_ns, self._context.clock.now_ns())):
                await self._attention.wait()

    def tell(self, message: Event | PullCommand) -> None:
        """Something has happened, or is wanted."""
        self._inbox.append(message)
        if self._is_running and not self._is_at_work:
            self._work()
            # What is due is done by the task, once for all who tell something in this turn: leases are held together.
            next_ns = earliest(self.core.next_deadline(), self._notices.next_deadline())
            is_too_late = next_ns is not None and self._sleeps_beyond(next_ns)
            if self._crash is not None or self.core.is_finished or is_too_late:
                self._attention.set()

    def _sleeps_beyond(self, deadline_ns: int) -> bool:
        """Whether the task wakes up after it. If it is due, always: our clock goes on while a machine is suspended, and
        trio's, by which the task sleeps, does not."""
        wakes_at_ns = self._wakes_at_ns
        return wakes_at_ns is None or deadline_ns < wakes_at_ns or deadline_ns <= self._context.clock.now_ns()

    def _work(self, *, advance: bool = False) -> None:
        """Handle what is in the inbox."""
        if self._crash is not None:
            return
        self._is_at_work = True
        try:
            self._handle_all()
            if advance:
                self._carry_out(self.core.advance(self._context.clock.now_ns()))
                self._handle_all()
                # Afterwards: a process that has stood still would say that a request waits whose time is over.
                self._notices.write(self._context.clock.now_ns())
            was_connected, self._was_connected = self._was_connected, self.core.is_connected
            if was_connected and not self._was_connected:
                self._on_disconnected()
        except Exception as error:
            self._crash = error
        finally:
            self._is_at_work = False
            self._context.recorder.catch_up()

    def _subject(self, pull: _Pull) -> str:
        """What the log calls a request that was started."""
        return self._named(pull.command, pull.began_ns)

    def _named(self, command: TrackLease | StartPull, came_ns: int) -> str:
        since_ns = self._context.clock.now_ns() - came_ns
        age_seconds = command.age_seconds + since_ns / NS_PER_SECOND
        return request_subject(command.request_id, age_seconds, f"engine {self._describe()}")

    def _describe(self) -> str:
        """What the log calls the engine."""
        key = self._key
        others = "".join(f", {name} {size}" for name, size in (("DCP", key.dcp_size), ("PP", key.pp_size)) if size > 1)
        return f"{key.engine_id} at {self.core.address} (TP {key.tp_size}{others})"

    def _handle_all(self) -> None:
        while self._inbox:
            self._handle(self._inbox.popleft())

    def _handle(self, message: Event | PullCommand) -> None:
        self._in_hand = message
        if not isinstance(message, Event):
            self._commands_waiting -= 1
            message = self._in_hand = self._event_of_command(message)
        self._feed(message)
        self._in_hand = None

    def recover(self, error: BaseException) -> None:
        """After `run` raised: tell the core. The handshake in flight ended with the nursery, and left nothing."""
        failure = ActorCrashed(actor=f"peer actor of {self._key.engine_id}", error=repr(error))
        message, self._in_hand = self._in_hand, None
        try:
            self._feed(core.Crashed(failure=failure))
        finally:
            # Nobody will ever tell these again.
            if not isinstance(message, Event | None):
                self._try(partial(self._repeat, message))
            elif isinstance(message, core.ReadEnded | core.LetGo | core.Retire | core.Recall):
                self._try(partial(self._feed, message))
            self._report_lost(failure)
        self._context.recorder.catch_up()

    def _repeat(self, command: PullCommand) -> None:
        """What it means for the core could not be said at first. A request of which that cannot be said at all ends."""
        try:
            event = self._event_of_command(command)
        except Exception:
            if isinstance(command, StartPull):
                self._pulls.setdefault(command.request_id, _Pull(command=command, began_ns=0, blocks=0))
            raise
        self._feed(event)

    def _report_lost(self, failure: Failure) -> None:
        """Requests that the core has ended, or never heard of, and of which the engine was not told."""
        quarantined = dict(self.core.quarantined())
        open_ids = set(self.core.request_ids())
        for request_id, pull in list(self._pulls.items()):
            if not pull.is_reported and request_id not in open_ids:
                is_quarantined = request_id in quarantined
                report = core.Report(request_id=request_id, failure=failure, is_quarantined=is_quarantined)
                self._try(partial(self._report, report))

    def end(self, failure: Failure) -> None:
        """The connector ends before `run` has: perhaps this actor waits to be run again after a crash. What it was told
        is handled, and whatever is open fails. Blocks under READs in flight are quarantined for good."""
        self._is_running = False
        self._connections.detach()
        while self._inbox:
            self._handle_last(self._inbox.popleft())
        self._handle_last(core.Stop(failure=failure))
        for command in self.take_unhandled():  # there is no successor
            self._handle_last(command)
        self._handle_last(core.Unwatched())
        self._report_lost(failure)
        self._context.recorder.catch_up()

    def _handle_last(self, message: Event | PullCommand) -> None:
        self._try(lambda: self._feed(message if isinstance(message, Event) else self._event_of_command(message)))

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._log_crash(error)

    def _log_crash(self, error: Exception) -> None:
        self._context.log_crash(f"peer actor of {self._key.engine_id}", error)

    def put(self, command: PullCommand) -> None:
        """From the supervisor: a command for this engine."""
        self._commands_waiting += 1
        self.tell(command)

    def take_unhandled(self) -> list[PullCommand]:
        """After `run` returned: the commands that came too late for it."""
        self._for_successor += [message for message in self._inbox if not isinstance(message, Event)]
        self._inbox.clear()
        self._commands_waiting = 0
        return self._for_successor

    def _event_of_command(self, command: PullCommand) -> Event:
        """What it means for the core."""
        now_ns = self._context.clock.now_ns()
        try:
            match command:
                case StartPull() | TrackLease():
                    self._notices.begin(command, now_ns)
                case ReleaseUnread():
                    self._notices.end(command.request_id)
        except Exception as error:
            # For people: no request may be lost for it.
            self._log_crash(error)
        match command:
            case LetGo(lease=lease):
                return core.LetGo(lease=lease, message=command)
            case AbortPull(request_id=request_id):
                return core.AbortAsked(request_id=request_id, message=command)
            case MeetPeer(peer=address):
                return core.MeetAsked(address=address, message=command)
            case ReleaseUnread():
                return core.ReleaseUnread(
                    request_id=command.request_id,
                    lease=command.lease,
                    address=command.peer,
                    keeps_lease=command.keeps_lease,
                    message=command,
                )
            case StartPull():
                blocks = sum(len(group.local_block_ids) for group in command.groups)
                self._pulls[command.request_id] = _Pull(command=command, began_ns=now_ns, blocks=blocks)
                return core.Started(
                    request_id=command.request_id,
                    lease=command.lease,
                    address=command.peer,
                    age_ns=to_ns(command.age_seconds),
                    registration=command.peer.registration,
                    keeps_lease=command.keeps_lease,
                    message=command,
                )
            case TrackLease():
                return core.Announced(
                    request_id=command.request_id,
                    lease=command.lease,
                    address=command.peer,
                    age_ns=to_ns(command.age_seconds),
                    registration=command.peer.registration,
                    message=command,
                )
            case _:
                assert_never(command)

    # --- effects ------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[core.EngineEffect]) -> None:
        """As `effects.carry_out`, with no call for an effect but that of its executor. What was raised first is raised
        when all have been tried."""
        errors: list[Exception] = []
        for effect in effects:
            try:
                match effect:
                    case core.StartHandshake():
                        self._start_handshake(effect)
                    case core.ResolveBlocks():
                        self._resolve_blocks(effect)
                    case core.PostReads():
                        self._post_reads(effect)
                    case core.WithdrawReads(request_id=request_id):
                        self._context.reads.withdraw(self.core.engine_id, request_id)
                    case core.CheckRead():
                        self._check_read(effect)
                    case core.TearDown():
                        self._tear_down(effect)
                    case core.SendHold():
                        self._send_hold(effect)
                    case core.SendRelease():
                        self._send_release(effect)
                    case core.SendHeartbeat():
                        self._send_heartbeat(effect)
                    case core.NotifyReleases():
                        self._notify_releases(effect)
                    case core.Report():
                        self._report(effect)
                    case core.LiftQuarantine():
                        self._lift_quarantine(effect)
                    case core.PassToSuccessor():
                        self._pass_to_successor(effect)
                    case core.NoteHandshakeFailure():
                        self._note_handshake_failure(effect)
                    case core.NoteNotMet(failure=failure):
                        self._on_not_met(failure)
                    case core.NoteLeaving():
                        self._note_leaving(effect)
                    case _:
                        assert_never(effect)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _feed(self, event: Event) -> None:
        self._carry_out(self.core.handle(event, self._context.clock.now_ns()))

    def _start_handshake(self, effect: core.StartHandshake) -> None:
        assert isinstance(effect.address, PeerAddress)
        self._tell_roster(roster.Connecting(key=self._key, place=str(effect.address)))
        self._connections.open(effect.address)

    def _resolve_blocks(self, effect: core.ResolveBlocks) -> None:
        self._pulls[effect.request_id].connection = effect.connection
        if any(source.match is not None for source in self._connections[effect.connection].sources):
            self._connections.spawn(self._resolve_when_sums_are_known, effect)
        else:
            self._feed(self._resolve(effect, None))

    async def _resolve_when_sums_are_known(self, effect: core.ResolveBlocks) -> None:
        """Nothing is in flight yet: if P never answers, the deadline of the request ends it."""
        pull = self._pulls.get(effect.request_id)
        if pull is None or effect.connection not in self._connections:
            return  # it ended before this task began
        sources = self._connections[effect.connection].sources

        def is_wanted() -> bool:
            is_latest = self._pulls.get(effect.request_id) is pull and pull.connection == effect.connection
            return is_latest and effect.connection in self._connections

        try:
            known = await self._sums.of_lease(
                effect.connection,
                [(source.rank, source.match) for source in sources],
                pull.command.lease,
                is_wanted,
            )
        except DecodeFailed as error:
            self.tell(core.LinkLost(connection=effect.connection, detail=str(error)))
            return
        except SumsMissing:
            failure = ChecksumsMissing(
                peer=self.core.engine_id,
                address=str(self.core.address),
                remote_request_id=pull.command.lease.request_id,
            )
            self.tell(core.BlocksRejected(request_id=effect.request_id, failure=failure))
            return
        if known is not None and is_wanted():
            self.tell(self._resolve(effect, known))

    def _resolve(self, effect: core.ResolveBlocks, known: Sequence[KnownSums] | None) -> Event:
        """What the core is to be told of it."""
        connection, pull = self._connections[effect.connection], self._pulls[effect.request_id]
        try:
            resolved = resolve(connection.plan, pull.command)
            if known is not None:
                sampled = self._context.options.verify == "sampled"
                found = checks(resolved, connection.sources, known, sampled=sampled)
                resolved = msgspec.structs.replace(resolved, checks=found)
        except BlockIdError as error:
            failure = BadParams(field="remote_block_ids", expected="blocks that the engine has", found=str(error))
            return core.BlocksRejected(request_id=effect.request_id, failure=failure)
        pull.resolved, pull.bytes, pull.descriptors = resolved, None, None
        return core.BlocksResolved(
            request_id=effect.request_id,
            connection=effect.connection,
            reads=len(resolved.reads),
            are_checked=bool(resolved.checks),
        )

    def _post_reads(self, effect: core.PostReads) -> None:
        pull = self._pulls[effect.request_id]
        assert pull.resolved is not None
        try:
            orders = self._orders(effect, pull.resolved)
        except Exception as error:
            self._log_crash(error)
            self._end_unposted(effect, len(pull.resolved.reads), internal_error(error))
            return
        self._context.reads.order(orders)

    def _orders(self, effect: core.PostReads, resolved: Resolved) -> list[ReadOrder]:
        connection = self._connections[effect.connection]
        orders = []
        for number, read in enumerate(resolved.reads):
            source = connection.sources[read.source]
            orders.append(
                ReadOrder(
                    request_id=effect.request_id,
                    read=number,
                    connection=effect.connection,
                    peer=self.core.engine_id,
                    local=source.local_list,
                    local_ids=read.local_ids,
                    remote=source.remote_list,
                    remote_ids=read.remote_ids,
                    is_wanted=lambda: self.core.wants(effect.request_id),
                    on_end=self._take_read_end,
                )
            )
        return orders

    def _end_unposted(self, effect: core.PostReads, reads: int, error: str) -> None:
        """The core waits for the end of each."""
        failure = TransferError(peer=self.core.engine_id, operation="post_read", error=error, transport_lost=False)
        for number in range(reads):
            self.tell(
                core.ReadEnded(
                    request_id=effect.request_id,
                    read=number,
                    connection=effect.connection,
                    ended_ns=self._context.clock.now_ns(),
                    failure=failure,
                )
            )

    def _take_read_end(self, ended: core.ReadEnded, event: PortReadEnded | None) -> None:
        pull = self._pulls.get(ended.request_id)
        if pull is not None and event is not None and ended.failure is None:
            pull.bytes = (pull.bytes or 0) + event.bytes
            pull.descriptors = (pull.descriptors or 0) + event.descriptors
        self.tell(ended)

    def _check_read(self, effect: core.CheckRead) -> None:
        pull = self._pulls[effect.request_id]
        assert pull.resolved is not None
        check, lease = pull.resolved.checks[effect.read], pull.command.lease

        def compare(found: SumsFound) -> None:
            address = str(self.core.address)
            failure = failure_of(check, found, peer=self.core.engine_id, address=address, lease=lease)
            self.tell(
                core.ReadChecked(
                    request_id=effect.request_id, read=effect.read, connection=effect.connection, failure=failure
                )
            )

        pull.tickets.append(self._context.sums.order(stretches(check.compared.local), compare))

    def _tear_down(self, effect: core.TearDown) -> None:
        self._connections.take_back(effect.connection, effect.failure)

    def _send_hold(self, effect: core.SendHold) -> None:
        self._connections.hold(effect.connection, effect.rank, effect.sent_ns, effect.leases)

    def _send_release(self, effect: core.SendRelease) -> None:
        self._connections.release(effect.connection, effect.rank, effect.leases)

    def _send_heartbeat(self, effect: core.SendHeartbeat) -> None:
        for message in encode_heartbeats(lease.request_id for lease in effect.leases):
            self._connections.notify(effect.connection, effect.rank, message)

    def _notify_releases(self, effect: core.NotifyReleases) -> None:
        consumers = self._connections[effect.connection].ranks[effect.rank].consumers
        for lease in effect.leases:
            self._connections.notify(effect.connection, effect.rank, encode_release(lease.request_id, consumers))

    def _report(self, effect: core.Report) -> None:
        request_id, failure = effect.request_id, effect.failure
        self._context.recorder.catch_up()
        pull = self._pulls[request_id]
        resolved = pull.resolved if failure is None else None
        self._context.emit(
            ReceiveEnded(
                request_id=request_id,
                failure=failure,
                local_block_ids=pull.command.local_block_ids if effect.is_quarantined else [],
                quarantined=effect.is_quarantined,
                permutation=resolved.permutation if resolved is not None else None,
                unfilled=resolved.unfilled if resolved is not None else None,
            )
        )
        # The engine first: nobody repeats the report if a bug raises in what follows.
        pull.is_reported = True
        if not effect.is_quarantined:
            del self._pulls[request_id]
        self._notices.end(request_id)
        for ticket in pull.tickets:
            self._context.sums.withdraw(ticket)
        if effect.is_quarantined:
            pull.quarantined_ns = self._context.clock.now_ns()
            self._tell_roster(roster.QuarantineBegan(key=self._key, request_id=request_id, blocks=pull.blocks))
        self._tell_roster(roster.RequestEnded(request_id=request_id))
        if failure is not None:
            self._context.log_failure(self._subject(pull), failure)

    def _lift_quarantine(self, effect: core.LiftQuarantine) -> None:
        pull = self._pulls.pop(effect.request_id)
        self._context.emit(QuarantineLifted(local_block_ids=pull.command.local_block_ids))
        self._tell_roster(roster.QuarantineEnded(key=self._key, request_id=effect.request_id))

    def _pass_to_successor(self, effect: core.PassToSuccessor) -> None:
        command = effect.event.message
        if isinstance(effect.event, core.Announced | core.Started):
            command = msgspec.structs.replace(command, age_seconds=effect.event.age_ns / NS_PER_SECOND)
            self._pulls.pop(effect.event.request_id, None)  # the successor's from here on
        self._for_successor.append(command)

    def _note_handshake_failure(self, effect: core.NoteHandshakeFailure) -> None:
        self._context.figures.note_failed(HANDSHAKES_FAILED)

    def _note_leaving(self, effect: core.NoteLeaving) -> None:
        self._context.event_log.leaves(self._describe(), effect.grace_ns / NS_PER_SECOND)

    # --- for people ---------------------------------------------------------------------------------------------

    def amounts(self, request_id: str) -> tuple[int | None, int | None, int | None]:
        """Blocks, bytes and descriptors of a request, as far as they are known."""
        pull = self._pulls.get(request_id)
        return (None, None, None) if pull is None else (pull.blocks, pull.bytes, pull.descriptors)

    def quarantine(self, request_id: str) -> tuple[int, str, int] | None:
        """How many blocks of a request READs may still write into, its id on P, and since when; None: none."""
        pull = self._pulls.get(request_id)
        if pull is None or pull.quarantined_ns is None:
            return None
        return pull.blocks, pull.command.lease.request_id, pull.quarantined_ns

    def loading_blocks(self) -> int:
        """Blocks of all requests that have not ended."""
        return sum(self._pulls[request_id].blocks for request_id in self.core.request_ids())

    def quarantined_blocks(self) -> int:
        """Blocks of all requests that have ended, into which READs may still write."""
        return sum(self._pulls[request_id].blocks for request_id, _ in self.core.quarantined())
