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

Packing is the second kind of landing. Attention on CPUs keeps K and V of a block in an order of its own; attention
elsewhere keeps them as the tensor's shape says, K and V of a head side by side in each token. From such a peer our
blocks land in the order of the shape, with heads and tokens as at the peer, and are then written anew by the layer that
will read them (`connector/worker/packing.py`). What no READ has written is zeroed before that, in the order in which
the block was read: where a token is afterwards is the layer's affair. So any block sizes, orders of heads and tokens
and parallel sizes will do that can be read between two engines on GPUs, and on any instruction set.

It is allowed (`LocalRank.as_shaped`) on an engine that

* has the option `enforce_handshake_compat: false`, as the built-in connector wants it for this;
* has one KV cache group, and every layer of it full attention that is computed on CPUs, with K and V of equal size:
  several groups, sliding windows and states are refused, as by the built-in connector or because nobody has run them;
* keeps K and V unquantized: what a layer writes into a quantized cache it quantizes, and what was read is already.

The other way round, from an engine on CPUs to one on GPUs, is refused whatever is enforced: nothing there knows the
order, which depends on the processor.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from connector.layout.blocks import Cut
from connector.layout.compatibility import is_to_be_packed
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
    packs: bool = False
    """K and V land as the tensor's shape says, and the layers that compute with them put them in another order."""


class Strides(NamedTuple):
    """From one head, chunk, and token of a chunk to the next, in a block. 0 along an axis of one."""

    head: int
    chunk: int
    token: int


def landing_order(
    local: RankLayout, remotes: Collection[RankLayout], cuts: Sequence[Cut], permute: Permute
) -> LandingOrder | None:
    """The order in which blocks lie at the peer, if it may be another than that of `local` and permuting is allowed.

    `remotes`: all ranks that are read, of which all are to be packed or none; `cuts`: one for each cache group.
    """
    if not any(is_to_be_packed(local.attention_backend, remote.attention_backend) for remote in remotes):
        return _permuted_order(local, remotes, cuts, permute)
    # A block that is written anew can be read in whichever order it lies: heads and tokens cost nothing more.
    order = _permuted_order(local, remotes, cuts, Permute.ORDERS)
    if order is None:
        return LandingOrder(heads_first=local.layout_name.endswith("NC"), chunks=(1,) * len(cuts), packs=True)
    return msgspec.structs.replace(order, packs=True)


def _permuted_order(
    local: RankLayout, remotes: Collection[RankLayout], cuts: Sequence[Cut], permute: Permute
) -> LandingOrder | None:
    """The landing order that puts heads and tokens otherwise than our blocks do, and changes nothing else. None: READs
    land as our blocks are."""
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
        stay = _as_shaped(region.pieces) if order.packs else region.pieces
        pieces = tuple(
            _in_landing_layout(piece, tokens, order.heads_first, order.chunks[region.group]) for piece in stay
        )
        regions.append(msgspec.structs.replace(region, pieces=pieces))
    return msgspec.structs.replace(local, regions=tuple(regions))


def _as_shaped(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same pieces, with the components of a token side by side in each token of a head, in the order of offsets."""
    placed: list[Piece] = []
    by_layer: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.offset_bytes):
        by_layer.setdefault(piece.layer, []).append(piece)
    for of_layer in by_layer.values():
        offset_bytes = of_layer[0].offset_bytes
        token_stride_bytes = sum(piece.bytes_per_unit for piece in of_layer)
        for piece in of_layer:
            placed.append(
                msgspec.structs.replace(
                    piece,
                    offset_bytes=offset_bytes,
                    token_stride_bytes=token_stride_bytes,
                    lanes=1,
                    lane_stride_bytes=0,
                )
            )
            offset_bytes += piece.bytes_per_unit
    return tuple(placed)


def landing_layers(local: RankLayout) -> dict[int, list[str]]:
    """By cache group: the layers that some landing layout has in another order."""
    found: dict[int, list[str]] = {}
    for region in local.regions:
        tokens = local.cache_groups[region.group].tokens_per_kernel_block
        for layer in dict.fromkeys(piece.layer for piece in region.pieces):
            pieces = [piece for piece in region.pieces if piece.layer == layer]
            if any(_in_landing_layout(piece, tokens, first, 1) != piece for piece in pieces for first in (True, False)):
                found.setdefault(region.group, []).append(layer)
    return found


def landing_steps(
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


def _in_landing_layout(piece: Piece, tokens: int, heads_first: bool, chunks: int) -> Piece:
    steps = landing_steps(
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
