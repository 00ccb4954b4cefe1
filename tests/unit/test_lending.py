"""The core of a prefill rank: names of leases, what who comes too late is told, and what it costs to have many."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import msgspec
import pytest

from statemachine import lending
from statemachine.kernel import Effect, Event
from statemachine.lease import READERS_MAX, LeaseName
from statemachine.lending import (
    AMBIGUOUS,
    EXPIRED,
    RELEASED,
    SUPERSEDED,
    UNKNOWN,
    WITHDRAWN,
    AnswerHold,
    AnswerLeave,
    AnswerRelease,
    Computing,
    ForgetLease,
    FreeBlocks,
    Granted,
    HeartbeatNotified,
    HoldAsked,
    Leave,
    Lending,
    LendingLimits,
    NoteLateRelease,
    ReleaseAsked,
    ReleaseNotified,
    TellLeaving,
    WatchNotifications,
    Withdrawn,
)
from statemachine.trace import StepSeen
from tests.observer import observer_of

NAME = LeaseName("r", 1)
LIMITS = LendingLimits(lease_ns=100, total_ns=1000)
A = LeaseName("a", 1)


def lent(*leases: LeaseName, limits: LendingLimits = LIMITS) -> Lending:
    """A core that has lent these at the moment 0."""
    core = Lending(limits)
    for lease in leases:
        core.handle(Computing(lease=lease), 0)
        core.handle(Granted(lease=lease), 0)
    return core


def hold(core: Lending, now_ns: int, *leases: LeaseName, engine_id: str = "d", ranks: int = 1) -> AnswerHold:
    asked = HoldAsked(reply_to=b"d", engine_id=engine_id, rank=0, ranks=ranks, sent_ns=7, leases=leases)
    answers = [each for each in core.handle(asked, now_ns) if isinstance(each, AnswerHold)]
    assert len(answers) == 1, "every question has one answer"
    assert (answers[0].reply_to, answers[0].sent_ns) == (b"d", 7)
    return answers[0]


def release(core: Lending, *leases: LeaseName, engine_id: str = "d") -> list[Effect]:
    """What a release causes, but for its answer, which names the same leases."""
    asked = ReleaseAsked(reply_to=b"d", engine_id=engine_id, rank=0, ranks=1, leases=leases)
    *effects, answer = core.handle(asked, 1)
    assert answer == AnswerRelease(reply_to=b"d", leases=leases)
    return effects


FREED = [FreeBlocks(lease=A, expired=False), ForgetLease(lease=A), WatchNotifications(is_expected=False)]


def test_a_hold_is_told_for_how_long_it_is_kept_and_the_promise_is_kept() -> None:
    core = lent(A)
    assert hold(core, 40, A).held == ((A, 100),)
    assert core.advance(139) == []
    assert FreeBlocks(lease=A, expired=True) in core.advance(140)
    assert core.next_deadline() is None


def test_holds_reach_no_further_than_the_total_bound() -> None:
    core = lent(A)
    for now_ns in range(50, 950, 50):
        assert hold(core, now_ns, A).held == ((A, 100 if now_ns <= 900 else 1000 - now_ns),)
        assert not core.advance(now_ns)
    assert hold(core, 990, A).held == ((A, 10),)
    assert FreeBlocks(lease=A, expired=True) in core.advance(1000)


def test_a_lease_of_fixed_length_is_renewed_by_nobody() -> None:
    """Two engines whose requests wait for each other's blocks would wait for ever."""
    for fixed_ns in (30, 300, 3000):
        core = Lending(LIMITS)
        core.handle(Granted(lease=A, fixed_ns=fixed_ns), 0)
        for now_ns in range(0, fixed_ns, 10):
            assert hold(core, now_ns, A).held == ((A, fixed_ns - now_ns),)
            core.handle(HeartbeatNotified(sender="builtin", request_ids=(A.request_id,)), now_ns)
            assert not core.advance(now_ns)
        assert FreeBlocks(lease=A, expired=True) in core.advance(fixed_ns)


def test_nobody_is_told_held_of_what_ends_at_this_very_moment() -> None:
    """The bound is reached, and only the timer is late."""
    core = lent(A)
    for now_ns in range(50, 1000, 50):
        hold(core, now_ns, A)
    asked = HoldAsked(reply_to=b"d", engine_id="d", rank=0, ranks=1, sent_ns=7, leases=(A,))
    effects = core.handle(asked, 1000)
    assert effects.count(FreeBlocks(lease=A, expired=True)) == 1
    assert effects[-1] == AnswerHold(reply_to=b"d", sent_ns=7, held=(), gone=((A, EXPIRED),))
    assert core.advance(1000) == []


STANDSTILL_NS = 10**9
LONG = LendingLimits(lease_ns=10 * STANDSTILL_NS, total_ns=100 * STANDSTILL_NS, standstill_ns=STANDSTILL_NS)


def ended(effects: Sequence[Effect]) -> list[LeaseName]:
    return [each.lease for each in effects if isinstance(each, FreeBlocks)]


def test_who_has_stood_still_hears_what_was_sent_meanwhile_before_it_ends_a_lease() -> None:
    renewed, released, unwanted = (LeaseName(name, 1) for name in ("renewed", "released", "unwanted"))
    core = lent(renewed, released, unwanted, limits=LONG)
    awake_ns = LONG.lease_ns + STANDSTILL_NS
    assert core.advance(awake_ns) == []
    assert core.next_deadline() == awake_ns + STANDSTILL_NS
    assert hold(core, awake_ns + 1, renewed).held == ((renewed, LONG.lease_ns),)
    assert FreeBlocks(lease=released, expired=False) in release(core, released)
    assert core.advance(awake_ns + STANDSTILL_NS - 1) == []
    assert ended(core.advance(awake_ns + STANDSTILL_NS)) == [unwanted]
    assert core.next_deadline() == awake_ns + 1 + LONG.lease_ns
    assert ended(core.advance(awake_ns + 1 + LONG.lease_ns)) == [renewed]


def test_a_lease_ends_in_time_where_nobody_stood_still() -> None:
    core = lent(A, limits=LONG)
    assert ended(core.advance(LONG.lease_ns + STANDSTILL_NS - 1)) == [A]


def test_what_is_due_is_put_off_once_however_late_the_executor_is() -> None:
    other = LeaseName("b", 2)
    core = lent(A, limits=LONG)
    now_ns = LONG.lease_ns + STANDSTILL_NS
    assert core.advance(now_ns) == []
    core.handle(Granted(lease=other), now_ns)
    assert ended(core.advance(now_ns + STANDSTILL_NS + 5 * STANDSTILL_NS)) == [A]
    now_ns += LONG.lease_ns + STANDSTILL_NS
    assert core.advance(now_ns) == [], "the other one is due for the first time"
    assert ended(core.advance(now_ns + STANDSTILL_NS + 5 * STANDSTILL_NS)) == [other]


def test_who_comes_too_late_is_told_why() -> None:
    withdrawn, expired, released = LeaseName("w", 2), LeaseName("x", 3), A
    core = lent(released, expired)
    core.handle(Computing(lease=withdrawn), 0)
    core.handle(Withdrawn(lease=withdrawn), 0)
    release(core, released)
    core.advance(100)
    unknown = LeaseName("u", 9)
    answer = hold(core, 100, withdrawn, expired, released, unknown)
    assert answer.held == ()
    assert dict(answer.gone) == {withdrawn: WITHDRAWN, expired: EXPIRED, released: RELEASED, unknown: UNKNOWN}


def test_however_a_lease_ends_its_executor_is_told_once_to_forget_it() -> None:
    core = Lending(LIMITS)
    done, expired, withdrawn, superseded = names = [LeaseName(name, number) for number, name in enumerate("dxws", 1)]
    again = LeaseName("s", 5)
    effects = [effect for name in names for effect in core.handle(Computing(lease=name), 0)]
    for name in (done, superseded, expired):
        effects += core.handle(Granted(lease=name), 0)
    effects += release(core, done)
    effects += core.handle(Withdrawn(lease=withdrawn), 1)
    effects += core.handle(Computing(lease=again), 1)
    effects += core.handle(Withdrawn(lease=again), 1)
    effects += core.advance(100)
    forgotten = [effect.lease for effect in effects if isinstance(effect, ForgetLease)]
    assert forgotten == [done, withdrawn, superseded, again, expired]
    assert [effect.lease for effect in effects if isinstance(effect, FreeBlocks)] == [done, expired]
    assert core.leases() == ()


def test_a_repeated_release_is_answered_and_is_not_late() -> None:
    core = lent(A)
    assert release(core, A) == FREED
    assert release(core, A) == []
    assert core.handle(ReleaseNotified(sender="s", request_id="a", ranks=1), 1) == []


def test_a_release_of_what_is_over_otherwise_is_late() -> None:
    core = lent(A)
    core.advance(100)
    late = NoteLateRelease(sender="d", request_id="a", was_expired=True)
    assert release(core, A) == [late]
    assert core.handle(ReleaseNotified(sender="d", request_id="a", ranks=1), 1) == [late]
    assert core.handle(ReleaseNotified(sender="d", request_id="never", ranks=1), 1) == [
        NoteLateRelease(sender="d", request_id="never", was_expired=False)
    ]


def test_who_has_held_a_lease_that_was_not_of_fixed_length_is_late_when_it_lets_go_after_the_end() -> None:
    """It may have read until now."""
    core = lent(A)
    hold(core, 10, A)
    assert FreeBlocks(lease=A, expired=True) in core.advance(110)
    assert release(core, A) == [NoteLateRelease(sender="d", request_id="a", was_expired=True)]


def test_a_late_release_counts_once_however_often_it_is_said() -> None:
    """Our decode engines say a release until it is answered; a built-in one may be repeated by a flaw of its own."""
    core = lent(A)
    core.advance(100)
    late = NoteLateRelease(sender="d", request_id="a", was_expired=True)
    assert [release(core, A) for _ in range(3)] == [[late], [], []]
    without_number = LeaseName("a", 0)
    assert release(core, without_number) == [], "the same rank, by another name of the lease"
    notified = ReleaseNotified(sender="s", request_id="a", ranks=1)
    assert [len(core.handle(notified, 1)) for _ in range(2)] == [1, 0]
    assert [release(core.copy(), A), release(core, A)] == [[], []]


def test_who_released_in_time_is_not_late_when_the_lease_expires_because_of_another_rank() -> None:
    core = lent(A)
    released = ReleaseAsked(reply_to="d", engine_id="d", rank=0, ranks=2, leases=(A,))
    core.handle(released, 1)
    assert FreeBlocks(lease=A, expired=True) in core.advance(100)
    again, other = core.handle(released, 101), core.handle(msgspec.structs.replace(released, rank=1), 102)
    assert not any(isinstance(effect, NoteLateRelease) for effect in again)
    assert NoteLateRelease(sender="d", request_id="a", was_expired=True) in other


def test_who_held_a_lease_of_fixed_length_is_not_late_when_it_lets_go_after_the_end() -> None:
    """P keeps what D lends back until its user comes again, who may come too late. Nothing is read then."""
    core = Lending(LIMITS)
    core.handle(Granted(lease=A, fixed_ns=50), 0)
    hold(core, 10, A)
    assert FreeBlocks(lease=A, expired=True) in core.advance(50)
    assert release(core, A) == []
    notified = ReleaseNotified(sender="s", request_id="a", ranks=1)
    assert core.handle(notified, 60) == [NoteLateRelease(sender="s", request_id="a", was_expired=True)], "built-in"


def test_so_many_late_readers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "LATE_READERS_MAX", 2)
    core = lent(A)
    core.advance(100)
    senders = [ReleaseNotified(sender=name, request_id="a", ranks=1) for name in "abc"]
    assert [len(core.handle(each, 101)) for each in senders] == [1, 1, 1]
    assert [len(core.handle(each, 102)) for each in senders] == [0, 0, 1]


def test_a_lease_of_another_life_is_not_this_one() -> None:
    """The same request id, and the number that another life of this engine gave it."""
    core = lent(A)
    assert hold(core, 0, LeaseName("a", 2)).gone == ((LeaseName("a", 2), UNKNOWN),)
    assert release(core, LeaseName("a", 2)) == [NoteLateRelease(sender="d", request_id="a", was_expired=False)]
    assert len(core.leases()) == 1


def test_a_request_id_that_is_used_again_supersedes_its_lease_and_is_ambiguous_without_its_number() -> None:
    again, without = LeaseName("a", 2), LeaseName("a", 0)
    core = lent(A)
    assert hold(core, 0, without).held == ((without, 100),)
    effects = core.handle(Computing(lease=again), 0)
    assert not any(isinstance(effect, FreeBlocks) for effect in effects), "the engine has freed them by itself"
    core.handle(Granted(lease=again), 0)
    assert hold(core, 0, A).gone == ((A, SUPERSEDED),)
    assert hold(core, 0, again).held == ((again, 100),)
    assert hold(core, 0, without).gone == ((without, AMBIGUOUS),)
    assert len(core.leases()) == 1


def test_where_request_ids_come_again_one_without_its_number_names_no_lease() -> None:
    """It may be that of a lease of an engine that was here before: nobody remembers it, and its blocks are others'."""
    without = LeaseName("a", 0)
    core = Lending(msgspec.structs.replace(LIMITS, ids_repeat=True))
    core.handle(Computing(lease=A), 0)
    core.handle(Granted(lease=A), 0)
    assert hold(core, 0, without).gone == ((without, AMBIGUOUS),)
    assert hold(core, 0, A).held == ((A, 100),)


def test_a_preempted_request_is_announced_again_and_remembers_its_readers() -> None:
    core = Lending(LIMITS)
    core.handle(Computing(lease=A), 0)
    release(core, A)
    core.handle(Computing(lease=A), 5)
    assert core.handle(Granted(lease=A), 10) == FREED


def test_heartbeats_count_for_less_than_holds_and_name_the_newest_lease() -> None:
    core = lent(A)
    core.handle(HeartbeatNotified(sender="s", request_ids=("a", "unknown")), 80)
    assert core.advance(145) == []
    assert FreeBlocks(lease=A, expired=True) in core.advance(146)


@pytest.mark.parametrize("lent_as", ["HB:x", "x:1"])
def test_a_text_with_two_readings_is_what_makes_sense_here(lent_as: str) -> None:
    lease = LeaseName(lent_as, 1)
    core = lent(lease)
    both = HeartbeatNotified(
        sender="s",
        request_ids=("x:1",),
        or_release=ReleaseNotified(sender="s", request_id="HB:x", ranks=1),
    )
    effects = core.handle(both, 50)
    freed = FreeBlocks(lease=lease, expired=False) in effects
    assert freed is (lent_as == "HB:x")
    assert not any(isinstance(effect, NoteLateRelease) for effect in effects)


def test_what_is_over_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "ENDED_MAX", 10)
    core = Lending(LIMITS)
    names = [LeaseName(f"r{number}", number) for number in range(30)]
    for name in names:
        core.handle(Granted(lease=name), 0)
        release(core, name)
    answer = hold(core, 0, *names)
    assert [why for _, why in answer.gone] == [UNKNOWN] * 20 + [RELEASED] * 10
    assert len(core._newest) == 10


def test_what_is_known_of_those_that_are_over_is_forgotten_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of what has expired, and that an id was used twice."""
    monkeypatch.setattr(lending, "ENDED_MAX", 10)
    core = Lending(LIMITS)
    names = [LeaseName(f"r{number // 2}", number) for number in range(1, 61)]
    for name in names:
        core.handle(Granted(lease=name, fixed_ns=50), 0)
        hold(core, 0, name)
        core.advance(50)
    assert len(core._ended) == len(core._readers_of_expired) == 10
    assert core._newest.keys() == {name.request_id for name in names[-10:]}
    assert core._reused <= core._newest.keys()


def test_a_reader_without_a_name_of_its_own_may_hold_again_what_it_has_released() -> None:
    """Who says the same name twice is not told apart from another life of its rank."""
    core = lent(A)
    hold(core, 0, A)
    hold(core, 0, A, engine_id="other")
    release(core, A)
    assert hold(core, 1, A).held == ((A, 100),)


def test_a_deadline_whose_step_raises_leaves_the_others_due(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Lending(LIMITS)
    step = core._step

    def raise_over_b(name: LeaseName, event: Event) -> None:
        if name == LeaseName("b", 2) and type(event).__name__ == "DeadlinePassed":
            raise RuntimeError("injected")
        step(name, event)

    monkeypatch.setattr(core, "_step", raise_over_b)
    names = [A, LeaseName("b", 2), LeaseName("c", 3)]
    for name in names:
        core.handle(Granted(lease=name), 0)
    with pytest.raises(RuntimeError):
        core.advance(100)
    effects = core.advance(100)
    assert {each.lease for each in effects if isinstance(each, FreeBlocks)} >= {A, LeaseName("c", 3)}


def test_an_observer_that_raises_costs_records_and_frees_the_blocks_all_the_same() -> None:
    def observe(now_ns: int, steps: list[StepSeen]) -> None:
        if any(type(event).__name__ == "DeadlinePassed" for _, _, _, event, _ in steps):
            raise RuntimeError("injected")

    core = Lending(LIMITS, observer_of(observe))
    core.handle(Granted(lease=A), 0)
    with pytest.raises(RuntimeError):
        core.advance(100)
    assert [each.lease for each in core.advance(100) if isinstance(each, FreeBlocks)] == [A]


def test_a_copy_goes_its_own_way() -> None:
    core = lent(A)
    other = core.copy()
    assert core.freeze(0) == other.freeze(0)
    release(other, A)
    assert core.freeze(0) != other.freeze(0)
    assert hold(core, 0, A).held == ((A, 100),)


@pytest.mark.parametrize("fixed_ns", [None, 30, 300])
@pytest.mark.parametrize("heard_ns", [0, 50])
def test_without_its_core_no_lease_ends_before_what_the_core_may_have_promised(
    fixed_ns: int | None, heard_ns: int
) -> None:
    """It is asked again and again until it dies, at 50, and hears of the grant at once or at that moment."""
    core = Lending(LIMITS)
    core.handle(Computing(lease=A), 0)
    promised_ns = []
    for now_ns in range(0, 51, 10):
        answers = [hold(core, now_ns, A)]
        if now_ns == heard_ns:
            core.handle(Granted(lease=A, fixed_ns=fixed_ns), now_ns)
            answers.append(hold(core, now_ns, A))
        promised_ns += [now_ns + remaining_ns for answer in answers for _, remaining_ns in answer.held]
    ends_ns = lending.end_without_core_ns(0, fixed_ns, died_ns=50, lease_ns=LIMITS.lease_ns)
    assert max(promised_ns) <= ends_ns


def test_without_its_core_what_is_granted_later_is_lent_for_its_time() -> None:
    assert lending.end_without_core_ns(70, None, died_ns=50, lease_ns=100) == 170
    assert lending.end_without_core_ns(70, 300, died_ns=50, lease_ns=100) == 370


def test_what_a_message_costs_does_not_grow_with_the_leases_that_are_out() -> None:
    def seconds_per_hold(leases: int) -> float:
        core = lent(*(LeaseName(f"r{number}", number) for number in range(leases)))
        best = float("inf")
        for _ in range(5):
            started = time.thread_time()  # not that in which others run
            for now_ns in range(100):
                hold(core, now_ns, LeaseName("r3", 3))
                core.next_deadline()
            best = min(best, time.thread_time() - started)
        return best

    assert seconds_per_hold(10_000) < 5 * seconds_per_hold(10)


def test_what_the_end_of_a_lease_costs_does_not_grow_with_those_that_were_forgotten() -> None:
    numbers = itertools.count(1)

    def seconds_of_an_end(core: Lending) -> float:
        lease = LeaseName("r", next(numbers))
        core.handle(Computing(lease=lease), 0)
        started = time.perf_counter()
        core.handle(Withdrawn(lease=lease), 0)
        return time.perf_counter() - started

    def after(leases: int) -> Lending:
        core = Lending(LIMITS)
        for _ in range(leases):
            seconds_of_an_end(core)
        return core

    # In turns: the machine is faster at one time than at another.
    few, many = after(100), after(2 * lending.ENDED_MAX)
    of_few, of_many = zip(*((seconds_of_an_end(few), seconds_of_an_end(many)) for _ in range(200)), strict=True)
    assert min(of_many) < 5 * min(of_few)


def test_a_lease_is_held_by_a_bounded_number_of_engines() -> None:
    core = Lending(LIMITS)
    core.handle(lending.Computing(lease=NAME), 0)
    core.handle(lending.Granted(lease=NAME), 0)
    for number in range(lending.HOLDERS_MAX):
        assert held_by(core, f"d{number}") == "held"
    assert held_by(core, "one too many") == lending.CROWDED
    assert held_by(core, "d0") == "held"


def test_a_lease_is_held_by_a_bounded_number_of_incarnations() -> None:
    """A step costs as much as it has holders and processes of one, and anybody may claim to be one."""
    core = lent(NAME)
    for number in range(READERS_MAX):
        assert held_by(core, "d", f"{number:032x}") == "held"
    assert held_by(core, "d", "one too many") == lending.CROWDED
    assert held_by(core, "d", f"{0:032x}") == "held"
    released = ReleaseAsked(reply_to=b"", engine_id="d", rank=0, ranks=1, leases=(NAME,), incarnation="one too many")
    assert core.handle(released, 1) == [AnswerRelease(reply_to=b"", leases=(NAME,))]
    assert core.leases()[0].holders[0].released == frozenset()


@pytest.mark.parametrize("is_granted", [True, False])
def test_a_hold_that_comes_behind_its_own_release_keeps_nothing(is_granted: bool) -> None:
    """Over an earlier connection. Nobody would release it again, and it would end as one that nobody has read."""
    core = lent(NAME)
    if not is_granted:
        core = Lending(LIMITS)
        core.handle(lending.Computing(lease=NAME), 0)
    two_ranks = {"reply_to": b"", "engine_id": "d", "ranks": 2, "leases": (NAME,)}
    core.handle(ReleaseAsked(**two_ranks, rank=0, incarnation="a"), 1)
    assert held_by(core, "d", "a") == lending.RELEASED
    assert held_by(core, "d", "b") == "held", "another process of that rank, or the same that has met us anew"
    core.handle(ReleaseAsked(**two_ranks, rank=0, incarnation="b"), 1)
    effects = core.handle(ReleaseAsked(**two_ranks, rank=1, incarnation="c"), 1)
    if not is_granted:
        effects = core.handle(lending.Granted(lease=NAME), 2)
    assert FreeBlocks(lease=NAME, expired=False) in effects


def test_who_names_a_lease_without_its_number_does_not_release_what_is_held_by_its_number() -> None:
    """Two requests of one rank: a router has dropped the number from the parameters of one of them. To D these are two
    leases."""
    core, without = lent(NAME), LeaseName(NAME.request_id, 0)
    speaks = {"reply_to": b"", "engine_id": "d", "rank": 0, "ranks": 1, "incarnation": "a"}
    for name in (NAME, without):
        (answer,) = core.handle(lending.HoldAsked(**speaks, sent_ns=0, leases=(name,)), 1)
        assert isinstance(answer, lending.AnswerHold)
        assert answer.held
    for name, is_last in ((NAME, False), (without, True)):
        effects = core.handle(ReleaseAsked(**speaks, leases=(name,)), 1)
        assert (FreeBlocks(lease=NAME, expired=False) in effects) is is_last


def test_who_has_released_is_remembered_within_bounds() -> None:
    core = lent(NAME)
    assert held_by(core, "other") == "held"
    for number in range(READERS_MAX + 2):
        core.handle(
            ReleaseAsked(reply_to=b"", engine_id="d", rank=0, ranks=2, leases=(NAME,), incarnation=f"{number:032x}"), 1
        )
    (holder,) = [each for each in core.leases()[0].holders if each.engine_id == "d"]
    assert len(holder.left) == READERS_MAX


def held_by(core: Lending, engine_id: str, incarnation: str = "") -> str:
    """What this process is told when it asks for the lease."""
    asked = lending.HoldAsked(
        reply_to=b"", engine_id=engine_id, rank=0, ranks=1, sent_ns=0, leases=(NAME,), incarnation=incarnation
    )
    (answer,) = core.handle(asked, 1)
    assert isinstance(answer, lending.AnswerHold)
    return "held" if answer.held else answer.gone[0][1]


# --- an engine that is to end -----------------------------------------------------------------------------------------


def leave(core: Lending, now_ns: int, grace_ns: int = 300) -> list[Effect]:
    return core.handle(Leave(reply_to=b"own", grace_ns=grace_ns), now_ns)


def hear(core: Lending, now_ns: int, reply_to: bytes) -> list[Effect]:
    """A decode rank asks for nothing; what comes beside the answer."""
    asked = HoldAsked(reply_to=reply_to, engine_id="d", rank=0, ranks=1, sent_ns=7, leases=())
    answer, *further = core.handle(asked, now_ns)
    assert answer == AnswerHold(reply_to=reply_to, sent_ns=7, held=(), gone=())
    return further


def test_each_decode_rank_that_has_asked_is_told_once_that_the_engine_leaves() -> None:
    core = lent(A)
    assert hear(core, 0, b"new") == hear(core, 1, b"new") == []
    assert leave(core, 10) == [TellLeaving(reply_to=b"new", grace_ns=300), AnswerLeave(reply_to=b"own", leases=1)]
    assert leave(core, 20, 9999) == [AnswerLeave(reply_to=b"own", leases=1)], "it leaves once"
    assert hear(core, 30, b"new") == [], "it was told"
    assert hear(core, 30, b"met later") == [TellLeaving(reply_to=b"met later", grace_ns=280)]
    assert hear(core, 9999, b"met at the end") == [TellLeaving(reply_to=b"met at the end", grace_ns=0)]


def test_of_many_decode_ranks_those_that_were_met_last_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "HEARERS_MAX", 2)
    core = Lending(LIMITS)
    for reply_to in (b"a", b"b", b"a", b"c"):
        hear(core, 0, reply_to)
    told = [each.reply_to for each in leave(core, 0) if isinstance(each, TellLeaving)]
    assert told == [b"a", b"c"]


def test_what_is_lent_when_the_engine_leaves_is_served_until_the_end_of_the_grace_period() -> None:
    core = lent(A)
    leave(core, 10)
    for now_ns in range(50, 310, 20):
        assert hold(core, now_ns, A).held == ((A, min(100, 310 - now_ns)),)
        assert not core.advance(now_ns)
    assert FreeBlocks(lease=A, expired=True) in core.advance(310)
    assert hold(core, 311, A).gone == ((A, EXPIRED),)


def test_what_was_promised_before_the_engine_left_is_kept() -> None:
    """A decode engine has proved READs by it."""
    core = lent(A)
    assert hold(core, 50, A).held == ((A, 100),)
    leave(core, 60, 10)
    assert hold(core, 80, A).held == ((A, 70),)
    assert core.advance(149) == []
    assert FreeBlocks(lease=A, expired=True) in core.advance(150)


def test_what_is_granted_after_that_lasts_for_its_time_and_no_longer() -> None:
    """A built-in decode engine takes that for granted."""
    core = Lending(LIMITS)
    core.handle(Computing(lease=A), 0)
    leave(core, 0, 150)
    core.handle(Granted(lease=A), 100)
    core.handle(HeartbeatNotified(sender="builtin", request_ids=(A.request_id,)), 190)
    assert hold(core, 190, A).held == ((A, 10),)
    assert FreeBlocks(lease=A, expired=True) in core.advance(200)


def test_a_release_ends_a_lease_of_an_engine_that_leaves() -> None:
    core = lent(A)
    hold(core, 0, A)
    leave(core, 10)
    assert release(core, A) == FREED
    assert leave(core, 20) == [AnswerLeave(reply_to=b"own", leases=0)]


def test_an_engine_that_ends_at_once_tells_whom_it_has_not_told_and_answers_nobody() -> None:
    ends = Leave(reply_to=None, grace_ns=0)
    core = lent(A)
    hear(core, 0, b"new")
    assert core.handle(ends, 10) == [TellLeaving(reply_to=b"new", grace_ns=0)]
    assert core.handle(ends, 20) == []
    told = lent(A)
    hear(told, 0, b"new")
    leave(told, 10)
    assert told.handle(ends, 20) == [], "it knows"


def test_a_prompt_that_is_still_computed_when_the_grace_period_is_over_is_not_promised() -> None:
    core = Lending(LIMITS)
    core.handle(Computing(lease=A), 0)
    leave(core, 0, 150)
    assert hold(core, 100, A).held == ((A, 50),)
    assert hold(core, 150, A).gone == ((A, lending.GRACE_OVER),)


def test_a_copy_of_a_core_that_leaves_behaves_alike() -> None:
    core = lent(A)
    hear(core, 0, b"d")
    other = core.copy()
    assert other.freeze(0) == core.freeze(0)
    leave(core, 0)
    assert other.freeze(0) != core.freeze(0)
    assert core.copy().freeze(5) == core.freeze(5)
    assert (core._leaves_ns, other._leaves_ns) == (300, None)
