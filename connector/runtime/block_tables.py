"""From the block tables of one request to the descriptors of its READs.

The tables come as the two schedulers made them, each in blocks of its own size. What they mean together is known only
here, where the peer's layout is: where a table that a window has clipped begins, and which tokens a block stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from connector.layout.blocks import GroupBlocks, GroupPair
from connector.layout.geometry import BlockIdError
from connector.layout.plan import EnginePlan
from connector.layout.verification import compared
from connector.ports.nixl import DescriptorIds
from connector.protocol import GroupPull, Memory, Permutation, StartPull
from connector.runtime.handshake import ReadSource
from connector.runtime.reads import DESCRIPTORS_PER_TURN
from connector.runtime.verification import Check, KnownSums


class Read(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One READ. `source` counts `EnginePlan.reads`. What a turn does not suffice for has several."""

    source: int
    local_ids: DescriptorIds
    remote_ids: DescriptorIds


class Resolved(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What has to be done for one request."""

    reads: tuple[Read, ...]
    permutation: Permutation | None
    """Its blocks, if READs leave them in the peer's order."""
    unfilled: Memory | None
    """Parts of its blocks that no READ writes, and that have to be zeroed: their old content is another request's."""
    checks: tuple[Check, ...] = ()
    """One for each of `reads`, where these are compared with checksums."""


def resolve(plan: EnginePlan, command: StartPull) -> Resolved:
    """Raises BlockIdError: tables that the peer's memory or the number of tokens does not allow."""
    groups = command.groups
    if not any(group.local_block_ids for group in groups):
        return Resolved(reads=(), permutation=None, unfilled=None)
    if len(groups) != len(plan.groups):
        raise BlockIdError("remote", f"lists for {len(groups)} cache groups instead of {len(plan.groups)}")
    tables = [_tables(pair, group, command) for pair, group in zip(plan.groups, groups, strict=True)]
    pairs = plan.pair(tables)
    reads = []
    for source, (read, of_read) in enumerate(zip(plan.reads, pairs, strict=True)):
        local_ids, remote_ids = read.descriptor_ids(of_read)
        for first in range(0, local_ids.size, DESCRIPTORS_PER_TURN):
            of_turn = slice(first, first + DESCRIPTORS_PER_TURN)
            reads.append(Read(source=source, local_ids=local_ids[of_turn], remote_ids=remote_ids[of_turn]))
    addresses, lengths = plan.unfilled(pairs[0])
    unfilled = Memory(addresses=addresses, lengths=lengths) if addresses.size else None
    return Resolved(reads=tuple(reads), permutation=_permutation(plan, groups), unfilled=unfilled)


def checks(
    resolved: Resolved, sources: Sequence[ReadSource], known: Sequence[KnownSums], *, sampled: bool
) -> tuple[Check, ...]:
    """`known`: for each of `sources`. Raises BlockIdError: a block is to be read that was not lent with this lease."""
    found = []
    for read in resolved.reads:
        source, of_source = sources[read.source], known[read.source]
        assert source.match is not None
        each = compared(source.match, read.local_ids, read.remote_ids, of_source.blocks, sampled=sampled)
        found.append(Check(compared=each, known=of_source, regions=source.regions))
    return tuple(found)


def _permutation(plan: EnginePlan, groups: Sequence[GroupPull]) -> Permutation | None:
    if plan.landing is None:
        return None
    tables = []
    for pair, group in zip(plan.groups, groups, strict=True):
        ratio = pair.local.kernel_blocks_per_block
        tables.append((np.array(group.local_block_ids, np.int64)[:, None] * ratio + np.arange(ratio)).ravel())
    order = plan.landing
    return Permutation(
        kernel_blocks=tuple(tables), chunks=order.chunks, heads_first=order.heads_first, packs=order.packs
    )


def _tables(pair: GroupPair, group: GroupPull, command: StartPull) -> GroupBlocks:
    if not pair.local.tokens_per_kernel_block:
        # States have no tokens: each of our blocks needs one of the peer's.
        count = len(group.local_block_ids)
        return GroupBlocks(local=group.local_block_ids, remote=group.remote_block_ids, num_tokens=count)
    return GroupBlocks(
        local=group.local_block_ids,
        remote=group.remote_block_ids,
        local_first=group.local_first,
        remote_first=_remote_first(pair, group, command),
        num_tokens=command.num_tokens,
        window_tokens=group.window_tokens,
    )


def _remote_first(pair: GroupPair, group: GroupPull, command: StartPull) -> int:
    """How many of the peer's blocks lie before the first one that it sent.

    Raises BlockIdError: our group keeps every token, and the peer's has let go of the first ones. The peer keeps a
    window there, and what it sent would be taken for the beginning.
    """
    remote_num_tokens = command.remote_num_tokens if command.remote_num_tokens is not None else command.num_tokens
    if remote_num_tokens is None:
        return 0
    blocks = -(-remote_num_tokens // pair.remote.positions_per_id)
    missing = max(0, blocks - len(group.remote_block_ids))
    if missing and group.window_tokens is None:
        raise BlockIdError(
            "remote",
            f"{len(group.remote_block_ids)} blocks of {remote_num_tokens} tokens, for a group that keeps all {blocks}",
        )
    return missing
