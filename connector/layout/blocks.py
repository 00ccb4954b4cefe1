"""Which stretch of whose block goes into which of ours: the pairing of two block tables of one cache group.

Both sides' block ids stand for stretches of the request's tokens, but not for equal ones: block sizes may differ, a
logical block may be several kernel blocks, a prefix may be present already, a sliding window may have clipped either
list. So both are cut into chunks, the longest stretch of which every kernel block of either side is a whole number
(the greatest common divisor of the two kernel block sizes), and chunks with the same position in the request are
paired. For states (SSM) a block is one position and the same arithmetic applies. Of ranks that share the tokens of each
entry of their block tables, each has only the chunks of its own block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from connector.layout.geometry import BlockIdError, CacheGroup

Indices = npt.NDArray[np.int64]


class GroupBlocks(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The block tables of one request in one cache group: logical ids, consecutive on both sides."""

    local: Sequence[int] | Indices
    remote: Sequence[int] | Indices
    local_first: int = 0
    """How many entries of ours lie before local[0] in the request: a prefix present already, or a window's clip."""
    remote_first: int = 0
    num_tokens: int | None = None
    """Tokens to transfer, counted by us from the start of the request; None: as far as both lists reach."""
    window_tokens: int | None = None
    """Only so many tokens at the end are needed; None: all."""


class ChunkPairs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Chunk i of the local side is filled by chunk i of the remote side. Shape [n] each, local positions rising.

    A chunk is numbered within its kernel block. The last two, shape [m], are the chunks of the local blocks that stay
    unfilled: beyond the end of what the peer has, or before a window. States have none.
    """

    local_block: Indices
    local_chunk: Indices
    remote_block: Indices
    remote_chunk: Indices
    unfilled_block: Indices
    unfilled_chunk: Indices


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """How kernel blocks of the two sides are cut into chunks of `positions` (tokens, or 1 state)."""

    positions: int
    local_chunks: int
    """Chunks of a local kernel block."""
    remote_chunks: int


class GroupPair(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group on both sides, and how many logical ids there are."""

    local: CacheGroup
    remote: CacheGroup
    local_ids: int
    remote_ids: int

    @property
    def cut(self) -> Cut:
        ours, theirs = self.local.positions_per_kernel_block, self.remote.positions_per_kernel_block
        positions = math.gcd(ours, theirs)
        return Cut(positions=positions, local_chunks=ours // positions, remote_chunks=theirs // positions)

    def check_ids(self, local: Indices, remote: Indices) -> None:
        """Raise BlockIdError unless all ids are in range and no local one occurs twice."""
        for side, ids, limit in (("local", local, self.local_ids), ("remote", remote, self.remote_ids)):
            if ids.ndim != 1:
                raise BlockIdError(side, f"{ids.ndim} dimensions instead of one")
            # One reduction is cheaper than two, or than a comparison of each element: unsigned, less than 0 is a lot.
            if ids.size and ids.view(np.uint64).max() >= limit:
                outside = ids[(ids < 0) | (ids >= limit)]
                raise BlockIdError(side, f"block {outside[0]} is outside of the {limit} blocks there")
        ordered = np.sort(local)
        is_repeated = ordered[1:] == ordered[:-1]
        if np.count_nonzero(is_repeated):  # cheaper than `any`
            raise BlockIdError("local", f"block {ordered[1:][is_repeated][0]} occurs twice")

    def pair(self, blocks: GroupBlocks) -> ChunkPairs:
        """Pair two block tables. Raises BlockIdError: an id out of range, or tokens that the remote blocks lack."""
        local, remote = np.asarray(blocks.local, np.int64), np.asarray(blocks.remote, np.int64)
        self.check_ids(local, remote)
        cut = self.cut
        local_size = self.local.positions_per_id // cut.positions
        remote_size = self.remote.positions_per_id // cut.positions
        local_start, remote_start = blocks.local_first * local_size, blocks.remote_first * remote_size
        local_end, remote_end = local_start + local.size * local_size, remote_start + remote.size * remote_size
        start, end = max(local_start, remote_start), min(local_end, remote_end)
        _require_cover(blocks, cut.positions, (local_start, local_end), (remote_start, remote_end))
        if blocks.num_tokens is not None:
            end = min(end, -(-blocks.num_tokens // cut.positions))
        if _each_id_is_a_chunk(self.local, cut.local_chunks) and _each_id_is_a_chunk(self.remote, cut.remote_chunks):
            return self._pair_whole(local, remote, (start - local_start, end - local_start), start - remote_start)
        position = _held(np.arange(start, max(start, end), dtype=np.int64), self.local, cut.local_chunks)
        position = _held(position, self.remote, cut.remote_chunks)
        local_block, local_chunk = _locate(position - local_start, local, self.local, cut.local_chunks)
        remote_block, remote_chunk = _locate(position - remote_start, remote, self.remote, cut.remote_chunks)
        order = np.argsort(local_block * cut.local_chunks + local_chunk)
        unfilled = np.empty(0, np.int64)
        if self.local.tokens_per_kernel_block:
            before, after = np.arange(local_start, min(start, local_end)), np.arange(max(start, end), local_end)
            unfilled = _held(np.concatenate((before, after)), self.local, cut.local_chunks) - local_start
        unfilled_block, unfilled_chunk = _locate(unfilled, local, self.local, cut.local_chunks)
        return ChunkPairs(
            local_block=local_block[order],
            local_chunk=local_chunk[order],
            remote_block=remote_block[order],
            remote_chunk=remote_chunk[order],
            unfilled_block=unfilled_block,
            unfilled_chunk=unfilled_chunk,
        )

    def _pair_whole(self, local: Indices, remote: Indices, of_local: tuple[int, int], remote_start: int) -> ChunkPairs:
        """The same where every id of either side is one chunk, as it mostly is: without the arithmetic of chunks."""
        start, end = of_local[0], max(of_local)
        filled = local[start:end]
        order = np.argsort(filled)
        whole = np.zeros(filled.size, np.int64)
        unfilled = np.empty(0, np.int64)
        if self.local.tokens_per_kernel_block and filled.size < local.size:
            unfilled = np.concatenate((local[:start], local[end:]))
        return ChunkPairs(
            local_block=filled[order],
            local_chunk=whole,
            remote_block=remote[remote_start : remote_start + filled.size][order],
            remote_chunk=whole,
            unfilled_block=unfilled,
            unfilled_chunk=np.zeros(unfilled.size, np.int64),
        )


def _each_id_is_a_chunk(group: CacheGroup, chunks: int) -> bool:
    """`chunks` make a kernel block."""
    return chunks == group.kernel_blocks_per_block == group.dcp_size == 1


def _held(position: Indices, group: CacheGroup, chunks: int) -> Indices:
    """The chunks of the request that lie in this rank's blocks; `chunks` make a kernel block."""
    if group.dcp_size == 1:
        return position
    block = position // (chunks * group.kernel_blocks_per_block)
    held: Indices = position[block % group.dcp_size == group.dcp_rank]
    return held


def _locate(chunk: Indices, ids: Indices, group: CacheGroup, chunks: int) -> tuple[Indices, Indices]:
    """Kernel block, and chunk within it, of each chunk held by this rank, counted from the start of ids[0]."""
    if _each_id_is_a_chunk(group, chunks):
        return ids[chunk], np.zeros(chunk.size, np.int64)
    kernel_block, within = np.divmod(chunk, chunks)
    block, part = np.divmod(kernel_block, group.kernel_blocks_per_block)
    return ids[block // group.dcp_size] * group.kernel_blocks_per_block + part, within


def _require_cover(blocks: GroupBlocks, size: int, local: tuple[int, int], remote: tuple[int, int]) -> None:
    """The remote blocks must hold every needed chunk that we have a block for. Ranges count chunks of `size`."""
    needed_start, needed_end = local[0], min(local[1], remote[1])
    if blocks.num_tokens is not None:
        needed_end = min(local[1], -(-blocks.num_tokens // size))
        if blocks.window_tokens is not None:
            needed_start = max(needed_start, (blocks.num_tokens - blocks.window_tokens) // size)
    if needed_start < needed_end and (remote[0] > needed_start or remote[1] < needed_end):
        needed = f"{needed_start * size} to {needed_end * size}"
        raise BlockIdError(
            "remote", f"positions {needed} are needed, {remote[0] * size} to {remote[1] * size} are there"
        )
