"""The core of a decode rank for one prefill engine, driven by events as its executor drives it.

`Driver` is the executor: after each event it calls `advance`, and time passes from deadline to deadline. What the
machines do by themselves has its own tests; here is what the core composes of them: leases that are held, proven and
released, connections that are given up in order, and that everything ends.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statemachine import hold, peer, request
from statemachine.failures import (
    AbortedByClient,
    ActorCrashed,
    BadParams,
    BlocksConsumed,
    ConnectionRefused,
    ConnectorStopped,
    ControlLinkLost,
    Corrupt,
    DeadlineExceeded,
    Failure,
    HandshakeTimeout,
    Incompatible,
    LeaseNotProven,
    LeaseOver,
    PeerBackoff,
    PeerRetired,
    PeerSilent,
    PreviousReadsInFlight,
    Quarantined,
    ReadNeverEnded,
    RegistrationReplaced,
    TransferError,
)
from statemachine.kernel import Effect, Event, ProtocolError
from statemachine.lease import LEASES_PER_MESSAGE_MAX, LeaseName
from statemachine.remote_engine import (
    ASSUMED_OVER,
    REPLACED,
    RESIZED,
    RESTARTED,
    RETIRED,
    AbortAsked,
    Announced,
    BlocksRejected,
    BlocksResolved,
    CheckRead,
    Connected,
    ConnectFailed,
    Crashed,
    EngineLimits,
    HoldAnswered,
    LetGo,
    LiftQuarantine,
    LinkLost,
    MeetAsked,
    NoteHandshakeFailure,
    NoteNotMet,
    NotificationFailed,
    NotifyReleases,
    PassToSuccessor,
    PostReads,
    ReadChecked,
    ReadEnded,
    Recall,
    ReleaseAnswered,
    ReleaseUnread,
    RemoteEngine,
    Report,
    ResolveBlocks,
    Retire,
    SendHeartbeat,
    SendHold,
    SendRelease,
    SharedAgentsLost,
    Started,
    StartHandshake,
    Stop,
    TearDown,
    TornDown,
    Unwatched,
    WithdrawReads,
    claims,
)
from statemachine.remote_engine.claims import DRIFT_DIVISOR
from statemachine.remote_engine.connections import Connection
from statemachine.remote_engine.core import ATTEMPTS_PER_LEASE
from statemachine.trace import StepSeen
from tests.observer import observer_of
from tests.rig.work import Counted

S = 1_000_000_000
NOW = 1000 * S
"""When every test begins."""

LIMITS = EngineLimits(
    lease_ns=60 * S,
    margin_ns=S,
    request_ns=300 * S,
    quiesce_ns=30 * S,
    grace_ns=5 * S,
    backoff_first_ns=S,
    backoff_max_ns=8 * S,
    incompatible_ns=90 * S,
    retries=1,
)
A, B, C = LeaseName("p-a", 1), LeaseName("p-b", 2), LeaseName("p-c", 3)
OF_BUILTIN = LeaseName("p-a", 0)
"""A built-in engine numbers no lease."""
ADDRESS = "host:1"
WORKERS = tuple(f"PP 0 TP {8 + rank}" for rank in range(72))

LOST = TransferError(peer="p", operation="READ", error="REMOTE_DISCONNECT", transport_lost=True)
REFUSED = TransferError(peer="p", operation="READ", error="INVALID_PARAM", transport_lost=False)
SILENT = HandshakeTimeout(peer="p", address=ADDRESS, timeout_seconds=5.0)
RESET = ControlLinkLost(peer="p", address=ADDRESS, detail="reset")
UNANSWERED = PeerSilent(peer="p", address=ADDRESS, worker=WORKERS[0], waited_seconds=60.0)
NEVER_ENDED = ReadNeverEnded(peer="p", address=ADDRESS, waited_seconds=30.0)
UNEQUAL = Corrupt(peer="p", address=ADDRESS, remote_request_id="p-a", region="layer", block=1, differing=1, compared=4)
UNLIKE = Incompatible(
    peer="p", address=ADDRESS, field="dtype", local="float16", remote="bfloat16", advice="start it alike"
)
CRASH = ActorCrashed(actor="peer actor", error="KeyError()")
STOPPED = ConnectorStopped(detail="shutdown")


class Driver:
    """Feeds events, lets time pass, and keeps what came of both."""

    def __init__(self, now_ns: int = NOW, limits: EngineLimits = LIMITS, **options: Any) -> None:
        self.core = RemoteEngine("p", ADDRESS, limits, **options)
        self.now_ns = now_ns
        self.log: list[Effect] = []

    def feed(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            effects += self.core.handle(event, self.now_ns)
            effects += self.core.advance(self.now_ns)
        self.log += effects
        return effects

    def wait(self, ns: int) -> list[Effect]:
        """Whatever is due in this time is done when it is due."""
        effects: list[Effect] = []
        end_ns = self.now_ns + ns
        while (at_ns := self.core.next_deadline()) is not None and at_ns <= end_ns:
            self.now_ns = max(self.now_ns, at_ns)
            effects += self.core.advance(self.now_ns)
        self.now_ns = end_ns
        self.log += effects
        return effects

    @property
    def state(self) -> peer.State:
        return self.core.state

    # --- events, in short -------------------------------------------------------------------------------------------

    def announce(self, request_id: str, lease: LeaseName = A, age_ns: int = 0) -> list[Effect]:
        return self.feed(Announced(request_id=request_id, lease=lease, address=ADDRESS, age_ns=age_ns))

    def start(self, request_id: str, lease: LeaseName = A, age_ns: int = 0, *, registration: int = 0) -> list[Effect]:
        started = Started(request_id=request_id, lease=lease, address=ADDRESS, age_ns=age_ns, registration=registration)
        return self.feed(started)

    def need_nothing(self, request_id: str, lease: LeaseName = A) -> list[Effect]:
        return self.feed(ReleaseUnread(request_id=request_id, lease=lease, address=ADDRESS))

    def connect(self, number: int = 1, ranks: int = 1, *, is_builtin: bool = False, life: str = "l1") -> list[Effect]:
        return self.feed(Connected(connection=number, workers=WORKERS[:ranks], is_builtin=is_builtin, life=life))

    def resolve(self, request_id: str, reads: int = 1, number: int = 1, **fields: Any) -> list[Effect]:
        return self.feed(BlocksResolved(request_id=request_id, connection=number, reads=reads, **fields))

    def end(self, request_id: str, read: int = 0, number: int = 1, **fields: Any) -> list[Effect]:
        fields.setdefault("ended_ns", self.now_ns)
        return self.feed(ReadEnded(request_id=request_id, read=read, connection=number, **fields))

    def check(self, request_id: str, read: int = 0, number: int = 1, failure: Failure | None = None) -> list[Effect]:
        return self.feed(ReadChecked(request_id=request_id, read=read, connection=number, failure=failure))

    def held(
        self, remaining_ns: int, *leases: LeaseName, sent_ns: int | None = None, rank: int = 0, number: int = 1
    ) -> list[Effect]:
        return self.feed(
            HoldAnswered(
                connection=number,
                rank=rank,
                sent_ns=self.now_ns if sent_ns is None else sent_ns,
                held=tuple((lease, remaining_ns) for lease in leases or (A,)),
                gone=(),
            )
        )

    def gone(self, *leases: LeaseName, rank: int = 0, number: int = 1) -> list[Effect]:
        told = tuple((lease, "expired") for lease in leases or (A,))
        return self.feed(HoldAnswered(connection=number, rank=rank, sent_ns=self.now_ns, held=(), gone=told))

    def confirm(self, *leases: LeaseName, rank: int = 0, number: int = 1) -> list[Effect]:
        return self.feed(ReleaseAnswered(connection=number, rank=rank, leases=leases or (A,)))


def only(effects: list[Effect], kind: type[Effect]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def done(request_id: str) -> Report:
    return Report(request_id=request_id, failure=None, is_quarantined=False)


def failed(request_id: str, failure: Failure) -> Report:
    return Report(request_id=request_id, failure=failure, is_quarantined=False)


def over(why: str, lease: LeaseName = A) -> LeaseOver:
    return LeaseOver(peer="p", address=ADDRESS, remote_request_id=lease.request_id, why=why)


def hold_at(now_ns: int, *leases: LeaseName, rank: int = 0, number: int = 1) -> SendHold:
    return SendHold(connection=number, rank=rank, sent_ns=now_ns, leases=leases or (A,))


def release(*leases: LeaseName, rank: int = 0, number: int = 1) -> SendRelease:
    return SendRelease(connection=number, rank=rank, leases=leases or (A,))


def connected(**options: Any) -> Driver:
    """P is connected; nobody wants anything."""
    drive = Driver()
    first = OF_BUILTIN._replace(request_id="p-b") if options.get("is_builtin") else B
    drive.announce("first", first)
    drive.connect(**options)
    drive.need_nothing("first", first)
    for rank in range(options.get("ranks", 1)):
        drive.confirm(first, rank=rank)
    assert (drive.state, drive.core.next_deadline()) == (peer.State.READY, None)
    drive.log.clear()
    return drive


def reading(*request_ids: str, reads: int = 1, **options: Any) -> Driver:
    """P is connected and these requests read, each under the lease A, or the one without a number."""
    drive = connected(**options)
    for request_id in request_ids or ("a",):
        drive.start(request_id, OF_BUILTIN if options.get("is_builtin") else A)
        assert PostReads(request_id=request_id, connection=1) in drive.resolve(request_id, reads)
    drive.log.clear()
    return drive


def is_done_at(drive: Driver, ended_ns: int, request_id: str = "a") -> bool:
    """Whether a READ that ends at this moment makes the request done without a further question."""
    core = drive.core.copy()
    effects = core.handle(ReadEnded(request_id=request_id, read=0, connection=1, ended_ns=ended_ns), drive.now_ns)
    return done(request_id) in effects


# --- holding ----------------------------------------------------------------------------------------------------------


def test_what_is_announced_before_p_is_connected_is_held_at_connect_and_read_without_a_round_trip() -> None:
    drive = Driver()
    assert drive.announce("a") == [StartHandshake(address=ADDRESS)]
    assert drive.start("a") == []
    offered = ResolveBlocks(request_id="a", connection=1)
    assert drive.connect(ranks=2) == [hold_at(NOW, rank=0), hold_at(NOW, rank=1), offered]
    assert drive.resolve("a", 2) == [PostReads(request_id="a", connection=1)]


def test_what_is_announced_to_a_connected_p_is_held_at_once_and_again_before_half_of_it_is_gone() -> None:
    drive = connected()
    assert drive.announce("a") == [hold_at(NOW)]
    drive.held(60 * S)
    reach_ns = 60 * S - 60 * S // DRIFT_DIVISOR - S
    assert drive.wait(reach_ns // 2 - 1) == []
    assert drive.wait(1) == [hold_at(NOW + reach_ns // 2)]


def test_a_hold_that_is_not_answered_is_asked_again() -> None:
    drive = connected()
    drive.announce("a")
    assert drive.wait(3 * S) == [hold_at(NOW + S), hold_at(NOW + 2 * S), hold_at(NOW + 3 * S)]


def test_renewals_of_many_leases_travel_in_few_messages() -> None:
    drive = Driver()
    leases = [LeaseName(f"p-{number}", number) for number in range(1, 1201)]
    for lease in leases:
        drive.announce(f"d-{lease.number}", lease)
    holds = only(drive.connect(), SendHold)
    assert [len(each.leases) for each in holds] == [LEASES_PER_MESSAGE_MAX, LEASES_PER_MESSAGE_MAX, 176]
    assert sorted(lease for each in holds for lease in each.leases) == sorted(leases)
    holds = only(drive.wait(S), SendHold)
    assert [len(each.leases) for each in holds] == [LEASES_PER_MESSAGE_MAX, LEASES_PER_MESSAGE_MAX, 176]


# --- a built-in P that has slept, and has registered its KV cache anew ------------------------------------------------


def replaced(registration: int) -> RegistrationReplaced:
    return RegistrationReplaced(peer="p", address=ADDRESS, registration=registration)


def offered(request_id: str, number: int) -> ResolveBlocks:
    return ResolveBlocks(request_id=request_id, connection=number)


def test_nothing_is_read_over_a_connection_that_was_made_before() -> None:
    drive = connected(is_builtin=True)
    assert drive.start("a", OF_BUILTIN, registration=1) == [TearDown(connection=1, failure=replaced(1))]
    assert drive.feed(TornDown(connection=1)) == [StartHandshake(address=ADDRESS)]
    assert offered("a", 2) in drive.connect(2, is_builtin=True)
    # Of the same registration, of an older one (a request that was on its way for long), and without one.
    for number, registration in enumerate((1, 1, 0)):
        lease = LeaseName(f"p-{number}", 0)
        assert offered(f"b-{number}", 2) in drive.start(f"b-{number}", lease, registration=registration)


def test_a_request_that_waits_in_the_queue_names_it_as_well() -> None:
    drive = connected(is_builtin=True)
    waits = Announced(request_id="a", lease=OF_BUILTIN, address=ADDRESS, age_ns=0, registration=1)
    assert drive.feed(waits) == [TearDown(connection=1, failure=replaced(1))]


def test_what_is_read_meanwhile_ends_first() -> None:
    drive = reading(is_builtin=True)
    lease = LeaseName("p-c", 0)
    assert drive.start("b", lease, registration=1) == [WithdrawReads(request_id="a")]
    ended = drive.end("a", was_wanted=False)
    assert ended == [TearDown(connection=1, failure=replaced(1))]
    drive.feed(TornDown(connection=1))
    assert {offered("a", 2), offered("b", 2)} <= set(drive.connect(2, is_builtin=True))


def test_a_handshake_that_began_before_is_not_believed_either() -> None:
    drive = Driver()
    drive.announce("a", OF_BUILTIN)
    assert drive.start("a", OF_BUILTIN, registration=1) == []
    assert TearDown(connection=1, failure=replaced(1)) in drive.connect(1, is_builtin=True)
    assert drive.resolve("a") == []
    drive.feed(TornDown(connection=1))
    assert offered("a", 2) in drive.connect(2, is_builtin=True)


def test_no_pause_follows_however_often_it_happens() -> None:
    drive = connected(is_builtin=True)
    for number in range(1, 6):
        lease = LeaseName(f"p-{number}", 0)
        drive.start(f"a-{number}", lease, registration=number)
        assert drive.feed(TornDown(connection=number)) == [StartHandshake(address=ADDRESS)]
        drive.connect(number + 1, is_builtin=True)
        assert drive.state is peer.State.READY


def test_another_process_counts_from_the_beginning() -> None:
    drive = connected(is_builtin=True)
    drive.start("a", OF_BUILTIN, registration=5)
    drive.feed(TornDown(connection=1))
    drive.connect(2, is_builtin=True, life="l2")
    torn_down = TearDown(connection=2, failure=replaced(1))
    assert torn_down in drive.start("b", LeaseName("p-b", 0), registration=1)


def test_what_a_request_says_of_an_engine_of_ours_costs_nobody_the_connection() -> None:
    """A client may write any number there. A request that reads would be out of attempts after a few of them."""
    drive = reading()
    for number in (1, 2):
        assert offered(f"b-{number}", 1) in drive.start(f"b-{number}", LeaseName("p-b", 0), registration=number)
    drive.held(60 * S)
    assert done("a") in drive.end("a")


# --- the proof --------------------------------------------------------------------------------------------------------


def test_the_proof_is_what_remains_less_drift_and_margin_from_the_moment_of_asking() -> None:
    drive = reading()
    drive.wait(2 * S)
    drive.held(60 * S, sent_ns=NOW)  # received two seconds after it was asked for
    proven_until_ns = NOW + 60 * S - 10 * S - S
    assert is_done_at(drive, proven_until_ns)
    assert not is_done_at(drive, proven_until_ns + 1)


@given(remaining_ns=st.integers(0, 100 * S))
@settings(max_examples=50, deadline=None)
def test_the_proof_is_never_less_than_the_moment_of_asking_nor_more_than_what_remains(remaining_ns: int) -> None:
    drive = reading()
    drive.held(remaining_ns, sent_ns=NOW)
    assert is_done_at(drive, NOW)
    reach_ns = remaining_ns * 5 / 6 - S
    assert not is_done_at(drive, NOW + max(0, round(reach_ns)) + 2)


def test_an_answer_of_another_connection_proves_nothing() -> None:
    drive = reading()
    drive.held(60 * S, number=2)
    assert not is_done_at(drive, NOW)


def test_an_answer_to_what_was_not_asked_yet_proves_nothing() -> None:
    drive = reading()
    drive.held(60 * S, sent_ns=NOW + 1)
    assert not is_done_at(drive, NOW)


def test_the_rank_that_is_proven_least_counts() -> None:
    drive = reading(ranks=2)
    drive.held(60 * S, rank=0)
    assert not is_done_at(drive, NOW)
    drive.held(12 * S, rank=1)
    assert is_done_at(drive, NOW + 9 * S)
    assert not is_done_at(drive, NOW + 9 * S + 1)


def test_a_request_whose_bytes_are_here_asks_at_once_and_again() -> None:
    drive = reading()
    drive.held(12 * S)
    drive.wait(20 * S)
    drive.log.clear()
    drive.wait(S // 2)
    effects = drive.end("a")
    asked_ns = drive.now_ns
    assert effects == [hold_at(asked_ns)]
    assert drive.wait(S) == [hold_at(asked_ns + S)]
    # An answer to a question from before the end does not prove it; one from after it does, however little is left.
    assert only(drive.held(1, sent_ns=asked_ns - 1), Report) == []
    assert drive.held(1, sent_ns=asked_ns) == [done("a"), release()]


def test_only_the_ranks_that_are_not_proven_are_asked() -> None:
    drive = reading(ranks=2)
    drive.held(60 * S, rank=1)
    assert drive.end("a") == [hold_at(NOW, rank=0)]


def test_a_proof_that_does_not_come_ends_the_request_and_gives_the_blocks_back() -> None:
    drive = reading()
    drive.end("a")
    drive.wait(S)
    drive.held(1, sent_ns=NOW - 1)  # it lives, and has answered a question from before
    effects = drive.wait(59 * S)
    unproven = LeaseNotProven(peer="p", remote_request_id="p-a", waited_seconds=60.0)
    assert only(effects, Report) == [failed("a", unproven)]
    assert release() in effects


# --- what is gone -----------------------------------------------------------------------------------------------------


def test_gone_while_the_blocks_are_looked_up() -> None:
    drive = connected()
    drive.start("a")
    assert drive.gone() == [failed("a", over("expired"))]
    assert drive.resolve("a") == []


def test_of_two_engines_with_one_id_the_one_that_has_not_lent_it_and_the_one_that_is_named_are_told() -> None:
    """The connection stays with the one that was met first, whatever the requests say."""
    drive = connected()
    drive.feed(Started(request_id="a", lease=A, address="other:2", age_ns=0))
    (report,) = only(drive.gone(), Report)
    assert report == failed("a", msgspec.structs.replace(over("expired"), named="other:2"))
    assert "p at host:1 does not keep" in str(report.failure)
    assert "names this engine at other:2: if another process runs there, both have one engine_id" in str(report.failure)
    drive.start("c", C)
    assert drive.gone(C) == [failed("c", over("expired", C))]


def test_gone_before_it_is_scheduled_is_told_when_it_starts() -> None:
    drive = connected()
    drive.announce("a")
    assert drive.gone() == []
    assert drive.start("a") == [failed("a", over("expired"))]


def test_gone_while_reading_is_told_when_the_read_has_ended() -> None:
    drive = reading()
    assert drive.gone() == [WithdrawReads(request_id="a")]
    assert drive.end("a") == [failed("a", over("expired"))]


def test_gone_while_proving() -> None:
    drive = reading()
    drive.end("a")
    assert drive.gone() == [failed("a", over("expired"))]


def test_gone_on_one_rank_is_gone_and_the_other_is_released() -> None:
    drive = reading(ranks=2)
    drive.end("a")
    assert drive.gone(rank=1) == [failed("a", over("expired")), release(rank=0)]


def test_gone_while_draining_stops_the_retry() -> None:
    drive = reading(reads=2)
    drive.end("a", 0, failure=LOST)
    # The answer was on its way when the connection became suspect.
    drive.gone()
    assert failed("a", LOST) in drive.end("a", 1, failure=LOST)
    assert drive.state is not peer.State.HANDSHAKING


def test_what_is_gone_is_not_asked_for_any_more() -> None:
    drive = connected()
    drive.start("a")
    drive.gone()
    assert drive.core.next_deadline() is None
    assert drive.core.is_unused


# --- releasing --------------------------------------------------------------------------------------------------------


def test_samples_share_a_claim_and_the_release_is_said_after_the_last() -> None:
    drive = reading("a", "b")
    drive.held(60 * S)
    assert drive.end("a") == [done("a")]
    assert drive.end("b") == [done("b"), release()]


def test_a_sample_that_is_only_announced_keeps_the_blocks() -> None:
    drive = reading("a")
    drive.announce("b")
    drive.held(60 * S)
    assert drive.end("a") == [done("a")]
    assert drive.need_nothing("b") == [release()]


def test_a_lease_that_was_released_is_refused() -> None:
    drive = reading("a")
    drive.held(60 * S)
    drive.end("a")
    consumed = BlocksConsumed(peer="p", address=ADDRESS, remote_request_id="p-a")
    for request_id in ("while it is owed", "when it is confirmed"):
        assert drive.announce(request_id) == []
        assert drive.start(request_id) == [failed(request_id, consumed)]
        assert drive.need_nothing(request_id) == []
        drive.confirm()
    assert drive.core.next_deadline() is None


def test_a_release_is_said_again_until_it_is_confirmed() -> None:
    drive = reading()
    drive.held(60 * S)
    drive.end("a")
    assert drive.wait(2 * S) == [release(), release()]
    assert drive.confirm() == []
    assert drive.core.next_deadline() is None


def test_a_release_that_is_never_confirmed_is_given_up_when_the_lease_must_be_over() -> None:
    drive = reading()
    drive.held(60 * S)
    drive.end("a")
    assert drive.wait(59 * S) == [release()] * 59
    drive.wait(S)
    assert drive.core.claimed() == []
    # Nobody answers there: what is read from it next is read over another connection.
    assert drive.wait(0) == []
    assert only(drive.log, TearDown) == [TearDown(connection=1, failure=UNANSWERED)]
    assert drive.feed(TornDown(connection=1)) == []
    assert (drive.core.next_deadline(), drive.wait(600 * S)) == (None, [])


def test_a_release_is_said_for_as_long_as_any_rank_may_keep_the_lease() -> None:
    drive = reading(ranks=2)
    drive.held(10 * S, rank=0)
    drive.held(100 * S, rank=1)
    drive.end("a", read=0)
    drive.end("a", read=1)
    drive.wait(80 * S)
    assert drive.core.claimed() == [A]
    drive.wait(20 * S)
    assert drive.core.claimed() == []


def test_what_ended_before_p_was_connected_is_released_at_connect_and_refused_after() -> None:
    """Also when P is a built-in engine, which could be asked nothing: it frees the blocks when it is told."""
    for is_builtin, lease in ((False, A), (True, OF_BUILTIN)):
        drive = Driver()
        drive.announce("a", lease)
        drive.need_nothing("a", lease)
        said = NotifyReleases(connection=1, rank=0, leases=(lease,)) if is_builtin else release()
        assert drive.connect(is_builtin=is_builtin) == [said]
        drive.confirm()
        (report,) = drive.start("b", lease)
        assert isinstance(report, Report)
        assert isinstance(report.failure, BlocksConsumed)


def test_a_claim_that_p_never_heard_of_is_revived_by_a_later_request() -> None:
    drive = Driver()
    drive.announce("a")
    drive.need_nothing("a")
    drive.start("b")
    assert drive.connect() == [hold_at(NOW), ResolveBlocks(request_id="b", connection=1)]
    assert drive.resolve("b") == [PostReads(request_id="b", connection=1)]
    drive.wait(30 * S)
    drive.held(60 * S)
    drive.wait(31 * S)
    drive.held(60 * S)
    assert drive.end("b") == [done("b"), release()]


def test_a_claim_that_p_never_hears_of_is_forgotten_when_the_lease_must_be_over() -> None:
    drive = Driver()
    drive.announce("a")
    drive.need_nothing("a")
    drive.wait(60 * S)
    assert drive.connect() == []


# --- a built-in P -----------------------------------------------------------------------------------------------------


def heartbeat(number: int = 1) -> SendHeartbeat:
    return SendHeartbeat(connection=number, rank=0, leases=(OF_BUILTIN,))


def test_a_builtin_p_gets_heartbeats_and_notifications_and_answers_nothing() -> None:
    drive = Driver()
    drive.start("a", OF_BUILTIN)
    assert drive.connect(is_builtin=True) == [heartbeat(), ResolveBlocks(request_id="a", connection=1)]
    drive.resolve("a")
    assert drive.wait(30 * S) == [heartbeat()] * 3
    assert drive.end("a") == [done("a"), NotifyReleases(connection=1, rank=0, leases=(OF_BUILTIN,))]
    assert drive.core.next_deadline() is None


@pytest.mark.parametrize("age_ns", [0, 20 * S])
def test_the_lease_of_a_builtin_p_is_taken_to_begin_when_the_request_was_first_heard_of(age_ns: int) -> None:
    drive = Driver()
    drive.announce("a", OF_BUILTIN, age_ns)
    drive.wait(10 * S)
    drive.start("a", OF_BUILTIN, age_ns + 10 * S)
    drive.connect(is_builtin=True)
    drive.resolve("a")
    over_ns = NOW - age_ns + 60 * S - S
    assert is_done_at(drive, over_ns)
    assert not is_done_at(drive, over_ns + 1)
    drive.wait(over_ns - drive.now_ns)
    assert drive.end("a") == [failed("a", over(ASSUMED_OVER))]


@pytest.mark.parametrize("age_ns", [0, 20 * S])
def test_so_it_is_of_a_request_that_starts_without_having_been_announced(age_ns: int) -> None:
    drive = connected(is_builtin=True)
    drive.start("a", OF_BUILTIN, age_ns)
    drive.resolve("a")
    assert is_done_at(drive, NOW - age_ns + 59 * S)
    assert not is_done_at(drive, NOW - age_ns + 59 * S + 1)


def test_another_life_of_a_builtin_p_ends_what_was_assumed_of_the_one_before() -> None:
    drive = reading(is_builtin=True)
    drive.end("a", failure=LOST)
    drive.feed(TornDown(connection=1))
    assert only(drive.connect(2, is_builtin=True, life="l2"), Report) == [failed("a", over(RESTARTED))]


def test_what_has_no_number_is_not_asked_of_another_process_of_ours() -> None:
    """It may have lent other blocks under that request id. By its number it knows what it has not lent."""
    drive = Driver()
    nameless, numbered = LeaseName("p", 0), A
    drive.announce("a", nameless)
    drive.announce("b", numbered)
    drive.connect(1, life="l1")
    drive.feed(LinkLost(connection=1, detail="reset"), TornDown(connection=1))
    asked = only(drive.connect(2, life="l2"), SendHold)
    assert [each.leases for each in asked] == [(numbered,)]
    assert failed("a", over(RESTARTED, nameless)) in drive.start("a", nameless)


def test_the_same_life_of_a_builtin_p_is_read_from_again_and_its_lease_did_not_grow() -> None:
    drive = reading(is_builtin=True)
    drive.wait(10 * S)
    drive.end("a", failure=LOST)
    drive.feed(TornDown(connection=1))
    assert drive.connect(2, is_builtin=True) == [heartbeat(2), ResolveBlocks(request_id="a", connection=2)]
    drive.resolve("a", number=2)
    drive.wait(49 * S)
    assert only(drive.end("a", number=2), Report) == [failed("a", over(ASSUMED_OVER))]


@pytest.mark.parametrize("is_connected", [False, True])
@pytest.mark.parametrize("is_announced", [False, True])
def test_a_lease_that_has_a_number_is_not_assumed_of_a_builtin_p(is_connected: bool, is_announced: bool) -> None:
    """P was put back to the built-in connector, under its id and at its address. The parameters are from before, and
    the blocks somebody else's by now."""
    drive = connected(is_builtin=True) if is_connected else Driver()
    if is_announced:
        drive.announce("a")
    drive.start("a")
    if not is_connected:
        drive.connect(is_builtin=True)
    assert only(drive.log, Report) == [failed("a", over(REPLACED))]
    for kind in (ResolveBlocks, SendHeartbeat, NotifyReleases):
        assert only(drive.log, kind) == []
    assert drive.core.next_deadline() is None
    drive.start("b", OF_BUILTIN)
    assert ResolveBlocks(request_id="b", connection=1) in drive.log


def test_a_lease_that_has_a_number_is_released_to_no_builtin_p() -> None:
    drive = Driver()
    drive.announce("a")
    drive.need_nothing("a")
    assert drive.connect(is_builtin=True) == []
    assert drive.core.next_deadline() is None


# --- a suspect connection ---------------------------------------------------------------------------------------------

SUSPICIONS: list[Callable[[Driver], list[Effect]]] = [
    lambda drive: drive.end("a", failure=LOST),
    lambda drive: drive.end("a", failure=REFUSED, is_quiescent=False),
    lambda drive: drive.feed(LinkLost(connection=1, detail="reset")),
    lambda drive: drive.feed(NotificationFailed(connection=1, failure=LOST)),
    lambda drive: drive.feed(SharedAgentsLost(connection=1, failure=LOST)),
]


@pytest.mark.parametrize("suspicion", SUSPICIONS)
def test_a_suspect_connection_is_read_from_no_more_and_torn_down_when_its_reads_have_ended(
    suspicion: Callable[[Driver], list[Effect]],
) -> None:
    drive = reading("a", "b")
    drive.held(60 * S)
    assert drive.core.wants("b")
    assert only(suspicion(drive), TearDown) == []
    assert drive.state is peer.State.DRAINING
    assert not drive.core.wants("b")
    drive.start("c")
    assert only(drive.log, ResolveBlocks) == []
    drive.end("a")  # ignored where it is told again
    effects = drive.end("b")
    assert done("b") in effects
    assert [each.connection for each in only(effects, TearDown)] == [1]
    assert drive.state is peer.State.DISCONNECTING
    assert only(drive.log, StartHandshake) == []
    assert StartHandshake(address=ADDRESS) in drive.feed(TornDown(connection=1))


def test_an_error_that_is_quiescent_and_not_the_transports_leaves_the_connection_as_it_is() -> None:
    drive = reading()
    effects = drive.end("a", failure=REFUSED)
    assert effects == [failed("a", REFUSED), release()]
    drive.feed(NotificationFailed(connection=1, failure=REFUSED), LinkLost(connection=7, detail="an old one"))
    assert drive.state is peer.State.READY


def test_an_engine_that_answers_nothing_for_the_length_of_a_lease_is_not_waited_for_until_the_deadline() -> None:
    drive = reading()
    drive.wait(60 * S - 1)
    assert drive.state is peer.State.READY
    drive.wait(1)
    assert drive.state is peer.State.DRAINING
    drive.start("c", C)
    effects = drive.wait(30 * S)
    quarantined = Quarantined(reads=1, waited_seconds=30.0, cause="PeerSilent")
    assert only(effects, Report) == [
        Report(request_id="a", failure=quarantined, is_quarantined=True),
        failed("c", UNANSWERED),
    ]
    assert drive.state is peer.State.BACKOFF
    assert only(drive.log, StartHandshake) == []
    effects = drive.wait(30 * S)
    assert only(effects, StartHandshake) != [], "it may have come back"


@pytest.mark.parametrize("is_said", ["hold", "release"])
def test_any_answer_is_a_sign_of_life(is_said: str) -> None:
    drive = reading()
    drive.wait(59 * S)
    effects = drive.held(60 * S, B) if is_said == "hold" else drive.confirm(B)
    assert effects == []
    drive.wait(60 * S)
    assert drive.state is peer.State.READY
    drive.wait(2 * S)
    assert drive.state is peer.State.DRAINING, "of what was asked since, nothing is answered"


def test_who_is_asked_nothing_may_be_silent() -> None:
    drive = connected()
    drive.wait(1000 * S)
    assert drive.state is peer.State.READY


def test_each_rank_has_to_answer_and_the_one_that_does_not_is_named() -> None:
    """By what it is called on P: we may deal with the last of its ranks only."""
    drive = reading(ranks=2)
    drive.wait(59 * S)
    drive.held(600 * S, rank=0)
    drive.wait(S)
    assert drive.state is peer.State.DRAINING
    assert drive.core.view().peer.failure == PeerSilent(
        peer="p", address=ADDRESS, worker=WORKERS[1], waited_seconds=60.0
    )


@pytest.mark.parametrize("is_said", ["hold", "release"])
def test_an_answer_that_waited_while_this_process_stood_still_is_heard_before_its_sender_is_suspected(
    is_said: str,
) -> None:
    """After SIGSTOP, or a step that kept the interpreter, the timer is due before the socket is looked at."""
    drive = reading()
    drive.now_ns += 100 * S
    drive.core.advance(drive.now_ns)
    assert drive.state is peer.State.READY
    drive.held(60 * S, B) if is_said == "hold" else drive.confirm(B)
    drive.wait(30 * S)
    assert drive.state is peer.State.READY
    drive.wait(31 * S)
    assert drive.state is peer.State.DRAINING


def test_a_builtin_engine_owes_no_answer() -> None:
    drive = reading(is_builtin=True)
    drive.wait(80 * S)
    assert drive.state is peer.State.READY


def test_a_new_connection_has_the_length_of_a_lease_to_answer() -> None:
    drive = reading()
    drive.wait(59 * S)
    drive.feed(LinkLost(connection=1, detail="reset"))
    drive.end("a")
    drive.feed(TornDown(connection=1))
    drive.connect(2)
    drive.wait(59 * S)
    assert drive.state is peer.State.READY


def test_a_connection_that_stood_idle_for_long_was_of_use() -> None:
    """An engine that was met and is not asked may be lost once a day; that is no reason to wait for it."""
    drive = Driver()
    drive.feed(MeetAsked(address=ADDRESS, message=None))
    for day in range(1, 6):
        drive.connect(day)
        drive.wait(LIMITS.backoff_max_ns)
        drive.feed(LinkLost(connection=day, detail="reset"), TornDown(connection=day))
        assert drive.feed(MeetAsked(address=ADDRESS, message=None)) == [StartHandshake(address=ADDRESS)]


def test_a_connection_that_is_lost_soon_or_while_it_is_read_over_was_of_no_use() -> None:
    drive = Driver()
    drive.feed(MeetAsked(address=ADDRESS, message=None))
    for number in (1, 2):
        drive.connect(number)
        drive.wait(7 * S)
        drive.feed(LinkLost(connection=number, detail="reset"), TornDown(connection=number))
        drive.feed(MeetAsked(address=ADDRESS, message=None))
    assert drive.state is peer.State.BACKOFF
    connection = Connection(1, ("w",), 8 * S, address="10.0.0.7:5600", is_builtin=False)
    assert not connection.has_stood_idle(8 * S - 1)
    assert connection.has_stood_idle(8 * S)
    connection.open_reads["a", 0] = None
    assert not connection.has_stood_idle(8 * S)
    connection.open_reads.clear()
    connection.unsettled["a", 0] = None
    assert not connection.has_stood_idle(8 * S)


def test_a_connection_over_which_a_read_has_ended_well_was_of_use_however_soon_it_is_lost() -> None:
    drive = connected()
    for number in range(1, 5):
        lease = LeaseName("p", 10 + number)
        drive.start(f"r{number}", lease)
        drive.resolve(f"r{number}", number=number)
        drive.held(60 * S, lease, number=number)
        assert done(f"r{number}") in drive.end(f"r{number}", number=number)
        drive.feed(LinkLost(connection=number, detail="reset"))
        assert drive.feed(TornDown(connection=number)) == [StartHandshake(address=ADDRESS)], "no pause"
        drive.connect(number + 1)
        drive.confirm(lease, number=number + 1)


def test_a_connection_of_an_engine_that_fell_silent_was_of_no_use_however_long_it_stood() -> None:
    drive = connected()
    drive.wait(1000 * S)
    drive.announce("a")
    drive.wait(61 * S)
    assert isinstance(drive.core.view().peer.failure, PeerSilent)
    assert drive.core.view().peer.losses == 1


def test_reads_that_are_not_posted_any_more_are_retried_over_the_next_connection() -> None:
    drive = reading("a", "b")
    drive.feed(LinkLost(connection=1, detail="reset"))
    for request_id in ("a", "b"):
        drive.end(request_id, was_wanted=False)
    assert only(drive.log, Report) == []
    assert only(drive.log, TearDown) == [TearDown(connection=1, failure=RESET)]
    drive.feed(TornDown(connection=1))
    effects = drive.connect(2)
    assert only(effects, ResolveBlocks) == [
        ResolveBlocks(request_id="a", connection=2),
        ResolveBlocks(request_id="b", connection=2),
    ]
    assert drive.resolve("a", number=1) == [], "an answer about the connection before"


def test_bytes_that_came_over_a_lost_connection_are_proven_over_the_next() -> None:
    drive = reading()
    drive.feed(LinkLost(connection=1, detail="reset"))
    effects = drive.end("a")
    assert effects == [TearDown(connection=1, failure=RESET)]
    assert drive.feed(TornDown(connection=1)) == [StartHandshake(address=ADDRESS)]
    drive.wait(S)
    assert drive.connect(2) == [hold_at(NOW + S, number=2)]
    assert drive.held(5 * S, number=2) == [done("a"), release(number=2)]


def test_what_was_proven_over_one_connection_is_not_proven_over_the_next() -> None:
    drive = reading()
    drive.held(60 * S)
    drive.end("a", failure=LOST)
    drive.feed(TornDown(connection=1))
    drive.connect(2)
    drive.resolve("a", number=2)
    assert only(drive.end("a", number=2), Report) == []
    assert drive.gone(number=2) == [failed("a", over("expired"))]


def test_an_engine_that_comes_back_with_another_number_of_ranks_does_not_keep_what_it_lent() -> None:
    drive = reading(ranks=2)
    drive.end("a", failure=LOST)
    drive.feed(TornDown(connection=1))
    assert only(drive.connect(2, ranks=1), Report) == [failed("a", over(RESIZED))]


def test_an_engine_that_has_come_back_with_more_ranks_says_nothing_of_what_the_one_before_lent() -> None:
    """Nobody asks it, and an engine can put any lease into an answer."""
    drive = connected()
    drive.announce("a")
    drive.feed(LinkLost(connection=1, detail="reset"), TornDown(connection=1))
    drive.connect(2, ranks=2, life="l2")
    for answered in (
        drive.held(60 * S, rank=1, number=2),
        drive.gone(rank=1, number=2),
        drive.confirm(rank=1, number=2),
    ):
        assert answered == []
    assert drive.start("a") == [failed("a", over(RESIZED))]


def test_a_release_that_is_owed_is_said_over_the_next_connection() -> None:
    drive = reading()
    drive.held(60 * S)
    drive.end("a")
    drive.feed(LinkLost(connection=1, detail="reset"))
    assert drive.feed(TornDown(connection=1)) == [StartHandshake(address=ADDRESS)]
    assert drive.connect(2) == [release(number=2)]


def test_after_a_tear_down_the_grace_passes_before_an_errored_read_counts_as_quiescent() -> None:
    drive = reading(reads=2)
    drive.end("a", 0, failure=REFUSED, is_quiescent=False)
    assert only(drive.end("a", 1), Report) == []
    drive.feed(TornDown(connection=1))
    assert only(drive.wait(5 * S - 1), Report) == []
    assert only(drive.wait(1), Report) == [failed("a", REFUSED)]


def test_a_retry_waits_for_the_grace_too() -> None:
    drive = reading()
    drive.end("a", failure=LOST, is_quiescent=False)
    drive.feed(TornDown(connection=1))
    drive.connect(2)
    assert only(drive.log, ResolveBlocks) == []
    assert only(drive.wait(5 * S), ResolveBlocks) == [ResolveBlocks(request_id="a", connection=2)]


def test_retries_of_a_lost_transport_are_bounded() -> None:
    drive = reading()
    drive.end("a", failure=LOST)
    drive.feed(TornDown(connection=1))
    drive.connect(2)
    drive.resolve("a", number=2)
    assert only(drive.end("a", number=2, failure=LOST), Report) == [failed("a", LOST)]


def test_a_request_takes_no_longer_than_it_may() -> None:
    drive = Driver()
    drive.start("a")
    late = DeadlineExceeded(timeout_seconds=300.0, phase="pending_handshake")
    assert only(drive.wait(300 * S), Report) == [failed("a", late)]


def test_of_a_request_that_took_too_long_it_is_told_that_this_rank_stood_still_itself() -> None:
    """The failure would blame the other engine alone. What an event loop is late by every day is not told."""
    for late_ns, said in ((S - 1, 0), (S, 1), (40 * S, 40)):
        drive = Driver()
        drive.start("a")
        late = DeadlineExceeded(timeout_seconds=300.0, phase="pending_handshake", late_seconds=said)
        assert only(drive.core.advance(drive.now_ns + 300 * S + late_ns), Report) == [failed("a", late)]


# --- quarantine, and connections whose READs do not end ---------------------------------------------------------------


def test_nothing_is_due_of_a_request_that_has_drained() -> None:
    drive = reading()
    drive.held(60 * S)
    drive.feed(AbortAsked(request_id="a"))
    assert failed("a", AbortedByClient()) in drive.end("a")
    drive.confirm()
    assert drive.core.next_deadline() is None


def test_reads_that_do_not_end_cost_the_blocks_until_they_do_and_make_the_connection_suspect() -> None:
    drive = reading("a", "b")
    drive.feed(AbortAsked(request_id="a"))
    (report,) = only(drive.wait(30 * S), Report)
    quarantined = Quarantined(reads=1, waited_seconds=30.0, cause="AbortedByClient")
    assert report == Report(request_id="a", failure=quarantined, is_quarantined=True)
    assert drive.state is peer.State.DRAINING
    assert not drive.core.is_unused
    effects = drive.end("a")
    assert LiftQuarantine(request_id="a") in effects
    assert only(effects, TearDown) == []
    assert TearDown(connection=1, failure=NEVER_ENDED) in drive.end("b")


def test_a_connection_whose_reads_do_not_end_is_abandoned_and_torn_down_when_they_have() -> None:
    drive = reading("a", "b", reads=2)
    drive.feed(LinkLost(connection=1, detail="reset"))
    drive.end("a", 0)
    effects = drive.wait(30 * S)
    assert {(each.request_id, each.is_quarantined) for each in only(effects, Report)} == {("a", True), ("b", True)}
    assert (drive.state, drive.core.is_connected, only(drive.log, TearDown)) == (peer.State.BACKOFF, False, [])
    drive.wait(10 * S)
    drive.start("c", C)
    drive.connect(2)
    assert drive.state is peer.State.READY
    assert drive.end("a", 1) == [LiftQuarantine(request_id="a")]
    drive.end("b", 0)
    assert drive.end("b", 1) == [LiftQuarantine(request_id="b"), TearDown(connection=1, failure=RESET)]
    assert drive.feed(TornDown(connection=1)) == []
    assert drive.state is peer.State.READY


def test_the_pause_ends_when_the_connection_that_was_abandoned_is_gone() -> None:
    """The network was away: P is connected as soon as its agents can be added again, not up to half a minute later."""
    drive = reading("a", "b")
    drive.feed(LinkLost(connection=1, detail="reset"))
    drive.wait(30 * S)
    in_flight = PreviousReadsInFlight(peer="p", address=ADDRESS)
    for _ in range(4):
        drive.wait(LIMITS.backoff_max_ns)
        assert drive.state is peer.State.HANDSHAKING, "the releases are owed"
        drive.start("c", C)
        drive.feed(ConnectFailed(failure=in_flight))
    drive.end("a")
    assert drive.end("b") == [LiftQuarantine(request_id="b"), TearDown(connection=1, failure=RESET)]
    assert drive.state is peer.State.BACKOFF
    assert drive.feed(TornDown(connection=1)) == [StartHandshake(address=ADDRESS)], "the releases are owed"


@pytest.mark.parametrize("failure", [UNLIKE, SILENT])
def test_a_pause_for_another_reason_goes_on_when_an_abandoned_connection_is_gone(failure: Failure) -> None:
    drive = reading("a")
    drive.feed(LinkLost(connection=1, detail="reset"))
    drive.wait(30 * S)
    drive.wait(LIMITS.backoff_max_ns)
    drive.start("b", C)
    drive.feed(ConnectFailed(failure=failure))
    paused = drive.state
    drive.end("a")
    assert drive.feed(TornDown(connection=1)) == []
    assert drive.state is paused


def test_an_abandoned_connection_with_an_errored_read_is_quarantined_until_the_grace_is_over() -> None:
    drive = reading(reads=2)
    drive.end("a", 0, failure=REFUSED, is_quiescent=False)
    drive.wait(30 * S)
    assert only(drive.end("a", 1), TearDown) == [TearDown(connection=1, failure=REFUSED)]
    drive.feed(TornDown(connection=1))
    assert only(drive.wait(5 * S - 1), LiftQuarantine) == []
    assert only(drive.wait(1), LiftQuarantine) == [LiftQuarantine(request_id="a")]


def test_what_made_a_connection_suspect_is_said_when_it_is_torn_down() -> None:
    """Who shares its agents has to hear of it, and of nothing else."""
    drive = reading("a", "b")
    drive.feed(LinkLost(connection=1, detail="reset"))
    drive.end("a", failure=LOST)
    assert drive.end("b", failure=LOST) == [TearDown(connection=1, failure=RESET)]
    idle = connected()
    assert idle.feed(Retire()) == [TearDown(connection=1, failure=None)]


def test_a_connection_whose_agents_another_has_given_up_is_rebuilt() -> None:
    drive = reading("a")
    assert drive.feed(SharedAgentsLost(connection=1, failure=LOST)) == [WithdrawReads(request_id="a")]
    assert drive.state is peer.State.DRAINING
    assert drive.end("a", failure=LOST) == [TearDown(connection=1, failure=LOST)]
    assert drive.feed(TornDown(connection=1)) == [StartHandshake(address=ADDRESS)]


def test_nothing_more_is_read_over_a_suspect_connection_and_nobody_waits_for_a_turn() -> None:
    """Behind the READs from other engines it could be abandoned for those that it has never posted."""
    drive = reading("a", "b", reads=2)
    effects = drive.end("a", failure=LOST)
    assert only(effects, WithdrawReads) == [WithdrawReads(request_id="a"), WithdrawReads(request_id="b")]
    for request_id, read in (("a", 1), ("b", 0), ("b", 1)):
        effects = drive.feed(
            ReadEnded(request_id=request_id, read=read, connection=1, ended_ns=drive.now_ns, was_wanted=False)
        )
    assert effects == [TearDown(connection=1, failure=LOST)]
    drive.feed(TornDown(connection=1))
    drive.connect()
    assert {each.request_id for each in only(drive.log, ResolveBlocks)} == {"a", "b"}


def test_a_connection_whose_agents_are_not_removed_is_abandoned_until_they_are() -> None:
    """READs of somebody else over them do not end. What has failed here may write for as long."""
    drive = reading("a", reads=2)
    drive.end("a", 0, failure=REFUSED, is_quiescent=False)
    drive.end("a", 1, failure=REFUSED)
    assert drive.state is peer.State.DISCONNECTING
    drive.start("b")
    effects = drive.wait(30 * S)
    assert drive.state is peer.State.BACKOFF
    quarantined = Quarantined(reads=1, waited_seconds=30.0, cause="TransferError")
    assert only(effects, Report) == [
        Report(request_id="a", failure=quarantined, is_quarantined=True),
        failed("b", REFUSED),
    ]
    drive.wait(60 * S)
    assert only(drive.log, LiftQuarantine) == [], "the agents are loaded"
    drive.feed(TornDown(connection=1))
    assert only(drive.wait(5 * S), LiftQuarantine) == [LiftQuarantine(request_id="a")]


# --- handshakes that fail ---------------------------------------------------------------------------------------------


def test_a_failed_handshake_fails_who_waits_and_is_said_once() -> None:
    drive = Driver()
    drive.start("a")
    drive.start("b")
    effects = drive.feed(ConnectFailed(failure=SILENT))
    assert effects == [NoteHandshakeFailure(), NoteNotMet(failure=SILENT), failed("a", SILENT), failed("b", SILENT)]
    (report,) = drive.start("c")
    assert isinstance(report, Report)
    assert isinstance(report.failure, PeerBackoff)
    assert 0.5 <= report.failure.retry_in_seconds <= 1.0


def test_a_kv_that_cannot_be_exchanged_is_said_to_everybody_for_longer() -> None:
    drive = Driver()
    drive.start("a")
    drive.feed(ConnectFailed(failure=UNLIKE))
    drive.wait(90 * S - 1 - 45 * S)
    assert drive.start("b") == [failed("b", UNLIKE)]
    assert drive.wait(46 * S) == [StartHandshake(address=ADDRESS)], "the releases are owed"


@pytest.mark.parametrize("failure", [SILENT, UNLIKE])
def test_attempts_to_say_releases_hold_nobody_up(failure: Failure) -> None:
    """The engine that takes the place of a dead one must find no back-off that nobody needed; nor must the right engine
    that comes back to where another was meanwhile."""
    drive = reading()
    drive.held(60 * S)
    assert done("a") in drive.end("a", 0)
    drive.feed(LinkLost(connection=1, detail="reset"))
    assert drive.feed(TornDown(connection=1)) == [StartHandshake(address=ADDRESS)]
    for _ in range(3):
        assert drive.feed(ConnectFailed(failure=failure)) == [NoteNotMet(failure=failure)], "no request waits"
        assert drive.state is peer.State.IDLE
        assert drive.wait(LIMITS.lease_ns // ATTEMPTS_PER_LEASE - 1) == []
        assert drive.wait(1) == [StartHandshake(address=ADDRESS)]
    drive.feed(ConnectFailed(failure=failure))
    assert drive.start("c", C) == [StartHandshake(address=ADDRESS)], "at once"
    told = only(drive.connect(2), SendRelease)
    assert [each.leases for each in told] == [(A,)], "while its lease may last"


@pytest.mark.parametrize(
    "event",
    [
        Announced(request_id="a", lease=A, address="new:1", age_ns=0),
        Started(request_id="a", lease=A, address="new:1", age_ns=0),
        ReleaseUnread(request_id="a", lease=A, address="new:1"),
        MeetAsked(address="new:1"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_it_is_looked_for_where_it_was_said_to_be_last(event: Event) -> None:
    assert Driver().feed(event) == [StartHandshake(address="new:1")]


def test_who_wants_to_meet_it_is_told_of_each_attempt_that_fails_and_of_the_pause_after_one_of_a_request() -> None:
    drive, asked = Driver(), MeetAsked(address=ADDRESS, message=None)
    for _ in range(2):
        assert drive.feed(asked) == [StartHandshake(address=ADDRESS)], "an attempt for nobody begins no pause"
        assert drive.feed(ConnectFailed(failure=SILENT)) == [NoteNotMet(failure=SILENT)]
    for failure in (SILENT, UNLIKE):
        drive.start("a")
        drive.feed(ConnectFailed(failure=failure))
        (noted,) = drive.feed(asked)
        assert isinstance(noted, NoteNotMet)
        if failure is UNLIKE:
            assert noted.failure == UNLIKE
        else:
            assert isinstance(noted.failure, PeerBackoff)
            assert noted.failure.last == SILENT.kind
        drive.wait(noted.failure.retry_in_seconds * S if isinstance(noted.failure, PeerBackoff) else 90 * S)
    assert drive.feed(asked) == [StartHandshake(address=ADDRESS)]


def test_an_attempt_that_a_request_joins_is_made_for_it() -> None:
    drive = reading()
    drive.held(60 * S)
    drive.end("a", 0)
    drive.feed(LinkLost(connection=1, detail="reset"))
    drive.feed(TornDown(connection=1))
    assert drive.start("c", C) == []
    noted = [NoteHandshakeFailure(), NoteNotMet(failure=SILENT)]
    assert drive.feed(ConnectFailed(failure=SILENT)) == [*noted, failed("c", SILENT)]
    assert drive.state is peer.State.BACKOFF


def test_requests_in_the_queue_are_worth_every_handshake() -> None:
    drive = Driver()
    drive.announce("a")
    for _ in range(3):
        assert drive.state is peer.State.HANDSHAKING
        drive.feed(ConnectFailed(failure=SILENT))
        assert only(drive.wait(60 * S), StartHandshake) == [StartHandshake(address=ADDRESS)]


def test_the_delay_after_a_refused_connection_does_not_grow() -> None:
    drive = Driver()
    nobody = ConnectionRefused(peer="p", address=ADDRESS)
    for number in range(6):
        drive.start(f"r{number}")
        assert drive.state is peer.State.HANDSHAKING
        drive.feed(ConnectFailed(failure=nobody))
        assert drive.state is peer.State.BACKOFF
        assert drive.wait(LIMITS.backoff_first_ns) == [StartHandshake(address=ADDRESS)], "the releases are owed"


def test_blocks_that_p_does_not_have_cost_only_the_request() -> None:
    drive = connected()
    drive.start("a")
    unknown = BadParams(field="remote_block_ids", expected="< 10", found="11")
    effects = drive.feed(BlocksRejected(request_id="a", failure=unknown))
    assert effects == [failed("a", unknown), release()]
    assert drive.feed(BlocksRejected(request_id="a", failure=unknown)) == []


def backoffs_ns(identity: str, failures: int = 7) -> list[int]:
    drive = Driver(identity=identity)
    delays = []
    for number in range(failures):
        drive.start(f"r{number}", LeaseName("p", number + 1))
        drive.feed(ConnectFailed(failure=SILENT))
        begun_ns = drive.now_ns
        while drive.state is peer.State.BACKOFF:
            at_ns = drive.core.next_deadline()
            assert at_ns is not None
            drive.wait(at_ns - drive.now_ns)
        delays.append(drive.now_ns - begun_ns)
        assert drive.state is peer.State.IDLE or drive.state is peer.State.HANDSHAKING
    return delays


def test_the_back_off_doubles_to_a_bound_with_a_jitter_that_is_each_ranks_own() -> None:
    first = backoffs_ns("d0")
    for number, delay_ns in enumerate(first):
        full_ns = min(8 * S, S << number)
        assert full_ns / 2 <= delay_ns <= full_ns
    assert backoffs_ns("d0") == first
    assert backoffs_ns("d1") != first


# --- the end ----------------------------------------------------------------------------------------------------------


def test_retired_while_nothing_is_connected_it_is_finished_at_once() -> None:
    drive = Driver()
    assert not drive.core.is_retired
    drive.feed(Retire())
    assert (drive.core.is_retired, drive.core.is_finished) == (True, True)
    assert drive.wait(600 * S) == []


@pytest.mark.parametrize("is_finished", [False, True])
def test_who_comes_when_nobody_is_left_in_it_is_for_the_successor(is_finished: bool) -> None:
    """In the order in which they came, and with the age that they have by then: a lease may be taken to have begun when
    this engine first heard of the request."""
    drive = connected()
    drive.feed(Retire())
    if is_finished:
        drive.feed(TornDown(connection=1))
    effects = drive.announce("a") + drive.wait(2 * S) + drive.start("a") + drive.need_nothing("b", B)
    drive.wait(3 * S)
    if not is_finished:
        assert effects == []
        effects = drive.feed(TornDown(connection=1))
    waited_ns = 0 if is_finished else 3 * S
    passed = [each.event for each in only(effects, PassToSuccessor)]
    assert len(passed) == len(effects)
    ages_ns = [0 if is_finished else 5 * S, waited_ns]
    assert [each.age_ns for each in passed[:2]] == ages_ns
    assert list(map(type, passed)) == [Announced, Started, ReleaseUnread]


def test_who_waits_for_a_successor_that_will_not_come_is_told() -> None:
    drive = connected()
    drive.feed(Retire())
    assert drive.start("a") == []
    assert drive.feed(Stop(failure=STOPPED)) == [failed("a", STOPPED)]


def test_nobody_waits_for_the_successor_of_an_engine_whose_connection_stays() -> None:
    """A connection is torn down within moments. But if another core stands on its agents whose READs hang, it stays."""
    drive = connected()
    drive.feed(Retire())
    assert drive.start("a") == []
    assert drive.wait(30 * S) == [failed("a", PeerRetired(peer="p"))]


def test_retired_while_reading_it_lets_the_reads_end_and_refuses_who_waits() -> None:
    drive = reading("a")
    drive.held(60 * S)
    drive.start("b")
    effects = drive.feed(Retire())
    assert effects == [WithdrawReads(request_id="a"), failed("b", PeerRetired(peer="p"))]
    assert drive.start("c") == [failed("c", PeerRetired(peer="p"))]
    assert drive.core.is_retired
    effects = drive.end("a")
    assert effects == [done("a"), TearDown(connection=1)]
    assert not drive.core.is_finished
    drive.feed(TornDown(connection=1))
    assert drive.core.is_finished
    assert drive.wait(600 * S) == []


def test_retired_during_a_handshake_it_tears_down_what_came_of_it() -> None:
    drive = Driver()
    drive.start("a")
    assert drive.feed(Retire()) == [failed("a", PeerRetired(peer="p"))]
    assert drive.connect() == [TearDown(connection=1)]
    drive.feed(TornDown(connection=1))
    assert drive.core.is_finished


def test_a_retired_engine_is_not_finished_before_the_last_check() -> None:
    """Its executor ends when it is, and with that whoever would be told of the check."""
    drive = checking()
    drive.feed(Retire(), TornDown(connection=1))
    assert (drive.state, drive.core.is_finished) == (peer.State.GONE, False)
    assert drive.check("a") == [done("a")]
    assert drive.core.is_finished


def test_a_retired_engine_with_reads_that_hang_is_not_finished_before_they_end() -> None:
    drive = reading()
    drive.feed(Retire())
    (report,) = only(drive.wait(30 * S), Report)
    assert report.is_quarantined
    assert (drive.state, drive.core.is_finished) == (peer.State.GONE, False)
    assert drive.end("a") == [LiftQuarantine(request_id="a"), TearDown(connection=1, failure=NEVER_ENDED)]
    drive.feed(TornDown(connection=1))
    assert drive.core.is_finished


def test_a_retired_engine_of_which_only_reads_that_hang_are_left_is_connected_anew_when_it_is_recalled() -> None:
    """It may have come back elsewhere under its id, and its READs of before may hang for ever."""
    drive = reading()
    drive.feed(Retire())
    drive.wait(30 * S)
    assert drive.core.may_be_recalled
    assert drive.start("b", LeaseName("p-x", 2)) == [failed("b", PeerRetired(peer="p"))]
    # At once, because it is owed a release; where it is looked for now, or the request would wait for the old place.
    assert drive.feed(Recall(address="new:1")) == [StartHandshake(address="new:1")]
    assert (drive.core.may_be_recalled, drive.core.is_retired) == (False, False)
    assert drive.start("c", LeaseName("p-c", 3)) == []
    drive.connect(2)
    assert drive.resolve("c", number=2) != []
    assert drive.end("a") == [LiftQuarantine(request_id="a"), TearDown(connection=1, failure=NEVER_ENDED)]
    drive.feed(TornDown(connection=1))
    assert (drive.state, drive.core.is_finished) == (peer.State.READY, False)
    drive.feed(Retire())
    assert drive.core.is_retired


@pytest.mark.parametrize("end", [Retire(), Stop(failure=STOPPED)])
def test_nothing_is_recalled_that_ends_by_itself(end: Event) -> None:
    drive = reading()
    drive.feed(end)
    assert not drive.core.may_be_recalled
    assert drive.feed(Recall(address="new:1")) == []
    assert drive.core.is_retired
    drive.wait(30 * S)
    assert drive.core.may_be_recalled == isinstance(end, Retire)


def test_stop_fails_everything_and_says_nothing_more() -> None:
    drive = reading("a")
    drive.announce("announced", B)
    drive.start("waiting", LeaseName("p-c", 3))
    assert drive.feed(Stop(failure=STOPPED)) == [WithdrawReads(request_id="a"), failed("waiting", STOPPED)]
    assert drive.end("a") == [failed("a", STOPPED), TearDown(connection=1)]
    drive.feed(TornDown(connection=1))
    assert drive.core.is_finished
    assert drive.wait(600 * S) == []


def test_an_executor_that_ends_leaves_no_request_behind() -> None:
    """Nobody hears of the end of the READ any more, so its blocks stay quarantined."""
    drive = reading("a")
    assert not [effect for effect in drive.feed(Stop(failure=STOPPED)) if isinstance(effect, Report)]
    [report] = [effect for effect in drive.feed(Unwatched()) if isinstance(effect, Report)]
    assert (report.request_id, report.is_quarantined) == ("a", True)


@pytest.mark.parametrize("end", [Retire(), Stop(failure=STOPPED)])
def test_what_is_held_of_an_engine_that_is_given_up_ends_with_it(end: Event) -> None:
    """And everybody sees so: what waits in the queue may have its lease held anew, by the engine's next core."""
    ended: dict[tuple[LeaseName, int], list[tuple[hold.State, str | None]]] = {}

    def observe(now_ns: int, steps: list[StepSeen]) -> None:
        for machine, subject, _, _, after in steps:
            if machine == "hold":
                ended.setdefault(subject, []).append((after.state, after.why))

    drive = Driver(observe=observer_of(observe))
    for request_id, lease in (("held", A), ("owed", B)):
        drive.announce(request_id, lease)
    drive.connect(ranks=2)
    drive.held(60 * S, A)
    drive.need_nothing("owed", B)
    drive.feed(end)
    drive.feed(TornDown(connection=1))
    assert drive.core.is_finished
    gone = (hold.State.GONE, RETIRED)
    assert {subject: steps[-1] for subject, steps in ended.items()} == {
        (A, 0): gone,
        (A, 1): gone,
        (B, 0): (hold.State.RELEASED, None),
        (B, 1): (hold.State.RELEASED, None),
    }
    assert drive.core.claimed() == []


def test_a_crash_fails_what_is_in_hand_and_the_handshake_in_flight() -> None:
    drive = Driver()
    drive.start("a")
    effects = drive.feed(Crashed(failure=CRASH))
    assert effects[0] == failed("a", CRASH)
    assert [type(effect) for effect in effects[1:]] == [NoteHandshakeFailure, NoteNotMet]
    assert drive.state is peer.State.BACKOFF
    assert drive.connect() == [TearDown(connection=1)], "what the lost attempt made"
    assert drive.feed(TornDown(connection=1)) == []


def test_after_a_crash_the_connection_goes_on() -> None:
    drive = reading("a")
    drive.start("b")
    assert drive.feed(Crashed(failure=CRASH)) == [WithdrawReads(request_id="a"), failed("b", CRASH)]
    assert only(drive.end("a"), Report) == [failed("a", CRASH)]
    assert drive.state is peer.State.READY


def test_the_end_of_a_read_that_is_told_again_counts_once() -> None:
    drive = reading("a", "b", reads=2)
    drive.held(60 * S)
    assert drive.end("a", 0) == []
    assert drive.end("a", 0) == []
    assert drive.end("a", 1) == [done("a")]
    assert drive.end("a", 1) == []
    assert drive.end("a", 0, number=9) == []


def test_the_end_of_a_read_over_which_the_core_raised_counts_when_it_is_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = reading()
    drive.held(60 * S)
    with monkeypatch.context() as patch:
        patch.setattr(drive.core, "_step_request", raise_runtime_error)
        with pytest.raises(RuntimeError):
            drive.end("a")
    drive.feed(Crashed(failure=CRASH))
    assert failed("a", CRASH) in drive.end("a")


def raise_runtime_error(*_: Any) -> None:
    raise RuntimeError("injected")


def test_a_mistake_of_the_machine_costs_one_request_and_everybody_sees_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states: dict[str, list[Any]] = {}

    def observe(now_ns: int, steps: list[StepSeen]) -> None:
        for machine, subject, _, _, after in steps:
            if machine == "request":
                states.setdefault(str(subject), []).append(after.state)

    drive = Driver(observe=observer_of(observe))
    for request_id in ("a", "b"):
        drive.start(request_id)
    drive.connect()
    for request_id in ("a", "b"):
        drive.resolve(request_id)
    drive.held(60 * S)
    drive.log.clear()
    step = request.MACHINE.step

    def refuse_the_end_of_a(value: request.Request, event: Event) -> Any:
        if value.request_id == "a" and isinstance(event, request.ReadCompleted):
            raise ProtocolError("request", "reading", "ReadCompleted", "injected")
        return step(value, event)

    monkeypatch.setattr(request.MACHINE, "step", refuse_the_end_of_a)
    drive.end("a")
    (report,) = only(drive.log, Report)
    assert (report.request_id, type(report.failure), report.is_quarantined) == ("a", ActorCrashed, False)
    assert states["a"][-2:] == [request.State.DRAINING, request.State.FAILED]
    assert drive.core.quarantined() == []
    assert only(drive.end("b"), Report) == [done("b")]


@pytest.mark.parametrize("state", [state for state in request.State if state not in request.MACHINE.terminal])
def test_every_living_request_can_fail_after_a_mistake(state: request.State) -> None:
    """Whatever event was refused: its last way out is a step like any other."""
    assert (state, request.ShellFailed) in request.MACHINE.table


def test_a_deadline_whose_handler_raises_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driver()
    for request_id in ("a", "b", "c"):
        drive.start(request_id)
    fire = drive.core._fire

    def raise_over_b(key: tuple[str, Any], due_ns: int, now_ns: int) -> None:
        if key == ("deadline", "b"):
            raise RuntimeError("injected")
        fire(key, due_ns, now_ns)

    monkeypatch.setattr(drive.core, "_fire", raise_over_b)
    with pytest.raises(RuntimeError):
        drive.wait(300 * S)
    drive.now_ns = NOW + 300 * S
    assert [each.request_id for each in only(drive.wait(0), Report)] == ["a", "c"]
    assert only(drive.feed(Crashed(failure=CRASH)), Report) == [failed("b", CRASH)]


def test_an_observer_that_raises_costs_a_record_and_no_report() -> None:
    breaks: list[type[Event]] = []

    def observe(now_ns: int, steps: list[StepSeen]) -> None:
        for _, _, _, event, _ in steps:
            if type(event) in breaks:
                breaks.clear()
                raise RuntimeError("injected")

    drive = Driver(observe=observer_of(observe))
    drive.start("a")
    drive.connect()
    drive.resolve("a")
    drive.held(60 * S)
    breaks.append(request.ReadCompleted)
    with pytest.raises(RuntimeError):
        drive.end("a")
    assert drive.feed(Crashed(failure=CRASH))[0] == done("a")


def test_the_observer_is_told_of_each_machine_that_was_made() -> None:
    made: list[tuple[str, object]] = []

    def observe(now_ns: int, steps: list[StepSeen]) -> None:
        made.extend((machine, subject) for machine, subject, before, event, _ in steps if before is event is None)

    drive = Driver(observe=observer_of(observe))
    drive.start("a")
    assert made == [("peer", "p"), ("request", "a")]
    drive.connect(ranks=2)
    assert made[2:] == [("hold", (A, 0)), ("hold", (A, 1))]
    drive.resolve("a")
    drive.feed(Retire())
    drive.wait(30 * S)
    drive.feed(Recall(address="new:1"))
    assert made[4:] == [("peer", "p")], "another one, beside what is left of the first"


def test_what_is_not_an_event_of_it_is_refused() -> None:
    with pytest.raises(TypeError):
        Driver().feed(request.Aborted())


# --- checks -----------------------------------------------------------------------------------------------------------


def checking(request_id: str = "a", **options: Any) -> Driver:
    """All bytes of this request are here, and its one READ is to be checked; P is known to keep the lease A."""
    drive = connected(**options)
    drive.start(request_id)
    drive.resolve(request_id, are_checked=True)
    drive.held(60 * S)
    assert drive.end(request_id) == [CheckRead(request_id=request_id, read=0, connection=1)]
    drive.log.clear()
    return drive


def test_a_request_is_done_when_its_reads_have_passed_their_checks() -> None:
    drive = checking()
    assert only(drive.wait(S), Report) == []
    assert drive.check("a") == [done("a"), release()]


def test_a_read_that_does_not_pass_its_check_is_not_tried_again_and_costs_no_connection() -> None:
    drive = checking()
    assert drive.check("a", failure=UNEQUAL) == [failed("a", UNEQUAL), release()]
    assert drive.state is peer.State.READY


def test_what_has_passed_its_check_is_proven_to_its_completion_all_the_same() -> None:
    drive = connected()
    drive.start("a")
    drive.resolve("a", are_checked=True)
    drive.end("a")
    assert drive.check("a") == [hold_at(NOW)]
    assert drive.held(60 * S) == [done("a"), release()]


@pytest.mark.parametrize(
    ("event", "failure"),
    [
        (AbortAsked(request_id="a"), AbortedByClient()),
        (Stop(failure=STOPPED), STOPPED),
        (Crashed(failure=CRASH), CRASH),
    ],
)
def test_no_check_is_waited_for_by_a_request_that_has_failed(event: Event, failure: Failure) -> None:
    drive = checking()
    assert failed("a", failure) in drive.feed(event)
    assert only(drive.check("a"), Report) == []


def test_a_check_that_does_not_come_is_waited_for_until_the_deadline() -> None:
    drive = checking()
    while not only(drive.log, Report):
        drive.held(60 * S)
        drive.wait(10 * S)
    assert drive.now_ns == NOW + 300 * S
    assert only(drive.log, Report) == [failed("a", DeadlineExceeded(timeout_seconds=300.0, phase="reading"))]


def test_a_lease_that_is_gone_ends_a_request_that_is_checked_at_once() -> None:
    assert failed("a", over("expired")) in checking().gone()


def test_a_connection_is_given_up_without_its_checks_and_these_count_all_the_same() -> None:
    drive = checking()
    effects = drive.feed(LinkLost(connection=1, detail="reset"))
    assert only(effects, TearDown)
    drive.feed(TornDown(connection=1))
    assert drive.check("a")[0] == done("a")


def test_a_connection_that_is_abandoned_takes_no_request_along_whose_bytes_are_here() -> None:
    """READs of another request hang on it."""
    drive = checking()
    drive.start("b")
    drive.resolve("b")
    drive.feed(LinkLost(connection=1, detail="reset"))
    drive.wait(30 * S)
    (report,) = only(drive.log, Report)
    assert (report.request_id, report.is_quarantined) == ("b", True)
    assert done("a") in drive.check("a")


def test_a_check_of_an_earlier_attempt_says_nothing_of_the_next_one() -> None:
    drive = connected()
    drive.start("a")
    drive.resolve("a", reads=2, are_checked=True)
    drive.held(60 * S)
    drive.end("a")
    drive.end("a", read=1, failure=LOST)
    drive.feed(TornDown(connection=1))
    drive.connect(2)
    drive.resolve("a", number=2, are_checked=True)
    drive.held(60 * S, number=2)
    drive.end("a", number=2)
    assert drive.check("a", failure=UNEQUAL) == []
    assert done("a") in drive.check("a", number=2)


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_an_engine_is_unused_when_nobody_waits_for_it_or_reads_from_it() -> None:
    drive = Driver()
    assert drive.core.is_unused
    drive.announce("a")
    assert not drive.core.is_unused
    drive.start("a")
    drive.connect()
    drive.resolve("a")
    drive.held(60 * S)
    assert not drive.core.is_unused
    drive.end("a")
    assert drive.core.is_unused, "although a release is owed"
    assert (drive.core.is_connected, drive.core.is_retired) == (True, False)


def test_an_engine_shakes_hands_until_it_has_answered_or_failed_to() -> None:
    drive = Driver()
    assert not drive.core.is_shaking_hands
    drive.feed(MeetAsked(address=ADDRESS))
    assert drive.core.is_shaking_hands
    drive.feed(ConnectFailed(failure=SILENT))
    assert not drive.core.is_shaking_hands
    drive.feed(MeetAsked(address=ADDRESS))
    drive.connect()
    assert not drive.core.is_shaking_hands


def test_an_engine_that_is_being_rebuilt_or_has_reads_in_flight_is_in_use() -> None:
    drive = reading()
    drive.feed(AbortAsked(request_id="a"))
    drive.wait(30 * S)
    assert only(drive.log, Report)[0].is_quarantined
    drive.wait(30 * S)
    assert (drive.core.is_connected, drive.core.is_unused) == (False, False)
    drive.end("a")
    assert not drive.core.is_unused
    drive.feed(TornDown(connection=1))
    assert drive.core.is_unused


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_an_abort_ends_who_waits_at_once_and_means_nothing_after_the_end() -> None:
    drive = connected()
    drive.start("a")
    abort = AbortAsked(request_id="a")
    assert drive.feed(abort) == [failed("a", AbortedByClient()), release()]
    assert drive.feed(abort, AbortAsked(request_id="never heard of")) == []


# --- any history ------------------------------------------------------------------------------------------------------


class Everything:
    """Takes events at random, as far as an executor could feed them, and then lets all end."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.drive = Driver()
        self.started: list[str] = []
        self.reports: list[Report] = []
        self.lifted: list[str] = []
        self.posted: dict[tuple[str, int, int], bool] = {}
        self.checking: list[tuple[str, int, int]] = []
        self.reads: dict[str, int] = {}
        self.handshakes = self.connections = 0
        self.tearing_down: list[int] = []
        # The latest connection that was given up in order; an abandoned one may still stand beside its successor.
        self.leaving = 0
        self.left_ns = 0

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartHandshake():
                    assert self.handshakes == 0
                    # But for one whose agents others kept for too long.
                    assert self.leaving not in self.tearing_down or self.drive.now_ns >= self.left_ns + 30 * S
                    self.handshakes = 1
                case ResolveBlocks(request_id=request_id, connection=number):
                    self.reads[request_id] = self.data.draw(st.integers(0, 2))
                    are_checked, reads = self.data.draw(st.booleans()), self.reads[request_id]
                    self.note(self.drive.resolve(request_id, reads, number, are_checked=are_checked))
                case PostReads(request_id=request_id, connection=number):
                    for read in range(self.reads[request_id]):
                        self.posted[request_id, read, number] = True
                case CheckRead(request_id=request_id, read=read, connection=number):
                    self.checking.append((request_id, read, number))
                case TearDown(connection=number):
                    assert not [key for key in self.posted if key[2] == number]
                    self.tearing_down.append(number)
                    if self.drive.state is peer.State.DISCONNECTING and number == self.connections:
                        self.leaving, self.left_ns = number, self.drive.now_ns
                case Report(request_id=request_id, is_quarantined=is_quarantined):
                    assert request_id in self.started
                    assert request_id not in [each.request_id for each in self.reports]
                    if not is_quarantined:
                        assert not [key for key in self.posted if key[0] == request_id]
                    self.reports.append(effect)
                case LiftQuarantine(request_id=request_id):
                    assert request_id not in self.lifted
                    assert not [key for key in self.posted if key[0] == request_id]
                    self.lifted.append(request_id)

    def feed(self, event: Event) -> None:
        self.note(self.drive.feed(event))

    def connect(self) -> None:
        self.handshakes = 0
        self.connections += 1
        self.note(self.drive.connect(self.connections, is_builtin=False, life="l1"))

    def end_read(self, *, is_lawful: bool = False) -> None:
        key = self.data.draw(st.sampled_from(sorted(self.posted))) if not is_lawful else next(iter(self.posted))
        failure = None if is_lawful else self.data.draw(st.sampled_from([None, LOST, REFUSED]))
        is_quiescent = failure is None or self.data.draw(st.booleans())
        del self.posted[key]
        self.note(self.drive.end(key[0], key[1], key[2], failure=failure, is_quiescent=is_quiescent))

    def end_check(self) -> None:
        """It may come when nobody waits for it any more."""
        key = self.checking.pop(self.data.draw(st.integers(0, len(self.checking) - 1)))
        self.note(self.drive.check(*key, failure=self.data.draw(st.sampled_from([None, UNEQUAL]))))

    def step(self) -> None:
        drive, draw = self.drive, self.data.draw
        lease = LeaseName("p", draw(st.integers(1, 3)))
        choices = ["start", "announce", "need nothing", "wait", "abort", "crash", "link", "hold", "release"]
        choices += ["connect", "refuse"] * self.handshakes
        choices += ["check"] * (3 * bool(self.checking))
        choices += ["read"] * (3 * bool(self.posted)) + ["torn"] * (3 * bool(self.tearing_down))
        match draw(st.sampled_from(choices)):
            case "start":
                self.started.append(f"r{len(self.started)}")
                self.note(drive.start(self.started[-1], lease))
            case "announce":
                self.note(drive.announce(f"r{len(self.started)}", lease))
            case "need nothing":
                self.note(drive.need_nothing(f"r{len(self.started)}", lease))
            case "wait":
                self.note(drive.wait(draw(st.sampled_from([1, S, 7 * S, 31 * S, 61 * S]))))
            case "abort":
                self.feed(AbortAsked(request_id=f"r{draw(st.integers(0, 5))}"))
            case "crash":
                self.handshakes = 0
                self.feed(Crashed(failure=CRASH))
            case "link":
                self.feed(LinkLost(connection=max(1, self.connections), detail="reset"))
            case "hold":
                number = max(1, self.connections)
                answer = draw(st.booleans())
                self.note(drive.held(30 * S, lease, number=number) if answer else drive.gone(lease, number=number))
            case "release":
                self.note(drive.confirm(lease, number=max(1, self.connections)))
            case "connect":
                self.connect()
            case "refuse":
                self.handshakes = 0
                self.feed(ConnectFailed(failure=SILENT))
            case "read":
                self.end_read()
            case "check":
                self.end_check()
            case "torn":
                self.feed(TornDown(connection=self.tearing_down.pop()))

    def finish(self) -> None:
        """No more faults, and nobody comes any more."""
        self.feed(Stop(failure=STOPPED))
        while self.posted or self.tearing_down or self.handshakes:
            if self.posted:
                self.end_read(is_lawful=True)
            elif self.handshakes:
                self.connect()
            else:
                self.feed(TornDown(connection=self.tearing_down.pop()))
        self.note(self.drive.wait(600 * S))
        assert sorted(each.request_id for each in self.reports) == sorted(self.started)
        assert sorted(self.lifted) == sorted(each.request_id for each in self.reports if each.is_quarantined)
        assert self.drive.core.is_finished
        assert self.drive.core.next_deadline() is None


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_happens_each_request_is_reported_once_and_everything_ends(data: st.DataObject) -> None:
    everything = Everything(data)
    for _ in range(data.draw(st.integers(5, 40))):
        everything.step()
    everything.finish()


# --- for the explorer, and what it costs ------------------------------------------------------------------------------


def some_history(now_ns: int) -> Driver:
    """A bit of everything: a retry, a proof, a quarantine, a release that is owed, an announced request."""
    drive = Driver(now_ns)
    for request_id, lease in (("a", A), ("b", A), ("c", B)):
        drive.start(request_id, lease)
    drive.connect()
    for request_id in ("a", "b", "c"):
        drive.resolve(request_id)
    drive.held(20 * S, A, B)
    drive.wait(3 * S)
    drive.end("c")
    drive.wait(20 * S)
    drive.end("a")
    drive.feed(AbortAsked(request_id="b"))
    drive.announce("d", LeaseName("p-d", 4), age_ns=S)
    return drive


def test_two_cores_with_the_same_future_are_equal_whenever_that_is() -> None:
    early, late = some_history(NOW), some_history(2 * NOW + 7)
    assert early.core.freeze(early.now_ns) == late.core.freeze(late.now_ns)
    assert early.core.freeze(early.now_ns) != late.core.freeze(late.now_ns + 1)
    late.wait(1)
    assert early.core.freeze(early.now_ns) != late.core.freeze(late.now_ns)
    early.wait(1)
    assert early.core.freeze(early.now_ns) == late.core.freeze(late.now_ns)
    assert isinstance(hash(early.core.freeze(early.now_ns)), int)


@pytest.mark.parametrize(
    "event",
    [
        Announced(request_id="e", lease=LeaseName("p-e", 5), address=ADDRESS, age_ns=0),
        Started(request_id="d", lease=LeaseName("p-d", 4), address=ADDRESS, age_ns=0),
        ReadEnded(request_id="b", read=0, connection=1, ended_ns=NOW),
        HoldAnswered(connection=1, rank=0, sent_ns=NOW + 23 * S, held=((A, S),), gone=()),
        HoldAnswered(connection=1, rank=0, sent_ns=NOW + 23 * S, held=(), gone=((A, "expired"),)),
        ReleaseAnswered(connection=1, rank=0, leases=(B,)),
        LinkLost(connection=1, detail="reset"),
        Retire(),
        Stop(failure=STOPPED),
        Unwatched(),
        Crashed(failure=CRASH),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_copy_goes_its_own_way(event: Event) -> None:
    drive = some_history(NOW)
    frozen = drive.core.freeze(drive.now_ns)
    copies = [drive.core.copy(), drive.core.copy()]
    assert copies[0].freeze(drive.now_ns) == frozen
    outcomes = [copy.handle(event, drive.now_ns) + copy.advance(drive.now_ns + 31 * S) for copy in copies]
    assert outcomes[0] == outcomes[1]
    assert copies[0].freeze(drive.now_ns) == copies[1].freeze(drive.now_ns) != frozen
    assert drive.core.freeze(drive.now_ns) == frozen


def lines_of_a_request(in_hand: int) -> float:
    """Lines of Python that the whole way of one more request takes, while so many read and wait; of 50, the mean."""
    drive = connected()
    for number in range(in_hand):
        drive.start(f"r{number}", LeaseName(f"p{number}", number + 10))
        drive.resolve(f"r{number}")
    assert len(only(drive.log, PostReads)) == in_hand
    drive.log.clear()
    with Counted() as work:
        for number in range(50):
            lease, request_id = LeaseName("more", number + 1), f"more{number}"
            drive.announce(request_id, lease)
            drive.start(request_id, lease)
            drive.resolve(request_id)
            drive.core.next_deadline()
            drive.held(60 * S, lease)
            drive.end(request_id)
            drive.confirm(lease)
    assert all(done(f"more{number}") in drive.log for number in range(50))
    return work.lines / 50


def test_what_an_event_costs_does_not_grow_with_the_requests_in_hand() -> None:
    assert lines_of_a_request(2_000) < 1.1 * lines_of_a_request(10)


def lines_of_a_loss(in_hand: int) -> float:
    """Lines for each of so many requests whose engine goes away for good, until nothing is owed any more."""
    drive = connected()
    for number in range(in_hand):
        drive.start(f"r{number}", LeaseName(f"p{number}", number + 10))
        drive.resolve(f"r{number}")
    with Counted() as work:
        drive.feed(LinkLost(connection=1, detail="reset"))
        for number in range(in_hand):
            drive.end(f"r{number}", failure=LOST)
        drive.feed(TornDown(connection=1))
        for _ in range(100):  # seconds; leases are over after 60
            if drive.state is peer.State.HANDSHAKING:
                drive.feed(ConnectFailed(failure=ConnectionRefused(peer="p", address=ADDRESS)))
            drive.wait(S)
    assert len(only(drive.log, Report)) == in_hand
    assert drive.core.next_deadline() is None
    return work.lines / in_hand


def test_what_a_lost_engine_costs_grows_no_faster_than_its_requests() -> None:
    assert lines_of_a_loss(400) < 1.1 * lines_of_a_loss(50)


def lines_of_a_read(ranks: int) -> float:
    """Lines for each READ of requests that read from so many ranks."""
    drive = Driver()
    drive.start("first", A)
    drive.connect(ranks=ranks)
    with Counted() as work:
        for number in range(5):
            lease, request_id = LeaseName("more", number + 1), f"more{number}"
            drive.start(request_id, lease)
            drive.resolve(request_id, reads=ranks)
            for rank in range(ranks):
                drive.held(60 * S, lease, rank=rank)
                drive.core.next_deadline()
            for read in range(ranks):
                drive.end(request_id, read=read)
                drive.core.next_deadline()
            for rank in range(ranks):
                drive.confirm(lease, rank=rank)
                drive.core.next_deadline()
    assert all(done(f"more{number}") in drive.log for number in range(5))
    return work.lines / 5 / ranks


def test_what_a_read_costs_does_not_grow_with_the_ranks() -> None:
    """But for two looks at the holds of its lease: how long it is proven, and whether all were released."""
    assert lines_of_a_read(72) < 1.25 * lines_of_a_read(8)


def test_what_a_release_costs_does_not_grow_with_those_that_were_forgotten() -> None:
    numbers = itertools.count(1)

    def seconds_of_a_release(drive: Driver) -> float:
        lease = LeaseName("p", next(numbers))
        drive.announce("a", lease)
        started = time.perf_counter()
        drive.need_nothing("a", lease)
        passed = time.perf_counter() - started
        drive.confirm(lease)
        drive.log.clear()
        return passed

    def after(leases: int) -> Driver:
        drive = connected()
        for _ in range(leases):
            seconds_of_a_release(drive)
        return drive

    # In turns: the machine is faster at one time than at another.
    few, many = after(100), after(4 * claims.CONSUMED_MAX)
    of_few, of_many = zip(*((seconds_of_a_release(few), seconds_of_a_release(many)) for _ in range(200)), strict=True)
    assert min(of_many) < 3 * min(of_few)


def test_leases_that_came_one_after_another_are_renewed_together() -> None:
    """Thousands of requests may wait in D's queue, and a message costs both sides more than the leases in it."""
    drive = connected()
    leases = [LeaseName("p", number) for number in range(1, 101)]
    for lease in leases:
        drive.announce(f"r{lease.number}", lease)
        drive.held(30 * S, lease)
        drive.wait(S // 27)
    messages, named = 0, Counter[LeaseName]()
    end_ns = drive.now_ns + 60 * S
    while (at_ns := drive.core.next_deadline()) is not None and at_ns < end_ns:
        for said in only(drive.wait(at_ns - drive.now_ns), SendHold):
            messages += 1
            named.update(said.leases)
            drive.held(30 * S, *said.leases)
    assert set(named) == set(leases)
    assert {4, 5} >= set(named.values())
    assert messages * 8 < named.total()


def test_what_is_remembered_of_released_leases_costs_the_collector_of_garbage_nothing() -> None:
    """It looks at all of its objects in one go, while the engine stands still."""
    drive = connected()
    numbers = itertools.count(1)

    def tracked_after(leases: int) -> int:
        for _ in range(leases):
            lease = LeaseName(f"p-{next(numbers)}", next(numbers))
            drive.announce("a", lease)
            drive.need_nothing("a", lease)
            drive.confirm(lease)
        drive.log.clear()
        gc.collect()
        return len(gc.get_objects())

    first = tracked_after(100)
    assert tracked_after(2000) - first < 200


def test_leases_that_were_released_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "CONSUMED_MAX", 3)
    drive = connected()
    leases = [LeaseName("p", number) for number in range(1, 6)]
    for lease in leases:
        drive.announce("a", lease)
        drive.need_nothing("a", lease)
        drive.confirm(lease)
    refused = [bool(only(drive.start(f"again{lease.number}", lease), Report)) for lease in leases]
    assert refused == [False, False, True, True, True]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_lease_that_is_kept_is_released_when_the_scheduler_lets_go_of_it_and_nobody_reads(is_read: bool) -> None:
    """`is_read`: or it was turned away."""
    drive = connected()
    if is_read:
        drive.feed(Started(request_id="a", lease=A, address=ADDRESS, age_ns=0, keeps_lease=True))
        drive.resolve("a")
        drive.held(60 * S)
        assert drive.end("a") == [done("a")]
    else:
        drive.feed(ReleaseUnread(request_id="a", lease=A, address=ADDRESS, keeps_lease=True))
        drive.held(60 * S)
    assert only(drive.wait(60 * S), SendHold), "it is renewed"
    drive.announce("b")
    assert drive.feed(LetGo(lease=A)) == [], "another one wants it"
    assert drive.need_nothing("b") == [release()]
    assert drive.feed(LetGo(lease=A), LetGo(lease=C)) == []


def test_a_lease_that_is_kept_and_gone_is_wanted_no_more() -> None:
    """Otherwise the engine would be connected again and again for it, and never be unused."""
    drive = Driver()
    kept = Started(request_id="a", lease=A, address=ADDRESS, age_ns=0, keeps_lease=True)
    drive.feed(kept)
    drive.connect()
    drive.resolve("a")
    drive.held(60 * S)
    drive.end("a")
    assert not drive.core.is_unused, "it is kept for requests that may come"
    drive.gone()
    assert drive.core.is_unused
    assert drive.core.claimed() == []


def test_a_release_is_said_for_as_long_as_p_may_keep_the_blocks() -> None:
    """P may have said that it keeps them for longer than a lease: a fixed time."""
    drive = Driver()
    drive.start("a")
    drive.connect()
    drive.resolve("a")
    drive.held(600 * S)
    drive.end("a")
    drive.feed(LinkLost(connection=1, detail="reset"), TornDown(connection=1))
    drive.wait(2 * LIMITS.lease_ns)
    assert drive.core.claimed() == [A], "it is owed still"
    drive.wait(600 * S)
    assert drive.core.claimed() == []
