"""Layouts of engines whose memory a test makes itself: attention, or states as well, layer after layer. And the plan of
how one engine reads from another, made at once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from connector.layout.geometry import CacheGroup, RankLayout, Region
from connector.layout.landing import Permute
from connector.layout.plan import EnginePlan, plan_in_steps
from connector.layout.shapes import LayerShape, attention, latent, page_strides, paged_pieces, shard, state_pieces
from connector.layout.steps import finish


def plan_engine(local: RankLayout, remotes: Sequence[RankLayout], permute: Permute = Permute.NEVER) -> EnginePlan:
    """`plan_in_steps` without a pause."""
    return finish(plan_in_steps(local, remotes, permute))


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
    groups: tuple[CacheGroup, ...] | None = None,
) -> RankLayout:
    """One rank, whose layers lie one after another from `address`; blocks of `tokens`, one every `stride_bytes`.

    `groups`: None: one. Where there are several, attention has blocks of `tokens` in all of them. States lie densely.
    """
    regions: list[Region] = []
    for shape in shapes.values():
        region = _region(shape, address, blocks, tokens, stride_bytes, tp_rank, tp_size, layout_name)
        address += blocks * region.block_stride_bytes
        regions.append(region)
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
        groups=groups or (CacheGroup(tokens_per_kernel_block=tokens),),
    )


def _region(
    shape: LayerShape,
    address: int,
    blocks: int,
    tokens: int,
    stride_bytes: int | None,
    tp_rank: int,
    tp_size: int,
    layout_name: str,
) -> Region:
    if shape.is_state:
        pieces = state_pieces(shape, tp_rank=tp_rank, tp_size=tp_size)
        length_bytes = stride_bytes = sum((piece.stop - piece.start) * piece.bytes_per_unit for piece in pieces)
    else:
        start, stop = shard(shape.components[0].units, tp_rank, tp_size)
        head_bytes = sum(component.bytes_per_unit for component in shape.components)
        strides = page_strides(
            layout_name, layers=1, blocks=blocks, heads=stop - start, tokens=tokens, bytes_per_token=head_bytes
        )
        # Of an axis of one the stride is arbitrary, and registered as 0.
        strides = msgspec.structs.replace(strides, head=strides.head if stop - start > 1 else 0)
        pieces = paged_pieces(shape, tp_rank=tp_rank, tp_size=tp_size, strides=strides)
        length_bytes, stride_bytes = strides.block, stride_bytes or strides.block
    return Region(
        name=shape.name,
        base_address=address,
        block_length_bytes=length_bytes,
        block_stride_bytes=stride_bytes,
        num_blocks=blocks,
        memory_kind="DRAM",
        group=shape.group,
        pieces=pieces,
    )
