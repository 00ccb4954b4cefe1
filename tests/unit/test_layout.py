"""Read plans, judged by bytes: a plan carried out as memory copies must give what the blocks say, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.layout import blocks
from connector.layout.blocks import ChunkPairs, GroupBlocks, GroupPair
from connector.layout.geometry import BlockIdError, CacheGroup, Piece, RankLayout, Region
from connector.layout.plan import EnginePlan
from connector.ports.nixl import DescriptorIds, MemoryRun
from tests.rig.layouts import plan_engine
from tests.unit.properties import on_any_machine


def layout(
    engine_id: str,
    *,
    layers: int = 2,
    num_blocks: int = 8,
    block_bytes: int = 16,
    padding_bytes: int = 0,
    ratio: int = 1,
    base_address: int = 4096,
    **changes: Any,
) -> RankLayout:
    """Layers one after another; `num_blocks` logical blocks of `ratio` kernel blocks of `block_bytes`."""
    stride = block_bytes + padding_bytes
    kernel_blocks = num_blocks * ratio
    regions = tuple(
        Region(
            name=f"layer.{index}",
            base_address=base_address + index * kernel_blocks * stride,
            block_length_bytes=block_bytes,
            block_stride_bytes=stride,
            num_blocks=kernel_blocks,
            memory_kind="DRAM",
            pieces=(_whole_block(f"layer.{index}", block_bytes, changes.get("tp_rank", 0)),),
        )
        for index in range(layers)
    )
    plain: dict[str, Any] = {
        "engine_id": engine_id,
        "tp_rank": 0,
        "tp_size": 1,
        "dcp_size": 1,
        "pcp_size": 1,
        "regions": regions,
        "kernel_block_size_tokens": 32,
        "kernel_blocks_per_block": ratio,
        "layout_name": "LBHNC",
        "attention_backend": "CPU_ATTN",
        "groups": (CacheGroup(tokens_per_kernel_block=0, kernel_blocks_per_block=ratio),),
    }
    return RankLayout(**(plain | changes))


def _whole_block(layer: str, block_bytes: int, tp_rank: int) -> Piece:
    """A block is one unit, and each rank has its own."""
    return Piece(
        layer=layer,
        component="block",
        start=tp_rank,
        stop=tp_rank + 1,
        offset_bytes=0,
        bytes_per_unit=block_bytes,
        unit_stride_bytes=block_bytes,
    )


def _ids(plan: EnginePlan, local: list[int], remote: list[int]) -> tuple[DescriptorIds, DescriptorIds]:
    """Descriptors of a READ of remote[i] into local[i]."""
    positions = len(local) * plan.groups[0].local.positions_per_block
    (pairs,) = plan.pair([GroupBlocks(local=local, remote=remote, num_tokens=positions)])
    return plan.reads[0].descriptor_ids(pairs)


def _descriptors(runs: tuple[MemoryRun, ...]) -> list[tuple[int, int]]:
    """(address, length) of every descriptor id, as a NIXL descriptor list expands its runs."""
    return [(run.address + block * run.stride_bytes, run.length_bytes) for run in runs for block in range(run.count)]


def _block(memory: np.ndarray, region: Region, base: int, kernel_block: int) -> np.ndarray:
    start = region.base_address - base + kernel_block * region.block_stride_bytes
    return memory[start : start + region.block_length_bytes]


def _size_bytes(side: RankLayout, base: int) -> int:
    last = side.regions[-1]
    return last.base_address - base + last.num_blocks * last.block_stride_bytes


@st.composite
def _cases(draw: st.DrawFn) -> tuple[RankLayout, RankLayout, list[int], list[int]]:
    shape = {
        "layers": draw(st.integers(1, 4)),
        "block_bytes": draw(st.integers(1, 9)),
        "ratio": draw(st.integers(1, 3)),
    }
    sides = [
        layout(
            name,
            num_blocks=draw(st.integers(1, 9)),
            padding_bytes=draw(st.integers(0, 3)),
            base_address=draw(st.integers(1, 1 << 40)),
            **shape,
        )
        for name in ("decode", "prefill")
    ]
    counts = [side.regions[0].num_blocks // side.kernel_blocks_per_block for side in sides]
    wanted = draw(st.integers(0, min(counts)))
    local, remote = (draw(st.permutations(range(count)))[:wanted] for count in counts)
    return sides[0], sides[1], local, remote


@settings(on_any_machine, max_examples=300)
@given(_cases())
def test_bytes_arrive_where_they_belong(case: tuple[RankLayout, RankLayout, list[int], list[int]]) -> None:
    local_side, remote_side, local_blocks, remote_blocks = case
    local_base, remote_base = local_side.regions[0].base_address, remote_side.regions[0].base_address
    generator = np.random.default_rng(7)
    remote_memory = generator.integers(0, 256, _size_bytes(remote_side, remote_base), dtype=np.uint8)
    local_memory = generator.integers(0, 256, _size_bytes(local_side, local_base), dtype=np.uint8)

    expected = local_memory.copy()
    ratio = local_side.kernel_blocks_per_block
    for local_block, remote_block in zip(local_blocks, remote_blocks, strict=True):
        for piece in range(ratio):
            for ours, theirs in zip(local_side.regions, remote_side.regions, strict=True):
                _block(expected, ours, local_base, local_block * ratio + piece)[:] = _block(
                    remote_memory, theirs, remote_base, remote_block * ratio + piece
                )

    plan = plan_engine(local_side, [remote_side])
    local_ids, remote_ids = _ids(plan, local_blocks, remote_blocks)
    (read,) = plan.reads
    local_descriptors, remote_descriptors = _descriptors(read.local_runs), _descriptors(read.remote_runs)
    for local_id, remote_id in zip(local_ids, remote_ids, strict=True):
        (to, to_length), (source, source_length) = local_descriptors[local_id], remote_descriptors[remote_id]
        assert to_length == source_length
        local_memory[to - local_base : to - local_base + to_length] = remote_memory[
            source - remote_base : source - remote_base + source_length
        ]

    assert np.array_equal(local_memory, expected)
    assert local_ids.dtype == remote_ids.dtype == np.int32


@on_any_machine
@given(_cases())
def test_whatever_can_merge_is_adjacent(case: tuple[RankLayout, RankLayout, list[int], list[int]]) -> None:
    """NIXL joins neighbours whose ids both rise by one; no pair that could be joined may be apart."""
    local_side, remote_side, local_blocks, remote_blocks = case
    local_ids, remote_ids = _ids(plan_engine(local_side, [remote_side]), local_blocks, remote_blocks)
    pairs = list(zip(local_ids.tolist(), remote_ids.tolist(), strict=True))
    possible = sum((local + 1, remote + 1) in set(pairs) for local, remote in pairs)
    adjacent = sum(after == (before[0] + 1, before[1] + 1) for before, after in itertools.pairwise(pairs))
    assert adjacent == possible


def test_order_is_region_major_and_expanded() -> None:
    plan = plan_engine(layout("d", ratio=2), [layout("p", ratio=2, num_blocks=4)])
    local_ids, remote_ids = _ids(plan, [5, 1], [0, 3])
    assert local_ids.tolist() == [2, 3, 10, 11, 18, 19, 26, 27]
    assert remote_ids.tolist() == [6, 7, 0, 1, 14, 15, 8, 9]


def test_no_blocks() -> None:
    local_ids, remote_ids = _ids(plan_engine(layout("d"), [layout("p")]), [], [])
    assert local_ids.shape == remote_ids.shape == (0,)


def test_plan_of_a_rank() -> None:
    remote = layout("p", tp_rank=1, tp_size=2, device_id=3)
    (plan,) = plan_engine(layout("d", tp_rank=1, tp_size=2), [remote]).reads
    assert (plan.remote_rank, plan.consumers) == ((0, 1), 1)
    assert {run.device_id for run in plan.remote_runs} == {3}
    assert {run.device_id for run in plan.local_runs} == {0}


@pytest.mark.parametrize(
    ("local_blocks", "remote_blocks", "side"),
    [
        ([8], [0], "local"),
        ([-1], [0], "local"),
        ([0], [8], "remote"),
        ([0], [-1], "remote"),
        ([0], [2**31 - 1], "remote"),
        ([0], [2**40], "remote"),
        ([0, 1], [0], "remote"),
        ([3, 1, 3], [0, 1, 2], "local"),
    ],
)
def test_block_ids_are_checked(local_blocks: list[int], remote_blocks: list[int], side: str) -> None:
    with pytest.raises(BlockIdError) as caught:
        _ids(plan_engine(layout("d"), [layout("p")]), local_blocks, remote_blocks)
    assert caught.value.side == side


def test_last_logical_block_is_inside_and_the_next_is_not() -> None:
    plan = plan_engine(layout("d", ratio=3), [layout("p", ratio=3)])
    assert _ids(plan, [7], [7])[0].max() == 2 * 8 * 3 - 1
    with pytest.raises(BlockIdError):
        _ids(plan, [8], [7])


@st.composite
def _tables(draw: st.DrawFn) -> tuple[GroupPair, GroupBlocks]:
    """Tables of one request, for blocks of tokens of one size, or for states; some do not reach."""
    group = CacheGroup(tokens_per_kernel_block=draw(st.sampled_from((0, 4))))
    pool = draw(st.integers(1, 9))
    local, remote = (draw(st.permutations(range(pool)))[: draw(st.integers(0, pool))] for _ in range(2))
    tables = GroupBlocks(
        local=local,
        remote=remote,
        local_first=draw(st.integers(0, 3)),
        remote_first=draw(st.integers(0, 3)),
        num_tokens=draw(st.none() | st.integers(0, 40)),
        window_tokens=draw(st.none() | st.integers(1, 12)),
    )
    return GroupPair(local=group, remote=group, local_ids=pool, remote_ids=pool), tables


def _paired(pair: GroupPair, tables: GroupBlocks) -> list[list[int]] | str:
    try:
        pairs: ChunkPairs = pair.pair(tables)
    except BlockIdError as error:
        return str(error)
    return [getattr(pairs, name).tolist() for name in ChunkPairs.__struct_fields__]


@settings(on_any_machine, max_examples=500)
@given(_tables())
def test_whole_blocks_are_paired_as_chunks_are(case: tuple[GroupPair, GroupBlocks]) -> None:
    whole = _paired(*case)
    with patch.object(blocks, "_each_id_is_a_chunk", return_value=False):
        assert _paired(*case) == whole
