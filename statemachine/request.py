"""One request on the decode engine: from "these blocks lie on that prefill engine" to exactly one report.

Everything that a request can go through is in the table below; rule one, as in h11: what affects the state of a
request lives in this file.

    pending_handshake   the request knows where its blocks are, the peer is not ready yet (or is being rebuilt)
    reading             READs are ordered; their destination blocks belong to NIXL until each READ is quiescent
    draining            the request has failed, but READs may still write into its blocks: nothing is reported yet
    done                every byte is here and the lease provably outlived the last READ
    failed              it will not be loaded; `failure` says why
    expired             the lease ran out, or nobody can prove that it did not

The state that matters is `draining`. A READ cannot be cancelled: releasing its handle does not stop the DMA (nixl.md,
fact 1). So after the first failure the request waits until the end of every other READ has been seen. Only then are
the blocks given back. If a READ never ends, the request ends as failed(Quarantined): the client gets its answer, the
blocks do not return to the pool.

Reads are numbered 0..n-1 within one attempt. All n count as in flight from the moment they are ordered: a READ that
the shell then does not start ends with `ReadSkipped`, one that NIXL refuses with `ReadFailed`.

Releasing. READs carry no notification: the peer is told that this consumer is finished by an effect of its own, when
the request ends. Then everything that may happen before is safe to happen: a retry finds the blocks still lent, and
several requests that name the same blocks (parallel samples of one prompt) are served before the last lets go.

The proof. `proven_until_ns` is the instant, in this process's monotonic clock, up to which the lease is known to hold;
the shell has already taken off the clock error and a margin. A request is `done` only if its last READ completed
before it. Requests that only tell the peer "I do not need them" (`awaited` false: full prefix-cache hit, or finished
before it was scheduled) read nothing, prove nothing and are not reported.

A retry goes back to `pending_handshake` when the failure was the transport's, retries are left, and the lease is still
proven. By then every READ of the attempt is quiescent, so numbering starts anew.
"""

from __future__ import annotations

import msgspec

from statemachine.failures import (
    AbortedByClient,
    BadParams,
    DeadlineExceeded,
    Failure,
    LeaseNotProven,
    Quarantined,
    TransferError,
)
from statemachine.kernel import NO_EFFECTS, Effect, Effects, Event, Machine, MachineState, pairs, to


class State(MachineState):
    PENDING_HANDSHAKE = "pending_handshake"
    READING = "reading"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Until when the lease is known to hold (local monotonic ns), and why: `granted` or `assumed`."""

    proven_until_ns: int
    basis: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    `in_flight` are the reads that are not quiescent. `ending` and `failure` say how a draining request will end and
    how a failed or expired one ended; `retryable` whether draining may lead back.
    """

    request_id: str
    remote_request_id: str
    peer: str
    awaited: bool
    retries_left: int
    state: State = State.PENDING_HANDSHAKE
    proof: Proof | None = None
    in_flight: frozenset[int] = frozenset()
    ending: State | None = None
    failure: Failure | None = None
    retryable: bool = False
    last_completed_ns: int = 0


# --- events ---------------------------------------------------------------------------------------------------------


class PeerReady(Event, frozen=True, kw_only=True):
    """The peer can be read from: `reads` READs are needed, the lease is proven as far as `proof` says."""

    now_ns: int
    reads: int
    proof: Proof


class PeerFailed(Event, frozen=True, kw_only=True):
    """The handshake failed, the peer is backing off, or it restarted since it granted the blocks."""

    failure: Failure


class PeerIncompatible(Event, frozen=True, kw_only=True):
    """The two engines cannot exchange KV."""

    failure: Failure


class ParamsRejected(Event, frozen=True, kw_only=True):
    """kv_transfer_params is malformed, or names blocks that the peer does not have."""

    failure: BadParams


class ReadCompleted(Event, frozen=True, kw_only=True):
    """All bytes of one read are here."""

    read: int
    completed_ns: int


class ReadFailed(Event, frozen=True, kw_only=True):
    """One read ended with an error, or was refused; it is quiescent."""

    read: int
    now_ns: int
    failure: Failure


class ReadSkipped(Event, frozen=True, kw_only=True):
    """One read was never started, because the request had failed by then."""

    read: int
    now_ns: int


class PeerLost(Event, frozen=True, kw_only=True):
    """The connection to the peer is gone; its READs will end by themselves."""

    failure: Failure


class LeaseLapsed(Event, frozen=True, kw_only=True):
    """The proven end of the lease has passed."""

    now_ns: int


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """The request as a whole took too long."""

    timeout_seconds: float


class QuiesceTimeout(Event, frozen=True, kw_only=True):
    """Waited long enough for READs in flight."""

    waited_seconds: float


class Aborted(Event, frozen=True, kw_only=True):
    """The engine gave the request up."""


class ShellFailed(Event, frozen=True, kw_only=True):
    """The actor that runs this request crashed, or the connector is stopping."""

    failure: Failure


# --- effects --------------------------------------------------------------------------------------------------------


class PostReads(Effect, frozen=True, kw_only=True):
    """Start reads 0..reads-1."""

    reads: int


class Report(Effect, frozen=True, kw_only=True):
    """Tell the engine: this request has ended. `failure` is None for done.

    `quarantined`: READs may still write into the destination blocks; they must not return to the pool.
    """

    failure: Failure | None
    quarantined: bool = False


class SendRelease(Effect, frozen=True, kw_only=True):
    """This request needs the peer's blocks no more."""


class AwaitPeer(Effect, frozen=True, kw_only=True):
    """Ask for the peer again (a retry)."""


class StartQuiesceTimer(Effect, frozen=True, kw_only=True):
    """Bound the wait for READs in flight."""


# --- handlers -------------------------------------------------------------------------------------------------------


def _report(request: Request, failure: Failure | None, *, quarantined: bool = False) -> Effects:
    return (Report(failure=failure, quarantined=quarantined),) if request.awaited else NO_EFFECTS


def _end(request: Request, state: State, failure: Failure) -> Request:
    return msgspec.structs.replace(
        request, state=state, failure=failure, ending=None, retryable=False, in_flight=frozenset()
    )


def _not_proven(request: Request, now_ns: int) -> LeaseNotProven:
    proof = request.proof
    late_ns = now_ns - proof.proven_until_ns if proof else 0
    return LeaseNotProven(
        peer=request.peer,
        remote_request_id=request.remote_request_id,
        late_seconds=late_ns / 1e9,
        basis=proof.basis if proof else "none",
    )


def _is_proven(request: Request, now_ns: int) -> bool:
    return request.proof is not None and now_ns < request.proof.proven_until_ns


def _on_peer_ready(request: Request, event: PeerReady) -> tuple[Request, Effects]:
    request = msgspec.structs.replace(request, proof=event.proof)
    if not request.awaited:
        return msgspec.structs.replace(request, state=State.DONE), (SendRelease(),)
    if not _is_proven(request, event.now_ns):
        failure = _not_proven(request, event.now_ns)
        return _end(request, State.EXPIRED, failure), _report(request, failure)
    if event.reads == 0:
        done = msgspec.structs.replace(request, state=State.DONE)
        return done, (SendRelease(), *_report(request, None))
    reading = msgspec.structs.replace(request, state=State.READING, in_flight=frozenset(range(event.reads)))
    return reading, (PostReads(reads=event.reads),)


def _fail_pending(request: Request, event: PeerFailed | PeerIncompatible | ShellFailed) -> tuple[Request, Effects]:
    return _end(request, State.FAILED, event.failure), _report(request, event.failure)


def _reject_pending(request: Request, event: ParamsRejected) -> tuple[Request, Effects]:
    return _end(request, State.FAILED, event.failure), (SendRelease(), *_report(request, event.failure))


def _lapse_pending(request: Request, event: LeaseLapsed) -> tuple[Request, Effects]:
    failure = _not_proven(request, event.now_ns)
    return _end(request, State.EXPIRED, failure), _report(request, failure)


def _time_out_pending(request: Request, event: DeadlinePassed) -> tuple[Request, Effects]:
    failure = DeadlineExceeded(timeout_seconds=event.timeout_seconds, phase=request.state.value)
    effects = (SendRelease(), *_report(request, failure))
    return _end(request, State.EXPIRED, failure), effects


def _abort_pending(request: Request, event: Aborted) -> tuple[Request, Effects]:
    failure = AbortedByClient()
    effects = (SendRelease(), *_report(request, failure))
    return _end(request, State.FAILED, failure), effects


def _drain(request: Request, ending: State, failure: Failure, *, retryable: bool = False) -> Request:
    return msgspec.structs.replace(
        request, state=State.DRAINING, ending=ending, failure=failure, retryable=retryable and request.retries_left > 0
    )


def _may_retry(request: Request, now_ns: int) -> bool:
    return request.retryable and _is_proven(request, now_ns)


def _complete(request: Request, event: ReadCompleted) -> tuple[Request, Effects]:
    last_completed_ns = max(request.last_completed_ns, event.completed_ns)
    request = msgspec.structs.replace(
        request, in_flight=request.in_flight - {event.read}, last_completed_ns=last_completed_ns
    )
    if request.in_flight:
        return request, NO_EFFECTS
    if not _is_proven(request, last_completed_ns):
        failure = _not_proven(request, last_completed_ns)
        return _end(request, State.EXPIRED, failure), _report(request, failure)
    return msgspec.structs.replace(request, state=State.DONE), (SendRelease(), *_report(request, None))


def _fail_reading(request: Request, event: ReadFailed) -> tuple[Request, Effects]:
    request = msgspec.structs.replace(request, in_flight=request.in_flight - {event.read})
    transport_lost = isinstance(event.failure, TransferError) and event.failure.transport_lost
    request = _drain(request, State.FAILED, event.failure, retryable=transport_lost)
    if request.in_flight:
        return request, (StartQuiesceTimer(),)
    return _finish_draining(request, event.now_ns)


def _lose_peer(request: Request, event: PeerLost) -> tuple[Request, Effects]:
    return _drain(request, State.FAILED, event.failure, retryable=True), (StartQuiesceTimer(),)


def _lapse_reading(request: Request, event: LeaseLapsed) -> tuple[Request, Effects]:
    return _drain(request, State.EXPIRED, _not_proven(request, event.now_ns)), (StartQuiesceTimer(),)


def _time_out_reading(request: Request, event: DeadlinePassed) -> tuple[Request, Effects]:
    failure = DeadlineExceeded(timeout_seconds=event.timeout_seconds, phase=request.state.value)
    return _drain(request, State.EXPIRED, failure), (StartQuiesceTimer(),)


def _abort_reading(request: Request, event: Aborted) -> tuple[Request, Effects]:
    return _drain(request, State.FAILED, AbortedByClient()), (StartQuiesceTimer(),)


def _crash_reading(request: Request, event: ShellFailed) -> tuple[Request, Effects]:
    return _drain(request, State.FAILED, event.failure), (StartQuiesceTimer(),)


def _finish_draining(request: Request, now_ns: int) -> tuple[Request, Effects]:
    """The last handle is quiescent: retry, or end as decided when draining began."""
    if _may_retry(request, now_ns):
        again = msgspec.structs.replace(
            request,
            state=State.PENDING_HANDSHAKE,
            retries_left=request.retries_left - 1,
            ending=None,
            failure=None,
            retryable=False,
        )
        return again, (AwaitPeer(),)
    assert request.ending is not None
    assert request.failure is not None
    effects = _report(request, request.failure)
    if not isinstance(request.failure, LeaseNotProven):
        effects = (SendRelease(), *effects)
    return _end(request, request.ending, request.failure), effects


def _drain_completed(request: Request, event: ReadCompleted) -> tuple[Request, Effects]:
    request = msgspec.structs.replace(request, in_flight=request.in_flight - {event.read})
    if request.in_flight:
        return request, NO_EFFECTS
    return _finish_draining(request, event.completed_ns)


def _drain_ended(request: Request, event: ReadFailed | ReadSkipped) -> tuple[Request, Effects]:
    request = msgspec.structs.replace(request, in_flight=request.in_flight - {event.read})
    if request.in_flight:
        return request, NO_EFFECTS
    return _finish_draining(request, event.now_ns)


def _stop_retry(
    request: Request, event: LeaseLapsed | DeadlinePassed | Aborted | ShellFailed
) -> tuple[Request, Effects]:
    return msgspec.structs.replace(request, retryable=False), NO_EFFECTS


def _quarantine(request: Request, event: QuiesceTimeout) -> tuple[Request, Effects]:
    assert request.failure is not None
    failure = Quarantined(
        transfers=len(request.in_flight), waited_seconds=event.waited_seconds, cause=request.failure.kind
    )
    return _end(request, State.FAILED, failure), _report(request, failure, quarantined=True)


# --- the table ------------------------------------------------------------------------------------------------------

_PENDING, _READING, _DRAINING = State.PENDING_HANDSHAKE, State.READING, State.DRAINING
_DONE, _FAILED, _EXPIRED = State.DONE, State.FAILED, State.EXPIRED

MACHINE: Machine[Request] = Machine(
    name="request",
    states=State,
    initial=_PENDING,
    terminal=frozenset({_DONE, _FAILED, _EXPIRED}),
    events=(
        PeerReady,
        PeerFailed,
        PeerIncompatible,
        ParamsRejected,
        ReadCompleted,
        ReadFailed,
        ReadSkipped,
        PeerLost,
        LeaseLapsed,
        DeadlinePassed,
        QuiesceTimeout,
        Aborted,
        ShellFailed,
    ),
    table={
        (_PENDING, PeerReady): to(_on_peer_ready, _READING, _DONE, _EXPIRED),
        (_PENDING, PeerFailed): to(_fail_pending, _FAILED),
        (_PENDING, PeerIncompatible): to(_fail_pending, _FAILED),
        (_PENDING, ParamsRejected): to(_reject_pending, _FAILED),
        (_PENDING, LeaseLapsed): to(_lapse_pending, _EXPIRED),
        (_PENDING, DeadlinePassed): to(_time_out_pending, _EXPIRED),
        (_PENDING, Aborted): to(_abort_pending, _FAILED),
        (_PENDING, ShellFailed): to(_fail_pending, _FAILED),
        (_READING, ReadCompleted): to(_complete, _READING, _DONE, _EXPIRED),
        (_READING, ReadFailed): to(_fail_reading, _DRAINING, _PENDING, _FAILED),
        (_READING, PeerLost): to(_lose_peer, _DRAINING),
        (_READING, LeaseLapsed): to(_lapse_reading, _DRAINING),
        (_READING, DeadlinePassed): to(_time_out_reading, _DRAINING),
        (_READING, Aborted): to(_abort_reading, _DRAINING),
        (_READING, ShellFailed): to(_crash_reading, _DRAINING),
        (_DRAINING, ReadCompleted): to(_drain_completed, _DRAINING, _PENDING, _FAILED, _EXPIRED),
        (_DRAINING, ReadFailed): to(_drain_ended, _DRAINING, _PENDING, _FAILED, _EXPIRED),
        (_DRAINING, ReadSkipped): to(_drain_ended, _DRAINING, _PENDING, _FAILED, _EXPIRED),
        (_DRAINING, LeaseLapsed): to(_stop_retry, _DRAINING),
        (_DRAINING, DeadlinePassed): to(_stop_retry, _DRAINING),
        (_DRAINING, Aborted): to(_stop_retry, _DRAINING),
        (_DRAINING, ShellFailed): to(_stop_retry, _DRAINING),
        (_DRAINING, QuiesceTimeout): to(_quarantine, _FAILED),
    },
    ignored={
        **pairs((_DRAINING,), (PeerLost,), "the reads in flight will end by themselves; the first failure is kept"),
        **pairs((_PENDING,), (PeerLost,), "nothing is in flight; the handshake decides"),
        **pairs((_PENDING, _READING), (QuiesceTimeout,), "a timer of an attempt that has drained since"),
    },
    impossible={
        **pairs((_PENDING,), (ReadCompleted, ReadFailed, ReadSkipped), "no read is ordered before the peer is ready"),
        **pairs((_READING,), (ReadSkipped,), "reads are skipped only after a failure"),
        **pairs(
            (_READING, _DRAINING),
            (PeerReady, PeerFailed, PeerIncompatible, ParamsRejected),
            "only requests in pending_handshake wait for the peer",
        ),
    },
)
