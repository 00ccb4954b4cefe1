"""How long a request may wait for a live P (as long as it is held), and for a dead one (not at all)."""

from __future__ import annotations

import pytest
import trio

from connector.config import ConnectorOptions
from connector.observe.catalogue import FAILED_NOTIFICATIONS
from connector.ports.nixl import NixlCallFailed
from tests.actors.engines import HELD_SECONDS, LEASE_SECONDS, Engine, answer_as_builtin, engine, lend_by_all, until
from tests.actors.test_peers import nobody, reads
from tests.actors.test_pull import run
from tests.rig.network import free_port

AT_ONCE_SECONDS = 30.0
"""Less than a handshake with an engine that does not answer takes. A machine may stand still for seconds."""
PATIENT = ConnectorOptions(handshake_timeout_seconds=2 * AT_ONCE_SECONDS)


def test_a_request_waits_in_the_queue_for_longer_than_a_lease_and_is_served() -> None:
    """Whether D has met P before or meets it for this request."""

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_and_read, "met", True)
            nursery.start_soon(wait_and_read, "new", False)

    async def wait_and_read(name: str, connected: bool) -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
        async with (
            engine(f"p-{name}", serves=True, options=options) as p,
            engine(f"d-{name}", options=options) as d,
        ):
            if connected:
                await reads(d, p, "before")
            p.memory[:] = 7
            loan = lend_by_all([p], "remote-a")
            d.wait_for("a", loan, p.address)
            await trio.sleep(HELD_SECONDS)
            assert p.sent("remote-a") is None, f"{name}: P has given the blocks away"
            d.borrow("a", loan, p.address, [4], [4])
            ended = await until(lambda: d.received("a"))
            assert ended.failure is None, f"{name}: {ended.failure}; the lease is alive on P"
            assert (d.blocks([4]) == 7).all(), name

    run(test)


def test_a_peer_whose_port_refuses_connections_fails_its_requests_at_once() -> None:
    async def test() -> None:
        async with engine("d", options=PATIENT) as d:
            started = trio.current_time()
            d.pull("a", nobody("dead", free_port()), [1], [1])
            ended = await until(lambda: d.received("a"), 2 * AT_ONCE_SECONDS)
            seconds = trio.current_time() - started
            assert ended.failure is not None
            assert seconds < AT_ONCE_SECONDS, f"{ended.failure.kind} after {seconds:.1f} s"

    run(test)


def test_a_peer_that_ended_while_it_was_connected_fails_its_requests_at_once() -> None:
    """Those that are asked for afterwards, and those that waited in D's queue meanwhile."""

    async def test() -> None:
        async with engine("d", options=PATIENT) as d:
            async with engine("p", serves=True) as p:
                await reads(d, p, "before")
                address, loan = p.address, lend_by_all([p], "remote-a")
                d.wait_for("a", loan, address)
                await trio.sleep(0.2)
            started = trio.current_time()
            d.borrow("a", loan, address, [1], [1])
            d.borrow("b", loan, address, [2], [1])
            for name in ("a", "b"):
                ended = await until(lambda name=name: d.received(name), 2 * AT_ONCE_SECONDS)
                assert ended.failure is not None
                seconds = trio.current_time() - started
                assert seconds < AT_ONCE_SECONDS, f"{ended.failure.kind} after {seconds:.1f} s"

    run(test)


def test_each_notification_that_nixl_does_not_send_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """P answers as the built-in connector does, without facts, so D keeps its lease alive by notifications. NIXL has
    forgotten P's agent when the next one is due."""
    answer_as_builtin(monkeypatch)

    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=3.0)
        async with engine("p", serves=True, options=options) as p, engine("d", options=options) as d:
            await reads(d, p, "before")
            d.wait_for("a", lend_by_all([p], "remote-a"), p.address)
            await until(lambda: "wanted" in d.trace.path("hold", "remote-a/0"))
            assert failed_notifications(d) == 0
            forgotten, send, refused = p.port.agent_name, d.port.send_notification, []

            async def watched(name: str, message: bytes) -> None:
                try:
                    await send(name, message)
                except NixlCallFailed as error:
                    refused.append(error)
                    raise

            d.port.send_notification = watched  # type: ignore[method-assign]
            await d.port._call("forget_agent", lambda core: core._agent.remove_remote_agent(forgotten))
            await until(lambda: refused and "draining" in d.trace.path("peer", "p"))
            assert failed_notifications(d) == len(refused) > 0

    run(test)


def failed_notifications(rank: Engine) -> int:
    """Since the last call."""
    taken = rank.figures.take()
    return 0 if taken is None else taken.counts.get(FAILED_NOTIFICATIONS.key(), 0)
