"""The cluster of a seed: how many engines and ranks, their pools, the load, and the limits of the connector.

The part that both levels share comes from `tests.simulation.faults.draw_shape`, so a seed means as many engines and as
long a run at both. What level 1 adds is drawn from a generator of its own. Times are short, and not the same in every
seed, so that every limit is met before every other one in some of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from statemachine.lending import LendingLimits
from statemachine.remote_engine import EngineLimits
from tests.simulation.faults import Shape, draw_shape, generator
from tests.simulation.level1.heap import MILLISECOND, SECOND

RANKS_MAX = 2
BUILTIN_SHARE = 0.12
"""How many engines have the built-in connector."""
TWICE_SHARE = 0.6
TWINS_SHARE = 0.15
CHECKED_SHARE = 0.15
FOREVER_SECONDS = 3600.0
RETIRED_MAX = 100
"""Engines that a run cannot have."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """`base` is what level 2 would run.

    Attributes:
        prefill_ranks, decode_ranks: tensor-parallel ranks of each engine. Where D has more of them, several ranks of
            it hold one lease; where P has more, each rank of D has several partners.
        is_replicated: where P has more ranks, their KV is the same: a rank of D reads from one of its partners.
        resizes: an engine that restarts under its old id has another number of ranks.
        keeps_decode_id: a decode engine that restarts has the engine id of before.
        has_twins: all decode engines have one engine id, as by a mistake of who starts them.
        builtin: names of the engines with the built-in connector.
        describes_twice: half of the requests describe a built-in prefill engine by other sizes: two peers of one agent.
        checks_reads: what READs leave is checked, as with the option verify; it always passes.
        prefill_blocks, decode_blocks: size of a block pool.
        reuses_last: the pool hands out the block freed last; otherwise the lowest one.
        requests_per_second: arrivals outside of bursts.
        median_blocks, spread: of the log-normal number of blocks in a prompt.
        decoding_seconds: how long a served request keeps its blocks at most.
        handshake_ns: how long an answer on the side channel is waited for.
        peer_limit, engine_ttl_ns: as the options of the connector.
    """

    base: Shape
    prefill_ranks: int
    decode_ranks: int
    is_replicated: bool
    resizes: bool
    keeps_decode_id: bool
    has_twins: bool
    builtin: frozenset[str]
    describes_twice: bool
    checks_reads: bool
    prefill_blocks: int
    decode_blocks: int
    reuses_last: bool
    requests_per_second: float
    median_blocks: float
    spread: float
    decoding_seconds: float
    handshake_ns: int
    peer_limit: int
    engine_ttl_ns: int
    engine: EngineLimits
    lending: LendingLimits

    @property
    def remembers_peers(self) -> bool:
        """No decode engine forgets a peer that is alive."""
        return self.peer_limit > RETIRED_MAX and self.engine_ttl_ns >= round(FOREVER_SECONDS * SECOND)


def _ns(seconds: float) -> int:
    return round(seconds * SECOND)


def draw_cluster(seed: int) -> Cluster:
    chance = generator(seed, "level 1")
    base = draw_shape(seed)
    lease_ns = _ns(chance.choice([1.0, 2.0, 4.0, 8.0]))
    backoff_ns = _ns(chance.choice([0.05, 0.1, 0.4]))
    return Cluster(
        base=base,
        prefill_ranks=chance.randint(1, RANKS_MAX),
        decode_ranks=chance.randint(1, RANKS_MAX),
        is_replicated=chance.random() < 0.3,
        resizes=chance.random() < 0.3,
        keeps_decode_id=chance.random() < 0.5,
        has_twins=generator(seed, "level 1: twins").random() < TWINS_SHARE,
        builtin=_draw_builtin(base, chance),
        describes_twice=generator(seed, "level 1: sizes").random() < TWICE_SHARE,
        checks_reads=generator(seed, "level 1: checks").random() < CHECKED_SHARE,
        prefill_blocks=chance.choice([128, 256, 512]),
        decode_blocks=chance.choice([128, 256, 512]),
        reuses_last=chance.random() < 0.5,
        requests_per_second=chance.uniform(60.0, 400.0),
        median_blocks=chance.uniform(2.0, 6.0),
        spread=chance.uniform(0.4, 0.9),
        decoding_seconds=chance.choice([0.01, 0.05, 0.2]),
        handshake_ns=_ns(chance.choice([0.2, 0.8, 2.0])),
        peer_limit=base.peer_limit,
        engine_ttl_ns=_ns(chance.choice([2.0, FOREVER_SECONDS])),
        engine=EngineLimits(
            lease_ns=lease_ns,
            margin_ns=chance.choice([0, MILLISECOND, 50 * MILLISECOND]),
            request_ns=_ns(chance.choice([1.5, 3.0, 6.0])),
            quiesce_ns=_ns(chance.choice([0.3, 1.5])),
            grace_ns=_ns(chance.choice([0.05, 0.5, 2.0])),
            backoff_first_ns=backoff_ns,
            backoff_max_ns=10 * backoff_ns,
            incompatible_ns=_ns(chance.choice([2.0, 60.0])),
            retries=chance.choice([0, 1, 1, 2]),
        ),
        lending=LendingLimits(
            lease_ns=lease_ns,
            total_ns=_ns(FOREVER_SECONDS) if chance.random() < 0.8 else 3 * lease_ns,
        ),
    )


def _draw_builtin(base: Shape, chance: random.Random) -> frozenset[str]:
    """At least one engine of each role has our connector."""
    return frozenset(
        name
        for names in (_all_but_one(base.prefill_names, chance), _all_but_one(base.decode_names, chance))
        for name in names
        if chance.random() < BUILTIN_SHARE
    )


def _all_but_one(names: Sequence[str], chance: random.Random) -> list[str]:
    spared = chance.choice(names)
    return [name for name in names if name != spared]
