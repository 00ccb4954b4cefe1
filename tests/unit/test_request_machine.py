"""The request machine on the decode engine, against its specification.

First the transitions that matter, one by one, written from the prose and not from the table. Then two random searches:
`RequestUnderLawfulShell` plays a shell that keeps its promises (every ordered read ends once, reads are skipped only
after a failure, the peer answers only who waits) and checks what must hold in every history; the other throws any event
at any reachable value and checks that nothing but a `ProtocolError` can come out of it.
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
    DeadlineExceeded,
    Failure,
    HandshakeTimeout,
    Incompatible,
    LeaseNotProven,
    Quarantined,
    TransferError,
)
from statemachine.kernel import Effect, Effects, Event, ProtocolError
from statemachine.request import (
    MACHINE,
    Aborted,
    AwaitPeer,
    DeadlinePassed,
    LeaseLapsed,
    ParamsRejected,
    PeerFailed,
    PeerIncompatible,
    PeerLost,
    PeerReady,
    PostReads,
    Proof,
    QuiesceTimeout,
    ReadCompleted,
    ReadFailed,
    ReadSkipped,
    Report,
    Request,
    SendRelease,
    ShellFailed,
    StartQuiesceTimer,
    State,
)

PROVEN_UNTIL_NS = 1000

REFUSED = TransferError(peer="prefill", operation="READ", error="INVALID_PARAM", transport_lost=False)
LOST = TransferError(peer="prefill", operation="READ", error="REMOTE_DISCONNECT", transport_lost=True)
SILENT = HandshakeTimeout(peer="prefill", address="h:1", timeout_seconds=5.0)
UNLIKE = Incompatible(peer="prefill", address="h:1", field="dtype", local="float16", remote="bfloat16")
MALFORMED = BadParams(field="remote_block_ids", expected="list of ints", found="None")
CRASHED = ActorCrashed(actor="peer actor", error="KeyError()")


def new(*, awaited: bool = True, retries_left: int = 1) -> Request:
    return Request(
        request_id="decode-1", remote_request_id="prefill-1", peer="prefill", awaited=awaited, retries_left=retries_left
    )


def ready(reads: int, *, now_ns: int = 0, proven_until_ns: int = PROVEN_UNTIL_NS) -> PeerReady:
    return PeerReady(now_ns=now_ns, reads=reads, proof=Proof(proven_until_ns=proven_until_ns, basis="granted"))


def completed(read: int, at_ns: int = 10) -> ReadCompleted:
    return ReadCompleted(read=read, completed_ns=at_ns)


def failed(read: int, failure: Failure = REFUSED, at_ns: int = 10) -> ReadFailed:
    return ReadFailed(read=read, now_ns=at_ns, failure=failure)


def skipped(read: int, at_ns: int = 10) -> ReadSkipped:
    return ReadSkipped(read=read, now_ns=at_ns)


def run(request: Request, *events: Event) -> tuple[Request, list[Effect]]:
    """Feed `events`; all effects in order."""
    effects: list[Effect] = []
    for event in events:
        request, more = MACHINE.step(request, event)
        effects += more
    return request, effects


def reading(reads: int, *, retries_left: int = 1) -> Request:
    return run(new(retries_left=retries_left), ready(reads))[0]


# --- waiting for the peer -------------------------------------------------------------------------------------------


def test_a_ready_peer_makes_it_read_and_all_reads_count_as_in_flight() -> None:
    request, effects = run(new(), ready(3))
    assert request.state is State.READING
    assert request.in_flight == {0, 1, 2}
    assert effects == [PostReads(reads=3)]


def test_nothing_to_read_is_done_at_once_and_the_blocks_are_given_back() -> None:
    request, effects = run(new(), ready(0))
    assert request.state is State.DONE
    assert effects == [SendRelease(), Report(failure=None)]


def test_who_only_gives_back_is_not_reported_and_reads_nothing() -> None:
    request, effects = run(new(awaited=False), ready(3))
    assert request.state is State.DONE
    assert effects == [SendRelease()]


@pytest.mark.parametrize("now_ns", [PROVEN_UNTIL_NS, PROVEN_UNTIL_NS + 5])
def test_a_lease_that_is_over_before_the_first_read_is_not_read_under(now_ns: int) -> None:
    request, effects = run(new(), ready(3, now_ns=now_ns))
    assert request.state is State.EXPIRED
    assert isinstance(request.failure, LeaseNotProven)
    assert request.failure.late_seconds == pytest.approx((now_ns - PROVEN_UNTIL_NS) / 1e9)
    assert request.failure.basis == "granted"
    assert effects == [Report(failure=request.failure)]


@pytest.mark.parametrize(
    ("event", "failure"),
    [
        (PeerFailed(failure=SILENT), SILENT),
        (PeerIncompatible(failure=UNLIKE), UNLIKE),
        (ShellFailed(failure=CRASHED), CRASHED),
    ],
)
def test_a_failure_while_nothing_is_in_flight_ends_it_at_once(event: Event, failure: Failure) -> None:
    request, effects = run(new(), event)
    assert request.state is State.FAILED
    assert request.failure == failure
    assert effects == [Report(failure=failure)]


def test_params_that_make_no_sense_end_it_at_once_and_give_the_blocks_back() -> None:
    request, effects = run(new(), ParamsRejected(failure=MALFORMED))
    assert (request.state, request.failure) == (State.FAILED, MALFORMED)
    assert effects == [SendRelease(), Report(failure=MALFORMED)]


def test_an_abort_while_waiting_ends_it_at_once_and_gives_the_blocks_back() -> None:
    request, effects = run(new(), Aborted())
    assert request.state is State.FAILED
    assert effects == [SendRelease(), Report(failure=AbortedByClient())]


def test_the_deadline_while_waiting_expires_it_and_gives_the_blocks_back() -> None:
    request, effects = run(new(), DeadlinePassed(timeout_seconds=120.0))
    failure = DeadlineExceeded(timeout_seconds=120.0, phase="pending_handshake")
    assert request.state is State.EXPIRED
    assert effects == [SendRelease(), Report(failure=failure)]


def test_a_lapsed_lease_while_waiting_expires_it() -> None:
    request, effects = run(new(), LeaseLapsed(now_ns=50))
    assert request.state is State.EXPIRED
    assert isinstance(request.failure, LeaseNotProven)
    assert request.failure.basis == "none"
    assert effects == [Report(failure=request.failure)]


@pytest.mark.parametrize("event", [completed(0), failed(0), skipped(0)])
def test_no_read_ends_before_one_was_ordered(event: Event) -> None:
    request = new()
    with pytest.raises(ProtocolError, match="no read is ordered"):
        MACHINE.step(request, event)
    assert request == new()


# --- reading --------------------------------------------------------------------------------------------------------


def test_done_is_reported_and_the_blocks_given_back_after_the_last_read_and_not_before() -> None:
    request, effects = run(reading(3), completed(2, 10), completed(0, 20))
    assert request.state is State.READING
    assert effects == []
    request, effects = run(request, completed(1, PROVEN_UNTIL_NS - 1))
    assert request.state is State.DONE
    assert effects == [SendRelease(), Report(failure=None)]


@pytest.mark.parametrize("at_ns", [PROVEN_UNTIL_NS, PROVEN_UNTIL_NS + 1_000_000])
def test_a_last_read_at_or_after_the_proven_end_is_never_done(at_ns: int) -> None:
    request, effects = run(reading(2), completed(0, 10), completed(1, at_ns))
    assert request.state is State.EXPIRED
    assert isinstance(request.failure, LeaseNotProven)
    assert effects == [Report(failure=request.failure)]


def test_a_late_completion_is_not_forgotten_when_an_earlier_one_is_delivered_after_it() -> None:
    # The owner may deliver the ends of two reads in another order than they happened in.
    request, effects = run(reading(2), completed(0, PROVEN_UNTIL_NS + 5), completed(1, PROVEN_UNTIL_NS - 5))
    assert Report(failure=None) not in effects
    assert request.state is State.EXPIRED


@pytest.mark.parametrize(
    ("event", "ending", "failure"),
    [
        (failed(0), State.FAILED, REFUSED),
        (PeerLost(failure=LOST), State.FAILED, LOST),
        (Aborted(), State.FAILED, AbortedByClient()),
        (ShellFailed(failure=CRASHED), State.FAILED, CRASHED),
        (DeadlinePassed(timeout_seconds=9.0), State.EXPIRED, DeadlineExceeded(timeout_seconds=9.0, phase="reading")),
    ],
)
def test_a_failure_while_others_are_in_flight_is_reported_after_the_last_of_them(
    event: Event, ending: State, failure: Failure
) -> None:
    request, effects = run(reading(3, retries_left=0), event)
    assert request.state is State.DRAINING
    assert effects == [StartQuiesceTimer()]
    for read in sorted(request.in_flight)[:-1]:
        request, effects = run(request, skipped(read))
        assert request.state is State.DRAINING
        assert effects == []
    request, effects = run(request, skipped(2))
    assert request.state is ending
    assert request.failure == failure
    assert effects == [SendRelease(), Report(failure=failure)]


def test_a_lease_that_lapses_while_reading_ends_expired_and_releases_nothing() -> None:
    # The prefill engine has freed the blocks by itself.
    request, effects = run(reading(1), LeaseLapsed(now_ns=PROVEN_UNTIL_NS))
    assert (request.state, effects) == (State.DRAINING, [StartQuiesceTimer()])
    request, effects = run(request, completed(0, PROVEN_UNTIL_NS + 1))
    assert request.state is State.EXPIRED
    assert isinstance(request.failure, LeaseNotProven)
    assert effects == [Report(failure=request.failure)]


def test_the_only_read_failing_ends_it_at_once() -> None:
    request, effects = run(reading(1), failed(0))
    assert request.state is State.FAILED
    assert effects == [SendRelease(), Report(failure=REFUSED)]


def test_a_read_is_not_skipped_while_nothing_has_failed() -> None:
    with pytest.raises(ProtocolError, match="skipped only after a failure"):
        MACHINE.step(reading(2), skipped(0))


@pytest.mark.parametrize(
    "event", [ready(1), PeerFailed(failure=SILENT), PeerIncompatible(failure=UNLIKE), ParamsRejected(failure=MALFORMED)]
)
def test_the_peer_answers_only_who_waits_for_it(event: Event) -> None:
    for request in (reading(2), run(reading(2), Aborted())[0]):
        with pytest.raises(ProtocolError, match="pending_handshake"):
            MACHINE.step(request, event)


# --- draining -------------------------------------------------------------------------------------------------------


def test_reads_that_deliver_while_draining_do_not_make_it_succeed() -> None:
    request, effects = run(reading(3, retries_left=0), completed(1), failed(0), completed(2))
    assert request.state is State.FAILED
    assert effects == [StartQuiesceTimer(), SendRelease(), Report(failure=REFUSED)]


@pytest.mark.parametrize(
    "later",
    [
        failed(1, LOST),
        Aborted(),
        DeadlinePassed(timeout_seconds=1.0),
        LeaseLapsed(now_ns=5),
        ShellFailed(failure=CRASHED),
        PeerLost(failure=LOST),
    ],
)
def test_the_first_failure_is_the_one_that_is_reported(later: Event) -> None:
    request, _ = run(reading(3), failed(0), later)
    rest = [skipped(read) for read in sorted(request.in_flight)]
    request, effects = run(request, *rest)
    assert request.state is State.FAILED
    assert [effect for effect in effects if isinstance(effect, Report)] == [Report(failure=REFUSED)]


def test_reads_that_never_end_are_quarantined_and_the_request_ends_without_them() -> None:
    request, effects = run(reading(3), failed(1), QuiesceTimeout(waited_seconds=30.0))
    failure = Quarantined(transfers=2, waited_seconds=30.0, cause="TransferError")
    assert request.state is State.FAILED
    # No release: the peer must hold the blocks as long as somebody may still read them.
    assert effects == [StartQuiesceTimer(), Report(failure=failure, quarantined=True)]
    assert run(request, completed(0), failed(2)) == (request, [])


def test_a_quiesce_timer_of_an_earlier_attempt_means_nothing() -> None:
    timeout = QuiesceTimeout(waited_seconds=30.0)
    assert run(new(), timeout) == (new(), [])
    assert run(reading(2), timeout) == (reading(2), [])


# --- retry ----------------------------------------------------------------------------------------------------------


def test_a_lost_transport_is_tried_again_from_the_start() -> None:
    request, effects = run(reading(2), failed(0, LOST), failed(1, LOST))
    assert request.state is State.PENDING_HANDSHAKE
    assert effects == [StartQuiesceTimer(), AwaitPeer()]
    assert (request.retries_left, request.failure, request.ending) == (0, None, None)
    request, effects = run(request, ready(2), completed(0), completed(1))
    assert request.state is State.DONE
    assert effects == [PostReads(reads=2), SendRelease(), Report(failure=None)]


def test_one_lost_read_alone_is_tried_again_at_once() -> None:
    request, effects = run(reading(1), failed(0, LOST))
    assert request.state is State.PENDING_HANDSHAKE
    assert effects == [AwaitPeer()]


def test_a_lost_peer_is_tried_again_when_its_reads_have_ended() -> None:
    request, effects = run(reading(2), PeerLost(failure=LOST), failed(0, LOST), skipped(1))
    assert request.state is State.PENDING_HANDSHAKE
    assert effects == [StartQuiesceTimer(), AwaitPeer()]


@pytest.mark.parametrize("events", [[failed(0, LOST), completed(1)], [completed(1), failed(0, LOST)]])
def test_it_is_tried_again_as_a_whole_even_if_a_part_was_delivered(events: list[Event]) -> None:
    # Nothing has been released yet, so what was read once can be read again.
    request, effects = run(reading(2), *events)
    assert request.state is State.PENDING_HANDSHAKE
    assert (effects[-1], SendRelease() in effects) == (AwaitPeer(), False)
    assert run(request, ready(2))[0].in_flight == {0, 1}


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([failed(0, LOST), failed(1, LOST, PROVEN_UNTIL_NS)], "the lease is over"),
        ([failed(0, REFUSED), failed(1, LOST)], "the first failure was not the transport's"),
        ([failed(0, LOST), Aborted(), failed(1, LOST)], "nobody wants it any more"),
        ([failed(0, LOST), DeadlinePassed(timeout_seconds=1.0), failed(1, LOST)], "there is no time left"),
        ([failed(0, LOST), LeaseLapsed(now_ns=5), failed(1, LOST)], "the lease is over"),
        ([failed(0, LOST), ShellFailed(failure=CRASHED), failed(1, LOST)], "its actor has crashed"),
    ],
)
def test_no_retry_when(events: list[Event], why: str) -> None:
    request, effects = run(reading(2), *events)
    assert AwaitPeer() not in effects, why
    assert request.state is State.FAILED
    assert [type(effect) for effect in effects[-2:]] == [SendRelease, Report]


@pytest.mark.parametrize(
    "given_up",
    [
        Aborted(),
        DeadlinePassed(timeout_seconds=1.0),
        LeaseLapsed(now_ns=5),
        ShellFailed(failure=CRASHED),
        failed(0, REFUSED),
    ],
)
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
        assert effects == [PostReads(reads=1), AwaitPeer()]
    request, _ = run(request, ready(1), failed(0, LOST))
    assert request.state is State.FAILED


def test_a_retry_is_bound_by_the_proof_of_the_new_connection() -> None:
    request, _ = run(reading(1), failed(0, LOST))
    request, _ = run(request, ready(1, proven_until_ns=30), completed(0, 40))
    assert request.state is State.EXPIRED


# --- random histories -----------------------------------------------------------------------------------------------


class RequestUnderLawfulShell(RuleBasedStateMachine):
    """A shell that keeps its promises. Time only moves forward, and completions are delivered in their order."""

    @initialize(awaited=st.booleans(), retries=st.integers(0, 3))
    def start(self, awaited: bool, retries: int) -> None:
        self.request = new(awaited=awaited, retries_left=retries)
        self.awaited = awaited
        self.retries = retries
        self.now_ns = 0
        self.proven_until_ns: int | None = None
        self.open_reads: set[int] = set()
        self.has_read = False
        self.quiesce_timer = False
        self.gave_up = False
        self.reports: list[Report] = []
        self.releases = 0

    def feed(self, event: Event) -> None:
        before = self.request
        self.request, effects = MACHINE.step(before, event)
        if MACHINE.is_terminal(before):
            assert self.request == before
            assert effects == ()
        for effect in effects:
            self.execute(effect)
        if before.state is not State.DRAINING and self.request.state is State.DRAINING:
            assert self.open_reads
            assert StartQuiesceTimer() in effects
        if self.request.state is State.PENDING_HANDSHAKE and before.state is not State.PENDING_HANDSHAKE:
            assert not self.gave_up

    def execute(self, effect: Effect) -> None:
        match effect:
            case PostReads(reads=reads):
                assert not self.open_reads
                assert reads > 0
                self.open_reads = set(range(reads))
            case Report():
                assert effect.quarantined == bool(self.open_reads)
                assert not self.reports
                if effect.failure is None and self.has_read:
                    # Reports come at the moment of the last completion.
                    assert self.proven_until_ns is not None
                    assert self.now_ns < self.proven_until_ns
                self.reports.append(effect)
            case SendRelease():
                assert not self.open_reads
                assert MACHINE.is_terminal(self.request)
                self.releases += 1
            case AwaitPeer():
                assert not self.open_reads
                assert self.proven_until_ns is not None
                assert self.now_ns < self.proven_until_ns
                self.retries -= 1
                assert self.retries >= 0
                self.quiesce_timer = False
            case StartQuiesceTimer():
                self.quiesce_timer = True

    @property
    def waits_for_peer(self) -> bool:
        return self.request.state is State.PENDING_HANDSHAKE

    @rule(step_ns=st.integers(1, 400))
    def pass_time(self, step_ns: int) -> None:
        self.now_ns += step_ns

    @precondition(lambda self: self.waits_for_peer)
    @rule(reads=st.integers(0, 3), left_ns=st.integers(-100, 2000))
    def peer_ready(self, reads: int, left_ns: int) -> None:
        self.proven_until_ns = self.now_ns + left_ns
        self.feed(ready(reads, now_ns=self.now_ns, proven_until_ns=self.proven_until_ns))
        if left_ns <= 0 and self.awaited:
            assert self.request.state is State.EXPIRED

    @precondition(lambda self: self.waits_for_peer)
    @rule(
        event=st.sampled_from(
            [PeerFailed(failure=SILENT), PeerIncompatible(failure=UNLIKE), ParamsRejected(failure=MALFORMED)]
        )
    )
    def peer_failed(self, event: Event) -> None:
        self.feed(event)

    @precondition(lambda self: self.open_reads)
    @rule(data=st.data())
    def read_completes(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.open_reads)))
        self.open_reads.remove(read)
        self.has_read = True
        self.feed(completed(read, self.now_ns))

    @precondition(lambda self: self.open_reads)
    @rule(data=st.data(), failure=st.sampled_from([LOST, REFUSED]))
    def read_fails(self, data: st.DataObject, failure: Failure) -> None:
        read = data.draw(st.sampled_from(sorted(self.open_reads)))
        self.open_reads.remove(read)
        self.feed(failed(read, failure, self.now_ns))

    @precondition(lambda self: self.open_reads and self.request.state is not State.READING)
    @rule(data=st.data())
    def read_is_skipped(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.open_reads)))
        self.open_reads.remove(read)
        self.feed(skipped(read, self.now_ns))

    @rule()
    def peer_is_lost(self) -> None:
        self.feed(PeerLost(failure=LOST))

    @precondition(lambda self: self.proven_until_ns is None or self.now_ns >= self.proven_until_ns)
    @rule()
    def lease_lapses(self) -> None:
        self.gave_up = True
        self.feed(LeaseLapsed(now_ns=self.now_ns))

    @rule(event=st.sampled_from([DeadlinePassed(timeout_seconds=120.0), Aborted(), ShellFailed(failure=CRASHED)]))
    def is_given_up(self, event: Event) -> None:
        self.gave_up = True
        self.feed(event)

    @precondition(lambda self: self.quiesce_timer)
    @rule()
    def quiesce_timer_fires(self) -> None:
        self.quiesce_timer = False
        self.feed(QuiesceTimeout(waited_seconds=30.0))

    @invariant()
    def reported_exactly_when_awaited_and_ended(self) -> None:
        expected = 1 if self.awaited and MACHINE.is_terminal(self.request) else 0
        assert len(self.reports) == expected

    @invariant()
    def done_exactly_when_reported_without_a_failure(self) -> None:
        for report in self.reports:
            assert (report.failure is None) == (self.request.state is State.DONE)
            assert report.failure == self.request.failure

    @invariant()
    def released_exactly_once_when_done_and_never_twice(self) -> None:
        assert self.releases <= 1
        if self.request.state is State.DONE:
            assert self.releases == 1
        if not MACHINE.is_terminal(self.request) or isinstance(self.request.failure, LeaseNotProven | Quarantined):
            assert self.releases == 0

    @invariant()
    def it_knows_what_is_in_flight(self) -> None:
        if not MACHINE.is_terminal(self.request):
            assert self.request.in_flight == self.open_reads
            assert (self.request.state in (State.READING, State.DRAINING)) == bool(self.open_reads)
        if self.request.state is State.DONE:
            assert not self.open_reads

    @invariant()
    def a_draining_request_has_a_timer_that_ends_it(self) -> None:
        if self.request.state is State.DRAINING:
            assert self.quiesce_timer

    @invariant()
    def its_own_timers_bring_it_to_an_end(self) -> None:
        # The deadline fires once: after it, only reads that end and the quiesce timer are left to rely on.
        request, _ = run(self.request, DeadlinePassed(timeout_seconds=120.0))
        request, _ = run(request, QuiesceTimeout(waited_seconds=30.0))
        assert MACHINE.is_terminal(request)
        # So it goes too when the deadline came while it was draining and the reads end after all.
        request, _ = run(self.request, DeadlinePassed(timeout_seconds=120.0))
        request, _ = run(request, *(failed(read, LOST, self.now_ns) for read in sorted(self.open_reads)))
        assert MACHINE.is_terminal(request)

    @invariant()
    def it_is_not_tried_again_once_given_up(self) -> None:
        if self.gave_up:
            request, _ = run(self.request, *(failed(read, LOST, self.now_ns) for read in sorted(self.open_reads)))
            assert MACHINE.is_terminal(request)

    def teardown(self) -> None:
        if not hasattr(self, "request") or MACHINE.is_terminal(self.request):
            return
        self.is_given_up(DeadlinePassed(timeout_seconds=120.0))
        if self.request.state is State.DRAINING:
            self.quiesce_timer_fires()
        self.reported_exactly_when_awaited_and_ended()


TestRequestUnderLawfulShell = RequestUnderLawfulShell.TestCase
TestRequestUnderLawfulShell.settings = settings(max_examples=400, stateful_step_count=30, deadline=None)


_times_ns = st.integers(0, 2 * PROVEN_UNTIL_NS)


@given(times_ns=st.lists(_times_ns, min_size=1, max_size=4))
@settings(deadline=None)
def test_done_means_that_the_latest_completion_was_before_the_proven_end(times_ns: list[int]) -> None:
    """With completions delivered in the order in which they happened."""
    times_ns.sort()
    request = reading(len(times_ns))
    for read, at_ns in enumerate(times_ns):
        request, _ = run(request, completed(read, at_ns))
    assert (request.state is State.DONE) == (max(times_ns) < PROVEN_UNTIL_NS)


_reads = st.integers(0, 3)
_failures = st.sampled_from([LOST, REFUSED, SILENT, UNLIKE, CRASHED])
ANY_EVENT: st.SearchStrategy[Event] = st.one_of(
    st.builds(ready, _reads, now_ns=_times_ns, proven_until_ns=_times_ns),
    st.builds(PeerFailed, failure=_failures),
    st.builds(PeerIncompatible, failure=_failures),
    st.just(ParamsRejected(failure=MALFORMED)),
    st.builds(completed, _reads, _times_ns),
    st.builds(failed, _reads, _failures, _times_ns),
    st.builds(skipped, _reads, _times_ns),
    st.builds(PeerLost, failure=_failures),
    st.builds(LeaseLapsed, now_ns=_times_ns),
    st.just(DeadlinePassed(timeout_seconds=120.0)),
    st.just(QuiesceTimeout(waited_seconds=30.0)),
    st.just(Aborted()),
    st.builds(ShellFailed, failure=_failures),
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


@given(awaited=st.booleans(), retries=st.integers(0, 2), events=st.lists(ANY_EVENT, max_size=40))
@settings(max_examples=1000, deadline=None)
def test_no_sequence_of_events_breaks_the_machine(awaited: bool, retries: int, events: list[Event]) -> None:
    request = new(awaited=awaited, retries_left=retries)
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
    assert reports == (1 if awaited and MACHINE.is_terminal(request) else 0)


def _reports(effects: Effects) -> int:
    return sum(1 for effect in effects if isinstance(effect, Report))
