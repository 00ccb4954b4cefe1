"""Peers that die and come again, with KV in a device's memory.

What UCX has mapped of a process over cuda_ipc it keeps, under that process and an address. An engine that is started
again has its cache at the same address as before: what is read must be of the new one.
"""

from __future__ import annotations

import math
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

import numpy as np
import pytest
import torch
import trio

from connector.ports.nixl import DescriptorListHandle, MemoryRun, NixlEvent, PortReadEnded
from connector.ports.nixl_agent import RealNixlPort
from tests.bench.source import Source
from tests.gpu.device_memory import DeviceMemory, make_current
from tests.gpu.patience import patient
from tests.gpu.source import source_on

pytestmark = pytest.mark.timeout(patient(120))

PAGE_BYTES = 65_536
PAGES = {"cpu": 1 << 11, "cuda": 1 << 13}
"""By device: 134 MB, and half a GB: a READ lasts for milliseconds."""
LIVES = 3
ENDS_SECONDS = patient(30.0)


def peer(device: torch.device, content: int) -> AbstractContextManager[Source]:
    """Another process, all of whose bytes are `content`."""
    return source_on(device, PAGES[device.type] * PAGE_BYTES, content)


@pytest.fixture
def memory(device: torch.device) -> DeviceMemory:
    memory = DeviceMemory(device)
    memory.place(np.zeros(PAGES[device.type] * PAGE_BYTES, np.uint8))
    memory.upload()
    return memory


class Reader:
    """One agent, and READs of all pages of a peer, out of order so that each page is a piece of its own."""

    def __init__(self, port: RealNixlPort, memory: DeviceMemory, local: DescriptorListHandle) -> None:
        self._port = port
        self._memory = memory
        self._local = local
        self._send, self._events = trio.open_memory_channel[NixlEvent](math.inf)
        port.set_event_callback(self._send.send_nowait)
        self.tensor = memory.tensors[0]

    @classmethod
    @asynccontextmanager
    async def open(cls, memory: DeviceMemory) -> AsyncIterator[Reader]:
        port = RealNixlPort.open(str(uuid.uuid4()), memory.ranges, prepare_thread=make_current(memory.device))
        try:
            (ours,) = memory.ranges
            yield cls(port, memory, await port.prepare_local([cls._run(memory, ours.address, ours.device_id)]))
        finally:
            with trio.CancelScope(shield=True):
                await port.aclose(10)

    @staticmethod
    def _run(memory: DeviceMemory, address: int, device_id: int) -> MemoryRun:
        return MemoryRun(address, PAGE_BYTES, PAGE_BYTES, PAGES[memory.device.type], device_id, memory.memory_kind)

    async def connect(self, source: Source) -> DescriptorListHandle:
        agent = await self._port.add_remote_agent(source.metadata)
        return await self._port.prepare_remote(agent, [self._run(self._memory, source.address, source.device_id)])

    async def read(self, remote: DescriptorListHandle) -> PortReadEnded:
        """Whatever its end is, it comes in bounded time."""
        ids = np.random.default_rng(1).permutation(PAGES[self._memory.device.type]).astype(np.int32)
        handle = self._port.post_read(self._local, ids, remote, ids)
        with trio.fail_after(ENDS_SECONDS):
            while True:
                event = await self._events.receive()
                if isinstance(event, PortReadEnded) and event.handle == handle:
                    return event


def test_a_peer_that_was_started_again_is_read_anew(device: torch.device, memory: DeviceMemory) -> None:
    async def read_all_lives() -> list[int]:
        addresses = []
        async with Reader.open(memory) as reader:
            for life in range(1, LIVES + 1):
                with peer(device, life) as source:
                    addresses.append(source.address)
                    remote = await reader.connect(source)
                    for _ in range(2):  # the second one with all that UCX keeps of the first
                        reader.tensor.fill_(0)
                        assert (await reader.read(remote)).error is None
                        assert bool((reader.tensor == life).all()), f"not what life {life} has"
        return addresses

    addresses = trio.run(read_all_lives)
    print(f"{device}: {len(set(addresses))} addresses in {LIVES} lives")  # noqa: T201


def test_a_peer_that_dies_during_reads(device: torch.device, memory: DeviceMemory) -> None:
    """A READ ends with an error or with the peer's bytes, and another peer's READs are right afterwards."""

    async def read_until_it_dies() -> None:
        async with Reader.open(memory) as reader, trio.open_nursery() as nursery:
            with peer(device, 2) as other:
                living = await reader.connect(other)
                with peer(device, 1) as source:
                    remote = await reader.connect(source)
                    assert (await reader.read(remote)).error is None
                    nursery.start_soon(_kill, source.pid)
                    ends: list[str] = []
                    until = time.monotonic() + 1.0
                    while time.monotonic() < until:
                        reader.tensor.fill_(0)
                        ended = await reader.read(remote)
                        ends.append("bytes" if ended.error is None else ended.error)
                        if ended.error is not None:
                            break
                        assert bool((reader.tensor == 1).all()), "an end without an error, and not the peer's bytes"
                print(f"{device}: the last of {len(ends)} READs of a peer that died: {ends[-1]}")  # noqa: T201
                reader.tensor.fill_(0)
                assert (await reader.read(living)).error is None
                assert bool((reader.tensor == 2).all())

    trio.run(read_until_it_dies)


async def _kill(pid: int) -> None:
    await trio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
