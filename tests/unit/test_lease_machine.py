"""The lease machine on the prefill engine, against its specification.

The random search compares it, after every event, with a naive model that only counts: who has notified, what they said
how many there are, and the latest deadline. What matters most is that the blocks are freed exactly once, and never
before every consumer has spoken or the deadline has passed.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statemachine.kernel import Effect, Event, ProtocolError
from statemachine.lease import (
    MACHINE,
    ConsumerNotified,
    CountEarlyNotifications,
    DeadlinePassed,
    EarlyNotificationsCounted,
    FreeBlocks,
    Granted,
    Lease,
    Renewed,
    StartLeaseTimer,
    State,
    Withdrawn,
)

NEW = Lease(request_id="cmpl-1")
GRANTED = Granted(deadline_ns=100)


def notified(sender: str, expected: int) -> ConsumerNotified:
    return ConsumerNotified(sender=sender, expected=expected)


def run(lease: Lease, *events: Event) -> tuple[Lease, list[Effect]]:
    """Feed `events`; all effects in order. Early notifications are counted when the machine asks for it."""
    effects: list[Effect] = []
    for event in events:
        lease, more = MACHINE.step(lease, event)
        effects += more
        if CountEarlyNotifications() in more:
            lease, more = MACHINE.step(lease, EarlyNotificationsCounted())
            effects += more
    return lease, effects


HELD = run(NEW, GRANTED)[0]


# --- transitions ----------------------------------------------------------------------------------------------------


def test_a_grant_holds_the_blocks_until_the_deadline() -> None:
    lease, effects = run(NEW, GRANTED)
    assert (lease.state, lease.deadline_ns) == (State.HELD, 100)
    assert effects == [StartLeaseTimer(deadline_ns=100)]


def test_the_only_consumer_ends_it() -> None:
    lease, effects = run(HELD, notified("d", 1))
    assert (lease.state, effects) == (State.DONE, [FreeBlocks()])


def test_the_last_of_several_consumers_ends_it() -> None:
    lease, effects = run(HELD, notified("d0", 3), notified("d1", 3))
    assert (lease.state, effects) == (State.HELD, [])
    lease, effects = run(lease, notified("d2", 3))
    assert (lease.state, effects) == (State.DONE, [FreeBlocks()])


def test_a_sender_counts_once_however_often_it_speaks() -> None:
    lease, effects = run(HELD, *[notified("d0", 2)] * 5)
    assert (lease.state, effects) == (State.HELD, [])
    lease, effects = run(lease, notified("d1", 2))
    assert (lease.state, effects) == (State.DONE, [FreeBlocks()])


@pytest.mark.parametrize("numbers", [(1, 3, 1), (3, 1, 1), (2, 3, 2)])
def test_senders_that_disagree_are_resolved_to_the_largest_number(numbers: tuple[int, int, int]) -> None:
    lease, notifications = NEW, [notified(f"d{index}", expected) for index, expected in enumerate(numbers)]
    lease, effects = run(NEW, *notifications[:2], GRANTED)
    assert lease.state is State.HELD, "freed before the third consumer"
    lease, effects = run(lease, notifications[2])
    assert (lease.state, effects) == (State.DONE, [FreeBlocks()])


@pytest.mark.parametrize("expected", [0, -1])
def test_a_senseless_number_of_consumers_frees_nothing(expected: int) -> None:
    lease, effects = run(HELD, notified("d", expected))
    assert (lease.state, effects) == (State.HELD, [])


def test_a_notification_that_overtakes_the_grant_is_remembered() -> None:
    lease, effects = run(NEW, notified("d0", 2))
    assert (lease.state, effects) == (State.COMPUTING, [])
    lease, effects = run(lease, GRANTED)
    assert lease.state is State.HELD
    assert effects == [StartLeaseTimer(deadline_ns=100), CountEarlyNotifications()]
    lease, effects = run(lease, notified("d1", 2))
    assert (lease.state, effects) == (State.DONE, [FreeBlocks()])


def test_when_everybody_overtakes_the_grant_it_is_done_right_after_it() -> None:
    overtaken, _ = run(NEW, notified("d0", 2), notified("d1", 2))
    granted, effects = MACHINE.step(overtaken, GRANTED)
    assert granted.state is State.HELD, "only a held lease frees blocks"
    assert effects == (StartLeaseTimer(deadline_ns=100), CountEarlyNotifications())
    lease, effects = MACHINE.step(granted, EarlyNotificationsCounted())
    assert (lease.state, effects) == (State.DONE, (FreeBlocks(),))


def test_a_grant_that_nobody_overtook_counts_nothing() -> None:
    assert run(HELD, EarlyNotificationsCounted()) == (HELD, [])


def test_the_deadline_frees_the_blocks() -> None:
    lease, effects = run(HELD, DeadlinePassed(now_ns=100))
    assert (lease.state, effects) == (State.EXPIRED, [FreeBlocks()])


def test_an_early_timer_frees_nothing() -> None:
    assert run(HELD, DeadlinePassed(now_ns=99)) == (HELD, [])


def test_a_renewal_moves_the_deadline_later_and_starts_a_timer() -> None:
    lease, effects = run(HELD, Renewed(deadline_ns=300))
    assert (lease.deadline_ns, effects) == (300, [StartLeaseTimer(deadline_ns=300)])
    # The timer of the grant still fires.
    assert run(lease, DeadlinePassed(now_ns=100)) == (lease, [])
    lease, effects = run(lease, DeadlinePassed(now_ns=300))
    assert (lease.state, effects) == (State.EXPIRED, [FreeBlocks()])


@pytest.mark.parametrize("deadline_ns", [0, 99, 100])
def test_a_renewal_never_moves_the_deadline_earlier(deadline_ns: int) -> None:
    assert run(HELD, Renewed(deadline_ns=deadline_ns)) == (HELD, [])


def test_a_renewal_before_the_grant_means_nothing() -> None:
    assert run(NEW, Renewed(deadline_ns=900), GRANTED) == run(NEW, GRANTED)


def test_a_request_that_ends_without_lending_frees_nothing() -> None:
    lease, effects = run(NEW, notified("d", 1), Withdrawn(), notified("d", 1), GRANTED)
    assert (lease.state, effects) == (State.RELEASED, [])


def test_an_abort_after_the_grant_takes_nothing_back() -> None:
    # Somebody may be reading: consumers or the deadline end it.
    assert run(HELD, Withdrawn()) == (HELD, [])


@pytest.mark.parametrize("event", [DeadlinePassed(now_ns=1), EarlyNotificationsCounted()])
def test_nothing_is_due_before_the_grant(event: Event) -> None:
    with pytest.raises(ProtocolError, match="precedes the grant"):
        MACHINE.step(NEW, event)


def test_a_request_finishes_once() -> None:
    with pytest.raises(ProtocolError, match="finishes once"):
        MACHINE.step(HELD, Granted(deadline_ns=500))


@pytest.mark.parametrize("end", [notified("d", 1), DeadlinePassed(now_ns=100)])
def test_what_comes_after_the_end_frees_nothing_again(end: Event) -> None:
    ended, _ = run(HELD, end)
    late: list[Event] = [notified("e", 1), Renewed(deadline_ns=900), DeadlinePassed(now_ns=900), Withdrawn(), GRANTED]
    late.append(EarlyNotificationsCounted())
    assert run(ended, *late) == (ended, [])


# --- random histories -----------------------------------------------------------------------------------------------

_senders = st.sampled_from(["d0", "d1", "d2", "d3"])
_expected = st.integers(0, 4)


class LeaseAgainstModel(RuleBasedStateMachine):
    """The model: a grant, a dict of what each sender said, a deadline."""

    @initialize()
    def start(self) -> None:
        self.lease = NEW
        self.now_ns = 0
        self.granted = False
        self.withdrawn = False
        self.said: dict[str, int] = {}
        self.deadline_ns = 0
        self.ended_as: State | None = None
        self.timers: list[int] = []
        self.freed = 0

    def feed(self, event: Event) -> None:
        before = self.lease
        self.lease, effects = MACHINE.step(before, event)
        for effect in effects:
            match effect:
                case FreeBlocks():
                    assert before.state is State.HELD
                    self.freed += 1
                case CountEarlyNotifications():
                    self.feed(EarlyNotificationsCounted())
                case StartLeaseTimer(deadline_ns=deadline_ns):
                    self.timers.append(deadline_ns)

    def settle(self) -> None:
        expected = max(self.said.values(), default=0)
        if self.granted and self.ended_as is None and 0 < expected <= len(self.said):
            self.ended_as = State.DONE

    @precondition(lambda self: not self.granted)
    @rule(lease_ns=st.integers(1, 100))
    def grant(self, lease_ns: int) -> None:
        if not self.withdrawn:
            self.granted = True
            self.deadline_ns = self.now_ns + lease_ns
        self.feed(Granted(deadline_ns=self.now_ns + lease_ns))
        self.settle()

    @rule(sender=_senders, expected=_expected)
    def notify(self, sender: str, expected: int) -> None:
        if not self.withdrawn and self.ended_as is None:
            self.said[sender] = max(expected, self.said.get(sender, 0))
        self.feed(notified(sender, expected))
        self.settle()

    @rule(lease_ns=st.integers(1, 100))
    def renew(self, lease_ns: int) -> None:
        if self.granted and self.ended_as is None:
            self.deadline_ns = max(self.deadline_ns, self.now_ns + lease_ns)
        self.feed(Renewed(deadline_ns=self.now_ns + lease_ns))

    @rule()
    def withdraw(self) -> None:
        self.withdrawn = self.withdrawn or not self.granted
        self.feed(Withdrawn())

    @rule(step_ns=st.integers(1, 60))
    def pass_time(self, step_ns: int) -> None:
        """Timers fire when they are due, and each one once."""
        self.now_ns += step_ns
        due = [timer for timer in self.timers if timer <= self.now_ns]
        self.timers = [timer for timer in self.timers if timer > self.now_ns]
        for _ in due:
            if self.ended_as is None and self.now_ns >= self.deadline_ns:
                self.ended_as = State.EXPIRED
            self.feed(DeadlinePassed(now_ns=self.now_ns))

    @invariant()
    def it_is_where_the_model_is(self) -> None:
        if self.withdrawn:
            assert self.lease.state is State.RELEASED
        elif self.ended_as is not None:
            assert self.lease.state is self.ended_as
        else:
            assert self.lease.state is (State.HELD if self.granted else State.COMPUTING)

    @invariant()
    def freed_exactly_when_granted_and_ended(self) -> None:
        assert self.freed == (1 if self.granted and self.ended_as is not None else 0)

    @invariant()
    def a_held_lease_has_a_timer_at_its_deadline(self) -> None:
        if self.lease.state is State.HELD:
            assert self.lease.deadline_ns == self.deadline_ns
            assert self.deadline_ns in self.timers

    def teardown(self) -> None:
        if hasattr(self, "lease") and self.lease.state is State.HELD:
            self.pass_time(self.deadline_ns - self.now_ns)
            assert MACHINE.is_terminal(self.lease)
            assert self.freed == 1


TestLeaseAgainstModel = LeaseAgainstModel.TestCase
TestLeaseAgainstModel.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


_times_ns = st.integers(0, 200)
ANY_EVENT: st.SearchStrategy[Event] = st.one_of(
    st.builds(Granted, deadline_ns=_times_ns),
    st.builds(notified, st.text(max_size=2), st.integers(-2, 5)),
    st.builds(Renewed, deadline_ns=_times_ns),
    st.builds(DeadlinePassed, now_ns=_times_ns),
    st.sampled_from([Withdrawn(), EarlyNotificationsCounted()]),
)


@given(events=st.lists(ANY_EVENT, max_size=30))
@settings(max_examples=500, deadline=None)
def test_no_sequence_of_events_breaks_the_machine(events: list[Event]) -> None:
    lease, freed, was_held = NEW, 0, False
    for event in events:
        try:
            after, effects = MACHINE.step(lease, event)
        except ProtocolError:
            after, effects = lease, ()
        freed += effects.count(FreeBlocks())
        was_held = was_held or (lease.state is State.COMPUTING and isinstance(event, Granted))
        assert after.consumers >= lease.consumers
        assert after.expected >= lease.expected
        if lease.deadline_ns is not None:
            assert after.deadline_ns is not None
            assert after.deadline_ns >= lease.deadline_ns
        lease = after
    assert freed == (1 if was_held and MACHINE.is_terminal(lease) else 0)


@given(order=st.permutations(["d0", "d1", "d2", "d0", "d2"]), grant_at=st.integers(0, 5))
@settings(deadline=None)
def test_the_order_of_notifications_and_grant_does_not_matter(order: list[str], grant_at: int) -> None:
    events: list[Event] = [notified(sender, 3) for sender in order]
    events.insert(grant_at, GRANTED)
    lease, effects = run(NEW, *events)
    assert lease.state is State.DONE
    assert effects.count(FreeBlocks()) == 1
