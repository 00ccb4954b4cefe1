"""Layouts of engines whose memory a test makes itself: attention in one cache group, layer after layer."""

from __future__ import annotations

import msgspec

from connector.layout.geometry import CacheGroup, RankLayout, Region
from connector.layout.shapes import LayerShape, attention, latent, page_strides, paged_pieces, shard


def attention_shapes(*, layers: int, heads: int, head_bytes: int) -> dict[str, LayerShape]:
    """Layers by name. `head_bytes`: K and V of one head of one token together."""
    names = [f"layers.{layer}" for layer in range(layers)]
    return {name: attention(name, heads=heads, k_bytes=head_bytes // 2, v_bytes=head_bytes // 2) for name in names}


def latent_shapes(*, layers: int, bytes_per_token: int) -> dict[str, LayerShape]:
    """Layers whose cache all ranks hold alike, by name."""
    names = [f"layers.{layer}" for layer in range(layers)]
    return {name: latent(name, bytes_per_token=bytes_per_token) for name in names}


def attention_rank(
    engine_id: str,
    shapes: dict[str, LayerShape],
    *,
    address: int,
    blocks: int,
    tokens: int,
    stride_bytes: int | None = None,
    pp_rank: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    layout_name: str = "LBHNC",
) -> RankLayout:
    """One rank, whose layers lie one after another from `address`; blocks of `tokens`, one every `stride_bytes`."""
    regions = []
    for shape in shapes.values():
        start, stop = shard(shape.components[0].units, tp_rank, tp_size)
        head_bytes = sum(component.bytes_per_unit for component in shape.components)
        strides = page_strides(
            layout_name, layers=1, blocks=blocks, heads=stop - start, tokens=tokens, bytes_per_token=head_bytes
        )
        # Of an axis of one the stride is arbitrary, and registered as 0.
        strides = msgspec.structs.replace(strides, head=strides.head if stop - start > 1 else 0)
        stride = stride_bytes or strides.block
        regions.append(
            Region(
                name=shape.name,
                base_address=address + len(regions) * blocks * stride,
                block_length_bytes=strides.block,
                block_stride_bytes=stride,
                num_blocks=blocks,
                memory_kind="DRAM",
                pieces=paged_pieces(shape, tp_rank=tp_rank, tp_size=tp_size, strides=strides),
            )
        )
    return RankLayout(
        engine_id=engine_id,
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        tp_size=tp_size,
        dcp_size=1,
        pcp_size=1,
        regions=tuple(regions),
        kernel_block_size_tokens=tokens,
        kernel_blocks_per_block=1,
        layout_name=layout_name,
        attention_backend="TEST",
        groups=(CacheGroup(tokens_per_kernel_block=tokens),),
    )
