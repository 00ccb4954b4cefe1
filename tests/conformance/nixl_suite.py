"""What every NIXL port must do: the contract of `connector.ports.nixl`, line by line, as tests.

A subclass provides a world (`test_nixl_agent.py`: real agents over UCX, peers in processes of their own; a fake brings
its own). A world makes ports and peers:

* `open_port`: a port under test that registers the given memory. Memory is numpy arrays of this process throughout.
* `open_peer`: a remote engine that can be paused, killed, or robbed of its memory. While a peer of the "stepwise" kind
  is paused, READs from it stay in flight; READs from another kind may be over as soon as NIXL has them.

The waits are generous: they only bound a test that fails.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np
import numpy.typing as npt
import pytest
import trio

from connector.clock import BootClock
from connector.ports.nixl import (
    AgentName,
    DescriptorIds,
    DescriptorListHandle,
    ListenerLost,
    MemoryRange,
    MemoryRun,
    NixlCallFailed,
    NixlEvent,
    NixlPort,
    NotificationReceived,
    PortBroken,
    PortClosed,
    PortCounts,
    PortReadEnded,
    ReadHandle,
    ReadMeasured,
    ReadPosted,
)
from connector.ports.nixl_agent.thread import PAUSE_IDLE_SECONDS_MAX

BLOCK_BYTES = 4096
BLOCKS = 64

Blocks = npt.NDArray[np.uint8]
"""Memory of a port under test, shape [blocks, bytes of a block]."""


class Peer(ABC):
    """A remote engine with `BLOCKS` blocks of registered memory; block i holds `pattern(i)` throughout."""

    metadata: bytes
    run: MemoryRun

    @abstractmethod
    async def pause(self) -> None:
        """Stop the peer as a hang does: its connections stay, nothing of it runs."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def kill(self) -> None: ...

    @abstractmethod
    async def lose_block(self, block: int) -> None:
        """Take a block's memory away while it stays registered: reading it fails, and the peer lives on."""

    @abstractmethod
    async def notifications(self) -> list[tuple[AgentName, bytes]]:
        """What the peer has received so far."""

    @abstractmethod
    async def notify(self, metadata: bytes, message: bytes) -> None:
        """Let the peer load the agent of `metadata` and send it a notification."""


class NixlWorld(ABC):
    @abstractmethod
    async def open_port(
        self, ranges: Sequence[MemoryRange], *, stepwise: bool = False, agent_name: AgentName | None = None
    ) -> NixlPort:
        """A port; the world closes it. `stepwise`: it is to talk to stepwise peers."""

    @abstractmethod
    async def open_peer(self, *, stepwise: bool) -> Peer: ...

    @abstractmethod
    async def fail_next_read_early(self, port: NixlPort) -> None:
        """Have the next READ of several descriptors reported as failed soon, while its requests stay in flight."""

    @abstractmethod
    async def forget_agent(self, port: NixlPort, name: AgentName) -> None:
        """Have what is behind the port drop what it knows of an agent, which nobody asked for."""

    @abstractmethod
    async def lose_listener(self, port: NixlPort) -> None:
        """Close one of the sockets at which peers connect to the agent of this port."""

    @abstractmethod
    async def break_port(self, port: NixlPort) -> None:
        """Make what is behind the port fail in a way that nobody foresaw."""


class Recorder:
    """Keeps the events of a port, and checks what holds for all of them."""

    def __init__(self, port: NixlPort) -> None:
        self.events: list[NixlEvent] = []
        self._port = port
        self._thread = threading.get_ident()
        self.known: set[ReadHandle] = set()
        # NIXL has it, or it has ended.
        self._begun: defaultdict[ReadHandle, trio.Event] = defaultdict(trio.Event)
        self._ended: set[ReadHandle] = set()
        self.complaints: list[str] = []
        self.on_end: Callable[[PortReadEnded], None] = lambda end: None
        self._new = trio.Event()
        port.set_event_callback(self._on_event)

    def _on_event(self, event: NixlEvent) -> None:
        if threading.get_ident() != self._thread:
            self.complaints.append(f"{event} in another thread")
        if isinstance(event, PortReadEnded):
            if event.error is None and not event.quiescent:
                self.complaints.append(f"{event} is done and not quiescent")
            if event.handle not in self.known:
                self.complaints.append(f"{event} before post_read had returned")
            if not event.was_posted and (event.error is None or not event.quiescent):
                self.complaints.append(f"{event} was not posted, and is no plain refusal")
            if event.handle in self._ended:
                self.complaints.append(f"{event} after another end")
            self._ended.add(event.handle)
        self.events.append(event)
        if isinstance(event, ReadPosted | PortReadEnded):
            self._begun[event.handle].set()
        if isinstance(event, PortReadEnded):
            self.on_end(event)
        self._new.set()
        self._new = trio.Event()

    def ends(self) -> dict[ReadHandle, PortReadEnded]:
        return {event.handle: event for event in self.events if isinstance(event, PortReadEnded)}

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        return [(e.sender, e.message_untrusted) for e in self.events if isinstance(e, NotificationReceived)]

    async def begun(self, handle: ReadHandle) -> None:
        await self._begun[handle].wait()
        assert self.complaints == []

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._new.wait()
        assert self.complaints == []

    async def end_of(self, handle: ReadHandle) -> PortReadEnded:
        await self.until(lambda: handle in self.ends())
        return self.ends()[handle]

    async def measured(self, handle: ReadHandle) -> list[ReadMeasured]:
        """What was measured of a READ; at least once."""

        def found() -> list[ReadMeasured]:
            return [event for event in self.events if isinstance(event, ReadMeasured) and event.handle == handle]

        await self.until(lambda: bool(found()))
        return found()

    async def done(self, handle: ReadHandle) -> PortReadEnded:
        """The end of a READ that must succeed."""
        end = await self.end_of(handle)
        assert end.error is None
        assert end.quiescent
        assert not end.transport_lost
        return end

    async def failed(self, handle: ReadHandle, *, quiescent: bool) -> PortReadEnded:
        """The end of a READ that must fail."""
        end = await self.end_of(handle)
        assert end.error
        assert end.quiescent is quiescent
        return end


class Reader:
    """A port with memory of its own and the lists to read from one peer."""

    def __init__(self, port: NixlPort, memory: Blocks, run: MemoryRun) -> None:
        self.port = port
        self.memory = memory
        self.run = run
        self.recorder = Recorder(port)
        self.peer_name = ""
        self.local = 0
        self.remote = 0

    async def connect(self, metadata: bytes, run: MemoryRun) -> None:
        self.peer_name = await self.port.add_remote_agent(metadata)
        self.local = await self.port.prepare_local([self.run])
        self.remote = await self.port.prepare_remote(self.peer_name, [run])

    async def post(self, local: Sequence[int], remote: Sequence[int]) -> ReadHandle:
        return await self.begun(self.order(local, remote))

    async def begun(self, handle: ReadHandle) -> ReadHandle:
        """Until NIXL has it, or it has ended. Raises NixlCallFailed when it was refused."""
        await self.recorder.begun(handle)
        end = self.recorder.ends().get(handle)
        if end is not None and not end.was_posted:
            raise NixlCallFailed("post_read", str(end.error), transport_lost=end.transport_lost)
        return handle

    def order(self, local: Sequence[int], remote: Sequence[int]) -> ReadHandle:
        return self.order_between(self.local, ids(local), self.remote, ids(remote))

    def order_between(
        self,
        local: DescriptorListHandle,
        local_ids: DescriptorIds,
        remote: DescriptorListHandle,
        remote_ids: DescriptorIds,
    ) -> ReadHandle:
        handle = self.port.post_read(local, local_ids, remote, remote_ids)
        self.recorder.known.add(handle)
        return handle

    def untouched(self, blocks: Sequence[int]) -> bool:
        return not self.memory[list(blocks)].any()

    def holds(self, local: Sequence[int], remote: Sequence[int]) -> bool:
        return all(bytes(self.memory[to]) == pattern(source) for to, source in zip(local, remote, strict=True))


def ids(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def pattern(block: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    """What a peer's block holds; never zero, and different in every block and place."""
    return bytes(1 + (block * 7 + place) % 251 for place in range(block_bytes))


def new_memory(blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES) -> tuple[Blocks, MemoryRun]:
    memory = np.zeros((blocks, block_bytes), dtype=np.uint8)
    return memory, MemoryRun(memory.ctypes.data, block_bytes, block_bytes, blocks)


def whole(memory: Blocks) -> list[MemoryRange]:
    return [MemoryRange(memory.ctypes.data, memory.nbytes)]


async def new_reader(world: NixlWorld, *, stepwise: bool = False) -> Reader:
    memory, run = new_memory()
    return Reader(await world.open_port(whole(memory), stepwise=stepwise), memory, run)


async def reader_and_source(world: NixlWorld) -> tuple[Reader, NixlPort, Recorder, Blocks]:
    """A reader connected to a second port of this process whose memory follows `pattern`."""
    memory, run = new_memory()
    for block in range(BLOCKS):
        memory[block] = np.frombuffer(pattern(block), dtype=np.uint8)
    source = await world.open_port(whole(memory))
    recorder = Recorder(source)
    source.expect_notifications(True)
    reader = await new_reader(world)
    await reader.connect(source.agent_metadata, run)
    return reader, source, recorder, memory


async def reader_and_peer(world: NixlWorld, *, stepwise: bool) -> tuple[Reader, Peer]:
    peer = await world.open_peer(stepwise=stepwise)
    reader = await new_reader(world, stepwise=stepwise)
    await reader.connect(peer.metadata, peer.run)
    return reader, peer


async def reader_and_unreached_peer(world: NixlWorld) -> tuple[Reader, Peer]:
    """The peer is paused, and was before anything could be read from it."""
    peer = await world.open_peer(stepwise=True)
    reader = await new_reader(world, stepwise=True)
    await peer.pause()
    await reader.connect(peer.metadata, peer.run)
    return reader, peer


async def read_in_flight(reader: Reader, peer: Peer, blocks: Sequence[int] = range(BLOCKS)) -> ReadHandle:
    """A READ from a paused stepwise peer. The first one, of one block, is over: the connection stands."""
    await reader.recorder.done(await reader.post([0], [0]))
    reader.memory[:] = 0
    await peer.pause()
    return await reader.post(list(blocks), list(blocks))


async def peer_got(peer: Peer, count: int) -> list[tuple[AgentName, bytes]]:
    while len(received := await peer.notifications()) < count:
        await trio.sleep(0.01)
    return received


class NixlPortSuite(ABC):
    @abstractmethod
    def world(self) -> AbstractAsyncContextManager[NixlWorld]:
        """A fresh world, inside the trio run; leaving it ends all that it made."""

    def run(self, scenario: Callable[[NixlWorld], Awaitable[None]], limit_seconds: float = 120.0) -> None:
        async def main() -> None:
            with trio.fail_after(limit_seconds):
                async with self.world() as world:
                    await scenario(world)

        trio.run(main)

    # Reaching

    def test_a_peer_is_reached_when_it_has_answered_and_nobody_else_waits_for_that(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_unreached_peer(world)
            with trio.move_on_after(0.3) as waited:
                await reader.port.reach(reader.peer_name)
            assert waited.cancelled_caught
            healthy = await world.open_peer(stepwise=True)
            name = await reader.port.add_remote_agent(healthy.metadata)
            await reader.port.prepare_remote(name, [healthy.run])
            await reader.port.reach(name)
            reached: list[int] = []

            async def reach(number: int) -> None:
                await reader.port.reach(reader.peer_name)
                reached.append(number)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(reach, 1)
                nursery.start_soon(reach, 2)
                await trio.sleep(0.3)
                assert reached == []
                await peer.resume()
            await reader.port.reach(reader.peer_name)
            await reader.recorder.done(await reader.post([1], [2]))
            assert reader.holds([1], [2])

        self.run(scenario)

    def test_a_peer_that_ends_before_it_answers_is_not_reached(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_unreached_peer(world)

            async def end() -> None:
                await trio.sleep(0.1)
                await peer.kill()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(end)
                with pytest.raises(NixlCallFailed) as failed:
                    await reader.port.reach(reader.peer_name)
            assert failed.value.transport_lost
            with pytest.raises(NixlCallFailed):
                await reader.port.reach(reader.peer_name)
            await reader.port.remove_remote_agent(reader.peer_name)
            with pytest.raises(NixlCallFailed):
                await reader.port.reach(reader.peer_name)
            assert reader.port.counts().remote_agents == 0

        self.run(scenario)

    @pytest.mark.parametrize("how", ["broken", "forgotten"])
    def test_a_peer_that_was_reached_stays_so_until_it_is_removed(self, how: str) -> None:
        """Only a READ shows that it cannot be read any more."""

        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=False)
            await reader.recorder.done(await reader.post([1], [1]))
            if how == "broken":
                await peer.lose_block(33)
                lost = await reader.recorder.failed(await reader.post([33], [33]), quiescent=True)
                assert lost.transport_lost
            else:
                await world.forget_agent(reader.port, reader.peer_name)
            await reader.port.reach(reader.peer_name)
            await reader.port.remove_remote_agent(reader.peer_name)
            with pytest.raises(NixlCallFailed):
                await reader.port.reach(reader.peer_name)

        self.run(scenario)

    @pytest.mark.parametrize("how", ["removed", "closed"])
    def test_who_waits_for_a_peer_is_told_when_nobody_will_reach_it_any_more(self, how: str) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, _ = await reader_and_unreached_peer(world)

            async def end() -> None:
                await trio.sleep(0.1)
                if how == "removed":
                    await reader.port.remove_remote_agent(reader.peer_name)
                else:
                    await reader.port.aclose(0.0)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(end)
                with pytest.raises(NixlCallFailed if how == "removed" else PortClosed):
                    await reader.port.reach(reader.peer_name)

        self.run(scenario)

    # Reading

    def test_a_read_moves_its_blocks_and_nothing_else(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            local, remote = [5, 6, 7, 40, 12], [9, 10, 11, 0, 63]
            before_ns = BootClock().now_ns()
            end = await reader.recorder.done(await reader.post(local, remote))
            assert reader.holds(local, remote)
            assert reader.untouched([block for block in range(BLOCKS) if block not in local])
            assert (end.bytes, end.descriptors) == (5 * BLOCK_BYTES, 5)
            assert before_ns <= end.ended_ns <= BootClock().now_ns()
            (measured,) = await reader.recorder.measured(end.handle)
            assert (measured.bytes, measured.descriptors) == (end.bytes, end.descriptors)
            assert 0 <= measured.seconds_to_post <= measured.seconds_in_transport < 60

        self.run(scenario)

    def test_lists_of_several_runs_with_strides_and_lengths(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, source, _, memory = await reader_and_source(world)
            base, other = memory.ctypes.data, reader.memory.ctypes.data
            remote = await reader.port.prepare_remote(
                source.agent_name,
                [MemoryRun(base, 512, BLOCK_BYTES, 4), MemoryRun(base + 10 * BLOCK_BYTES, 1024, 1024, 6)],
            )
            local = await reader.port.prepare_local(
                [MemoryRun(other, 512, 512, 4), MemoryRun(other + 20 * BLOCK_BYTES, 1024, 2048, 6)]
            )
            handle = await reader.begun(reader.order_between(local, ids([1, 3, 4, 9]), remote, ids([2, 0, 9, 5])))
            end = await reader.recorder.done(handle)
            assert (end.bytes, end.descriptors) == (2 * 512 + 2 * 1024, 4)
            expected = np.zeros_like(reader.memory).reshape(-1)
            flat = memory.reshape(-1)
            expected[512:1024] = flat[2 * BLOCK_BYTES : 2 * BLOCK_BYTES + 512]
            expected[3 * 512 : 4 * 512] = flat[:512]
            for to, start in ((0, 10 * BLOCK_BYTES + 5 * 1024), (5, 10 * BLOCK_BYTES + 1024)):
                at = 20 * BLOCK_BYTES + to * 2048
                expected[at : at + 1024] = flat[start : start + 1024]
            assert (reader.memory.reshape(-1) == expected).all()

        self.run(scenario)

    def test_many_reads_at_once_end_once_each_and_in_order(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            handles: list[ReadHandle] = []

            async def read(number: int) -> None:
                block = number % BLOCKS
                handles.append(await reader.post([block], [block]))

            async with trio.open_nursery() as nursery:
                for number in range(300):
                    nursery.start_soon(read, number)
            await reader.recorder.until(lambda: len(reader.recorder.ends()) == 300)
            await trio.sleep(0.1)  # a second end would come now
            assert reader.recorder.complaints == []
            assert len(set(handles)) == 300
            ended_ns = [end.ended_ns for end in reader.recorder.ends().values()]
            assert ended_ns == sorted(ended_ns)
            assert reader.holds(range(BLOCKS), range(BLOCKS))

        self.run(scenario)

    def test_a_refused_post_leaves_nothing_behind(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            before = reader.port.counts()
            floats = np.array([1.7], dtype=np.float64)
            square = np.zeros((1, 1), dtype=np.int32)
            for local_ids, remote_ids in (
                (ids([0]), ids([BLOCKS])),
                (ids([BLOCKS]), ids([0])),
                (ids([-1]), ids([0])),
                (ids([0, 1]), ids([0])),
                (ids([]), ids([])),
                (floats, ids([0])),
                (ids([0]), square),
            ):
                with pytest.raises(NixlCallFailed) as failed:
                    await reader.begun(reader.order_between(reader.local, local_ids, reader.remote, remote_ids))
                assert not failed.value.transport_lost
            for local, remote in ((reader.remote, reader.local), (999_999, reader.remote), (reader.local, 999_999)):
                with pytest.raises(NixlCallFailed):
                    await reader.begun(reader.order_between(local, ids([0]), remote, ids([0])))
            await trio.sleep(0.1)
            assert reader.port.counts() == before
            assert len(reader.recorder.events) == 10
            assert all(isinstance(event, PortReadEnded) and event.error for event in reader.recorder.events)
            assert reader.untouched(range(BLOCKS))

        self.run(scenario)

    def test_an_order_is_carried_out_behind_what_was_asked_before(self) -> None:
        """So that a list which is released after the order is not missed."""

        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            for turn in range(20):
                again = await reader.port.prepare_local([reader.run])
                async with trio.open_nursery() as nursery:
                    handle = reader.order_between(again, ids([turn]), reader.remote, ids([turn]))
                    assert handle not in reader.recorder.ends(), "events come outside of any method"
                    nursery.start_soon(reader.port.release_descriptor_list, again)
                await reader.recorder.done(handle)
            assert reader.holds(range(20), range(20))

        self.run(scenario)

    def test_the_callback_may_give_the_next_order(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            handles = [reader.order([0], [0])]

            def go_on(end: PortReadEnded) -> None:
                if len(handles) < BLOCKS:
                    handles.append(reader.order([len(handles)], [len(handles)]))

            reader.recorder.on_end = go_on
            await reader.recorder.until(lambda: len(reader.recorder.ends()) == BLOCKS)
            assert list(reader.recorder.ends()) == handles
            assert reader.holds(range(BLOCKS), range(BLOCKS))

        self.run(scenario)

    def test_a_read_in_flight_has_no_event(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            handle = await read_in_flight(reader, peer)
            await trio.sleep(0.5)
            assert handle not in reader.recorder.ends()
            assert reader.port.counts() == PortCounts(1, 2, 1, 1)
            await peer.resume()
            await reader.recorder.done(handle)
            assert reader.holds(range(BLOCKS), range(BLOCKS))
            assert reader.port.counts() == PortCounts(1, 2, 0, 1)

        self.run(scenario)

    # READs that fail

    def test_reads_from_a_dead_peer_end_once_with_an_error(self) -> None:
        """A READ of one descriptor is over then. Nothing is said of one with several, and the port keeps its handle."""

        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            first = await read_in_flight(reader, peer, range(32))
            second = await reader.post(range(32, 63), range(32, 63))
            single = await reader.post([63], [63])
            await peer.kill()
            for handle, quiescent, descriptors in ((first, False, 32), (second, False, 31), (single, True, 1)):
                end = await reader.recorder.failed(handle, quiescent=quiescent)
                assert end.transport_lost
                assert (end.bytes, end.descriptors) == (descriptors * BLOCK_BYTES, descriptors)
            assert reader.port.counts() == PortCounts(1, 2, 2, 1, errored_reads=2)
            reader.memory[63] = 0
            await trio.sleep(0.5)
            assert reader.untouched([63])
            assert reader.recorder.complaints == []
            # The next one ends in the same way, although NIXL may have refused to post it at all.
            assert (await reader.recorder.failed(await reader.post([0], [0]), quiescent=True)).transport_lost
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts() == PortCounts(0, 2, 0, 1)
            assert len(reader.recorder.ends()) == 5

        self.run(scenario)

    def test_a_read_that_failed_may_go_on_writing(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            await reader.recorder.done(await reader.post([0], [0]))
            reader.memory[:] = 0
            await peer.pause()
            await world.fail_next_read_early(reader.port)
            handle = await reader.post(range(BLOCKS), range(BLOCKS))
            await reader.recorder.failed(handle, quiescent=False)
            assert reader.untouched(range(BLOCKS))
            assert reader.port.counts() == PortCounts(1, 2, 1, 1, errored_reads=1)
            await peer.resume()
            while not reader.holds(range(BLOCKS), range(BLOCKS)):
                await trio.sleep(0.01)
            await trio.sleep(0.2)
            assert reader.recorder.complaints == []
            assert reader.port.counts().errored_reads == 1  # nobody has said that it is over
            await reader.recorder.done(await reader.post([1], [2]))
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts() == PortCounts(0, 2, 0, 1)

        self.run(scenario)

    def test_removing_a_peer_does_not_wait_for_reads_that_failed(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            await reader.recorder.done(await reader.post([0], [0]))
            await peer.pause()
            await world.fail_next_read_early(reader.port)
            handle = await reader.post(range(BLOCKS), range(BLOCKS))
            await reader.recorder.failed(handle, quiescent=False)
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts() == PortCounts(0, 2, 0, 1)
            await peer.resume()
            await reader.connect(peer.metadata, peer.run)
            await reader.recorder.done(await reader.post([1], [2]))
            assert reader.holds([1], [2])

        self.run(scenario)

    def test_a_lost_connection_stays_lost_until_the_peer_is_added_again(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=False)
            await reader.recorder.done(await reader.post([1], [1]))
            await peer.lose_block(33)
            # Falling ids, so that the lost block is a descriptor of its own: see what `nixl_agent.port` cannot do.
            falling = range(40, 30, -1)
            for blocks, quiescent in ((falling, False), ([2], True)):
                end = await reader.recorder.failed(await reader.post(blocks, blocks), quiescent=quiescent)
                assert end.transport_lost
            assert reader.port.counts().errored_reads == 1
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts().errored_reads == 0
            await reader.connect(peer.metadata, peer.run)
            await reader.recorder.done(await reader.post([3], [3]))
            assert reader.holds([3], [3])
            assert await peer.notifications() == []

        self.run(scenario)

    def test_a_dead_peer_costs_another_peers_reads_nothing(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, dying = await reader_and_peer(world, stepwise=True)
            lost = await read_in_flight(reader, dying)
            healthy = await world.open_peer(stepwise=True)
            name = await reader.port.add_remote_agent(healthy.metadata)
            remote = await reader.port.prepare_remote(name, [healthy.run])
            for kill in (False, True):
                if kill:
                    await dying.kill()
                handle = await reader.begun(reader.order_between(reader.local, ids([3]), remote, ids([8])))
                await reader.recorder.done(handle)
                assert (lost in reader.recorder.ends()) <= kill
                assert reader.holds([3], [8])
            await reader.recorder.failed(lost, quiescent=False)

        self.run(scenario)

    # Notifications

    def test_notifications_travel_both_ways_in_order_also_from_strangers(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            peer = await world.open_peer(stepwise=False)
            reader = await new_reader(world)
            reader.port.expect_notifications(True)
            messages = [b"%d \x00\xff" % number for number in range(20)]
            for message in messages:
                await peer.notify(reader.port.agent_metadata, message)
            await reader.recorder.until(lambda: len(reader.recorder.notifications()) == 20)
            assert [message for _, message in reader.recorder.notifications()] == messages
            sender = reader.recorder.notifications()[0][0]
            assert sender
            assert reader.port.counts().remote_agents == 0  # the peer is a stranger to us
            assert await reader.port.add_remote_agent(peer.metadata) == sender
            for message in messages:
                await reader.port.send_notification(sender, message)
            assert await peer_got(peer, 20) == [(reader.port.agent_name, message) for message in messages]

        self.run(scenario)

    def test_expected_notifications_are_noticed_soon(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, source, recorder, _ = await reader_and_source(world)

            async def median_latency_seconds() -> float:
                latencies = []
                for _ in range(9):
                    await trio.sleep(0.3)  # long enough for any eagerness after the last one to fade
                    count, sent = len(recorder.notifications()), trio.current_time()
                    await reader.port.send_notification(source.agent_name, b"ping")
                    await recorder.until(lambda count=count: len(recorder.notifications()) > count)
                    latencies.append(trio.current_time() - sent)
                return sorted(latencies)[4]

            source.expect_notifications(True)
            expected = await median_latency_seconds()
            source.expect_notifications(False)
            unexpected = await median_latency_seconds()
            assert expected < PAUSE_IDLE_SECONDS_MAX / 2
            assert expected < unexpected < 1

        self.run(scenario)

    def test_sending_to_the_unknown_and_to_the_dead_fails(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            with pytest.raises(NixlCallFailed) as failed:
                await reader.port.send_notification("nobody", b"hello")
            assert failed.value.operation == "send_notification"
            await reader.recorder.end_of(await reader.post([0], [0]))
            await peer.kill()
            refusal: NixlCallFailed | None = None
            while refusal is None:  # the first may vanish without a word
                try:
                    await reader.port.send_notification(reader.peer_name, b"hello")
                except NixlCallFailed as refused:
                    refusal = refused
                await trio.sleep(0.05)
            assert refusal.transport_lost

        self.run(scenario)

    # Peers and lists

    def test_metadata_that_is_none_is_refused(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader = await new_reader(world)
            other = await new_reader(world)
            good = other.port.agent_metadata
            for bad in (b"", b"garbage", bytes(1000), good[: len(good) // 2], reader.port.agent_metadata):
                with pytest.raises(NixlCallFailed) as failed:
                    await reader.port.add_remote_agent(bad)
                assert failed.value.operation == "add_remote_agent"
            assert reader.port.counts().remote_agents == 0
            for _ in range(2):  # the same again is fine
                assert await reader.port.add_remote_agent(good) == other.port.agent_name
            assert reader.port.counts().remote_agents == 1
            memory, _ = new_memory(blocks=8)
            impostor = await world.open_port(whole(memory), agent_name=other.port.agent_name)
            with pytest.raises(NixlCallFailed):
                await reader.port.add_remote_agent(impostor.agent_metadata)

        self.run(scenario)

    def test_mangled_metadata_cost_the_peer_that_they_name_nothing(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            handle = await read_in_flight(reader, peer)
            for length in (-1, -30):  # the name and the connection are the peer's
                with pytest.raises(NixlCallFailed):
                    await reader.port.add_remote_agent(peer.metadata[:length])
            await peer.resume()
            await reader.recorder.done(handle)
            assert await reader.port.add_remote_agent(peer.metadata) == reader.peer_name
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts().remote_agents == 0

        self.run(scenario)

    def test_whose_metadata_they_are_is_known_before_they_are_loaded(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            port, source = (await new_reader(world)).port, await world.open_port(whole(new_memory()[0]))
            assert port.agent_named_in(source.agent_metadata) == source.agent_name
            assert port.agent_named_in(b"nonsense") is None
            assert port.counts().remote_agents == 0

        self.run(scenario)

    def test_lists_of_memory_that_is_not_registered_are_refused(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, source, _, memory = await reader_and_source(world)
            before = reader.port.counts()
            beyond = MemoryRun(memory.ctypes.data + memory.nbytes, BLOCK_BYTES, BLOCK_BYTES, 1)
            over_the_end = MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, BLOCKS + 1)
            negative = MemoryRun(-1, BLOCK_BYTES, BLOCK_BYTES, 1)
            empty = MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, 0)
            of_another_kind = MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, 1, memory_kind="VRAM")
            right = MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, 1)
            wrong = ([beyond], [over_the_end], [negative], [empty], [], [of_another_kind], [right, of_another_kind])
            for runs in wrong:
                with pytest.raises(NixlCallFailed) as failed:
                    await reader.port.prepare_remote(source.agent_name, runs)
                assert failed.value.operation == "prepare_remote"
            with pytest.raises(NixlCallFailed):
                await reader.port.prepare_remote("nobody", [reader.run])
            elsewhere = np.zeros(BLOCK_BYTES, dtype=np.uint8)
            with pytest.raises(NixlCallFailed):
                await reader.port.prepare_local([MemoryRun(elsewhere.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, 1)])
            assert reader.port.counts() == before

        self.run(scenario)

    def test_removing_a_peer_makes_its_lists_useless_until_prepared_again(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, source, _, memory = await reader_and_source(world)
            await reader.port.remove_remote_agent("nobody")
            await reader.port.remove_remote_agent(source.agent_name)
            await reader.port.remove_remote_agent(source.agent_name)
            assert reader.port.counts().remote_agents == 0
            for again in (False, True):
                if again:
                    await reader.port.add_remote_agent(source.agent_metadata)
                with pytest.raises(NixlCallFailed) as failed:
                    await reader.post([0], [0])
                assert failed.value.transport_lost
            old = reader.remote
            run = MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)
            reader.remote = await reader.port.prepare_remote(source.agent_name, [run])
            assert reader.remote != old
            await reader.port.release_descriptor_list(old)
            await reader.recorder.done(await reader.post([0], [4]))
            assert reader.holds([0], [4])

        self.run(scenario)

    def test_a_peer_that_was_forgotten_is_lost_until_it_is_added_again(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=False)
            await reader.recorder.done(await reader.post([1, 2], [1, 2]))
            await world.forget_agent(reader.port, reader.peer_name)
            for blocks in ([3], [3, 5]):
                with pytest.raises(NixlCallFailed) as failed:
                    await reader.post(blocks, blocks)
                assert failed.value.transport_lost
            with pytest.raises(NixlCallFailed) as failed:
                await reader.port.send_notification(reader.peer_name, b"hello")
            assert failed.value.transport_lost
            with pytest.raises(NixlCallFailed):
                await reader.port.prepare_remote(reader.peer_name, [peer.run])
            assert reader.untouched([3, 5])
            await reader.port.remove_remote_agent(reader.peer_name)
            await reader.connect(peer.metadata, peer.run)
            await reader.recorder.done(await reader.post([3, 5], [3, 5]))
            assert reader.holds([1, 2, 3, 5], [1, 2, 3, 5])
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts().remote_agents == 0

        self.run(scenario)

    def test_a_peer_that_was_forgotten_is_loaded_anew_by_adding_it_alone(self) -> None:
        """Somebody else may want it, who has not noticed. What was prepared before stays useless."""

        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=False)
            await reader.recorder.done(await reader.post([1, 2], [1, 2]))
            await world.forget_agent(reader.port, reader.peer_name)
            assert await reader.port.add_remote_agent(peer.metadata) == reader.peer_name
            with pytest.raises(NixlCallFailed) as failed:
                await reader.post([3], [3])
            assert failed.value.transport_lost
            reader.remote = await reader.port.prepare_remote(reader.peer_name, [peer.run])
            await reader.port.reach(reader.peer_name)
            await reader.recorder.done(await reader.post([3, 5], [3, 5]))
            assert reader.holds([1, 2, 3, 5], [1, 2, 3, 5])
            await reader.port.send_notification(reader.peer_name, b"hello")
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts().remote_agents == 0

        self.run(scenario)

    def test_a_read_whose_peer_was_forgotten_may_go_on_writing(self) -> None:
        """Also one of a single descriptor: nobody can say any more whether it has ended."""

        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            handle = await read_in_flight(reader, peer, [4])
            await world.forget_agent(reader.port, reader.peer_name)
            end = await reader.recorder.failed(handle, quiescent=False)
            assert end.transport_lost
            assert reader.untouched(range(BLOCKS))
            assert reader.port.counts().errored_reads == 1
            await peer.resume()
            while not reader.holds([4], [4]):
                await trio.sleep(0.01)
            await reader.port.remove_remote_agent(reader.peer_name)
            assert reader.port.counts().errored_reads == 0
            await reader.connect(peer.metadata, peer.run)
            await reader.recorder.done(await reader.post([1], [2]))
            assert reader.holds([1], [2])

        self.run(scenario)

    def test_a_read_outlives_the_removal_of_its_peer(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            handle = await read_in_flight(reader, peer)
            await reader.port.remove_remote_agent(reader.peer_name)
            with pytest.raises(NixlCallFailed):
                await reader.post([0], [0])
            with pytest.raises(NixlCallFailed):
                await reader.port.prepare_remote(reader.peer_name, [peer.run])
            await trio.sleep(0.2)
            assert handle not in reader.recorder.ends()
            await peer.resume()
            await reader.recorder.done(handle)
            assert reader.holds(range(BLOCKS), range(BLOCKS))
            assert reader.port.counts().remote_agents == 0

        self.run(scenario)

    def test_a_peer_that_comes_back_while_its_read_is_in_flight(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            handle = await read_in_flight(reader, peer)
            await reader.port.remove_remote_agent(reader.peer_name)
            await reader.connect(peer.metadata, peer.run)
            await peer.resume()
            await reader.recorder.done(handle)
            assert reader.port.counts().remote_agents == 1
            await reader.recorder.done(await reader.post([1], [2]))
            assert reader.holds([1], [2])

        self.run(scenario)

    def test_counts_return_to_zero(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, source, *_ = await reader_and_source(world)
            assert reader.port.counts() == PortCounts(1, 2, 0, 1)
            handles = [await reader.post([block], [block]) for block in range(10)]
            for handle in handles:
                await reader.recorder.end_of(handle)
            assert reader.port.counts() == PortCounts(1, 2, 0, 1)
            for prepared in (reader.local, reader.remote, reader.remote):
                await reader.port.release_descriptor_list(prepared)
            await reader.port.remove_remote_agent(source.agent_name)
            assert reader.port.counts() == PortCounts(0, 0, 0, 1)

        self.run(scenario)

    def test_handles_are_never_used_twice(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, _source, _recorder, _memory = await reader_and_source(world)  # the memory is kept
            prepared, posted = [reader.local, reader.remote], []
            for _ in range(20):
                again = await reader.port.prepare_local([reader.run])
                prepared.append(again)
                await reader.port.release_descriptor_list(again)
                handle = await reader.post([0], [0])
                await reader.recorder.end_of(handle)
                posted.append(handle)
            assert len(set(prepared)) == len(prepared)
            assert len(set(posted)) == len(posted)

        self.run(scenario)

    # Cancellation

    def test_a_call_cancelled_before_it_starts_has_no_effect(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, source, recorder, _ = await reader_and_source(world)
            before = reader.port.counts()
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: reader.port.send_notification(source.agent_name, b"never"),
                lambda: reader.port.remove_remote_agent(source.agent_name),
                lambda: reader.port.prepare_local([reader.run]),
                lambda: reader.port.release_descriptor_list(reader.local),
            ]
            for call in calls:
                with trio.CancelScope() as cancelled:
                    cancelled.cancel()
                    await call()
                assert cancelled.cancelled_caught
            await trio.sleep(0.1)
            assert reader.port.counts() == before
            assert recorder.notifications() == []
            assert reader.untouched(range(BLOCKS))

        self.run(scenario)

    def test_a_call_cancelled_at_any_time_happens_wholly_or_not_at_all(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, _source, _recorder, _memory = await reader_and_source(world)  # the memory is kept
            chance = random.Random(7)
            prepared: list[int] = []

            async def prepare() -> None:
                prepared.append(await reader.port.prepare_local([reader.run]))

            cancelled = 0
            for turn in range(400):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(prepare)
                    for _ in range(chance.randrange(4)):
                        await trio.lowlevel.checkpoint()
                    if chance.random() < 0.5:
                        await trio.sleep(chance.uniform(0, 0.0005))
                    nursery.cancel_scope.cancel()
                cancelled = turn + 1 - len(prepared)
            await trio.sleep(0.1)
            assert reader.port.counts().descriptor_lists == 2 + len(prepared)
            assert 0 < cancelled < 400

        self.run(scenario)

    # The end

    def test_closing_waits_for_reads_in_flight(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            handle = await read_in_flight(reader, peer)
            abandoned: list[list[ReadHandle]] = []

            async def close() -> None:
                abandoned.append(await reader.port.aclose(30))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(close)
                nursery.start_soon(close)
                await trio.sleep(0.3)
                assert abandoned == []
                with pytest.raises(PortClosed):
                    await reader.post([0], [0])
                await peer.resume()
            assert abandoned == [[], []]
            assert reader.recorder.ends()[handle].error is None
            assert reader.holds(range(BLOCKS), range(BLOCKS))

        self.run(scenario)

    def test_closing_ends_orders_whose_turn_has_not_come(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            handles = [reader.order([block], [block]) for block in range(BLOCKS)]
            abandoned = await reader.port.aclose(0)
            await reader.recorder.until(lambda: len(reader.recorder.ends()) == BLOCKS - len(abandoned))
            ends = reader.recorder.ends()
            assert not ends.keys() & set(abandoned)
            for block, handle in enumerate(handles):
                if handle in ends:
                    assert ends[handle].was_posted == (ends[handle].error is None) == reader.holds([block], [block])
                    assert ends[handle].was_posted or reader.untouched([block])

        self.run(scenario)

    def test_closing_abandons_reads_after_the_grace(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            handle = await read_in_flight(reader, peer)
            started = trio.current_time()
            assert await reader.port.aclose(0.3) == [handle]
            assert 0.3 <= trio.current_time() - started < 10
            assert await reader.port.aclose(0.3) == [handle]
            assert handle not in reader.recorder.ends()

        self.run(scenario)

    def test_closing_abandons_reads_that_failed_and_may_go_on(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            await reader.recorder.done(await reader.post([0], [0]))
            await peer.pause()
            await world.fail_next_read_early(reader.port)
            handle = await reader.post(range(BLOCKS), range(BLOCKS))
            await reader.recorder.failed(handle, quiescent=False)
            started = trio.current_time()
            assert await reader.port.aclose(60) == [handle]
            assert trio.current_time() - started < 10  # there is nothing to wait for

        self.run(scenario)

    def test_a_closed_port_refuses_every_call(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            await reader.recorder.end_of(await reader.post([0], [0]))
            assert await reader.port.aclose(30) == []
            await refuses_every_call(reader)
            assert await reader.port.aclose(30) == []
            assert reader.port.counts().remote_agents == reader.port.counts().descriptor_lists == 0

        self.run(scenario)

    def test_closing_is_not_stopped_by_cancellation(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, peer = await reader_and_peer(world, stepwise=True)
            handle = await read_in_flight(reader, peer)
            with trio.move_on_after(0.2) as impatient:
                await reader.port.aclose(1000)
            assert impatient.cancelled_caught
            assert await reader.port.aclose(1000) == [handle]

        self.run(scenario)

    def test_an_agent_that_nobody_can_connect_to_says_so_once_and_goes_on(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, source, recorder, _ = await reader_and_source(world)
            await reader.recorder.done(await reader.post([0], [0]))
            await world.lose_listener(source)
            await recorder.until(lambda: any(isinstance(event, ListenerLost) for event in recorder.events))
            await reader.recorder.done(await reader.post([1, 3], [1, 3]))
            await reader.port.send_notification(source.agent_name, b"goes on")
            await recorder.until(lambda: recorder.notifications() == [(reader.port.agent_name, b"goes on")])
            await trio.sleep(2)
            assert sum(isinstance(event, ListenerLost) for event in recorder.events) == 1
            assert not any(isinstance(event, ListenerLost | PortBroken) for event in reader.recorder.events)

        self.run(scenario)

    def test_a_broken_port_says_so_once_and_refuses_every_call(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            await world.break_port(reader.port)
            await reader.recorder.until(lambda: any(isinstance(e, PortBroken) for e in reader.recorder.events))
            await refuses_every_call(reader)
            assert await reader.port.aclose(30) == []
            await trio.sleep(0.1)
            assert sum(isinstance(event, PortBroken) for event in reader.recorder.events) == 1

        self.run(scenario)

    def test_calls_under_way_when_the_port_breaks_end_too(self) -> None:
        async def scenario(world: NixlWorld) -> None:
            reader, *_ = await reader_and_source(world)
            outcomes: list[str] = []

            async def call() -> None:
                try:
                    await reader.port.prepare_local([reader.run])
                    outcomes.append("done")
                except PortClosed:
                    outcomes.append("closed")

            async with trio.open_nursery() as nursery:
                for number in range(200):
                    nursery.start_soon(call)
                    if number == 100:
                        await world.break_port(reader.port)
            assert len(outcomes) == 200
            assert "closed" in outcomes

        self.run(scenario)


async def refuses_every_call(reader: Reader) -> None:
    port = reader.port
    for call in (
        lambda: port.add_remote_agent(b"x"),
        lambda: port.remove_remote_agent("x"),
        lambda: port.prepare_local([reader.run]),
        lambda: port.prepare_remote("x", [reader.run]),
        lambda: port.reach("x"),
        lambda: port.release_descriptor_list(reader.local),
        lambda: port.send_notification("x", b"y"),
    ):
        with pytest.raises(PortClosed):
            await call()
    with pytest.raises(PortClosed):
        port.post_read(reader.local, ids([0]), reader.remote, ids([0]))
