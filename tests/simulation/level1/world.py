"""What everything in a run shares: time, limits, chance, links, the steps of the machines, and the log.

The log is the list of everything that was stepped: true time, subject, state before, type of the event, one after the
other in one flat list, which costs nothing to keep. Nothing more is noted while the run goes on; the fingerprint, the
coverage of the tables and the trace are made from it afterwards, and only when somebody asks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

from connector.config import ConnectorOptions
from connector.runtime.clock import to_ns
from connector.runtime.supervisor import RENEWAL_FRACTION
from statemachine.explore import Machines
from statemachine.kernel import Event, MachineState
from tests.simulation.faults import Kind, generator
from tests.simulation.level1.faults import Link
from tests.simulation.level1.heap import EventHeap
from tests.simulation.level1.oracles import Oracles
from tests.simulation.level1.shape import Cluster


class Subject(Protocol):
    """A machine instance, as the log keeps it."""

    value: Any

    def names(self) -> tuple[str, int, str]:
        """Engine, rank and name of the instance, for a trace."""
        ...


Entry: TypeAlias = tuple[int, Subject, MachineState, type[Event]]


def entries(log: list[Any]) -> Iterator[Entry]:
    """What lies flat in the log."""
    return zip(log[0::4], log[1::4], log[2::4], log[3::4], strict=True)


class Limits:
    """The options of the connector in nanoseconds."""

    __slots__ = (
        "backoff_first_ns",
        "backoff_max_ns",
        "engine_ttl_ns",
        "handshake_ns",
        "lease_ns",
        "margin_ns",
        "quiesce_ns",
        "renewal_ns",
        "request_ns",
    )

    def __init__(self, options: ConnectorOptions) -> None:
        self.backoff_first_ns = to_ns(options.backoff_initial_seconds)
        self.backoff_max_ns = to_ns(options.backoff_max_seconds)
        self.engine_ttl_ns = to_ns(options.engine_ttl)
        self.handshake_ns = to_ns(options.handshake_timeout_seconds)
        self.lease_ns = to_ns(options.kv_lease_duration)
        self.margin_ns = to_ns(options.lease_margin_seconds)
        self.quiesce_ns = to_ns(options.quiesce_timeout_seconds)
        self.renewal_ns = to_ns(options.kv_lease_duration * RENEWAL_FRACTION)
        self.request_ns = to_ns(options.request_timeout_seconds)


class World:
    """See the module's docstring. `links` are looked up by (from, to)."""

    __slots__ = (
        "cluster",
        "fired",
        "heap",
        "limits",
        "links",
        "log",
        "machines",
        "options",
        "oracles",
        "seed",
        "step_lease",
        "step_peer",
        "step_request",
        "step_transfer",
        "transport_chance",
    )

    def __init__(self, seed: int, cluster: Cluster, machines: Machines, oracles: Oracles, heap: EventHeap) -> None:
        self.seed = seed
        self.cluster = cluster
        self.options = cluster.options
        self.limits = Limits(cluster.options)
        self.heap = heap
        self.oracles = oracles
        self.machines = machines
        self.step_request = machines.request.step
        self.step_transfer = machines.transfer.step
        self.step_peer = machines.peer.step
        self.step_lease = machines.lease.step
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
