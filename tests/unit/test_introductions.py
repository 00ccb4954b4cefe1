"""Engines that are met before a request needs them: who is asked when, what is said, and what is met again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from statemachine import introduction
from statemachine.failures import FirstReadNeverEnded
from statemachine.introduction import (
    Answered,
    AskWho,
    EngineConnected,
    EngineLost,
    EngineNotMet,
    Failed,
    IntroductionLimits,
    Introductions,
    Meet,
    Named,
    SayFailed,
    SayForgotten,
    State,
)
from statemachine.kernel import Effect

LIMITS = IntroductionLimits(pause_first_ns=10, pause_max_ns=40, handshake_ns=33)
FORGETFUL = IntroductionLimits(pause_first_ns=10, pause_max_ns=40, handshake_ns=33, forget_ns=200)
A, B, KEPT = "a:5600", "b:5600", "kept:5600"
FIRST, SECOND = ("first", (1, 1, 1)), ("second", (1, 1, 1))


def name(core: Introductions, places: Iterable[str], now_ns: int, *, is_kept: bool = False) -> list[Effect]:
    return core.handle(Named(places=tuple(places), is_kept=is_kept), now_ns)


def answer(core: Introductions, place: str, engine: object, now_ns: int, *, is_own: bool = False) -> list[Effect]:
    return core.handle(Answered(place=place, engine=engine, is_own=is_own), now_ns)


def fail(core: Introductions, place: str, problem: str, now_ns: int) -> list[Effect]:
    return core.handle(Failed(place=place, problem=problem), now_ns)


def connect(core: Introductions, engine: object, now_ns: int) -> list[Effect]:
    return core.handle(EngineConnected(engine=engine), now_ns)


def lose(core: Introductions, engine: object, now_ns: int) -> list[Effect]:
    return core.handle(EngineLost(engine=engine), now_ns)


def named(*places: str) -> Introductions:
    core = Introductions(LIMITS)
    assert name(core, places, 0) == [AskWho(place=place) for place in places]
    return core


def state(core: Introductions, place: str = A) -> State:
    value = core.get(place)
    assert value is not None
    return value.state


def met(core: Introductions, place: str = A, engine: object = FIRST, now_ns: int = 0) -> None:
    assert answer(core, place, engine, now_ns) == [Meet(place=place, engine=engine)]
    assert connect(core, engine, now_ns) == []
    assert state(core, place) is State.MET


def test_an_engine_that_is_connected_already_is_met_when_it_answers() -> None:
    """The roster is told all the same: somebody wants it."""
    core = named(A)
    answered = Answered(place=A, engine=FIRST, is_connected=True)
    assert core.handle(answered, 0) == [Meet(place=A, engine=FIRST)]
    assert state(core) is State.MET


def test_whoever_is_named_is_asked_at_once_and_connected() -> None:
    core = named(A, B)
    met(core, A, FIRST)
    met(core, B, SECOND)
    assert core.next_deadline() is None, "nothing is left to do"


def test_pauses_double_up_to_a_bound_and_a_problem_is_said_once_until_it_is_met() -> None:
    core, now_ns, pauses = named(A), 0, []
    said: list[Effect] = []
    for _ in range(5):
        said += fail(core, A, "nobody", now_ns)
        due_ns = core.next_deadline()
        assert due_ns is not None
        assert core.advance(due_ns - 1) == []
        assert core.advance(due_ns) == [AskWho(place=A)]
        pauses.append(due_ns - now_ns)
        now_ns = due_ns
    assert all(full / 2 <= pause <= full for pause, full in zip(pauses, [10, 20, 40, 40, 40], strict=True))
    assert said == [SayFailed(place=A, problem="nobody")]
    met(core, now_ns=now_ns)
    lose(core, FIRST, now_ns)
    assert core.advance(now_ns + 10) == [AskWho(place=A)], "the first pause again"
    assert fail(core, A, "nobody", now_ns + 10) == [SayFailed(place=A, problem="nobody")]
    assert core.advance(now_ns + 20) == [AskWho(place=A)], "what had failed before it was met counts no more"


def test_ranks_that_lose_an_engine_together_do_not_come_back_together() -> None:
    """All ranks of all decode engines see its end in the same millisecond."""
    second, rounds = 10**9, 6
    limits = IntroductionLimits(pause_first_ns=second, pause_max_ns=8 * second, handshake_ns=second)
    asked_ns: dict[str, list[int]] = {}
    for identity in [f"d{engine}/{rank}" for engine in range(25) for rank in range(4)]:
        core = Introductions(limits, identity)
        name(core, [A], 0)
        now_ns = 0
        for _ in range(rounds):
            fail(core, A, "nobody", now_ns)
            due_ns = core.next_deadline()
            assert due_ns is not None
            assert core.advance(due_ns) == [AskWho(place=A)]
            asked_ns.setdefault(identity, []).append(due_ns)
            now_ns = due_ns
    for number, first_ns in enumerate((second, 3 * second, 7 * second, 15 * second, 23 * second, 31 * second)):
        of_all = sorted(each[number] for each in asked_ns.values())
        assert first_ns / 2 <= of_all[0] <= of_all[-1] <= first_ns
        most_at_once = max(sum(at_ns <= other < at_ns + second // 20 for other in of_all) for at_ns in of_all)
        assert most_at_once < len(of_all) / 3


def test_one_that_answers_and_is_not_connected_in_time_is_tried_again() -> None:
    core = named(A)
    answer(core, A, FIRST, 0)
    assert core.advance(131) == []
    assert core.advance(132) == [SayFailed(place=A, problem=introduction.NOT_CONNECTED)]
    assert core.advance(142) == [AskWho(place=A)]


def test_who_hears_why_an_attempt_failed_pauses_at_once() -> None:
    core = named(A, B)
    unread = FirstReadNeverEnded(peer="first", address=A, worker="PP 0 TP 0", timeout_seconds=5.0)
    failed = EngineNotMet(engine=FIRST, failure=unread)
    assert core.handle(failed, 0) == [], "nobody is there, as far as is known"
    answer(core, A, FIRST, 0)
    assert core.handle(failed, 5) == [SayFailed(place=A, problem=unread)]
    assert core.handle(failed, 6) == [], "an attempt that it has not asked for"
    assert (state(core), state(core, B)) == (State.PAUSING, State.ASKING)
    value = core.get(A)
    assert value is not None
    assert value.problem == unread
    assert core.advance(15) == [AskWho(place=A)]
    assert core.handle(failed, 15) == [], "who is there now is being asked"
    assert state(core) is State.ASKING
    fail(core, A, "nobody", 15)
    value = core.get(A)
    assert value is not None
    assert value.problem == "nobody"
    core.advance(35)
    met(core, now_ns=35)
    assert core.handle(failed, 36) == [], "it is connected again"
    assert state(core) is State.MET


def test_who_has_taken_its_place_is_met() -> None:
    """Another engine id at the same address; the end of the old one's connection is no news any more."""
    core = named(A)
    met(core)
    lose(core, FIRST, 5)
    assert core.advance(15) == [AskWho(place=A)]
    met(core, A, SECOND, 15)
    assert lose(core, FIRST, 16) == []
    assert state(core) is State.MET
    assert connect(core, FIRST, 16) == []
    assert state(core) is State.MET
    lose(core, SECOND, 20)
    assert state(core) is State.PAUSING


def test_an_engine_that_a_request_has_met_is_met() -> None:
    core = named(A)
    met(core)
    lose(core, FIRST, 0)
    assert connect(core, FIRST, 1) == []
    assert (state(core), core.next_deadline()) == (State.MET, None)


def test_this_engine_itself_is_left_alone() -> None:
    core = named(A)
    assert answer(core, A, FIRST, 0, is_own=True) == []
    assert (state(core), core.next_deadline()) == (State.OWN, None)
    assert name(core, [A], 5) == connect(core, FIRST, 5) == []


def test_who_is_named_again_is_asked_once_a_first_pause_is_over() -> None:
    """However far its pauses have grown, and however often it is said."""
    core = named(A)
    fail(core, A, "nobody", 0)
    core.advance(10)
    fail(core, A, "nobody", 11)
    due_ns = core.next_deadline()
    assert due_ns is not None
    assert 21 <= due_ns <= 31
    for now_ns in (11, 15, 20):
        assert name(core, [A], now_ns) == []
    assert core.advance(21) == [AskWho(place=A)]
    assert name(core, [A], 22) == [], "it is being asked"
    fail(core, A, "nobody", 23)
    assert name(core, [A], 40) == [AskWho(place=A)]
    met(core, now_ns=43)
    assert name(core, [A], 44) == []


def test_a_place_that_is_named_while_it_is_being_met_has_the_time_that_it_had() -> None:
    core = named(A)
    fail(core, A, "nobody", 0)
    core.advance(10)
    answer(core, A, FIRST, 10)
    assert name(core, [A], 30) == []
    assert core.advance(141) == []
    assert state(core) is State.MEETING
    core.advance(142)
    assert state(core) is State.PAUSING


def test_a_place_that_one_message_names_twice_is_asked_at_once() -> None:
    assert name(Introductions(LIMITS), [A, A], 0) == [AskWho(place=A)]


def forgotten(place: str, unmet_ns: int) -> SayForgotten:
    return SayForgotten(place=place, unmet_ns=unmet_ns)


def test_a_place_that_is_unmet_for_long_is_forgotten() -> None:
    core = Introductions(FORGETFUL)
    name(core, [A, B], 0)
    name(core, [KEPT], 0, is_kept=True)
    met(core, B, SECOND, 0)
    said: list[SayForgotten] = []
    now_ns = 0
    for place in (A, KEPT):
        fail(core, place, "nobody", 0)
    while now_ns < 400:
        now_ns = core.next_deadline() or 400
        for effect in core.advance(now_ns):
            match effect:
                case AskWho(place=place):
                    fail(core, place, "nobody", now_ns)
                case SayForgotten():
                    said.append(effect)
    assert [effect.place for effect in said] == [A]
    assert 200 <= said[0].unmet_ns <= 240, "at the first attempt that is due after that"
    assert {value.place for value in core.values()} == {B, KEPT}
    lose(core, SECOND, 1000)
    assert AskWho(place=B) in core.advance(1010), "it was met until now"
    fail(core, B, "nobody", 1010)
    name(core, [B], 1205)
    fail(core, B, "nobody", 1206)
    assert AskWho(place=B) in core.advance(1300), "it was named again"


def test_a_place_that_was_met_is_forgotten_so_long_after_it_was_lost() -> None:
    """However long ago it was named, also if that was while it was met."""
    core = Introductions(FORGETFUL)
    name(core, [A], 0)
    met(core)
    name(core, [A], 500)
    lose(core, FIRST, 1000)
    now_ns = 1000
    while effects := core.advance(now_ns := core.next_deadline() or now_ns):
        if effects == [forgotten(A, now_ns - 1000)]:
            break
        assert effects == [AskWho(place=A)]
        fail(core, A, "nobody", now_ns)
    assert 1200 <= now_ns <= 1240
    assert core.values() == ()


def test_a_place_that_an_option_names_after_a_tool_is_not_forgotten() -> None:
    core = Introductions(FORGETFUL)
    name(core, [A], 0)
    fail(core, A, "nobody", 0)
    name(core, [A], 5, is_kept=True)
    core.advance(10)
    fail(core, A, "nobody", 10)
    assert core.advance(10_000) == [AskWho(place=A)]


def test_what_is_told_of_the_engine_at_a_forgotten_place_concerns_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduction, "PLACES_MAX", 1)
    core = named(A)
    answer(core, A, FIRST, 0)
    core.advance(132)
    assert name(core, [B], 133) == [forgotten(A, 133), AskWho(place=B)]
    assert core.advance(1000) == [], "its pause has ended with it"
    assert connect(core, FIRST, 1000) == lose(core, FIRST, 1000) == []
    assert (core.get(A), state(core, B)) == (None, State.ASKING)


def test_nothing_is_kept_of_places_that_were_displaced_nor_of_engines_that_were_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reaches the control socket may name places without end, and each start of an engine draws an id."""
    monkeypatch.setattr(introduction, "PLACES_MAX", 1)
    core = Introductions(LIMITS)
    for number in range(100):
        now_ns = 1000 * number
        place = f"p{number}:5600"
        assert AskWho(place=place) in name(core, [place], now_ns)
        met(core, place, (f"engine {number}", (1, 1, 1)), now_ns)
        lose(core, (f"engine {number}", (1, 1, 1)), now_ns)
    kept = [core._values, core._of_engine, core._pausing_since_ns, core._unmet_since_ns, core._timers, core._kept]
    assert max(map(len, kept)) == 1


def test_what_is_not_an_event_of_it_is_refused() -> None:
    with pytest.raises(TypeError):
        named(A).handle(introduction.PauseOver(), 0)


def test_a_named_place_that_a_request_has_met_is_not_forgotten() -> None:
    core = Introductions(FORGETFUL)
    name(core, [A], 0)
    met(core)
    lose(core, FIRST, 100)
    connect(core, FIRST, 101)
    assert core.advance(10_000) == []
    assert state(core) is State.MET


def test_a_new_place_displaces_the_one_that_is_unmet_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduction, "PLACES_MAX", 3)
    core = named(A)
    name(core, [KEPT], 0, is_kept=True)
    name(core, [B], 1)
    for place in (A, KEPT, B):
        fail(core, place, "nobody", 2)
    assert name(core, ["c:5600"], 3) == [forgotten(A, 3), AskWho(place="c:5600")]
    assert name(core, ["d:5600"], 4) == [forgotten(B, 3), AskWho(place="d:5600")]
    fail(core, "c:5600", "nobody", 5)
    fail(core, "d:5600", "nobody", 5)
    name(core, ["c:5600"], 6)
    assert name(core, ["e:5600"], 7) == [forgotten("d:5600", 3), AskWho(place="e:5600")], "c was named again"
    assert len(core.values()) == 3


def test_places_that_are_met_or_asked_or_kept_are_not_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduction, "PLACES_MAX", 3)
    core = named(A, B)
    name(core, [KEPT], 0, is_kept=True)
    fail(core, KEPT, "nobody", 0)
    met(core, B, SECOND)
    assert name(core, ["c:5600"], 5) == []
    assert core.get("c:5600") is None
    assert answer(core, A, FIRST, 5, is_own=True) == []
    assert name(core, ["c:5600"], 6) == [forgotten(A, 6), AskWho(place="c:5600")], "its own address is worth nothing"


def test_one_message_does_not_displace_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduction, "PLACES_MAX", 2)
    core = Introductions(LIMITS)
    places = [f"p{number}:5600" for number in range(4)]
    assert name(core, places, 0) == [AskWho(place=place) for place in places[:2]]


def test_two_addresses_of_one_engine_are_met_together() -> None:
    core = named(A, B)
    answer(core, A, FIRST, 0)
    answer(core, B, FIRST, 0)
    connect(core, FIRST, 1)
    assert (state(core, A), state(core, B)) == (State.MET, State.MET)
    lose(core, FIRST, 2)
    assert core.advance(12) == [AskWho(place=A), AskWho(place=B)]
