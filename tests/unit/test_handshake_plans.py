"""How often a handshake derives and plans: once for each geometry. And that what is refused is always refused."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from connector.layout.advertised import describe
from connector.layout.geometry import RankId, RankLayout
from connector.layout.local import LocalRank
from connector.layout.plan import EnginePlan
from connector.layout.plan_cache import PlanCache
from connector.layout.remote import layout_from_metadata
from connector.layout.steps import finish
from connector.protocol import PeerAddress
from connector.runtime import handshake
from connector.wire.handshake import HandshakeError, HandshakeReply
from connector.wire.metadata import AgentMetadata
from tests.rig.facts import NO_IDENTITY
from tests.rig.layouts import attention_rank, attention_shapes, plan_engine

SHAPES = attention_shapes(layers=18, heads=8, head_bytes=8)
BLOCKS = 16


def rank_of(engine_id: str, rank: RankId, tp_size: int, stages: int, blocks: int = BLOCKS) -> RankLayout:
    """Each layer in an allocation of its own, at addresses that differ from rank to rank and engine to engine."""
    layers = [str(name) for name in np.array_split(list(SHAPES), stages)[rank.pp_rank]]
    layout = attention_rank(
        engine_id,
        {name: SHAPES[name] for name in layers},
        address=1,
        blocks=blocks,
        tokens=4,
        pp_rank=rank.pp_rank,
        tp_rank=rank.tp_rank,
        tp_size=tp_size,
    )
    chance = random.Random(f"{engine_id} {rank}")
    pages = chance.sample(range(1, 10_000), len(layers))
    regions = (
        msgspec.structs.replace(region, base_address=page << 20)
        for region, page in zip(layout.regions, pages, strict=True)
    )
    return msgspec.structs.replace(layout, regions=tuple(regions), device_id=rank.tp_rank)


class Worker:
    """A decode rank that counts what it derives and plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layout = rank_of("decode", RankId(0, 0), 1, 1)
        self.local = LocalRank(layout=layout, shapes=SHAPES, compatibility_hash="x", identity=NO_IDENTITY)
        self.plans = PlanCache()
        self.calls: Counter[str] = Counter()
        for name in ("layout_in_steps", "plan_in_steps"):
            monkeypatch.setattr(handshake, name, self._counted(name, getattr(handshake, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments, **options)

        return counted

    def meet(self, engine_id: str, tp_size: int, stages: int, blocks: int = BLOCKS, /, **changes: Any) -> EnginePlan:
        """The plan for an engine; `changes` are what its last rank says otherwise. Raises HandshakeError."""
        ranks = [RankId(stage, rank) for stage in range(stages) for rank in range(tp_size)]
        said = [describe(rank_of(engine_id, rank, tp_size, stages, blocks), b"agent") for rank in ranks]
        said[-1] = msgspec.structs.replace(said[-1], **changes)
        peer = PeerAddress(engine_id=engine_id, host="h", port=1, tp_size=tp_size, pp_size=stages)
        replies = [HandshakeReply(metadata=metadata, actor=None) for metadata in said]
        found = finish(handshake._plan(self, peer, ranks, replies))  # type: ignore[arg-type]
        assert planned_anew(self.local, ranks, said, tp_size).reads[-1].remote_runs == found.reads[-1].remote_runs
        return found


def planned_anew(local: LocalRank, ranks: list[RankId], said: list[AgentMetadata], tp_size: int) -> EnginePlan:
    remotes = [
        layout_from_metadata(metadata, rank=rank, tp_size=tp_size, local=local)
        for rank, metadata in zip(ranks, said, strict=True)
    ]
    return plan_engine(local.layout, remotes)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_engines_that_differ_in_addresses_are_planned_once(worker: Worker) -> None:
    for number in range(40):
        worker.meet(f"p{number}", 2, 1)
    assert worker.calls == {"layout_in_steps": 2, "plan_in_steps": 1}


def test_72_ranks_of_an_engine_are_derived_once_and_planned_together(worker: Worker) -> None:
    for number in range(5):
        plan = worker.meet(f"p{number}", 8, 9)
        assert len(plan.reads) == 72
    assert worker.calls == {"layout_in_steps": 72, "plan_in_steps": 1}


def test_each_geometry_is_planned_once(worker: Worker) -> None:
    shapes = [(1, 1, BLOCKS), (2, 1, BLOCKS), (1, 2, BLOCKS), (1, 1, BLOCKS + 1)]
    for number in range(5):
        for tp_size, stages, blocks in shapes:
            worker.meet(f"p{number} {tp_size} {stages} {blocks}", tp_size, stages, blocks)
    assert worker.calls == {"layout_in_steps": 6, "plan_in_steps": len(shapes)}
    assert len(worker.plans) == len(shapes)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("block length of layers.0 on rank 0 of 1", {"block_lens": [7, *[256] * 17]}),
        ("KV cache region layers.99", {"region_names": ["layers.99", *list(SHAPES)[1:]], "region_members": []}),
        ("dcp_size", {"dcp_size": 2}),
        ("attention_backend", {"attn_backend_name": "CPU_ATTN"}),
        ("memory of layers.17", {"region_mem_types": [*["DRAM"] * 17, "VRAM"]}),
        ("engine_id", {"engine_id": "decode"}),
    ],
)
def test_what_is_refused_is_refused_whoever_was_met_before(worker: Worker, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(HandshakeError) as first:
        worker.meet("p", 1, 1, **changes)
    worker.meet("p", 1, 1)
    for _ in range(2):
        with pytest.raises(HandshakeError) as again:
            worker.meet("p", 1, 1, **changes)
        assert again.value.failure == first.value.failure
    assert again.value.failure.field == field
    assert len(worker.plans) == 1


def test_what_the_client_says_of_sizes_is_compared_each_time(worker: Worker) -> None:
    """The metadata says one size of decode context parallelism; the request another."""
    worker.meet("p", 1, 1)
    rank = RankId(0, 0)
    reply = HandshakeReply(metadata=describe(rank_of("p", rank, 1, 1), b"agent"), actor=None)
    peer = PeerAddress(engine_id="p", host="h", port=1, tp_size=1, dcp_size=2)
    with pytest.raises(HandshakeError, match="dcp_size"):
        finish(handshake._plan(worker, peer, [rank], [reply]))  # type: ignore[arg-type]
