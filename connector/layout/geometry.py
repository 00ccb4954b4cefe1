"""One rank's KV cache, described as regions of equally spaced blocks.

A region is `num_blocks` blocks of `block_length_bytes`, one every `block_stride_bytes`. The stride exceeds the length
when other layers' pages lie between two blocks of this one. Blocks here are kernel blocks, the unit in which the
attention backend addresses memory; the block ids that the scheduler hands out are logical, and one logical block is
`kernel_blocks_per_block` consecutive kernel blocks.

What a block holds is said by pieces: unit `start` up to `stop` of one component of one layer, for instance KV heads 2
to 4 of component `k`. Two ranks are paired by layer and component, never by position, so the sides may differ in tensor
parallel size, block size, order of axes and number of regions.

The block ids of a region come from one cache group. Where groups share memory, the memory is described once for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from connector.ports.nixl import MemoryKind


class RankId(NamedTuple):
    """A rank of an engine: its pipeline stage, and its number in that stage."""

    pp_rank: int
    tp_rank: int


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Units `start` to `stop` of one component of one layer, in every block of a region.

    Unit u of token t of block b is `bytes_per_unit` bytes, in `lanes` equal parts `lane_stride_bytes` apart. They begin
    at base address + b * block stride + offset_bytes + (u - start) * unit_stride_bytes + t * token_stride_bytes.
    Units are the model's, counted over all ranks: KV heads for `k` and `v`, 1 for `latent`, channels for `conv_x`.
    In a compressed cache t counts entries, each of which stands for `tokens_per_entry` tokens.
    """

    layer: str
    component: str
    start: int
    stop: int
    offset_bytes: int
    bytes_per_unit: int
    unit_stride_bytes: int
    token_stride_bytes: int = 0
    """0 for a state, which has no tokens."""
    lanes: int = 1
    lane_stride_bytes: int = 0
    tokens_per_entry: int = 1
    chunk_stride_bytes: int = 0
    """Not 0 only in a landing layout (`landing`), where tokens of different chunks of a block (`blocks`) are not as far
    apart as those of one: from one chunk to the next."""

    @property
    def bytes_per_lane(self) -> int:
        """What lies together of a unit of a token: all of it, unless other tokens lie between its parts."""
        return self.bytes_per_unit // self.lanes


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What the block ids of a KV cache group stand for on one rank."""

    tokens_per_kernel_block: int
    """0: blocks are states (of an SSM), one per request, not stretches of its tokens."""
    kernel_blocks_per_block: int = 1
    dcp_size: int = 1
    """Ranks that share the tokens of an entry of a block table, a block each (decode context parallel)."""
    dcp_rank: int = 0
    """Which of these blocks this rank holds."""

    @property
    def positions_per_kernel_block(self) -> int:
        """Tokens, or 1 for a state."""
        return max(1, self.tokens_per_kernel_block)

    @property
    def positions_per_block(self) -> int:
        return self.positions_per_kernel_block * self.kernel_blocks_per_block

    @property
    def positions_per_id(self) -> int:
        """What an entry of a block table stands for, on all ranks that share it."""
        return self.positions_per_block * self.dcp_size


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Equally spaced blocks of one layer (or of several layers, where the layout interleaves them)."""

    name: str
    """First layer that lives here."""
    base_address: int
    block_length_bytes: int
    """What one block holds. The bytes lie together unless heads are further out than blocks in the order of axes."""
    block_stride_bytes: int
    num_blocks: int
    memory_kind: MemoryKind
    group: int = 0
    """Index of the KV cache group whose block ids apply."""
    pieces: tuple[Piece, ...]


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one rank that decides how its KV is read."""

    engine_id: str
    tp_rank: int
    """This and the next three are about the ranks that are told apart by what they hold."""
    tp_size: int
    dcp_size: int
    pcp_size: int
    regions: tuple[Region, ...]
    kernel_block_size_tokens: int
    kernel_blocks_per_block: int
    layout_name: str
    """Order of the axes in memory, vLLM's `KVCacheLayout` name, for instance LBHNC."""
    attention_backend: str
    device_id: int = 0
    pp_rank: int = 0
    groups: tuple[CacheGroup, ...] = ()
    """The cache groups that `Region.group` counts; empty: one, of the two sizes above."""
    pages_in_rows: Mapping[str, tuple[int, int]] = {}
    """Of latent caches whose blocks are whole rows: where in a row a layer's page begins, and its length, in bytes."""

    @property
    def rank(self) -> RankId:
        return RankId(self.pp_rank, self.tp_rank)

    @property
    def memory_kind(self) -> MemoryKind:
        """The kind of memory of all regions, which is one where the rank can be served (`plan`)."""
        return self.regions[0].memory_kind

    @property
    def num_blocks(self) -> int:
        """How many block ids there are; all groups share them."""
        groups = self.cache_groups
        return max(region.num_blocks // groups[region.group].kernel_blocks_per_block for region in self.regions)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.groups or (
            CacheGroup(
                tokens_per_kernel_block=self.kernel_block_size_tokens,
                kernel_blocks_per_block=self.kernel_blocks_per_block,
                dcp_size=self.dcp_size,
                dcp_rank=self.tp_rank % self.dcp_size,
            ),
        )


class LayoutMismatch(Exception):
    """Two ranks cannot exchange KV: `field` is `local` here and `remote` there. Fit for `failures.Incompatible`."""

    def __init__(self, field: str, local: object, remote: object, advice: str) -> None:
        super().__init__(f"{field} is {local} here and {remote} there; {advice}")
        self.field = field
        self.local = str(local)
        self.remote = str(remote)
        self.advice = advice


class BlockIdError(ValueError):
    """Block ids that the plan cannot serve. `side` is "local" or "remote"; a remote one is the peer's doing."""

    def __init__(self, side: str, detail: str) -> None:
        super().__init__(f"{side} block ids: {detail}")
        self.side = side
        self.detail = detail
