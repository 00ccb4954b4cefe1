"""READs over NIXL's back end LIBFABRIC, which EFA needs, where it can be opened: with libfabric 2.4 or later, hwloc and
libcuda. Without an EFA device it moves data over TCP.

What it leaves open that UCX does not is in `connector.ports.nixl_agent.other_back_ends`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from connector.ports.nixl import NixlCallFailed, PortBroken
from connector.ports.nixl_agent import RealNixlPort
from tests.conformance.nixl_suite import (
    BLOCKS,
    NixlWorld,
    new_memory,
    new_reader,
    peer_got,
    read_in_flight,
    reader_and_peer,
    whole,
)
from tests.conformance.test_nixl_agent import RealWorld

BACKENDS = ("LIBFABRIC",)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def usable() -> None:
    try:
        RealNixlPort.open("tried", whole(new_memory()[0]), BACKENDS).close_blocking(1.0)
    except NixlCallFailed as failed:
        pytest.skip(f"NIXL cannot open LIBFABRIC here: {failed}")


def run(scenario: Callable[[NixlWorld], Awaitable[None]]) -> None:
    async def main() -> None:
        world = RealWorld(BACKENDS)
        try:
            with trio.fail_after(90):
                await scenario(world)
        finally:
            await world.end()

    trio.run(main)


def test_reads_and_notifications() -> None:
    async def scenario(world: NixlWorld) -> None:
        reader, peer = await reader_and_peer(world, stepwise=False)
        await reader.recorder.done(await reader.post(range(BLOCKS), range(BLOCKS)[::-1]))
        assert reader.holds(range(BLOCKS), range(BLOCKS)[::-1])
        await reader.recorder.done(await reader.post([3], [5]))
        await reader.port.send_notification(reader.peer_name, b"done")
        assert await peer_got(peer, 1) == [(reader.port.agent_name, b"done")]

    run(scenario)


def test_a_dead_peer_costs_nobody_else_anything() -> None:
    """Its own READs have no end."""

    async def scenario(world: NixlWorld) -> None:
        reader, peer = await reader_and_peer(world, stepwise=False)
        other = await world.open_peer(stepwise=False)
        await reader.port.add_remote_agent(other.metadata)
        in_flight = await read_in_flight(reader, peer)
        single = await reader.post([0], [0])
        await peer.kill()
        dead_peer = reader.remote
        reader.remote = await reader.port.prepare_remote(
            (await reader.port.add_remote_agent(other.metadata)), [other.run]
        )
        for _ in range(50):
            await reader.recorder.done(await reader.post([1, 2], [3, 4]))
            assert reader.holds([1, 2], [3, 4])
        await trio.sleep(1.0)
        assert not {in_flight, single} & reader.recorder.ends().keys()
        assert not [each for each in reader.recorder.events if isinstance(each, PortBroken)]
        await reader.port.remove_remote_agent(reader.peer_name)
        await reader.port.release_descriptor_list(dead_peer)
        # A successor has another name.
        successor = await world.open_peer(stepwise=False)
        name = await reader.port.add_remote_agent(successor.metadata)
        reader.remote = await reader.port.prepare_remote(name, [successor.run])
        await reader.recorder.done(await reader.post([7], [8]))
        assert reader.holds([7], [8])

    run(scenario)


def test_an_agent_that_was_removed_is_read_from_again() -> None:
    async def scenario(world: NixlWorld) -> None:
        reader, peer = await reader_and_peer(world, stepwise=False)
        await reader.recorder.done(await reader.post([1], [2]))
        await reader.port.remove_remote_agent(reader.peer_name)
        with trio.fail_after(20):  # NIXL waits for a minute for a peer that shakes hands again
            await reader.connect(peer.metadata, peer.run)
            await reader.recorder.done(await reader.post([3], [4]))
        assert reader.holds([3], [4])

    run(scenario)


def test_a_port_can_be_closed_and_another_one_opened() -> None:
    async def scenario(world: NixlWorld) -> None:
        for _ in range(3):
            reader = await new_reader(world)
            peer = await world.open_peer(stepwise=False)
            await reader.connect(peer.metadata, peer.run)
            await reader.recorder.done(await reader.post([1], [2]))
            assert await reader.port.aclose(1.0) == []

    run(scenario)
