"""Blocks go back to the scheduler only when nothing writes into them any more, whatever NIXL says of the READ."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest
import trio

from connector.config import ConnectorOptions
from connector.observe.log import get_logger
from connector.protocol import QuarantineLifted, ReceiveEnded
from connector.runtime.introducer import Introducer
from statemachine.failures import QuarantineFull, RequestIdInQuarantine
from statemachine.roster import PeerKey
from tests.actors.engines import BLOCKS, HOST, Engine, engine, lend_by_all, until
from tests.actors.late_reads import Answer, LateReads
from tests.actors.test_peers import is_served, is_served_again, reads
from tests.actors.test_pull import run

OPTIONS = ConnectorOptions(
    transfer_retries=0, request_timeout_seconds=3.0, quiesce_timeout_seconds=0.3, backoff_initial_seconds=0.1
)
THEIRS, NEXT_OWNER = 7, 77


def is_lifted(d: Engine, block_ids: list[int]) -> bool:
    return any(isinstance(o, QuarantineLifted) and o.local_block_ids == block_ids for o in d.events)


@pytest.mark.parametrize("answer", [Answer.ERROR, Answer.ERROR_AT_POST])
def test_a_read_that_errored_with_requests_in_flight_writes_into_nobody_elses_blocks(
    monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    """Scenario 70. The blocks get their next owner as soon as the connector lets the scheduler have them."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", options=OPTIONS) as d:
            await is_served(d, p, "before")
            p.memory[:] = THEIRS
            late = LateReads(monkeypatch, d.port.agent_name, answer)
            d.borrow("a", lend_by_all([p], "remote-a"), p.address, [4, 6, 9], [1, 3, 5])
            ended = await until(lambda: d.received("a"))
            assert ended.failure is not None
            assert late.posted == 1
            if not ended.quarantined:
                d.memory[:, [4, 6, 9]] = NEXT_OWNER
            late.let_go()
            if ended.quarantined:
                await until(lambda: is_lifted(d, [4, 6, 9]))
                d.memory[:, [4, 6, 9]] = NEXT_OWNER
            await trio.sleep(0.3)
            found = sorted(set(d.blocks([4, 6, 9]).flatten().tolist()))
            assert found == [NEXT_OWNER], f"quarantined: {ended.quarantined}; {late.landed} READ(s) landed late"
            await until(lambda: p.sent("remote-a"), 20.0)

    run(test)


def test_a_peer_whose_read_never_ended_gets_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 74. One quarantine is what a hung peer costs; every request after it keeps its blocks out of it."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", options=OPTIONS) as d:
            await is_served(d, p, "before")
            late = LateReads(monkeypatch, d.port.agent_name, Answer.IN_FLIGHT)
            quarantined = []
            for number in range(6):
                name = f"a-{number}"
                d.borrow(name, lend_by_all([p], f"remote-{name}"), p.address, [10 + number], [1])
                ended = await until(lambda name=name: d.received(name))
                assert ended.failure is not None
                if ended.quarantined:
                    quarantined.append(name)
            assert quarantined == ["a-0"], f"{late.posted} READs posted to a peer that had answered none"
            assert late.posted == 1
            late.let_go()
            await until(lambda: is_lifted(d, [10]))
            await is_served_again(d, p)

    run(test)


def test_a_peer_that_comes_back_elsewhere_is_read_from_while_a_read_from_before_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had vanished, another engine had taken its place, and its READs may hang for ever."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", options=OPTIONS) as d:
            await is_served(d, p, "before")
            late = LateReads(monkeypatch, d.port.agent_name, Answer.IN_FLIGHT, kept_max=1)
            d.borrow("a", lend_by_all([p], "remote-a"), p.address, [10], [1])
            await until(lambda: late.posted)
            (key,) = d.supervisor._peers
            d.supervisor._carry_out(d.supervisor._roster._retire([key]))
            assert (await until(lambda: d.received("a"))).quarantined
            await until(lambda: d.supervisor._peers[key].may_be_recalled)
            async with engine("p", serves=True) as elsewhere:
                await is_served(d, elsewhere, "again")
                assert not is_lifted(d, [10])
                late.let_go()
                await until(lambda: is_lifted(d, [10]))
                await is_served(d, elsewhere, "after")

    run(test)


def test_a_known_peer_whose_read_never_ends_is_not_connected_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is at its place is to be met before the READ has ended, which may be never."""
    lost: list[PeerKey] = []
    note_lost = Introducer.note_lost

    def keep(self: Introducer, key: PeerKey) -> None:
        lost.append(key)
        note_lost(self, key)

    monkeypatch.setattr(Introducer, "note_lost", keep)

    async def test() -> None:
        async with engine("p", serves=True) as p:
            options = msgspec.structs.replace(OPTIONS, known_peers=(f"{HOST}:{p.address.port}",))
            async with engine("d", options=options) as d:
                await is_served(d, p, "before")
                late = LateReads(monkeypatch, d.port.agent_name, Answer.IN_FLIGHT)
                lost.clear()
                d.borrow("a", lend_by_all([p], "remote-a"), p.address, [10], [1])
                assert (await until(lambda: d.received("a"))).quarantined
                await until(lambda: lost)
                assert not is_lifted(d, [10])
                late.let_go()
                await until(lambda: is_lifted(d, [10]))

    run(test)


@pytest.mark.parametrize("seconds_later", [0.0, 0.6])
def test_an_id_that_is_used_again_while_its_blocks_are_in_quarantine_gets_none_of_them_back(
    monkeypatch: pytest.MonkeyPatch, seconds_later: float
) -> None:
    """vLLM gives an id free with the report. What comes back are the blocks of the first request, whatever the second
    one of its id is doing: at once it would wait for the connection, and later it would fail in the back-off."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", options=OPTIONS) as d:
            await is_served(d, p, "before")
            late = LateReads(monkeypatch, d.port.agent_name, Answer.IN_FLIGHT)
            d.borrow("a", lend_by_all([p], "remote-a"), p.address, [4, 6, 9], [1, 3, 5])
            assert (await until(lambda: d.received("a"))).quarantined
            await trio.sleep(seconds_later)
            lease = lend_by_all([p], "remote-again")
            d.wait_for("a", lease, p.address)
            d.borrow("a", lease, p.address, [20, 21], [7, 8])
            _, again = [each for each in d.events if isinstance(each, ReceiveEnded) and each.request_id == "a"]
            assert again.failure == RequestIdInQuarantine(blocks=3)
            assert not again.quarantined
            late.let_go()
            await until(lambda: is_lifted(d, [4, 6, 9]))
            assert [each.local_block_ids for each in d.events if isinstance(each, QuarantineLifted)] == [[4, 6, 9]]
            assert d.crashes == []
            await until(lambda: p.sent("remote-again"), 20.0)

    run(test)


FEW = msgspec.structs.replace(OPTIONS, quarantine_limit=2.5 / BLOCKS)
"""Two blocks fill the quarantine."""


class Texts(logging.Handler):
    """Keeps what is logged about the quarantine."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "quarantine" in record.getMessage() and record.levelno == logging.WARNING:
            self.found.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    handler = Texts()
    get_logger().logger.addHandler(handler)
    yield handler.found
    get_logger().logger.removeHandler(handler)


@pytest.mark.parametrize("ends", ["the READ ends", "torn down, and the grace has passed"])
def test_a_full_quarantine_refuses_what_is_new_until_its_blocks_have_come_back(
    monkeypatch: pytest.MonkeyPatch, said: list[str], ends: str
) -> None:
    """The READ hangs for as long as NIXL says so; or it has failed, and may go on until its connection is torn down and
    the grace of the back end is over, which is later than the request can wait for. Another engine is not to blame, but
    nothing is read from it either, and its blocks are given back to it."""
    hangs = ends == "the READ ends"
    options = FEW if hangs else msgspec.structs.replace(FEW, backend_grace_seconds=5.0)

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("q", serves=True) as q, engine("d", options=options) as d:
            for each, name in ((p, "before-p"), (q, "before-q")):
                await is_served(d, each, name)
            said.clear()
            late = LateReads(monkeypatch, d.port.agent_name, Answer.IN_FLIGHT if hangs else Answer.ERROR)
            d.borrow("a", lend_by_all([p], "remote-a"), p.address, [10, 11], [1, 2])
            ended = await until(lambda: d.received("a"))
            assert ended.quarantined
            if not hangs:
                late.let_go()
            assert len(said) == 1
            assert "2 KV blocks are in quarantine" in said[0]

            lease = lend_by_all([q], "remote-b")
            d.wait_for("b", lease, q.address)
            await trio.sleep(0.05)
            assert q.sent("remote-b") is None
            d.borrow("b", lease, q.address, [20], [1])
            refused = d.received("b")
            assert refused is not None, "it fails at once"
            assert refused.failure == QuarantineFull(blocks=2, limit=2)
            assert not refused.quarantined
            await until(lambda: q.sent("remote-b"))  # long before its lease is over
            assert late.posted == 1
            assert len(said) == 1

            if hangs:
                late.let_go()
            await until(lambda: is_lifted(d, [10, 11]))
            assert len(said) == 2
            assert "KV is read again" in said[1]
            d.memory[:, [10, 11]] = NEXT_OWNER
            await reads(d, q, "after")
            assert set(d.blocks([10, 11]).flatten().tolist()) == {NEXT_OWNER}

    run(test)
