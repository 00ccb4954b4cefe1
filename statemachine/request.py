"""One request on the decode engine: from "these blocks lie on that prefill engine" to exactly one report.

Everything that a request can go through is in the table below; rule one, as in h11: what affects the state of a
request lives in this file.

    pending_handshake   the request knows where its blocks are, the peer is not ready yet (or is being rebuilt)
    reading             READs are ordered; their destination blocks belong to NIXL until each READ is quiescent
    proving             every byte is here, and P is asked whether it still kept the blocks when the last one came
    draining            the request has failed, but READs may still write into its blocks: nothing is reported yet
    done                every byte is here and the lease provably outlived the last READ
    failed              it will not be loaded; `failure` says why
    expired             the lease is over, nobody can prove that it was not when the READs ended, or it took too long

Draining. A READ cannot be cancelled: releasing its handle does not stop the DMA, and an error of one of its requests
says nothing about the others (docs/nixl.md). So after the first failure the request waits until every READ is
quiescent: known to write no more. Only then are the blocks given back. If that takes too long the request ends as
failed(Quarantined): the client gets its answer, the blocks do not return to the pool.

Reads are numbered 0..n-1 within one attempt. All n count as in flight from the moment they are ordered. One that is
never posted, because the request had failed by then, is quiescent without having run.

Checks. What READs leave may have to be checked (`PeerReady.are_checked`); how, nothing here knows. A READ that has
completed is then awaited until it is known whether its bytes are those that P has lent. It is not in flight meanwhile:
whatever ends the request waits for no check, and where all bytes are here a connection that is lost means nothing. If
they are others the READ has failed, and is not tried again: what corrupts data may do so once more, unseen. So `done`
needs both, every check and the proof.

The proof. `proven_until_ns` is the instant, on this process's clock, up to which P is known to keep the blocks
(`hold.py`). It need not be known when a READ starts: a READ never waits for it. It must reach the end of the last READ
before the request is `done`; where it does not, P is asked once more, and any answer `Held` proves it, because a lease
that is over never comes back.

A retry goes back to `pending_handshake` when the failure was the transport's, retries are left, and P is not known to
have given the blocks up. By then every READ of the attempt is quiescent, so numbering starts anew.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from statemachine.failures import (
    AbortedByClient,
    ChecksumsMissing,
    DeadlineExceeded,
    Failure,
    LeaseNotProven,
    LeaseOver,
    ParamsFailure,
    Quarantined,
    is_transport_lost,
)
from statemachine.kernel import NO_EFFECTS, Effect, Event, Machine, MachineState, pairs, to
from statemachine.lease import LeaseName


class State(MachineState):
    PENDING_HANDSHAKE = "pending_handshake"
    READING = "reading"
    PROVING = "proving"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    Attributes:
        peer: engine id of the prefill engine.
        connection: number of the connection that the READs of this attempt stand on.
        in_flight: the READs that are not quiescent.
        unchecked: while it reads, the READs that are to be checked and were not yet.
        ending, failure: how a draining request will end, and how a failed or expired one ended.
        is_retryable: draining may lead back to pending_handshake.
        last_completed_ns: when the last READ of this attempt so far had all its bytes here.
        age_ns: for how long the engine had known the request when this was made, for the trace.
    """

    request_id: str
    lease: LeaseName
    peer: str
    retries_left: int
    state: State = State.PENDING_HANDSHAKE
    connection: int = 0
    in_flight: frozenset[int] = frozenset()
    unchecked: frozenset[int] = frozenset()
    ending: State | None = None
    failure: Failure | None = None
    is_retryable: bool = False
    last_completed_ns: int = 0
    age_ns: int = 0

    @property
    def awaited(self) -> frozenset[int]:
        """The READs that are not over, or not checked."""
        return self.in_flight | self.unchecked


# --- events ---------------------------------------------------------------------------------------------------------


class PeerReady(Event, frozen=True, kw_only=True):
    """The peer can be read from, over this connection; `reads` READs are needed, and what they leave may have to be
    checked."""

    connection: int
    reads: int
    are_checked: bool = False


class PeerFailed(Event, frozen=True, kw_only=True):
    """The peer cannot be read from: its handshake failed, it backs off, or it is given up."""

    failure: Failure


class ParamsRejected(Event, frozen=True, kw_only=True):
    """kv_transfer_params names blocks that the peer does not have or no checksums of, or makes no sense, or nobody has
    given it out."""

    failure: ParamsFailure | ChecksumsMissing


class ReadCompleted(Event, frozen=True, kw_only=True):
    """All bytes of one READ are here. P is known to have kept the blocks until `proven_until_ns`."""

    read: int
    completed_ns: int
    proven_until_ns: int


class ReadChecked(Event, frozen=True, kw_only=True):
    """What one READ has left is what P has lent. P is known to have kept the blocks until `proven_until_ns`."""

    read: int
    proven_until_ns: int


class ReadFailed(Event, frozen=True, kw_only=True):
    """One READ ended with an error, or did not pass its check. Unless it is quiescent, parts of it may still be in
    flight."""

    read: int
    failure: Failure
    is_quiescent: bool


class ReadQuiesced(Event, frozen=True, kw_only=True):
    """One READ is now known to write no more: it had failed, or was never posted."""

    read: int


class LeaseProven(Event, frozen=True, kw_only=True):
    """P is now known to have kept the blocks until `proven_until_ns`."""

    proven_until_ns: int


class LeaseGone(Event, frozen=True, kw_only=True):
    """P does not keep the blocks any more. `address` and `named` are as in `LeaseOver`."""

    why: str
    address: str = ""
    named: str = ""


class ProofTimeout(Event, frozen=True, kw_only=True):
    """P did not answer whether it kept the blocks."""

    waited_seconds: float


class PeerLost(Event, frozen=True, kw_only=True):
    """The connection was given up while READs on it are in flight."""

    failure: Failure


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """The request as a whole took too long. `late_seconds` is as in the failure."""

    timeout_seconds: float
    late_seconds: int = 0


class QuiesceTimeout(Event, frozen=True, kw_only=True):
    """Waited long enough for READs to become quiescent."""

    waited_seconds: float


class Aborted(Event, frozen=True, kw_only=True):
    """The engine gave the request up."""


class ShellFailed(Event, frozen=True, kw_only=True):
    """The actor that serves this request crashed, or the connector is stopping."""

    failure: Failure


# --- effects --------------------------------------------------------------------------------------------------------


class PostReads(Effect, frozen=True, kw_only=True):
    """Post READs 0..n-1 of this attempt."""


class CheckRead(Effect, frozen=True, kw_only=True):
    """Find out whether what this READ has left is what P has lent."""

    read: int


class AskForProof(Effect, frozen=True, kw_only=True):
    """Ask P now whether it still keeps the blocks; bound the wait for its answer."""


class StartQuiesceTimer(Effect, frozen=True, kw_only=True):
    """Bound the wait for READs to become quiescent."""


class AwaitPeer(Effect, frozen=True, kw_only=True):
    """Wait for the peer again (a retry)."""


class Report(Effect, frozen=True, kw_only=True):
    """Tell the engine that this request has ended. `failure` is None for done. READs of `in_flight` may still write
    into the destination blocks, which must not return to the pool."""

    failure: Failure | None


Effects: TypeAlias = tuple[PostReads | CheckRead | AskForProof | StartQuiesceTimer | AwaitPeer | Report, ...]


# --- handlers -------------------------------------------------------------------------------------------------------


def _end(request: Request, state: State, failure: Failure) -> tuple[Request, Effects]:
    ended = msgspec.structs.replace(
        request, state=state, failure=failure, ending=None, is_retryable=False, in_flight=frozenset()
    )
    return ended, (Report(failure=failure),)


def _finish(request: Request) -> tuple[Request, Effects]:
    return msgspec.structs.replace(request, state=State.DONE), (Report(failure=None),)


def _over(request: Request, event: LeaseGone) -> LeaseOver:
    return LeaseOver(
        peer=request.peer,
        address=event.address,
        remote_request_id=request.lease.request_id,
        why=event.why,
        named=event.named,
    )


def _timed_out(request: Request, event: DeadlinePassed) -> DeadlineExceeded:
    return DeadlineExceeded(
        timeout_seconds=event.timeout_seconds, phase=request.state.value, late_seconds=event.late_seconds
    )


def _on_peer_ready(request: Request, event: PeerReady) -> tuple[Request, Effects]:
    if event.reads == 0:
        return _finish(request)  # nothing came from P, so there is nothing to prove
    reads = frozenset(range(event.reads))
    reading = msgspec.structs.replace(
        request,
        state=State.READING,
        connection=event.connection,
        in_flight=reads,
        unchecked=reads if event.are_checked else frozenset(),
    )
    return reading, (PostReads(),)


def _fail(request: Request, event: PeerFailed | ParamsRejected | ShellFailed) -> tuple[Request, Effects]:
    return _end(request, State.FAILED, event.failure)


def _expire(request: Request, event: LeaseGone) -> tuple[Request, Effects]:
    return _end(request, State.EXPIRED, _over(request, event))


def _time_out(request: Request, event: DeadlinePassed) -> tuple[Request, Effects]:
    return _end(request, State.EXPIRED, _timed_out(request, event))


def _abort(request: Request, event: Aborted) -> tuple[Request, Effects]:
    return _end(request, State.FAILED, AbortedByClient())


def _without(request: Request, read: int) -> Request:
    return msgspec.structs.replace(request, in_flight=request.in_flight - {read})


def _complete(request: Request, event: ReadCompleted) -> tuple[Request, Effects]:
    last_completed_ns = max(request.last_completed_ns, event.completed_ns)
    request = msgspec.structs.replace(_without(request, event.read), last_completed_ns=last_completed_ns)
    if event.read in request.unchecked:
        return request, (CheckRead(read=event.read),)
    return _finish_if_proven(request, event.proven_until_ns)


def _check(request: Request, event: ReadChecked) -> tuple[Request, Effects]:
    request = msgspec.structs.replace(request, unchecked=request.unchecked - {event.read})
    return _finish_if_proven(request, event.proven_until_ns)


def _finish_if_proven(request: Request, proven_until_ns: int) -> tuple[Request, Effects]:
    """One READ less is awaited."""
    if request.awaited:
        return request, NO_EFFECTS
    if request.last_completed_ns <= proven_until_ns:
        return _finish(request)
    return msgspec.structs.replace(request, state=State.PROVING), (AskForProof(),)


def _prove(request: Request, event: LeaseProven) -> tuple[Request, Effects]:
    if request.last_completed_ns <= event.proven_until_ns:
        return _finish(request)
    return request, NO_EFFECTS


def _give_up_proof(request: Request, event: ProofTimeout) -> tuple[Request, Effects]:
    failure = LeaseNotProven(
        peer=request.peer, remote_request_id=request.lease.request_id, waited_seconds=event.waited_seconds
    )
    return _end(request, State.EXPIRED, failure)


def _drain(request: Request, ending: State, failure: Failure, *, is_retryable: bool = False) -> tuple[Request, Effects]:
    draining = msgspec.structs.replace(
        request,
        state=State.DRAINING,
        unchecked=frozenset(),
        ending=ending,
        failure=failure,
        is_retryable=is_retryable and request.retries_left > 0,
    )
    return (draining, (StartQuiesceTimer(),)) if draining.in_flight else _finish_draining(draining)


def _fail_reading(request: Request, event: ReadFailed) -> tuple[Request, Effects]:
    if event.is_quiescent:
        request = _without(request, event.read)
    return _drain(request, State.FAILED, event.failure, is_retryable=is_transport_lost(event.failure))


def _lose_peer(request: Request, event: PeerLost) -> tuple[Request, Effects]:
    if not request.in_flight:
        return request, NO_EFFECTS  # its bytes are here, and are being checked
    return _drain(request, State.FAILED, event.failure, is_retryable=True)


def _lose_lease(request: Request, event: LeaseGone) -> tuple[Request, Effects]:
    return _drain(request, State.EXPIRED, _over(request, event))


def _time_out_reading(request: Request, event: DeadlinePassed) -> tuple[Request, Effects]:
    return _drain(request, State.EXPIRED, _timed_out(request, event))


def _abort_reading(request: Request, event: Aborted) -> tuple[Request, Effects]:
    return _drain(request, State.FAILED, AbortedByClient())


def _crash_reading(request: Request, event: ShellFailed) -> tuple[Request, Effects]:
    return _drain(request, State.FAILED, event.failure)


def _drain_one(request: Request, event: ReadCompleted | ReadFailed | ReadQuiesced) -> tuple[Request, Effects]:
    if isinstance(event, ReadFailed) and not event.is_quiescent:
        return request, NO_EFFECTS
    request = _without(request, event.read)
    return (request, NO_EFFECTS) if request.in_flight else _finish_draining(request)


def _finish_draining(request: Request) -> tuple[Request, Effects]:
    """Every READ is quiescent: try again, or end as decided when draining began."""
    assert request.ending is not None
    assert request.failure is not None
    if not request.is_retryable:
        return _end(request, request.ending, request.failure)
    again = msgspec.structs.replace(
        request,
        state=State.PENDING_HANDSHAKE,
        retries_left=request.retries_left - 1,
        ending=None,
        failure=None,
        is_retryable=False,
        last_completed_ns=0,
    )
    return again, (AwaitPeer(),)


def _stop_retry(request: Request, event: LeaseGone | DeadlinePassed | Aborted | ShellFailed) -> tuple[Request, Effects]:
    return msgspec.structs.replace(request, is_retryable=False), NO_EFFECTS


def _quarantine(request: Request, event: QuiesceTimeout) -> tuple[Request, Effects]:
    assert request.failure is not None
    failure = Quarantined(reads=len(request.in_flight), waited_seconds=event.waited_seconds, cause=request.failure.kind)
    ended = msgspec.structs.replace(request, state=State.FAILED, failure=failure, ending=None, is_retryable=False)
    return ended, (Report(failure=failure),)


# --- the table ------------------------------------------------------------------------------------------------------

_PENDING, _READING, _PROVING, _DRAINING = State.PENDING_HANDSHAKE, State.READING, State.PROVING, State.DRAINING
_DONE, _FAILED, _EXPIRED = State.DONE, State.FAILED, State.EXPIRED

MACHINE: Machine[Request, Effects] = Machine(
    name="request",
    states=State,
    initial=_PENDING,
    terminal=frozenset({_DONE, _FAILED, _EXPIRED}),
    events=(
        PeerReady,
        PeerFailed,
        ParamsRejected,
        ReadCompleted,
        ReadChecked,
        ReadFailed,
        ReadQuiesced,
        LeaseProven,
        LeaseGone,
        ProofTimeout,
        PeerLost,
        DeadlinePassed,
        QuiesceTimeout,
        Aborted,
        ShellFailed,
    ),
    table={
        (_PENDING, PeerReady): to(_on_peer_ready, _READING, _DONE),
        (_PENDING, PeerFailed): to(_fail, _FAILED),
        (_PENDING, ParamsRejected): to(_fail, _FAILED),
        (_PENDING, LeaseGone): to(_expire, _EXPIRED),
        (_PENDING, DeadlinePassed): to(_time_out, _EXPIRED),
        (_PENDING, Aborted): to(_abort, _FAILED),
        (_PENDING, ShellFailed): to(_fail, _FAILED),
        (_READING, ReadCompleted): to(_complete, _READING, _PROVING, _DONE),
        (_READING, ReadChecked): to(_check, _READING, _PROVING, _DONE),
        (_READING, ReadFailed): to(_fail_reading, _DRAINING, _PENDING, _FAILED),
        (_READING, PeerLost): to(_lose_peer, _READING, _DRAINING),
        (_READING, LeaseGone): to(_lose_lease, _DRAINING, _EXPIRED),
        (_READING, DeadlinePassed): to(_time_out_reading, _DRAINING, _EXPIRED),
        (_READING, Aborted): to(_abort_reading, _DRAINING, _FAILED),
        (_READING, ShellFailed): to(_crash_reading, _DRAINING, _FAILED),
        (_PROVING, LeaseProven): to(_prove, _PROVING, _DONE),
        (_PROVING, LeaseGone): to(_expire, _EXPIRED),
        (_PROVING, ProofTimeout): to(_give_up_proof, _EXPIRED),
        (_PROVING, PeerFailed): to(_fail, _FAILED),
        (_PROVING, DeadlinePassed): to(_time_out, _EXPIRED),
        (_PROVING, Aborted): to(_abort, _FAILED),
        (_PROVING, ShellFailed): to(_fail, _FAILED),
        (_DRAINING, ReadCompleted): to(_drain_one, _DRAINING, _PENDING, _FAILED, _EXPIRED),
        (_DRAINING, ReadFailed): to(_drain_one, _DRAINING, _PENDING, _FAILED, _EXPIRED),
        (_DRAINING, ReadQuiesced): to(_drain_one, _DRAINING, _PENDING, _FAILED, _EXPIRED),
        (_DRAINING, LeaseGone): to(_stop_retry, _DRAINING),
        (_DRAINING, DeadlinePassed): to(_stop_retry, _DRAINING),
        (_DRAINING, Aborted): to(_stop_retry, _DRAINING),
        (_DRAINING, ShellFailed): to(_stop_retry, _DRAINING),
        (_DRAINING, QuiesceTimeout): to(_quarantine, _FAILED),
    },
    ignored={
        **pairs((_PENDING,), (PeerLost,), "nothing is in flight; the handshake decides"),
        **pairs((_PROVING,), (PeerLost,), "the READs are over; P is asked again once it is connected"),
        **pairs((_DRAINING,), (PeerLost,), "the READs in flight are waited for already; the first failure is kept"),
        **pairs((_PENDING, _READING, _DRAINING), (LeaseProven,), "looked at when the last READ has completed"),
        **pairs((_PENDING, _READING, _DRAINING), (ProofTimeout,), "a timer of an attempt that has ended since"),
        **pairs((_PENDING, _READING, _PROVING), (QuiesceTimeout,), "a timer of an attempt that has drained since"),
    },
    impossible={
        **pairs((_PENDING,), (ReadCompleted, ReadFailed, ReadQuiesced), "no READ is ordered before the peer is ready"),
        **pairs((_PROVING,), (ReadCompleted, ReadFailed, ReadQuiesced), "every READ has completed"),
        **pairs((_PENDING, _PROVING, _DRAINING), (ReadChecked,), "the core drops a check that nobody waits for"),
        **pairs(
            (_READING,), (ReadQuiesced,), "only a READ that failed or was not posted becomes quiescent in this way"
        ),
        **pairs((_READING, _DRAINING), (PeerReady, PeerFailed, ParamsRejected), "only who waits is told of the peer"),
        **pairs((_PROVING,), (PeerReady, ParamsRejected), "nothing is read any more"),
    },
)
