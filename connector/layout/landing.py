"""Landing layouts: our memory, in which READs leave each block as the peer has it, to be permuted afterwards.

What is contiguous on both sides may be short although both sides' blocks are dense:

* If one engine has the heads of a block before its tokens (LBHNC) and the other the tokens before the heads (LBNHC),
  it is one head of one token: a few hundred bytes.
* If both have heads before tokens and the peer's blocks are smaller, it is one head of one of the peer's blocks.

A landing layout is our memory with another order inside of blocks. A block of ours is as many chunks as there are
blocks of the peer in it, one after another, and each chunk has heads and tokens in the peer's order. It takes as many
bytes, so it fits, and a whole block of the peer (or our heads of it) is contiguous. When all READs of a request have
ended, its blocks are permuted (`connector/worker/landing.py`).

The permutation is that of a whole block of ours, and each chunk of it stays the same chunk. So what no READ has written
of a block is still the chunks that no READ was to write, and they are zeroed afterwards.

If the peer's blocks are larger than ours, each of ours is several stretches of the peer's block, one of each head, and
no order of our block changes that. Layers whose blocks have no two heads or no two tokens, or are not dense (latents,
states, heads outside of blocks, the lanes of CPU attention) land where they stay.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from connector.layout.blocks import Cut
from connector.layout.geometry import Piece, RankLayout


class Permute(enum.IntEnum):
    """From which peers READs may be left in a landing layout. Each includes those before it."""

    NEVER = 0
    BLOCK_SIZES = 1
    """From those with heads and tokens in our order, and smaller blocks."""
    ORDERS = 2
    """And from those with heads and tokens in the other order."""


class LandingOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order in which READs leave our blocks."""

    heads_first: bool
    """Heads before tokens in each chunk."""
    chunks: tuple[int, ...]
    """By cache group: how many chunks a kernel block is."""


class Strides(NamedTuple):
    """From one head, chunk, and token of a chunk to the next, in a block. 0 along an axis of one."""

    head: int
    chunk: int
    token: int


def landing_order(
    local: RankLayout, remotes: Collection[RankLayout], cuts: Sequence[Cut], permute: Permute
) -> LandingOrder | None:
    """The order in which blocks lie at the peer, if it may be another than that of `local` and permuting is allowed.

    `remotes`: all ranks that are read; `cuts`: one for each cache group.
    """
    names = [remote.layout_name for remote in remotes]
    innermost = {name[-2:] for name in names}
    if len(innermost) != 1:
        return None
    same_order = innermost == {local.layout_name[-2:]}
    if permute < (Permute.BLOCK_SIZES if same_order else Permute.ORDERS):
        return None
    # Only if nothing lies between the heads of a block, and only whole blocks of the peer, are more than one head long.
    blocks_are_dense = all(name.endswith("HNC") for name in names)
    chunks = tuple(cut.local_chunks if blocks_are_dense and cut.remote_chunks == 1 else 1 for cut in cuts)
    if same_order and set(chunks) == {1}:
        return None
    return LandingOrder(heads_first=innermost == {"NC"}, chunks=chunks)


def landing_layout(local: RankLayout, order: LandingOrder) -> RankLayout:
    """`local` with its blocks in that order."""
    regions = []
    for region in local.regions:
        tokens = local.cache_groups[region.group].tokens_per_kernel_block
        pieces = tuple(_landed(piece, tokens, order.heads_first, order.chunks[region.group]) for piece in region.pieces)
        regions.append(msgspec.structs.replace(region, pieces=pieces))
    return msgspec.structs.replace(local, regions=tuple(regions))


def landing_layers(local: RankLayout) -> dict[int, list[str]]:
    """By cache group: the layers that some landing layout has in another order."""
    found: dict[int, list[str]] = {}
    for region in local.regions:
        tokens = local.cache_groups[region.group].tokens_per_kernel_block
        for layer in dict.fromkeys(piece.layer for piece in region.pieces):
            pieces = [piece for piece in region.pieces if piece.layer == layer]
            if any(_landed(piece, tokens, first, 1) != piece for piece in pieces for first in (True, False)):
                found.setdefault(region.group, []).append(layer)
    return found


def landed_steps(
    *, heads: int, tokens: int, head_step: int, token_step: int, heads_first: bool, chunks: int
) -> tuple[Strides, Strides] | None:
    """Where the tokens of a block are to stay, and where they land, in the unit of the given steps.

    None: they land where they stay, or the block is not dense.
    """
    content = min(head_step, token_step)
    is_dense = (head_step, token_step) in ((tokens * content, content), (content, heads * content))
    if min(heads, tokens) < 2 or not is_dense:
        return None
    of_chunk = tokens // chunks
    chunk_step = of_chunk * heads * content
    stays = _steps(head_step, of_chunk * token_step, token_step, chunks, of_chunk)
    if heads_first:
        lands = _steps(of_chunk * content, chunk_step, content, chunks, of_chunk)
    else:
        lands = _steps(content, chunk_step, heads * content, chunks, of_chunk)
    return None if stays == lands else (stays, lands)


def _steps(head: int, chunk: int, token: int, chunks: int, of_chunk: int) -> Strides:
    # Where there is one of something, its step means nothing and must not tell two orders apart.
    return Strides(head=head, chunk=chunk if chunks > 1 else 0, token=token if of_chunk > 1 else 0)


def _landed(piece: Piece, tokens: int, heads_first: bool, chunks: int) -> Piece:
    steps = landed_steps(
        heads=piece.stop - piece.start,
        tokens=tokens // piece.tokens_per_entry,
        head_step=piece.unit_stride_bytes,
        token_step=piece.token_stride_bytes,
        heads_first=heads_first,
        chunks=chunks,
    )
    if steps is None:
        return piece
    _, lands = steps
    return msgspec.structs.replace(
        piece,
        unit_stride_bytes=lands.head,
        token_stride_bytes=lands.token,
        chunk_stride_bytes=lands.chunk,
    )
