"""The geometry against vLLM: its real tensors in every layout, whom its built-in connector reads, its SSM states."""

from __future__ import annotations

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import MambaConvSplitInfo
from vllm.v1.kv_cache_interface import FullAttentionSpec

from connector.layout.blocks import GroupBlocks
from connector.layout.geometry import CacheGroup, Piece, RankLayout, Region
from connector.layout.shapes import PageStrides, attention, mamba, of_unit, page_strides, paged_pieces, state_pieces
from connector.layout.sources import partners
from connector.ports.nixl import MemoryRun
from tests.rig.layouts import plan_engine
from tests.unit.vllm_setup import HEAD_SIZE, KV_HEADS, LAYERS, allocate, attention_spec, cache_config, layer_name

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
TP_SIZES = (1, 2, 4, 8)
BLOCKS = 4


def _caches(layout: str, tokens: int) -> list[torch.Tensor]:
    """One engine's tensors in the order of layers, each [blocks, heads, tokens, K and V of a head]."""
    config = cache_config(attention_spec(tokens), num_blocks=BLOCKS, layout=layout)
    caches = allocate(config, layout=layout, kernel_block_size=tokens)
    return [caches[layer_name(index)] for index in range(LAYERS)]


def _rank(engine_id: str, layout: str, caches: list[torch.Tensor]) -> RankLayout:
    """What the geometry makes of real tensors: addresses and strides are theirs."""
    regions = []
    for index, cache in enumerate(caches):
        block, head, token, _ = (step * cache.element_size() for step in cache.stride())
        strides = PageStrides(layer=0, block=block, head=head, token=token, tokens=cache.shape[2])
        size = HEAD_SIZE * cache.element_size()
        shape = attention(layer_name(index), heads=KV_HEADS, k_bytes=size, v_bytes=size)
        regions.append(
            Region(
                name=shape.name,
                base_address=cache.data_ptr(),
                block_length_bytes=cache[0].nbytes,
                block_stride_bytes=block,
                num_blocks=BLOCKS,
                memory_kind="DRAM",
                pieces=paged_pieces(shape, tp_rank=0, tp_size=1, strides=strides),
            )
        )
    return RankLayout(
        engine_id=engine_id,
        tp_rank=0,
        tp_size=1,
        dcp_size=1,
        pcp_size=1,
        regions=tuple(regions),
        kernel_block_size_tokens=caches[0].shape[2],
        kernel_blocks_per_block=1,
        layout_name=layout,
        attention_backend="CPU_ATTN",
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_those_of_real_tensors(layout: str) -> None:
    caches = _caches(layout, 32)
    item = caches[0].element_size()
    strides = page_strides(
        layout, layers=LAYERS, blocks=BLOCKS, heads=KV_HEADS, tokens=32, bytes_per_token=2 * HEAD_SIZE * item
    )
    for cache in caches:
        assert tuple(cache.shape) == (BLOCKS, KV_HEADS, 32, 2 * HEAD_SIZE)
        assert [step * item for step in cache.stride()] == [strides.block, strides.head, strides.token, item]
    addresses = [cache.data_ptr() for cache in caches]
    assert addresses == [addresses[0] + index * strides.layer for index in range(LAYERS)]


def test_a_region_of_one_head_holds_that_head_and_no_other() -> None:
    """One that claimed its neighbours' too would be read several times over, in no order."""
    strides = page_strides("LHBNC", layers=1, blocks=BLOCKS, heads=KV_HEADS, tokens=32, bytes_per_token=8)
    shape = attention(layer_name(0), heads=KV_HEADS, k_bytes=4, v_bytes=4)
    of_layer = paged_pieces(shape, tp_rank=0, tp_size=1, strides=strides)
    for head in range(KV_HEADS):
        assert {(each.start, each.stop) for each in of_unit(of_layer, head)} == {(head, head + 1)}


@pytest.mark.parametrize("decode_layout", LAYOUTS)
@pytest.mark.parametrize("prefill_layout", LAYOUTS)
@pytest.mark.parametrize("prefill_tokens", [32, 64])
def test_real_tensors_arrive(decode_layout: str, prefill_layout: str, prefill_tokens: int) -> None:
    """A request of 64 tokens into blocks of 32, between real tensors, is the same seen as [heads, tokens, content]."""
    decode, prefill = _caches(decode_layout, 32), _caches(prefill_layout, prefill_tokens)
    generator = torch.Generator().manual_seed(3)
    for cache in (*decode, *prefill):
        cache.copy_(torch.randint(-99, 99, cache.shape, generator=generator))
    before = [cache.clone() for cache in decode]
    plan = plan_engine(_rank("d", decode_layout, decode), [_rank("p", prefill_layout, prefill)])
    remote_blocks = [1, 3] if prefill_tokens == 32 else [2]
    (pairs,) = plan.pair([GroupBlocks(local=[3, 0], remote=remote_blocks, num_tokens=64)])
    (read,) = plan.reads
    for ours, theirs in zip(*read.descriptor_ids(pairs), strict=True):
        to, length_bytes = _descriptor(read.local_runs, int(ours))
        source, source_length_bytes = _descriptor(read.remote_runs, int(theirs))
        assert length_bytes == source_length_bytes
        _bytes(decode, to, length_bytes).copy_(_bytes(prefill, source, length_bytes))
    for ours, theirs, old in zip(decode, prefill, before, strict=True):
        sent = torch.cat([theirs[block] for block in remote_blocks], dim=1)
        assert torch.equal(torch.cat([ours[3], ours[0]], dim=1), sent)
        assert torch.equal(ours[1:3], old[1:3])


def _descriptor(runs: tuple[MemoryRun, ...], number: int) -> tuple[int, int]:
    for run in runs:
        if number < run.count:
            return run.address + number * run.stride_bytes, run.length_bytes
        number -= run.count
    raise AssertionError("not prepared")


def _bytes(caches: list[torch.Tensor], address: int, length_bytes: int) -> torch.Tensor:
    """Memory of the allocation that the tensors share; slicing fails outside of it."""
    storage = caches[0].untyped_storage()
    start = address - storage.data_ptr()
    assert 0 <= start <= storage.nbytes() - length_bytes
    return torch.empty(0, dtype=torch.uint8).set_(storage)[start : start + length_bytes]


@pytest.mark.parametrize("decode_tp", TP_SIZES)
@pytest.mark.parametrize("prefill_tp", TP_SIZES)
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_partners_are_the_builtin_ones(decode_tp: int, prefill_tp: int, heads: int) -> None:
    """The same ranks are asked and told, with the same number of consumers; what is read comes from among them."""
    for rank in range(decode_tp):
        topology = TransferTopology(
            tp_rank=rank,
            tp_size=decode_tp,
            block_size=32,
            engine_id="d",
            is_mla=False,
            is_mamba=False,
            total_num_kv_heads=heads,
            attn_backends=[],
        )
        topology.register_remote_engine("p", EngineTransferInfo(prefill_tp, 64, 32, 1))
        ours = partners(rank, decode_tp, prefill_tp)
        assert list(ours) == topology.handshake_target_ranks(prefill_tp)
        mapping = compute_tp_mapping(topology, prefill_tp, (FullAttentionSpec,))
        assert set(mapping.all_source_ranks) <= set(ours)
        assert {len(partners(other, prefill_tp, decode_tp)) for other in ours} == {mapping.local_consumers}


@pytest.mark.parametrize(("decode_tp", "prefill_tp"), [(1, 1), (2, 1), (4, 1), (4, 2), (1, 2), (2, 8)])
def test_convolution_parts_are_where_vllm_has_them(decode_tp: int, prefill_tp: int) -> None:
    """x, B and C of one rank, and the slices of them that the built-in connector reads from another."""
    rows, channels, groups, state_size = 3, 64, 8, 4
    shape = mamba(
        "m",
        channels=channels,
        groups=groups,
        heads=16,
        channel_bytes=rows * 2,
        group_bytes=state_size * rows * 2,
        head_bytes=20,
    )
    sides = {}
    for name, tp_size in (("d", decode_tp), ("p", prefill_tp)):
        dims = channels // tp_size, groups * state_size // tp_size
        sides[name] = MambaConvSplitInfo(
            conv_rows=rows,
            local_proj_dims=(dims[0], dims[1], dims[1]),
            conv_dtype_size=2,
            ssm_sizes=(sum((dims[0], dims[1], dims[1])) * rows * 2, 16 // tp_size * 20),
        )
    for rank in range(decode_tp):
        pieces = state_pieces(shape, tp_rank=rank, tp_size=decode_tp)
        places = [(piece.offset_bytes, (piece.stop - piece.start) * piece.bytes_per_unit) for piece in pieces]
        assert places[:3] == sides["d"].local_conv_offsets
        assert places[3] == sides["d"].ssm_sizes
        ratio = decode_tp // prefill_tp if decode_tp >= prefill_tp else -(prefill_tp // decode_tp)
        local = _states(shape.name, pieces, "d", rank, decode_tp)
        remotes = [
            _states(shape.name, state_pieces(shape, tp_rank=other, tp_size=prefill_tp), "p", other, prefill_tp)
            for other in partners(rank, decode_tp, prefill_tp)
        ]
        for read in plan_engine(local, remotes).reads:
            wanted = sides["d"].remote_conv_offsets(rank % max(ratio, 1), ratio)
            found = [(run.address - _STATES_AT, run.length_bytes) for run in read.remote_runs]
            if decode_tp == prefill_tp:
                assert found == [(0, sum(size for _, size in places))]
            else:
                # Where a rank is read whole, its parts still go to different places of ours.
                assert found[:3] == wanted


_STATES_AT = 1 << 30


def _states(name: str, pieces: tuple[Piece, ...], engine_id: str, tp_rank: int, tp_size: int) -> RankLayout:
    region = Region(
        name=name,
        base_address=_STATES_AT,
        block_length_bytes=4096,
        block_stride_bytes=4096,
        num_blocks=BLOCKS,
        memory_kind="DRAM",
        pieces=pieces,
    )
    return RankLayout(
        engine_id=engine_id,
        tp_rank=tp_rank,
        tp_size=tp_size,
        dcp_size=1,
        pcp_size=1,
        regions=(region,),
        kernel_block_size_tokens=1,
        kernel_blocks_per_block=1,
        layout_name="LBHNC",
        attention_backend="ANY",
        groups=(CacheGroup(tokens_per_kernel_block=0),),
    )
