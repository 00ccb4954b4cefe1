"""The clock of the connector: which one it is, and how seconds become nanoseconds."""

from __future__ import annotations

import math
import time

import pytest

from connector.clock import CLOCK_ID, NS_PER_SECOND, BootClock, Clock, seconds_until, to_ns


@pytest.mark.parametrize(
    ("seconds", "nanoseconds"),
    [(0.0, 0), (1e-9, 1), (0.3, 300_000_000), (30, 30 * NS_PER_SECOND), (-0.5, -500_000_000)],
)
def test_seconds_become_whole_nanoseconds(seconds: float, nanoseconds: int) -> None:
    assert to_ns(seconds) == nanoseconds


@pytest.mark.parametrize(
    ("deadline_ns", "seconds"), [(None, math.inf), (2 * NS_PER_SECOND, 1.5), (NS_PER_SECOND // 2, 0.0), (0, 0.0)]
)
def test_what_is_over_is_not_waited_for_and_what_never_comes_for_ever(deadline_ns: int | None, seconds: float) -> None:
    assert seconds_until(deadline_ns, NS_PER_SECOND // 2) == seconds


def test_the_clock_counts_while_the_machine_is_suspended() -> None:
    assert getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) == CLOCK_ID
    clock: Clock = BootClock()
    before_ns = time.clock_gettime_ns(CLOCK_ID)
    now_ns = clock.now_ns()
    assert before_ns <= now_ns <= time.clock_gettime_ns(CLOCK_ID)
    assert isinstance(now_ns, int)


def test_two_clocks_of_a_machine_agree_and_never_go_back() -> None:
    readings = [BootClock().now_ns() for _ in range(1000)]
    assert readings == sorted(readings)


def test_the_wall_clock_is_unix_time() -> None:
    assert abs(BootClock().wall() - time.time()) < 60
