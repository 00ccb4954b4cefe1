"""The request machine on the decode engine, against its specification.

First the transitions that matter, one by one, written from the prose and not from the table. Then two random searches:
`RequestUnderLawfulCore` plays a core that keeps its promises (every ordered READ ends, READs are not posted only after
a failure, the peer answers only who waits, proofs only grow) and checks what must hold in every history; the other
throws any event at any reachable value and checks that nothing but a `ProtocolError` can come out of it.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statemachine.failures import (
    AbortedByClient,
    ActorCrashed,
    BadParams,
    Corrupt,
    DeadlineExceeded,
    Failure,
    HandshakeTimeout,
    LeaseNotProven,
    LeaseOver,
    Quarantined,
    TransferError,
)
from statemachine.kernel import Effect, Effects, Event, ProtocolError
from statemachine.lease import LeaseName
from statemachine.request import (
    MACHINE,
    Aborted,
    AskForProof,
    AwaitPeer,
    CheckRead,
    DeadlinePassed,
    LeaseGone,
    LeaseProven,
    ParamsRejected,
    PeerFailed,
    PeerLost,
    PeerReady,
    PostReads,
    ProofTimeout,
    QuiesceTimeout,
    ReadChecked,
    ReadCompleted,
    ReadFailed,
    ReadQuiesced,
    Report,
    Request,
    ShellFailed,
    StartQuiesceTimer,
    State,
)

PROVEN_NS = 1000

REFUSED = TransferError(peer="prefill", operation="READ", error="INVALID_PARAM", transport_lost=False)
LOST = TransferError(peer="prefill", operation="READ", error="REMOTE_DISCONNECT", transport_lost=True)
SILENT = HandshakeTimeout(peer="prefill", address="h:1", timeout_seconds=5.0)
UNEQUAL = Corrupt(peer="prefill", remote_request_id="prefill-1", region="layer 0", block=1, differing=1, compared=4)
MALFORMED = BadParams(field="remote_block_ids", expected="list of ints", found="None")
CRASHED = ActorCrashed(actor="peer actor", error="KeyError()")
OVER = LeaseOver(peer="prefill", remote_request_id="prefill-1", why="expired")
UNPROVEN = LeaseNotProven(peer="prefill", remote_request_id="prefill-1", waited_seconds=20.0)

GONE = LeaseGone(why="expired")
PROOF_TIMEOUT = ProofTimeout(waited_seconds=20.0)
DEADLINE = DeadlinePassed(timeout_seconds=120.0)
QUIESCE_TIMEOUT = QuiesceTimeout(waited_seconds=30.0)
SHELL_FAILED = ShellFailed(failure=CRASHED)


def new(*, retries_left: int = 1) -> Request:
    return Request(request_id="decode-1", lease=LeaseName("prefill-1", 1), peer="prefill", retries_left=retries_left)


def ready(reads: int, connection: int = 1, *, are_checked: bool = False) -> PeerReady:
    return PeerReady(connection=connection, reads=reads, are_checked=are_checked)


def completed(read: int, at_ns: int = 10, proven_ns: int = PROVEN_NS) -> ReadCompleted:
    return ReadCompleted(read=read, completed_ns=at_ns, proven_until_ns=proven_ns)


def checked(read: int, proven_ns: int = PROVEN_NS) -> ReadChecked:
    return ReadChecked(read=read, proven_until_ns=proven_ns)


def failed(read: int, failure: Failure = REFUSED, *, is_quiescent: bool = True) -> ReadFailed:
    return ReadFailed(read=read, failure=failure, is_quiescent=is_quiescent)


def quiesced(read: int) -> ReadQuiesced:
    return ReadQuiesced(read=read)


def run(request: Request, *events: Event) -> tuple[Request, list[Effect]]:
    """Feed `events`; all effects in order."""
    effects: list[Effect] = []
    for event in events:
        request, more = MACHINE.step(request, event)
        effects += more
    return request, effects


def reading(reads: int, *, retries_left: int = 1) -> Request:
    return run(new(retries_left=retries_left), ready(reads))[0]


def checking(reads: int = 1, *, retries_left: int = 1) -> Request:
    """Every byte is here, and no READ was checked yet."""
    request = run(new(retries_left=retries_left), ready(reads, are_checked=True))[0]
    request, effects = run(request, *map(completed, range(reads)))
    assert (request.state, request.in_flight) == (State.READING, frozenset())
    assert effects == [CheckRead(read=read) for read in range(reads)]
    return request


def proving(at_ns: int = PROVEN_NS + 5) -> Request:
    request, effects = run(reading(1), completed(0, at_ns))
    assert (request.state, effects) == (State.PROVING, [AskForProof()])
    return request


# --- waiting for the peer -------------------------------------------------------------------------------------------


def test_a_ready_peer_makes_it_read_and_all_reads_count_as_in_flight() -> None:
    request, effects = run(new(), ready(3, connection=7))
    assert request.state is State.READING
    assert request.connection == 7
    assert request.in_flight == {0, 1, 2}
    assert effects == [PostReads()]


def test_nothing_to_read_is_done_at_once_and_needs_no_proof() -> None:
    request, effects = run(new(), ready(0))
    assert (request.state, effects) == (State.DONE, [Report(failure=None)])


@pytest.mark.parametrize(
    ("event", "ending", "failure"),
    [
        (PeerFailed(failure=SILENT), State.FAILED, SILENT),
        (ParamsRejected(failure=MALFORMED), State.FAILED, MALFORMED),
        (SHELL_FAILED, State.FAILED, CRASHED),
        (Aborted(), State.FAILED, AbortedByClient()),
        (GONE, State.EXPIRED, OVER),
        (DEADLINE, State.EXPIRED, DeadlineExceeded(timeout_seconds=120.0, phase="pending_handshake")),
    ],
)
def test_while_nothing_is_in_flight_it_ends_at_once(event: Event, ending: State, failure: Failure) -> None:
    request, effects = run(new(), event)
    assert (request.state, request.failure) == (ending, failure)
    assert effects == [Report(failure=failure)]


@pytest.mark.parametrize("event", [PeerLost(failure=LOST), LeaseProven(proven_until_ns=5), PROOF_TIMEOUT])
def test_who_waits_for_the_peer_is_not_concerned_by(event: Event) -> None:
    assert run(new(), event) == (new(), [])


@pytest.mark.parametrize("event", [completed(0), failed(0), quiesced(0)])
def test_no_read_ends_before_one_was_ordered(event: Event) -> None:
    with pytest.raises(ProtocolError, match="no READ is ordered"):
        MACHINE.step(new(), event)


# --- reading --------------------------------------------------------------------------------------------------------


def test_done_is_reported_after_the_last_read_and_not_before() -> None:
    request, effects = run(reading(3), completed(2, 10), completed(0, 20))
    assert (request.state, effects) == (State.READING, [])
    request, effects = run(request, completed(1, PROVEN_NS))
    assert (request.state, effects) == (State.DONE, [Report(failure=None)])


def test_a_proof_that_does_not_reach_the_last_completion_is_asked_for_once_more() -> None:
    request, effects = run(reading(2), completed(0, 10), completed(1, PROVEN_NS + 1))
    assert (request.state, effects) == (State.PROVING, [AskForProof()])
    assert request.last_completed_ns == PROVEN_NS + 1


def test_a_late_completion_is_not_forgotten_when_an_earlier_one_is_delivered_after_it() -> None:
    # The owner may deliver the ends of two READs in another order than they happened in.
    request, _ = run(reading(2), completed(0, PROVEN_NS + 5), completed(1, PROVEN_NS - 5))
    assert request.state is State.PROVING


def test_what_counts_is_the_proof_at_the_last_completion() -> None:
    request, _ = run(reading(2), completed(0, 10, proven_ns=-1), completed(1, 20, proven_ns=20))
    assert request.state is State.DONE


@pytest.mark.parametrize(
    ("event", "ending", "failure"),
    [
        (failed(0), State.FAILED, REFUSED),
        (failed(0, is_quiescent=False), State.FAILED, REFUSED),
        (PeerLost(failure=LOST), State.FAILED, LOST),
        (Aborted(), State.FAILED, AbortedByClient()),
        (SHELL_FAILED, State.FAILED, CRASHED),
        (GONE, State.EXPIRED, OVER),
        (DEADLINE, State.EXPIRED, DeadlineExceeded(timeout_seconds=120.0, phase="reading")),
    ],
)
def test_a_failure_is_reported_after_the_last_read_is_quiescent(event: Event, ending: State, failure: Failure) -> None:
    request, effects = run(reading(3, retries_left=0), event)
    assert (request.state, effects) == (State.DRAINING, [StartQuiesceTimer()])
    *others, last = sorted(request.in_flight)
    request, effects = run(request, *map(quiesced, others))
    assert (request.state, effects) == (State.DRAINING, [])
    request, effects = run(request, quiesced(last))
    assert (request.state, request.failure) == (ending, failure)
    assert effects == [Report(failure=failure)]


def test_the_only_read_failing_ends_it_at_once_if_it_is_quiescent() -> None:
    request, effects = run(reading(1), failed(0))
    assert (request.state, effects) == (State.FAILED, [Report(failure=REFUSED)])


def test_an_error_is_not_the_end_of_a_read() -> None:
    """Scenario 70: NIXL reports an error for the whole, and parts of the READ are still in flight."""
    request, effects = run(reading(1), failed(0, is_quiescent=False))
    assert (request.state, request.in_flight, effects) == (State.DRAINING, {0}, [StartQuiesceTimer()])
    assert run(request, failed(0, is_quiescent=False)) == (request, [])
    request, effects = run(request, quiesced(0))
    assert (request.state, effects) == (State.FAILED, [Report(failure=REFUSED)])


def test_a_read_that_did_not_fail_does_not_become_quiescent_by_itself() -> None:
    with pytest.raises(ProtocolError, match="failed or was not posted"):
        MACHINE.step(reading(2), quiesced(0))


@pytest.mark.parametrize("event", [ready(1), PeerFailed(failure=SILENT), ParamsRejected(failure=MALFORMED)])
def test_the_peer_answers_only_who_waits_for_it(event: Event) -> None:
    for request in (reading(2), run(reading(2), Aborted())[0]):
        with pytest.raises(ProtocolError, match="only who waits"):
            MACHINE.step(request, event)


# --- checking -------------------------------------------------------------------------------------------------------


def test_what_is_to_be_checked_is_done_after_the_last_check() -> None:
    request, effects = run(checking(2), checked(1))
    assert (request.state, request.awaited, effects) == (State.READING, {0}, [])
    request, effects = run(request, checked(0))
    assert (request.state, effects) == (State.DONE, [Report(failure=None)])


def test_a_check_is_asked_for_when_a_read_completes_and_others_are_waited_for_meanwhile() -> None:
    request, effects = run(new(), ready(2, are_checked=True), completed(1), checked(1))
    assert effects == [PostReads(), CheckRead(read=1)]
    assert (request.state, request.awaited) == (State.READING, {0})


def test_a_check_replaces_no_proof_of_when_the_bytes_came() -> None:
    request, _ = run(new(), ready(1, are_checked=True), completed(0, PROVEN_NS + 5, proven_ns=-1))
    unproven, effects = run(request, checked(0, PROVEN_NS + 4))
    assert (unproven.state, effects) == (State.PROVING, [AskForProof()])
    assert run(request, checked(0, PROVEN_NS + 5))[0].state is State.DONE


@pytest.mark.parametrize(
    ("event", "ending", "failure"),
    [
        (failed(0, UNEQUAL), State.FAILED, UNEQUAL),
        (Aborted(), State.FAILED, AbortedByClient()),
        (SHELL_FAILED, State.FAILED, CRASHED),
        (GONE, State.EXPIRED, OVER),
        (DEADLINE, State.EXPIRED, DeadlineExceeded(timeout_seconds=120.0, phase="reading")),
    ],
)
def test_while_only_checks_are_awaited_it_ends_at_once(event: Event, ending: State, failure: Failure) -> None:
    request, effects = run(checking(2), event)
    assert (request.state, request.failure, request.awaited) == (ending, failure, frozenset())
    assert effects == [Report(failure=failure)]


def test_a_lost_connection_does_not_end_the_wait_for_a_check() -> None:
    assert run(checking(), PeerLost(failure=LOST), QUIESCE_TIMEOUT) == (checking(), [])


def test_what_is_in_flight_is_waited_for_and_no_check() -> None:
    request, _ = run(new(), ready(3, are_checked=True), completed(0), Aborted())
    assert (request.state, request.awaited) == (State.DRAINING, {1, 2})
    request, effects = run(request, completed(1), quiesced(2))
    assert (request.state, effects) == (State.FAILED, [Report(failure=AbortedByClient())])


def test_another_attempt_is_checked_anew() -> None:
    request, effects = run(new(), ready(2, are_checked=True), completed(0), failed(1, LOST))
    assert (request.state, request.awaited) == (State.PENDING_HANDSHAKE, frozenset())
    assert effects == [PostReads(), CheckRead(read=0), AwaitPeer()]
    request, effects = run(request, ready(1, connection=2, are_checked=True), completed(0))
    assert (request.awaited, effects) == ({0}, [PostReads(), CheckRead(read=0)])


@pytest.mark.parametrize("request_", [new(), proving(), run(reading(2), Aborted())[0]], ids=lambda each: each.state)
def test_nothing_is_checked_that_does_not_count(request_: Request) -> None:
    with pytest.raises(ProtocolError, match="drops a check that nobody waits for"):
        MACHINE.step(request_, checked(0))


# --- proving --------------------------------------------------------------------------------------------------------


def test_a_proof_that_reaches_the_last_completion_makes_it_done() -> None:
    request = proving(PROVEN_NS + 5)
    assert run(request, LeaseProven(proven_until_ns=PROVEN_NS + 4)) == (request, [])
    request, effects = run(request, LeaseProven(proven_until_ns=PROVEN_NS + 5))
    assert (request.state, effects) == (State.DONE, [Report(failure=None)])


@pytest.mark.parametrize(
    ("event", "ending", "failure"),
    [
        (GONE, State.EXPIRED, OVER),
        (PROOF_TIMEOUT, State.EXPIRED, UNPROVEN),
        (DEADLINE, State.EXPIRED, DeadlineExceeded(timeout_seconds=120.0, phase="proving")),
        (PeerFailed(failure=SILENT), State.FAILED, SILENT),
        (SHELL_FAILED, State.FAILED, CRASHED),
        (Aborted(), State.FAILED, AbortedByClient()),
    ],
)
def test_without_a_proof_it_is_not_done(event: Event, ending: State, failure: Failure) -> None:
    request, effects = run(proving(), event)
    assert (request.state, request.failure) == (ending, failure)
    assert effects == [Report(failure=failure)]


def test_a_lost_connection_does_not_end_the_wait_for_a_proof() -> None:
    # The READs are over; P is asked again over the next connection.
    assert run(proving(), PeerLost(failure=LOST)) == (proving(), [])


@pytest.mark.parametrize("event", [completed(0), failed(0), quiesced(0)])
def test_nothing_is_in_flight_while_it_is_proven(event: Event) -> None:
    with pytest.raises(ProtocolError, match="every READ has completed"):
        MACHINE.step(proving(), event)


# --- draining -------------------------------------------------------------------------------------------------------


def test_reads_that_deliver_while_draining_do_not_make_it_succeed() -> None:
    request, effects = run(reading(3, retries_left=0), completed(1), failed(0), completed(2))
    assert request.state is State.FAILED
    assert effects == [StartQuiesceTimer(), Report(failure=REFUSED)]


@pytest.mark.parametrize("later", [failed(1, LOST), Aborted(), DEADLINE, GONE, SHELL_FAILED, PeerLost(failure=LOST)])
def test_the_first_failure_is_the_one_that_is_reported(later: Event) -> None:
    request, _ = run(reading(3), failed(0), later)
    request, effects = run(request, *map(quiesced, sorted(request.in_flight)))
    assert request.state is State.FAILED
    assert effects == [Report(failure=REFUSED)]


def test_reads_that_never_end_are_quarantined_and_the_request_ends_without_them() -> None:
    request, effects = run(reading(3), failed(1), QUIESCE_TIMEOUT)
    failure = Quarantined(reads=2, waited_seconds=30.0, cause="TransferError")
    assert request.state is State.FAILED
    assert effects == [StartQuiesceTimer(), Report(failure=failure)]
    # Who it is that may still be written into is known to the core, which lifts the quarantine.
    assert request.in_flight == {0, 2}
    assert run(request, completed(0), failed(2), quiesced(2)) == (request, [])


def test_a_quiesce_timer_of_an_earlier_attempt_means_nothing() -> None:
    for request in (new(), reading(2), proving()):
        assert run(request, QUIESCE_TIMEOUT) == (request, [])


# --- retry ----------------------------------------------------------------------------------------------------------


def test_a_lost_transport_is_tried_again_from_the_start() -> None:
    request, effects = run(reading(2), failed(0, LOST), failed(1, LOST))
    assert request.state is State.PENDING_HANDSHAKE
    assert effects == [StartQuiesceTimer(), AwaitPeer()]
    assert (request.retries_left, request.failure, request.ending) == (0, None, None)
    request, effects = run(request, ready(2, connection=2), completed(0), completed(1))
    assert request.state is State.DONE
    assert effects == [PostReads(), Report(failure=None)]


def test_one_lost_read_alone_is_tried_again_at_once() -> None:
    request, effects = run(reading(1), failed(0, LOST))
    assert (request.state, effects) == (State.PENDING_HANDSHAKE, [AwaitPeer()])


def test_it_is_not_tried_again_before_what_failed_is_quiescent() -> None:
    request, effects = run(reading(1), failed(0, LOST, is_quiescent=False))
    assert (request.state, effects) == (State.DRAINING, [StartQuiesceTimer()])
    request, effects = run(request, quiesced(0))
    assert (request.state, effects) == (State.PENDING_HANDSHAKE, [AwaitPeer()])


def test_a_lost_peer_is_tried_again_when_its_reads_have_ended() -> None:
    request, effects = run(reading(2), PeerLost(failure=LOST), failed(0, LOST), quiesced(1))
    assert request.state is State.PENDING_HANDSHAKE
    assert effects == [StartQuiesceTimer(), AwaitPeer()]


@pytest.mark.parametrize("events", [[failed(0, LOST), completed(1)], [completed(1), failed(0, LOST)]])
def test_it_is_tried_again_as_a_whole_even_if_a_part_was_delivered(events: list[Event]) -> None:
    request, effects = run(reading(2), *events)
    assert request.state is State.PENDING_HANDSHAKE
    assert effects[-1] == AwaitPeer()
    assert run(request, ready(2))[0].in_flight == {0, 1}


def test_what_completed_in_an_earlier_attempt_needs_no_proof_any_more() -> None:
    request, _ = run(reading(2), completed(1, PROVEN_NS + 500), failed(0, LOST))
    request, _ = run(request, ready(1, connection=2), completed(0, PROVEN_NS))
    assert request.state is State.DONE


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([failed(0, REFUSED), failed(1, LOST)], "the first failure was not the transport's"),
        ([failed(0, LOST), Aborted(), failed(1, LOST)], "nobody wants it any more"),
        ([failed(0, LOST), DEADLINE, failed(1, LOST)], "there is no time left"),
        ([failed(0, LOST), GONE, failed(1, LOST)], "the lease is over"),
        ([failed(0, LOST), SHELL_FAILED, failed(1, LOST)], "its actor has crashed"),
    ],
)
def test_no_retry_when(events: list[Event], why: str) -> None:
    request, effects = run(reading(2), *events)
    assert AwaitPeer() not in effects, why
    assert request.state is State.FAILED
    assert isinstance(effects[-1], Report)


@pytest.mark.parametrize("given_up", [Aborted(), DEADLINE, GONE, SHELL_FAILED, failed(0, REFUSED)])
def test_no_retry_when_draining_began_for_another_reason_than_the_transport(given_up: Event) -> None:
    request, _ = run(reading(2, retries_left=3), given_up)
    request, effects = run(request, *(failed(read, LOST) for read in sorted(request.in_flight)))
    assert AwaitPeer() not in effects
    assert MACHINE.is_terminal(request)


def test_no_retry_without_a_budget() -> None:
    request, _ = run(reading(1, retries_left=0), failed(0, LOST))
    assert request.state is State.FAILED


def test_the_budget_is_used_up_one_by_one() -> None:
    request = new(retries_left=2)
    for _ in range(2):
        request, effects = run(request, ready(1), failed(0, LOST))
        assert effects == [PostReads(), AwaitPeer()]
    request, _ = run(request, ready(1), failed(0, LOST))
    assert request.state is State.FAILED


# --- random histories -----------------------------------------------------------------------------------------------


class RequestUnderLawfulCore(RuleBasedStateMachine):
    """A core that keeps its promises. Time and proofs only move forward."""

    @initialize(retries=st.integers(0, 3))
    def start(self, retries: int) -> None:
        self.request = new(retries_left=retries)
        self.retries = retries
        self.now_ns = 0
        self.proven_ns = -1
        self.may_be_recalled = False
        self.posted: set[int] = set()
        self.erring: set[int] = set()
        self.is_checked = False
        self.checking: set[int] = set()
        self.completions_ns: list[int] = []
        self.has_read = False
        self.quiesce_timer = False
        self.proof_timer = False
        self.gave_up = False
        self.reports: list[Report] = []

    @property
    def open_reads(self) -> set[int]:
        return self.posted | self.erring

    def feed(self, event: Event) -> None:
        before = self.request
        self.request, effects = MACHINE.step(before, event)
        if MACHINE.is_terminal(before):
            assert (self.request, effects) == (before, ())
        if self.request.state is not State.READING:
            self.checking.clear()  # the core hears of no check any more
        for effect in effects:
            self.execute(effect)
        if before.state is not State.DRAINING and self.request.state is State.DRAINING:
            assert self.open_reads
            assert StartQuiesceTimer() in effects
        if before.state is not State.PROVING and self.request.state is State.PROVING:
            assert AskForProof() in effects
        if self.request.state is State.PENDING_HANDSHAKE and before.state is not State.PENDING_HANDSHAKE:
            assert not self.gave_up

    def execute(self, effect: Effect) -> None:
        match effect:
            case PostReads():
                assert not self.open_reads
                self.posted = set(self.request.in_flight)
                assert self.posted
                self.completions_ns, self.has_read = [], True
                self.completed = self.checked = 0
            case CheckRead(read=read):
                assert self.is_checked
                self.checking.add(read)
            case Report():
                assert self.request.in_flight == self.open_reads
                assert not self.reports
                if effect.failure is None and self.has_read:
                    assert self.checked == self.completed * self.is_checked
                    assert max(self.completions_ns) <= self.proven_ns
                self.reports.append(effect)
            case AwaitPeer():
                assert not self.open_reads
                assert not self.may_be_recalled
                self.retries -= 1
                assert self.retries >= 0
                self.quiesce_timer = self.has_read = False
            case StartQuiesceTimer():
                self.quiesce_timer = True
            case AskForProof():
                assert not self.open_reads
                self.proof_timer = True

    @property
    def waits_for_peer(self) -> bool:
        return self.request.state is State.PENDING_HANDSHAKE

    @rule(step_ns=st.integers(1, 400))
    def pass_time(self, step_ns: int) -> None:
        self.now_ns += step_ns

    @precondition(lambda self: self.waits_for_peer)
    @rule(reads=st.integers(0, 3), are_checked=st.booleans())
    def peer_ready(self, reads: int, are_checked: bool) -> None:
        self.is_checked = are_checked
        self.feed(ready(reads, are_checked=are_checked))

    @precondition(lambda self: self.waits_for_peer)
    @rule(event=st.sampled_from([PeerFailed(failure=SILENT), ParamsRejected(failure=MALFORMED)]))
    def peer_failed(self, event: Event) -> None:
        self.feed(event)

    @precondition(lambda self: self.posted)
    @rule(data=st.data())
    def read_completes(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.posted)))
        self.posted.remove(read)
        self.completions_ns.append(self.now_ns)
        self.completed += 1
        self.feed(completed(read, self.now_ns, self.proven_ns))

    @precondition(lambda self: self.checking)
    @rule(data=st.data(), is_equal=st.booleans())
    def read_is_checked(self, data: st.DataObject, is_equal: bool) -> None:
        read = data.draw(st.sampled_from(sorted(self.checking)))
        self.checking.remove(read)
        self.checked += is_equal
        self.feed(checked(read, self.proven_ns) if is_equal else failed(read, UNEQUAL))

    @precondition(lambda self: self.posted)
    @rule(data=st.data(), failure=st.sampled_from([LOST, REFUSED]), is_quiescent=st.booleans())
    def read_fails(self, data: st.DataObject, failure: Failure, is_quiescent: bool) -> None:
        read = data.draw(st.sampled_from(sorted(self.posted)))
        self.posted.remove(read)
        if not is_quiescent:
            self.erring.add(read)
        self.feed(failed(read, failure, is_quiescent=is_quiescent))

    @precondition(lambda self: self.erring or (self.posted and self.request.state is not State.READING))
    @rule(data=st.data())
    def read_quiesces(self, data: st.DataObject) -> None:
        """It had failed, or it is not posted because the request has failed."""
        may = self.erring if self.request.state is State.READING else self.open_reads
        read = data.draw(st.sampled_from(sorted(may)))
        self.posted.discard(read)
        self.erring.discard(read)
        self.feed(quiesced(read))

    @rule()
    def peer_is_lost(self) -> None:
        self.feed(PeerLost(failure=LOST))

    @precondition(lambda self: not self.may_be_recalled)
    @rule(left_ns=st.integers(-100, 500))
    def lease_is_proven(self, left_ns: int) -> None:
        self.proven_ns = max(self.proven_ns, self.now_ns + left_ns)
        self.feed(LeaseProven(proven_until_ns=self.proven_ns))

    @rule()
    def lease_is_gone(self) -> None:
        self.may_be_recalled = self.gave_up = True
        self.feed(GONE)

    @rule(event=st.sampled_from([DEADLINE, Aborted(), SHELL_FAILED]))
    def is_given_up(self, event: Event) -> None:
        self.gave_up = True
        self.feed(event)

    @precondition(lambda self: self.quiesce_timer)
    @rule()
    def quiesce_timer_fires(self) -> None:
        self.quiesce_timer = False
        self.feed(QUIESCE_TIMEOUT)

    @precondition(lambda self: self.proof_timer)
    @rule()
    def proof_timer_fires(self) -> None:
        self.proof_timer = False
        self.feed(PROOF_TIMEOUT)

    @invariant()
    def reported_exactly_when_ended(self) -> None:
        assert len(self.reports) == (1 if MACHINE.is_terminal(self.request) else 0)

    @invariant()
    def done_exactly_when_reported_without_a_failure(self) -> None:
        for report in self.reports:
            assert (report.failure is None) == (self.request.state is State.DONE)
            assert report.failure == self.request.failure

    @invariant()
    def it_knows_what_is_in_flight(self) -> None:
        if not MACHINE.is_terminal(self.request):
            assert self.request.in_flight == self.open_reads
            assert self.checking <= self.request.awaited
            is_awaiting = self.request.state in (State.READING, State.DRAINING)
            assert is_awaiting == bool(self.open_reads | self.checking)
        if self.request.state is State.DONE:
            assert not self.open_reads

    @invariant()
    def a_draining_request_has_a_timer_that_ends_it(self) -> None:
        if self.request.state is State.DRAINING:
            assert self.quiesce_timer

    @invariant()
    def its_own_timers_bring_it_to_an_end(self) -> None:
        # The deadline fires once: after it, only READs that end and the quiesce timer are left to rely on.
        request, _ = run(self.request, DEADLINE)
        assert MACHINE.is_terminal(run(request, QUIESCE_TIMEOUT)[0])
        # So it goes too when the deadline came while it was draining and the READs end after all.
        assert MACHINE.is_terminal(run(request, *map(quiesced, sorted(self.open_reads)))[0])

    @invariant()
    def it_is_not_tried_again_once_given_up(self) -> None:
        if self.gave_up:
            request, _ = run(self.request, *(failed(read, LOST) for read in sorted(self.open_reads)))
            assert MACHINE.is_terminal(request)

    def teardown(self) -> None:
        if not hasattr(self, "request") or MACHINE.is_terminal(self.request):
            return
        self.is_given_up(DEADLINE)
        if self.request.state is State.DRAINING:
            self.quiesce_timer_fires()
        self.reported_exactly_when_ended()


TestRequestUnderLawfulCore = RequestUnderLawfulCore.TestCase
TestRequestUnderLawfulCore.settings = settings(max_examples=400, stateful_step_count=30, deadline=None)


_times_ns = st.integers(0, 2 * PROVEN_NS)


@given(times_ns=st.permutations([10, 500, 900, 1000]), late_ns=st.integers(0, 2 * PROVEN_NS))
@settings(deadline=None)
def test_done_means_that_the_latest_completion_was_before_the_proven_end(times_ns: list[int], late_ns: int) -> None:
    times_ns[0] = late_ns
    request = reading(len(times_ns))
    for read, at_ns in enumerate(times_ns):
        request, _ = run(request, completed(read, at_ns))
    assert (request.state is State.DONE) == (max(times_ns) <= PROVEN_NS)


_reads = st.integers(0, 3)
_failures = st.sampled_from([LOST, REFUSED, SILENT, CRASHED])
ANY_EVENT: st.SearchStrategy[Event] = st.one_of(
    st.builds(ready, _reads, connection=st.integers(1, 3), are_checked=st.booleans()),
    st.builds(PeerFailed, failure=_failures),
    st.builds(completed, _reads, _times_ns, _times_ns),
    st.builds(checked, _reads, _times_ns),
    st.builds(failed, _reads, _failures, is_quiescent=st.booleans()),
    st.builds(quiesced, _reads),
    st.builds(PeerLost, failure=_failures),
    st.builds(LeaseProven, proven_until_ns=_times_ns),
    st.builds(ShellFailed, failure=_failures),
    st.sampled_from([ParamsRejected(failure=MALFORMED), GONE, PROOF_TIMEOUT, DEADLINE, QUIESCE_TIMEOUT, Aborted()]),
)


def test_any_event_covers_every_event_of_the_machine() -> None:
    # The search below is only as good as its alphabet.
    seen: set[type[Event]] = set()

    @given(event=ANY_EVENT)
    @settings(max_examples=500, deadline=None, database=None)
    def look(event: Event) -> None:
        seen.add(type(event))

    look()
    assert seen == set(MACHINE.events)


@given(retries=st.integers(0, 2), events=st.lists(ANY_EVENT, max_size=40))
@settings(max_examples=1000, deadline=None)
def test_no_sequence_of_events_breaks_the_machine(retries: int, events: list[Event]) -> None:
    request = new(retries_left=retries)
    reports = 0
    for event in events:
        encoded = msgspec.json.encode(request)
        try:
            after, effects = MACHINE.step(request, event)
        except ProtocolError:
            after, effects = request, ()
        assert msgspec.json.encode(request) == encoded  # a step never changes the value that it was given
        reports += _reports(effects)
        if MACHINE.is_terminal(request):
            assert (after, effects) == (request, ())
        request = after
    assert reports == (1 if MACHINE.is_terminal(request) else 0)


def _reports(effects: Effects) -> int:
    return sum(1 for effect in effects if isinstance(effect, Report))
