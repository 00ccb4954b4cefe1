"""A decode engine reads from a prefill engine: the normal path, and what ends otherwise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio

from connector.config import ConnectorOptions
from connector.ports.nixl import NixlEvent, PortReadEnded
from connector.protocol import AbortPull, LeaseComputing, PeerAddress
from connector.runtime import block_tables
from tests.actors.engines import engine, lease_of, until
from tests.plain_paths import REQUEST_PATHS_PLAIN
from tests.rig.network import BlackHole


def run(test: Callable[[], Awaitable[None]], seconds: float = 100.0) -> None:
    """`seconds`: less than pytest gives. The first agent of a process may take half a minute on a busy machine."""

    async def main() -> None:
        with trio.fail_after(seconds):
            await test()

    trio.run(main)


def test_blocks_arrive_and_the_lease_ends() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            p.memory[:] = np.random.default_rng(1).integers(0, 255, p.memory.shape, np.uint8)
            p.lend("remote-a")
            d.pull("a", p, [5, 6, 7], [1, 2, 9])
            ended = await until(lambda: d.received("a"))
            assert ended.failure is None
            assert (d.blocks([5, 6, 7]) == p.blocks([1, 2, 9])).all()
            untouched = [block for block in range(64) if block not in (5, 6, 7)]
            assert not d.blocks(untouched).any()
            assert not (await until(lambda: p.sent("remote-a"))).expired
            assert tuple(d.trace.path("request", "a")) in REQUEST_PATHS_PLAIN
            assert p.trace.path("lease", "remote-a") == ["computing", "held", "done"]
            await until(lambda: d.counts().reads == 0)
            assert d.crashes == p.crashes == []
        assert d.counts().remote_agents == 0
        assert d.counts().descriptor_lists == 0

    run(test)


def test_a_read_is_ordered_in_the_turn_in_which_its_command_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn of the trio loop gives the interpreter away, and the engine may keep it for a switch interval."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            p.lend("remote-a")
            d.pull("a", p, [5], [1])  # they meet
            await until(lambda: d.received("a"))
            ordered: list[object] = []
            post_read = d.port.post_read

            def note(*what: Any) -> int:
                ordered.append(what)
                return post_read(*what)

            monkeypatch.setattr(d.port, "post_read", note)
            p.lend("remote-b")
            d.pull("b", p, [6], [2])
            assert len(ordered) == 1, "before anybody else had a turn"
            ended = await until(lambda: d.received("b"))
            assert ended.failure is None

    run(test)


def test_the_end_of_a_read_is_reported_in_the_turn_in_which_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            p.lend("remote-a")
            d.wait_for("a", lease_of("remote-a"), p.address)
            await until(lambda: any(r.machine == "hold" and r.to_state == "held" for r in d.trace.records))
            told: list[bool] = []
            receive = d.port.on_event

            def note(event: NixlEvent) -> None:
                receive(event)
                if isinstance(event, PortReadEnded):
                    told.append(d.received("a") is not None)

            monkeypatch.setattr(d.port, "_on_event", note)
            d.pull("a", p, [5], [1])
            await until(lambda: d.received("a"))
            assert told == [True]

    run(test)


def test_a_large_request_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tables, "DESCRIPTORS_PER_TURN", 4)

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            p.memory[:] = np.random.default_rng(2).integers(0, 255, p.memory.shape, np.uint8)
            p.lend("remote-a")
            sizes: list[int] = []
            post_read = d.port.post_read

            def note(*lists_and_ids: Any) -> int:
                sizes.append(lists_and_ids[1].size)
                return post_read(*lists_and_ids)

            monkeypatch.setattr(d.port, "post_read", note)
            d.pull("a", p, [5, 6, 7], [1, 2, 9])
            ended = await until(lambda: d.received("a"))
            assert ended.failure is None
            assert (d.blocks([5, 6, 7]) == p.blocks([1, 2, 9])).all()
            assert sizes == [4, 4, 1], "three blocks of three layers"
            assert not (await until(lambda: p.sent("remote-a"))).expired

    run(test)


def test_notify_only_frees_the_lease_and_reports_nothing() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            p.lend("remote-a")
            d.release_unread("a", p)
            await until(lambda: p.sent("remote-a"))
            assert d.received("a") is None

    run(test)


def test_peer_that_never_answers_fails_in_bounded_time() -> None:
    async def test() -> None:
        options = ConnectorOptions(handshake_timeout_seconds=0.3)
        with BlackHole() as silent:
            async with engine("d", options=options) as d:
                d.pull("a", PeerAddress(engine_id="nobody", host="127.0.0.1", port=silent.port, tp_size=1), [1], [1])
                ended = await until(lambda: d.received("a"))
                assert ended.failure is not None
                assert ended.failure.kind == "HandshakeTimeout"
                assert not ended.quarantined

    run(test)


def test_abort_while_the_peer_is_silent_ends_at_once() -> None:
    async def test() -> None:
        with BlackHole() as silent:
            async with engine("d") as d:
                d.pull("a", PeerAddress(engine_id="nobody", host="127.0.0.1", port=silent.port, tp_size=1), [1], [1])
                await until(lambda: d.trace.path("peer", "nobody") == ["idle", "handshaking"])
                d.supervisor.deliver(AbortPull(request_id="a"))
                ended = await until(lambda: d.received("a"))
                assert ended.failure is not None
                assert ended.failure.kind == "AbortedByClient"

    run(test)


def test_release_that_overtakes_the_grant_is_counted_with_it() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            p.supervisor.deliver(LeaseComputing(lease=lease_of("remote-a")))
            d.pull("a", p, [1], [1])
            assert (await until(lambda: d.received("a"))).failure is None
            await trio.sleep(0.05)
            assert p.sent("remote-a") is None
            p.lend("remote-a")
            await until(lambda: p.sent("remote-a"))
            assert p.trace.path("lease", "remote-a") == ["computing", "done"]

    run(test)
