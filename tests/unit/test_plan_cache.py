"""Plans that are made once for each geometry: equal to those made anew, and never those of another geometry."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.layout.advertised import describe
from connector.layout.geometry import RankId, RankLayout, Region
from connector.layout.landing import Permute
from connector.layout.plan import EnginePlan
from connector.layout.plan_cache import Geometry, PlanCache, geometry_in_steps
from connector.layout.remote import Stated
from connector.layout.shapes import of_unit
from connector.layout.sources import partners
from connector.layout.steps import finish
from connector.wire.metadata import AgentMetadata
from tests.rig.layouts import attention_rank, attention_shapes, plan_engine
from tests.unit.layout_oracle import FAMILIES, Case, Rank, draw_case
from tests.unit.properties import on_any_machine

SHAPES = attention_shapes(layers=3, heads=4, head_bytes=8)
ADDRESS = 1 << 30
ONE_HEAD = Stated(heads={"model.layers.0": 1}, groups={}, group_tokens=(16,))


def geometry_of(remotes: Sequence[RankLayout], own_engine_id: str = "decode") -> Geometry:
    said = [(remote.rank, describe(remote, b"")) for remote in remotes]
    return of_metadata(said, own_engine_id, remotes[0].tp_size)


def of_metadata(said: Sequence[tuple[RankId, AgentMetadata]], own: str = "decode", tp_size: int = 1) -> Geometry:
    ranks = [(rank, metadata, None) for rank, metadata in said]
    return finish(geometry_in_steps(ranks, own_engine_id=own, tp_size=tp_size, dcp_size=1))


def as_values(plan: EnginePlan) -> Any:
    """A plan as what can be compared."""
    reads = [
        [
            [getattr(read, name) for name in read.__struct_fields__ if name != "rows"],
            [
                [value.tolist() if isinstance(value, np.ndarray) else value for value in msgspec.structs.astuple(row)]
                for row in read.rows
            ],
        ]
        for read in plan.reads
    ]
    return reads, plan.notify_only, plan.own, plan.landing


# --- what is found is right -----------------------------------------------------------------------------------------


def by_head(remote: RankLayout) -> RankLayout:
    """Where heads are further out than blocks, a layer is advertised as a region for each head."""
    regions: list[Region] = []
    for region in remote.regions:
        first = region.pieces[0]
        if first.unit_stride_bytes < region.block_stride_bytes:
            regions.append(region)
            continue
        length_bytes = region.block_length_bytes // (first.stop - first.start)
        regions.extend(
            msgspec.structs.replace(
                region,
                base_address=region.base_address + (unit - first.start) * first.unit_stride_bytes,
                block_length_bytes=length_bytes,
                pieces=of_unit(region.pieces, unit),
            )
            for unit in range(first.start, first.stop)
        )
    return msgspec.structs.replace(remote, regions=tuple(regions))


def elsewhere(chance: random.Random, remote: RankLayout) -> RankLayout:
    """The same rank in another process: regions that reach into each other stay together, the others go anywhere."""
    (place,) = geometry_of([remote]).ranks
    address, starts = chance.randint(1, 1 << 40), dict[int, int]()
    for start, end in chance.sample(list(zip(place.starts, place.ends, strict=True)), len(place.starts)):
        starts[start] = address
        # Allocations may touch each other.
        address += end - start + chance.choice((0, 0, chance.randint(1, 1 << 20)))
    regions = []
    for region in remote.regions:
        start = max(start for start in starts if start <= region.base_address)
        regions.append(msgspec.structs.replace(region, base_address=starts[start] + region.base_address - start))
    return msgspec.structs.replace(
        remote, engine_id=f"{remote.engine_id}-2", regions=tuple(regions), device_id=chance.randint(0, 7)
    )


def check_that_a_plan_moves(chance: random.Random, case: Case) -> None:
    noise = np.random.default_rng(case.noise)
    sizes = (case.decode.tp_size, case.prefill.tp_size, case.decode.dcp_size, case.prefill.dcp_size)
    ranks = [rank for rank in case.prefill.ranks if rank.tp_rank in partners(case.decode_rank, *sizes)]
    remotes = [by_head(Rank(case, case.prefill, rank, noise).layout) for rank in ranks]
    local = Rank(case, case.decode, RankId(0, case.decode_rank), noise).layout
    moved = [elsewhere(chance, remote) for remote in remotes]
    for permute in Permute:
        cache = PlanCache()
        cache.keep(geometry_of(remotes), plan_engine(local, remotes, permute))
        found = cache.find(geometry_of(moved))
        assert found is not None
        assert as_values(found) == as_values(plan_engine(local, moved, permute))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_that_was_moved_is_the_plan_made_there(family: str) -> None:
    for seed in range(150):
        chance = random.Random(f"{family} {seed}")
        check_that_a_plan_moves(chance, draw_case(chance, family))


@settings(on_any_machine, max_examples=200)
@given(st.randoms(use_true_random=False), st.sampled_from(FAMILIES))
def test_a_plan_that_was_moved_is_the_plan_made_there_odd_cases(chance: random.Random, family: str) -> None:
    check_that_a_plan_moves(chance, draw_case(chance, family))


# --- what is another geometry ---------------------------------------------------------------------------------------


def metadata_of(layout_name: str = "LBHNC") -> AgentMetadata:
    layout = attention_rank("p", SHAPES, address=ADDRESS, blocks=8, tokens=4, layout_name=layout_name)
    apart = (
        msgspec.structs.replace(region, base_address=region.base_address * (number + 1))
        for number, region in enumerate(layout.regions)
    )
    return describe(msgspec.structs.replace(layout, regions=tuple(apart)), b"agent")


def key_of(**changes: Any) -> tuple[bytes, ...]:
    return of_metadata([(RankId(0, 0), msgspec.structs.replace(metadata_of(), **changes))]).key


CHANGES: dict[str, Any] = {
    "num_blocks": 9,
    "block_lens": [128, 128, 64],
    "block_strides": [128, 128, 256],
    "kv_cache_layout": "LBNHC",
    "block_size": 8,
    "ssm_sizes": (1, 0),
    "attn_backend_name": "OTHER",
    "physical_blocks_per_logical_kv_block": 2,
    "region_num_blocks": [8, 8, 9],
    "region_group_ids": [0, 0, 1],
    "region_names": ["layers.0", "layers.2", "layers.1"],
    "region_mem_types": ["DRAM", "DRAM", "VRAM"],
    "dcp_size": 2,
    "pcp_size": 2,
    "ple_block_len": 7,
    "region_members": [],
    "packed_member_layouts": {"layers.0": (0, 1)},
}
LEFT_OUT: dict[str, Any] = {
    "engine_id": "q",
    "agent_metadata": b"other",
    "kv_caches_base_addr": [5 << 30, 1 << 30, 9 << 30],
    "device_id": 3,
}


def test_every_field_is_one_or_the_other() -> None:
    assert CHANGES.keys() | LEFT_OUT.keys() == set(AgentMetadata.__struct_fields__)


@pytest.mark.parametrize("field", CHANGES)
def test_what_a_rank_says_is_part_of_the_geometry(field: str) -> None:
    assert key_of(**{field: CHANGES[field]}) != key_of()


@pytest.mark.parametrize("field", LEFT_OUT)
def test_what_an_engine_has_to_itself_is_not(field: str) -> None:
    assert key_of(**{field: LEFT_OUT[field]}) == key_of()


def test_who_is_asked_is_part_of_the_geometry() -> None:
    rank, metadata = RankId(0, 0), metadata_of()
    keys = [
        of_metadata([(rank, metadata)]).key,
        of_metadata([(RankId(0, 1), metadata)]).key,
        of_metadata([(RankId(1, 0), metadata)]).key,
        of_metadata([(rank, metadata), (rank, metadata)]).key,
        of_metadata([(rank, metadata), (rank, msgspec.structs.replace(metadata, engine_id="q"))]).key,
        of_metadata([(rank, metadata)], own="p").key,
        of_metadata([(rank, metadata)], tp_size=2).key,
        finish(geometry_in_steps([(rank, metadata, None)], own_engine_id="decode", tp_size=1, dcp_size=2)).key,
        finish(geometry_in_steps([(rank, metadata, ONE_HEAD)], own_engine_id="decode", tp_size=1, dcp_size=1)).key,
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("layout_name", "addresses", "extents"),
    [
        ("LBHNC", (1000, 5000, 9000), 3),
        ("LBHNC", (1000, 1000 + 8 * 128, 9000), 3),  # one after the other
        ("LBHNC", (1000, 1000 + 8 * 128 - 1, 9000), 2),
        ("LBHNC", (1128, 1256, 1000), 1),
        ("LBHNC", (9000, 1000, 1000), 2),
        ("BLHNC", (1000, 5000, 9000), 1),  # a row of blocks is measured from the first region to the last
    ],
)
def test_extents(layout_name: str, addresses: tuple[int, ...], extents: int) -> None:
    """Regions of 8 blocks, one every 128 bytes."""
    metadata = msgspec.structs.replace(
        metadata_of(), kv_cache_layout=layout_name, kv_caches_base_addr=list(addresses), block_strides=[128] * 3
    )
    (place,) = of_metadata([(RankId(0, 0), metadata)]).ranks
    assert len(place.starts) == extents
    assert place.starts[0] == min(addresses[: 1 if extents > 1 else 3])
    together = msgspec.structs.replace(metadata, kv_caches_base_addr=[address + 640 for address in addresses])
    assert of_metadata([(RankId(0, 0), together)]).key == of_metadata([(RankId(0, 0), metadata)]).key
    if extents < 3:
        nearer = msgspec.structs.replace(metadata, kv_caches_base_addr=[addresses[0], addresses[1] + 1, addresses[2]])
        assert of_metadata([(RankId(0, 0), nearer)]).key != of_metadata([(RankId(0, 0), metadata)]).key


def test_which_regions_share_an_extent_is_part_of_the_geometry() -> None:
    """Also where all of them begin where their extent does."""
    keys = [
        key_of(kv_caches_base_addr=addresses)
        for addresses in ([1000, 1000, 9000], [1000, 5000, 9000], [1000, 9000, 1000], [9000, 1000, 1000], [1000] * 3)
    ]
    assert len(set(keys)) == len(keys)


def test_an_extent_ends_with_the_region_that_ends_last() -> None:
    metadata = msgspec.structs.replace(
        metadata_of(), kv_caches_base_addr=[1000, 1100, 1900], block_strides=[128] * 3, region_num_blocks=[8, 1, 8]
    )
    (place,) = of_metadata([(RankId(0, 0), metadata)]).ranks
    assert (place.starts, place.ends) == ((1000,), (1900 + 8 * 128,))


# --- what is kept ---------------------------------------------------------------------------------------------------


def planned(blocks: int) -> tuple[Geometry, EnginePlan]:
    """Three regions, and three runs to read them."""
    local, remote = (
        attention_rank(name, SHAPES, address=ADDRESS, blocks=blocks, tokens=4) for name in ("decode", "prefill")
    )
    return geometry_of([remote]), plan_engine(local, [remote])


def test_those_asked_for_last_are_kept() -> None:
    cache = PlanCache(items_max=3 * 6)
    plans = [planned(blocks) for blocks in range(2, 7)]
    for geometry, plan in plans[:3]:
        cache.keep(geometry, plan)
    assert cache.find(plans[0][0]) is not None
    for geometry, plan in plans[3:]:
        cache.keep(geometry, plan)
    assert len(cache) == 3
    assert [cache.find(geometry) is not None for geometry, _ in plans] == [True, False, False, True, True]


def test_one_that_is_larger_than_all_the_room_throws_nothing_out() -> None:
    cache = PlanCache(items_max=6)
    cache.keep(*planned(2))
    local, remote = (
        attention_rank(name, attention_shapes(layers=4, heads=4, head_bytes=8), address=ADDRESS, blocks=2, tokens=4)
        for name in ("decode", "prefill")
    )
    cache.keep(geometry_of([remote]), plan_engine(local, [remote]))
    assert len(cache) == 1
    assert cache.find(geometry_of([remote])) is None


def test_the_same_is_kept_once() -> None:
    cache = PlanCache(items_max=2 * 6)
    for blocks in (2, 2, 2, 3):
        cache.keep(*planned(blocks))
    assert len(cache) == 2


def test_what_plans_have_in_common_is_shared() -> None:
    geometry, plan = planned(2)
    cache = PlanCache()
    cache.keep(geometry, plan)
    found = cache.find(geometry)
    assert found is not None
    assert found.reads[0].local_runs is plan.reads[0].local_runs
    assert found.reads[0].rows is plan.reads[0].rows
