"""What everything in a run shares: time, limits, chance, links, the cores that are run, and the log.

The log is the list of every step of a machine, as the cores tell of it: true time, executor, name of the machine,
subject, value before, event, value after, one after the other in one flat list, which costs nothing to keep. Nothing
more is noted while the run goes on; the fingerprint, the coverage of the tables and the trace are made from it
afterwards, and only when somebody asks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from statemachine.lending import Lending
from statemachine.remote_engine import RemoteEngine
from statemachine.roster import Roster
from tests.simulation.faults import Kind, generator
from tests.simulation.level1.faults import Link
from tests.simulation.level1.heap import EventHeap
from tests.simulation.level1.oracles import Oracles
from tests.simulation.level1.shape import Cluster


@dataclass(frozen=True, kw_only=True)
class Cores:
    """What is run: production's classes, or broken ones with the same arguments."""

    remote_engine: Callable[..., RemoteEngine] = RemoteEngine
    lending: Callable[..., Lending] = Lending
    roster: Callable[..., Roster] = Roster


class Scope(Protocol):
    """The executor of a core, as the log keeps it."""

    def names(self) -> tuple[str, int]:
        """Engine and rank, for a trace."""
        ...


Entry: TypeAlias = tuple[int, Scope, str, Hashable, Any, Any, Any]
ENTRY_FIELDS = 7


def entries(log: list[Any]) -> Iterator[Entry]:
    """What lies flat in the log."""
    return zip(*(log[field::ENTRY_FIELDS] for field in range(ENTRY_FIELDS)), strict=True)


class World:
    """See the module's docstring. `links` are looked up by (from, to)."""

    __slots__ = ("cluster", "cores", "fired", "heap", "links", "log", "oracles", "seed", "transport_chance")

    def __init__(self, seed: int, cluster: Cluster, cores: Cores, oracles: Oracles, heap: EventHeap) -> None:
        self.seed = seed
        self.cluster = cluster
        self.cores = cores
        self.heap = heap
        self.oracles = oracles
        self.log: list[Any] = []
        self.fired: Counter[Kind] = Counter()
        self.transport_chance = self.chance("transport")
        names = [(decode, prefill) for decode in cluster.base.decode_names for prefill in cluster.base.prefill_names]
        self.links = {
            pair: Link(heap, self.transport_chance, self.fired)
            for decode, prefill in names
            for pair in ((decode, prefill), (prefill, decode))
        }

    def chance(self, concern: str) -> random.Random:
        """A generator of its own for each concern, so that a draw more in one moves nothing in another."""
        return generator(self.seed, f"level 1, {concern}")


def block_pool(blocks: int) -> list[int]:
    """Free blocks; taken from the end, so the lowest goes first."""
    return list(range(blocks - 1, -1, -1))


Give: TypeAlias = Callable[[list[int], list[int]], None]


def give_last(free: list[int], blocks: list[int]) -> None:
    """What is freed last is handed out first."""
    free += blocks


def give_lowest(free: list[int], blocks: list[int]) -> None:
    """The lowest block is handed out first."""
    free += blocks
    free.sort(reverse=True)


def take(free: list[int], count: int) -> list[int]:
    """Remove and return so many blocks; there are enough."""
    blocks = free[-count:]
    del free[-count:]
    return blocks
