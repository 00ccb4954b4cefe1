"""What one rank reads from another engine: from which ranks, and the descriptors for given blocks.

`plan_engine` pairs a rank with the ranks of a remote engine that it deals with (`sources.partners`), for any two
layouts of the same model. What cannot be read is refused with the first field that differs and both values, before any
memory is touched. A plan is made once per handshake, and everything is checked then; during a step only block ids are.

Descriptors. For each remote rank both sides prepare one list of runs. A row of the plan is one contiguous stretch of
each chunk: the descriptor of chunk c of kernel block b is start + b * block_step + c * chunk_step, with a start for
each row and side. `ReadPlan.descriptor_ids` gives the indices of a request's blocks on both sides, row after row and
with the local ids rising. That order is what lets NIXL merge: it joins two descriptors when the ids on both sides rise
by exactly one inside a dense run, and since local ids are distinct, whatever can be joined at all is adjacent after
sorting.

Lists are prepared once per peer, not made for each request, because that is what tests/bench/bench_descriptors.py says
of 32 to 128 regions, pools of 1,000 to 100,000 blocks and requests of 64 and 512. A prepared list is made of runs, so
its cost follows the regions and not the pool: 10 to 57 us and 2 to 8 kB, measured with 1,000 of them; lists, agents and
plans of 1,000 peers come to 19 to 72 MB (extrapolated from 16 agents and 20 plans). Building a request's lists anew
takes 1.3 to 2.3 times as long where blocks are scattered, and up to 23 times where they are consecutive: there NIXL
joins prepared neighbours, which it does not for lists made per request, and the READ itself is 5 to 8 times as fast
over CMA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from connector.layout.blocks import ChunkPairs, GroupBlocks, GroupPair, Indices
from connector.layout.copies import Copy, Place, copies_between
from connector.layout.geometry import BlockIdError, CacheGroup, LayoutMismatch, MemoryKind, RankLayout
from connector.layout.sources import find_sources, partners
from connector.ports.nixl import DescriptorIds, MemoryRun

_DESCRIPTORS_MAX = 2**31 - 1
"""Descriptor ids travel as int32."""


class Rows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rows of one cache group whose descriptors are numbered alike. Starts have shape [rows, 1]."""

    group: int
    local_starts: DescriptorIds
    local_block_step: int
    local_chunk_step: int
    remote_starts: DescriptorIds
    remote_block_step: int
    remote_chunk_step: int
    length_bytes: int
    """Of one chunk in all rows."""


class ReadPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How the local rank reads from `remote_rank`."""

    remote_rank: int
    """Tensor-parallel rank to read from."""
    consumers: int
    """How many ranks of our engine that rank waits for: each of them notifies it when it is done."""
    local_runs: tuple[MemoryRun, ...]
    remote_runs: tuple[MemoryRun, ...]
    """What to prepare, in the order of the descriptor ids."""
    memory_kind: MemoryKind
    groups: tuple[GroupPair, ...]
    rows: tuple[Rows, ...]

    def descriptor_ids(
        self, local_blocks: Sequence[int] | npt.NDArray[np.int64], remote_blocks: Sequence[int] | npt.NDArray[np.int64]
    ) -> tuple[DescriptorIds, DescriptorIds]:
        """Descriptors of a READ of remote_blocks[i] into local_blocks[i], both logical ids, shape [n].

        For a plan of one cache group with the same block size on both sides; any other takes `chunk_descriptor_ids`.
        Returns two int32 arrays of shape [n * kernel blocks per block * rows]. Raises BlockIdError when the lists
        differ in length, an id is outside of its side's memory, or a local block occurs twice.
        """
        local, remote = np.asarray(local_blocks, np.int64), np.asarray(remote_blocks, np.int64)
        if local.ndim != 1 or local.shape != remote.shape:
            raise BlockIdError("remote", f"{remote.size} of them for {local.size} local blocks")
        (group,) = self.groups
        if group.local != group.remote:
            raise ValueError("the two sides' blocks differ in size")
        group.check_ids(local, remote)
        order = np.argsort(local, kind="stable")
        local, remote = local[order], remote[order]
        ratio = group.local.kernel_blocks_per_block
        if ratio > 1:
            part = np.arange(ratio)
            local = (local[:, None] * ratio + part).ravel()
            remote = (remote[:, None] * ratio + part).ravel()
        ids = [(_number(rows.local_starts, local), _number(rows.remote_starts, remote)) for rows in self.rows]
        return _concatenate([local for local, _ in ids]), _concatenate([remote for _, remote in ids])

    def chunk_descriptor_ids(self, pairs: Sequence[ChunkPairs]) -> tuple[DescriptorIds, DescriptorIds]:
        """Descriptors of a READ that fills `pairs`, one element for each cache group (`EnginePlan.pair`).

        Returns two int32 arrays of the same shape [n]. No error: pairing has checked the ids.
        """
        local_ids, remote_ids = [], []
        for rows in self.rows:
            pair = pairs[rows.group]
            local = pair.local_block * rows.local_block_step + pair.local_chunk * rows.local_chunk_step
            remote = pair.remote_block * rows.remote_block_step + pair.remote_chunk * rows.remote_chunk_step
            local_ids.append(_number(rows.local_starts, local))
            remote_ids.append(_number(rows.remote_starts, remote))
        return _concatenate(local_ids), _concatenate(remote_ids)

    def length_bytes(self, blocks: int) -> int:
        """Bytes that a READ of `blocks` logical local blocks of each cache group moves."""
        return sum(rows.length_bytes * self._chunks(rows.group) for rows in self.rows) * blocks

    def _chunks(self, group: int) -> int:
        """Chunks of a logical local block."""
        pair = self.groups[group]
        return pair.local.kernel_blocks_per_block * pair.cut.local_chunks


class Notified(msgspec.Struct, frozen=True, kw_only=True):
    """A remote rank that is only told when this rank is done, and how many ranks of our engine it waits for."""

    remote_rank: int
    consumers: int


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How the local rank reads from a remote engine."""

    reads: tuple[ReadPlan, ...]
    """One for each remote rank to read from, in the order of ranks. Each is to be notified too."""
    notify_only: tuple[Notified, ...]
    """Remote ranks that hold nothing that is not read elsewhere, but keep their blocks until they hear from us."""
    groups: tuple[GroupPair, ...]
    own: tuple[Copy, ...]
    """This rank's chunks onto themselves: the stretches that a chunk consists of, for `unfilled`."""
    lands: bool
    """READs leave this rank's blocks in a landing layout: they have to be put in order before `unfilled` is zeroed."""

    def pair(self, blocks: Sequence[GroupBlocks]) -> tuple[ChunkPairs, ...]:
        """Pair the block tables of a request, one for each cache group. Raises BlockIdError."""
        if len(blocks) != len(self.groups):
            raise BlockIdError("remote", f"lists for {len(blocks)} cache groups instead of {len(self.groups)}")
        return tuple(group.pair(tables) for group, tables in zip(self.groups, blocks, strict=True))

    def unfilled(self, pairs: Sequence[ChunkPairs]) -> tuple[Indices, Indices]:
        """Local memory of the request's blocks that no READ fills, for zeroing: addresses and lengths, shape [n]."""
        addresses, lengths = [], []
        for copy in self.own:
            blocks, chunks = pairs[copy.group].unfilled_block, pairs[copy.group].unfilled_chunk
            place = copy.local
            addresses.append(copy.local_address + blocks * place.block_stride_bytes + chunks * place.chunk_stride_bytes)
            lengths.append(np.full(blocks.size, copy.length_bytes, np.int64))
        return np.concatenate(addresses), np.concatenate(lengths)


def plan_engine(local: RankLayout, remotes: Sequence[RankLayout], landing: RankLayout | None = None) -> EnginePlan:
    """How `local` reads the KV of an engine; `remotes` are its ranks that `partners` names, in any order.

    `landing`: the same memory with another order inside blocks, which READs are to leave there. Raises LayoutMismatch.
    """
    target = landing or local
    by_number = _require_partners(local, remotes)
    _require_same_layers(local, remotes)
    groups = _pair_groups(local, remotes)
    cuts = [group.cut for group in groups]
    sources = find_sources(target, by_number)
    reads: list[ReadPlan] = []
    notify_only: list[Notified] = []
    for rank, remote in sorted(by_number.items()):
        consumers = len(partners(rank, remote.tp_size, local.tp_size))
        taken = [source for source in sources if source.remote_rank == rank]
        if taken:
            copies = copies_between(target, remote, taken, cuts)
            reads.append(_read_plan(local, remote, copies, groups, consumers))
        else:
            notify_only.append(Notified(remote_rank=rank, consumers=consumers))
    own_cuts = [msgspec.structs.replace(cut, remote_chunks=cut.local_chunks) for cut in cuts]
    own = copies_between(local, local, find_sources(local, {local.tp_rank: local}), own_cuts)
    told = tuple(notify_only)
    return EnginePlan(reads=tuple(reads), notify_only=told, groups=groups, own=tuple(own), lands=landing is not None)


# --- what is refused ------------------------------------------------------------------------------------------------


def _require_partners(local: RankLayout, remotes: Sequence[RankLayout]) -> Mapping[int, RankLayout]:
    """The remote ranks by number: those that we deal with, all of one engine that is not ours, and no others."""
    by_number = {remote.tp_rank: remote for remote in remotes}
    wanted = partners(local.tp_rank, local.tp_size, remotes[0].tp_size) if remotes else range(1)
    if sorted(by_number) != list(wanted) or len(remotes) != len(wanted):
        advice = "each of the ranks that ours deals with has to be asked, once"
        raise LayoutMismatch("remote tensor parallel ranks", list(wanted), sorted(by_number), advice)
    for remote in remotes:
        if local.engine_id == remote.engine_id:
            advice = "give each engine an engine id of its own"
            raise LayoutMismatch("engine_id", local.engine_id, remote.engine_id, advice)
        for field in ("engine_id", "tp_size"):
            if getattr(remote, field) != getattr(remotes[0], field):
                advice = "all ranks that are read have to be of one engine"
                raise LayoutMismatch(
                    f"{field} of rank {remote.tp_rank}", getattr(remotes[0], field), getattr(remote, field), advice
                )
        for field in ("dcp_size", "pcp_size"):
            if getattr(local, field) != 1 or getattr(remote, field) != 1:
                advice = "context parallelism is not supported; set it to 1"
                raise LayoutMismatch(field, getattr(local, field), getattr(remote, field), advice)
    return by_number


def _require_same_layers(local: RankLayout, remotes: Sequence[RankLayout]) -> None:
    """Same memory kind everywhere, and no layer that only one side caches."""
    sides = (local, *remotes)
    if not all(side.regions and all(region.pieces for region in side.regions) for side in sides):
        known = [sum(bool(region.pieces) for region in side.regions) for side in sides]
        advice = "there is no KV cache to read, or nothing is known about what is in it"
        raise LayoutMismatch("number of KV cache regions", known[0], min(known[1:]), advice)
    kind = local.regions[0].memory_kind
    for side in sides:
        for region in side.regions:
            if region.memory_kind != kind:
                advice = "keep the KV cache of both engines in the same kind of memory"
                raise LayoutMismatch(f"memory of {region.name}", kind, region.memory_kind, advice)
    ours, theirs = _layers(local), set[str]().union(*(_layers(remote) for remote in remotes))
    if ours != theirs:
        layer = min(ours ^ theirs)
        here, there = ("present" if layer in side else "absent" for side in (ours, theirs))
        raise LayoutMismatch(f"KV cache of {layer}", here, there, "start both engines with the same model")


def _layers(layout: RankLayout) -> set[str]:
    return {piece.layer for region in layout.regions for piece in region.pieces}


def _pair_groups(local: RankLayout, remotes: Sequence[RankLayout]) -> tuple[GroupPair, ...]:
    groups = remotes[0].cache_groups
    for remote in remotes:
        if len(local.cache_groups) != len(remote.cache_groups):
            advice = "start both engines with the same model, and the hybrid KV cache manager on or off on both"
            ours_count, theirs_count = len(local.cache_groups), len(remote.cache_groups)
            raise LayoutMismatch("number of KV cache groups", ours_count, theirs_count, advice)
        if remote.cache_groups != groups:
            advice = "all ranks of an engine have to have the same block sizes"
            raise LayoutMismatch(f"block sizes of rank {remote.tp_rank}", groups, remote.cache_groups, advice)
    pairs = []
    for index, (ours, theirs) in enumerate(zip(local.cache_groups, groups, strict=True)):
        if bool(ours.tokens_per_kernel_block) != bool(theirs.tokens_per_kernel_block):
            here, there = ("tokens" if side.tokens_per_kernel_block else "states" for side in (ours, theirs))
            raise LayoutMismatch(f"KV cache group {index}", here, there, "start both engines with the same model")
        remote_ids = min(_ids(remote, index, theirs) for remote in remotes)
        pairs.append(GroupPair(local=ours, remote=theirs, local_ids=_ids(local, index, ours), remote_ids=remote_ids))
    return tuple(pairs)


def _ids(layout: RankLayout, group: int, sizes: CacheGroup) -> int:
    """How many logical block ids of the group the rank has memory for."""
    blocks = [region.num_blocks for region in layout.regions if region.group == group]
    return min(blocks, default=0) // sizes.kernel_blocks_per_block


# --- descriptors ----------------------------------------------------------------------------------------------------


class _Runs:
    """The runs of one side's descriptor list, each stretch once, and the numbers of their descriptors."""

    def __init__(self, device_id: int) -> None:
        self.runs: list[MemoryRun] = []
        self.count = 0
        self._device_id = device_id
        self._starts: dict[tuple[int, int, Place], int] = {}

    def start(self, address: int, length_bytes: int, place: Place) -> int:
        """Number of the descriptor of chunk 0 of block 0; the others follow as `steps` says."""
        key = (address, length_bytes, place)
        start = self._starts.setdefault(key, self.count)
        if start == self.count:
            for offset_bytes, stride_bytes, count in _run_shapes(place):
                self.runs.append(MemoryRun(address + offset_bytes, length_bytes, stride_bytes, count, self._device_id))
                self.count += count
        return start


def _steps(place: Place) -> tuple[int, int]:
    """How descriptor ids rise from block to block and from chunk to chunk."""
    if _is_even(place):
        return place.chunks, 1
    return 1, place.blocks if place.chunks > 1 else 0


def _run_shapes(place: Place) -> list[tuple[int, int, int]]:
    """(offset, stride, count) of the runs that hold a stretch of every chunk of every block."""
    if _is_even(place):
        return [(0, place.chunk_stride_bytes, place.blocks * place.chunks)]
    chunk_offsets = (chunk * place.chunk_stride_bytes for chunk in range(place.chunks))
    return [(offset, place.block_stride_bytes, place.blocks) for offset in chunk_offsets]


def _is_even(place: Place) -> bool:
    """The last chunk of a block is as far from the first one of the next as from the one before it."""
    return place.chunks > 1 and place.chunks * place.chunk_stride_bytes == place.block_stride_bytes


def _read_plan(
    local: RankLayout, remote: RankLayout, copies: Sequence[Copy], groups: tuple[GroupPair, ...], consumers: int
) -> ReadPlan:
    local_runs, remote_runs = _Runs(local.device_id), _Runs(remote.device_id)
    alike: dict[tuple[int, tuple[int, int], tuple[int, int]], list[tuple[int, int, int]]] = {}
    for copy in copies:
        local_start = local_runs.start(copy.local_address, copy.length_bytes, copy.local)
        remote_start = remote_runs.start(copy.remote_address, copy.length_bytes, copy.remote)
        key = (copy.group, _steps(copy.local), _steps(copy.remote))
        alike.setdefault(key, []).append((local_start, remote_start, copy.length_bytes))
    if max(local_runs.count, remote_runs.count) > _DESCRIPTORS_MAX:
        advice = f"at most {_DESCRIPTORS_MAX} can be addressed; use fewer or larger blocks"
        raise LayoutMismatch("number of descriptors", local_runs.count, remote_runs.count, advice)
    return ReadPlan(
        remote_rank=remote.tp_rank,
        consumers=consumers,
        local_runs=tuple(local_runs.runs),
        remote_runs=tuple(remote_runs.runs),
        memory_kind=local.regions[0].memory_kind,
        groups=groups,
        rows=tuple(
            Rows(
                group=group,
                local_starts=np.array([[start] for start, _, _ in rows], np.int32),
                local_block_step=local_steps[0],
                local_chunk_step=local_steps[1],
                remote_starts=np.array([[start] for _, start, _ in rows], np.int32),
                remote_block_step=remote_steps[0],
                remote_chunk_step=remote_steps[1],
                length_bytes=sum(length for _, _, length in rows),
            )
            for (group, local_steps, remote_steps), rows in alike.items()
        ),
    )


def _number(starts: DescriptorIds, within: Indices) -> DescriptorIds:
    """Descriptor ids of all rows: starts [rows, 1] and positions within a row [n] to [rows * n]."""
    ids: DescriptorIds = (starts + within.astype(np.int32)).ravel()
    return ids


def _concatenate(parts: Sequence[DescriptorIds]) -> DescriptorIds:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
