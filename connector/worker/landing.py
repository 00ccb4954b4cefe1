"""Blocks that READs leave in the peer's order of heads and tokens, and that are then put in ours.

If one engine has the heads of a block before its tokens (LBHNC) and the other the tokens before the heads (LBNHC),
only one head of one token is contiguous on both sides: a few hundred bytes, and a descriptor for each. With vLLM's
option `enable_permute_local_kv` such a peer is read into a landing layout instead: our memory, in which each block
holds its heads and tokens in the peer's order. It takes as many bytes, so it fits, and a whole block (or our heads of
it) is contiguous. When all READs of a request have ended, its blocks are permuted on the device.

The engine thread waits for the permutation, which takes about as long as the READ before it, so this is an option.
Figures: docs/performance.md. Either order can be the peer's. Where the peer has tokens before heads there is less to
gain if D has more ranks than P, because the heads of one rank of D then lie together for one token only.

Layers whose blocks have no two heads or no two tokens, or are not dense (latents, states, heads outside of blocks,
the lanes of CPU attention) land where they stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from connector.layout.geometry import Piece, RankLayout
from connector.protocol import Landed
from connector.worker.cache_memory import word_of

_MOVED_AT_ONCE_BYTES = 64 << 20
"""Of one layer: device memory that is taken for a moment, of which vLLM leaves little."""


def landing_layout(layout: RankLayout) -> RankLayout | None:
    """The same memory with heads and tokens of each block in the other order; None where that changes nothing."""
    regions = tuple(
        msgspec.structs.replace(
            region,
            pieces=tuple(
                _swapped(piece, layout.cache_groups[region.group].tokens_per_kernel_block) for piece in region.pieces
            ),
        )
        for region in layout.regions
    )
    if regions == layout.regions:
        return None
    name = layout.layout_name.translate(str.maketrans("HN", "NH"))
    return msgspec.structs.replace(layout, regions=regions, layout_name=name)


def landing_caches(
    layout: RankLayout, landing: RankLayout | None, caches: Mapping[str, torch.Tensor]
) -> dict[int, list[torch.Tensor]]:
    """By cache group, those of `caches` (by layer) in whose blocks `landing` has another order than `layout`."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for region, landed in zip(layout.regions, (landing or layout).regions, strict=True):
        for piece, landed_piece in zip(region.pieces, landed.pieces, strict=True):
            if piece != landed_piece:
                found.setdefault(region.group, {})[piece.layer] = caches[piece.layer]
    return {group: list(by_layer.values()) for group, by_layer in found.items()}


class LandedBlocks:
    """Puts blocks of `caches` in order: by cache group, views of shape [kernel blocks, heads, tokens, content]."""

    def __init__(self, caches: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self._caches = {group: [_as_words(cache) for cache in of_group] for group, of_group in caches.items()}

    def put_in_order(self, landed: Sequence[Landed]) -> None:
        """All blocks of all requests, each of which is named once; on the current stream, without waiting for it."""
        if not landed:
            return
        for group, caches in self._caches.items():
            numbers = np.concatenate([request.kernel_blocks[group] for request in landed])
            blocks = async_tensor_h2d(numbers, caches[0].device)
            for cache in caches:
                _put_in_order(cache, blocks)


def _put_in_order(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    _, heads, tokens, _ = cache.shape
    block_stride, head_stride, token_stride, _ = cache.stride()
    strides = _swapped_strides(heads, tokens, head_stride, token_stride)
    assert strides is not None, "the layout of this cache is that of its tensor"
    as_landed = cache.as_strided(cache.shape, (block_stride, *strides, 1))
    at_once = max(1, _MOVED_AT_ONCE_BYTES // cache[0].nbytes)
    for some in blocks.split(at_once):
        cache.index_copy_(0, some, as_landed.index_select(0, some))


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    steps = (*cache.stride()[:3], cache.shape[3], cache.storage_offset())
    return cache.view(word_of(step * cache.element_size() for step in steps))


def _swapped(piece: Piece, tokens: int) -> Piece:
    """The piece with heads and tokens in the other order, or as it is."""
    strides = _swapped_strides(piece.stop - piece.start, tokens, piece.unit_stride_bytes, piece.token_stride_bytes)
    if strides is None:
        return piece
    return msgspec.structs.replace(piece, unit_stride_bytes=strides[0], token_stride_bytes=strides[1])


def _swapped_strides(heads: int, tokens: int, head_stride: int, token_stride: int) -> tuple[int, int] | None:
    """Strides of heads and tokens, in the unit of the given ones, after the two axes of a dense block are swapped.

    None where there is nothing to swap, or other things lie between.
    """
    if min(heads, tokens) < 2:
        return None
    if token_stride == heads * head_stride:
        return tokens * head_stride, head_stride
    if head_stride == tokens * token_stride:
        return token_stride, heads * token_stride
    return None
