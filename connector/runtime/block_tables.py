"""From the block tables of one request to the descriptors of its READs.

The tables come as the two schedulers made them, each in blocks of its own size. What they mean together is known only
here, where the peer's layout is: where a table that a window has clipped begins, and which tokens a block stands for.

Two engines with one cache group and equal blocks, the common case, need no pairing of chunks: block i of the request
is block i on both sides.
"""

from __future__ import annotations

import msgspec

from connector.layout.blocks import GroupBlocks, GroupPair
from connector.layout.geometry import BlockIdError
from connector.layout.plan import EnginePlan
from connector.ports.nixl import DescriptorIds
from connector.runtime.messages import GroupPull, Memory, StartPull


class Read(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One READ. `source` counts `EnginePlan.reads`."""

    source: int
    local_ids: DescriptorIds
    remote_ids: DescriptorIds


class Resolved(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What has to be done for one request."""

    reads: tuple[Read, ...]
    unfilled: Memory | None
    """Parts of its blocks that no READ writes, and that have to be zeroed: their old content is another request's."""


def resolve(plan: EnginePlan, command: StartPull) -> Resolved:
    """Raises BlockIdError: tables that the peer's memory or the number of tokens does not allow."""
    groups = command.groups
    if not any(group.local_block_ids for group in groups):
        return Resolved(reads=(), unfilled=None)
    if len(groups) != len(plan.groups):
        raise BlockIdError("remote", f"lists for {len(groups)} cache groups instead of {len(plan.groups)}")
    if len(groups) == 1 and plan.groups[0].local == plan.groups[0].remote and groups[0].window_tokens is None:
        return _resolve_block_by_block(plan, groups[0])
    tables = [_tables(pair, group, command) for pair, group in zip(plan.groups, groups, strict=True)]
    pairs = plan.pair(tables)
    reads = []
    for source, read in enumerate(plan.reads):
        local_ids, remote_ids = read.chunk_descriptor_ids(pairs)
        if local_ids.size:
            reads.append(Read(source=source, local_ids=local_ids, remote_ids=remote_ids))
    addresses, lengths = plan.unfilled(pairs)
    unfilled = Memory(addresses=addresses, lengths=lengths) if addresses.size else None
    return Resolved(reads=tuple(reads), unfilled=unfilled)


def _resolve_block_by_block(plan: EnginePlan, group: GroupPull) -> Resolved:
    local = group.local_block_ids
    remote = group.remote_block_ids[group.local_first : group.local_first + len(local)]
    reads = []
    for source, read in enumerate(plan.reads):
        local_ids, remote_ids = read.descriptor_ids(local, remote)
        reads.append(Read(source=source, local_ids=local_ids, remote_ids=remote_ids))
    return Resolved(reads=tuple(reads), unfilled=None)


def _tables(pair: GroupPair, group: GroupPull, command: StartPull) -> GroupBlocks:
    if not pair.local.tokens_per_kernel_block:
        # States have no tokens: each of our blocks needs one of the peer's.
        count = len(group.local_block_ids)
        return GroupBlocks(local=group.local_block_ids, remote=group.remote_block_ids, num_tokens=count)
    if group.window_tokens is not None:
        _require_whole_blocks(pair)
    return GroupBlocks(
        local=group.local_block_ids,
        remote=group.remote_block_ids,
        local_first=group.local_first,
        remote_first=_remote_first(pair, group, command),
        num_tokens=command.num_tokens,
        window_tokens=group.window_tokens,
    )


def _require_whole_blocks(pair: GroupPair) -> None:
    """Raise BlockIdError where the peer's table of a window may begin inside of our first block.

    What lies before it would stay empty. This request needs none of it, but vLLM's prefix cache takes every block of a
    loaded prompt for whole, and another request, whose window ends earlier, would be computed from it.
    """
    ours, theirs = pair.local.positions_per_block, pair.remote.positions_per_block
    if theirs % ours:
        raise BlockIdError(
            "remote",
            f"blocks of {theirs} tokens cannot fill blocks of {ours} of a sliding window; "
            "use a --block-size on the prefill engine that is a multiple of the decode engine's",
        )


def _remote_first(pair: GroupPair, group: GroupPull, command: StartPull) -> int:
    """How many of the peer's blocks lie before the first one that it sent."""
    remote_num_tokens = command.remote_num_tokens if command.remote_num_tokens is not None else command.num_tokens
    if group.window_tokens is None or remote_num_tokens is None:
        return 0
    blocks = -(-remote_num_tokens // pair.remote.positions_per_block)
    return max(0, blocks - len(group.remote_block_ids))
