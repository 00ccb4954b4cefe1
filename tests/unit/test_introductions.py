"""Engines that are met before a request needs them: who is asked when, what is said, and what is met again."""

from __future__ import annotations

import pytest

from statemachine import introduction
from statemachine.introduction import AskWho, IntroductionLimits, Introductions, Meet, SayFailed, State
from statemachine.kernel import Effect

LIMITS = IntroductionLimits(pause_first_ns=10, pause_max_ns=40, meeting_ns=100)
A, B = "a:5600", "b:5600"
FIRST, SECOND = ("first", (1, 1, 1)), ("second", (1, 1, 1))


def named(*places: str) -> Introductions:
    core = Introductions(LIMITS)
    assert core.name(places, 0) == [AskWho(place=place) for place in places]
    return core


def state(core: Introductions, place: str = A) -> State:
    value = core.get(place)
    assert value is not None
    return value.state


def met(core: Introductions, place: str = A, engine: object = FIRST, now_ns: int = 0) -> None:
    assert core.answered(place, engine, now_ns) == [Meet(place=place, engine=engine)]
    assert core.connected(engine, now_ns) == []
    assert state(core, place) is State.MET


def test_whoever_is_named_is_asked_at_once_and_connected() -> None:
    core = named(A, B)
    met(core, A, FIRST)
    met(core, B, SECOND)
    assert core.next_deadline() is None, "nothing is left to do"


def test_pauses_double_up_to_a_bound_and_a_problem_is_said_once_until_it_is_met() -> None:
    core, now_ns, pauses = named(A), 0, []
    said: list[Effect] = []
    for _ in range(5):
        said += core.failed(A, "nobody", now_ns)
        due_ns = core.next_deadline()
        assert due_ns is not None
        assert core.advance(due_ns - 1) == []
        assert core.advance(due_ns) == [AskWho(place=A)]
        pauses.append(due_ns - now_ns)
        now_ns = due_ns
    assert pauses == [10, 20, 40, 40, 40]
    assert said == [SayFailed(place=A, problem="nobody")]
    met(core, now_ns=now_ns)
    core.lost(FIRST, now_ns)
    assert core.advance(now_ns + 10) == [AskWho(place=A)], "the first pause again"
    assert core.failed(A, "nobody", now_ns + 10) == [SayFailed(place=A, problem="nobody")]


def test_one_that_answers_and_is_not_connected_in_time_is_tried_again() -> None:
    core = named(A)
    core.answered(A, FIRST, 0)
    assert core.advance(99) == []
    assert core.advance(100) == [SayFailed(place=A, problem=introduction.NOT_CONNECTED)]
    assert core.advance(110) == [AskWho(place=A)]


def test_who_has_taken_its_place_is_met() -> None:
    """Another engine id at the same address; the end of the old one's connection is no news any more."""
    core = named(A)
    met(core)
    core.lost(FIRST, 5)
    assert core.advance(15) == [AskWho(place=A)]
    met(core, A, SECOND, 15)
    assert core.lost(FIRST, 16) == core.connected(FIRST, 16) == []
    assert state(core) is State.MET
    core.lost(SECOND, 20)
    assert state(core) is State.PAUSING


def test_an_engine_that_a_request_has_met_is_met() -> None:
    core = named(A)
    met(core)
    core.lost(FIRST, 0)
    assert core.connected(FIRST, 1) == []
    assert (state(core), core.next_deadline()) == (State.MET, None)


def test_this_engine_itself_is_left_alone() -> None:
    core = named(A)
    assert core.answered(A, FIRST, 0, is_own=True) == []
    assert (state(core), core.next_deadline()) == (State.OWN, None)
    assert core.name([A], 5) == core.connected(FIRST, 5) == []


def test_who_is_named_again_is_asked_at_once_if_it_waits() -> None:
    core = named(A)
    core.failed(A, "nobody", 0)
    assert core.name([A], 1) == [AskWho(place=A)]
    assert core.name([A], 2) == [], "it is being asked"
    met(core, now_ns=3)
    assert core.name([A], 4) == []


def test_places_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduction, "PLACES_MAX", 1)
    core = named(A)
    assert core.name([B], 0) == []
    assert core.get(B) is None
    assert len(core.values()) == 1


def test_two_addresses_of_one_engine_are_met_together() -> None:
    core = named(A, B)
    core.answered(A, FIRST, 0)
    core.answered(B, FIRST, 0)
    core.connected(FIRST, 1)
    assert (state(core, A), state(core, B)) == (State.MET, State.MET)
    core.lost(FIRST, 2)
    assert core.advance(12) == [AskWho(place=A), AskWho(place=B)]
