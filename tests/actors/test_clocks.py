"""Two engines whose clocks disagree: nothing is believed that another process's clock says.

Scenario 77. Quartz drifts apart by 100 ppm; chrony slews a clock by up to 83,333 ppm; a machine that sleeps stops
CLOCK_MONOTONIC. A D whose clock stood still sees a P whose clock has leapt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import trio

from connector.config import ConnectorOptions
from connector.observe.event_log import WAIT_SAID_AFTER_SECONDS
from connector.ports.side_channel import Link
from connector.ports.zmq_bridge import ZmqSideChannel
from tests.actors.engines import HELD_SECONDS, LEASE_SECONDS, SteadyClock, WarpedClock, engine, lend_by_all, until
from tests.actors.test_in_flight import held_up, in_flight
from tests.actors.test_peers import is_served, reads
from tests.actors.test_pull import run

CHRONY = 0.083333
OPTIONS = ConnectorOptions(kv_lease_duration=0.4, lease_limit_seconds=7200.0)
THEIRS, NEXT_OWNER = 7, 99
LONG_SECONDS = 600.0
"""Of a lease beside which the time that a test itself takes is nothing."""


class SlowNetwork:
    """Between D and the control sockets that it connects: questions and answers are on their way for as long as a test
    wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.questions_left = 1 << 30
        """So many more reach P at once."""
        self.kept: list[tuple[Link, Sequence[bytes]]] = []
        """Questions that do not."""
        self.waiting = 0
        """Answers that have not reached D."""
        self._answers = trio.Event()
        self._answers.set()
        open_link = ZmqSideChannel.open_link

        async def open_slow(channel: ZmqSideChannel, *where: Any) -> Link:
            return SlowLink(await open_link(channel, *where), self)

        monkeypatch.setattr(ZmqSideChannel, "open_link", open_slow)

    def keep_answers(self) -> None:
        self._answers = trio.Event()

    def let_answers_pass(self) -> None:
        self._answers.set()

    def let_questions_pass(self) -> None:
        """Also those that were asked meanwhile."""
        self.questions_left = 1 << 30
        for link, frames in self.kept:
            link.send(frames)
        self.kept.clear()

    async def arrive(self) -> None:
        self.waiting += 1
        await self._answers.wait()
        self.waiting -= 1


@dataclass
class SlowLink:
    """A link over such a network."""

    link: Link
    network: SlowNetwork

    def send(self, frames: Sequence[bytes]) -> bool:
        if self.network.questions_left == 0:
            self.network.kept.append((self.link, frames))
            return True
        self.network.questions_left -= 1
        return self.link.send(frames)

    async def receive(self) -> tuple[bytes, ...]:
        frames = await self.link.receive()
        await self.network.arrive()
        return frames

    def close(self) -> None:
        self.link.close()


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


@pytest.mark.parametrize(
    ("rate_of_p", "rate_of_d", "margin_seconds", "way_of_the_answer_seconds"),
    [
        (1.0 + CHRONY, 1.0 - CHRONY, 0.0, 0.0),
        (1.0 + CHRONY, 1.0 - CHRONY, 60.0, 0.0),
        (1.0, 1.0, 0.0, 200.0),
    ],
    ids=["as far apart as chrony slews two clocks", "and P's is stepped besides", "the answer was long on its way"],
)
def test_a_read_that_ends_after_the_lease_is_not_proven_by_what_p_said_before(
    monkeypatch: pytest.MonkeyPatch,
    rate_of_p: float,
    rate_of_d: float,
    margin_seconds: float,
    way_of_the_answer_seconds: float,
) -> None:
    """P has said for how long it keeps the blocks, and then the two hear nothing from one another. A READ is held up
    until P has given the blocks to somebody else, which is as soon as it can be on D's clock. It has to be proven by
    another answer."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # which READs that P's process holds up

    async def test() -> None:
        network = SlowNetwork(monkeypatch)
        options = ConnectorOptions(
            kv_lease_duration=LONG_SECONDS,
            lease_margin_seconds=margin_seconds,
            lease_limit_seconds=7200.0,
            request_timeout_seconds=7200.0,
        )
        clocks = WarpedClock(rate_of_p), WarpedClock(rate_of_d)

        def go_on(seconds: float) -> None:
            for clock in clocks:
                clock.go_on(seconds)

        async with (
            engine("p", serves=True, options=options, clock=clocks[0]) as p,
            engine("d", options=options, clock=clocks[1]) as d,
        ):
            await reads(d, p, "before")
            await until(lambda: d.trace.path("hold", "remote-before/0")[-1:] == ["released"])
            p.memory[:] = THEIRS
            loan = lend_by_all([p], "remote-a")
            network.keep_answers()
            network.questions_left = 1
            d.wait_for("a", loan, p.address)
            await until(lambda: network.waiting == 1)
            go_on(way_of_the_answer_seconds)
            network.let_answers_pass()
            await until(lambda: d.trace.path("hold", "remote-a/0")[-1:] == ["held"])
            with held_up(p):
                d.borrow("a", loan, p.address, [4], [4])
                await in_flight(d, 1)
                clocks[0].leap(margin_seconds)
                go_on((LONG_SECONDS - margin_seconds) / rate_of_p - way_of_the_answer_seconds)
                lend_by_all([p], "remote-next")  # it looks at its clock
                assert (await until(lambda: p.sent("remote-a"))).expired
                p.memory[:] = NEXT_OWNER
                assert d.received("a") is None
            await until(lambda: d.trace.path("request", "a")[-1] != "reading")
            assert (d.blocks([4]) == NEXT_OWNER).all()
            assert d.trace.path("request", "a")[-1] == "proving"
            network.let_questions_pass()
            ended = await until(lambda: d.received("a"))
            assert ended.failure is not None
            assert d.trace.path("request", "a")[-1] == "expired"
            assert d.crashes == p.crashes == []

    run(test)


def test_a_lease_that_is_held_is_proven_whatever_the_rate_of_ps_clock() -> None:
    """For longer than it would last; then the blocks are read."""

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            for number, rate in enumerate((1.0 + CHRONY, 1.0, 1.0 - CHRONY)):
                nursery.start_soon(hold_and_read, number, rate)

    async def hold_and_read(number: int, rate: float) -> None:
        options, steady = ConnectorOptions(kv_lease_duration=LEASE_SECONDS), SteadyClock()
        trio.lowlevel.spawn_system_task(steady.tick)
        async with (
            engine(f"p{number}", serves=True, options=options, clock=WarpedClock(rate, steady)) as p,
            engine(f"d{number}", options=options, clock=steady) as d,
        ):
            await reads(d, p, "before")
            p.memory[:] = THEIRS
            loan = lend_by_all([p], "remote-a")
            d.wait_for("a", loan, p.address)
            await trio.sleep(HELD_SECONDS)
            assert p.sent("remote-a") is None, rate
            d.borrow("a", loan, p.address, [4], [4])
            ended = await until(lambda: d.received("a"))
            assert ended.failure is None, f"{rate}: {ended.failure}"
            assert (d.blocks([4]) == THEIRS).all(), rate
            assert not (await until(lambda: p.sent("remote-a"))).expired, rate

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
