"""Peers that fail, restart, lie or are replaced; and that they cost nobody else anything."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from functools import partial
from typing import Any

import msgspec
import pytest
import trio

from connector.config import ConnectorOptions
from connector.observe.advice import WHAT_TO_DO
from connector.ports.host_names import HostNames
from connector.ports.nixl import AgentName, ListenerLost, NixlCallFailed, PortBroken
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.side_channel import Reached
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.ports.zmq_bridge.link import ZmqLink
from connector.ports.zmq_bridge.requester import ZmqRequester
from connector.protocol import AbortPull, PeerAddress, ReceiveEnded, RejectPull, TrackLease, WorkerStopped
from connector.runtime import peer_actor
from connector.runtime.wait_notices import WaitNotices
from connector.wire.identity import KvIdentity, LayerIdentity
from statemachine.failures import BadParams, Failure, HandshakeTimeout
from statemachine.kernel import Effect, Event
from statemachine.lease import LeaseName
from statemachine.remote_engine import LinkLost, ReadEnded, RemoteEngine, Retire
from tests.actors.engines import (
    HELD_SECONDS,
    HOST,
    LEASE_SECONDS,
    Engine,
    WarpedClock,
    answer_as_builtin,
    engine,
    lease_of,
    lend_by_all,
    parallel_engine,
    until,
)
from tests.actors.test_pull import run
from tests.rig.looks import look_patiently
from tests.rig.name_server import name_server
from tests.rig.network import OTHER_SERVERS, BlackHole, free_port


def nobody(name: str, port: int = 1) -> PeerAddress:
    """An engine that has ended: its port refuses connections, unless `port` is somebody's."""
    return PeerAddress(engine_id=name, host="127.0.0.1", port=port, tp_size=1)


async def failure_of(d: Engine, request_id: str, seconds: float = 10.0) -> Failure:
    ended = await until(lambda: d.received(request_id), seconds)
    assert ended.failure is not None
    return ended.failure


def released(d: Engine, holds: int) -> bool:
    """Whether P, or several, have confirmed that they know of the end of so many leases."""
    return sum(r.machine == "hold" and r.to_state == "released" for r in d.trace.records) == holds


async def reads(d: Engine, p: Engine, request_id: str) -> None:
    p.lend(f"remote-{request_id}")
    d.pull(request_id, p, [1], [1])
    ended = await until(lambda: d.received(request_id))
    assert ended.failure is None, ended.failure


async def is_served(d: Engine, p: Engine, name: str) -> None:
    """One of several requests: the first meeting may take longer than a short lease or a short time limit allows."""

    async def is_read(request_id: str) -> bool:
        d.borrow(request_id, lend_by_all([p], f"remote-{request_id}"), p.address, [30], [1])
        return (await until(lambda: d.received(request_id))).failure is None

    with trio.fail_after(30.0):
        numbers = itertools.count()
        while not await is_read(f"{name}-{next(numbers)}"):
            await trio.sleep(0.1)


async def is_served_again(d: Engine, p: Engine) -> None:
    """Once a back-off is over and a connection is made anew."""
    await is_served(d, p, "again")


def test_dead_peers_do_not_delay_a_healthy_one() -> None:
    async def test() -> None:
        with BlackHole() as silent:
            patient = ConnectorOptions(handshake_timeout_seconds=60.0)
            async with engine("p", serves=True) as p, engine("d", options=patient) as d:
                for i in range(8):
                    d.pull(f"dead-{i}", nobody(f"dead-{i}", silent.port), [10 + i], [1])
                with trio.fail_after(30.0):
                    await reads(d, p, "alive")
                assert all(d.received(f"dead-{i}") is None for i in range(8))

    run(test)


def test_request_arriving_in_back_off_fails_at_once_and_says_when() -> None:
    async def test() -> None:
        options = ConnectorOptions(backoff_initial_seconds=20.0)
        async with engine("d", options=options) as d:
            d.pull("a", nobody("dead"), [1], [1])
            assert (await failure_of(d, "a")).kind == "ConnectionRefused"
            d.pull("b", nobody("dead"), [1], [1])
            failure = await failure_of(d, "b")
            assert failure.kind == "PeerBackoff"
            assert "ConnectionRefused" in str(failure)

    run(test)


def test_all_waiting_requests_share_one_handshake() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            for i in range(10):
                p.lend(f"remote-{i}")
                d.pull(str(i), p, [i], [i])
            for i in range(10):
                assert (await until(lambda i=i: d.received(str(i)))).failure is None
            assert d.trace.path("peer", "p") == ["idle", "handshaking", "ready"]
            assert d.counts().remote_agents == 1

    run(test)


def test_another_engine_at_the_address_is_named() -> None:
    async def test() -> None:
        async with engine("new", serves=True) as p, engine("d") as d:
            assert p.listener is not None
            d.pull("a", nobody("old", p.listener.port), [1], [1])
            failure = await failure_of(d, "a")
            assert failure.kind == "WrongEngine"
            assert "new" in str(failure)
            assert d.counts().remote_agents == 0

    run(test)


def test_incompatible_engines_are_refused_with_both_values() -> None:
    async def test() -> None:
        async with engine("p", serves=True, head_bytes=64) as p, engine("d") as d:
            p.lend("remote-a")
            d.pull("a", p, [1], [1])
            failure = await failure_of(d, "a")
            assert failure.kind == "Incompatible"
            assert "8192" in str(failure)
            assert "4096" in str(failure)
            assert d.trace.path("peer", "p") == ["idle", "handshaking", "incompatible"]
            assert d.counts().remote_agents == d.counts().descriptor_lists == 0

    run(test)


def test_another_model_of_a_builtin_engine_is_refused_by_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_as_builtin(monkeypatch)

    async def test() -> None:
        async with engine("p", serves=True, compatibility_hash="other-model") as p, engine("d") as d:
            p.lend("remote-a")
            d.pull("a", p, [1], [1])
            assert (await failure_of(d, "a")).kind == "Incompatible"

    run(test)


def identity(weights: str = "w", *, model: str = "m", **of_layer: Any) -> KvIdentity:
    layer = LayerIdentity(
        **({"group": 0, "dtype": "fp8", "order": "vec", "k_scales": (0.5,), "content_bytes": (640,)} | of_layer)
    )
    return KvIdentity(factors={"model": model, "weights": weights}, layers={"layer": layer}, group_tokens=())


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (identity("others"), "weights is others there and w here"),
        (identity(dtype="fp8_e5m2"), "KV cache dtype of layer is fp8_e5m2 there and fp8 here"),
        (identity(k_scales=(0.25,)), "k_scale of layer is 0.25 there and 0.5 here"),
        (identity(order="amx"), "order of elements in a block of layer is amx there and vec here"),
        (identity(content_bytes=(256,)), "content of layer is 256 bytes there and 640 bytes here"),
    ],
)
def test_one_factor_that_differs_is_named_with_both_values(theirs: KvIdentity, said: str) -> None:
    async def test() -> None:
        async with engine("p", serves=True, identity=theirs) as p, engine("d", identity=identity()) as d:
            p.lend("remote-a")
            d.pull("a", p, [1], [1])
            failure = await failure_of(d, "a")
            assert failure.kind == "Incompatible"
            assert said in str(failure)
            assert d.counts().remote_agents == d.counts().descriptor_lists == 0

    run(test)


def test_the_same_weights_at_another_path_are_the_same_model() -> None:
    async def test() -> None:
        ours, theirs = identity(model="/here"), identity(model="/elsewhere")
        async with engine("p", serves=True, identity=theirs) as p, engine("d", identity=ours) as d:
            await reads(d, p, "a")

    run(test)


@pytest.mark.parametrize("remote", [[64], [-1], [2**31 - 1]])
def test_block_that_the_peer_does_not_have(remote: list[int]) -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            p.lend("remote-a")
            d.pull("a", p, [1], remote)
            assert (await failure_of(d, "a")).kind == "BadParams"
            await reads(d, p, "b")

    run(test)


def test_lease_that_has_ended_is_never_done() -> None:
    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=0.6)
        async with engine("p", serves=True, options=options) as p, engine("d") as d:
            await is_served(d, p, "warm-up")
            p.lend("remote-a")
            await until(lambda: p.sent("remote-a"))
            p.memory[:] = 99  # The next request's KV lies there now.
            d.pull("a", p, [2], [2])
            assert (await failure_of(d, "a")).kind == "LeaseOver"
            assert d.trace.path("request", "a")[-1] == "expired"
            assert p.sent("remote-a") is not None
            assert p.sent("remote-a").expired

    run(test)


BRIEF_BACKOFF = ConnectorOptions(backoff_initial_seconds=0.02, backoff_max_seconds=0.05)


async def rested(d: Engine, peer: str) -> None:
    """The engine was gone for a moment, which D may have noticed: until an attempt begins that can find its successor.

    An attempt that began meanwhile is refused, and so is a request that joins it.
    """
    await until(lambda: set(d.trace.path("peer", peer)[-1:]).isdisjoint(("handshaking", "backoff", "incompatible")))


@pytest.mark.parametrize("known_before", [True, False])
def test_restarted_engine_with_the_same_id_serves_new_requests_and_not_old_ones(known_before: bool) -> None:
    async def test() -> None:
        async with engine("d", options=BRIEF_BACKOFF) as d:
            async with engine("p", serves=True) as old:
                if known_before:
                    await reads(d, old, "before")
                address = old.address
                old.lend("remote-stale")
            async with engine("p", serves=True, port=address.port) as new:
                assert new.life != old.life
                await rested(d, "p")
                d.pull("stale", new, [1], [1])
                failure = await failure_of(d, "stale")
                assert failure.kind in ("LeaseOver", "TransferError")
                await reads(d, new, "after")
                await until(lambda: d.counts().remote_agents == 1)

    run(test)


def test_new_request_of_a_restarted_engine_is_served_without_touching_d() -> None:
    async def test() -> None:
        async with engine("d", options=BRIEF_BACKOFF) as d:
            async with engine("p", serves=True) as old:
                await reads(d, old, "before")
                address = old.address
            async with engine("p", serves=True, port=address.port) as new:
                await rested(d, "p")
                await reads(d, new, "after")
                await until(lambda: d.counts().remote_agents == 1)

    run(test)


def test_engine_replaced_at_its_address_is_given_up() -> None:
    async def test() -> None:
        async with engine("d", options=BRIEF_BACKOFF) as d:
            async with engine("p1", serves=True) as old:
                await reads(d, old, "before")
                address = old.address
            async with engine("p2", serves=True, port=address.port) as new:
                await reads(d, new, "after")
                await until(lambda: d.trace.path("peer", "p1")[-1] == "gone")
                await until(lambda: d.counts().remote_agents == 1)

    run(test)


def test_two_engines_of_one_id_cost_the_second_its_requests_and_nobody_a_wrong_byte() -> None:
    """As replicas that are started with one `engine_id` in their configuration."""

    async def test() -> None:
        async with engine("p", serves=True) as met, engine("p", serves=True) as other, engine("d") as d:
            await reads(d, met, "before")
            other.lend("remote-a")
            d.pull("a", other, [10], [1])
            failure = await failure_of(d, "a")
            assert failure.kind == "LeaseOver"
            assert "the same engine_id" in WHAT_TO_DO[failure.kind]
            await reads(d, met, "after")

    run(test)


@pytest.mark.parametrize("engine_id", ["p", "q"], ids=["the same id and other weights", "another id and other weights"])
def test_an_address_that_another_model_had_for_a_while(engine_id: str) -> None:
    """A port is handed out again: to an engine that D cannot read from, and at last to the right one."""
    options = ConnectorOptions(
        backoff_initial_seconds=0.02, backoff_max_seconds=0.05, incompatible_backoff_seconds=0.05
    )

    async def test() -> None:
        async with engine("d", options=options, identity=identity()) as d:
            async with engine("p", serves=True, identity=identity()) as old:
                await reads(d, old, "before")
                port = old.address.port
            async with engine(engine_id, serves=True, port=port, identity=identity("others")) as other:
                other.memory[:] = 99
                for request_id in ("a", "b"):
                    await rested(d, engine_id)
                    other.lend(f"remote-{request_id}")
                    d.pull(request_id, other, [2], [2])
                    assert (await failure_of(d, request_id)).kind == "Incompatible"
                assert (d.blocks([2]) == 0).all(), "read from the other model"
                if engine_id != "p":  # a router that has not noticed yet; weights are compared before names
                    await rested(d, "p")
                    d.pull("stale", nobody("p", port), [2], [2])
                    assert (await failure_of(d, "stale")).kind == "Incompatible"
                await until(lambda: d.counts().remote_agents == 0)
            async with engine("p", serves=True, port=port, identity=identity()) as new:
                new.memory[:, 1, :] = 7
                await rested(d, "p")
                await reads(d, new, "after")
                assert (d.blocks([1]) == 7).all()
                await until(lambda: d.counts().remote_agents == 1)
            assert d.crashes == []

    run(test)


async def forget(d: Engine, p: Engine) -> None:
    """D's NIXL drops what it has loaded of P, behind the port's back."""
    await d.port._call("forget", lambda core: core._agent.remove_remote_agent(p.port.agent_name))


@pytest.mark.parametrize("retries", [0, 1])
def test_metadata_that_nixl_dropped_costs_a_new_connection_and_at_most_the_first_request(retries: int) -> None:
    async def test() -> None:
        options = ConnectorOptions(transfer_retries=retries)
        async with engine("p", serves=True) as p, engine("d", options=options) as d:
            await reads(d, p, "before")
            for turn in range(3):
                await forget(d, p)
                p.lend(f"remote-{turn}")
                d.pull(f"{turn}", p, [1, 2], [1, 2])
                ended = await until(lambda turn=turn: d.received(f"{turn}"))
                if retries:
                    assert ended.failure is None, ended.failure
                else:
                    assert ended.failure is not None
                    assert ended.failure.kind == "TransferError"
                    assert "forgotten" in str(ended.failure)
                await reads(d, p, f"after-{turn}")
            assert d.counts().remote_agents == 1
            assert d.counts().reads == 0
            assert d.crashes == []
            # One connection for each time that its metadata were dropped.
            assert d.trace.path("peer", "p").count("ready") == 1 + 3

    run(test)


def test_heartbeats_keep_a_waiting_request_leased() -> None:
    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
        async with engine("p", serves=True, options=options) as p, engine("d", options=options) as d:
            p.lend("remote-a")
            d.supervisor.deliver(
                TrackLease(request_id="a", peer=p.address, lease=lease_of("remote-a"), age_seconds=0.0)
            )
            await trio.sleep(HELD_SECONDS)
            assert p.sent("remote-a") is None

    run(test)


def test_actor_that_crashes_fails_its_requests_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            await reads(d, p, "before")
            original = peer_actor.resolve

            def broken(*arguments: object) -> None:
                raise RuntimeError("injected")

            monkeypatch.setattr(peer_actor, "resolve", broken)
            p.lend("remote-a")
            d.pull("a", p, [1], [1])
            assert (await failure_of(d, "a")).kind == "ActorCrashed"
            monkeypatch.setattr(peer_actor, "resolve", original)
            await reads(d, p, "after")
            assert [name for name, _ in d.crashes] == ["peer actor of p"]

    run(test)


def test_a_mistake_after_a_handshake_costs_its_requests_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears that it is connected raises. The connection is known by then, so it is torn down as others are."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", options=BRIEF_BACKOFF) as d:
            introducer = d.supervisor._introducer
            original = introducer.note_connected

            def broken(key: object) -> None:
                monkeypatch.setattr(introducer, "note_connected", original)
                raise RuntimeError("injected")

            monkeypatch.setattr(introducer, "note_connected", broken)
            d.pull("a", p, [1], [1])
            await until(lambda: d.received("a"))
            assert [name for name, _ in d.crashes] == ["peer actor of p"]
            await is_served_again(d, p)

    run(test)


def test_a_line_that_cannot_be_written_costs_no_report() -> None:
    async def test() -> None:
        async with engine("d") as d:
            context = d.supervisor._context
            original = context.log_failure

            def broken(subject: str, failure: Failure) -> None:
                object.__setattr__(context, "log_failure", original)
                raise OSError("injected")

            object.__setattr__(context, "log_failure", broken)
            d.pull("a", nobody("gone"), [1], [1])
            assert (await failure_of(d, "a")).kind == "ConnectionRefused"
            assert d.supervisor._roster._of_request == {}

    run(test)


def test_an_effect_that_raises_costs_no_other() -> None:
    """Two requests wait for an engine that is gone, and the report of the first cannot be handed over. It is made once
    more when the actor has recovered."""

    async def test() -> None:
        async with engine("d") as d:
            d.events.breaks_on = ReceiveEnded
            for request_id in ("a", "b"):
                d.pull(request_id, nobody("gone"), [1], [1])
            assert (await failure_of(d, "b")).kind == "ConnectionRefused"
            assert await until(lambda: [name for name, _ in d.crashes]) == ["peer actor of gone"]
            assert (await failure_of(d, "a")).kind == "ActorCrashed"

    run(test)


def test_actor_that_crashes_on_the_end_of_a_read_quarantines_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is told again, because nobody else would ever say that the READ is over."""

    async def test() -> None:
        options = ConnectorOptions(quiesce_timeout_seconds=0.2)
        async with engine("p", serves=True) as p, engine("d", options=options) as d:
            await reads(d, p, "before")
            original = RemoteEngine._end_read
            crashed = False

            def broken(self: RemoteEngine, event: ReadEnded, now_ns: int) -> None:
                nonlocal crashed
                if not crashed:
                    crashed = True
                    raise RuntimeError("injected")
                original(self, event, now_ns)

            monkeypatch.setattr(RemoteEngine, "_end_read", broken)
            p.lend("remote-a")
            d.pull("a", p, [1], [1])
            assert (await failure_of(d, "a")).kind == "ActorCrashed"
            ended = d.received("a")
            assert ended is not None
            assert not ended.quarantined, "the READ has ended"
            await reads(d, p, "after")

    run(test)


def test_what_an_actor_asks_for_while_it_recovers_begins_when_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It crashes on the end of the last READ over a link that was lost: only now can the connection be torn down."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", options=BRIEF_BACKOFF) as d:
            await reads(d, p, "before")
            original = RemoteEngine.handle
            crashed = False

            def broken(self: RemoteEngine, event: Event, now_ns: int) -> list[Effect]:
                nonlocal crashed
                if isinstance(event, ReadEnded) and not crashed:
                    crashed = True
                    assert original(self, LinkLost(connection=1, detail="reset"), now_ns) == []
                    raise RuntimeError("injected")
                return original(self, event, now_ns)

            monkeypatch.setattr(RemoteEngine, "handle", broken)
            p.lend("remote-a")
            d.pull("a", p, [1], [1])
            await failure_of(d, "a")
            await until(lambda: d.trace.path("peer", "p")[-1] not in ("draining", "disconnecting"))
            await reads(d, p, "after")
            assert [name for name, _ in d.crashes] == ["peer actor of p"]

    run(test)


def test_actor_that_crashes_over_being_retired_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is told again: the roster says it once, and counts on it."""

    async def test() -> None:
        one = ConnectorOptions(peer_limit=1)
        async with engine("d", options=one) as d, engine("new", serves=True) as new, engine("old", serves=True) as old:
            await reads(d, old, "before")
            original = RemoteEngine.handle
            crashed = False

            def broken(self: RemoteEngine, event: Event, now_ns: int) -> list[Effect]:
                nonlocal crashed
                if isinstance(event, Retire) and not crashed:
                    crashed = True
                    raise RuntimeError("injected")
                return original(self, event, now_ns)

            monkeypatch.setattr(RemoteEngine, "handle", broken)
            await reads(d, new, "after")
            await until(lambda: d.trace.path("peer", "old")[-1] == "gone")
            assert [name for name, _ in d.crashes] == ["peer actor of old"]

    run(test)


def test_a_mistake_in_what_is_said_of_waits_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for people. The command is there once: nobody would say it again."""

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(WaitNotices, "begin", broken)

    async def test() -> None:
        async with engine("d") as d, engine("p", serves=True) as p:
            await reads(d, p, "a")
            assert [name for name, _ in d.crashes] == ["peer actor of p"]

    run(test)


def test_too_many_peers() -> None:
    async def test() -> None:
        options = ConnectorOptions(peer_limit=2)
        async with engine("d", options=options) as d:
            for name in ("x", "y", "z"):
                d.pull(name, nobody(name), [1], [1])
            assert (await failure_of(d, "z")).kind == "TooManyPeers"
            assert d.trace.path("request", "z") == ["pending_handshake", "failed"]
            (subject,) = [said for said, failure in d.failures if failure.kind == "TooManyPeers"]
            assert re.fullmatch(r"request z, engine z at 127.0.0.1:1, known for \d+\.\d s", subject)

    run(test)


@pytest.mark.parametrize("named", [None, LeaseName("p-a", 3)])
def test_a_request_whose_parameters_make_no_sense_ends_and_is_in_the_trace(named: LeaseName | None) -> None:
    """With the lease that they name, where that much can be read."""

    async def test() -> None:
        async with engine("d") as d:
            failure = BadParams(field="remote_port", expected="an integer", found="'x'")
            rejected = RejectPull(request_id="a", local_block_ids=[1, 2], failure=failure, age_seconds=2.5)
            if named is not None:
                rejected = msgspec.structs.replace(rejected, lease=named, engine_id="p")
            d.supervisor.deliver(rejected)
            assert await failure_of(d, "a") == failure
            assert d.failures == [("request a, known for 2.5 s", failure)]
            assert d.trace.path("request", "a") == ["pending_handshake", "failed"]
            record = d.trace.records[-1]
            assert (record.reason, record.detail, record.blocks) == ("BadParams", str(failure), 2)
            found = (record.peer, record.remote_request_id, record.lease_number)
            assert found == ((None, None, 0) if named is None else ("p", *named))

    run(test)


@pytest.mark.parametrize("ttl_seconds", [0.2, 0])
def test_an_engine_that_is_not_connected_is_forgotten_in_time_or_never(ttl_seconds: float) -> None:
    async def test() -> None:
        async with engine("d", options=ConnectorOptions(engine_ttl=ttl_seconds)) as d:
            d.pull("a", nobody("dead", free_port()), [1], [1])
            assert (await failure_of(d, "a")).kind == "ConnectionRefused"
            if ttl_seconds:
                await until(lambda: d.trace.path("peer", "dead")[-1] == "gone")
            else:
                await trio.sleep(1.0)
                assert d.trace.path("peer", "dead")[-1] != "gone"
            assert d.crashes == []

    run(test)


def test_stop_fails_what_is_open() -> None:
    async def test() -> None:
        with BlackHole() as silent:
            async with engine("d") as d:
                d.pull("a", nobody("dead", silent.port), [1], [1])
                await until(lambda: d.trace.path("peer", "dead") == ["idle", "handshaking"])
        ended = d.received("a")
        assert ended is not None
        assert ended.failure is not None
        assert ended.failure.kind == "ConnectorStopped"

    run(test)


def test_a_worker_that_stops_fails_what_is_open_at_once() -> None:
    """Not when the process ends: it may go on for long without its NIXL agent."""

    async def test() -> None:
        with BlackHole() as silent:
            async with engine("d") as d:
                d.pull("a", nobody("dead", silent.port), [1], [1])
                await until(lambda: d.trace.path("peer", "dead") == ["idle", "handshaking"])
                d.port.on_event(PortBroken("injected"))
                assert (await failure_of(d, "a")).kind == "ConnectorStopped"

    run(test)


def test_a_worker_that_nobody_can_connect_to_says_so_and_serves_who_is_connected() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            p.memory[:, 1, :] = 7
            for number, name in enumerate(("before", "after")):
                p.lend(f"remote-{name}")
                d.pull(name, p, [2 + number], [1], remote_request_id=f"remote-{name}")
                assert (await until(partial(d.received, name))).failure is None
                if name == "before":
                    p.port.on_event(ListenerLost("injected"))
            assert [failure.kind for _, failure in p.failures] == ["UcxPortClosed"]
            assert [event.reason for event in p.events if isinstance(event, WorkerStopped)] == ["injected"]
            assert (d.blocks([2, 3]) == 7).all()

    run(test)


def test_requests_that_share_blocks_release_them_together_and_a_late_one_is_refused() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            p.memory[:, 1, :] = 7
            p.lend("remote-shared")

            def track(request_id: str) -> None:
                d.supervisor.deliver(
                    TrackLease(request_id=request_id, peer=p.address, lease=lease_of("remote-shared"), age_seconds=0.0)
                )

            track("first")
            track("second")
            d.pull("first", p, [2], [1], remote_request_id="remote-shared")
            assert (await until(lambda: d.received("first"))).failure is None
            await trio.sleep(0.1)
            assert p.sent("remote-shared") is None, "freed while another request waits for the same blocks"
            d.pull("second", p, [3], [1], remote_request_id="remote-shared")
            assert (await until(lambda: d.received("second"))).failure is None
            assert (d.blocks([2, 3]) == 7).all()
            await until(lambda: p.sent("remote-shared"))
            d.pull("third", p, [4], [1], remote_request_id="remote-shared")
            assert (await failure_of(d, "third")).kind == "BlocksConsumed"

    run(test)


def test_released_blocks_are_refused_after_their_peer_was_evicted_too() -> None:
    async def test() -> None:
        async with engine("d", options=ConnectorOptions(peer_limit=1)) as d, engine("p", serves=True) as p:
            p.lend("remote-shared")
            d.pull("first", p, [2], [1], remote_request_id="remote-shared")
            assert (await until(lambda: d.received("first"))).failure is None
            await until(lambda: released(d, 1))
            async with engine("other", serves=True) as other:
                await reads(d, other, "between")
                await until(lambda: released(d, 2))  # only what is owed nothing makes room
                assert d.trace.path("peer", "p")[-1] == "gone"
            p.memory[:] = 99  # The next request's KV lies there now.
            d.pull("second", p, [3], [1], remote_request_id="remote-shared")
            assert (await failure_of(d, "second")).kind == "LeaseOver"

    run(test)


def test_address_that_cannot_be_resolved_costs_only_its_own_request() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            await reads(d, p, "before")
            elsewhere = PeerAddress(engine_id="elsewhere", host="no-such-host.invalid", port=1, tp_size=1)
            d.pull("a", elsewhere, [1], [1])
            failure = await failure_of(d, "a")
            assert failure.kind == "AddressNotResolved"
            assert "no-such-host.invalid does not resolve" in str(failure)
            await reads(d, p, "after")
            assert d.crashes == []
            assert d.trace.path("peer", "p") == ["idle", "handshaking", "ready"]

    run(test)


def test_name_server_that_does_not_answer_is_not_the_engine_s_fault() -> None:
    async def test() -> None:
        async with engine("d", options=ConnectorOptions(handshake_timeout_seconds=0.2)) as d:
            elsewhere = PeerAddress(engine_id="elsewhere", host="hanging.example", port=1, tp_size=1)
            d.pull("a", elsewhere, [1], [1])
            failure = await failure_of(d, "a")
            assert failure.kind == "AddressNotResolved"
            assert "no answer within 0.2 s: name servers are silent or slow" in str(failure)

    with name_server():
        run(test)


def test_an_engine_that_answers_and_cannot_be_read_ends_nothing_but_its_own_handshakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a firewall drops what goes to the ports of UCX: no block waits for the end of a READ."""

    async def never(port: RealNixlPort, agent: AgentName) -> None:
        await trio.sleep_forever()

    async def test() -> None:
        options = ConnectorOptions(
            handshake_timeout_seconds=0.5, backoff_initial_seconds=0.02, backoff_max_seconds=0.05
        )
        async with engine("p", serves=True) as p, engine("d", options=options) as d:
            with monkeypatch.context() as patched:
                patched.setattr(RealNixlPort, "reach", never)
                for number in itertools.count():
                    d.pull(f"a-{number}", p, [1], [1])
                    failure = await failure_of(d, f"a-{number}")
                    # What comes before the READ may take longer than the limit, if this process stands still.
                    if failure.kind not in ("HandshakeTimeout", "PeerBackoff"):
                        break
                assert failure.kind == "FirstReadNeverEnded"
                assert "answers, and nothing could be read from its worker PP 0 TP 0 within 0.5 s" in str(failure)
                await until(lambda: d.counts().remote_agents == 0)
                assert d.counts().reads == 0
            await is_served_again(d, p)

    run(test)


def test_engine_that_stood_still_itself_blames_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found = HostNames.address

    async def address(names: HostNames, host: str, port: int) -> str:
        time.sleep(0.3)  # as a process that is stopped, or whose engine keeps the interpreter
        return await found(names, host, port)

    async def test() -> None:
        options = ConnectorOptions(handshake_timeout_seconds=0.2)
        async with engine("p", serves=True) as p, engine("d", options=options) as d:
            with monkeypatch.context() as patched:
                patched.setattr(HostNames, "address", address)
                d.pull("a", p, [1], [1])
                failure = await failure_of(d, "a")
            assert failure.kind == "HandshakeTimeout"
            assert "this engine itself did not come to it" in str(failure)

    run(test)


def test_a_handshake_that_took_too_long_says_that_this_engine_stood_still_itself() -> None:
    """Also the second time, which it has because of the first."""
    clock = WarpedClock()

    async def test() -> None:
        with BlackHole() as silent:
            async with engine("d", options=ConnectorOptions(handshake_timeout_seconds=2.0), clock=clock) as d:
                for request_id, stands_still in (("waited", ()), ("once", (40.0,)), ("stood", (40.0, 40.0))):
                    d.pull(request_id, nobody(request_id, silent.port), [1], [1])
                    await trio.sleep(0.5)
                    for seconds in stands_still:
                        clock.leap(seconds)
                        await trio.sleep(2.0)
                    failure = await failure_of(d, request_id)
                    assert isinstance(failure, HandshakeTimeout)
                    assert (failure.late_seconds >= 38) == (request_id == "stood"), failure
                    assert ("stood still" in str(failure)) == (failure.late_seconds > 0)

    run(test)


@pytest.mark.parametrize("waits_for", ["answer", "control socket", "first READ"])
def test_who_stood_still_while_it_was_connected_asks_once_more(monkeypatch: pytest.MonkeyPatch, waits_for: str) -> None:
    """What came meanwhile was taken by nobody: the first attempt waits until it is given up."""
    clock = WarpedClock()
    port: type = {"answer": ZmqRequester, "control socket": ZmqLink, "first READ": RealNixlPort}[waits_for]
    name = {"answer": "ask", "control socket": "receive", "first READ": "reach"}[waits_for]
    found, calls = getattr(port, name), 0

    async def stood_still(self: object, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            clock.leap(40.0)
            await trio.sleep_forever()
        return await found(self, *arguments)

    async def test() -> None:
        options = ConnectorOptions(handshake_timeout_seconds=4.0)
        async with engine("p", serves=True) as p, engine("d", options=options, clock=clock) as d:
            with monkeypatch.context() as patched:
                patched.setattr(port, name, stood_still)
                await reads(d, p, "a")
            assert calls >= 2

    run(test)


def test_something_else_that_listens_there_is_told_from_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    look_patiently(monkeypatch, 6.0)  # the other servers, and this process, may be slow
    options = ConnectorOptions(handshake_timeout_seconds=8.0)

    async def test() -> None:
        with contextlib.ExitStack() as listening:
            silent = listening.enter_context(BlackHole())
            others = {what: listening.enter_context(serve()) for what, serve in OTHER_SERVERS.items()}
            async with engine("p", serves=True) as p, engine("d", options=options) as d:
                d.pull("hangs", nobody("hung", silent.port), [1], [1])
                for number, (what, port) in enumerate(others.items(), 2):
                    d.pull(what, nobody(f"p-{number}", port), [number], [1])
                await reads(d, p, "beside")
                for what in others:
                    failure = await failure_of(d, what)
                    assert failure.kind == "HandshakeMalformed", what
                    assert "something other than a NIXL connector" in str(failure), what
                assert d.received("hangs") is None
                hung = await failure_of(d, "hangs", 30.0)
                assert hung.kind == "HandshakeTimeout"
                assert "does the engine hang" in str(hung)
                assert d.crashes == []

    run(test)


@pytest.mark.parametrize("where", ["question", "agent"])
def test_an_engine_without_descriptors_does_not_blame_its_peer(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    async def add_remote_agent(*_: object) -> AgentName:
        raise NixlCallFailed("add_remote_agent", "injected", no_descriptor_left=True)

    async def test() -> None:
        options = ConnectorOptions(handshake_timeout_seconds=2.0)
        with BlackHole() as silent:
            async with engine("p", serves=True) as p, engine("d", options=options) as d:
                if where == "question":
                    monkeypatch.setattr(ZmqRequester, "reached", Reached.NO_DESCRIPTOR)
                else:
                    monkeypatch.setattr(d.port, "add_remote_agent", add_remote_agent)
                d.pull("a", nobody("p", silent.port) if where == "question" else p, [1], [1])
                failure = await failure_of(d, "a")
                assert failure.kind == "NoDescriptorLeft"
                assert "this engine has no descriptor left (`ulimit -n`)" in str(failure)

    run(test)


def test_full_table_makes_room_for_the_engine_that_replaced_another() -> None:
    async def test() -> None:
        async with engine("d", options=ConnectorOptions(peer_limit=1)) as d:
            async with engine("old", serves=True) as old:
                await reads(d, old, "before")
            async with engine("new", serves=True) as new:
                await reads(d, new, "after")
            await until(lambda: d.trace.path("peer", "old")[-1] == "gone")

    run(test)


def test_what_an_engine_said_last_does_not_keep_its_place_in_a_full_table() -> None:
    """Its links are lost in the moment in which its successor is asked for, say: nobody wants anything of it."""

    async def test() -> None:
        one = ConnectorOptions(peer_limit=1)
        async with engine("d", options=one) as d, engine("new", serves=True) as new, engine("old", serves=True) as old:
            await reads(d, old, "before")
            (actor,) = d.supervisor._peers.values()
            actor.tell(LinkLost(connection=1, detail="reset"))
            await reads(d, new, "after")

    run(test)


def test_one_place_in_a_full_table_is_given_away_once() -> None:
    """Two newcomers in one step: the unused peer makes room for the first of them only. Who asks for that peer in the
    same step is served by its next connection."""

    async def test() -> None:
        two = ConnectorOptions(peer_limit=2)
        async with engine("d", options=two) as d, engine("new", serves=True) as new, engine("old", serves=True) as old:
            await reads(d, old, "before")
            with BlackHole() as hole:
                d.pull("silent", PeerAddress(engine_id="silent", host=HOST, port=hole.port, tp_size=1), [9], [1])
                for each in (new, old):
                    each.lend(f"remote-{each.engine_id}")
                    d.pull(each.engine_id, each, [2], [1])
                d.pull("other", nobody("other"), [9], [1])
                d.supervisor.deliver(AbortPull(request_id="silent"))  # makes room for the next connection to old
                assert (await failure_of(d, "other")).kind == "TooManyPeers"
                assert (await until(lambda: d.received("new"))).failure is None
                assert (await until(lambda: d.received("old"))).failure is None

    run(test)


def test_the_engine_that_was_used_longest_ago_makes_room() -> None:
    """Scenario 50: the number of connections does not grow with that of the engines."""

    async def test() -> None:
        options = ConnectorOptions(peer_limit=2)
        async with (
            engine("d", options=options) as d,
            engine("a", serves=True) as a,
            engine("b", serves=True) as b,
            engine("c", serves=True) as c,
        ):
            for turn, each in enumerate((a, b, a, c)):
                await reads(d, each, f"first-{turn}")
            assert d.trace.path("peer", "b")[-1] == "gone"
            assert d.trace.path("peer", "a") == ["idle", "handshaking", "ready"]
            for turn, each in enumerate((b, c, a, b, c, a)):
                await reads(d, each, f"then-{turn}")
                assert d.counts().remote_agents <= 2
            await until(lambda: len(d.supervisor._peers) == 2)
            assert d.crashes == []

    run(test)


def attempts(d: Engine, peer: str) -> int:
    return d.trace.path("peer", peer).count("handshaking")


def test_an_engine_that_comes_back_is_served_while_others_are_asked_for_in_vain() -> None:
    """Scenario 40: some engine is always being tried in vain, and that keeps nothing from being put right."""

    async def test() -> None:
        options = ConnectorOptions(
            handshake_timeout_seconds=3.0, backoff_initial_seconds=0.02, backoff_max_seconds=0.05
        )
        with BlackHole() as silent:
            async with engine("d", options=options) as d, trio.open_nursery() as nursery:

                async def ask_in_vain(name: str) -> None:
                    for number in itertools.count():
                        d.pull(f"{name}-{number}", nobody(name, silent.port), [20], [1])
                        await failure_of(d, f"{name}-{number}")
                        await trio.sleep(0.02)

                for name in ("x", "y", "z"):
                    nursery.start_soon(ask_in_vain, name)
                async with engine("p", serves=True) as old:
                    await reads(d, old, "before")
                    port = old.address.port
                for turn in range(3):
                    async with engine("p", serves=True, port=port) as new:
                        await rested(d, "p")
                        await reads(d, new, f"after-{turn}")
                        await until(lambda: d.counts().remote_agents == 1)
                        tried = {name: attempts(d, name) for name in ("x", "y", "z")}
                        await until(lambda tried=tried: all(attempts(d, name) > tried[name] for name in tried), 30.0)
                nursery.cancel_scope.cancel()

    run(test)


def test_half_a_handshake_leaves_nothing() -> None:
    """Scenario 51: the agent of the first rank is loaded when that of the second turns out to be of no use."""

    async def test() -> None:
        options = ConnectorOptions(backoff_initial_seconds=0.01)
        async with parallel_engine("p", 2, serves=True) as ps, engine("d", options=options) as d:
            useless = ps[1].payload().replace(ps[1].port.agent_metadata, bytes(len(ps[1].port.agent_metadata)))
            listener = ps[0].listener
            assert listener is not None
            listener.answer_with({ps[0].local.layout.rank: ps[0].payload(), ps[1].local.layout.rank: useless})
            local_lists = set()
            for attempt in range(5):
                lend_by_all(ps, f"remote-{attempt}")
                await rested(d, "p")
                d.pull(f"{attempt}", ps[0], [1], [1])
                failure = await failure_of(d, f"{attempt}")
                assert failure.kind == "HandshakeRefused"
                assert "could not connect to P's UCX port, or refused its metadata" in str(failure)
                await until(lambda: d.counts().remote_agents == 0)
                local_lists.add(d.counts().descriptor_lists)
            assert len(local_lists) == 1, "lists pile up"
            assert d.crashes == []

    run(test)


def test_the_agent_of_a_rank_that_has_ended_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener answers for it still: it is in the scheduler's process."""
    loaded: list[bytes] = []
    load = RealNixlPort.add_remote_agent

    async def count(port: RealNixlPort, metadata: bytes) -> str:
        loaded.append(metadata)
        return await load(port, metadata)

    monkeypatch.setattr(RealNixlPort, "add_remote_agent", count)

    async def test() -> None:
        options = ConnectorOptions(backoff_initial_seconds=0.01)
        async with parallel_engine("p", 2, serves=True) as ps, engine("d", options=options) as d:
            ps[1].control.close()
            for attempt in range(3):
                lend_by_all(ps, f"remote-{attempt}")
                await rested(d, "p")
                d.pull(f"{attempt}", ps[0], [1], [1])
                assert (await failure_of(d, f"{attempt}")).kind == "ControlLinkLost"
            assert loaded == []
            assert d.crashes == []

    run(test)


def test_a_peer_that_dies_during_the_handshake_fails_its_requests_and_leaves_nothing() -> None:
    """Scenario 43: it has heard the question, and is gone before it answers."""

    async def test() -> None:
        async with engine("d", options=BRIEF_BACKOFF) as d, engine("p", serves=True) as p:
            mute = ZmqSideChannel()
            listener = mute.listen(HOST, 0)
            for number in range(3):
                d.pull(f"{number}", nobody("dies", listener.port), [number], [1])
            await listener.receive()
            assert d.received("0") is None
            mute.close()
            for number in range(3):
                failure = await failure_of(d, f"{number}")
                assert failure.kind == "HandshakeRefused"
                assert "has ended the connection instead of answering" in str(failure)
            assert (d.counts().remote_agents, d.counts().reads) == (0, 0)
            await reads(d, p, "after")
            assert d.crashes == []

    run(test)
