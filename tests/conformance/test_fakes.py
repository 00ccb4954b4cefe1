"""The simulator's ports keep the same contracts as the real ones: the same suites, on virtual time."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import trio
from trio.testing import MockClock

from connector.ports.nixl import AgentName, MemoryRange, NixlEvent, NixlPort, NotificationReceived
from connector.ports.side_channel import SideChannel
from tests.conformance.nixl_suite import (
    BLOCK_BYTES,
    BLOCKS,
    NixlPortSuite,
    NixlWorld,
    Peer,
    new_memory,
    new_reader,
    pattern,
    read_in_flight,
    reader_and_peer,
    whole,
)
from tests.conformance.side_channel_suite import SideChannelSuite
from tests.simulation.agenda import Agenda
from tests.simulation.fake_network import FakeNetwork, FakeSideChannel
from tests.simulation.fake_nixl import FakeNixlPort, FakeNixlWorld


class FakePeer(Peer):
    """A port in this process that plays the remote engine."""

    def __init__(self, port: FakeNixlPort) -> None:
        self.port = port
        self._received: list[tuple[AgentName, bytes]] = []
        port.set_event_callback(self._on_event)
        port.expect_notifications(True)

    def _on_event(self, event: NixlEvent) -> None:
        if isinstance(event, NotificationReceived):
            self._received.append((event.sender, event.message_untrusted))

    async def pause(self) -> None:
        self.port.pause()

    async def resume(self) -> None:
        self.port.resume()

    async def kill(self) -> None:
        self.port.kill()

    async def lose_block(self, block: int) -> None:
        self.port.lose_memory(self.run.address + block * BLOCK_BYTES, BLOCK_BYTES)

    async def notifications(self) -> list[tuple[AgentName, bytes]]:
        return list(self._received)

    async def notify(self, metadata: bytes, message: bytes) -> None:
        name = await self.port.add_remote_agent(metadata)
        await self.port.send_notification(name, message)


class FakeWorld(NixlWorld):
    def __init__(self, agenda: Agenda, *, reads_inline: bool) -> None:
        self.nixl = FakeNixlWorld(agenda)
        self._reads_inline = reads_inline
        self._numbers = itertools.count()
        self._memories: list[object] = []

    async def open_port(
        self, ranges: Sequence[MemoryRange], *, stepwise: bool = False, agent_name: AgentName | None = None
    ) -> NixlPort:
        return self._open(ranges, agent_name, inline=self._reads_inline and not stepwise)

    def _open(self, ranges: Sequence[MemoryRange], agent_name: AgentName | None, *, inline: bool) -> FakeNixlPort:
        name = agent_name or f"agent {next(self._numbers)}"
        return self.nixl.open(name, ranges, time.monotonic_ns, reads_inline=inline)

    async def open_peer(self, *, stepwise: bool) -> Peer:
        memory, run = new_memory()
        for block in range(BLOCKS):
            memory[block] = np.frombuffer(pattern(block), dtype=np.uint8)
        self._memories.append(memory)
        peer = FakePeer(self._open(whole(memory), None, inline=self._reads_inline and not stepwise))
        peer.metadata, peer.run = peer.port.agent_metadata, run
        return peer

    async def break_port(self, port: NixlPort) -> None:
        assert isinstance(port, FakeNixlPort)
        await trio.lowlevel.checkpoint()
        port.break_down("the test broke it")


class OnVirtualTime:
    """Runs a scenario under a clock that jumps to whatever comes next."""

    def run_virtually(self, main: Callable[[], Awaitable[None]]) -> None:
        trio.run(main, clock=MockClock(autojump_threshold=0))


class FakeNixlSuite(OnVirtualTime, NixlPortSuite):
    reads_inline: bool

    @asynccontextmanager
    async def _world(self) -> AsyncIterator[NixlWorld]:
        agenda = Agenda()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agenda.run)
            try:
                yield FakeWorld(agenda, reads_inline=self.reads_inline)
            finally:
                agenda.stop()

    def world(self) -> AbstractAsyncContextManager[NixlWorld]:
        return self._world()

    def run(self, scenario: Callable[[NixlWorld], Awaitable[None]], limit_seconds: float = 60.0) -> None:
        async def main() -> None:
            with trio.fail_after(limit_seconds):
                async with self.world() as world:
                    await scenario(world)

        self.run_virtually(main)


class TestFakeNixlOverANetwork(FakeNixlSuite):
    reads_inline = False

    def test_an_abandoned_read_goes_on_writing(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            handle = await read_in_flight(reader, peer)
            assert await reader.port.aclose(0) == [handle]
            assert isinstance(world, FakeWorld)
            assert [read.handle for read in world.nixl.reads_in_flight()] == [handle]
            await peer.resume()
            await trio.sleep(1)
            assert reader.holds(range(BLOCKS), range(BLOCKS))
            assert list(world.nixl.reads_in_flight()) == []
            assert await peer.notifications() == []

        self.run(scenario)

    def test_what_is_overwritten_under_a_read_shows(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            assert isinstance(world, FakeWorld)
            reader = await new_reader(world)
            memory, run = new_memory()
            memory[:] = 1
            source = await world.open_port(whole(memory))
            await reader.connect(source.agent_metadata, run)
            handle = await reader.post(range(BLOCKS), range(BLOCKS))
            (read,) = world.nixl.reads_in_flight()
            await trio.sleep(read.seconds * 0.75)
            memory[:] = 2
            await reader.recorder.end_of(handle)
            assert set(reader.memory.reshape(-1).tolist()) == {1, 2}

        self.run(scenario)

    def test_what_is_sent_to_the_dead_before_it_is_noticed_is_lost_without_a_word(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            await peer.kill()
            await reader.port.send_notification(reader.peer_name, b"lost")
            await trio.sleep(1)
            assert await peer.notifications() == []

        self.run(scenario)


class TestFakeNixlOverSharedMemory(FakeNixlSuite):
    reads_inline = True

    def test_a_read_needs_no_help_from_a_paused_peer(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=False)
            await peer.pause()
            await reader.recorder.end_of(await reader.post([1], [2]))
            assert reader.holds([1], [2])

        self.run(scenario)


class TestFakeSideChannel(OnVirtualTime, SideChannelSuite):
    def make_channel(self) -> SideChannel:
        agenda = Agenda()
        trio.lowlevel.spawn_system_task(agenda.run)
        return FakeSideChannel(FakeNetwork(agenda))

    def run(self, scenario: Callable[[SideChannel], Awaitable[None]], limit_seconds: float = 60.0) -> None:
        async def main() -> None:
            channel = self.make_channel()
            try:
                with trio.fail_after(limit_seconds):
                    await scenario(channel)
            finally:
                channel.close()

        self.run_virtually(main)
