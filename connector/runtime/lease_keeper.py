"""The lease keeper: carries out what the `Lending` core of this rank says (`statemachine/lending.py`).

    engine's scheduler   --commands-->              deliver ---\
    built-in decoders    --NIXL notifications-->    notify -----> inbox --> core --> effects
    decoders like us     --control socket-->        a task ----/
    the clock            --next_deadline-->         the loop --> core --> effects

No rule stands here. Events are translated on the way in, effects are carried out on the way out. Everything arrives
through one inbox, so the core sees it in the order in which it came.

Bounds. Commands are never refused: a grant that was lost would be blocks that never come back. Notifications come from
whoever knows our agent, so only so many may wait, and so many bytes of them; one that does not fit is dropped, and
costs at most a lease that lasts to its deadline. A turn, after which deadlines and other tasks have theirs, ends after
so many messages, or so many leases that they name. The task of the control socket takes one message each time the loop
comes round, so ZMQ's own bound holds for those who send more. Each message is charged to who sent it
(`Listener.charge`): its length before it is looked at, and then what it asks for, a question when it has been answered.

A bug costs the one message that it occurs with, or the one effect. It is logged with its traceback. If that was a grant
or the end of a lease, nobody would ever tell the engine to take its blocks back. So a book is kept of what it is owed
(`_owed`), and an end that does not come in twice the time that the core may take is made up.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, assert_never

import trio

from connector.clock import seconds_until, to_ns
from connector.config import ConnectorOptions
from connector.observe.advice import whereabouts
from connector.observe.catalogue import (
    CONTROL_SOCKET,
    DROPPED,
    LATE_NOTIFICATIONS,
    MALFORMED,
    NOTIFICATIONS,
    STRAY_RELEASES,
    TURNED_AWAY,
)
from connector.observe.log import is_said
from connector.ports.nixl import NotificationReceived
from connector.ports.side_channel import Listener, units_to_decode, units_to_send
from connector.protocol import (
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    SendEnded,
)
from connector.runtime.context import WorkerContext
from connector.runtime.effects import carry_out
from connector.runtime.mailbox import Mailbox
from connector.runtime.restarts import keep_running
from connector.wire import control as wire
from connector.wire import notifications
from connector.wire.administration import Leave, LeaveTaken, Meet, MeetReport
from connector.wire.bounded import DecodeFailed
from connector.wire.inspection import Inspect
from statemachine import lending
from statemachine.failures import ConsumerUnknown, MessageMalformed, NotificationsDropped
from statemachine.kernel import Event
from statemachine.lease import Lease, LeaseName
from statemachine.lending import Lending, LendingLimits, ReplyAddress

LeaseCommand: TypeAlias = LeaseComputing | LeaseGranted | LeaseWithdrawn

NOTIFICATIONS_WAITING_MAX = 1 << 16
NOTIFICATION_BYTES_WAITING_MAX = 64 << 20
"""Bytes of all waiting notifications together: a thousand of the largest heartbeats of engines like us."""
MESSAGE_UNITS, MALFORMED_UNITS = 8, 10
"""What a message costs who sends it, beside its length, a unit for each lease, and the length of checksums."""
ASK_UNITS = 256
"""What it costs to have this process connect to a side channel and ask who is there: a socket, a monitor, a task."""
SENDERS_MAX = 1024
"""Decode engines of which it is remembered where they were last heard from."""
RANKS_HEARD_MAX = 64
"""Ranks of each of these whose connections are remembered."""
MESSAGES_PER_TURN_MAX = 256
"""Messages that are handled before other tasks, and deadlines, have their turn."""
LEASES_PER_TURN_MAX = 2048
"""Leases that these name: the message that reaches it is the last one of its turn."""
NOTIFICATION_BYTES_PER_LEASE = 64
"""So many bytes of a notification count as a lease, whatever they say: they have to be looked at."""


def lending_limits(options: ConnectorOptions, *, ids_repeat: bool = False) -> LendingLimits:
    """What the options say about leases, in the core's terms."""
    return LendingLimits(
        lease_ns=to_ns(options.kv_lease_duration),
        total_ns=to_ns(options.lease_limit_seconds),
        ids_repeat=ids_repeat,
    )


class LostEnd(Exception):
    """A bug of ours: the core has said nothing of a lease for longer than one may last."""


@dataclass(slots=True)
class _Whereabouts:
    """Of a decode engine: from which address it was last heard, and over which connections, by rank."""

    address: str = ""
    ranks: dict[int, bytes] = field(default_factory=dict)


class LeaseKeeper:
    """See the module's docstring. All methods are called in the trio thread.

    Args:
        control: this worker's control socket; whoever made it closes it.
        deliver_posted: calls `deliver` with the commands that the engine thread has posted and that are on their way.
            The engine tells of a lease before its prompt is computed, so whoever asks for one was told of it later; but
            the engine may have kept the interpreter to itself since, and its command must not be found missing.
        inspect: told of a tool's question, and where the answer goes.
        meet: told which engines a tool wants to be met; says how far each has come, and how many it now asks.
    """

    def __init__(
        self,
        worker: WorkerContext,
        *,
        ids_repeat: bool,
        control: Listener,
        leave_secret: bytes,
        deliver_posted: Callable[[], None],
        inspect: Callable[[Inspect, bytes], None],
        meet: Callable[[Meet], tuple[MeetReport, int]],
    ) -> None:
        self._deliver_posted = deliver_posted
        self._inspect = inspect
        self._meet = meet
        self.observer = worker.recorder.observer(None, log=worker.event_log.observer_of_lease(self._where))
        self._core = Lending(lending_limits(worker.options, ids_repeat=ids_repeat), self.observer)
        # Has what the observer was told put to use: before the engine hears of a lease's end, and after all else.
        self._catch_up = worker.recorder.catch_up
        self._figures = worker.figures
        self._clock = worker.clock
        self._emit = worker.emit
        self._log_failure = worker.log_failure
        self._log_crash = worker.log_crash
        self._watch_notifications = worker.nixl_port.expect_notifications
        self._agent = worker.nixl_port.agent_name
        self._control = control
        self._leave_secret = leave_secret
        self._inbox: Mailbox[Event | NotificationReceived] = Mailbox()
        # How many of those in the inbox are notifications, and how many bytes these have.
        self._notifications_waiting = 0
        self._notification_bytes_waiting = 0
        # Leases that the messages of this turn have named.
        self._named_in_turn = 0
        self.notifications_dropped = 0
        # Releases of what is not lent (any more), by readers that were not the ones who ended it.
        self.late_releases = 0
        # For people: where each decode engine is. Those that were heard last come last.
        self._whereabouts: OrderedDict[str, _Whereabouts] = OrderedDict()
        # Checksums of what is lent now.
        self._sums: dict[LeaseName, bytes] = {}
        # By request id, as the engine tells them apart: the leases whose end it waits for.
        self._owed: dict[str, LeaseName] = {}
        # And of these, those whose end it waited for at the last look; when the next look is, and how long after.
        self._owed_before: dict[str, LeaseName] = {}
        self._look_ns = 2 * to_ns(max(worker.options.lease_limit_seconds, worker.options.decoder_kv_blocks_ttl))
        self._looks_ns = 0

    def leases(self) -> tuple[Lease, ...]:
        """What is lent now, oldest first."""
        return self._core.leases()

    def lease(self, name: LeaseName) -> Lease | None:
        """The lease of this name as it is now; None: it is over."""
        return self._core.lease(name)

    def heard_from(self, engine_id: str) -> str:
        """The numeric address from which this decode engine was last heard over the control socket; empty: it was not,
        or long ago. One whose ranks are on several machines has one of theirs."""
        known = self._whereabouts.get(engine_id)
        return known.address if known is not None else ""

    def is_connected(self, engine_id: str) -> bool:
        """Whether a connection stands over which this decode engine was heard."""
        known = self._whereabouts.get(engine_id)
        return known is not None and any(self._control.sender_of(each) for each in known.ranks.values())

    def _where(self, engine_id: str) -> str:
        return whereabouts(self.heard_from(engine_id), is_connected=self.is_connected(engine_id))

    # --- in ---------------------------------------------------------------------------------------------------------

    def deliver(self, command: LeaseCommand) -> None:
        """Take a command of the engine's scheduler. Never refused."""
        match command:
            case LeaseGranted(lease=lease, sums=sums):
                self._owed[lease.request_id] = lease
                if sums is not None:
                    self._sums[lease] = sums
            case LeaseComputing(lease=lease):  # of an earlier request of this id the engine waits for nothing
                self._owed.pop(lease.request_id, None)
        self._inbox.put(_command_event(command))

    def leave_now(self) -> None:
        """The engine shuts down: tell the decode engines, unless they know already. They need not wait for a process
        that does not come back with what it has lent."""
        self._step(partial(self._core.handle, lending.Leave(reply_to=None, grace_ns=0)))

    def notify(self, sender: str, message_untrusted: bytes) -> None:
        """Take a notification that the agent `sender` has sent through NIXL, unless too many wait already."""
        self._deliver_posted()
        bytes_waiting = self._notification_bytes_waiting + len(message_untrusted)
        if self._notifications_waiting >= NOTIFICATIONS_WAITING_MAX or bytes_waiting > NOTIFICATION_BYTES_WAITING_MAX:
            self._drop_notification()
            return
        self._notifications_waiting += 1
        self._notification_bytes_waiting = bytes_waiting
        self._inbox.put(NotificationReceived(sender, message_untrusted))

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_running, "control socket", self._serve_control, self._log_crash)
            is_empty = True
            while True:
                now_ns, next_ns = self._clock.now_ns(), self._core.next_deadline()
                # The core has heard of all that this book has, and has ended what is due; not while it hears first
                # what was said when this process stood still.
                if not self._core.hears_first:
                    if is_empty and self._looks_ns <= now_ns:
                        self._end_overdue(now_ns)
                    if next_ns is None or next_ns > self._looks_ns:
                        next_ns = self._looks_ns
                await self._inbox.wait(seconds_until(next_ns, now_ns))
                self._named_in_turn = 0
                is_empty = False
                for _ in range(MESSAGES_PER_TURN_MAX):
                    if (message := self._inbox.take_one()) is None:
                        is_empty = True
                        break
                    self._step(partial(self._take_in, message))
                    if self._named_in_turn >= LEASES_PER_TURN_MAX:
                        break
                self._step(self._core.advance)
                self._catch_up()

    def _end_overdue(self, now_ns: int) -> None:
        """What was owed at the last look already, and is still, was lost. The core may have heard of a grant a little
        later than this book did, and counts from there: hence twice the time between two looks."""
        for request_id, lease in self._owed_before.items():
            if self._owed.get(request_id) == lease:
                self._log_crash("lease keeper", LostEnd(f"the end of the lease of request {request_id} was lost"))
                self._end(lease, expired=True)
                self._sums.pop(lease, None)
        self._owed_before = dict(self._owed)
        self._looks_ns = now_ns + self._look_ns

    async def _serve_control(self) -> None:
        control = self._control
        while True:
            asked = await control.receive()
            self._deliver_posted()
            control.charge(asked.reply_address, units_to_decode(asked.frames_untrusted), understood=False)
            try:
                message = wire.decode_request(asked.frames_untrusted)
            except DecodeFailed as error:
                # No answer: there is none that such a sender would understand.
                control.charge(asked.reply_address, MALFORMED_UNITS, understood=False)
                malformed = MessageMalformed(sender="somebody who is connected", detail=error.detail)
                self._log_failure("control socket", malformed)
                self._figures.note(TURNED_AWAY, CONTROL_SOCKET, MALFORMED)
                continue
            match message:
                case Inspect():  # which the inspector charges for, by what it answers
                    self._inspect(message, asked.reply_address)
                case wire.AskSums():
                    frames = self._sums_frames(message)
                    control.charge(asked.reply_address, MESSAGE_UNITS + units_to_send(frames))
                    if frames:
                        control.reply(asked.reply_address, frames)
                case Meet(places=places):
                    report, begun = self._meet(message)
                    control.charge(asked.reply_address, MESSAGE_UNITS + len(places) + ASK_UNITS * begun)
                    self._answer(asked.reply_address, report)
                case Leave(secret=secret):
                    is_ours = hmac.compare_digest(secret, self._leave_secret)
                    control.charge(
                        asked.reply_address, MESSAGE_UNITS if is_ours else MALFORMED_UNITS, understood=is_ours
                    )
                    if is_ours:
                        self._inbox.put(_control_event(message, asked.reply_address))
                    else:
                        detail = "it asks this worker to leave, and does not come from its engine"
                        self._log_failure("control socket", MessageMalformed(sender="a stranger", detail=detail))
                        self._figures.note(TURNED_AWAY, CONTROL_SOCKET, MALFORMED)
                case _:
                    control.charge(asked.reply_address, MESSAGE_UNITS + len(message.leases))
                    self._note_sender(message.engine_id, message.rank, asked.reply_address)
                    self._inbox.put(_control_event(message, asked.reply_address))

    def _note_sender(self, engine_id: str, rank: int, reply_to: bytes) -> None:
        known = self._whereabouts.pop(engine_id, None) or _Whereabouts()
        self._whereabouts[engine_id] = known  # behind all others
        known.address = self._control.sender_of(reply_to)
        if rank in known.ranks or len(known.ranks) < RANKS_HEARD_MAX:
            known.ranks[rank] = reply_to
        if len(self._whereabouts) > SENDERS_MAX:
            self._whereabouts.popitem(last=False)

    def _take_in(self, message: Event | NotificationReceived, now_ns: int) -> list[lending.LendingEffect]:
        if not isinstance(message, NotificationReceived):
            if isinstance(message, lending.HoldAsked | lending.ReleaseAsked):
                self._named_in_turn += len(message.leases)
            return self._core.handle(message, now_ns)
        length_bytes = len(message.message_untrusted)
        self._notifications_waiting -= 1
        self._notification_bytes_waiting -= length_bytes
        self._named_in_turn += length_bytes // NOTIFICATION_BYTES_PER_LEASE
        parsed = notifications.parse_notification(message.message_untrusted)
        if isinstance(parsed, notifications.Malformed):
            detail = f"{parsed.reason}: {parsed.found}"
            self._log_failure("notification", MessageMalformed(sender=message.sender, detail=detail))
            self._figures.note(TURNED_AWAY, NOTIFICATIONS, MALFORMED)
            return []
        if isinstance(parsed, notifications.Heartbeat):
            self._named_in_turn += len(parsed.request_ids)
        return self._core.handle(_notification_event(message.sender, parsed), now_ns)

    def _drop_notification(self) -> None:
        self.notifications_dropped += 1
        self._figures.note(TURNED_AWAY, NOTIFICATIONS, DROPPED)
        if is_said(self.notifications_dropped):
            self._log_failure("notification", NotificationsDropped(dropped=self.notifications_dropped))

    # --- out --------------------------------------------------------------------------------------------------------

    def _step(self, step: Callable[[int], list[lending.LendingEffect]]) -> None:
        """Run the core once, and carry out what it says. What raises is logged, and only that is lost."""
        try:
            effects = step(self._clock.now_ns())
        except Exception as error:
            self._log_crash("lease keeper", error)
            return
        carry_out(effects, self._execute, partial(self._log_crash, "lease keeper"))

    def _execute(self, effect: lending.LendingEffect) -> None:
        match effect:
            case lending.AnswerHold(reply_to=reply_to):
                held = tuple(wire.HeldLease(*lease, remaining_ns) for lease, remaining_ns in effect.held)
                gone = tuple(wire.gone_lease(lease, why) for lease, why in effect.gone)
                answer = wire.HoldAnswer(sent_ns=effect.sent_ns, held=held, gone=gone, agent=self._agent)
                self._answer(reply_to, answer)
            case lending.AnswerRelease(reply_to=reply_to, leases=leases):
                self._answer(reply_to, wire.Released(leases=leases))
            case lending.TellLeaving(reply_to=reply_to, grace_ns=grace_ns):
                self._answer(reply_to, wire.Leaving(grace_ns=grace_ns))
            case lending.AnswerLeave(reply_to=reply_to, leases=open_leases):
                self._answer(reply_to, LeaveTaken(leases=open_leases))
            case lending.FreeBlocks(lease=lease, expired=expired):
                self._catch_up()
                self._end(lease, expired=expired)
            case lending.ForgetLease(lease=lease):
                self._sums.pop(lease, None)
            case lending.WatchNotifications(is_expected=is_expected):
                self._watch_notifications(is_expected)
            case lending.NoteLateRelease(sender=sender, request_id=request_id, was_expired=was_expired):
                self.late_releases += 1
                self._figures.note(LATE_NOTIFICATIONS if was_expired else STRAY_RELEASES)
                self._log_failure(f"lease of {request_id}", ConsumerUnknown(sender=sender, request_id=request_id))
            case _:
                assert_never(effect)

    def _end(self, lease: LeaseName, *, expired: bool) -> None:
        self._emit(SendEnded(lease=lease, expired=expired))
        if self._owed.get(lease.request_id) == lease:  # not that of a later request of this id
            del self._owed[lease.request_id]

    def _sums_frames(self, asked: wire.AskSums) -> tuple[bytes, ...]:
        """The answer; empty: there is none."""
        lease = self._core.lent_as(asked.lease)
        encoded = self._sums.get(lease) if lease is not None else None
        answer = wire.sums_answer(asked, encoded) if encoded is not None else None
        return wire.encode_answer(answer) if answer is not None else ()

    def _answer(self, reply_to: ReplyAddress, answer: wire.ControlAnswer | LeaveTaken | MeetReport) -> None:
        assert isinstance(reply_to, bytes)
        self._control.reply(reply_to, wire.encode_answer(answer))


# --- translation ----------------------------------------------------------------------------------------------------


def _command_event(command: LeaseCommand) -> Event:
    match command:
        case LeaseComputing(lease=lease, age_seconds=age_seconds):
            return lending.Computing(lease=lease, age_ns=to_ns(age_seconds))
        case LeaseGranted(lease=lease, blocks=blocks, fixed_seconds=seconds):
            return lending.Granted(lease=lease, blocks=blocks, fixed_ns=None if seconds is None else to_ns(seconds))
        case LeaseWithdrawn(lease=lease):
            return lending.Withdrawn(lease=lease)


def _control_event(message: wire.LeaseRequest | Leave, reply_to: ReplyAddress) -> Event:
    match message:
        case Leave(grace_ns=grace_ns):
            return lending.Leave(reply_to=reply_to, grace_ns=grace_ns)
        case wire.Hold():
            return lending.HoldAsked(
                reply_to=reply_to,
                engine_id=message.engine_id,
                rank=message.rank,
                ranks=message.ranks,
                sent_ns=message.sent_ns,
                leases=message.leases,
                incarnation=message.incarnation,
            )
        case wire.Release():
            return lending.ReleaseAsked(
                reply_to=reply_to,
                engine_id=message.engine_id,
                rank=message.rank,
                ranks=message.ranks,
                leases=message.leases,
                incarnation=message.incarnation,
            )


def _notification_event(sender: str, parsed: notifications.Release | notifications.Heartbeat) -> Event:
    match parsed:
        case notifications.Release():
            return _release_event(sender, parsed)
        case notifications.Heartbeat(request_ids=request_ids, or_release=release):
            other = None if release is None else _release_event(sender, release)
            return lending.HeartbeatNotified(sender=sender, request_ids=request_ids, or_release=other)


def _release_event(sender: str, release: notifications.Release) -> lending.ReleaseNotified:
    return lending.ReleaseNotified(sender=sender, request_id=release.request_id, ranks=release.consumers)
