"""The simulator's ports keep the same contracts as the real ones: the same suites, on virtual time."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import inf

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from connector.clock import BootClock
from connector.ports.nixl import AgentName, MemoryRange, NixlEvent, NixlPort, NotificationReceived
from connector.ports.side_channel import ConnectionEnded, SideChannel
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
from tests.conformance.side_channel_suite import HOST, PeerProcess, SideChannelSuite, lost_soon, serve
from tests.simulation.agenda import Agenda
from tests.simulation.fake_network import LATENCY_SECONDS, FakeNetwork, FakeSideChannel, NetworkRules
from tests.simulation.fake_nixl import STRAY_GRACE_SECONDS, FakeNixlPort, FakeNixlWorld, NixlRules


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


class EarlyErrors(NixlRules):
    """READs of `erring` agents end early, once each."""

    def __init__(self) -> None:
        self.erring: set[AgentName] = set()
        self.seconds = 0.1
        self.outlive_removal = False

    def read_errs_early(self, initiator: AgentName, target: AgentName) -> bool:
        errs = initiator in self.erring
        self.erring.discard(initiator)
        return errs

    def stray_seconds(self, initiator: AgentName, target: AgentName) -> float:
        return self.seconds

    def strays_outlive_removal(self, initiator: AgentName, target: AgentName) -> bool:
        return self.outlive_removal


class FakeWorld(NixlWorld):
    def __init__(self, agenda: Agenda, *, reads_inline: bool) -> None:
        self.rules = EarlyErrors()
        self.misuse: list[str] = []
        self.nixl = FakeNixlWorld(agenda, self.rules, self.misuse.append)
        self._reads_inline = reads_inline
        self._numbers = itertools.count()
        self._memories: list[object] = []

    async def open_port(
        self, ranges: Sequence[MemoryRange], *, stepwise: bool = False, agent_name: AgentName | None = None
    ) -> NixlPort:
        return self._open(ranges, agent_name, inline=self._reads_inline and not stepwise)

    def _open(
        self, ranges: Sequence[MemoryRange], agent_name: AgentName | None, *, inline: bool, place: str | None = None
    ) -> FakeNixlPort:
        name = agent_name or f"agent {next(self._numbers)}"
        return self.nixl.open(name, ranges, BootClock().now_ns, reads_inline=inline, place=place)

    async def open_peer(self, *, stepwise: bool, place: str | None = None) -> Peer:
        memory, run = new_memory()
        for block in range(BLOCKS):
            memory[block] = np.frombuffer(pattern(block), dtype=np.uint8)
        self._memories.append(memory)
        inline = self._reads_inline and not stepwise
        peer = FakePeer(self._open(whole(memory), None, inline=inline, place=place))
        peer.metadata, peer.run = peer.port.agent_metadata, run
        return peer

    async def forget_agent(self, port: NixlPort, name: AgentName) -> None:
        await trio.lowlevel.checkpoint()
        assert isinstance(port, FakeNixlPort)
        port.forget_agent(name)

    async def fail_next_read_early(self, port: NixlPort) -> None:
        await trio.lowlevel.checkpoint()
        self.rules.erring.add(port.agent_name)

    async def lose_listener(self, port: NixlPort) -> None:
        assert isinstance(port, FakeNixlPort)
        await trio.lowlevel.checkpoint()
        port.lose_listener()

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

    def test_an_agent_that_is_loaded_in_another_process_brings_other_memory_of_that_one(self) -> None:
        """And notifications to it arrive there. As with real agents: docs/nixl.md fact 44."""

        async def scenario(world: NixlWorld) -> None:
            assert isinstance(world, FakeWorld)
            size, place = BLOCKS * BLOCK_BYTES, "a place"
            at = (5 * BLOCK_BYTES + size // 2) % (size - BLOCK_BYTES + 1)
            reader, before = await new_reader(world), await world.open_peer(stepwise=True, place=place)
            await before.kill()
            after = await world.open_peer(stepwise=True, place=place)
            await reader.connect(before.metadata, before.run)
            await reader.recorder.done(await reader.post([3], [5]))
            assert bytes(reader.memory[3]) == b"".join(map(pattern, range(BLOCKS)))[at : at + BLOCK_BYTES]
            await reader.port.send_notification(reader.peer_name, b"hello")
            await trio.sleep(1)
            assert await after.notifications() == [(reader.port.agent_name, b"hello")]

        self.run(scenario)

    @pytest.mark.parametrize("outlive_removal", [False, True])
    @pytest.mark.parametrize("seconds", [STRAY_GRACE_SECONDS / 2, STRAY_GRACE_SECONDS * 4, inf])
    def test_how_long_a_read_that_erred_early_goes_on_writing(self, seconds: float, outlive_removal: bool) -> None:
        async def scenario(world: NixlWorld) -> None:
            assert isinstance(world, FakeWorld)
            world.rules.seconds, world.rules.outlive_removal = seconds, outlive_removal
            reader, _ = await reader_and_peer(world, stepwise=True)
            await world.fail_next_read_early(reader.port)
            handle = await reader.post(range(BLOCKS), range(BLOCKS))
            await reader.recorder.failed(handle, quiescent=False)
            assert reader.holds(range(BLOCKS // 2), range(BLOCKS // 2))
            assert reader.untouched(range(BLOCKS // 2, BLOCKS))
            await reader.port.remove_remote_agent(reader.peer_name)
            await trio.sleep(STRAY_GRACE_SECONDS * 1.1)
            landed = [block for block in range(BLOCKS) if reader.holds([block], [block])]
            (read,) = world.nixl.reads_in_flight() if seconds > STRAY_GRACE_SECONDS and outlive_removal else (None,)
            if read is None:
                assert list(world.nixl.reads_in_flight()) == []
            else:
                assert read.writes_into(reader.memory[BLOCKS - 1].ctypes.data, 1)
            if seconds < STRAY_GRACE_SECONDS:
                assert len(landed) == BLOCKS
            elif seconds == inf:
                assert len(landed) == BLOCKS // 2
            else:
                assert BLOCKS // 2 < len(landed) < BLOCKS
            await trio.sleep(STRAY_GRACE_SECONDS * 4)
            grows = outlive_removal and STRAY_GRACE_SECONDS < seconds < inf
            assert reader.holds(range(BLOCKS), range(BLOCKS)) == (grows or seconds < STRAY_GRACE_SECONDS)
            assert world.misuse == []

        self.run(scenario)

    def test_nothing_arrives_from_a_dead_peer(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            assert isinstance(world, FakeWorld)
            reader, peer = await reader_and_peer(world, stepwise=True)
            await world.fail_next_read_early(reader.port)
            await reader.recorder.failed(await reader.post(range(BLOCKS), range(BLOCKS)), quiescent=False)
            await peer.kill()
            await trio.sleep(world.rules.seconds * 2)
            assert reader.untouched(range(BLOCKS // 2, BLOCKS))
            assert list(world.nixl.reads_in_flight()) == []

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

    def test_a_call_that_was_begun_is_done_although_it_is_cancelled(self) -> None:
        """As with real agents, where it takes microseconds; one behind another is withdrawn."""

        async def scenario(world: NixlWorld) -> None:
            reader = await new_reader(world)
            prepared: list[int] = []

            async def prepare() -> None:
                prepared.append(await reader.port.prepare_local([reader.run]))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(prepare)
                nursery.start_soon(prepare)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert len(prepared) == reader.port.counts().descriptor_lists == 1

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

    def test_a_read_can_err_early_too(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, _ = await reader_and_peer(world, stepwise=False)
            await world.fail_next_read_early(reader.port)
            await reader.recorder.failed(await reader.post(range(BLOCKS), range(BLOCKS)), quiescent=False)
            assert reader.untouched(range(BLOCKS // 2, BLOCKS))
            await trio.sleep(1)
            assert reader.holds(range(BLOCKS), range(BLOCKS))

        self.run(scenario)


class FakePeerProcess(PeerProcess):
    def __init__(self, network: FakeNetwork) -> None:
        self.host = "elsewhere"
        self._network = network
        self.listener = FakeSideChannel(network, self.host).listen(self.host, 0)
        self.port = self.listener.port

    async def kill(self) -> None:
        await trio.lowlevel.checkpoint()
        self._network.kill(self.host)


class Unsteady(NetworkRules):
    """A message takes `seconds`, and each further one takes `shrink` times as long."""

    def __init__(self) -> None:
        self.seconds = LATENCY_SECONDS
        self.shrink = 1.0
        self.is_cut = False
        self.is_ordered = True

    def delays(self, source: str, target: str) -> Sequence[float]:
        self.seconds *= self.shrink
        return () if self.is_cut else (self.seconds,)

    def keeps_order(self, source: str, target: str) -> bool:
        return self.is_ordered


class Guarded(NetworkRules):
    """One host is let in nowhere."""

    STRANGER = "stranger"

    def admits(self, source: str, target: str) -> bool:
        return source != self.STRANGER


class TestFakeSideChannel(OnVirtualTime, SideChannelSuite):
    def make_channel(self) -> SideChannel:
        agenda = Agenda()
        trio.lowlevel.spawn_system_task(agenda.run)
        self.rules = Unsteady()
        return FakeSideChannel(FakeNetwork(agenda, self.rules))

    @asynccontextmanager
    async def _peer_process(self, channel: SideChannel) -> AsyncIterator[PeerProcess]:
        assert isinstance(channel, FakeSideChannel)
        peer = FakePeerProcess(channel.network)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, peer.listener, lambda frames: frames)
            yield peer
            nursery.cancel_scope.cancel()

    def peer_process(self, channel: SideChannel) -> AbstractAsyncContextManager[PeerProcess]:
        return self._peer_process(channel)

    def make_guarded(self) -> tuple[SideChannel, SideChannel, SideChannel]:
        agenda = Agenda()
        trio.lowlevel.spawn_system_task(agenda.run)
        network = FakeNetwork(agenda, Guarded())
        return FakeSideChannel(network), FakeSideChannel(network, "member"), FakeSideChannel(network, Guarded.STRANGER)

    def run_trio(self, main: Callable[[], Awaitable[None]]) -> None:
        self.run_virtually(main)

    def run(self, scenario: Callable[[SideChannel], Awaitable[None]], limit_seconds: float = 60.0) -> None:
        async def main() -> None:
            channel = self.make_channel()
            try:
                with trio.fail_after(limit_seconds):
                    await scenario(channel)
            finally:
                channel.close()

        self.run_virtually(main)

    @pytest.mark.parametrize("is_ordered", [True, False])
    def test_messages_of_a_link_overtake_each_other_only_if_the_rules_say_so(self, is_ordered: bool) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            link.send([b"first of all"])
            address = (await listener.receive()).reply_address
            for sends in (link.send, lambda frames: listener.reply(address, frames)):
                self.rules.seconds, self.rules.shrink, self.rules.is_ordered = 10.0, 0.9, is_ordered
                for number in range(20):
                    sends([b"%d" % number])
            there = [(await listener.receive()).frames_untrusted for _ in range(20)]
            here = [await link.receive() for _ in range(20)]
            sent = [(b"%d" % number,) for number in range(20)]
            assert here == there == (sent if is_ordered else sent[::-1])

        self.run(scenario)

    @pytest.mark.parametrize("is_answered", [True, False])
    def test_the_end_of_a_connection_does_not_overtake_a_reply(self, is_answered: bool) -> None:
        """Also where a listener ends one connection, as an engine does that has too many."""

        async def scenario(channel: SideChannel) -> None:
            assert isinstance(channel, FakeSideChannel)
            listener = channel.listen(HOST, 0)
            outcome: list[object] = []

            async def ask() -> None:
                try:
                    outcome.append(await channel.connect(HOST, listener.port).ask([b"hello?"]))
                except ConnectionEnded:
                    outcome.append("ended")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                address = (await listener.receive()).reply_address
                self.rules.seconds, self.rules.shrink = 10.0, 0.1
                if is_answered:
                    listener.reply(address, [b"here"])
                channel.network.cut_off(address)
            assert outcome == [(b"here",) if is_answered else "ended"]

        self.run(scenario)

    def test_a_link_notices_nothing_of_lost_messages(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            link.send([b"before"])
            await listener.receive()
            self.rules.is_cut = True
            assert link.send([b"lost"])
            await trio.sleep(1)
            self.rules.is_cut = False
            assert link.send([b"after"])
            assert (await listener.receive()).frames_untrusted == (b"after",)

        self.run(scenario)

    def test_a_link_connects_as_soon_as_the_network_works(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            self.rules.is_cut = True
            link = await channel.open_link(HOST, listener.port)
            assert link.send([b"patience"])
            await trio.sleep(10)
            self.rules.is_cut = False
            assert (await listener.receive()).frames_untrusted == (b"patience",)

        self.run(scenario)

    def test_the_news_of_the_end_can_get_lost_until_something_is_sent(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            async with self.peer_process(channel) as peer:
                link = await channel.open_link(peer.host, peer.port)
                link.send([b"hello"])
                await link.receive()
                self.rules.is_cut = True
                await peer.kill()
                await trio.sleep(10)
                self.rules.is_cut = False
                with trio.move_on_after(10) as silence:
                    await link.receive()
                assert silence.cancelled_caught
                assert link.send([b"hello?"])
                await lost_soon(link)

        self.run(scenario)

    def test_a_killed_process_does_nothing_any_more(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            assert isinstance(channel, FakeSideChannel)
            listener = channel.listen(HOST, 0)
            other = FakeSideChannel(channel.network, "elsewhere")
            link = await other.open_link(HOST, listener.port)
            link.send([b"hello"])
            address = (await listener.receive()).reply_address
            stuck: list[object] = []

            async def wait(wait_for: Callable[[], Awaitable[object]]) -> None:
                stuck.append(await wait_for())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, link.receive)
                nursery.start_soon(wait, lambda: other.connect(HOST, listener.port).ask([b"?"]))
                asked = await listener.receive()
                channel.network.kill("elsewhere")
                for each in (address, asked.reply_address):
                    listener.reply(each, [b"too late"])
                assert listener.counts().dropped_replies == 2
                await trio.sleep(10)
                assert stuck == []
                nursery.cancel_scope.cancel()

        self.run(scenario)
