"""Computations that are run in pieces: with pauses, one at a time, and none of it lost."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from connector.clock import NS_PER_SECOND
from connector.layout.steps import Steps, finish
from connector.runtime.pace import PIECE_COUNTED_NS_MAX, PIECE_NS, SHARE, Pace

STEP_NS = PIECE_NS // 4


class Worked:
    """A clock of what was computed, on top of trio's."""

    def __init__(self) -> None:
        self.computed_ns = 0

    def now_ns(self) -> int:
        return round(trio.current_time() * NS_PER_SECOND) + self.computed_ns

    def wall(self) -> float:
        return 0.0

    def compute(self, steps: int, log: list[str] | None = None, name: str = "") -> Steps[str]:
        for _ in range(steps):
            self.computed_ns += STEP_NS
            if log is not None:
                log.append(name)
            yield
        return f"{name} {steps}"


async def _run(steps: int, clock: Worked) -> float:
    """How long `steps` were paused, in nanoseconds."""
    began = trio.current_time()
    assert await Pace(clock).run(clock.compute(steps)) == f" {steps}"
    return (trio.current_time() - began) * NS_PER_SECOND


def test_what_is_short_is_not_held_up() -> None:
    assert trio.run(_run, 3, Worked(), clock=MockClock(autojump_threshold=0)) == 0


def test_what_is_long_takes_its_share() -> None:
    paused = trio.run(_run, 400, Worked(), clock=MockClock(autojump_threshold=0))
    assert paused == pytest.approx(400 * STEP_NS * (SHARE - 1), rel=0.02)


@pytest.mark.parametrize(("apart_ns", "pauses"), [(0, 10), (STEP_NS * SHARE, 0)])
def test_many_short_ones_share_a_piece(apart_ns: int, pauses: int) -> None:
    """Forty of a quarter of a piece each, one after another or with enough time in between."""

    async def forty() -> float:
        clock = Worked()
        pace, paused = Pace(clock), 0.0
        for _ in range(40):
            await trio.sleep(apart_ns / NS_PER_SECOND)
            began = trio.current_time()
            await pace.run(clock.compute(1))
            paused += trio.current_time() - began
        return paused * NS_PER_SECOND

    paused = trio.run(forty, clock=MockClock(autojump_threshold=0))
    assert round(paused / (PIECE_NS * (SHARE - 1))) == pauses


def test_one_at_a_time_in_the_order_in_which_they_asked() -> None:
    log: list[str] = []

    async def three() -> None:
        clock = Worked()
        pace = Pace(clock)
        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(pace.run, clock.compute(10, log, name))
                await trio.testing.wait_all_tasks_blocked()

    trio.run(three, clock=MockClock(autojump_threshold=0))
    assert log == ["a"] * 10 + ["b"] * 10 + ["c"] * 10


def test_what_it_raises_is_raised_and_the_next_one_runs() -> None:
    def refuse() -> Steps[str]:
        yield
        raise ValueError("refused")

    async def both() -> str:
        clock = Worked()
        pace = Pace(clock)
        with pytest.raises(ValueError, match="refused"):
            await pace.run(refuse())
        return await pace.run(clock.compute(2))

    assert trio.run(both, clock=MockClock(autojump_threshold=0)) == " 2"


def test_a_cancelled_one_is_given_up_at_its_pause() -> None:
    log: list[str] = []

    async def cancelled() -> str:
        clock = Worked()
        pace = Pace(clock)
        with trio.move_on_after(1e-9):
            await pace.run(clock.compute(100, log))
        return await pace.run(clock.compute(1))

    assert trio.run(cancelled, clock=MockClock(autojump_threshold=0)) == " 1"
    assert len(log) == PIECE_NS // STEP_NS


def test_a_suspended_machine_does_not_pause_for_as_long_again() -> None:
    async def suspended() -> float:
        clock = Worked()

        def steps() -> Steps[str]:
            clock.computed_ns += 3600 * NS_PER_SECOND
            yield
            return "awake"

        began = trio.current_time()
        assert await Pace(clock).run(steps()) == "awake"
        return (trio.current_time() - began) * NS_PER_SECOND

    paused = trio.run(suspended, clock=MockClock(autojump_threshold=0))
    assert paused == pytest.approx(PIECE_COUNTED_NS_MAX * (SHARE - 1))


def test_finish_runs_all_of_it() -> None:
    clock, log = Worked(), list[str]()
    assert finish(clock.compute(7, log, "x")) == "x 7"
    assert log == ["x"] * 7
