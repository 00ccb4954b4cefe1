"""Plans between different layouts: what is merged, who is read and told, what is refused. Bytes are for the oracle."""

from __future__ import annotations

import collections
from typing import Any

import msgspec
import numpy as np
import pytest

from connector.layout.blocks import GroupBlocks
from connector.layout.copies import STRETCHES_MAX
from connector.layout.geometry import BlockIdError, CacheGroup, LayoutMismatch, Piece, RankId, RankLayout, Region
from connector.layout.landing import LandingOrder, Permute
from connector.layout.plan import EnginePlan
from connector.layout.shapes import (
    ImpossibleShard,
    LayerShape,
    attention,
    latent,
    mamba,
    page_strides,
    paged_pieces,
    shard,
    state_pieces,
)
from connector.layout.sources import partners
from tests.rig.layouts import plan_engine

HEADS = 8
TP_SIZES = (1, 2, 4, 8)


def rank(
    engine_id: str,
    *shapes: LayerShape,
    tp_rank: int = 0,
    tp_size: int = 1,
    layout_name: str = "LBHNC",
    tokens: int = 16,
    ratio: int = 1,
    blocks: int = 8,
    **changes: Any,
) -> RankLayout:
    """A rank whose layers of tokens are alike and lie in one tensor; states follow."""
    shapes = shapes or tuple(attention(f"layers.{i}", heads=HEADS, k_bytes=4, v_bytes=4) for i in range(2))
    regions: list[Region] = []
    for index, shape in enumerate(shapes):
        components = shape.components
        start, stop = shard(components[0].units, tp_rank, tp_size)
        common: dict[str, Any] = {"name": shape.name, "num_blocks": blocks, "memory_kind": "DRAM", "group": shape.group}
        if shape.is_state:
            pieces = state_pieces(shape, tp_rank=tp_rank, tp_size=tp_size)
            size = sum((piece.stop - piece.start) * piece.bytes_per_unit for piece in pieces)
            base = (index + 2) << 30
            regions.append(
                Region(base_address=base, block_length_bytes=size, block_stride_bytes=size, pieces=pieces, **common)
            )
            continue
        strides = page_strides(
            layout_name,
            layers=len(shapes),
            blocks=blocks,
            heads=stop - start,
            tokens=tokens,
            bytes_per_token=sum(component.bytes_per_unit for component in components),
        )
        regions.append(
            Region(
                base_address=(1 << 30) + index * strides.layer,
                block_length_bytes=(stop - start) * tokens * sum(part.bytes_per_unit for part in components),
                block_stride_bytes=strides.block,
                pieces=paged_pieces(shape, tp_rank=tp_rank, tp_size=tp_size, strides=strides),
                **common,
            )
        )
    groups = max(shape.group for shape in shapes) + 1
    states = {shape.group for shape in shapes if shape.is_state}
    plain: dict[str, Any] = {
        "engine_id": engine_id,
        "tp_rank": tp_rank,
        "tp_size": tp_size,
        "dcp_size": 1,
        "pcp_size": 1,
        "regions": tuple(regions),
        "kernel_block_size_tokens": tokens,
        "kernel_blocks_per_block": ratio,
        "layout_name": layout_name,
        "attention_backend": "ANY",
        "groups": tuple(
            CacheGroup(tokens_per_kernel_block=0)
            if group in states
            else CacheGroup(tokens_per_kernel_block=tokens, kernel_blocks_per_block=ratio)
            for group in range(groups)
        ),
    }
    return RankLayout(**(plain | changes))


def pair_up(decode: RankLayout, tp_size: int, *shapes: LayerShape, **options: Any) -> EnginePlan:
    """The plan of `decode` for the ranks that it deals with of a prefill engine of `tp_size` ranks."""
    ranks = partners(decode.tp_rank, decode.tp_size, tp_size)
    return plan_engine(decode, [rank("p", *shapes, tp_rank=number, tp_size=tp_size, **options) for number in ranks])


def rows_of(plan: EnginePlan) -> int:
    return sum(len(rows.local_starts) for read in plan.reads for rows in read.rows)


# --- merging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decode", "prefill", "rows"),
    [
        ("LBHNC", "LBHNC", 2),  # a page of each layer
        ("LBNHC", "LBNHC", 2),
        ("BLHNC", "BLHNC", 1),  # all layers of a block lie in one row
        ("BLNHC", "BLNHC", 1),
        ("BHLNC", "BHLNC", 1),
        ("LHBNC", "LHBNC", 2 * HEADS),  # a head of a block is as much as lies together
        ("BLHNC", "LBHNC", 2),
        ("LBHNC", "LHBNC", 2 * HEADS),
        ("LBHNC", "LBNHC", 2 * HEADS * 16),  # a head of a token
    ],
)
def test_contiguous_stretches_are_one(decode: str, prefill: str, rows: int) -> None:
    plan = pair_up(rank("d", layout_name=decode), 1, layout_name=prefill)
    assert rows_of(plan) == rows


@pytest.mark.parametrize(
    ("decode", "prefill", "decode_tp", "prefill_tp", "rows"),
    [
        ("LBNHC", "LBHNC", 1, 1, 2),  # a page of each layer
        ("LBHNC", "LBNHC", 1, 1, 2),
        ("LBNHC", "BLHNC", 1, 1, 2),
        ("LBNHC", "LBHNC", 2, 1, 2),  # half of the heads lie together
        ("LBNHC", "LBHNC", 1, 2, 4),
        ("LBNHC", "LHBNC", 1, 1, 2 * HEADS),
        ("LBHNC", "LBNHC", 2, 1, 2 * 16),  # half of the heads of each token
    ],
)
def test_what_lands_in_the_peers_order_is_read_in_long_stretches(
    decode: str, prefill: str, decode_tp: int, prefill_tp: int, rows: int
) -> None:
    ours = rank("d", tp_size=decode_tp, layout_name=decode)
    theirs = [rank("p", tp_rank=number, tp_size=prefill_tp, layout_name=prefill) for number in range(prefill_tp)]
    assert rows_of(plan_engine(ours, theirs, Permute.ORDERS)) == rows
    for permute in (Permute.NEVER, Permute.BLOCK_SIZES):
        assert rows_of(plan_engine(ours, theirs, permute)) == 2 * HEADS // decode_tp * 16  # a head of a token


@pytest.mark.parametrize(
    ("decode_tp", "prefill_tp", "layout_name", "rows"),
    [
        (2, 1, "LBHNC", 2),  # half of the heads lie together
        (1, 2, "LBHNC", 4),  # two ranks, two layers
        (2, 1, "LBNHC", 2 * 16),  # half of the heads of each token
    ],
)
def test_heads_of_a_rank_are_one_stretch(decode_tp: int, prefill_tp: int, layout_name: str, rows: int) -> None:
    plan = pair_up(rank("d", tp_size=decode_tp, layout_name=layout_name), prefill_tp, layout_name=layout_name)
    assert rows_of(plan) == rows


@pytest.mark.parametrize(("layout_name", "rows"), [("LBHNC", 2 * HEADS), ("LBNHC", 2)])
def test_smaller_blocks_of_the_other_side(layout_name: str, rows: int) -> None:
    """Where tokens are outermost a part of a block is one stretch; where heads are, each head has one."""
    plan = pair_up(rank("d", layout_name=layout_name), 1, layout_name=layout_name, tokens=4)
    assert rows_of(plan) == rows
    ((read,), (pairs,)) = plan.reads, plan.pair([GroupBlocks(local=[1], remote=[4, 5, 6, 7])])
    local_ids, remote_ids = read.descriptor_ids(pairs)
    assert len(local_ids) == 4 * rows
    if layout_name == "LBNHC":
        assert (np.diff(local_ids.reshape(2, 4)) == 1).all()
        assert (np.diff(remote_ids.reshape(2, 4)) == 1).all()


def engines(
    decode: dict[str, Any], prefill: dict[str, Any], *shapes: LayerShape
) -> tuple[RankLayout, list[RankLayout]]:
    """Rank 0 of a decode engine, and the ranks of the prefill engine that it deals with."""
    ours = rank("d", *shapes, **decode)
    numbers = partners(0, ours.tp_size, prefill.get("tp_size", 1))
    return ours, [rank("p", *shapes, tp_rank=number, **prefill) for number in numbers]


@pytest.mark.parametrize(
    ("decode", "prefill", "rows"),
    [
        ({"layout_name": "LBHNC"}, {"layout_name": "LBHNC"}, 2),  # a block of each layer
        ({"layout_name": "BLHNC"}, {"layout_name": "LBHNC"}, 2),
        ({"layout_name": "LBHNC"}, {"layout_name": "BLHNC"}, 2),
        ({"layout_name": "BLHNC"}, {"layout_name": "BLHNC"}, 2),
        ({"layout_name": "LBHNC", "tp_size": 2}, {"layout_name": "LBHNC"}, 2),  # half of the heads of it
        ({"layout_name": "LBHNC"}, {"layout_name": "LBHNC", "tp_size": 2}, 4),
        ({"layout_name": "LBNHC"}, {"layout_name": "LBHNC"}, 2),
        ({"layout_name": "BLNHC", "tp_size": 2}, {"layout_name": "LBHNC"}, 2),
    ],
)
def test_smaller_blocks_land_as_they_are(decode: dict[str, Any], prefill: dict[str, Any], rows: int) -> None:
    """One stretch for each, whether or not heads and tokens have to change places too."""
    ours, theirs = engines(decode | {"tokens": 16}, prefill | {"tokens": 4})
    same_order = ours.layout_name.endswith("HNC")
    plan = plan_engine(ours, theirs, Permute.BLOCK_SIZES if same_order else Permute.ORDERS)
    assert plan.landing == LandingOrder(heads_first=True, chunks=(4,))
    assert rows_of(plan) == rows
    heads_of_a_layer = HEADS // ours.tp_size
    assert rows_of(plan_engine(ours, theirs)) == 2 * heads_of_a_layer * (1 if same_order else 4)
    pairs = plan.pair([GroupBlocks(local=[1], remote=[4, 5, 6, 7])])
    for read, of_read in zip(plan.reads, pairs, strict=True):
        local_ids, remote_ids = (ids.reshape(2, 4) for ids in read.descriptor_ids(of_read))
        assert (np.diff(remote_ids) == 1).all()
        # Chunks of a block are numbered one after another where that gives a single run.
        assert (np.diff(local_ids) == (1 if ours.layout_name.startswith("L") else ours.regions[0].num_blocks)).all()


@pytest.mark.parametrize(
    ("decode", "prefill", "permute"),
    [
        ({}, {"tokens": 4}, Permute.NEVER),
        ({}, {}, Permute.ORDERS),
        ({}, {"tokens": 64}, Permute.ORDERS),  # each of ours is a stretch of each head there
        ({}, {"tokens": 12}, Permute.ORDERS),
        ({"tp_size": 8}, {"tokens": 4}, Permute.ORDERS),  # one head
        ({}, {"tokens": 4, "tp_size": 8}, Permute.ORDERS),  # one head at a time
        ({}, {"tokens": 4, "layout_name": "LHBNC"}, Permute.ORDERS),  # heads that lie apart
        ({"layout_name": "LHBNC"}, {"tokens": 4}, Permute.ORDERS),
        ({"layout_name": "LBNHC"}, {"tokens": 4, "layout_name": "LBNHC"}, Permute.ORDERS),
        ({"layout_name": "LBNHC"}, {"tokens": 4, "layout_name": "LBHNC"}, Permute.BLOCK_SIZES),
        ({}, {"layout_name": "LBNHC", "tp_size": 8}, Permute.ORDERS),  # of one head, the order is the same
    ],
)
def test_nothing_is_permuted_for_nothing(decode: dict[str, Any], prefill: dict[str, Any], permute: Permute) -> None:
    ours, theirs = engines({"tokens": 16} | decode, {"tokens": 16} | prefill)
    plan = plan_engine(ours, theirs, permute)
    assert plan.landing is None
    assert rows_of(plan) == rows_of(plan_engine(ours, theirs))


def test_layers_that_stay_where_they_land_do_not_decide() -> None:
    """Here most stretches are those of latents, and it is attention that has many fewer."""
    shapes = [latent(f"indexers.{number}", bytes_per_token=3) for number in range(9)]
    ours, theirs = engines({"tokens": 16}, {"tokens": 4}, attention("layers.0", heads=4, k_bytes=4, v_bytes=4))
    extra, others = engines({"tokens": 16}, {"tokens": 4}, *shapes)
    moved = [[_moved(region) for region in side.regions] for side in (extra, others[0])]
    ours = msgspec.structs.replace(ours, regions=(*ours.regions, *moved[0]))
    theirs = [msgspec.structs.replace(theirs[0], regions=(*theirs[0].regions, *moved[1]))]
    plan = plan_engine(ours, theirs, Permute.BLOCK_SIZES)
    assert plan.landing == LandingOrder(heads_first=True, chunks=(4,))
    assert rows_of(plan) == 9 + 1
    assert rows_of(plan_engine(ours, theirs)) == 9 + 4


def _moved(region: Region) -> Region:
    return msgspec.structs.replace(region, base_address=region.base_address + (1 << 40))


def test_each_cache_group_lands_in_chunks_of_its_own() -> None:
    shapes = [attention(f"layers.{group}", heads=4, k_bytes=4, v_bytes=4, group=group) for group in (0, 1)]
    groups = {
        name: tuple(CacheGroup(tokens_per_kernel_block=size) for size in sizes)
        for name, sizes in (("d", (16, 8)), ("p", (4, 8)))
    }
    sides = []
    for name in ("d", "p"):
        parts = [
            rank(name, shape, tokens=group.tokens_per_kernel_block)
            for shape, group in zip(shapes, groups[name], strict=True)
        ]
        regions = (parts[0].regions[0], _moved(parts[1].regions[0]))
        sides.append(msgspec.structs.replace(parts[0], regions=regions, groups=groups[name]))
    plan = plan_engine(sides[0], [sides[1]], Permute.BLOCK_SIZES)
    assert plan.landing == LandingOrder(heads_first=True, chunks=(4, 1))
    assert rows_of(plan) == 2


def test_states_of_equal_ranks_are_one_stretch() -> None:
    shape = mamba("m", channels=8, groups=2, heads=4, channel_bytes=3, group_bytes=5, head_bytes=7)
    assert rows_of(pair_up(rank("d", shape), 1, shape)) == 1
    assert rows_of(pair_up(rank("d", shape, tp_size=2), 1, shape)) == 4  # x, B, C and the state


def test_k_and_v_may_lie_apart_on_one_side() -> None:
    """Halves of a block for K and V there, side by side in each token here."""
    shape = attention("layers.0", heads=2, k_bytes=4, v_bytes=4)
    decode, prefill = rank("d", shape), rank("p", shape)
    halves = tuple(
        Piece(
            layer="layers.0",
            component=name,
            start=0,
            stop=2,
            offset_bytes=half * 2 * 16 * 4,
            bytes_per_unit=4,
            unit_stride_bytes=16 * 4,
            token_stride_bytes=4,
        )
        for half, name in enumerate(("k", "v"))
    )
    apart = msgspec.structs.replace(prefill.regions[0], pieces=halves)
    plan = plan_engine(decode, [msgspec.structs.replace(prefill, regions=(apart,))])
    assert rows_of(plan) == 2 * 2 * 16
    base = apart.base_address
    sources = {run.address - base for run in plan.reads[0].remote_runs}
    assert sources == set(range(0, 2 * 2 * 16 * 4, 4))


def test_regions_that_only_happen_to_be_adjacent_are_not_joined() -> None:
    """One block each: nothing says that both were registered together."""
    plan = pair_up(rank("d", blocks=1), 1, blocks=1)
    assert rows_of(plan) == 2


def test_shared_memory_is_prepared_once() -> None:
    """Two groups use the same tensor with blocks of their own: the same descriptors serve both."""
    shapes = tuple(attention(f"layers.{group}", heads=2, k_bytes=4, v_bytes=4, group=group) for group in range(2))
    sides = []
    for name in ("d", "p"):
        layout = rank(name, *shapes)
        same = msgspec.structs.replace(layout.regions[1], base_address=layout.regions[0].base_address)
        sides.append(msgspec.structs.replace(layout, regions=(layout.regions[0], same)))
    (read,) = plan_engine(sides[0], [sides[1]]).reads
    assert len(read.local_runs) == len(read.remote_runs) == 1
    assert len(read.rows) == 2


# --- who is read, who is told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode_tp", TP_SIZES)
@pytest.mark.parametrize("prefill_tp", TP_SIZES)
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_every_prefill_rank_hears_from_as_many_as_it_waits_for(decode_tp: int, prefill_tp: int, heads: int) -> None:
    shape = attention("layers.0", heads=heads, k_bytes=1, v_bytes=1)
    heard: collections.Counter[RankId] = collections.Counter()
    waits_for: dict[RankId, set[int]] = collections.defaultdict(set)
    for number in range(decode_tp):
        plan = pair_up(rank("d", shape, tp_rank=number, tp_size=decode_tp), prefill_tp, shape)
        told = {read.remote_rank: read.consumers for read in plan.reads}
        told |= {notified.remote_rank: notified.consumers for notified in plan.notify_only}
        heard.update(told.keys())
        for remote_rank, consumers in told.items():
            waits_for[remote_rank].add(consumers)
        assert len(plan.reads) == max(1, min(prefill_tp, heads) // min(decode_tp, heads))
    assert dict(waits_for) == {RankId(0, number): {heard[RankId(0, number)]} for number in range(prefill_tp)}
    # What the built-in connector tells, which its prefill side has to understand.
    assert set(heard.values()) == {max(1, decode_tp // prefill_tp)}


def test_replicas_are_read_in_turn() -> None:
    """Eight ranks hold the same latent; each engine reads one of them, and all are read about equally often."""
    shape = latent("layers.0", bytes_per_token=4)
    chosen: collections.Counter[RankId] = collections.Counter()
    for number in range(800):
        plan = pair_up(rank(f"engine-{number}", shape), 8, shape)
        (read,) = plan.reads
        assert len(plan.notify_only) == 7
        chosen[read.remote_rank] += 1
    assert len(chosen) == 8
    assert max(chosen.values()) < 2 * min(chosen.values())


# --- block tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "side"),
    [
        ({"local": [8], "remote": [0]}, "local"),
        ({"local": [-1], "remote": [0]}, "local"),
        ({"local": [1, 1], "remote": [0, 1]}, "local"),
        ({"local": [0], "remote": [8]}, "remote"),
        ({"local": [0], "remote": [-1]}, "remote"),
        ({"local": [0], "remote": [0, 8]}, "remote"),  # also when nobody would read it
        ({"local": [[0]], "remote": [0]}, "local"),
        ({"local": [0, 1], "remote": [0], "num_tokens": 17}, "remote"),
        ({"local": [0, 1], "remote": [1], "remote_first": 1, "num_tokens": 32}, "remote"),
        ({"local": [0], "remote": [1], "remote_first": 1}, "remote"),
        ({"local": [0, 1], "remote": [1], "remote_first": 1, "num_tokens": 32, "window_tokens": 17}, "remote"),
    ],
)
def test_block_tables_are_checked(tables: dict[str, Any], side: str) -> None:
    plan = plan_engine(rank("d"), [rank("p")])
    with pytest.raises(BlockIdError) as caught:
        plan.pair([GroupBlocks(**tables)])
    assert caught.value.side == side


def test_one_table_for_each_group() -> None:
    plan = plan_engine(rank("d"), [rank("p")])
    with pytest.raises(BlockIdError, match="0 cache groups instead of 1"):
        plan.pair([])


def test_what_lies_before_the_window_is_not_needed() -> None:
    plan = plan_engine(rank("d"), [rank("p")])
    tables = GroupBlocks(local=[0, 1], remote=[1], remote_first=1, num_tokens=32, window_tokens=16)
    ((pair,),) = plan.pair([tables])
    assert (pair.local_block.tolist(), pair.remote_block.tolist()) == ([1], [1])
    assert pair.unfilled_block.tolist() == [0]


def test_nothing_to_read() -> None:
    plan = plan_engine(rank("d"), [rank("p")])
    (pairs,) = plan.pair([GroupBlocks(local=[], remote=[3], local_first=1, num_tokens=16)])
    assert [ids.shape for ids in plan.reads[0].descriptor_ids(pairs)] == [(0,), (0,)]
    assert [values.shape for values in plan.unfilled(pairs)] == [(0,), (0,)]


# --- what is refused ------------------------------------------------------------------------------------------------

_NARROW = attention("layers.0", heads=HEADS, k_bytes=2, v_bytes=2)
_WIDE = attention("layers.0", heads=HEADS, k_bytes=4, v_bytes=4)
_SECOND_GROUP = attention("layers.0", heads=HEADS, k_bytes=4, v_bytes=4, group=1)
_FEW_HEADS = attention("layers.0", heads=2, k_bytes=4, v_bytes=4)
_STATE = mamba("layers.0", channels=8, groups=0, heads=8, channel_bytes=1, group_bytes=1, head_bytes=1)
_LATENT = latent("layers.0", bytes_per_token=8)


def test_who_has_to_do_something_about_an_engine_that_is_to_read_from_itself() -> None:
    """It is the router: starting the engine again with the other's value would change nothing."""
    with pytest.raises(LayoutMismatch) as caught:
        plan_engine(rank("d"), [rank("d")])
    assert "router" in caught.value.advice


@pytest.mark.parametrize(
    ("local", "remotes", "field"),
    [
        (rank("d"), [], "remote ranks (stage, tensor parallel rank)"),
        (rank("d"), [rank("p", tp_size=2)], "remote ranks (stage, tensor parallel rank)"),
        (rank("d"), [rank("p"), rank("p")], "remote ranks (stage, tensor parallel rank)"),
        (rank("d", tp_rank=1, tp_size=2), [rank("p", tp_size=2)], "remote ranks (stage, tensor parallel rank)"),
        (rank("d"), [rank("d")], "engine_id"),
        (rank("d"), [rank("p", tp_size=2), rank("q", tp_rank=1, tp_size=2)], "engine_id of rank 1"),
        (rank("d"), [rank("p", dcp_size=2)], "dcp_size"),
        (rank("d", tp_size=2, dcp_size=2), [rank("p", _LATENT, tp_size=3, dcp_size=3)], "dcp_size"),
        (rank("d", pcp_size=2), [rank("p")], "pcp_size"),
        (rank("d"), [rank("p", tp_size=2, dcp_size=2, pcp_size=4)], "pcp_size"),
        (rank("d", tp_size=2, dcp_size=2), [rank("p", pcp_size=2)], "pcp_size"),
        (rank("d"), [rank("p", pp_rank=1)], "remote ranks (stage, tensor parallel rank)"),
        (
            rank("d", _LATENT, tp_size=2, dcp_size=2, groups=()),
            [rank("p", _LATENT, tp_size=4, dcp_size=4, tokens=8, groups=(), tp_rank=number) for number in (0, 2)],
            "block size of KV cache group 0",
        ),
        (rank("d"), [rank("p", regions=())], "number of KV cache regions"),
        (rank("d", _WIDE), [rank("p", _NARROW)], "bytes of one unit of k of layers.0"),
        (rank("d", _WIDE), [rank("p", _FEW_HEADS)], "k of layers.0"),
        (rank("d", _WIDE), [rank("p", _LATENT)], "k of layers.0"),
        (rank("d", _WIDE), [rank("p", _STATE)], "KV cache group 0"),
        (rank("d", _WIDE), [rank("p", _SECOND_GROUP)], "number of KV cache groups"),
        (rank("d", _WIDE), [rank("p", _WIDE, attention("x", heads=8, k_bytes=4, v_bytes=4))], "KV cache of x"),
        (rank("d"), [rank("p", _WIDE)], "KV cache of layers.1"),
        (
            rank("d"),
            [rank("p", tp_size=2), rank("p", tp_rank=1, tp_size=2, tokens=8)],
            "block sizes of rank 1",
        ),
        (rank("d"), [rank("p", blocks=2**30)], "number of descriptors"),
    ],
)
def test_what_differs_is_named(local: RankLayout, remotes: list[RankLayout], field: str) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        plan_engine(local, remotes)
    assert caught.value.field == field
    assert caught.value.local in str(caught.value)
    assert caught.value.remote in str(caught.value)
    assert caught.value.advice


def test_group_of_a_layer_must_be_the_same() -> None:
    shapes = [attention(f"layers.{i}", heads=2, k_bytes=1, v_bytes=1, group=i) for i in range(2)]
    swapped = [msgspec.structs.replace(shape, group=1 - shape.group) for shape in shapes]
    with pytest.raises(LayoutMismatch) as caught:
        plan_engine(rank("d", *shapes), [rank("p", *swapped)])
    assert caught.value.field == "cache group of layers.0"


def test_a_rank_has_one_kind_of_memory_and_its_peer_another() -> None:
    """A device reads from the host and the other way round."""
    prefill = rank("p")
    on_a_device = tuple(msgspec.structs.replace(region, memory_kind="VRAM") for region in prefill.regions)
    (read,) = plan_engine(rank("d"), [msgspec.structs.replace(prefill, regions=on_a_device)]).reads
    assert {run.memory_kind for run in read.local_runs} == {"DRAM"}
    assert {run.memory_kind for run in read.remote_runs} == {"VRAM"}


def test_a_rank_with_two_kinds_of_memory_is_refused() -> None:
    prefill = rank("p")
    elsewhere = msgspec.structs.replace(prefill.regions[1], memory_kind="VRAM")
    with pytest.raises(LayoutMismatch) as caught:
        plan_engine(rank("d"), [msgspec.structs.replace(prefill, regions=(prefill.regions[0], elsewhere))])
    assert (caught.value.field, caught.value.local, caught.value.remote) == ("memory of layers.1", "DRAM", "VRAM")


def test_blocks_that_share_no_whole_entry_are_refused() -> None:
    shape = msgspec.structs.replace(latent("layers.0", bytes_per_token=8), tokens_per_entry=4)
    with pytest.raises(LayoutMismatch, match="both have to be multiples of 4") as caught:
        plan_engine(rank("d", shape, tokens=8), [rank("p", shape, tokens=6)])
    assert (caught.value.field, caught.value.local, caught.value.remote) == ("block size of layers.0", "8", "6")


def test_entries_of_unlike_numbers_of_tokens_are_refused() -> None:
    shape = latent("layers.0", bytes_per_token=8)
    theirs = msgspec.structs.replace(shape, tokens_per_entry=4)
    with pytest.raises(LayoutMismatch) as caught:
        plan_engine(rank("d", shape), [rank("p", theirs)])
    assert caught.value.field == "tokens of one unit of latent of layers.0"


def test_too_many_stretches_are_refused() -> None:
    shape = attention("layers.0", heads=HEADS, k_bytes=4, v_bytes=4)
    tokens = STRETCHES_MAX // HEADS + 1
    with pytest.raises(LayoutMismatch) as caught:
        plan_engine(
            rank("d", shape, tokens=tokens, blocks=2),
            [rank("p", shape, tokens=tokens, blocks=2, layout_name="LBNHC")],
        )
    assert caught.value.field == "order of axes"
    assert (caught.value.local, caught.value.remote) == ("LBHNC", "LBNHC")


def test_heads_that_no_ranks_can_share() -> None:
    with pytest.raises(ImpossibleShard, match="6 units cannot be split over 4 ranks"):
        shard(6, 0, 4)


@pytest.mark.parametrize("name", ["LBHN", "LBHCN", "NHD", "LBBNC"])
def test_names_that_are_no_layout(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        page_strides(name, layers=1, blocks=1, heads=1, tokens=1, bytes_per_token=1)
