"""READs that stay in flight, over real NIXL: what is kept until they end, and what is not begun meanwhile.

Over tcp a READ needs the help of the thread that owns the other agent. A test holds that thread up, as a process that
hangs does; everything else of the engine goes on.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from connector.config import ConnectorOptions
from connector.ports.nixl import PortCounts
from connector.ports.nixl_agent.calls import Call
from connector.protocol import AbortPull
from connector.runtime import supervisor
from tests.actors.engines import HOST, Engine, engine, lease_of, parallel_engine, read, until
from tests.actors.test_parallel import fill, lend
from tests.actors.test_peers import failure_of, forget, nobody, reads
from tests.actors.test_pull import run

UNEVENTFUL_SECONDS = 0.5
"""In which something would have happened."""


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX reads it when an agent is made."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@contextmanager
def held_up(p: Engine) -> Iterator[None]:
    """Inside, the thread that owns this agent does nothing."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand(_core: object) -> None:
        stands.set()
        goes_on.wait(30.0)

    assert p.port._thread.submit(Call(stand))
    assert stands.wait(30.0)
    try:
        yield
    finally:
        goes_on.set()


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


async def in_flight(d: Engine, count: int) -> None:
    await until(lambda: d.counts().reads - d.counts().errored_reads == count)


def test_nothing_is_reported_while_a_read_from_another_rank_may_write() -> None:
    """Scenario 3: the READ from one rank fails, that from the other one is still under way."""

    async def test() -> None:
        options = ConnectorOptions(transfer_retries=0)
        async with (
            parallel_engine("p", 2, serves=True) as ps,
            parallel_engine("d", 1, options=options) as (d,),
        ):
            whole = fill(ps)
            lend(ps, "remote-warm")
            d.pull("warm", ps[0], [5], [1])
            assert (await until(lambda: d.received("warm"))).failure is None
            lend(ps, "remote-a")
            with held_up(ps[1]):
                await ps[0].port.aclose(0.0)
                d.pull("a", ps[0], [6], [2])
                await until(lambda: "draining" in d.trace.path("request", "a"))
                await in_flight(d, 1)
                await trio.sleep(UNEVENTFUL_SECONDS)
                assert d.received("a") is None, "its block would be somebody else's by now"
                assert not d.by_head()[:, 6].any()
            ended = await until(lambda: d.received("a"))
            assert ended.failure is not None
            assert ended.failure.kind == "TransferError"
            assert not ended.quarantined
            # It did write, and before the report.
            assert (d.by_head()[:, 6, 2:] == whole[:, 2, 2:]).all()
            assert d.crashes == []

    run(test)


def test_reads_whose_turn_has_not_come_are_not_posted_after_a_failure() -> None:
    """Scenario 4: of the READs from four ranks the first is refused; two are with the port by then, no more follow."""

    async def test() -> None:
        options = ConnectorOptions(transfer_retries=0)
        async with (
            parallel_engine("p", 4, serves=True) as ps,
            parallel_engine("d", 1, options=options, descriptors_ahead_max=1) as (d,),
        ):
            fill(ps)
            lend(ps, "remote-warm")
            d.pull("warm", ps[0], [5], [1])
            assert (await until(lambda: d.received("warm"))).failure is None
            lend(ps, "remote-a")
            await forget(d, ps[0])
            posted = []
            post_read = d.port.post_read
            d.port.post_read = lambda *given: posted.append(post_read(*given)) or posted[-1]  # type: ignore[method-assign,func-returns-value]
            d.pull("a", ps[0], [6], [2])
            assert (await failure_of(d, "a")).kind == "TransferError"
            assert len(posted) == 2
            assert not d.by_head()[:, 6, 2:].any(), "a rank whose turn had not come was read"
            assert d.crashes == []

    run(test)


def test_a_request_whose_turn_has_not_come_ends_without_it() -> None:
    """Behind many READs it would be quarantined otherwise, and its engine taken for one that hangs."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", descriptors_ahead_max=1) as d:
            assert (await read(d, p, "warm")).failure is None
            with held_up(d):
                for block, name in enumerate(("first", "second", "third", "fourth"), start=2):
                    p.lend(f"remote-{name}")
                    d.pull(name, p, [block], [block])
                await until(lambda: d.supervisor._reads.waiting() == ["third", "fourth"])
                d.supervisor.deliver(AbortPull(request_id="third"))
                ended = await until(lambda: d.received("third"))
                assert not ended.quarantined
                d.supervisor.deliver(AbortPull(request_id="first"))
                await trio.sleep(UNEVENTFUL_SECONDS)
                assert d.received("first") is None, "its READ may be posted"
            for name in ("first", "second", "fourth"):
                await until(lambda name=name: d.received(name))
            assert [d.received(name).failure for name in ("second", "fourth")] == [None, None]  # type: ignore[union-attr]
            assert d.crashes == []

    run(test)


def test_an_engine_that_is_read_from_is_evicted_neither_for_its_age_nor_for_its_place() -> None:
    """Scenario 14: its time to live is over many times, and another engine wants its place."""

    async def test() -> None:
        options = ConnectorOptions(engine_ttl=0.1, peer_limit=1)
        async with engine("p", serves=True) as p, engine("q", serves=True) as q, engine("d", options=options) as d:
            await reads(d, p, "before")
            p.memory[:, 2] = 7
            p.lend("remote-a")
            with held_up(p):
                d.pull("a", p, [6], [2])
                await in_flight(d, 1)
                q.lend("remote-b")
                d.pull("b", q, [7], [1])
                assert (await failure_of(d, "b")).kind == "TooManyPeers"
                await trio.sleep(UNEVENTFUL_SECONDS)
                assert d.received("a") is None
                assert d.trace.path("peer", "p") == ["idle", "handshaking", "ready"]
            assert (await until(lambda: d.received("a"))).failure is None
            assert (d.blocks([6]) == 7).all()
            await reads(d, q, "after")  # now it makes room
            assert d.trace.path("peer", "p")[-1] == "gone"
            assert d.counts().remote_agents == 1
            assert d.crashes == []

    run(test)


def test_a_waiting_request_keeps_its_engine_as_a_read_does() -> None:
    """Its engine is not even connected; its place is not given away, and its time to live does not count."""

    async def test() -> None:
        options = ConnectorOptions(engine_ttl=0.1, peer_limit=1)
        async with engine("d", options=options) as d, engine("q", serves=True) as q:
            dead = nobody("dead")
            d.wait_for("a", lease_of("remote-a"), dead)
            await trio.sleep(UNEVENTFUL_SECONDS)
            d.pull("b", q, [7], [1])
            assert (await failure_of(d, "b")).kind == "TooManyPeers"
            d.pull("a", dead, [1], [1])
            assert (await failure_of(d, "a")).kind in ("ConnectionRefused", "PeerBackoff")
            await until(lambda: d.trace.path("peer", "dead")[-1] == "gone")
            await reads(d, q, "after")

    run(test)


@pytest.mark.parametrize("waits", [True, False])
def test_a_prefill_engine_that_shuts_down_under_a_read_gives_no_wrong_byte(waits: bool) -> None:
    """Scenario 11: its agent is closed while D reads from it. The request ends, with its own bytes or as failed."""

    async def test() -> None:
        options = ConnectorOptions(transfer_retries=0)
        async with engine("d", options=options) as d, engine("p", serves=True) as p:
            await reads(d, p, "before")
            p.memory[:, 2] = 7
            p.lend("remote-a")
            with held_up(p):
                d.pull("a", p, [6], [2])
                await in_flight(d, 1)
                p.supervisor.stop()
                p.port._thread.close(1.0 if waits else 0.0)
            ended = await until(lambda: d.received("a"))
            assert not ended.quarantined
            if ended.failure is None:
                assert (d.blocks([6]) == 7).all()
            else:
                assert ended.failure.kind in ("TransferError", "PeerLeaving", "LeaseOver")
            assert d.crashes == []
            async with engine("q", serves=True) as q:
                await reads(d, q, "after")

    run(test)


@pytest.mark.parametrize("hangs_in", ["another call", "a call of its own"])
def test_the_control_socket_closes_although_nixl_hangs_while_its_worker_stops(
    monkeypatch: pytest.MonkeyPatch, hangs_in: str
) -> None:
    """The lists of its own memory, and those of P, cannot be given back until NIXL goes on."""
    monkeypatch.setattr(supervisor, "SHUTDOWN_GRACE_SECONDS", 0.3)

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            await reads(d, p, "before")
            goes_on = threading.Event()
            if hangs_in == "another call":
                assert d.port._thread.submit(Call(lambda _core: goes_on.wait(30.0)))
            else:
                remove = d.port._core.remove_remote_agent
                d.port._core.remove_remote_agent = lambda name: (goes_on.wait(30.0), remove(name))  # type: ignore[method-assign,func-returns-value]
            try:
                d.supervisor.stop()
                await until(lambda: not is_listening(d.control.port), 20.0)
            finally:
                goes_on.set()
            await until(lambda: not d.port._thread.is_alive())
            assert d.counts() == PortCounts(0, 0, 0, 0)
            assert d.crashes == []

    run(test)
