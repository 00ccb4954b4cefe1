"""The lease keeper: the blocks that this engine lends, one lease machine per request.

Grants come from the scheduler through the engine thread; releases and heartbeats come as NIXL notifications, from
agents that this engine never added and must not trust. A notification that is malformed, or names a request that is
not lent here, is counted and logged, and changes nothing.

Expiry is the lease keeper's own timer, not a scan that runs when the engine happens to step. The blocks themselves are
freed by the scheduler, which learns of it in the next step's results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from connector.ports.nixl import NotificationReceived
from connector.runtime.clock import to_ns
from connector.runtime.mailbox import Mailbox
from connector.runtime.messages import (
    LateNotificationNoted,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    Outcome,
    SendEnded,
)
from connector.runtime.timers import TimerQueue
from connector.runtime.tracked import Recorder, Tracked
from connector.wire.notifications import Heartbeat, Malformed, Release, parse_notification
from statemachine import lease
from statemachine.failures import ActorCrashed, ConsumerUnknown, Failure
from statemachine.kernel import Event, ProtocolError

LeaseMessage: TypeAlias = LeaseComputing | LeaseGranted | LeaseWithdrawn | NotificationReceived

INBOX_LIMIT = 1 << 16
"""Messages that may wait. Beyond it notifications are dropped; their leases end at the deadline."""


class LeaseKeeper:
    """See the module's docstring.

    Args:
        renewal_seconds: how long a heartbeat extends a lease from now.
        expect_notifications: tells the port whether anybody may be reading from us.
    """

    def __init__(
        self,
        *,
        renewal_seconds: float,
        recorder: Recorder,
        emit: Callable[[Outcome], None],
        log_failure: Callable[[str, Failure], None],
        expect_notifications: Callable[[bool], None],
    ) -> None:
        self._renewal_ns = to_ns(renewal_seconds)
        self._recorder = recorder
        self._clock = recorder.clock
        self._emit = emit
        self._log_failure = log_failure
        self._expect_notifications = expect_notifications
        self.inbox: Mailbox[LeaseMessage] = Mailbox(INBOX_LIMIT)
        self._timers: TimerQueue[str] = TimerQueue()
        self._leases: dict[str, Tracked[lease.Lease]] = {}

    @property
    def open_leases(self) -> int:
        return len(self._leases)

    async def run(self) -> None:
        while True:
            await self.inbox.wait(self._timers.seconds_to_next(self._clock.now_ns()))
            while (message := self.inbox.take_one()) is not None:
                self._handle(message)
            for request_id in self._timers.pop_due(self._clock.now_ns()):
                self._apply(self._leases[request_id], lease.DeadlinePassed(now_ns=self._clock.now_ns()))

    def _handle(self, message: LeaseMessage) -> None:
        match message:
            case LeaseComputing(request_id=request_id):
                self._lease(request_id)
            case LeaseGranted():
                granted = self._lease(message.request_id)
                granted.blocks = message.blocks
                self._apply(granted, lease.Granted(deadline_ns=self._clock.now_ns() + to_ns(message.lease_seconds)))
            case LeaseWithdrawn(request_id=request_id):
                if (withdrawn := self._leases.get(request_id)) is not None:
                    self._apply(withdrawn, lease.Withdrawn())
            case NotificationReceived():
                self._read_notification(message)

    def _lease(self, request_id: str) -> Tracked[lease.Lease]:
        """The lease of a request; a request is announced again when it is scheduled again after a preemption."""
        known = self._leases.get(request_id)
        if known is None:
            known = Tracked(lease.MACHINE, lease.Lease(request_id=request_id), self._recorder, subject=request_id)
            self._leases[request_id] = known
            if len(self._leases) == 1:
                self._expect_notifications(True)
        return known

    def _read_notification(self, message: NotificationReceived) -> None:
        match parse_notification(message.message_untrusted):
            case Release(request_id=request_id, consumers=consumers):
                if (lent := self._leases.get(request_id)) is not None:
                    self._apply(lent, lease.ConsumerNotified(sender=message.sender, expected=consumers))
                    return
                self._emit(LateNotificationNoted())
                self._log_failure(
                    f"lease of {request_id}", ConsumerUnknown(sender=message.sender, request_id=request_id)
                )
            case Heartbeat(request_ids=request_ids):
                deadline_ns = self._clock.now_ns() + self._renewal_ns
                for request_id in request_ids:
                    if (lent := self._leases.get(request_id)) is not None:
                        self._apply(lent, lease.Renewed(deadline_ns=deadline_ns))
            case Malformed(found=found):
                self._log_failure("notification", ConsumerUnknown(sender=message.sender, request_id=found))

    def _apply(self, lent: Tracked[lease.Lease], event: Event) -> None:
        try:
            effects = lent.apply(event)
        except ProtocolError as error:
            # A bug elsewhere costs this one lease its event; its deadline still ends it.
            self._log_failure(f"lease of {lent.subject}", ActorCrashed(actor="lease machine", error=str(error)))
            return
        for effect in effects:
            match effect:
                case lease.StartLeaseTimer(deadline_ns=deadline_ns):
                    self._timers.set(lent.subject, deadline_ns)
                case lease.CountEarlyNotifications():
                    self._apply(lent, lease.EarlyNotificationsCounted())
                case lease.FreeBlocks():
                    expired = lent.value.state is lease.State.EXPIRED
                    self._emit(SendEnded(request_id=lent.subject, expired=expired))
        if lent.is_terminal and lent.subject in self._leases:
            self._timers.cancel(lent.subject)
            del self._leases[lent.subject]
            if not self._leases:
                self._expect_notifications(False)
