"""The deadlines of a core against a naive model: a dict, sorted whenever somebody asks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from statemachine import deadlines
from statemachine.deadlines import Deadlines, earliest

_keys = st.integers(0, 7)


def take_all(due: Deadlines[object], now_ns: int) -> list[object]:
    taken = []
    while (key := due.take_due(now_ns)) is not None:
        taken.append(key)
    return taken


class DeadlinesAgainstModel(RuleBasedStateMachine):
    """`model[key]` is (deadline, number of the set call); the second decides among those that fall due together."""

    @initialize()
    def start(self) -> None:
        self.due: Deadlines[int] = Deadlines()
        self.model: dict[int, tuple[int, int]] = {}
        self.set_calls = 0
        self.now_ns = 0

    @rule(key=_keys, delay_ns=st.integers(-50, 200))
    def set(self, key: int, delay_ns: int) -> None:
        self.set_calls += 1
        self.model[key] = (self.now_ns + delay_ns, self.set_calls)
        self.due.set(key, self.now_ns + delay_ns)

    @rule(key=_keys)
    def cancel(self, key: int) -> None:
        self.model.pop(key, None)
        self.due.cancel(key)

    @rule(step_ns=st.integers(0, 100))
    def take(self, step_ns: int) -> None:
        """One of them, as a core does before it handles it."""
        self.now_ns += step_ns
        due = sorted((when, key) for key, when in self.model.items() if when[0] <= self.now_ns)
        taken = self.due.take_due(self.now_ns)
        assert taken == (due[0][1] if due else None)
        if taken is not None:
            del self.model[taken]

    @rule()
    def copy(self) -> None:
        """What happens to the original afterwards does not concern the copy."""
        original = self.due
        self.due = original.copy()
        original.clear()

    @invariant()
    def same_next_deadline(self) -> None:
        assert self.due.next_ns() == min((at_ns for at_ns, _ in self.model.values()), default=None)

    @invariant()
    def same_keys(self) -> None:
        assert len(self.due) == len(self.model)
        for key in range(8):
            assert (key in self.due) == (key in self.model)
            assert self.due.get(key) == (self.model[key][0] if key in self.model else None)

    @invariant()
    def frozen_relative_to_now(self) -> None:
        expected = {(key, max(0, at_ns - self.now_ns)) for key, (at_ns, _) in self.model.items()}
        assert self.due.freeze(self.now_ns) == expected

    def teardown(self) -> None:
        if hasattr(self, "due"):
            in_order = [key for key, _ in sorted(self.model.items(), key=lambda item: item[1])]
            assert take_all(self.due, self.now_ns + 1000) == in_order
            assert self.due.next_ns() is None


TestDeadlinesAgainstModel = DeadlinesAgainstModel.TestCase
TestDeadlinesAgainstModel.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


class DeadlinesRebuiltOften(DeadlinesAgainstModel):
    """The same, with a heap that is rebuilt from its first stale entries on."""

    @initialize()
    def start(self) -> None:
        super().start()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(deadlines, "_REBUILD_FROM", 2)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "patch"):
            self.patch.undo()


TestDeadlinesRebuiltOften = DeadlinesRebuiltOften.TestCase
TestDeadlinesRebuiltOften.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize(
    ("one_ns", "other_ns", "expected_ns"), [(None, None, None), (5, None, 5), (None, 5, 5), (5, 6, 5), (6, 5, 5)]
)
def test_of_two_deadlines_the_earlier_one_counts_if_there_are_both(
    one_ns: int | None, other_ns: int | None, expected_ns: int | None
) -> None:
    assert earliest(one_ns, other_ns) == expected_ns


def test_keys_that_cannot_be_compared_may_fall_due_together() -> None:
    # Keys of a core are tuples of a word and whatever it concerns; the heap must never compare them.
    due: Deadlines[object] = Deadlines()
    for key in (("lease", "a"), ("backoff", None), ("grace", 1)):
        due.set(key, 5)
    assert take_all(due, 5) == [("lease", "a"), ("backoff", None), ("grace", 1)]


def test_who_raises_while_handling_one_finds_the_others_still_due() -> None:
    """Scenario 76."""
    due: Deadlines[object] = Deadlines()
    for key in "abc":
        due.set(key, 1)
    assert due.take_due(1) == "a"
    # Whoever handles "a" raises here, and is called again later.
    assert due.next_ns() == 1
    assert take_all(due, 1) == ["b", "c"]


def test_deadlines_that_are_moved_for_ever_do_not_pile_up() -> None:
    # A renewal moves its deadline once per interval for as long as the process lives.
    due: Deadlines[int] = Deadlines()
    for at_ns in range(100_000):
        due.set(at_ns % 10, at_ns)
    assert len(due._heap) <= 2 * deadlines._REBUILD_FROM
    assert take_all(due, 100_000) == list(range(10))


def test_deadlines_that_are_cancelled_do_not_pile_up() -> None:
    # Each request sets a deadline far ahead and cancels it when it is done, long before.
    due: Deadlines[int] = Deadlines()
    for request in range(100_000):
        due.set(request, 10**12)
        due.cancel(request)
    assert len(due) == 0
    assert len(due._heap) <= 2 * deadlines._REBUILD_FROM
    assert due.next_ns() is None
