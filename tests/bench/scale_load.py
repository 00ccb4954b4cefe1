"""The load of `bench_scale`: so many peers, ranks and open requests, and what is measured while they are there.

A side that is measured (`Side`) can meet its peers, begin a request and end the one that has been open for longest. How
often it does so, and when the clock is read, is the same for all sides and stands in `measure`.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

ENDED_PER_STEP = 8
"""Requests that end, and begin, together; fewer where fewer are open."""
READS_MEASURED = 4_000
REQUESTS_MEASURED_MIN = 200


@dataclass(frozen=True)
class Load:
    """`peers` prefill engines of `ranks` ranks each; `open` requests at once, spread over them."""

    peers: int
    open: int
    ranks: int

    @property
    def per_step(self) -> int:
        return min(self.open, ENDED_PER_STEP)

    @property
    def steps(self) -> int:
        """So that each request that was open at first is replaced, and as many READs are measured whatever the load."""
        requests = max(self.open, READS_MEASURED // self.ranks, REQUESTS_MEASURED_MIN)
        return -(-requests // self.per_step)


@dataclass(frozen=True)
class Cost:
    """Processor time by rank of P; see `bench_scale`."""

    read_us: float
    peer_ms: float


@dataclass(frozen=True)
class Memory:
    """By rank of P; see `bench_scale`."""

    open_kib: float
    peer_kib: float


class Side(Protocol):
    """What is measured. Requests are numbered from 0; request n goes to peer n modulo the number of peers."""

    async def begin(self, first: int, stop: int) -> None:
        """Begin requests `first` to `stop`, and return when their READs are in flight."""

    async def end(self, count: int) -> None:
        """End the READs of the `count` oldest requests, and return when these have been reported and released."""


T = TypeVar("T")
Measure: TypeAlias = Callable[[Side, Load], Awaitable[T]]


async def measure_cost(side: Side, load: Load) -> Cost:
    met = await _meet(side, load)
    await side.begin(load.peers, load.peers + load.open)
    begun = load.peers + load.open
    gc.collect()
    started = time.process_time()
    for _ in range(load.steps):
        await side.end(load.per_step)
        await side.begin(begun, begun + load.per_step)
        begun += load.per_step
    seconds = time.process_time() - started
    await side.end(load.open)
    reads = load.steps * load.per_step * load.ranks
    return Cost(read_us=1e6 * seconds / reads, peer_ms=1e3 * met / load.peers / load.ranks)


async def measure_memory(side: Side, load: Load) -> Memory:
    tracemalloc.start()
    try:
        before = _held_bytes()
        await _meet(side, load)
        met = _held_bytes()
        await side.begin(load.peers, load.peers + load.open)
        opened = _held_bytes()
        await side.end(load.open)
    finally:
        tracemalloc.stop()
    kib = 1024 * load.ranks
    return Memory(open_kib=(opened - met) / load.open / kib, peer_kib=(met - before) / load.peers / kib)


async def _meet(side: Side, load: Load) -> float:
    """One request of each peer, a few peers at a time; how many seconds of the processor that took."""
    started = time.process_time()
    for first in range(0, load.peers, ENDED_PER_STEP):
        stop = min(load.peers, first + ENDED_PER_STEP)
        await side.begin(first, stop)
        await side.end(stop - first)
    return time.process_time() - started


def _held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
