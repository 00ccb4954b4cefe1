"""One lease as a decode rank knows it, against its specification: what is proven, and what is owed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statemachine.hold import (
    MACHINE,
    Assumed,
    GiveUp,
    GoneAtPeer,
    HeldByPeer,
    Hold,
    Reconnected,
    ReleaseConfirmed,
    SayReleased,
    State,
    Unwanted,
)
from statemachine.kernel import Effect, Event, ProtocolError
from statemachine.lease import LeaseName

NEW = Hold(lease=LeaseName("r", 1), rank=0)
GONE = GoneAtPeer(why="expired")


def held(until_ns: int) -> HeldByPeer:
    return HeldByPeer(proven_until_ns=until_ns)


def run(value: Hold, *events: Event) -> tuple[Hold, list[Effect]]:
    """Feed `events`; all effects in order."""
    effects: list[Effect] = []
    for event in events:
        value, more = MACHINE.step(value, event)
        effects += more
    return value, effects


def after(*events: Event) -> Hold:
    return run(NEW, *events)[0]


def test_nothing_is_proven_before_p_has_spoken() -> None:
    assert (NEW.state, NEW.proven_until_ns) == (State.WANTED, -1)


def test_an_answer_proves_until_its_end() -> None:
    assert run(NEW, held(100)) == (Hold(lease=NEW.lease, rank=0, state=State.HELD, proven_until_ns=100), [])


@pytest.mark.parametrize("answers", [(100, 300, 200), (300, 100, 200), (200, 100, 300)])
def test_answers_that_overtake_each_other_take_nothing_back(answers: tuple[int, int, int]) -> None:
    assert after(*map(held, answers)).proven_until_ns == 300


@pytest.mark.parametrize("before", [(), (held(100),), (Assumed(until_ns=100),)])
def test_what_p_does_not_keep_is_gone_and_owed_nothing(before: tuple[Event, ...]) -> None:
    value, effects = run(after(*before), GONE)
    assert (value.state, value.why, effects) == (State.GONE, "expired", [])


def test_what_is_gone_never_comes_back() -> None:
    gone = after(held(100), GONE)
    for event in (held(900), Assumed(until_ns=900), Reconnected(), Unwanted(), ReleaseConfirmed(), GiveUp()):
        assert run(gone, event) == (gone, [])


@pytest.mark.parametrize("before", [(), (held(100),), (Assumed(until_ns=100),)])
@pytest.mark.parametrize("end", [ReleaseConfirmed(), GiveUp(), GONE])
def test_the_release_is_owed_until_p_knows_or_the_lease_must_be_over(before: tuple[Event, ...], end: Event) -> None:
    value, effects = run(after(*before), Unwanted())
    assert (value.state, effects) == (State.RELEASING, [SayReleased()])
    assert run(value, held(900), Assumed(until_ns=900), Reconnected()) == (value, [])
    value, effects = run(value, end)
    assert (value.state, effects) == (State.RELEASED, [])


@pytest.mark.parametrize("before", [held(100), Assumed(until_ns=100)])
def test_a_new_connection_proves_nothing_by_what_the_last_one_said(before: Event) -> None:
    """P may have restarted under its engine id: the next life has the addresses, and not the lease."""
    assert run(after(before), Reconnected()) == (NEW, [])
    assert after(before, Reconnected(), held(70)).proven_until_ns == 70


def test_a_built_in_engine_is_assumed_to_hold() -> None:
    value = after(Assumed(until_ns=100))
    assert (value.state, value.proven_until_ns) == (State.ASSUMED, 100)
    assert run(value, held(900)) == (value, [])


@pytest.mark.parametrize("event", [ReleaseConfirmed(), GiveUp()])
@pytest.mark.parametrize("before", [(), (held(100),), (Assumed(until_ns=100),)])
def test_nothing_is_confirmed_that_was_not_said(before: tuple[Event, ...], event: Event) -> None:
    with pytest.raises(ProtocolError, match="only what is owed"):
        MACHINE.step(after(*before), event)


def test_the_last_user_lets_go_once() -> None:
    with pytest.raises(ProtocolError, match="no users"):
        MACHINE.step(after(Unwanted()), Unwanted())


class HoldUnderLawfulCore(RuleBasedStateMachine):
    """A core that keeps its promises: it lets go once, and confirms only what it has said. Answers come at any time."""

    @initialize()
    def start(self) -> None:
        self.hold = NEW
        self.has_let_go = False
        self.proven_ns = -1
        self.said = 0

    def feed(self, event: Event) -> None:
        before = self.hold
        self.hold, effects = MACHINE.step(before, event)
        self.said += effects.count(SayReleased())
        if MACHINE.is_terminal(before):
            assert (self.hold, effects) == (before, ())

    @rule(until_ns=st.integers(0, 1000))
    def answer_held(self, until_ns: int) -> None:
        if self.hold.state in (State.WANTED, State.HELD):
            self.proven_ns = max(self.proven_ns, until_ns)
        self.feed(held(until_ns))

    @rule()
    def answer_gone(self) -> None:
        self.feed(GONE)

    @rule(until_ns=st.integers(0, 1000), is_builtin=st.booleans())
    def connect_anew(self, until_ns: int, is_builtin: bool) -> None:
        if self.hold.state is not State.RELEASING:
            self.proven_ns = -1
        self.feed(Reconnected())
        if is_builtin:
            if self.hold.state is State.WANTED:
                self.proven_ns = until_ns
            self.feed(Assumed(until_ns=until_ns))

    @precondition(lambda self: not self.has_let_go)
    @rule()
    def let_go(self) -> None:
        self.has_let_go = True
        if not MACHINE.is_terminal(self.hold):
            self.feed(Unwanted())

    @precondition(lambda self: self.hold.state is State.RELEASING)
    @rule(event=st.sampled_from([ReleaseConfirmed(), GiveUp()]))
    def end(self, event: Event) -> None:
        self.feed(event)

    @invariant()
    def proven_is_what_this_connection_has_said(self) -> None:
        if self.hold.state in (State.WANTED, State.HELD, State.ASSUMED):
            assert self.hold.proven_until_ns == self.proven_ns

    @invariant()
    def released_at_most_once_and_only_when_let_go(self) -> None:
        assert self.said == (1 if self.hold.state in (State.RELEASING, State.RELEASED) else 0)
        assert self.has_let_go or self.hold.state not in (State.RELEASING, State.RELEASED)


TestHoldUnderLawfulCore = HoldUnderLawfulCore.TestCase
TestHoldUnderLawfulCore.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)
