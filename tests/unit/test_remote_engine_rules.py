"""The rules of a decode rank's core, one by one: each test is what notices that a rule is gone (`simulation/mutants`).

What follows from sequences of events is the model checker's to find (`tests/explore`); here are numbers and bounds.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from statemachine import peer
from statemachine.failures import (
    ActorCrashed,
    BlocksConsumed,
    DeadlineExceeded,
    HandshakeTimeout,
    LeaseNotProven,
    LeaseOver,
    PeerBackoff,
    PeerRetired,
    TransferError,
)
from statemachine.kernel import Effect, Event
from statemachine.lease import LEASES_PER_MESSAGE_MAX, LeaseName
from statemachine.remote_engine import (
    AbortAsked,
    Announced,
    BlocksResolved,
    Connected,
    ConnectFailed,
    Crashed,
    EngineLimits,
    HoldAnswered,
    LiftQuarantine,
    LinkLost,
    NotificationFailed,
    NotifyReleases,
    PostReads,
    ReadEnded,
    ReleaseAnswered,
    ReleaseUnread,
    RemoteEngine,
    Report,
    ResolveBlocks,
    Retire,
    SendHeartbeat,
    SendHold,
    SendRelease,
    Started,
    StartHandshake,
    TearDown,
    TornDown,
    claims,
)
from statemachine.remote_engine.claims import DRIFT_DIVISOR

MS = 1_000_000
LIMITS = EngineLimits(
    lease_ns=30_000 * MS,
    margin_ns=100 * MS,
    request_ns=60_000 * MS,
    quiesce_ns=5_000 * MS,
    grace_ns=2_000 * MS,
    backoff_first_ns=1_000 * MS,
    backoff_max_ns=8_000 * MS,
    incompatible_ns=60_000 * MS,
    retries=1,
)
WORKERS = ("PP 0 TP 2", "PP 0 TP 3", "PP 1 TP 2", "PP 1 TP 3")
A, B = LeaseName("a", 1), LeaseName("b", 2)
OF_BUILTIN = LeaseName("a", 0)
"""A built-in engine numbers no lease."""

E = TypeVar("E", bound=Effect)


class Executor:
    """Feeds a core as its executor does, answers ResolveBlocks, and keeps what the core wants done."""

    def __init__(self, *, ranks: int = 1, is_builtin: bool = False, observe: Any = None) -> None:
        self.core = RemoteEngine("p", "host", LIMITS, observe=observe)
        self.ranks, self.is_builtin = ranks, is_builtin
        self.reads: int | None = None
        self.now_ns = 0
        self.connects = 0
        self.effects: list[Effect] = []

    def feed(self, event: Event) -> None:
        self._take(self.core.handle(event, self.now_ns))
        self._take(self.core.advance(self.now_ns))

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.effects.append(effect)
            if isinstance(effect, ResolveBlocks):
                reads = self.ranks if self.reads is None else self.reads
                resolved = BlocksResolved(request_id=effect.request_id, connection=effect.connection, reads=reads)
                self._take(self.core.handle(resolved, self.now_ns))

    def pass_until(self, at_ns: int) -> None:
        """Look at the clock at each deadline on the way."""
        while (next_ns := self.core.next_deadline()) is not None and next_ns <= at_ns:
            self.now_ns = max(self.now_ns, next_ns)
            self._take(self.core.advance(self.now_ns))
        self.now_ns = at_ns

    def take(self, kind: type[E]) -> list[E]:
        """What of this kind is wanted; forgotten from now on."""
        found = [each for each in self.effects if isinstance(each, kind)]
        self.effects = [each for each in self.effects if not isinstance(each, kind)]
        return found

    def start(self, request_id: str, lease: LeaseName = A, age_ns: int = 0) -> None:
        self.feed(Started(request_id=request_id, lease=lease, address="host", age_ns=age_ns))

    def announce(self, request_id: str, lease: LeaseName = A, age_ns: int = 0) -> None:
        self.feed(Announced(request_id=request_id, lease=lease, address="host", age_ns=age_ns))

    def connect(self, life: str = "1") -> None:
        assert self.take(StartHandshake)
        self.connects += 1
        self.feed(
            Connected(connection=self.connects, workers=WORKERS[: self.ranks], is_builtin=self.is_builtin, life=life)
        )

    def held(self, sent_ns: int, remaining_ns: int, *, rank: int = 0, connection: int | None = None) -> None:
        self.feed(
            HoldAnswered(
                connection=connection or self.connects, rank=rank, sent_ns=sent_ns, held=((A, remaining_ns),), gone=()
            )
        )

    def gone(self, why: str, lease: LeaseName = A, rank: int = 0) -> None:
        self.feed(HoldAnswered(connection=self.connects, rank=rank, sent_ns=self.now_ns, held=(), gone=((lease, why),)))

    def read(self, request_id: str, read: int = 0, at_ns: int | None = None, **what: Any) -> None:
        ended_ns = self.now_ns if at_ns is None else at_ns
        self.feed(ReadEnded(request_id=request_id, read=read, connection=self.connects, ended_ns=ended_ns, **what))

    def released(self, *leases: LeaseName, rank: int = 0) -> None:
        self.feed(ReleaseAnswered(connection=self.connects, rank=rank, leases=leases))


def reading(**how: Any) -> Executor:
    """One request that reads under lease A, or the one without a number; P was asked at the moment 1 s."""
    executor = Executor(**how)
    executor.now_ns = 1_000 * MS
    executor.start("r", OF_BUILTIN if executor.is_builtin else A)
    executor.connect()
    return executor


def reach_ns(remaining_ns: int) -> int:
    return remaining_ns - remaining_ns // DRIFT_DIVISOR - LIMITS.margin_ns


# --- proofs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late_ns", "is_done"), [(0, True), (1, False)])
def test_a_proof_reaches_from_the_question_for_what_remains_less_drift_and_margin(late_ns: int, is_done: bool) -> None:
    executor = reading()
    executor.now_ns = 4_000 * MS  # the answer was long on its way
    executor.held(1_000 * MS, 12_000 * MS)
    proven_ns = 1_000 * MS + 12_000 * MS * 5 // 6 - 100 * MS
    executor.now_ns = proven_ns + late_ns
    executor.read("r")
    reports = executor.take(Report)
    assert [each.failure for each in reports] == ([None] if is_done else [])


def test_the_rank_that_keeps_the_blocks_for_the_shortest_time_counts() -> None:
    executor = reading(ranks=2)
    executor.held(1_000 * MS, 30_000 * MS, rank=0)
    executor.held(1_000 * MS, 3_000 * MS, rank=1)
    executor.now_ns = 10_000 * MS
    executor.read("r", 0)
    executor.read("r", 1)
    assert not executor.take(Report)
    executor.held(10_000 * MS, 1, rank=1)
    assert [each.failure for each in executor.take(Report)] == [None]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_read_that_completed_last_counts_whichever_is_told_last(order: tuple[int, int]) -> None:
    executor = reading(ranks=2)
    for rank in range(2):
        executor.held(1_000 * MS, 3_000 * MS, rank=rank)
    executor.now_ns = 9_000 * MS
    for read in order:
        executor.read("r", read, at_ns=(2_000 * MS, 8_000 * MS)[read])
    assert not executor.take(Report)


def test_nothing_is_read_later_because_p_has_not_answered_yet() -> None:
    executor = reading()
    assert [each.request_id for each in executor.take(PostReads)] == ["r"]
    executor.read("r")
    assert not executor.take(Report)


def test_any_answer_proves_what_was_before_its_question() -> None:
    executor = reading()
    executor.now_ns = 2_000 * MS
    executor.read("r")
    executor.held(2_000 * MS, 1)
    assert [each.failure for each in executor.take(Report)] == [None]


def test_an_answer_to_an_earlier_question_does_not_prove_what_came_after_it() -> None:
    executor = reading()
    executor.now_ns = 9_000 * MS
    executor.read("r")
    executor.held(1_000 * MS, 2_000 * MS)
    assert not executor.take(Report)


def test_a_request_that_lacks_a_proof_asks_at_once_and_not_for_ever() -> None:
    executor = reading()
    executor.take(SendHold)
    executor.now_ns += 10 * MS
    executor.read("r")
    assert [(each.sent_ns, each.leases) for each in executor.take(SendHold)] == [(1_010 * MS, (A,))]
    executor.pass_until(1_010 * MS + LIMITS.lease_ns)
    (report,) = executor.take(Report)
    assert isinstance(report.failure, LeaseNotProven)


def test_a_proof_that_is_missing_is_asked_of_each_rank_that_has_not_given_it() -> None:
    executor = reading(ranks=2)
    executor.take(SendHold)
    executor.now_ns += 10 * MS
    for rank in range(2):
        executor.read("r", rank)
    assert [each.rank for each in executor.take(SendHold)] == [0, 1]
    executor.held(executor.now_ns, 30_000 * MS, rank=0)
    assert not executor.take(Report)
    executor.held(executor.now_ns, 30_000 * MS, rank=1)
    (report,) = executor.take(Report)
    assert report.failure is None


@pytest.mark.parametrize(("connection", "sent_ns"), [(2, 1_000 * MS), (1, 1_000_000 * MS)])
def test_answers_of_another_connection_or_to_a_question_of_the_future_prove_nothing(
    connection: int, sent_ns: int
) -> None:
    executor = reading()
    executor.held(sent_ns, 30_000 * MS, connection=connection)
    executor.now_ns = 2_000 * MS
    executor.read("r")
    assert not executor.take(Report)


def test_what_was_proven_over_one_connection_is_not_over_the_next() -> None:
    executor = reading()
    executor.held(1_000 * MS, 30_000 * MS)
    executor.feed(LinkLost(connection=1, detail="reset"))
    executor.read("r", was_wanted=False)
    assert executor.take(TearDown)
    executor.feed(TornDown(connection=1))
    executor.connect(life="2")
    executor.now_ns += 10 * MS
    executor.read("r")
    assert not executor.take(Report)


def test_an_engine_that_comes_back_with_another_number_of_ranks_keeps_nothing() -> None:
    executor = reading()
    executor.announce("waits", B)
    executor.feed(LinkLost(connection=1, detail="reset"))
    executor.read("r", was_wanted=False)
    executor.feed(TornDown(connection=1))
    executor.ranks = 2
    executor.connect(life="2")
    (report,) = executor.take(Report)
    assert isinstance(report.failure, LeaseOver)
    executor.start("waits", B)
    (report,) = executor.take(Report)
    assert isinstance(report.failure, LeaseOver)


# --- leases that are over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_proving", [False, True])
def test_a_lease_that_is_gone_ends_its_request_with_the_words_of_p(is_proving: bool) -> None:
    executor = reading()
    if is_proving:
        executor.read("r")
    executor.gone("released by its readers")
    if not is_proving:
        assert not executor.take(Report), "its READ may still write"
        executor.read("r")
    (report,) = executor.take(Report)
    assert isinstance(report.failure, LeaseOver)
    assert report.failure.why == "released by its readers"


def test_a_lease_that_is_gone_before_its_request_starts_is_not_read() -> None:
    executor = reading()
    executor.announce("waits", B)
    executor.take(PostReads)
    executor.gone("expired", B)
    executor.start("waits", B)
    assert not executor.take(PostReads)
    (report,) = executor.take(Report)
    assert isinstance(report.failure, LeaseOver)
    assert report.failure.why == "expired"


@pytest.mark.parametrize("age_ns", [0, 5_000 * MS])
def test_the_lease_of_a_builtin_engine_is_taken_to_begin_when_its_request_was_heard_of(age_ns: int) -> None:
    executor = Executor(is_builtin=True)
    executor.now_ns = 10_000 * MS
    executor.announce("r", OF_BUILTIN, age_ns)
    executor.start("r", OF_BUILTIN)
    executor.now_ns += 1_000 * MS
    executor.connect()
    executor.pass_until(10_000 * MS - age_ns + LIMITS.lease_ns - LIMITS.margin_ns - 1)
    executor.start("other", OF_BUILTIN)
    assert not executor.take(Report)
    executor.pass_until(executor.now_ns + 1)
    executor.read("r")
    assert {type(each.failure) for each in executor.take(Report)} >= {LeaseOver}


def test_a_builtin_engine_that_restarted_keeps_nothing() -> None:
    executor = reading(is_builtin=True)
    lost = TransferError(peer="p", operation="notify", error="lost", transport_lost=True)
    executor.feed(NotificationFailed(connection=1, failure=lost))
    executor.read("r", was_wanted=False)
    executor.feed(TornDown(connection=1))
    executor.connect(life="2")
    (report,) = executor.take(Report)
    assert isinstance(report.failure, LeaseOver)


# --- READs ----------------------------------------------------------------------------------------------------------

LOST = TransferError(peer="p", operation="READ", error="lost", transport_lost=True)
REFUSED = TransferError(peer="p", operation="READ", error="refused", transport_lost=False)


def rebuild(executor: Executor) -> None:
    """The connection was found suspect, and no READ on it is in flight."""
    assert executor.take(TearDown)
    executor.feed(TornDown(connection=executor.connects))
    executor.connect()


def test_a_request_that_needs_no_read_is_done_at_once() -> None:
    executor = Executor()
    executor.reads = 0
    executor.start("r")
    executor.connect()
    assert [each.failure for each in executor.take(Report)] == [None]
    assert not executor.take(PostReads)


def test_a_failure_waits_for_every_other_read() -> None:
    executor = reading(ranks=4)
    executor.read("r", 0, failure=REFUSED)
    executor.read("r", 1)
    executor.read("r", 2, failure=LOST)
    assert not executor.take(Report)
    executor.read("r", 3, was_wanted=False)
    assert [each.failure for each in executor.take(Report)] == [REFUSED]


def test_a_lost_transport_is_tried_again_as_often_as_the_limits_say() -> None:
    executor = reading()
    for _ in range(LIMITS.retries):
        executor.read("r", failure=LOST)
        assert not executor.take(Report)
        rebuild(executor)
    assert len(executor.take(PostReads)) == 1 + LIMITS.retries
    executor.read("r", failure=LOST)
    assert [each.failure for each in executor.take(Report)] == [LOST]


def test_a_read_that_nixl_refuses_is_not_tried_again() -> None:
    executor = reading()
    executor.read("r", failure=REFUSED)
    assert [each.failure for each in executor.take(Report)] == [REFUSED]


@pytest.mark.parametrize("end", ["lease", "abort", "crash", "deadline"])
def test_what_ends_a_draining_request_for_good(end: str) -> None:
    executor = reading(ranks=2)
    if end == "deadline":
        almost_ns = executor.now_ns + LIMITS.request_ns - 1
        while executor.now_ns < almost_ns:  # P lives, and says so
            executor.pass_until(min(almost_ns, executor.now_ns + LIMITS.lease_ns // 2))
            for rank in range(2):
                held = ((A, LIMITS.lease_ns),)
                executor.feed(HoldAnswered(connection=1, rank=rank, sent_ns=executor.now_ns, held=held, gone=()))
    executor.read("r", 0, failure=LOST)
    if end == "lease":
        executor.feed(HoldAnswered(connection=1, rank=0, sent_ns=executor.now_ns, held=(), gone=((A, "expired"),)))
    elif end == "abort":
        executor.feed(AbortAsked(request_id="r"))
    elif end == "crash":
        executor.feed(Crashed(failure=ActorCrashed(actor="x", error="y")))
    else:
        executor.pass_until(executor.now_ns + 1)
    assert not executor.take(Report)
    executor.read("r", 1, failure=LOST)
    assert [each.failure for each in executor.take(Report)] == [LOST]


def test_a_quarantine_is_lifted_with_its_last_read() -> None:
    executor = reading(ranks=2)
    executor.feed(AbortAsked(request_id="r"))
    executor.pass_until(executor.now_ns + LIMITS.quiesce_ns)
    (report,) = executor.take(Report)
    assert report.is_quarantined
    assert executor.core.state is peer.State.DRAINING
    executor.read("r", 0)
    assert not executor.take(LiftQuarantine)
    executor.read("r", 1)
    assert [each.request_id for each in executor.take(LiftQuarantine)] == ["r"]


def test_a_read_that_fails_in_part_does_not_lift_a_quarantine() -> None:
    executor = reading()
    executor.feed(AbortAsked(request_id="r"))
    executor.pass_until(executor.now_ns + LIMITS.quiesce_ns)
    (report,) = executor.take(Report)
    assert report.is_quarantined
    lost = TransferError(peer="p", operation="READ", error="lost", transport_lost=True)
    executor.read("r", failure=lost, is_quiescent=False)
    executor.feed(TornDown(connection=1))
    assert not executor.take(LiftQuarantine)
    executor.pass_until(executor.now_ns + LIMITS.grace_ns)
    assert [each.request_id for each in executor.take(LiftQuarantine)] == ["r"]


def test_an_end_that_is_told_twice_counts_once() -> None:
    executor = reading(ranks=2)
    for _ in range(2):
        executor.read("r", 0, failure=REFUSED)
    assert not executor.take(Report)
    executor.read("r", 1)
    executor.read("r", 1)
    assert len(executor.take(Report)) == 1


def test_reads_that_do_not_end_cost_their_connection_and_keep_it_standing() -> None:
    executor = reading()
    executor.feed(LinkLost(connection=1, detail="reset"))
    executor.pass_until(executor.now_ns + LIMITS.quiesce_ns)
    (report,) = executor.take(Report)
    assert report.is_quarantined
    executor.pass_until(executor.now_ns + LIMITS.backoff_max_ns)
    executor.start("next", B)
    executor.connect()
    assert not executor.take(TearDown), "a READ on the first one is in flight"
    executor.feed(ReadEnded(request_id="r", read=0, connection=1, ended_ns=executor.now_ns))
    assert [each.connection for each in executor.take(TearDown)] == [1]
    assert executor.take(LiftQuarantine)


def test_an_engine_that_is_given_up_takes_nobody_and_is_finished() -> None:
    executor = reading()
    executor.feed(Retire())
    executor.start("late", B)
    assert [type(each.failure) for each in executor.take(Report)] == [PeerRetired]
    executor.read("r", was_wanted=False)
    assert executor.take(TearDown)
    executor.feed(TornDown(connection=1))
    assert not executor.take(StartHandshake)
    assert executor.core.is_finished


def test_a_crash_fails_what_was_in_hand_and_the_handshake_with_it() -> None:
    executor = Executor()
    executor.start("r")
    executor.take(StartHandshake)
    crash = ActorCrashed(actor="x", error="y")
    executor.feed(Crashed(failure=crash))
    assert [each.failure for each in executor.take(Report)] == [crash]
    executor.pass_until(executor.now_ns + LIMITS.backoff_max_ns)
    executor.start("next", B)
    executor.connect()
    assert executor.take(PostReads)


def test_a_crash_fails_what_is_being_read_once_its_reads_have_ended() -> None:
    executor = reading()
    crash = ActorCrashed(actor="x", error="y")
    executor.feed(Crashed(failure=crash))
    assert not executor.take(Report)
    executor.read("r", was_wanted=False)
    assert [each.failure for each in executor.take(Report)] == [crash]


# --- what is said to P ----------------------------------------------------------------------------------------------


def test_many_leases_travel_in_few_messages_of_bounded_size() -> None:
    executor = Executor()
    leases = [LeaseName(f"r{number}", number) for number in range(1, 2 * LEASES_PER_MESSAGE_MAX + 2)]
    for lease in leases:
        executor.announce(lease.request_id, lease)
    executor.connect()
    holds = executor.take(SendHold)
    assert [len(each.leases) for each in holds] == [LEASES_PER_MESSAGE_MAX, LEASES_PER_MESSAGE_MAX, 1]
    assert {lease for each in holds for lease in each.leases} == set(leases)


def test_a_hold_is_asked_until_it_is_answered_and_renewed_before_half_of_it_is_gone() -> None:
    executor = reading()
    executor.take(SendHold)
    executor.pass_until(executor.now_ns + 1_000 * MS)
    assert len(executor.take(SendHold)) == 1
    sent_ns = executor.now_ns
    executor.held(sent_ns, 12_000 * MS)
    executor.pass_until(sent_ns + reach_ns(12_000 * MS) // 2 - 1)
    assert not executor.take(SendHold)
    executor.pass_until(sent_ns + reach_ns(12_000 * MS) // 2)
    assert len(executor.take(SendHold)) == 1


def test_a_release_is_said_to_each_rank_until_it_is_confirmed() -> None:
    executor = reading(ranks=2)
    for rank in range(2):
        executor.held(1_000 * MS, 30_000 * MS, rank=rank)
    for read in range(2):
        executor.read("r", read)
    assert [each.rank for each in executor.take(SendRelease)] == [0, 1]
    executor.released(A, rank=0)
    executor.pass_until(executor.now_ns + 1_000 * MS)
    assert [each.rank for each in executor.take(SendRelease)] == [1]
    executor.released(A, rank=1)
    executor.pass_until(executor.now_ns + LIMITS.lease_ns)
    assert not executor.take(SendRelease)
    assert executor.core.next_deadline() is None


def test_a_late_answer_to_a_hold_does_not_put_off_a_release() -> None:
    executor = reading()
    executor.held(1_000 * MS, 30_000 * MS)
    executor.read("r")
    assert executor.take(SendRelease)
    executor.held(1_000 * MS, 30_000 * MS)
    executor.pass_until(executor.now_ns + 1_000 * MS)
    assert executor.take(SendRelease)


def test_a_lease_that_is_nearly_over_is_not_asked_for_without_a_pause() -> None:
    executor = reading()
    for _ in range(3):
        (asked,) = executor.take(SendHold)
        executor.held(asked.sent_ns, 1)
        executor.pass_until(executor.now_ns + 1_000 * MS - 1)
        assert not executor.take(SendHold)
        executor.pass_until(executor.now_ns + 1)


def test_a_release_that_nobody_confirms_is_given_up_when_the_lease_must_be_over() -> None:
    executor = reading()
    executor.held(1_000 * MS, 30_000 * MS)
    executor.read("r")
    over_ns = executor.now_ns + LIMITS.lease_ns
    executor.pass_until(over_ns - LIMITS.lease_ns // 2)
    executor.feed(ReleaseAnswered(connection=1, rank=0, leases=()))  # P is there, and says nothing of this one
    executor.pass_until(over_ns - 1)
    assert len(executor.take(SendRelease)) > 10
    executor.pass_until(over_ns)
    executor.take(SendRelease)
    executor.pass_until(over_ns + LIMITS.lease_ns)
    assert not executor.take(SendRelease)
    assert executor.core.claimed() == []


def test_a_release_that_is_owed_is_said_over_the_next_connection() -> None:
    executor = reading()
    executor.held(1_000 * MS, 30_000 * MS)
    executor.read("r")
    executor.feed(LinkLost(connection=1, detail="reset"))
    executor.feed(TornDown(connection=1))
    executor.take(SendRelease)
    executor.connect()
    assert [each.connection for each in executor.take(SendRelease)] == [2]


def test_a_request_that_ends_before_p_was_met_is_released_when_it_is() -> None:
    executor = Executor()
    executor.announce("r")
    executor.feed(ReleaseUnread(request_id="r", lease=A, address="host"))
    executor.connect()
    assert [each.leases for each in executor.take(SendRelease)] == [(A,)]


def test_the_last_of_several_requests_releases() -> None:
    executor = Executor()
    executor.announce("first")
    executor.announce("second")
    executor.connect()
    executor.feed(ReleaseUnread(request_id="first", lease=A, address="host"))
    assert not executor.take(SendRelease)
    executor.feed(ReleaseUnread(request_id="second", lease=A, address="host"))
    assert [each.leases for each in executor.take(SendRelease)] == [(A,)]


def test_a_builtin_engine_hears_heartbeats_and_one_notification() -> None:
    executor = reading(is_builtin=True)
    executor.pass_until(executor.now_ns + LIMITS.lease_ns // 6)
    assert len(executor.take(SendHeartbeat)) == 2
    executor.read("r")
    assert [each.leases for each in executor.take(NotifyReleases)] == [(OF_BUILTIN,)]
    executor.pass_until(executor.now_ns + LIMITS.lease_ns)
    assert not executor.take(NotifyReleases)
    assert not executor.take(SendHeartbeat)


# --- consumed leases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_who_names_a_lease_that_was_released_here_is_refused(is_confirmed: bool) -> None:
    executor = reading()
    executor.held(1_000 * MS, 30_000 * MS)
    executor.read("r")
    if is_confirmed:
        executor.released(A)
    executor.take(Report)
    executor.take(PostReads)
    executor.start("again")
    assert not executor.take(PostReads)
    (report,) = executor.take(Report)
    assert isinstance(report.failure, BlocksConsumed)


def test_consumed_leases_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "CONSUMED_MAX", 2)
    executor = Executor()
    executor.announce("waits", LeaseName("waits", 9))
    executor.connect()
    leases = [LeaseName(f"r{number}", number) for number in range(1, 5)]
    for lease in leases:
        executor.announce(lease.request_id, lease)
        executor.feed(ReleaseUnread(request_id=lease.request_id, lease=lease, address="host"))
        executor.released(lease)
    for lease in leases:
        executor.start(lease.request_id, lease)
    refused = [each.request_id for each in executor.take(Report)]
    assert refused == ["r3", "r4"]


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_a_deadline_that_raises_leaves_the_others_due(monkeypatch: pytest.MonkeyPatch) -> None:
    fire = RemoteEngine._fire
    broken = []

    def fire_unless_first(self: RemoteEngine, key: Any, due_ns: int, now_ns: int) -> None:
        if not broken:
            broken.append(key)
            raise RuntimeError("injected")
        fire(self, key, due_ns, now_ns)

    executor = Executor()
    for number in range(3):
        executor.start(f"r{number}", LeaseName(f"r{number}", number))
    monkeypatch.setattr(RemoteEngine, "_fire", fire_unless_first)
    with pytest.raises(RuntimeError, match="injected"):
        executor.pass_until(LIMITS.request_ns)
    executor.pass_until(LIMITS.request_ns)
    expired = [each for each in executor.take(Report) if isinstance(each.failure, DeadlineExceeded)]
    assert len(expired) == 2


def test_the_delay_after_failed_handshakes_grows_up_to_its_bound() -> None:
    executor = Executor()
    delays = []
    for number in range(8):
        executor.start(f"r{number}", LeaseName(f"r{number}", number))
        assert executor.take(StartHandshake)
        failed_ns = executor.now_ns
        executor.feed(ConnectFailed(failure=HandshakeTimeout(peer="p", timeout_seconds=5)))
        assert [type(each.failure) for each in executor.take(Report)] == [HandshakeTimeout]
        executor.start(f"early{number}", LeaseName(f"early{number}", number))
        assert [type(each.failure) for each in executor.take(Report)] == [PeerBackoff]
        while executor.core.state is peer.State.BACKOFF:
            next_ns = executor.core.next_deadline()
            assert next_ns is not None
            executor.pass_until(next_ns)
        delays.append(executor.now_ns - failed_ns)
    assert LIMITS.backoff_first_ns // 2 <= delays[0] <= LIMITS.backoff_first_ns
    assert all(LIMITS.backoff_max_ns // 2 <= each <= LIMITS.backoff_max_ns for each in delays[4:])


def test_a_read_that_was_never_posted_does_not_show_that_a_connection_is_of_use() -> None:
    executor = Executor()
    for number in range(peer.LOSSES_BEFORE_BACKOFF + 1):
        for request_id in (f"aborted{number}", f"read{number}"):
            executor.start(request_id, LeaseName(request_id, number))
        executor.connect()
        executor.feed(AbortAsked(request_id=f"aborted{number}"))
        for posted in executor.take(PostReads):  # what is tried again, too
            was_aborted = posted.request_id.startswith("aborted")
            executor.read(posted.request_id, was_wanted=not was_aborted, failure=None if was_aborted else LOST)
        (torn_down,) = executor.take(TearDown)
        executor.feed(TornDown(connection=torn_down.connection))
    assert executor.core.state is peer.State.BACKOFF


@pytest.mark.parametrize("is_lost", [True, False], ids=["transport lost", "may still write"])
def test_an_engine_that_can_only_be_shaken_hands_with_is_not_met_for_each_request(is_lost: bool) -> None:
    """Each new connection costs both sides a file descriptor."""
    executor, handshakes = Executor(), 0
    failure = TransferError(peer="p", operation="READ", error="no route", transport_lost=is_lost)
    seconds, of_a_second = 60, 10
    for number in range(seconds * of_a_second):
        executor.pass_until(number * 1_000 * MS // of_a_second)
        executor.start(f"r{number}", LeaseName(f"r{number}", number))
        while executor.effects:
            if any(isinstance(each, StartHandshake) for each in executor.effects):
                handshakes += 1
                executor.connect()
            for posted in executor.take(PostReads):
                executor.read(posted.request_id, failure=failure, is_quiescent=is_lost)
            for torn_down in executor.take(TearDown):
                executor.feed(TornDown(connection=torn_down.connection))
            executor.effects = [each for each in executor.effects if isinstance(each, StartHandshake)]
    lasting = 2 * LIMITS.backoff_max_ns // 3
    assert 5 < handshakes < 10 + seconds * 1_000 * MS // lasting


def test_a_connection_that_is_given_up_is_torn_down_before_the_next_handshake() -> None:
    executor = reading()
    executor.feed(LinkLost(connection=1, detail="reset"))
    executor.start("waits", B)
    assert not executor.take(StartHandshake)
    assert not executor.take(TearDown)
    executor.read("r")
    assert executor.take(TearDown)
    assert not executor.take(StartHandshake)
    executor.feed(TornDown(connection=1))
    assert executor.take(StartHandshake)


def test_the_grace_begins_when_the_agents_are_removed() -> None:
    executor = reading()
    lost = TransferError(peer="p", operation="READ", error="lost", transport_lost=True)
    executor.read("r", failure=lost, is_quiescent=False)
    executor.pass_until(executor.now_ns + LIMITS.grace_ns)
    executor.feed(TornDown(connection=1))
    executor.pass_until(executor.now_ns + LIMITS.grace_ns - 1)
    executor.connect()
    assert not executor.take(PostReads)[1:]
    executor.pass_until(executor.now_ns + 1)
    assert executor.take(PostReads)
