"""How often the agent's thread looks at READs of which nothing comes any more, as from a peer that hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest

from connector.ports.nixl_agent import thread as agent_thread
from connector.ports.nixl_agent.thread import AgentThread
from tests.rig.patience import PATIENCE_SECONDS

FASTER = 200
"""Times as fast as the real one the clock goes that says how long nothing has moved; pauses are real."""


class HangingCore:
    """An agent with READs in flight that never end, or with the first READ from a peer."""

    def __init__(self, *, reads: int, first_reads: int) -> None:
        self.reads = dict.fromkeys(range(reads))
        self.first_reads = dict.fromkeys(range(first_reads))
        self.errored: dict[int, None] = {}
        self.looked_at = reads + first_reads
        self.ends: list[object] = []

    def poll_reads(self) -> list[object]:
        ended, self.ends = self.ends, []
        return ended

    def poll_notifications(self) -> list[object]:
        return []

    def tidy(self) -> list[object]:
        return []

    def leak(self) -> None:
        return


class Clock:
    """Of which a test says how fast it goes. No poll takes processor time by it."""

    def __init__(self) -> None:
        self._rate, self._began, self._before = FASTER, time.monotonic(), 0.0

    def go(self, rate: int) -> None:
        self._before, self._began, self._rate = self.monotonic(), time.monotonic(), rate

    def monotonic(self) -> float:
        return self._before + (time.monotonic() - self._began) * self._rate

    def thread_time(self) -> float:
        return 0.0


def polls_a_second(thread: AgentThread) -> float:
    began, before = time.monotonic(), thread.turns
    time.sleep(0.5)
    return (thread.turns - before) / (time.monotonic() - began)


def polls_often(thread: AgentThread) -> bool:
    """More than thrice as often as where nothing is expected. A machine that stands still for a while hides it for as
    long; a thread that makes long pauses never does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (is_often := polls_a_second(thread) > 3 / agent_thread.PAUSE_IDLE_SECONDS_MAX):
        if time.monotonic() > deadline:
            break
    return is_often


@pytest.mark.parametrize(("reads", "first_reads"), [(1, 0), (0, 1)])
def test_what_hangs_for_long_is_looked_at_less_and_less(
    reads: int, first_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = HangingCore(reads=reads, first_reads=first_reads)
    clock = Clock()
    monkeypatch.setattr(agent_thread, "time", clock)

    def make_core() -> Any:
        return core

    told: list[object] = []
    thread = AgentThread(make_core, "hanging", told.extend, lambda: 0)
    thread.open(60.0 * FASTER, lambda seconds: None)
    try:
        time.sleep(0.5)  # nothing for a hundred seconds
        # Three are for a thread that gets its core late, or twice.
        assert polls_a_second(thread) <= 3 / agent_thread.PAUSE_IDLE_SECONDS_MAX
        thread.expect_notifications(True)
        assert polls_often(thread), "which are noticed as soon as before"
        thread.expect_notifications(False)
        clock.go(1)
        core.ends.append("an end of another READ")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not told:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert told == ["an end of another READ"]
        assert polls_often(thread), "something moves"
    finally:
        thread.close(0.0)
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
