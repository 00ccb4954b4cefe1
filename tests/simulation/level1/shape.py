"""The cluster of a seed: how many engines and ranks, their pools, the load, and the options of the connector.

The part that both levels share comes from `tests.simulation.faults.draw_shape`, so a seed means as many engines and as
long a run at both. What level 1 adds is drawn from a generator of its own. Times are short, and not the same in every
seed, so that every limit is met before every other one in some of them.
"""

from __future__ import annotations

import msgspec

from connector.config import ConnectorOptions
from tests.simulation.faults import Shape, draw_shape, generator


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """`base` is what level 2 would run.

    Attributes:
        prefill_ranks, decode_ranks: tensor-parallel ranks of each engine. Where D has more of them, several ranks of
            it consume one lease; where P has more, each rank of D takes a READ from several.
        prefill_blocks, decode_blocks: size of a block pool.
        reuses_last: the pool hands out the block freed last; otherwise the lowest one.
        requests_per_second: arrivals outside of bursts.
        median_blocks, spread: of the log-normal number of blocks in a prompt.
        decoding_seconds: how long a served request keeps its blocks at most.
    """

    base: Shape
    prefill_ranks: int
    decode_ranks: int
    prefill_blocks: int
    decode_blocks: int
    reuses_last: bool
    requests_per_second: float
    median_blocks: float
    spread: float
    decoding_seconds: float
    options: ConnectorOptions


def draw_cluster(seed: int) -> Cluster:
    chance = generator(seed, "level 1")
    base = draw_shape(seed)
    backoff_seconds = chance.choice([0.05, 0.1, 0.4])
    return Cluster(
        base=base,
        prefill_ranks=chance.randint(1, 2),
        decode_ranks=chance.randint(1, 2),
        prefill_blocks=chance.choice([128, 256, 512]),
        decode_blocks=chance.choice([128, 256, 512]),
        reuses_last=chance.random() < 0.5,
        requests_per_second=chance.uniform(60.0, 400.0),
        median_blocks=chance.uniform(2.0, 6.0),
        spread=chance.uniform(0.4, 0.9),
        decoding_seconds=chance.choice([0.01, 0.05, 0.2]),
        options=ConnectorOptions(
            kv_lease_duration=chance.choice([1.0, 2.0, 4.0, 8.0]),
            request_timeout_seconds=chance.choice([1.5, 3.0, 6.0]),
            handshake_timeout_seconds=chance.choice([0.2, 0.8, 2.0]),
            quiesce_timeout_seconds=chance.choice([0.3, 1.5]),
            lease_margin_seconds=chance.choice([0.0, 0.001, 0.05]),
            transfer_retries=chance.choice([0, 1, 1, 2]),
            backoff_initial_seconds=backoff_seconds,
            backoff_max_seconds=10 * backoff_seconds,
            peer_limit=base.peer_limit,
            engine_ttl=chance.choice([2.0, 3600.0]),
        ),
    )
