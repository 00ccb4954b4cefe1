"""Checksums of blocks: which ones P makes, and which of them D can compare with what it has read.

The unit is one kernel block of one region as P advertises it. P sums those of a lease before it lends them; D sums the
memory that a READ has filled. That can be compared where a descriptor of the READ is such a block, whole: both engines
have the same layout and block size, and P has as many ranks or more. Where READs take parts of blocks (fewer ranks on
P, unlike block sizes or layouts), where pages are padded, where cache groups share memory, and of states that are
advertised in parts there is nothing to compare, and an engine that is to verify refuses the pair in the handshake
(`match`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from connector.layout.advertised import advertised_regions
from connector.layout.geometry import BlockIdError, LayoutMismatch, RankLayout
from connector.layout.plan import ReadPlan
from connector.ports.nixl import DescriptorIds, MemoryRun
from connector.wire.metadata import SHARED_GROUP, AgentMetadata

Numbers = npt.NDArray[np.int64]

SAMPLED_BLOCKS = 8
"""With `verify: sampled`, so many blocks are compared of each cache group of a lease, and of each READ."""
_NOT_COMPARED = -1


class Compared(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What of a READ is compared, each array of shape [n]: P's region and kernel block, and our blocks.

    Attributes:
        places: which of the blocks of its cache group that P has sums of each is.
        order: positions in `regions` of the blocks of `local`, one after another.
    """

    regions: Numbers
    remote_blocks: Numbers
    places: Numbers
    local: tuple[tuple[MemoryRun, Numbers], ...]
    """Local runs, and which of their blocks."""
    order: Numbers


class Match(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How the descriptors of a READ from one rank are blocks of regions.

    Attributes:
        regions: P's region of each run of the remote list.
        groups: cache group of each region of P.
    """

    regions: Numbers
    groups: tuple[int, ...]
    local_runs: tuple[MemoryRun, ...]
    local_firsts: Numbers
    remote_firsts: Numbers


def lent_blocks(layout: RankLayout, block_ids: Sequence[Sequence[int]], *, sampled: bool) -> list[Numbers]:
    """The kernel blocks that P sums, by cache group; `block_ids` are the logical ones that it lends."""
    ratio = layout.kernel_blocks_per_block
    groups = []
    for of_group in block_ids:
        blocks = (np.array(of_group, np.int64)[:, None] * ratio + np.arange(ratio)).ravel()
        groups.append(spread(blocks) if sampled else blocks)
    return groups


def lent_runs(layout: RankLayout, blocks: Sequence[Numbers]) -> list[tuple[MemoryRun, Numbers]]:
    """Where these lie, region by region; regions that several cache groups share are left out."""
    return [
        (
            MemoryRun(
                region.members[0].base_address,
                region.block_length_bytes,
                region.block_stride_bytes,
                region.num_blocks,
            ),
            blocks[region.group],
        )
        for region in advertised_regions(layout)
        if region.group != SHARED_GROUP
    ]


def spread(blocks: Numbers) -> Numbers:
    """At most SAMPLED_BLOCKS of them, evenly, with the last one, which every reader needs."""
    if blocks.size <= SAMPLED_BLOCKS:
        return blocks
    return blocks[np.linspace(0, blocks.size - 1, SAMPLED_BLOCKS).astype(np.int64)]


def match(read: ReadPlan, metadata: AgentMetadata) -> Match:
    """`metadata` is that of the rank that is read. Raises LayoutMismatch when a descriptor is not a whole block."""
    known = {
        (address, stride, length): index
        for index, (address, stride, length) in enumerate(
            zip(metadata.kv_caches_base_addr, metadata.block_strides, metadata.block_lens, strict=True)
        )
    }
    groups = tuple(metadata.region_group_ids or ())
    regions = []
    for run in read.remote_runs:
        index = known.get((run.address, run.stride_bytes, run.length_bytes))
        if index is None or not groups or groups[index] == SHARED_GROUP:
            advice = (
                "READs take parts of that engine's blocks, or blocks of several cache groups, which have no checksums: "
                "start both engines with the same tensor parallel size, --block-size and layout, or D with verify off"
            )
            raise LayoutMismatch("verify", "whole blocks", "parts of blocks", advice)
        regions.append(index)
    return Match(
        regions=np.array(regions, np.int64),
        groups=groups,
        local_runs=read.local_runs,
        local_firsts=_firsts(read.local_runs),
        remote_firsts=_firsts(read.remote_runs),
    )


def compared(
    matched: Match, local_ids: DescriptorIds, remote_ids: DescriptorIds, known: Sequence[Numbers], *, sampled: bool
) -> Compared:
    """What to compare of a READ of these descriptors. `known`: the blocks of which P has sums, by cache group.

    Unless only samples are compared, raises BlockIdError for a block that has no sum: P has not lent it.
    """
    run = np.searchsorted(matched.remote_firsts, remote_ids, side="right") - 1
    regions = matched.regions[run]
    blocks = remote_ids.astype(np.int64) - matched.remote_firsts[run]
    groups = np.array(matched.groups, np.int64)[regions]
    places = np.full(blocks.size, _NOT_COMPARED)
    for group, of_lease in enumerate(known):
        of_group = np.flatnonzero(groups == group)
        if of_group.size:
            places[of_group] = _places(blocks[of_group], of_lease, sampled=sampled)
    if not sampled and (places == _NOT_COMPARED).any():
        missing = blocks[places == _NOT_COMPARED]
        raise BlockIdError("remote", f"block {missing[0]}, which was not lent with this lease")
    chosen = np.flatnonzero(places != _NOT_COMPARED)
    local_run = np.searchsorted(matched.local_firsts, local_ids[chosen], side="right") - 1
    order = np.argsort(local_run, kind="stable")
    in_order = local_ids[chosen[order]].astype(np.int64)
    numbers, starts = np.unique(local_run[order], return_index=True)
    local = [
        (matched.local_runs[number], of_run - matched.local_firsts[number])
        for number, of_run in zip(numbers.tolist(), np.split(in_order, starts[1:]), strict=False)
    ]
    return Compared(
        regions=regions[chosen], remote_blocks=blocks[chosen], places=places[chosen], local=tuple(local), order=order
    )


def _places(read: Numbers, of_lease: Numbers, *, sampled: bool) -> Numbers:
    """Of each block that is read, which of `of_lease` it is, if that is compared. Tables by block number, because the
    same blocks are read in each region."""
    place_of = np.full(read.max() + 1, _NOT_COMPARED)
    is_known = (of_lease >= 0) & (of_lease < place_of.size)
    place_of[of_lease[is_known]] = np.flatnonzero(is_known)
    if sampled:
        is_read = np.zeros(place_of.size, bool)
        is_read[read] = True
        is_sample = np.zeros_like(is_read)
        is_sample[spread(np.flatnonzero(is_read & (place_of != _NOT_COMPARED)))] = True
        place_of[~is_sample] = _NOT_COMPARED
    return place_of[read]


def _firsts(runs: Iterable[MemoryRun]) -> Numbers:
    """Number of the first descriptor of each run."""
    counts = np.array([run.count for run in runs], np.int64)
    return np.cumsum(counts) - counts
