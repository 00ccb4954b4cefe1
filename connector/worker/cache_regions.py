"""From one layer's KV cache tensor to regions of blocks, and to what lies where in them.

A tensor is a view of shape [blocks, heads, tokens, content]; a state (SSM) is one head of one token. Addresses and
strides are the tensor's own. The granularity follows the built-in connector of the same version, because peers see it:

* one region per layer, whose block is the layer's page, with its padding;
* where other layers' pages lie between the heads or tokens of this one, or behind them, a block is the whole row of all
  layers, but not in an engine with ring buffers;
* from vLLM 0.33 on, so is a block of a latent cache of an engine of one stage, if all layers lie in the same rows
  (`has_latent_rows`);
* where the heads are further out than the blocks, there is one region per head.

A layer that shares its addresses with another one yields regions of the same address; `merge` puts those of the same
cache group together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheLayout

from connector.layout.geometry import Piece, Region
from connector.layout.shapes import LATENT, LayerShape, PageStrides, moved, of_unit, paged_pieces, shard, state_pieces
from connector.ports.nixl import MemoryKind
from connector.unsupported import UnsupportedCache
from connector.versions import is_vllm_at_least

_LATENT_ROWS_SINCE = "0.33"


def paged_regions(
    shape: LayerShape,
    cache: torch.Tensor,
    *,
    num_blocks: int,
    page_bytes: int,
    tp_rank: int,
    tp_size: int,
    has_rings: bool,
    in_latent_rows: bool,
) -> list[Region]:
    """Where the tokens of a layer lie. `num_blocks` and `page_bytes` count and measure kernel blocks."""
    units = {shard(component.units, tp_rank, tp_size) for component in shape.components}
    ((start, stop),) = units
    content_bytes = sum(component.bytes_per_unit for component in shape.components)
    _require_shape(shape, cache, num_blocks, stop - start, content_bytes)
    block, head, token, _ = (step * cache.element_size() for step in cache.stride())
    # Of an axis of one the stride is arbitrary.
    head = head if stop - start > 1 else 0
    strides = PageStrides(layer=0, block=block, head=head, token=token, tokens=cache.shape[2])
    try:
        pieces = paged_pieces(shape, tp_rank=tp_rank, tp_size=tp_size, strides=strides)
    except ValueError as error:
        raise UnsupportedCache(f"KV cache of {shape.name} with strides", cache.stride(), str(error)) from error
    if strides.head >= num_blocks * block:
        return [
            _region(shape, cache, cache[0, unit].data_ptr(), block, num_blocks, of_unit(pieces, start + unit))
            for unit in range(stop - start)
        ]
    storage = cache.untyped_storage()
    # An allocation of nothing but rows of this stride, perhaps rounded up to a page of memory at its end.
    storage_is_rows = 0 <= storage.nbytes() - num_blocks * block < block
    page_is_contiguous = cache[0].is_contiguous() and cache[0].nbytes == page_bytes
    address, length_bytes = cache.data_ptr(), page_bytes
    is_row = in_latent_rows and shape.components[0].name == LATENT
    if storage_is_rows and (is_row or (not page_is_contiguous and not has_rings)):
        address, length_bytes = storage.data_ptr(), block
    offset_bytes = cache.data_ptr() - address
    if offset_bytes + _extent_bytes(cache[0]) > length_bytes or block < length_bytes:
        raise UnsupportedCache(f"KV cache of {shape.name} with strides", cache.stride(), "blocks that are contiguous")
    return [_region(shape, cache, address, length_bytes, num_blocks, moved(pieces, offset_bytes))]


def has_latent_rows(vllm_config: VllmConfig, caches: Sequence[torch.Tensor], layout_name: str, *, states: bool) -> bool:
    """Whether latent caches are told as whole rows. `caches`: of all layers; `states`: whether any is of an SSM."""
    rows = {(cache.untyped_storage().data_ptr(), cache.stride(0) * cache.element_size()) for cache in caches}
    return (
        is_vllm_at_least(_LATENT_ROWS_SINCE)
        and KVCacheLayout[layout_name].is_block_outermost
        and vllm_config.parallel_config.pipeline_parallel_size == 1
        and vllm_config.model_config.use_mla
        and not states
        and len(rows) == 1
    )


def state_region(
    shape: LayerShape, cache: torch.Tensor, *, num_blocks: int, page_bytes: int, tp_rank: int, tp_size: int
) -> Region:
    """Where the states of a layer lie. `num_blocks` counts logical blocks; one of `page_bytes` holds one state."""
    if not cache[0].is_contiguous():
        raise UnsupportedCache(f"KV cache of {shape.name} with strides", cache.stride(), "blocks that are contiguous")
    # A ring buffer has tokens, and may have heads.
    cache = cache.view(cache.shape[0], 1, 1, -1)
    pieces = state_pieces(shape, tp_rank=tp_rank, tp_size=tp_size)
    content_bytes = sum((piece.stop - piece.start) * piece.bytes_per_unit for piece in pieces)
    _require_shape(shape, cache, num_blocks, 1, content_bytes)
    stride_bytes = cache.stride(0) * cache.element_size()
    if not content_bytes <= page_bytes <= stride_bytes:
        raise UnsupportedCache(f"KV cache of {shape.name} with strides", cache.stride(), "blocks that are contiguous")
    return _region(shape, cache, cache.data_ptr(), page_bytes, num_blocks, pieces)


def merge(regions: Iterable[Region]) -> tuple[Region, ...]:
    """One region for each address and cache group, in the order in which the addresses come up; pieces as they lie."""
    by_address: dict[int, dict[int, Region]] = {}
    for region in regions:
        groups = by_address.setdefault(region.base_address, {})
        known = groups.setdefault(region.group, region)
        if known is region:
            continue
        geometry = {(r.block_stride_bytes, r.num_blocks, r.memory_kind) for r in (known, region)}
        length_bytes = max(known.block_length_bytes, region.block_length_bytes)
        same_length = known.block_length_bytes == region.block_length_bytes
        # A whole row, which stands for a layer within it, begins where the page of the row's first layer does.
        if len(geometry) > 1 or not (same_length or length_bytes == region.block_stride_bytes):
            raise UnsupportedCache(f"KV cache of {region.name} on top of", known.name, "blocks of the same size")
        pieces = sorted(known.pieces + region.pieces, key=lambda piece: piece.offset_bytes)
        groups[region.group] = msgspec.structs.replace(known, block_length_bytes=length_bytes, pieces=tuple(pieces))
    return tuple(chain.from_iterable(groups.values() for groups in by_address.values()))


def memory_kind(cache: torch.Tensor) -> MemoryKind:
    """Where a cache lies. A platform that is no part of vLLM may say so itself."""
    if cache.device.type == "cpu":
        return "DRAM"
    match current_platform.get_nixl_memory_type():
        case None | "VRAM":
            return "VRAM"
        case "DRAM":
            return "DRAM"
        case other:
            raise UnsupportedCache("NIXL memory type of the platform", other, "DRAM or VRAM")


def device_id(cache: torch.Tensor) -> int:
    """NIXL's device number; main memory is device 0."""
    number: int = max(cache.get_device(), 0)
    return number


def _require_shape(shape: LayerShape, cache: torch.Tensor, num_blocks: int, heads: int, content_bytes: int) -> None:
    found = tuple(cache.shape)
    content, rest = divmod(content_bytes, cache.element_size())
    expected = (num_blocks, heads, cache.shape[2] if cache.ndim == 4 else None, content)
    if found != expected or rest or cache.stride(3) != 1:
        wanted = f"[{num_blocks}, {heads}, ., {content}], the last axis dense"
        raise UnsupportedCache(f"KV cache of {shape.name} with shape", found, wanted)


def _region(
    shape: LayerShape,
    cache: torch.Tensor,
    address: int,
    length_bytes: int,
    num_blocks: int,
    pieces: tuple[Piece, ...],
) -> Region:
    return Region(
        name=shape.name,
        base_address=address,
        block_length_bytes=length_bytes,
        block_stride_bytes=cache.stride(0) * cache.element_size(),
        num_blocks=num_blocks,
        memory_kind=memory_kind(cache),
        group=shape.group,
        pieces=pieces,
    )


def _extent_bytes(block: torch.Tensor) -> int:
    """Bytes from the first to the last element of a block."""
    last = sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True))
    extent_bytes: int = (last + 1) * block.element_size()
    return extent_bytes
