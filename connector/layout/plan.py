"""What one rank reads from another: the memory of both sides, and the descriptors for given blocks.

`plan_reads` covers the plain case: full attention, one KV cache group, the same tensor-parallel size on both sides (so
that rank i reads all of rank i), no context parallelism, equal block sizes. Anything else is refused with the first
field that differs and both values, before any memory is touched. A plan is made once per handshake.

Descriptors. Each side prepares one list, region after region, `num_blocks` descriptors each: descriptor of kernel block
b of region r = (blocks in the regions before r) + b. `ReadPlan.descriptor_ids` gives the indices of a request's blocks
on both sides, region-major and with the local ids rising. That order is what lets NIXL merge: it joins two descriptors
when the ids on both sides rise by exactly one inside a dense region, and since local ids are distinct, whatever can be
joined at all is adjacent after sorting.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from connector.layout.geometry import BlockIdError, LayoutMismatch, MemoryKind, RankLayout
from connector.ports.nixl import DescriptorIds, MemoryRun

_DESCRIPTORS_MAX = 2**31 - 1
"""Descriptor ids travel as int32."""

_SAME_START = "start both engines with the same model, dtype, block size and parallel sizes"


class ReadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the local rank reads from `remote_rank`."""

    remote_rank: int
    """Tensor-parallel rank to read from."""
    consumers: int
    """How many ranks of our engine read from that rank, and so notify it when they are done."""
    local_runs: tuple[MemoryRun, ...]
    remote_runs: tuple[MemoryRun, ...]
    """One run per region, in the order of the descriptor ids."""
    memory_kind: MemoryKind
    kernel_blocks_per_block: int

    def descriptor_ids(
        self, local_blocks: Sequence[int] | npt.NDArray[np.int64], remote_blocks: Sequence[int] | npt.NDArray[np.int64]
    ) -> tuple[DescriptorIds, DescriptorIds]:
        """Descriptors of a READ of remote_blocks[i] into local_blocks[i], both logical ids, shape [n].

        Returns two int32 arrays of shape [n * kernel_blocks_per_block * regions]. Raises BlockIdError when the lists
        differ in length, an id is outside of its side's memory, or a local block occurs twice.
        """
        local, remote = np.asarray(local_blocks, np.int64), np.asarray(remote_blocks, np.int64)
        if local.ndim != 1 or local.shape != remote.shape:
            raise BlockIdError("remote", f"{remote.size} of them for {local.size} local blocks")
        order = np.argsort(local, kind="stable")
        local, remote = local[order], remote[order]
        self._check_range("local", local, self.local_runs)
        self._check_range("remote", remote, self.remote_runs)
        repeated = np.flatnonzero(local[1:] == local[:-1])
        if repeated.size:
            raise BlockIdError("local", f"block {local[repeated[0]]} occurs twice")
        return self._expand(local, self.local_runs), self._expand(remote, self.remote_runs)

    def length_bytes(self, blocks: int) -> int:
        """Bytes that a READ of `blocks` logical blocks moves."""
        return blocks * self.kernel_blocks_per_block * sum(run.length_bytes for run in self.local_runs)

    def descriptor_count(self, blocks: int) -> int:
        """Descriptors of a READ of `blocks` logical blocks, before merging."""
        return blocks * self.kernel_blocks_per_block * len(self.local_runs)

    def _check_range(self, side: str, blocks: npt.NDArray[np.int64], runs: Sequence[MemoryRun]) -> None:
        limit = min(run.count for run in runs) // self.kernel_blocks_per_block
        outside = blocks[(blocks < 0) | (blocks >= limit)]
        if outside.size:
            raise BlockIdError(side, f"block {outside[0]} is outside of the {limit} blocks there")

    def _expand(self, blocks: npt.NDArray[np.int64], runs: Sequence[MemoryRun]) -> DescriptorIds:
        """Logical block ids to descriptor ids of every region."""
        ratio = self.kernel_blocks_per_block
        kernel_blocks = (blocks[:, None] * ratio + np.arange(ratio)).ravel()
        region_offsets = np.cumsum([0, *(run.count for run in runs[:-1])])
        return (region_offsets[:, None] + kernel_blocks[None, :]).ravel().astype(np.int32)


def plan_reads(local: RankLayout, remote: RankLayout) -> ReadPlan:
    """How `local` reads the KV of `remote`. Raises LayoutMismatch when it cannot."""
    _require_plain_case(local, remote)
    _require_same_regions(local, remote)
    return ReadPlan(
        remote_rank=remote.tp_rank,
        consumers=1,
        local_runs=_runs(local),
        remote_runs=_runs(remote),
        memory_kind=local.regions[0].memory_kind,
        kernel_blocks_per_block=local.kernel_blocks_per_block,
    )


def _require_plain_case(local: RankLayout, remote: RankLayout) -> None:
    if local.engine_id == remote.engine_id:
        raise LayoutMismatch("engine_id", local.engine_id, remote.engine_id, "give each engine an engine id of its own")
    for field in ("dcp_size", "pcp_size"):
        if getattr(local, field) != 1 or getattr(remote, field) != 1:
            raise LayoutMismatch(
                field,
                getattr(local, field),
                getattr(remote, field),
                "context parallelism is not supported; set it to 1",
            )
    for field in (
        "tp_size",
        "tp_rank",
        "kernel_block_size_tokens",
        "kernel_blocks_per_block",
        "layout_name",
        "attention_backend",
    ):
        _require_equal(field, getattr(local, field), getattr(remote, field))


def _require_same_regions(local: RankLayout, remote: RankLayout) -> None:
    _require_equal("number of KV cache regions", len(local.regions), len(remote.regions))
    if not local.regions:
        raise LayoutMismatch("number of KV cache regions", 0, 0, "there is no KV cache to read")
    kind = local.regions[0].memory_kind
    for ours, theirs in zip(local.regions, remote.regions, strict=True):
        _require_equal("KV cache region", ours.name, theirs.name)
        for field in ("group", "block_length_bytes"):
            _require_equal(f"{field} of {ours.name}", getattr(ours, field), getattr(theirs, field))
        for region in (ours, theirs):
            if region.memory_kind != kind:
                advice = "keep the KV cache of both engines in the same kind of memory"
                raise LayoutMismatch(f"memory of {ours.name}", ours.memory_kind, theirs.memory_kind, advice)
    ours_total, theirs_total = (sum(region.num_blocks for region in side.regions) for side in (local, remote))
    if max(ours_total, theirs_total) > _DESCRIPTORS_MAX:
        advice = f"at most {_DESCRIPTORS_MAX} can be addressed; use fewer or larger blocks"
        raise LayoutMismatch("number of descriptors", ours_total, theirs_total, advice)


def _require_equal(field: str, local: object, remote: object) -> None:
    if local != remote:
        raise LayoutMismatch(field, local, remote, _SAME_START)


def _runs(layout: RankLayout) -> tuple[MemoryRun, ...]:
    return tuple(
        MemoryRun(
            address=region.base_address,
            length_bytes=region.block_length_bytes,
            stride_bytes=region.block_stride_bytes,
            count=region.num_blocks,
            device_id=layout.device_id,
        )
        for region in layout.regions
    )
