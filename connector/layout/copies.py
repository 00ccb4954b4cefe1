"""From sources to copies: which bytes of a block go where, in as few contiguous stretches as possible.

A copy is a contiguous stretch repeated over nested loops, and all that again for each chunk that a request pairs. The
copy of a piece starts as one lane of a unit of one token (or entry), looped over units, lanes and tokens. Two rules
make it longer, in turn, until neither applies: a loop whose steps are as long as the stretch, on both sides, is
absorbed; and two copies with equal loops that lie next to each other on both sides, such as K and V of a head or the
pages of layers that lie in one row, become one. Loops that remain are unrolled, so that in the end each stretch is a
row of NIXL descriptors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from connector.layout.blocks import Cut
from connector.layout.geometry import LayoutMismatch, Piece, RankLayout, Region
from connector.layout.sources import Source

STRETCHES_MAX = 100_000
"""A plan reads at most so many stretches of one remote rank. Planning more would take seconds and gigabytes, for
stretches of a few bytes."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a side's blocks and chunks are, relative to each other. Two places are equal when they step alike."""

    blocks: int
    block_stride_bytes: int
    chunks: int
    chunk_stride_bytes: int
    """0 where a block is one chunk."""


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """`length_bytes` from `remote_address` to `local_address`, both those of chunk 0 of block 0, over `loops`."""

    group: int
    local: Place
    remote: Place
    local_address: int
    remote_address: int
    length_bytes: int
    loops: tuple[tuple[int, int, int], ...]
    """(count, local step, remote step) in bytes, in any order."""
    regions: tuple[int, int]
    """Local and remote region; of the first one, where copies were joined."""

    @property
    def frame(self) -> tuple[object, ...]:
        """What two copies must have in common to be joined."""
        return self.group, self.local, self.remote, self.loops


def copies_between(local: RankLayout, remote: RankLayout, sources: Iterable[Source], cuts: Sequence[Cut]) -> list[Copy]:
    """The copies that fetch `sources`, all of which are on `remote`, in the order of local regions.

    `cuts`: one for each cache group. Raises LayoutMismatch when they would be more than STRETCHES_MAX, or
    a chunk is not whole entries.
    """
    merged = _merged_copies(local, remote, sources, cuts)
    stretches = _count(merged)
    if stretches > STRETCHES_MAX:
        advice = f"that cuts a block into {stretches} stretches; use the same layout on both engines"
        raise LayoutMismatch("order of axes", local.layout_name, remote.layout_name, advice)
    return _unroll(merged)


def stretches_between(local: RankLayout, remote: RankLayout, sources: Iterable[Source], cuts: Sequence[Cut]) -> int:
    """How many copies `copies_between` makes, or refuses to make."""
    return _count(_merged_copies(local, remote, sources, cuts))


def _count(copies: Iterable[Copy]) -> int:
    return sum(math.prod(count for count, _, _ in copy.loops) for copy in copies)


def _merged_copies(local: RankLayout, remote: RankLayout, sources: Iterable[Source], cuts: Sequence[Cut]) -> list[Copy]:
    copies: list[Copy] = []
    for source in sources:
        ours, theirs = local.regions[source.local_region], remote.regions[source.remote_region]
        local_piece, remote_piece = source.local_piece, source.remote_piece
        cut = cuts[ours.group]
        entries, rest = divmod(cut.positions, local_piece.tokens_per_entry)
        if rest:
            sizes = cut.positions * cut.local_chunks, cut.positions * cut.remote_chunks
            advice = f"both have to be multiples of {local_piece.tokens_per_entry}, the tokens that have one entry"
            raise LayoutMismatch(f"block size of {local_piece.layer}", *sizes, advice)
        # A state has a single position, which the loop of one turn stands for.
        loops = (
            (source.stop - source.start, local_piece.unit_stride_bytes, remote_piece.unit_stride_bytes),
            (local_piece.lanes, local_piece.lane_stride_bytes, remote_piece.lane_stride_bytes),
            (entries, local_piece.token_stride_bytes, remote_piece.token_stride_bytes),
        )
        copies.append(
            Copy(
                group=ours.group,
                local=_place(ours, local_piece, cut.local_chunks, entries),
                remote=_place(theirs, remote_piece, cut.remote_chunks, entries),
                local_address=_address(ours, local_piece, source.start),
                remote_address=_address(theirs, remote_piece, source.start),
                length_bytes=local_piece.bytes_per_lane,
                loops=loops,
                regions=(source.local_region, source.remote_region),
            )
        )
    return merge(copies)


def merge(copies: Sequence[Copy]) -> list[Copy]:
    """Fewer and longer copies of the same bytes."""
    while True:
        absorbed = [_absorb_loops(copy) for copy in copies]
        joined = _join_neighbours(absorbed)
        if len(joined) == len(absorbed):
            return joined
        copies = joined


def _address(region: Region, piece: Piece, unit: int) -> int:
    return region.base_address + piece.offset_bytes + (unit - piece.start) * piece.unit_stride_bytes


def _place(region: Region, piece: Piece, chunks: int, entries: int) -> Place:
    return Place(
        blocks=region.num_blocks,
        block_stride_bytes=region.block_stride_bytes,
        chunks=chunks,
        chunk_stride_bytes=(piece.chunk_stride_bytes or entries * piece.token_stride_bytes) if chunks > 1 else 0,
    )


def _absorb_loops(copy: Copy) -> Copy:
    length_bytes, loops = copy.length_bytes, [loop for loop in copy.loops if loop[0] > 1]
    limit_bytes = _limit_bytes(copy)
    while True:
        dense = next(
            (loop for loop in loops if loop[1] == loop[2] == length_bytes and loop[0] * length_bytes <= limit_bytes),
            None,
        )
        if dense is None:
            return msgspec.structs.replace(copy, length_bytes=length_bytes, loops=tuple(loops))
        length_bytes *= dense[0]
        loops.remove(dense)


def _join_neighbours(copies: Sequence[Copy]) -> list[Copy]:
    """Join copies that lie next to each other on both sides; the order is that of each one's first part."""
    framed: dict[tuple[object, ...], list[int]] = {}
    for index, copy in enumerate(copies):
        framed.setdefault(copy.frame, []).append(index)
    joined: dict[int, Copy] = {}
    for indices in framed.values():
        indices.sort(key=lambda index: copies[index].local_address)
        first, current = indices[0], copies[indices[0]]
        for index in indices[1:]:
            after = copies[index]
            if _are_neighbours(current, after):
                first = min(first, index)
                current = msgspec.structs.replace(current, length_bytes=current.length_bytes + after.length_bytes)
            else:
                joined[first] = current
                first, current = index, after
        joined[first] = current
    return [joined[index] for index in sorted(joined)]


def _are_neighbours(first: Copy, second: Copy) -> bool:
    length_bytes = first.length_bytes
    if second.local_address != first.local_address + length_bytes:
        return False
    if second.remote_address != first.remote_address + length_bytes:
        return False
    # Memory of two regions that merely happen to be adjacent may be registered apart. Where one lies between two
    # blocks of the other it cannot be.
    for side, place in enumerate((first.local, first.remote)):
        if first.regions[side] != second.regions[side] and place.blocks < 2:
            return False
    return length_bytes + second.length_bytes <= _limit_bytes(first)


def _limit_bytes(copy: Copy) -> int:
    """A stretch may not reach into the next block; NIXL's descriptors of a run do not overlap."""
    return min(copy.local.block_stride_bytes, copy.remote.block_stride_bytes)


def _unroll(copies: Iterable[Copy]) -> list[Copy]:
    """Copies without loops, the local addresses of each one's parts rising."""
    rows: list[Copy] = []
    for copy in copies:
        if not copy.loops:
            rows.append(copy)
            continue
        local, remote = np.array([copy.local_address]), np.array([copy.remote_address])
        for count, local_step, remote_step in sorted(copy.loops, key=lambda loop: -loop[1]):
            turns = np.arange(count)
            local = (local[:, None] + turns * local_step).ravel()
            remote = (remote[:, None] + turns * remote_step).ravel()
        rows.extend(
            msgspec.structs.replace(copy, local_address=ours, remote_address=theirs, loops=())
            for ours, theirs in zip(local.tolist(), remote.tolist(), strict=True)
        )
    return rows
