"""How long do NIXL calls hold up the thread that makes them, and do they release the GIL?

`python -m tests.bench.bench_nixl_calls` measures each call of a READ of 2048 blocks of 64 KiB (134 MB) from another
process, over the transport that UCX picks by itself (CMA on one machine), twice: on a NIXL agent that the trio thread
calls directly, and through `RealNixlPort`; each once more beside a thread that computes without a pause. The answer
decided where the calls run; it stands in docs/performance.md.

Columns
  call     median and worst time of one call
  loop     how late a task of the same trio loop, which wants to run every millisecond, came at worst during the call
  thread   longest time that the computing thread stood still during the call; near the length of the call means that
           the call keeps the GIL, a fraction of it that it does not. A thread that wants the GIL back waits up to 5 ms
           (the interpreter's switch interval) for the other one, which is what the short calls show beside it.

What it does not show: an RDMA NIC (there a post returns before the data has moved), a GPU, many peers, a busy machine.
"""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from connector.ports.nixl import MemoryRange, MemoryRun, NixlEvent, PortReadEnded
from connector.ports.nixl_agent import RealNixlPort
from tests.bench.source import pages, source

BLOCKS = 2048
BLOCK_BYTES = 64 * 1024
REPEATS = 7


class Meter:
    """Times calls while watching a ticking task of this trio loop and a computing thread."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[float, float, float]]] = {}
        self._last_tick = 0.0
        self._worst_tick_seconds = 0.0
        self._worst_stop_seconds = 0.0
        self._stopping = False

    async def tick(self) -> None:
        self._last_tick = time.perf_counter()
        while True:
            await trio.sleep(0.001)
            self._note_tick()

    def _note_tick(self) -> None:
        now = time.perf_counter()
        self._worst_tick_seconds = max(self._worst_tick_seconds, now - self._last_tick - 0.001)
        self._last_tick = now

    def compute(self) -> None:
        last = time.perf_counter()
        while not self._stopping:
            now = time.perf_counter()
            if now - last > self._worst_stop_seconds:
                self._worst_stop_seconds = now - last
            last = now

    async def measure(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        await trio.sleep(0.02)
        self._worst_tick_seconds = self._worst_stop_seconds = 0.0
        started = time.perf_counter()
        result = await call()
        call_seconds = time.perf_counter() - started
        await trio.sleep(0.003)
        row = (call_seconds, self._worst_tick_seconds, self._worst_stop_seconds)
        self.rows.setdefault(name, []).append(row)
        return result

    @contextmanager
    def computing(self) -> Any:
        thread = threading.Thread(target=self.compute)
        thread.start()
        try:
            yield
        finally:
            self._stopping = True
            thread.join()

    def table(self, title: str) -> str:
        lines = [title, f"  {'milliseconds':24}  call p50   call max   loop max   thread max"]
        for name, rows in self.rows.items():
            calls, loops, threads = ([1000 * value for value in column] for column in zip(*rows, strict=True))
            stood_still = f"{max(threads):12.3f}" if max(threads) > 0 else f"{'-':>12}"
            lines.append(
                f"  {name:24}{statistics.median(calls):10.3f} {max(calls):10.3f} {max(loops):10.3f} {stood_still}"
            )
        return "\n".join(lines)


async def direct(meter: Meter, metadata: bytes, address: int, memory: npt.NDArray[np.uint8]) -> None:
    """The calls, made in the trio thread itself."""
    import nixl._api as nixl

    agent = nixl.nixl_agent(f"direct-{uuid.uuid4()}", nixl.nixl_agent_config(enable_prog_thread=False))
    registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def sync(function: Callable[..., Any], *arguments: Any) -> Callable[[], Awaitable[Any]]:
        async def call() -> Any:
            return function(*arguments)

        return call

    scattered = np.arange(BLOCKS - 1, -1, -1, dtype=np.int32)
    for _ in range(REPEATS):
        peer = (await meter.measure("add_remote_agent", sync(agent.add_remote_agent, metadata))).decode()
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages(memory.ctypes.data, BLOCK_BYTES, BLOCKS), "DRAM")
        remote_pages = pages(address, BLOCK_BYTES, BLOCKS)
        remote = await meter.measure("prep_xfer_dlist", sync(agent.prep_xfer_dlist, peer, remote_pages, "DRAM"))
        handle = await meter.measure(
            "make_prepped_xfer", sync(agent.make_prepped_xfer, "READ", local, scattered, remote, scattered, b"")
        )
        state = await meter.measure("transfer", sync(agent.transfer, handle))
        while state == "PROC":
            state = await meter.measure("check_xfer_state", sync(agent.check_xfer_state, handle))
        await meter.measure("get_new_notifs", sync(agent.get_new_notifs))
        await meter.measure("release_xfer_handle", sync(agent.release_xfer_handle, handle))
        agent.release_dlist_handle(local)
        agent.release_dlist_handle(remote)
        await meter.measure("remove_remote_agent", sync(agent.remove_remote_agent, peer))
    agent.deregister_memory(registered)


async def through_port(meter: Meter, metadata: bytes, address: int, memory: npt.NDArray[np.uint8]) -> None:
    """The same READ through the port."""
    port = RealNixlPort.open(f"port-{uuid.uuid4()}", [MemoryRange(memory.ctypes.data, memory.nbytes)])
    ended: dict[int, trio.Event] = {}

    def on_event(event: NixlEvent) -> None:
        if isinstance(event, PortReadEnded):
            ended.setdefault(event.handle, trio.Event()).set()

    async def read() -> None:
        handle = port.post_read(local, scattered, remote, scattered)
        await ended.setdefault(handle, trio.Event()).wait()

    port.set_event_callback(on_event)
    scattered = np.arange(BLOCKS - 1, -1, -1, dtype=np.int32)
    for _ in range(REPEATS):
        peer = await meter.measure("add_remote_agent", lambda: port.add_remote_agent(metadata))
        local = await port.prepare_local([MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)])
        runs = [MemoryRun(address, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)]
        remote = await meter.measure("prepare_remote", lambda peer=peer, runs=runs: port.prepare_remote(peer, runs))
        await meter.measure("post_read until PortReadEnded", read)
        await port.release_descriptor_list(local)
        await port.release_descriptor_list(remote)
        await port.remove_remote_agent(peer)
    await port.aclose(1)


def main() -> None:
    memory = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    with source(memory.nbytes) as other:
        for title, calls in (("called in the trio thread", direct), ("through RealNixlPort", through_port)):
            print(_measured(title, calls, other.metadata, other.address, memory))


def _measured(title: str, calls: Callable[..., Awaitable[None]], *arguments: Any) -> str:
    """Once with only the loop watching, once with a computing thread beside it (which slows the loop itself)."""

    async def run(meter: Meter) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.tick)
            await calls(meter, *arguments)
            nursery.cancel_scope.cancel()

    alone, beside = Meter(), Meter()
    trio.run(run, alone)
    with beside.computing():
        trio.run(run, beside)
    return "\n".join((alone.table(title), beside.table(f"{title}, beside a computing thread")))


if __name__ == "__main__":
    main()
