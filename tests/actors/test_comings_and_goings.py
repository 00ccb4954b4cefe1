"""Engines that leave, and engines that are met before they are needed, on real agents and sockets."""

from __future__ import annotations

from contextlib import closing

import pytest
import trio

from connector.config import ConnectorOptions
from connector.machine import boot_id
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.protocol import ReceiveEnded, WarmedUp
from connector.runtime import context
from connector.runtime.mapped_memory import MappedMemory
from connector.tools.administration import AdministrationError, require_administration
from connector.tools.asking import Address
from connector.wire.administration import (
    Leave,
    LeaveTaken,
    Meet,
    MeetReport,
    decode_leave_taken,
    decode_meet_report,
)
from connector.wire.control import encode_request
from connector.wire.device_allocations import Allocation, DeviceAllocations
from statemachine.failures import HandshakeRefused, Incompatible, PeerLeaving
from tests.actors.engines import HOST, Engine, engine, lease_of, parallel_engine, read, until
from tests.actors.test_pull import run
from tests.rig.facts import LEAVE_SECRET
from tests.rig.network import free_port

LIVES = 5


async def leave(p: Engine, grace_seconds: float = 60.0) -> LeaveTaken:
    """What its scheduler process tells each worker of an engine that is to end."""
    channel = ZmqSideChannel()
    try:
        with closing(await channel.open_link(HOST, p.control.port)) as link:
            link.send(encode_request(Leave(grace_ns=round(grace_seconds * 1e9), secret=LEAVE_SECRET)))
            return decode_leave_taken(await link.receive())
    finally:
        channel.close()


async def meet(d: Engine, *places: str) -> MeetReport:
    """What a tool sends to each rank of a decode engine."""
    channel = ZmqSideChannel()
    try:
        with closing(await channel.open_link(HOST, d.control.port)) as link:
            link.send(encode_request(Meet(places=places)))
            return decode_meet_report(await link.receive())
    finally:
        channel.close()


def leaves(d: Engine, p: Engine) -> bool:
    """Whether D knows."""
    return any(actor.core.view().leaves_ns is not None for actor in d.supervisor._peers.values())


def handshakes(d: Engine) -> int:
    return sum(r.machine == "peer" and r.to_state == "handshaking" for r in d.trace.records)


def test_what_is_lent_is_read_from_an_engine_that_leaves_and_then_nobody_waits_for_it() -> None:
    async def test() -> None:
        async with engine("d") as d:
            async with engine("p", serves=True) as p:
                assert (await read(d, p, "before")).failure is None
                await until(lambda: p.sent("remote-before"))  # P may hear of the release later than D reports
                for name in ("held", "late", "queued"):
                    p.lend(f"remote-{name}")
                d.wait_for("held", lease_of("remote-held"), p.address)
                d.wait_for("queued", lease_of("remote-queued"), p.address)
                assert (await leave(p)).leases == 3
                await until(lambda: leaves(d, p))
                for name in ("held", "late"):
                    d.pull(name, p, [2], [2])
                    assert (await until(lambda name=name: d.received(name))).failure is None
                address = p.address
            met_before = handshakes(d)
            d.borrow("queued", lease_of("remote-queued"), address, [3], [3])
            assert isinstance((await until(lambda: d.received("queued"))).failure, PeerLeaving)
            await trio.sleep(0.2)
            assert handshakes(d) == met_before == 1, "nobody connected to say a release, or for what cannot be had"
            assert d.crashes == []

    run(test)


def test_an_engine_that_shuts_down_without_draining_says_so_and_nobody_waits_for_it() -> None:
    """Many times, because what it says last and the end of its connection come in the same moment."""

    async def test() -> None:
        async with engine("d") as d:
            for number in range(LIVES):
                async with engine(f"p{number}", serves=True) as p:
                    assert (await read(d, p, f"before-{number}")).failure is None
                    queued = lease_of(f"remote-queued-{number}")
                    p.lend(queued.request_id)
                    d.wait_for(f"queued-{number}", queued, p.address)
                    address = p.address
                met_before = handshakes(d)
                d.borrow(f"queued-{number}", queued, address, [3], [3])
                ended = await until(lambda number=number: d.received(f"queued-{number}"))
                assert isinstance(ended.failure, PeerLeaving)
                await trio.sleep(0.05)
                assert handshakes(d) == met_before
            assert d.crashes == []

    run(test)


@pytest.mark.parametrize("engine_id", ["p", "p2"])
def test_a_new_process_in_the_place_of_one_that_left_is_served_at_once(engine_id: str) -> None:
    """There is no pause after the last one in which it would not be found."""

    async def test() -> None:
        options = ConnectorOptions(backoff_initial_seconds=30.0)
        async with engine("d", options=options) as d:
            async with engine("p", serves=True) as p:
                assert (await read(d, p, "before")).failure is None
                await leave(p)
                await until(lambda: leaves(d, p))
                address = p.address
            d.pull("between", address, [1], [1])
            assert isinstance((await until(lambda: d.received("between"))).failure, PeerLeaving)
            async with engine(engine_id, serves=True, port=address.port) as p:
                assert (await read(d, p, "after")).failure is None

    run(test)


def test_engines_that_are_named_by_an_option_are_met_before_their_first_request() -> None:
    async def test() -> None:
        async with parallel_engine("p", 2, serves=True) as ps:
            options = ConnectorOptions(known_peers=(f"{HOST}:{ps[0].address.port}",))
            async with engine("d", options=options) as d:
                await until(lambda: d.trace.path("peer", "p")[-1:] == ["ready"] or None)
                for each in ps:
                    each.lend("remote-a")
                d.pull("a", ps[0], [1], [1])
                assert (await until(lambda: d.received("a"))).failure is None
                assert handshakes(d) == 1

    run(test)


def test_nobody_is_met_before_the_engine_has_been_warmed_up() -> None:
    """Named by an option or by a tool: while vLLM captures CUDA graphs no memory of another process may be opened."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("q", serves=True) as q, engine("other", serves=True) as other:
            options = ConnectorOptions(known_peers=(f"{HOST}:{p.address.port}",))
            async with engine("d", options=options, is_warm=False) as d:
                (row,) = (await meet(d, f"{HOST}:{q.address.port}")).rows
                assert row.state == "asking"
                other.lend("remote-a")
                d.pull("a", other, [1], [1])
                assert (await until(lambda: d.received("a"))).failure is None  # others have had their time
                assert d.trace.path("peer", "p") == d.trace.path("peer", "q") == []
                d.supervisor.deliver(WarmedUp())
                for each in (p, q):
                    await until(lambda each=each: d.trace.path("peer", each.engine_id)[-1:] == ["ready"] or None)

    run(test)


def test_engines_that_are_named_beyond_the_limit_do_not_drive_out_each_other() -> None:
    """Each would be met again after a pause, and each meeting leaves sockets behind (docs/nixl.md fact 11)."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("q", serves=True) as q:
            places = tuple(f"{HOST}:{each.address.port}" for each in (p, q))
            options = ConnectorOptions(known_peers=places, peer_limit=1, backoff_initial_seconds=0.02)
            async with engine("d", options=options) as d:
                await until(lambda: any(actor.is_connected for actor in d.supervisor._peers.values()) or None)
                met = handshakes(d)
                await trio.sleep(1.0)  # many pauses
                assert handshakes(d) == met
                (other,) = [each for each in (p, q) if each.engine_id not in {k.engine_id for k in d.supervisor._peers}]
                assert (await read(d, other, "a")).failure is None, "for a request room is made"

    run(test)


def test_an_engine_that_is_named_while_it_is_away_is_met_when_it_comes_and_when_it_comes_back() -> None:
    async def test() -> None:
        port = free_port()
        place = f"{HOST}:{port}"
        options = ConnectorOptions(backoff_initial_seconds=0.05, backoff_max_seconds=0.1)
        async with engine("d", options=options) as d:
            (row,) = (await meet(d, place)).rows
            assert row.state in ("asking", "pausing")
            with trio.fail_after(20):
                while not (await meet(d, place)).rows[0].problem:
                    await trio.sleep(0.05)
            for engine_id in ("p", "p", "another"):
                async with engine(engine_id, serves=True, port=port):
                    with trio.fail_after(20):
                        while (row := (await meet(d, place)).rows[0]).state != "met":
                            await trio.sleep(0.05)
                    assert (row.engine_id, row.problem) == (engine_id, "")
                    assert d.trace.path("peer", engine_id)[-1] == "ready"
                with trio.fail_after(20):  # while its connection is taken back it is still said to be met
                    while (await meet(d, place)).rows[0].state == "met":
                        await trio.sleep(0.05)
            assert d.crashes == []

    run(test)


def test_who_cannot_be_met_is_told_at_once_with_the_kind_of_the_failure() -> None:
    """Before any bound of an attempt, and with two engines of which one has taken the only place."""

    async def test() -> None:
        options = ConnectorOptions(
            peer_limit=1, handshake_timeout_seconds=20.0, backoff_initial_seconds=60.0, backoff_max_seconds=60.0
        )
        async with (
            engine("unlike", serves=True, head_bytes=64) as unlike,
            engine("p", serves=True) as p,
            engine("q", serves=True) as q,
            engine("d", options=options) as d,
        ):
            for each, kind in ((unlike, "Incompatible"), (p, ""), (q, "TooManyPeers")):
                place = f"{HOST}:{each.address.port}"
                with trio.fail_after(options.handshake_timeout_seconds):
                    while (row := (await meet(d, place)).rows[0]).state in ("asking", "meeting"):
                        await trio.sleep(0.05)
                assert (row.state, row.kind) == ("pausing" if kind else "met", kind)
                assert bool(row.problem) is bool(kind)

    run(test)


def test_what_tools_may_do_is_asked_of_the_engine_first() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p:
            channel = ZmqSideChannel()
            try:
                with pytest.raises(AdministrationError, match="nothing listens"):
                    await require_administration(channel, Address(HOST, free_port()))
                await require_administration(channel, Address(HOST, p.address.port))
            finally:
                channel.close()

    run(test)


def test_device_memory_that_ucx_would_take_for_that_of_the_process_before_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P is started again in its place. The memory here is the host's; D passes for one with a device."""
    monkeypatch.setattr(context, "MappedMemory", lambda *of, is_on_device: MappedMemory(*of, is_on_device=True))

    def numbered(buffer_id: int) -> DeviceAllocations:
        allocations = (Allocation(0x1000, 0x100, buffer_id),)
        return DeviceAllocations(machine=boot_id(), process_id=70, process_namespace=1, allocations=allocations)

    async def life(d: Engine, buffer_id: int, *request_ids: str) -> list[ReceiveEnded]:
        async with engine("p", serves=True, device_allocations=numbered(buffer_id)) as p:
            return [await read(d, p, request_id) for request_id in request_ids]

    async def test() -> None:
        async with engine("d", options=ConnectorOptions(incompatible_backoff_seconds=0.05)) as d:
            assert [each.failure for each in await life(d, 1, "first", "second")] == [None, None]
            (refused,) = await life(d, 1, "same numbers")
            assert isinstance(refused.failure, Incompatible)
            assert refused.failure.field == "device memory"
            assert "UCX_CUDA_IPC_CACHE=n" in refused.failure.advice
            assert d.counts().remote_agents == 0
            await trio.sleep(0.1)
            assert [each.failure for each in await life(d, 2, "other numbers")] == [None]

    run(test)


def test_the_agent_of_the_process_before_is_not_read_while_the_new_one_answers_for_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D stands still between the answer of a P and the link to it, and P is started again meanwhile, at the same ports.
    UCX takes the old agent for the new process where that listens at its port (docs/nixl.md fact 44)."""
    payload, load, loaded = Engine.payload, RealNixlPort.add_remote_agent, []

    async def noted_load(port: RealNixlPort, metadata: bytes) -> str:
        loaded.append(port.agent_named_in(metadata))
        return await load(port, metadata)

    monkeypatch.setattr(RealNixlPort, "add_remote_agent", noted_load)

    async def test() -> None:
        async with engine("p") as after:

            def told_before_the_restart(before: Engine) -> bytes:
                before.control = after.control
                return payload(before)

            monkeypatch.setattr(Engine, "payload", told_before_the_restart)
            async with engine("p", serves=True) as before, engine("d") as d:
                before.memory[:], after.memory[:] = 1, 2
                after.lend("remote-a")
                d.pull("a", before, [5], [1])
                ended = await until(lambda: d.received("a"))
                assert isinstance(ended.failure, HandshakeRefused), ended.failure
                assert "started again" in str(ended.failure)
                assert loaded == []
                await until(lambda: d.counts().remote_agents == 0)
            assert d.crashes == []

    run(test)
