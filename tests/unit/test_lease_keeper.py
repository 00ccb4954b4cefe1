"""The executor of the `Lending` core: what comes in reaches the core, what it says is done, a bug costs one message."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio
import trio.testing

from connector.clock import NS_PER_SECOND, BootClock, Clock, to_ns
from connector.config import ConnectorOptions, parse_options
from connector.observe.catalogue import LATE_NOTIFICATIONS, STRAY_RELEASES, TURNED_AWAY
from connector.observe.log import root_cause
from connector.ports.side_channel import DECODED_BYTES_PER_UNIT, SENT_BYTES_PER_UNIT, Link, ListenerCounts, Request
from connector.ports.zmq_bridge import ZmqListener, ZmqSideChannel
from connector.protocol import (
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    SendEnded,
    WorkerEvent,
)
from connector.runtime import lease_keeper
from connector.runtime.context import WorkerContext
from connector.runtime.figures import Figures
from connector.runtime.lease_keeper import (
    LEASES_PER_TURN_MAX,
    MALFORMED_UNITS,
    MESSAGE_UNITS,
    NOTIFICATION_BYTES_PER_LEASE,
    LeaseKeeper,
    lending_limits,
)
from connector.runtime.restarts import RESTART_DELAY_SECONDS_MAX, keep_running
from connector.wire.administration import Leave, LeaveTaken, MeetReport, decode_leave_taken
from connector.wire.bounded import shorten
from connector.wire.control import (
    REQUEST_BYTES_MAX,
    SUMS_PART_BYTES,
    AskSums,
    ControlAnswer,
    ControlRequest,
    Hold,
    HoldAnswer,
    LeaseSums,
    Leaving,
    Release,
    Released,
    Sums,
    decode_answer,
    encode_request,
    encode_sums,
)
from connector.wire.inspection import Inspect
from statemachine.failures import ConsumerUnknown, Failure, MessageMalformed, NotificationsDropped
from statemachine.kernel import Event
from statemachine.lease import LEASES_PER_MESSAGE_MAX, Lease, LeaseName, State
from statemachine.trace import StepSeen
from tests.observer import observer_of
from tests.rig.facts import LEAVE_SECRET

HOST = "127.0.0.1"
LEASE_SECONDS = 9.0
LIMIT_SECONDS = 60.0
OPTIONS = ConnectorOptions(kv_lease_duration=LEASE_SECONDS, lease_limit_seconds=LIMIT_SECONDS)

ODD_IDS = ["HB:x", "HB:", "a,b", ",", "a:7", "cmpl-7,0-1"]


class TrioClock:
    """Trio's, which a test may run ahead."""

    def now_ns(self) -> int:
        return to_ns(1000 + trio.current_time())

    def wall(self) -> float:
        return 0.0


SILENCE = SimpleNamespace(receive=trio.sleep_forever)
"""A control socket to which nobody sends anything."""


class Rank:
    """A lease keeper, and everything that it tells."""

    def __init__(self, clock: Clock, control: Any = SILENCE, options: ConnectorOptions = OPTIONS) -> None:
        self.events: list[WorkerEvent] = []
        self.failures: list[Failure] = []
        self.crashes: list[str] = []
        self.figures = Figures()
        self._counts: Counter[str] = Counter()
        self.is_watching: list[bool] = []
        self.steps: list[tuple[Any, str, str]] = []
        self.values: dict[Any, Lease] = {}
        self.breaks_on: type[WorkerEvent] | None = None
        """The next event of this type is lost in a crash."""
        self.says_late: list[Callable[[], object]] = []
        """What the engine has said and has not reached the keeper."""
        self.breaks_at: str | None = None
        """The next step of the lease of this request is."""
        recorder = SimpleNamespace(observer=lambda core, log: observer_of(self._observe), catch_up=lambda: None)
        unused: Any = None
        worker = WorkerContext(
            options=options,
            local=unused,
            draw_name=unused,
            nixl_port=cast(Any, SimpleNamespace(expect_notifications=self.is_watching.append, agent_name="p-agent")),
            side_channel=unused,
            clock=clock,
            recorder=cast(Any, recorder),
            figures=self.figures,
            emit=self._emit,
            log_failure=lambda subject, failure: self.failures.append(failure),
            log_crash=lambda task, error: self.crashes.append(f"{task}: {error}"),
            event_log=cast(Any, SimpleNamespace(observer_of_lease=lambda where: None)),
        )
        self.keeper = LeaseKeeper(
            worker,
            ids_repeat=False,
            control=control,
            leave_secret=LEAVE_SECRET,
            deliver_posted=self._deliver_said,
            inspect=lambda question, reply_to: None,
            meet=lambda message: (MeetReport(rows=()), 0),
        )
        self._core_step = self.keeper._core._step
        self.keeper._core._step = self._step  # type: ignore[method-assign]

    def _step(self, name: LeaseName, event: Event) -> None:
        if self.breaks_at == name.request_id:
            self.breaks_at = None
            raise RuntimeError("injected")
        self._core_step(name, event)

    def _deliver_said(self) -> None:
        while self.says_late:
            self.says_late.pop(0)()

    def _emit(self, event: WorkerEvent) -> None:
        if self.breaks_on is not None and isinstance(event, self.breaks_on):
            self.breaks_on = None
            raise RuntimeError("injected")
        self.events.append(event)

    def _observe(self, now_ns: int, steps: list[StepSeen]) -> None:
        for _, subject, before, event, after in steps:
            self.steps.append((subject, type(event).__name__ if before is not None else "Created", after.state.value))
            self.values[subject] = after

    def lend(self, name: str, number: int = 1, blocks: int = 1) -> LeaseName:
        lease = LeaseName(name, number)
        self.keeper.deliver(LeaseComputing(lease=lease))
        self.keeper.deliver(LeaseGranted(lease=lease, blocks=blocks))
        return lease

    def ended(self) -> dict[str, bool]:
        """By request id: whether it expired."""
        ended = [each for each in self.events if isinstance(each, SendEnded)]
        assert len({each.lease.request_id for each in ended}) == len(ended), "a lease has ended twice"
        return {each.lease.request_id: each.expired for each in ended}

    def renewals(self) -> int:
        return sum(event == "Renewed" for _, event, _ in self.steps)

    def stray(self) -> int:
        return self._counted()[STRAY_RELEASES.key()]

    def late(self) -> int:
        return self._counted()[LATE_NOTIFICATIONS.key()]

    def turned_away(self) -> dict[str, int]:
        """By where and why."""
        found = {"|".join(values): self._counted()[TURNED_AWAY.key(*values)] for values in TURNED_AWAY.series}
        return {where_and_why: count for where_and_why, count in found.items() if count}

    def _counted(self) -> Counter[str]:
        if (taken := self.figures.take()) is not None:
            self._counts.update(taken.counts)
        return self._counts


@asynccontextmanager
async def running(rank: Rank) -> Any:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rank.keeper.run)
        yield rank
        nursery.cancel_scope.cancel()


def run_ahead(test: Callable[[Rank], Awaitable[None]], **settings: Any) -> Rank:
    """Run a test beside a keeper, on a clock that leaps over every wait."""
    made: list[Rank] = []

    async def main() -> None:
        made.append(Rank(TrioClock(), **settings))
        async with running(made[0]) as rank:
            await test(rank)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return made[0]


async def turn() -> None:
    """Until the keeper has handled what it was told."""
    await trio.testing.wait_all_tasks_blocked()


# --- commands and deadlines -------------------------------------------------------------------------------------------


def test_what_is_lent_ends_at_its_deadline() -> None:
    async def test(rank: Rank) -> None:
        rank.lend("a", blocks=7)
        await trio.sleep(LEASE_SECONDS - 0.01)
        assert rank.ended() == {}
        await trio.sleep(0.02)
        assert rank.ended() == {"a": True}
        assert rank.keeper.leases() == ()

    rank = run_ahead(test)
    assert [step[1:] for step in rank.steps] == [
        ("Created", "computing"),
        ("Granted", "held"),
        ("DeadlinePassed", "expired"),
    ]
    assert rank.values[LeaseName("a", 1)].blocks == 7
    assert rank.crashes == []


def test_what_is_withdrawn_frees_nothing() -> None:
    async def test(rank: Rank) -> None:
        lease = LeaseName("a", 1)
        rank.keeper.deliver(LeaseComputing(lease=lease))
        rank.keeper.deliver(LeaseWithdrawn(lease=lease))
        await trio.sleep(2 * LEASE_SECONDS)
        assert rank.events == []
        assert rank.values[lease].state is State.WITHDRAWN

    run_ahead(test)


def test_nothing_is_kept_of_a_lease_that_the_engine_has_freed_by_itself() -> None:
    async def test(rank: Rank) -> None:
        former, again = LeaseName("a", 1), LeaseName("a", 2)
        for lease in (former, again):
            rank.keeper.deliver(LeaseComputing(lease=lease))
            granted = LeaseGranted(lease=lease, blocks=1, sums=lease.number.to_bytes())
            rank.keeper.deliver(granted)
        await turn()
        assert rank.values[former].state is State.SUPERSEDED
        assert rank.keeper._sums == {again: b"\x02"}
        rank.keeper.notify("d", b"a:1")
        await turn()
        assert rank.ended() == {"a": False}
        assert rank.keeper._sums == {}

    run_ahead(test)


def test_notifications_are_watched_while_anything_is_lent() -> None:
    async def test(rank: Rank) -> None:
        rank.lend("a")
        rank.lend("b")
        await turn()
        assert rank.is_watching == [True]
        rank.keeper.notify("d", b"a:1")
        await turn()
        assert rank.is_watching == [True]
        rank.keeper.notify("d", b"b:1")
        await turn()
        assert rank.is_watching == [True, False]

    run_ahead(test)


def test_heartbeats_keep_a_lease_and_not_for_ever() -> None:
    """Each for two thirds of its duration, as the built-in connector counts; in all for lease_limit_seconds."""

    async def test(rank: Rank) -> None:
        rank.lend("a")
        start = trio.current_time()
        while not rank.ended():
            rank.keeper.notify("d", b"HB:a,b")
            await trio.sleep(LEASE_SECONDS / 2)
            assert trio.current_time() < start + 2 * LIMIT_SECONDS, "a reader that never reads pins the blocks"
        assert LIMIT_SECONDS <= trio.current_time() - start < LIMIT_SECONDS + LEASE_SECONDS

    run_ahead(test)


def test_limits_come_from_the_options() -> None:
    limits = lending_limits(parse_options({"kv_lease_duration": 9}, {}))
    assert (limits.lease_ns, limits.heartbeat_ns, limits.total_ns) == (to_ns(9), to_ns(6), to_ns(900))


def test_a_keeper_that_is_run_again_goes_on_where_it_was() -> None:
    async def main() -> None:
        rank = Rank(TrioClock())
        async with running(rank):
            rank.lend("a")
            await trio.sleep(1)
        rank.lend("b")
        await trio.sleep(1)
        async with running(rank):
            await trio.sleep(LEASE_SECONDS + 1)
        assert rank.ended() == {"a": True, "b": True}

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_what_is_due_when_this_process_has_stood_still_was_not_lost() -> None:
    """The core hears first what was said meanwhile; for that long it is no bug that it has ended nothing."""

    class Clock(TrioClock):
        stood_still_ns = 0

        def now_ns(self) -> int:
            return super().now_ns() + self.stood_still_ns

    async def main() -> None:
        clock = Clock()
        rank = Rank(clock)
        async with running(rank):
            await trio.sleep(rank.keeper._look_ns / NS_PER_SECOND - 1)
            rank.lend("a")
            await trio.sleep(2)  # one look has seen it
            clock.stood_still_ns = 2 * rank.keeper._look_ns
            await trio.sleep(2 * LEASE_SECONDS)
        assert rank.crashes == []
        assert rank.ended() == {"a": True}
        assert [step[1:] for step in rank.steps][-1] == ("DeadlinePassed", "expired")

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# --- floods and crashes -----------------------------------------------------------------------------------------------


def test_a_flood_of_notifications_costs_no_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 7: a grant that is lost is a lease without a timer, blocks that never come back."""
    monkeypatch.setattr(lease_keeper, "NOTIFICATIONS_WAITING_MAX", 1000)

    async def test(rank: Rank) -> None:
        for flood in range(3):
            for _ in range(1500):
                rank.keeper.notify("stranger", b"?")
            rank.lend(f"lent-{flood}")
        assert rank.keeper.notifications_dropped == 3500
        await turn()
        rank.keeper.notify("d", b"lent-0:1")
        await turn()
        assert rank.ended() == {"lent-0": False}, "there is room for notifications again"
        await trio.sleep(LEASE_SECONDS + 1)
        assert rank.ended() == {"lent-0": False, "lent-1": True, "lent-2": True}

    rank = run_ahead(test)
    dropped = [each.dropped for each in rank.failures if isinstance(each, NotificationsDropped)]
    assert dropped == [2**exponent for exponent in range(12)], "few lines, and each says how many"
    assert sum(isinstance(each, MessageMalformed) for each in rank.failures) == 1000
    assert rank.turned_away() == {"notifications|dropped": 3500, "notifications|malformed": 1000}


def test_notifications_that_wait_have_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_keeper, "NOTIFICATION_BYTES_WAITING_MAX", 10_000)

    async def test(rank: Rank) -> None:
        for dropped in (5, 10):
            for _ in range(15):
                rank.keeper.notify("stranger", bytes(1000))
            assert rank.keeper.notifications_dropped == dropped
            rank.lend(f"lent-{dropped}")
            await turn()
        rank.keeper.notify("d", b"lent-5:1")
        await turn()
        assert rank.ended() == {"lent-5": False}, "there is room for notifications again"
        assert len(rank.keeper.leases()) == 1, "and no grant was lost"

    rank = run_ahead(test)
    dropped = [each.dropped for each in rank.failures if isinstance(each, NotificationsDropped)]
    assert dropped == [1, 2, 4, 8]


def test_a_flood_does_not_keep_other_tasks_waiting() -> None:
    messages = 20 * lease_keeper.MESSAGES_PER_TURN_MAX

    async def test(rank: Rank) -> None:
        for _ in range(messages):
            rank.keeper.notify("stranger", b"?")
        turns = 0
        while len(rank.failures) < messages:
            await trio.lowlevel.checkpoint()
            turns += 1
        assert turns >= 20

    run_ahead(test)


def heartbeat(number: int) -> bytes:
    """Of many requests that are not lent, and of one that is."""
    return b",".join([b"HB:", *(b"%d-%d" % (number, each) for each in range(LEASES_PER_TURN_MAX)), b"a"])


@pytest.mark.parametrize(
    "make",
    [heartbeat, lambda number: b"\xff" * LEASES_PER_TURN_MAX * NOTIFICATION_BYTES_PER_LEASE],
    ids=["heartbeats", "long ones that are none"],
)
def test_few_messages_that_name_many_leases_do_not_either(make: Callable[[int], bytes]) -> None:
    messages = [make(number) for number in range(20)]

    async def test(rank: Rank) -> None:
        rank.lend("a")
        await turn()
        for message in messages:
            rank.keeper.notify("stranger", message)
        turns = 0
        while len(rank.failures) + rank.renewals() < len(messages):
            await trio.lowlevel.checkpoint()
            turns += 1
        assert turns >= len(messages)

    run_ahead(test)


class SilentListener:
    """Nothing comes, and answers go nowhere."""

    async def receive(self) -> Request:
        await trio.sleep_forever()
        raise AssertionError

    def reply(self, address: bytes, frames: Any) -> None:
        pass


def test_holds_of_many_leases_do_not_either() -> None:
    """The control socket may hand over more than one message before the keeper has its turn."""
    a_turn = LEASES_PER_TURN_MAX // LEASES_PER_MESSAGE_MAX

    async def test(rank: Rank) -> None:
        leases = [rank.lend("a"), *(LeaseName(f"{number}", 1) for number in range(LEASES_PER_MESSAGE_MAX - 1))]
        await turn()
        hold = Hold(engine_id="d", rank=0, ranks=1, sent_ns=5, leases=tuple(leases))
        for _ in range(20 * a_turn):
            rank.keeper._inbox.put(lease_keeper._control_event(hold, b""))
        turns = 0
        while sum(event == "Held" for _, event, _ in rank.steps) < 20 * a_turn:
            await trio.lowlevel.checkpoint()
            turns += 1
        assert turns >= 20
        assert rank.crashes == []

    run_ahead(test, control=SilentListener())


def test_a_heartbeat_renews_a_lease_once_however_often_it_names_it() -> None:
    async def test(rank: Rank) -> None:
        rank.lend("a")
        rank.lend("b")
        await turn()
        rank.keeper.notify("stranger", b"HB:" + b"a,b," * 10_000)
        await turn()
        assert rank.renewals() == 2

    run_ahead(test)


def test_a_crash_with_one_effect_costs_no_other() -> None:
    """Case 8: all are due before any of them is looked at."""

    async def test(rank: Rank) -> None:
        for number in range(6):
            rank.lend(f"lent-{number}")
        rank.breaks_on = SendEnded
        await trio.sleep(LEASE_SECONDS + 1)
        assert len(rank.ended()) == 5
        assert rank.crashes == ["lease keeper: injected"]

    run_ahead(test)


def test_a_crash_with_one_message_costs_no_other() -> None:
    async def test(rank: Rank) -> None:
        rank.lend("before")
        rank.breaks_at = "broken"
        rank.keeper.deliver(LeaseWithdrawn(lease=rank.lend("broken")))
        rank.lend("after")
        await trio.sleep(LEASE_SECONDS + 1)
        assert rank.ended().keys() >= {"before", "after"}
        assert rank.crashes == ["lease keeper: injected"]

    run_ahead(test)


def test_a_crash_with_one_deadline_costs_no_other() -> None:
    async def test(rank: Rank) -> None:
        for name in ("a", "b", "c"):
            rank.lend(name)
        await turn()
        rank.breaks_at = "b"
        await trio.sleep(LEASE_SECONDS + 1)
        assert rank.ended().keys() >= {"a", "c"}
        assert rank.crashes == ["lease keeper: injected"]

    run_ahead(test)


def test_the_end_of_an_earlier_lease_of_the_same_id_is_not_that_of_the_later_one() -> None:
    """The book has the grant of the later one when the keeper comes to a release that was sent before."""

    async def test(rank: Rank) -> None:
        rank.lend("a", 1)
        await turn()
        rank.keeper.notify("d", b"a:1")
        again = rank.lend("a", 2)
        await turn()
        assert rank.ended() == {"a": False}
        rank.events.clear()
        rank.breaks_on = SendEnded
        await trio.sleep(LEASE_SECONDS + 1)
        assert rank.breaks_on is None
        assert rank.events == []
        await trio.sleep(2 * rank.keeper._look_ns / NS_PER_SECOND)
        assert rank.events == [SendEnded(lease=again, expired=True)]
        assert sum("was lost" in crash for crash in rank.crashes) == 1

    run_ahead(test)


# --- notifications ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ODD_IDS)
def test_a_release_is_one_whatever_the_request_is_called(request_id: str) -> None:
    """Case 11: the text of a release may begin as a heartbeat does."""

    async def test(rank: Rank) -> None:
        rank.lend(request_id)
        rank.keeper.notify("d", f"{request_id}:1".encode())
        await turn()
        assert rank.ended() == {request_id: False}
        assert rank.late() == 0

    run_ahead(test)


def test_a_heartbeat_is_one_although_it_could_be_a_release() -> None:
    async def test(rank: Rank) -> None:
        rank.lend("x:1")
        await trio.sleep(LEASE_SECONDS - 1)
        rank.keeper.notify("d", b"HB:x:1")
        await trio.sleep(2)
        assert rank.ended() == {}

    run_ahead(test)


def test_a_lease_ends_when_every_rank_of_a_builtin_reader_has_said_so_once() -> None:
    async def test(rank: Rank) -> None:
        rank.lend("a")
        for sender in ("d.0", "d.0", "d.1", "d.0"):
            rank.keeper.notify(sender, b"a:3")
        await turn()
        assert rank.ended() == {}
        rank.keeper.notify("d.2", b"a:3")
        await turn()
        assert rank.ended() == {"a": False}
        rank.keeper.notify("d.2", b"a:3")
        await turn()
        assert rank.late() == 0, "what was released by its readers is not released late by one of them"

    run_ahead(test)


def test_a_release_of_what_is_not_lent_any_more_is_counted() -> None:
    async def test(rank: Rank) -> None:
        rank.lend("a")
        await trio.sleep(LEASE_SECONDS + 1)
        rank.keeper.notify("d", b"a:1")
        rank.keeper.notify("d", b"never:1")
        await turn()
        assert (rank.late(), rank.stray()) == (1, 1)
        assert rank.failures == [
            ConsumerUnknown(sender="d", request_id="a"),
            ConsumerUnknown(sender="d", request_id="never"),
        ]

    run_ahead(test)


def test_what_is_no_notification_costs_a_line() -> None:
    async def test(rank: Rank) -> None:
        rank.lend("a")
        rank.keeper.notify("d", b"\xff")
        await turn()
        (failure,) = rank.failures
        assert isinstance(failure, MessageMalformed)
        assert (failure.sender, failure.detail) == ("d", "not UTF-8: b'\\xff'")
        assert rank.turned_away() == {"notifications|malformed": 1}
        assert rank.late() == 0

    run_ahead(test)


# --- the control socket, real -----------------------------------------------------------------------------------------


class Decoder:
    """A decode engine's end of the control socket, one message to a connection."""

    def __init__(self, channel: ZmqSideChannel, port: int) -> None:
        self._channel = channel
        self._port = port

    async def ask(self, message: ControlRequest) -> ControlAnswer:
        return decode_answer(await self.ask_raw(encode_request(message)))

    async def ask_raw(self, frames: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return await self._channel.connect(HOST, self._port).ask(frames)

    async def link(self) -> Link:
        """A connection that stays."""
        return await self._channel.open_link(HOST, self._port)

    async def hold(self, *leases: LeaseName, engine_id: str = "d", sent_ns: int = 5) -> HoldAnswer:
        answer = await self.ask(Hold(engine_id=engine_id, rank=0, ranks=1, sent_ns=sent_ns, leases=leases))
        assert isinstance(answer, HoldAnswer)
        return answer

    async def release(self, *leases: LeaseName, engine_id: str = "d") -> Released:
        answer = await self.ask(Release(engine_id=engine_id, rank=0, ranks=1, leases=leases))
        assert isinstance(answer, Released)
        return answer


def run_over_zmq(
    test: Callable[[Rank, Decoder], Awaitable[None]],
    *,
    wrap: Callable[[ZmqListener], Any] = lambda listener: listener,
    **settings: Any,
) -> None:
    async def main() -> None:
        channel = ZmqSideChannel()
        try:
            listener = channel.listen(HOST, 0, frame_bytes_max=REQUEST_BYTES_MAX)
            with trio.fail_after(60):
                async with running(Rank(BootClock(), wrap(listener), **settings)) as rank:
                    await test(rank, Decoder(channel, listener.port))
        finally:
            channel.close()

    trio.run(main)


def test_a_hold_is_answered_with_what_remains_or_why_nothing_does() -> None:
    async def test(rank: Rank, decoder: Decoder) -> None:
        began_ns = BootClock().now_ns()
        lease, unknown = rank.lend("a", 3), LeaseName("a", 4)
        answer = await decoder.hold(lease, unknown, sent_ns=12345)
        passed_ns = BootClock().now_ns() - began_ns
        assert answer.sent_ns == 12345
        (held,) = answer.held
        assert held.lease == lease
        assert to_ns(LEASE_SECONDS) - passed_ns <= held.remaining_ns <= to_ns(LEASE_SECONDS)
        (gone,) = answer.gone
        assert gone.lease == unknown
        assert "not lent here" in gone.why

    run_over_zmq(test)


def test_it_is_known_from_where_so_many_decode_engines_were_heard_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.runtime.lease_keeper.SENDERS_MAX", 3)

    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = rank.lend("a", 3)
        for engine_id in ("d1", "d2", "d3", "d1", "d4"):
            await decoder.hold(lease, engine_id=engine_id)
        await decoder.release(lease, engine_id="d5")
        heard = {each: rank.keeper.heard_from(each) for each in ("d1", "d2", "d3", "d4", "d5", "nobody")}
        assert heard == {"d1": HOST, "d2": "", "d3": "", "d4": HOST, "d5": HOST, "nobody": ""}
        assert not rank.keeper.is_connected("nobody")

    run_over_zmq(test)


def test_a_decode_engine_is_connected_while_one_of_its_ranks_is() -> None:
    """An operator who looks for the holder of a lease need not look for one that has ended."""

    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = rank.lend("a", 3)
        links = [await decoder.link() for _ in range(3)]
        for number, link in enumerate((*links[:2], links[2], links[2])):
            of_rank = min(number, 1)  # the second one connects again
            link.send(encode_request(Hold(engine_id="d", rank=of_rank, ranks=2, sent_ns=5, leases=(lease,))))
            await link.receive()
        links[1].close()
        links[0].close()
        await trio.sleep(0.2)
        assert rank.keeper.is_connected("d")
        links[2].close()
        with trio.fail_after(10):
            while rank.keeper.is_connected("d"):
                await trio.sleep(0.01)
        assert rank.keeper.heard_from("d") == HOST

    run_over_zmq(test)


def test_what_the_engine_has_said_counts_before_what_others_ask() -> None:
    """The prompt was computed and D has asked, while the engine kept the interpreter: D must not be told that there is
    no such lease."""

    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = LeaseName("a", 3)
        rank.says_late.append(lambda: rank.lend(*lease))
        assert (await decoder.hold(lease)).held
        other = LeaseName("b", 4)
        rank.says_late.append(lambda: rank.lend(*other))
        rank.keeper.notify("builtin", b"b:1")
        while rank.ended() != {"b": False}:
            await trio.sleep(0.01)

    run_over_zmq(test)


HELD_TIMES, HELD_EVERY_SECONDS = 6, 0.75
HELD_LEASE_SECONDS = 4.0
"""Shorter than all holds together."""


async def held_for_long(rank: Rank, decoder: Decoder, name: str) -> LeaseName | None:
    """A lease that is held still; None: the machine has stood still for longer than it lasts between two holds."""
    asked_at = trio.current_time()
    lease = rank.lend(name)
    for _ in range(HELD_TIMES):
        await trio.sleep(HELD_EVERY_SECONDS)
        before, asked_at = asked_at, trio.current_time()
        answer = await decoder.hold(lease)
        if not answer.held and trio.current_time() - before > HELD_LEASE_SECONDS:
            return None
        assert answer.held, answer.gone
    return lease


def test_a_lease_lives_for_as_long_as_it_is_held_and_is_gone_for_who_comes_too_late() -> None:
    assert HELD_TIMES * HELD_EVERY_SECONDS > HELD_LEASE_SECONDS

    async def test(rank: Rank, decoder: Decoder) -> None:
        names = map(str, itertools.count())
        while (lease := await held_for_long(rank, decoder, next(names))) is None:
            pass
        assert lease.request_id not in rank.ended()
        assert (await decoder.release(lease)).leases == (lease,)
        assert rank.ended()[lease.request_id] is False
        (gone,) = (await decoder.hold(lease, engine_id="another")).gone
        assert "released" in gone.why

    run_over_zmq(test, options=ConnectorOptions(kv_lease_duration=HELD_LEASE_SECONDS))


def test_a_lease_that_nobody_holds_ends_and_says_so() -> None:
    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = rank.lend("a")
        while not (ended := rank.ended()):
            await trio.sleep(0.01)
        assert ended == {"a": True}
        (gone,) = (await decoder.hold(lease)).gone
        assert gone.why == "expired"

    run_over_zmq(test, options=ConnectorOptions(kv_lease_duration=0.2))


def test_two_engines_hold_one_lease_until_both_have_released_it() -> None:
    """Case 2."""

    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = rank.lend("a")
        for engine_id in ("first", "second"):
            assert (await decoder.hold(lease, engine_id=engine_id)).held
        await decoder.release(lease, engine_id="first")
        assert rank.ended() == {}
        await decoder.release(lease, engine_id="second")
        assert rank.ended() == {"a": False}

    run_over_zmq(test)


def test_an_engine_that_leaves_says_so_unasked_to_those_who_have_held() -> None:
    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = rank.lend("a")
        channel = ZmqSideChannel()
        try:
            links = [await channel.open_link(HOST, decoder._port) for _ in range(2)]
            links[0].send(encode_request(Hold(engine_id="d", rank=0, ranks=1, sent_ns=5, leases=(lease,))))
            assert isinstance(decode_answer(await links[0].receive()), HoldAnswer)
            taken = decode_leave_taken(await decoder.ask_raw(encode_request(Leave(grace_ns=7, secret=LEAVE_SECRET))))
            assert taken == LeaveTaken(leases=1)
            assert decode_answer(await links[0].receive()) == Leaving(grace_ns=7)
            for link in links:
                link.send(encode_request(Release(engine_id="d", rank=0, ranks=1, leases=(lease,))))
                assert isinstance(decode_answer(await link.receive()), Released), "and nothing before it"
            assert rank.keeper._core._leaves_ns is not None
        finally:
            channel.close()

    run_over_zmq(test)


UNANSWERED_SECONDS = 0.2


async def unanswered(ask: Callable[[], Awaitable[object]], has_come: Callable[[], bool]) -> None:
    """Ask something that arrives, as `has_come` shows, and is not answered."""

    async def wait() -> None:
        await ask()
        raise AssertionError("it was answered")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        while not has_come():
            await trio.sleep(0.01)
        await trio.sleep(UNANSWERED_SECONDS)
        nursery.cancel_scope.cancel()


def test_only_its_own_engine_has_a_worker_leave() -> None:
    """A worker that left alone would end, at the end of each grace period, what its engine goes on to lend."""

    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = rank.lend("a")
        foreign = encode_request(Leave(grace_ns=7, secret=bytes(16)))
        await unanswered(lambda: decoder.ask_raw(foreign), lambda: bool(rank.failures))
        assert (await decoder.hold(lease)).held
        assert rank.keeper._core._leaves_ns is None
        [failure] = rank.failures
        assert isinstance(failure, MessageMalformed)
        assert "does not come from its engine" in failure.detail
        assert rank.turned_away() == {"control_socket|malformed": 1}

    run_over_zmq(test)


def test_a_release_that_is_sent_again_is_answered_again_and_is_not_late() -> None:
    """Case 11: the answer to the first one may have been lost."""

    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = rank.lend("a")
        for _ in range(3):
            assert (await decoder.release(lease)).leases == (lease,)
        assert rank.ended() == {"a": False}
        assert (rank.late(), rank.failures) == (0, [])

    run_over_zmq(test)


def test_a_reader_that_is_faster_than_the_engines_next_step_is_not_overlooked() -> None:
    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = LeaseName("a", 1)
        rank.keeper.deliver(LeaseComputing(lease=lease))
        assert (await decoder.hold(lease)).held
        await decoder.release(lease)
        assert rank.ended() == {}
        rank.keeper.deliver(LeaseGranted(lease=lease, blocks=1))
        await turn()
        assert rank.ended() == {"a": False}

    run_over_zmq(test)


@pytest.mark.parametrize(
    "frames",
    [(b"",), (b"\xc1",), (b"a", b"b"), (b"x" * (1 << 20),), (b"\x81\xa4type\xa3own",)],
    ids=["empty", "no msgpack", "two frames", "long", "unknown type"],
)
def test_what_is_no_message_gets_silence_and_costs_nothing(frames: tuple[bytes, ...]) -> None:
    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = rank.lend("a")
        await unanswered(lambda: decoder.ask_raw(frames), lambda: bool(rank.failures))
        assert (await decoder.hold(lease)).held
        assert [type(failure) for failure in rank.failures] == [MessageMalformed]
        assert shorten(str(rank.failures[0]), 500) == str(rank.failures[0]), "fit for a log"
        assert rank.crashes == []
        assert rank.turned_away() == {"control_socket|malformed": 1}

    run_over_zmq(test)


class BreakingListener:
    """Raises for the first messages, after it has taken them, and then for the first replies."""

    def __init__(self, listener: ZmqListener, *, receives: int = 0, replies: int = 0) -> None:
        self._listener = listener
        self.charged: list[tuple[int, bool]] = []
        self._receives = receives
        self._replies = replies

    @property
    def port(self) -> int:
        return self._listener.port

    async def receive(self) -> Request:
        request = await self._listener.receive()
        if self._receives:
            self._receives -= 1
            raise RuntimeError("injected")
        return request

    def reply(self, address: bytes, frames: Any) -> None:
        if self._replies:
            self._replies -= 1
            raise RuntimeError("injected")
        self._listener.reply(address, frames)

    def sender_of(self, address: bytes) -> str:
        return self._listener.sender_of(address)

    def charge(self, address: bytes, units: int, *, understood: bool = True) -> None:
        self.charged.append((units, understood))
        self._listener.charge(address, units, understood=understood)

    def counts(self) -> ListenerCounts:
        return self._listener.counts()

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize(
    ("broken", "logged_as"), [("receives", "control socket: injected"), ("replies", "lease keeper: injected")]
)
def test_a_crash_of_the_control_socket_is_logged_and_it_serves_on(broken: str, logged_as: str) -> None:
    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = rank.lend("a")
        for crash in range(1, 4):
            await unanswered(lambda: decoder.hold(lease), lambda: len(rank.crashes) == crash)  # noqa: B023
        assert (await decoder.hold(lease)).held
        assert rank.crashes == [logged_as] * 3

    run_over_zmq(test, wrap=lambda listener: BreakingListener(listener, **{broken: 3}))


class ChargedListener(BreakingListener):
    """Breaks nothing, and says what was charged for one message."""

    def take(self) -> tuple[int, bool]:
        """Units since the last time, and whether all that came was understood."""
        charged, self.charged = self.charged, []
        return sum(units for units, _ in charged), any(understood for _, understood in charged)


def run_charged(test: Callable[[Rank, Decoder, ChargedListener], Awaitable[None]]) -> None:
    listeners: list[ChargedListener] = []

    def wrap(listener: ZmqListener) -> ChargedListener:
        listeners.append(ChargedListener(listener))
        return listeners[0]

    run_over_zmq(lambda rank, decoder: test(rank, decoder, listeners[0]), wrap=wrap)


async def refused(rank: Rank, decoder: Decoder, message: bytes) -> None:
    """Until the rank has seen that this is none."""
    before = len(rank.failures)
    await unanswered(lambda: decoder.ask_raw((message,)), lambda: len(rank.failures) > before)


def test_who_sends_pays_for_each_lease_and_for_garbage() -> None:
    """The listener decides with that who is heard."""

    async def test(rank: Rank, decoder: Decoder, listener: ChargedListener) -> None:
        one, two = rank.lend("a"), rank.lend("b")
        await decoder.hold(one)
        assert listener.take() == (MESSAGE_UNITS + 1, True)
        await decoder.hold(one, two)
        assert listener.take() == (MESSAGE_UNITS + 2, True)
        await decoder.release(one)
        assert listener.take() == (MESSAGE_UNITS + 1, True)
        await refused(rank, decoder, b"garbage")
        assert listener.take() == (MALFORMED_UNITS, False)

    run_charged(test)


def test_who_sends_pays_for_the_length_of_what_is_sent() -> None:
    """A message that takes long to look at is not charged as a short one: neither one that is none, nor one in which
    there is more than is understood."""

    async def test(rank: Rank, decoder: Decoder, listener: ChargedListener) -> None:
        lease = rank.lend("a")
        length = REQUEST_BYTES_MAX - 1000
        await refused(rank, decoder, bytes(length))
        assert listener.take() == (MALFORMED_UNITS + length // DECODED_BYTES_PER_UNIT, False)
        (hold,) = encode_request(Hold(engine_id="d", rank=0, ranks=1, sent_ns=5, leases=(lease,)))
        (question,) = encode_request(Inspect(number=1, what="leases"))  # for whose answer the inspector charges
        for message, charged in ((hold, (MESSAGE_UNITS + 1, True)), (question, (0, False))):
            long = msgspec.msgpack.encode(msgspec.msgpack.decode(message) | {"later": bytes(length)})
            if message is hold:
                await decoder.ask_raw((long,))
            else:
                await unanswered(lambda: decoder.ask_raw((long,)), lambda: bool(listener.charged))  # noqa: B023
            assert listener.take() == (charged[0] + len(long) // DECODED_BYTES_PER_UNIT, charged[1])
        assert len(rank.failures) == 1

    run_charged(test)


def test_who_asks_for_checksums_pays_for_the_length_of_the_answer() -> None:
    """As on the side channel. Of a long prompt they are megabytes, and a question is a few bytes."""

    async def test(rank: Rank, decoder: Decoder, listener: ChargedListener) -> None:
        lease = LeaseName("a", 1)
        sums = encode_sums(LeaseSums(blocks=(b"1234",), sums=bytes(SUMS_PART_BYTES + 100_000)))
        granted = LeaseGranted(lease=lease, blocks=1, sums=sums)
        rank.keeper.deliver(granted)
        await decoder.hold(lease)
        listener.take()
        for part, length in ((0, SUMS_PART_BYTES), (1, 100_000)):
            answer = await decoder.ask(AskSums(lease=lease, part=part))
            assert isinstance(answer, Sums)
            assert listener.take() == (MESSAGE_UNITS + length // SENT_BYTES_PER_UNIT, True)
        await unanswered(lambda: decoder.ask(AskSums(lease=lease, part=2)), lambda: bool(listener.charged))
        assert listener.take() == (MESSAGE_UNITS, True)

    run_charged(test)


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_what_crashes_at_once_is_started_again_ever_more_slowly_and_for_ever() -> None:
    """More often than a float has powers of two."""
    starts: list[float] = []
    recovered: list[BaseException] = []

    async def crash() -> None:
        starts.append(trio.current_time())
        if len(starts) <= 1200:
            raise RuntimeError("injected")

    async def main() -> None:
        await keep_running("task", crash, lambda name, error: None, recovered.append)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    delays = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert len(delays) == len(recovered) == 1200
    assert [round(delay, 6) for delay in delays] == sorted(round(delay, 6) for delay in delays)
    assert 0 < delays[0] < 0.01
    assert delays[-1] == pytest.approx(RESTART_DELAY_SECONDS_MAX)


def test_what_crashes_and_is_cancelled_before_it_has_ended_takes_nobody_along() -> None:
    """As a peer actor that takes a connection back when the connector stops."""
    logged: list[tuple[str, BaseException]] = []

    async def take_back() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(2)

    async def crash() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_back)
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep(1)
            raise RuntimeError("injected")

    async def main() -> None:
        with trio.move_on_after(1.5) as stop:
            await keep_running("task", crash, lambda name, error: logged.append((name, root_cause(error))))
        assert stop.cancelled_caught

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert [(name, str(error)) for name, error in logged] == [("task", "injected")]


def test_what_has_worked_for_a_while_is_started_again_soon() -> None:
    starts: list[float] = []

    async def crash_sometimes() -> None:
        starts.append(trio.current_time())
        if len(starts) == 20:
            await trio.sleep(10)
        if len(starts) <= 20:
            raise RuntimeError("injected")

    async def main() -> None:
        await keep_running("task", crash_sometimes, lambda name, error: None)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert starts[19] - starts[18] == pytest.approx(RESTART_DELAY_SECONDS_MAX)
    assert starts[20] - starts[19] - 10 < 0.01


def test_checksums_are_told_while_a_lease_lasts() -> None:
    """Under its name, and under that without a number; not before it is lent, and nothing is kept of it afterwards."""

    async def test(rank: Rank, decoder: Decoder) -> None:
        lease = LeaseName("a", 3)
        sums = encode_sums(LeaseSums(blocks=(b"1234",), sums=b"12345678"))
        rank.keeper.deliver(LeaseComputing(lease=lease))
        with trio.move_on_after(0.2) as waiting:
            await decoder.ask(AskSums(lease=lease, part=0))
        assert waiting.cancelled_caught
        rank.keeper.deliver(LeaseGranted(lease=lease, blocks=1, sums=sums))
        for name in (lease, LeaseName("a", 0)):
            assert await decoder.ask(AskSums(lease=name, part=0)) == Sums(lease=name, part=0, parts=1, content=sums)
        assert rank.keeper._sums.keys() == {lease}
        await decoder.hold(lease)
        await decoder.release(lease)
        assert rank.ended() == {"a": False}
        assert rank.keeper._sums == {}

    run_over_zmq(test)
