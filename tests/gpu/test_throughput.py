"""How fast the port reads from another process, beside NIXL without it and beside a copy in this one.

With several devices the other process has its memory on another one than ours. The figures are printed (`pytest -s`);
only ratios are asserted. One of them tells whether UCX reads over cuda_ipc: over TCP bytes are right, too.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import trio

from connector.ports.nixl import MemoryRun, NixlEvent, PortReadEnded
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.nixl_agent.core import PROBE_BYTES
from connector.worker.cache_memory import scratch_beside
from tests.bench.source import Source, pages
from tests.gpu.device_memory import DeviceMemory, make_current
from tests.gpu.source import source_on

pytestmark = pytest.mark.timeout(300)

PAGE_BYTES = 65_536
PAGES = {"cpu": 1 << 11, "cuda": 1 << 14}
"""By device: 134 MB, and 1 GB."""
REPEATS = 7
TRIES = 5
"""Where the machine has to do other things too, something is measured again: what is slow by itself is slow each time,
and a call that keeps the interpreter keeps it each time.
"""
OURS_AT_LEAST = 0.7
"""Of NIXL alone: a task switch and a poll come to a READ of milliseconds."""

IN_ONE_PIECE_AT_LEAST = 0.2
"""Of a plain copy between the same devices, which has 10 GB/s or more; TCP on one machine has one or two. Pages
that lie apart would say nothing: each costs a call."""
SCRATCH_SECONDS = 30.0


@pytest.fixture(scope="module")
def memory(device: torch.device) -> DeviceMemory:
    memory = DeviceMemory(device)
    memory.place(np.zeros(length_bytes(device), np.uint8))
    memory.upload()
    return memory


@pytest.fixture(scope="module")
def source_device(device: torch.device) -> torch.device:
    """Another device than ours, if there is one."""
    if device.type == "cpu":
        return device
    return torch.device(device.type, (device.index + 1) % torch.cuda.device_count())


@pytest.fixture(scope="module")
def source(source_device: torch.device) -> Iterator[Source]:
    with source_on(source_device, length_bytes(source_device)) as source:
        yield source


def shuffled(count: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(count).astype(np.int32)


def length_bytes(device: torch.device) -> int:
    return PAGES[device.type] * PAGE_BYTES


def seconds_of(move: Callable[[], None]) -> float:
    """The median. The first one, which connects, does not count."""
    move()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def nixl_alone(memory: DeviceMemory, source: Source, local_ids: np.ndarray, remote_ids: np.ndarray) -> float:
    """Seconds of a READ. NIXL makes one piece of pages that follow each other on both sides."""
    import nixl._api as nixl

    kind, count = memory.memory_kind, PAGES[memory.device.type]
    agent = nixl.nixl_agent(f"raw-{uuid.uuid4()}", nixl.nixl_agent_config(enable_prog_thread=False, num_threads=0))
    (ours,) = memory.ranges
    registered = agent.register_memory([(ours.address, ours.length_bytes, ours.device_id, "")], kind)
    peer = agent.add_remote_agent(source.metadata).decode()
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages(ours.address, PAGE_BYTES, count, ours.device_id), kind)
    remote = agent.prep_xfer_dlist(peer, pages(source.address, PAGE_BYTES, count, source.device_id), kind)

    def move() -> None:
        handle = agent.make_prepped_xfer("READ", local, local_ids, remote, remote_ids, b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE"
        agent.release_xfer_handle(handle)

    try:
        return seconds_of(move)
    finally:
        agent.release_dlist_handle(local)
        agent.release_dlist_handle(remote)
        agent.remove_remote_agent(peer)
        agent.deregister_memory(registered)


async def through_the_port(
    memory: DeviceMemory, source: Source, page_bytes: int = PAGE_BYTES, beside: Computing | None = None
) -> float:
    """Seconds of a READ, of as many pages whatever their size; `beside` is told of the end of each."""
    kind, count = memory.memory_kind, PAGES[memory.device.type]
    (ours,) = memory.ranges
    send, events = trio.open_memory_channel[NixlEvent](math.inf)
    port = RealNixlPort.open(str(uuid.uuid4()), [ours], prepare_thread=make_current(memory.device))
    try:
        port.set_event_callback(send.send_nowait)

        def run(address: int, device_id: int) -> MemoryRun:
            return MemoryRun(address, page_bytes, page_bytes, count, device_id, kind)

        peer = await port.add_remote_agent(source.metadata)
        local = await port.prepare_local([run(ours.address, ours.device_id)])
        remote = await port.prepare_remote(peer, [run(source.address, source.device_id)])
        ids, seconds = shuffled(count), []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            handle = port.post_read(local, ids, remote, ids[::-1].copy())
            while True:
                event = await events.receive()
                if isinstance(event, PortReadEnded) and event.handle == handle:
                    assert event.error is None
                    break
            seconds.append(time.perf_counter() - start)
            if beside is not None:
                beside.end_read()
        return statistics.median(seconds[1:])
    finally:
        with trio.CancelScope(shield=True):
            await port.aclose(10)


class Computing:
    """A thread that computes without a pause, as the engine thread does between its steps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._longest_seconds = 0.0
        self._of_reads: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compute)

    @property
    def stood_still_seconds(self) -> float:
        """The longest time in a READ, in the median of all but the first, which connects: near that of a READ, its
        calls keep the interpreter. In one or the other the machine gave its processors to somebody else."""
        return statistics.median(self._of_reads[1:])

    def end_read(self) -> None:
        """What it stands still now belongs to the READ that has ended."""
        longest = max(self._longest_seconds, time.perf_counter() - self._last)
        self._of_reads.append(longest)
        self._longest_seconds = 0.0

    def _compute(self) -> None:
        while not self._stop.is_set():
            now = time.perf_counter()
            self._longest_seconds = max(self._longest_seconds, now - self._last)
            self._last = now

    def __enter__(self) -> Computing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def copied(memory: DeviceMemory, source_device: torch.device) -> float:
    """Seconds of a copy in this process, from the device that the other one's memory is on."""
    (tensor,) = memory.tensors
    other = torch.empty_like(tensor, device=source_device)

    def move() -> None:
        tensor.copy_(other)
        for device in {tensor.device, other.device}:
            if device.type != "cpu":
                torch.cuda.synchronize(device)

    return seconds_of(move)


@pytest.mark.usefixtures("gpu")
def test_a_read_is_about_as_fast_as_nixl_alone(
    memory: DeviceMemory, source: Source, source_device: torch.device
) -> None:
    ids = shuffled(PAGES[memory.device.type])
    in_order = np.sort(ids)
    for _ in range(TRIES):
        alone = nixl_alone(memory, source, ids, ids[::-1].copy())
        through_port = trio.run(through_the_port, memory, source)
        if is_fast := alone >= OURS_AT_LEAST * through_port:
            break
    seconds = {
        "scattered, NIXL alone": alone,
        "scattered, through the port": through_port,
        "in one piece, NIXL alone": nixl_alone(memory, source, in_order, in_order),
        "in one piece, copied": copied(memory, source_device),
    }
    for what, each in seconds.items():
        rate = length_bytes(memory.device) / each / 1e9
        print(f"{source_device} to {memory.device}, pages of 64 KiB, {what}: {rate:.1f} GB/s")  # noqa: T201
    assert is_fast, f"a READ through the port takes {1e3 * through_port:.1f} ms, of NIXL alone {1e3 * alone:.1f} ms"
    if can_access(memory.device, source_device):
        assert seconds["in one piece, copied"] >= IN_ONE_PIECE_AT_LEAST * seconds["in one piece, NIXL alone"], (
            "UCX does not read over cuda_ipc: see docs/first-gpu-run.md, check 2"
        )


@pytest.mark.usefixtures("gpu")
def test_the_calls_of_a_read_let_the_interpreter_go(
    memory: DeviceMemory, source: Source, source_device: torch.device
) -> None:
    """Pages lie apart, and each costs a call of the driver; all are made in one call of NIXL."""
    for page_bytes in (4096, PAGE_BYTES):
        alone = trio.run(through_the_port, memory, source, page_bytes)
        limit_seconds = max(alone / 2, 4 * sys.getswitchinterval())
        for _ in range(TRIES):
            with Computing() as computing:
                beside = trio.run(through_the_port, memory, source, page_bytes, computing)
            print(  # noqa: T201
                f"{source_device} to {memory.device}, {PAGES[memory.device.type]} pages of {page_bytes} bytes: a READ"
                f" takes {1e3 * alone:.1f} ms, beside a thread that computes {1e3 * beside:.1f} ms; that one stood"
                f" still for {1e3 * computing.stood_still_seconds:.1f} ms at a time"
            )
            if computing.stood_still_seconds < limit_seconds:
                break
        assert computing.stood_still_seconds < limit_seconds


def can_access(device: torch.device, other: torch.device) -> bool:
    """Whether one can read the other's memory; where not, there is no cuda_ipc between them."""
    return device == other or torch.cuda.can_device_access_peer(device, other)


def test_the_first_bytes_of_a_peer_are_read_into_scratch_beside_the_cache(memory: DeviceMemory, source: Source) -> None:
    """Which nobody waits for; the other side's memory is full of ones."""
    (ours,) = memory.ranges
    scratch = scratch_beside(memory.tensors[0], memory.device_id, memory.memory_kind)
    assert not scratch.owner.any()

    async def prepare() -> None:
        port = RealNixlPort.open(str(uuid.uuid4()), [ours], scratch=scratch, prepare_thread=make_current(memory.device))
        try:
            peer = await port.add_remote_agent(source.metadata)
            run = MemoryRun(source.address, PAGE_BYTES, PAGE_BYTES, 1, source.device_id, memory.memory_kind)
            await port.prepare_remote(peer, [run])
            with trio.fail_after(SCRATCH_SECONDS):
                while not scratch.owner.all():
                    await trio.sleep(0.01)
        finally:
            with trio.CancelScope(shield=True):
                await port.aclose(10)

    trio.run(prepare)
    assert scratch.owner.tolist() == [1] * PROBE_BYTES
