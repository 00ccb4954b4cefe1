"""The timer queue against a naive model: a dict of deadlines, sorted whenever somebody asks."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from connector.runtime import timers
from connector.runtime.clock import NS_PER_SECOND
from connector.runtime.timers import TimerQueue

_keys = st.integers(0, 7)


class TimersAgainstModel(RuleBasedStateMachine):
    """`model[key]` is (deadline, number of the set call); the second decides among those that fall due together."""

    @initialize()
    def start(self) -> None:
        self.timers: TimerQueue[int] = TimerQueue()
        self.model: dict[int, tuple[int, int]] = {}
        self.set_calls = 0
        self.now_ns = 0

    @rule(key=_keys, delay_ns=st.integers(-50, 200))
    def set_timer(self, key: int, delay_ns: int) -> None:
        self.set_calls += 1
        self.model[key] = (self.now_ns + delay_ns, self.set_calls)
        self.timers.set(key, self.now_ns + delay_ns)

    @rule(key=_keys)
    def cancel_timer(self, key: int) -> None:
        self.model.pop(key, None)
        self.timers.cancel(key)

    @rule(step_ns=st.integers(0, 100))
    def pop_due(self, step_ns: int) -> None:
        self.now_ns += step_ns
        due = sorted((when, key) for key, when in self.model.items() if when[0] <= self.now_ns)
        for _, key in due:
            del self.model[key]
        assert self.timers.pop_due(self.now_ns) == [key for _, key in due]

    @invariant()
    def same_next_deadline(self) -> None:
        deadlines_ns = [deadline_ns for deadline_ns, _ in self.model.values()]
        next_seconds = self.timers.seconds_to_next(self.now_ns)
        if deadlines_ns:
            assert next_seconds == max(0, min(deadlines_ns) - self.now_ns) / NS_PER_SECOND
        else:
            assert next_seconds == math.inf

    @invariant()
    def same_keys(self) -> None:
        assert len(self.timers) == len(self.model)
        assert all((key in self.timers) == (key in self.model) for key in range(8))

    def teardown(self) -> None:
        if hasattr(self, "timers"):
            self.pop_due(1000)
            assert len(self.timers) == 0
            assert self.timers.pop_due(self.now_ns) == []


TestTimersAgainstModel = TimersAgainstModel.TestCase
TestTimersAgainstModel.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


class TimersRebuiltOften(TimersAgainstModel):
    """The same, with a heap that is rebuilt from its first stale entries on."""

    @initialize()
    def start(self) -> None:
        super().start()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(timers, "_REBUILD_AT", 2)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "patch"):
            self.patch.undo()


TestTimersRebuiltOften = TimersRebuiltOften.TestCase
TestTimersRebuiltOften.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


def test_keys_that_cannot_be_compared_may_fall_due_together() -> None:
    # Keys of an actor are strings and tuples; the heap must never compare them.
    queue: TimerQueue[object] = TimerQueue()
    queue.set(("lease", "a"), 5)
    queue.set("backoff", 5)
    queue.set(None, 5)
    assert queue.pop_due(5) == [("lease", "a"), "backoff", None]


def test_timers_that_are_moved_for_ever_do_not_pile_up() -> None:
    # A heartbeat moves its timer once per interval for as long as the process lives.
    queue: TimerQueue[int] = TimerQueue()
    for deadline_ns in range(100_000):
        queue.set(deadline_ns % 10, deadline_ns)
    assert len(queue._heap) <= 2 * timers._REBUILD_AT
    assert queue.pop_due(100_000) == list(range(10))


def test_timers_that_are_cancelled_do_not_pile_up() -> None:
    # Each request sets a deadline far ahead and cancels it when it is done, long before.
    queue: TimerQueue[int] = TimerQueue()
    for request in range(100_000):
        queue.set(request, 10**12)
        queue.cancel(request)
    assert len(queue) == 0
    assert len(queue._heap) <= 2 * timers._REBUILD_AT
    assert queue.seconds_to_next(0) == math.inf
