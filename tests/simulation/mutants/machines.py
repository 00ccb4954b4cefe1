"""Mutants of the tables: one handler of one machine does something else."""

from __future__ import annotations

from typing import Any

import msgspec

from statemachine import lease, peer, request, transfer
from statemachine.kernel import NO_EFFECTS, Effect, Effects, Event, Handler
from statemachine.request import State
from tests.simulation.faults import Kind
from tests.simulation.mutants.mutant import Mutant, Patch, fault

PENDING, READING, DRAINING = State.PENDING_HANDSHAKE, State.READING, State.DRAINING
HELD, COMPUTING = lease.State.HELD, lease.State.COMPUTING

STALLED_READS = (fault(Kind.READ_STALL, "d0>p0", 0.0, 6.0),)
READS_STALLED_FOR_LONG = (fault(Kind.READ_STALL, "d0>p0", 0.0, 20.0),)
READ_ERRORS = (fault(Kind.READ_ERROR, "d0>p0", 0.0, 4.0),)
SOME_READ_ERRORS = (fault(Kind.READ_ERROR, "d0>p0", 0.5, 0.05),)
CUT_OFF = (fault(Kind.PARTITION, "d0>p0", 1.0, 6.0),)
UNREACHABLE = (fault(Kind.PARTITION, "d0>p0", 0.0, 4.0),)
LOST_NOTIFICATIONS = (fault(Kind.NOTIFICATION_LOSS, "d0>p0", 0.0, 4.0, 0.5),)
LOST_NOTIFICATIONS_AND_A_QUEUE = (
    fault(Kind.NOTIFICATION_LOSS, "d0>p0", 0.0, 12.0, 0.9),
    fault(Kind.LONG_QUEUE, "d0", 0.0, 5.0, 0.5),
)
TWO_RANKS = (fault(Kind.TWO_RANKS, "p0", 0.0, 4.0),)
QUICK_RESTARTS, QUICK_REPLACEMENTS = (
    tuple(
        each
        for at in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
        for each in (fault(Kind.READ_STALL, "d0>p0", at - 0.4, 0.45), fault(kind, "p0", at, 0.01))
    )
    for kind in (Kind.CRASH_SAME_ID, Kind.CRASH_NEW_ID)
)
"""The next life begins before anybody has noticed that READs from the one before hang."""


def stay(value: Any, event: Event) -> tuple[Any, Effects]:
    """Nothing happens."""
    return value, NO_EFFECTS


def without(handler: Handler, *unwanted: type[Effect]) -> Handler:
    """The same handler, but these effects are forgotten."""

    def forgetful(value: Any, event: Event) -> tuple[Any, Effects]:
        value, effects = handler(value, event)
        return value, tuple(effect for effect in effects if not isinstance(effect, unwanted))

    return forgetful


def _end_now(ending: State) -> Handler:
    """End as draining would, without draining."""

    drain = request.MACHINE.table[READING, request.Aborted].handler

    def end(value: request.Request, event: Event) -> tuple[request.Request, Effects]:
        drained, _ = drain(value, request.Aborted())
        ended = msgspec.structs.replace(drained, state=ending, in_flight=frozenset(), ending=None)
        return ended, (request.SendRelease(), request.Report(failure=drained.failure))

    return end


# --- request --------------------------------------------------------------------------------------------------------


def _believe_what_was_begun(patch: Patch) -> None:
    def complete(value: request.Request, event: request.ReadCompleted) -> tuple[request.Request, Effects]:
        done = msgspec.structs.replace(value, state=State.DONE, in_flight=frozenset())
        return done, (request.SendRelease(), request.Report(failure=None))

    patch.handler(request.MACHINE, (READING, request.ReadCompleted), complete)
    patch.handler(request.MACHINE, (READING, request.LeaseLapsed), stay)


def _report_before_drained(patch: Patch) -> None:
    patch.handler(request.MACHINE, (READING, request.LeaseLapsed), _end_now(State.EXPIRED))


def _abort_without_draining(patch: Patch) -> None:
    patch.handler(request.MACHINE, (READING, request.Aborted), _end_now(State.FAILED))


def _no_deadline(patch: Patch) -> None:
    patch.handler(request.MACHINE, (READING, request.LeaseLapsed), stay)
    patch.handler(request.MACHINE, (READING, request.DeadlinePassed), stay)


def _deadline_ignored(patch: Patch) -> None:
    patch.handler(request.MACHINE, (READING, request.DeadlinePassed), stay)


def _drain_for_ever(patch: Patch) -> None:
    patch.handler(request.MACHINE, (DRAINING, request.QuiesceTimeout), stay)


def _fail_without_report(patch: Patch) -> None:
    pair = (PENDING, request.PeerFailed)
    patch.handler(request.MACHINE, pair, without(request.MACHINE.table[pair].handler, request.Report))


def _failed_handshake_counts_as_loaded(patch: Patch) -> None:
    def load(value: request.Request, event: request.PeerFailed) -> tuple[request.Request, Effects]:
        return msgspec.structs.replace(value, state=State.DONE), (request.Report(failure=None),)

    patch.handler(request.MACHINE, (PENDING, request.PeerFailed), load)


def _report_who_only_notifies(patch: Patch) -> None:
    def report(value: request.Request, event: request.PeerReady) -> tuple[request.Request, Effects]:
        ended, effects = ready(value, event)
        return ended, effects if value.awaited else (*effects, request.Report(failure=None))

    pair = (PENDING, request.PeerReady)
    ready = request.MACHINE.table[pair].handler
    patch.handler(request.MACHINE, pair, report)


def _park_full_hits(patch: Patch) -> None:
    pair = (PENDING, request.PeerReady)
    ready = request.MACHINE.table[pair].handler
    silent = without(ready, request.Report)
    patch.handler(
        request.MACHINE, pair, lambda value, event: ready(value, event) if event.reads else silent(value, event)
    )


def _keep_what_was_aborted(patch: Patch) -> None:
    def keep(handler: Handler) -> Handler:
        silent = without(handler, request.SendRelease)

        def end(value: request.Request, event: Event) -> tuple[request.Request, Effects]:
            ended, _ = handler(value, event)
            is_aborted = isinstance(ended.failure, request.AbortedByClient)
            return silent(value, event) if is_aborted else handler(value, event)

        return end

    for pair in (
        (PENDING, request.Aborted),
        (DRAINING, request.ReadCompleted),
        (DRAINING, request.ReadFailed),
        (DRAINING, request.ReadSkipped),
    ):
        patch.handler(request.MACHINE, pair, keep(request.MACHINE.table[pair].handler))


def _keep_what_was_read(patch: Patch) -> None:
    pair = (READING, request.ReadCompleted)
    patch.handler(request.MACHINE, pair, without(request.MACHINE.table[pair].handler, request.SendRelease))


def _retry_without_budget(patch: Patch) -> None:
    def fail(value: request.Request, event: Event) -> tuple[request.Request, Effects]:
        after, effects = failed(value, event)
        return msgspec.structs.replace(after, retries_left=value.retries_left), effects

    pair = (READING, request.ReadFailed)
    failed = request.MACHINE.table[pair].handler
    patch.handler(request.MACHINE, pair, fail)


REQUEST = (
    Mutant(
        name="believe what was begun",
        row=1,
        broken="a READ that began under its lease is believed, however late it completes",
        apply=_believe_what_was_begun,
        faults=CUT_OFF,
        oracle="bytes",
    ),
    Mutant(
        name="report before drained",
        row=3,
        broken="a request whose lease lapses is reported at once, while its READ goes on writing",
        apply=_report_before_drained,
        faults=STALLED_READS,
        oracle="block reuse",
    ),
    Mutant(
        name="abort without draining",
        row=8,
        broken="an abort gives the destination blocks back under the READ",
        apply=_abort_without_draining,
        faults=(*STALLED_READS, fault(Kind.ABORT, "d0", 0.0, 4.0)),
        oracle="block reuse",
    ),
    Mutant(
        name="no deadline",
        row=45,
        broken="no timer ends a request whose READ hangs",
        apply=_no_deadline,
        faults=READS_STALLED_FOR_LONG,
        oracle="bound",
    ),
    Mutant(
        name="deadline ignored",
        row=45,
        broken="a request that reads outlives its own deadline for as long as its lease is proven",
        apply=_deadline_ignored,
        faults=STALLED_READS,
        oracle="bound",
    ),
    Mutant(
        name="drain for ever",
        row=45,
        broken="a failed request waits for its READ without a bound",
        apply=_drain_for_ever,
        faults=READS_STALLED_FOR_LONG,
        oracle="bound",
    ),
    Mutant(
        name="fail without report",
        row=43,
        broken="the handshake fails and the engine is not told of the requests that waited for it",
        apply=_fail_without_report,
        faults=UNREACHABLE,
        oracle="bound",
    ),
    Mutant(
        name="failed handshake counts as loaded",
        row=26,
        broken="a request whose handshake failed is reported as loaded",
        apply=_failed_handshake_counts_as_loaded,
        faults=UNREACHABLE,
        oracle="bytes",
    ),
    Mutant(
        name="report who only notifies",
        row=25,
        broken="a request that reads nothing and that nobody awaits is reported",
        apply=_report_who_only_notifies,
        oracle="report once",
    ),
    Mutant(
        name="park full hits",
        row=41,
        broken="an awaited request of which every block is cached is never reported",
        apply=_park_full_hits,
        oracle="bound",
    ),
    Mutant(
        name="keep what was aborted",
        row=55,
        broken="an aborted request does not tell the prefill engine that it needs the blocks no more",
        apply=_keep_what_was_aborted,
        oracle="handed back",
    ),
    Mutant(
        name="keep what was read",
        row=54,
        broken="a loaded request does not release its blocks, which stay lent until the lease ends",
        apply=_keep_what_was_read,
        oracle="handed back",
    ),
    Mutant(
        name="retry without budget",
        row=None,
        broken="a request is tried again for as long as its lease is proven",
        apply=_retry_without_budget,
        faults=SOME_READ_ERRORS,
        oracle="retries",
    ),
)


# --- lease ----------------------------------------------------------------------------------------------------------


def _never_expire(patch: Patch) -> None:
    patch.handler(lease.MACHINE, (HELD, lease.DeadlinePassed), stay)


def _drop_early_notifications(patch: Patch) -> None:
    patch.handler(lease.MACHINE, (COMPUTING, lease.ConsumerNotified), stay)


def _count_messages(patch: Patch) -> None:
    def notify(value: lease.Lease, event: lease.ConsumerNotified) -> tuple[lease.Lease, Effects]:
        sender = f"message {len(value.consumers)} of {event.sender}"
        return counted(value, msgspec.structs.replace(event, sender=sender))

    counted = lease.MACHINE.table[HELD, lease.ConsumerNotified].handler
    patch.handler(lease.MACHINE, (HELD, lease.ConsumerNotified), notify)


def _first_consumer_frees(patch: Patch) -> None:
    patch.handler(
        lease.MACHINE,
        (HELD, lease.ConsumerNotified),
        lambda value, event: (msgspec.structs.replace(value, state=lease.State.DONE), (lease.FreeBlocks(),)),
    )


def _renew_without_timer(patch: Patch) -> None:
    pair = (HELD, lease.Renewed)
    patch.handler(lease.MACHINE, pair, without(lease.MACHINE.table[pair].handler, lease.StartLeaseTimer))


def _renewal_shortens(patch: Patch) -> None:
    def renew(value: lease.Lease, event: lease.Renewed) -> tuple[lease.Lease, Effects]:
        renewed = msgspec.structs.replace(value, deadline_ns=event.deadline_ns)
        return renewed, (lease.StartLeaseTimer(deadline_ns=event.deadline_ns),)

    patch.handler(lease.MACHINE, (HELD, lease.Renewed), renew)


def _free_and_stay_held(patch: Patch) -> None:
    patch.handler(lease.MACHINE, (HELD, lease.ConsumerNotified), lambda value, event: (value, (lease.FreeBlocks(),)))


def _free_what_was_withdrawn(patch: Patch) -> None:
    pair = (COMPUTING, lease.Withdrawn)
    withdraw = lease.MACHINE.table[pair].handler
    patch.handler(lease.MACHINE, pair, lambda value, event: (withdraw(value, event)[0], (lease.FreeBlocks(),)))


LEASE = (
    Mutant(
        name="lease never expires",
        row=54,
        broken="blocks whose consumer is gone are kept for ever",
        apply=_never_expire,
        faults=LOST_NOTIFICATIONS,
        oracle="free once",
    ),
    Mutant(
        name="early notification dropped",
        row=56,
        broken="a release that overtakes the grant is forgotten, and the blocks stay lent until the lease ends",
        apply=_drop_early_notifications,
        oracle="handed back",
    ),
    Mutant(
        name="messages counted",
        row=19,
        broken="a consumer that notifies twice is counted twice",
        apply=_count_messages,
        faults=TWO_RANKS,
        oracle="held",
    ),
    Mutant(
        name="first consumer frees",
        row=None,
        broken="the first of two consumers ends the lease",
        apply=_first_consumer_frees,
        faults=TWO_RANKS,
        oracle="held",
    ),
    Mutant(
        name="renewal forgets the timer",
        row=52,
        broken="a renewal moves the deadline, and nothing comes back to look at it",
        apply=_renew_without_timer,
        faults=LOST_NOTIFICATIONS_AND_A_QUEUE,
        oracle="free once",
    ),
    Mutant(
        name="renewal shortens",
        row=62,
        broken="a heartbeat right after the grant brings the end of the lease closer",
        apply=_renewal_shortens,
        faults=LOST_NOTIFICATIONS_AND_A_QUEUE,
        oracle="held",
    ),
    Mutant(
        name="freed and still held",
        row=29,
        broken="a lease that was consumed frees its blocks once more at the deadline",
        apply=_free_and_stay_held,
        oracle="free once",
    ),
    Mutant(
        name="withdrawn is freed",
        row=None,
        broken="a request that never lent its blocks is reported as a lease that ended",
        apply=_free_what_was_withdrawn,
        oracle="free once",
    ),
)


# --- peer -----------------------------------------------------------------------------------------------------------


def _rebuild_under_reads(patch: Patch) -> None:
    def suspect(value: peer.Peer, event: Event) -> tuple[peer.Peer, Effects]:
        return msgspec.structs.replace(value, state=peer.State.IDLE), (peer.TearDownConnection(),)

    patch.handler(peer.MACHINE, (peer.State.READY, peer.ConnectionSuspect), suspect)


def _retire_under_reads(patch: Patch) -> None:
    def retire(value: peer.Peer, event: Event) -> tuple[peer.Peer, Effects]:
        draining, _ = drain(value, event)
        return msgspec.structs.replace(draining, state=peer.State.GONE), (peer.TearDownConnection(),)

    pair = (peer.State.READY, peer.Retired)
    drain = peer.MACHINE.table[pair].handler
    patch.handler(peer.MACHINE, pair, retire)


def _back_off_for_ever(patch: Patch) -> None:
    patch.handler(peer.MACHINE, (peer.State.BACKOFF, peer.BackoffElapsed), stay)


def _never_rebuild(patch: Patch) -> None:
    patch.handler(peer.MACHINE, (peer.State.READY, peer.ConnectionSuspect), stay)


PEER = (
    Mutant(
        name="rebuild under READs",
        row=13,
        broken="a restarted engine's agent is removed while READs from its old life are in flight",
        apply=_rebuild_under_reads,
        faults=QUICK_RESTARTS,
        oracle="agents",
        first_seed=12,
    ),
    Mutant(
        name="retire under READs",
        row=14,
        broken="a replaced engine's agent is removed while READs from it are in flight",
        apply=_retire_under_reads,
        faults=QUICK_REPLACEMENTS,
        oracle="agents",
    ),
    Mutant(
        name="back off for ever",
        row=40,
        broken="an engine that could not be reached once is never tried again",
        apply=_back_off_for_ever,
        faults=UNREACHABLE,
        oracle="recovery",
    ),
    Mutant(
        name="never rebuild",
        row=47,
        broken="a connection that broke is used for ever",
        apply=_never_rebuild,
        faults=READ_ERRORS,
        oracle="recovery",
    ),
)


# --- transfer -------------------------------------------------------------------------------------------------------


def _never_lift(patch: Patch) -> None:
    for event in (transfer.Completed, transfer.Errored):
        pair = (transfer.State.STUCK, event)
        patch.handler(transfer.MACHINE, pair, without(transfer.MACHINE.table[pair].handler, transfer.LiftQuarantine))


def _keep_handles(patch: Patch) -> None:
    pair = (transfer.State.POSTED, transfer.Completed)
    patch.handler(transfer.MACHINE, pair, without(transfer.MACHINE.table[pair].handler, transfer.ReleaseHandle))


TRANSFER = (
    Mutant(
        name="quarantine never lifted",
        row=5,
        broken="blocks that were quarantined stay out of the pool when their READ has ended",
        apply=_never_lift,
        faults=STALLED_READS,
        oracle="leaks",
    ),
    Mutant(
        name="handles kept",
        row=None,
        broken="the handle of a READ that completed is never released",
        apply=_keep_handles,
        oracle="leaks",
    ),
)

MUTANTS = (*REQUEST, *LEASE, *PEER, *TRANSFER)
