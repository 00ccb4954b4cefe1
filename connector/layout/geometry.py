"""One rank's KV cache, described as regions of equally spaced blocks.

A region is `num_blocks` blocks of `block_length_bytes`, one every `block_stride_bytes`. The stride exceeds the length
when other layers' pages lie between two blocks of this one. Blocks here are kernel blocks, the unit in which the
attention backend addresses memory; the block ids that the scheduler hands out are logical, and one logical block is
`kernel_blocks_per_block` consecutive kernel blocks.

Two ranks list their regions in the same order (natural order of layer names), so that region i here corresponds to
region i there.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

MemoryKind: TypeAlias = Literal["DRAM", "VRAM"]
"""NIXL's name for where memory lies."""


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Equally spaced blocks of one layer (or of several layers, where the layout interleaves them)."""

    name: str
    """First layer that lives here."""
    base_address: int
    block_length_bytes: int
    block_stride_bytes: int
    num_blocks: int
    memory_kind: MemoryKind
    group: int = 0
    """Index of the KV cache group whose block ids apply."""


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one rank that decides how its KV is read."""

    engine_id: str
    tp_rank: int
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
