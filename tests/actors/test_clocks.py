"""Two engines whose clocks disagree: nothing is believed that another process's clock says.

Scenario 77. Quartz drifts apart by 100 ppm; chrony slews a clock by up to 83,333 ppm; a machine that sleeps stops
CLOCK_MONOTONIC. A D whose clock stood still sees a P whose clock has leapt.
"""

from __future__ import annotations

import pytest
import trio

from connector.config import ConnectorOptions
from connector.observe.event_log import WAIT_SAID_AFTER_SECONDS
from tests.actors.engines import HELD_SECONDS, LEASE_SECONDS, WarpedClock, engine, lend_by_all, until
from tests.actors.test_peers import is_served, reads
from tests.actors.test_pull import run

CHRONY = 0.083333
OPTIONS = ConnectorOptions(kv_lease_duration=0.4, lease_limit_seconds=7200.0)
THEIRS, NEXT_OWNER = 7, 99


@pytest.mark.parametrize(
    ("rate", "idle_seconds", "leap_seconds"),
    [(1.0, 0.1, 3600.0), (1.0, 0.1, 100e-6 * 4 * 86400), (1.0 + CHRONY, 3.0, 0.0)],
    ids=["D was suspended for an hour", "four idle days at 100 ppm", "chrony slews P's clock"],
)
def test_a_lease_that_has_ended_is_never_proven_by_clocks_that_drifted_apart(
    rate: float, idle_seconds: float, leap_seconds: float
) -> None:
    async def test() -> None:
        clock = WarpedClock(rate)
        async with engine("p", serves=True, options=OPTIONS, clock=clock) as p, engine("d", options=OPTIONS) as d:
            await is_served(d, p, "before")
            p.memory[:] = THEIRS
            await trio.sleep(idle_seconds)
            clock.leap(leap_seconds)
            loan = lend_by_all([p], "remote-a")
            await until(lambda: p.sent("remote-a"))
            p.memory[:] = NEXT_OWNER
            d.borrow("a", loan, p.address, [4], [4])
            ended = await until(lambda: d.received("a"))
            assert ended.failure is not None, f"done, with bytes {set(d.blocks([4]).flatten().tolist())}"
            assert d.trace.path("request", "a")[-1] == "expired"

    run(test)


@pytest.mark.parametrize("rate", [1.0 + CHRONY, 1.0, 1.0 - CHRONY])
def test_a_lease_that_is_held_is_proven_whatever_the_rate_of_ps_clock(rate: float) -> None:
    """For longer than it would last; then the blocks are read."""

    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
        clock = WarpedClock(rate)
        async with engine("p", serves=True, options=options, clock=clock) as p, engine("d", options=options) as d:
            await reads(d, p, "before")
            p.memory[:] = THEIRS
            loan = lend_by_all([p], "remote-a")
            d.wait_for("a", loan, p.address)
            await trio.sleep(HELD_SECONDS)
            assert p.sent("remote-a") is None
            d.borrow("a", loan, p.address, [4], [4])
            ended = await until(lambda: d.received("a"))
            assert ended.failure is None, str(ended.failure)
            assert (d.blocks([4]) == THEIRS).all()
            assert not (await until(lambda: p.sent("remote-a"))).expired

    run(test)


def test_a_lease_is_held_at_once_when_the_next_deadline_passed_while_the_machine_was_suspended() -> None:
    """trio's clock stands still meanwhile, so the task of the peer's actor sleeps on when its time has come."""

    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=60.0)
        clock = WarpedClock()
        async with engine("p", serves=True, options=options) as p, engine("d", options=options, clock=clock) as d:
            await reads(d, p, "before")
            d.wait_for("waiting", lend_by_all([p], "remote-waiting"), p.address)  # its next hold is due within 30 s
            await until(lambda: d.trace.path("hold", "remote-waiting/0")[-1:] == ["held"])
            # Longer than it would have waited to ask again, had P not answered, and to say that the request is queued.
            await trio.sleep(WAIT_SAID_AFTER_SECONDS + 0.5)
            clock.leap(40.0)
            loan = lend_by_all([p], "remote-a")
            d.borrow("a", loan, p.address, [4], [4])
            ended = await until(lambda: d.received("a"), seconds=15.0)
            assert ended.failure is None, str(ended.failure)

    run(test)
