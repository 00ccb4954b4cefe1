"""What one rank reads from another engine: from which ranks, and the descriptors for given blocks.

`plan_in_steps` pairs a rank with its partners (`sources.partners`) in a remote engine, for any two layouts of the same
model. What cannot be read is refused before any memory is touched: the refusal names the first field that differs, and
both values. That is checked when a plan is made (once for engines that differ in addresses only, see `plan_cache`);
during a step only block ids are checked.

Descriptors. For each remote rank both sides prepare one list of runs. A row of the plan is one contiguous stretch of
each chunk: the descriptor of chunk c of kernel block b is start + b * block_step + c * chunk_step, with a start for
each row and side. `ReadPlan.descriptor_ids` gives the indices of a request's blocks on both sides, row after row and
with the local ids rising. This order lets NIXL merge: it joins two descriptors when the ids on both sides rise by
exactly one inside a dense run. Local ids are distinct, so whatever can be joined is adjacent after sorting.

Lists are prepared once per peer, not made for each request. A prepared list is made of runs, so its cost follows the
regions and not the pool, and NIXL merges neighbours only in prepared lists (docs/nixl.md facts 15 and 21; figures in
docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from connector.layout.blocks import ChunkPairs, Cut, GroupBlocks, GroupPair, Indices
from connector.layout.compatibility import NUMBER_OF_GROUPS, SAME_GROUPS, is_to_be_packed
from connector.layout.copies import Copy, Place, copies_between, stretches_between
from connector.layout.geometry import BlockIdError, CacheGroup, LayoutMismatch, RankId, RankLayout
from connector.layout.landing import LandingOrder, Permute, landing_layout, landing_order
from connector.layout.sources import Source, consumers, find_sources, partners
from connector.layout.steps import Steps
from connector.ports.nixl import DescriptorIds, MemoryRun

_DESCRIPTORS_MAX = 2**31 - 1
"""Descriptor ids travel as int32."""

_WORTH_PERMUTING = 2
"""READs must be in so many times fewer stretches for their blocks to be permuted afterwards."""


class Rows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rows of one cache group whose descriptors are numbered alike. Starts have shape [rows, 1]."""

    group: int
    local_starts: DescriptorIds
    local_block_step: int
    local_chunk_step: int
    remote_starts: DescriptorIds
    remote_block_step: int
    remote_chunk_step: int


class ReadPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How the local rank reads from `remote_rank`."""

    remote_rank: RankId
    consumers: int
    """How many ranks of our engine that rank waits for: each of them notifies it when it is done."""
    local_runs: tuple[MemoryRun, ...]
    remote_runs: tuple[MemoryRun, ...]
    """What to prepare, in the order of the descriptor ids."""
    groups: tuple[GroupPair, ...]
    rows: tuple[Rows, ...]

    def descriptor_ids(self, pairs: Sequence[ChunkPairs]) -> tuple[DescriptorIds, DescriptorIds]:
        """Descriptors of a READ that fills `pairs`, this plan's element of what `EnginePlan.pair` gives.

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


class Notified(msgspec.Struct, frozen=True, kw_only=True):
    """A remote rank that is only told when this rank is done, and how many ranks of our engine it waits for."""

    remote_rank: RankId
    consumers: int


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How the local rank reads from a remote engine."""

    reads: tuple[ReadPlan, ...]
    """One for each remote rank to read from, in the order of ranks. Each is to be notified too."""
    notify_only: tuple[Notified, ...]
    """Remote ranks that hold nothing that is not read elsewhere, but keep their blocks until they hear from us."""
    own: tuple[Copy, ...]
    """This rank's chunks onto themselves: the stretches that a chunk consists of, for `unfilled`."""
    landing: LandingOrder | None
    """READs leave this rank's blocks in this order: they have to be permuted before `unfilled` is zeroed, or packed
    after it."""

    @property
    def groups(self) -> tuple[GroupPair, ...]:
        """The cache groups on both sides; of the ranks that are read, those of the first one."""
        return self.reads[0].groups

    def pair(self, blocks: Sequence[GroupBlocks]) -> list[tuple[ChunkPairs, ...]]:
        """Pair the block tables of a request, one for each cache group, for each of `reads`. Raises BlockIdError."""
        if len(blocks) != len(self.groups):
            raise BlockIdError("remote", f"lists for {len(blocks)} cache groups instead of {len(self.groups)}")
        paired: dict[tuple[GroupPair, ...], tuple[ChunkPairs, ...]] = {}
        for groups in dict.fromkeys(read.groups for read in self.reads):
            paired[groups] = tuple(group.pair(tables) for group, tables in zip(groups, blocks, strict=True))
        return [paired[read.groups] for read in self.reads]

    def unfilled(self, pairs: Sequence[ChunkPairs]) -> tuple[Indices, Indices]:
        """Local memory of the request's blocks that no READ fills, for zeroing: addresses and lengths, shape [n].

        `pairs` are those of any READ.
        """
        nothing = np.empty(0, np.int64)
        if not any(pair.unfilled_block.size for pair in pairs):
            return nothing, nothing
        addresses, lengths = [nothing], [nothing]
        for copy in self.own:
            blocks, chunks = pairs[copy.group].unfilled_block, pairs[copy.group].unfilled_chunk
            place = copy.local
            addresses.append(copy.local_address + blocks * place.block_stride_bytes + chunks * place.chunk_stride_bytes)
            lengths.append(np.full(blocks.size, copy.length_bytes, np.int64))
        return np.concatenate(addresses), np.concatenate(lengths)


def plan_in_steps(
    local: RankLayout, remotes: Sequence[RankLayout], permute: Permute = Permute.NEVER
) -> Steps[EnginePlan]:
    """How `local` reads the KV of an engine; `remotes` are its ranks that `partners` names, in any order.

    `permute`: for which layouts of theirs READs may leave blocks in another order than ours. Raises LayoutMismatch.
    """
    by_rank = _require_partners(local, remotes)
    yield
    _require_same_layers(local, remotes)
    yield
    groups = _pair_groups(local, remotes)
    cuts = [group.cut for group in groups]
    target, landing_order = yield from _target(local, by_rank, cuts, permute)
    sources = _of_each_rank((yield from find_sources(target, by_rank)))
    reads: list[ReadPlan] = []
    notify_only: list[Notified] = []
    for rank, remote in sorted(by_rank.items()):
        taken = sources.get(rank)
        yield
        if taken:
            copies = copies_between(target, remote, taken, cuts)
            yield
            reads.append(_read_plan(local, remote, copies, groups))
        else:
            notify_only.append(Notified(remote_rank=rank, consumers=consumers(remote, local)))
    own_cuts = [msgspec.structs.replace(cut, remote_chunks=cut.local_chunks) for cut in cuts]
    # What is packed is zeroed in the order in which it was read.
    zeroed = target if landing_order is not None and landing_order.packs else local
    own_sources = yield from find_sources(zeroed, {local.rank: zeroed})
    own = copies_between(zeroed, zeroed, own_sources, own_cuts)
    return EnginePlan(reads=tuple(reads), notify_only=tuple(notify_only), own=tuple(own), landing=landing_order)


def _target(
    local: RankLayout, by_rank: Mapping[RankId, RankLayout], cuts: Sequence[Cut], permute: Permute
) -> Steps[tuple[RankLayout, LandingOrder | None]]:
    """Where READs are to leave KV: where it is to stay, or in a landing layout if that makes them long enough."""
    order = landing_order(local, by_rank.values(), cuts, permute)
    if order is None:
        return local, None
    landing = landing_layout(local, order)
    if order.packs:
        return landing, order
    # Latents and states, which land where they stay, have no say.
    layers = {
        piece.layer
        for as_it_stays, as_read in zip(local.regions, landing.regions, strict=True)
        for piece in set(as_it_stays.pieces) - set(as_read.pieces)
    }
    scattered = yield from _stretches(local, by_rank, cuts, layers)
    long = yield from _stretches(landing, by_rank, cuts, layers)
    return (landing, order) if 0 < long * _WORTH_PERMUTING <= scattered else (local, None)


def _stretches(
    layout: RankLayout, by_rank: Mapping[RankId, RankLayout], cuts: Sequence[Cut], layers: Collection[str]
) -> Steps[int]:
    """How many stretches READs of the given layers would have."""
    sources = yield from find_sources(layout, by_rank)
    stretches = 0
    for rank, taken in _of_each_rank(source for source in sources if source.local_piece.layer in layers).items():
        stretches += stretches_between(layout, by_rank[rank], taken, cuts)
        yield
    return stretches


def _of_each_rank(sources: Iterable[Source]) -> dict[RankId, list[Source]]:
    of_rank: dict[RankId, list[Source]] = {}
    for source in sources:
        of_rank.setdefault(source.remote_rank, []).append(source)
    return of_rank


# --- what is refused ------------------------------------------------------------------------------------------------


def _require_partners(local: RankLayout, remotes: Sequence[RankLayout]) -> Mapping[RankId, RankLayout]:
    """The remote ranks: our partners in each stage, all of one engine that is not ours, and no others."""
    for remote in remotes:
        _require_context_parallel(local, remote)
    by_rank = {remote.rank: remote for remote in remotes}
    stages = range(len({remote.pp_rank for remote in remotes}) or 1)
    sizes = (remotes[0].tp_size, local.dcp_size, remotes[0].dcp_size) if remotes else (1,)
    wanted = [RankId(stage, rank) for stage in stages for rank in partners(local.tp_rank, local.tp_size, *sizes)]
    if sorted(by_rank) != wanted or len(remotes) != len(wanted):
        advice = "each partner of our rank has to be asked, once"
        here, there = ([tuple(rank) for rank in ranks] for ranks in (wanted, sorted(by_rank)))
        raise LayoutMismatch("remote ranks (stage, tensor parallel rank)", here, there, advice)
    for remote in remotes:
        if local.engine_id == remote.engine_id:
            advice = (
                "if that is this engine, the router has to send a prompt to another one for its second call; else give "
                "each an engine id of its own"
            )
            raise LayoutMismatch("engine_id", local.engine_id, remote.engine_id, advice)
        for field in ("engine_id", "tp_size", "dcp_size"):
            if getattr(remote, field) != getattr(remotes[0], field):
                advice = "all ranks that are read have to be of one engine"
                raise LayoutMismatch(
                    f"{field} of rank {remote.tp_rank}", getattr(remotes[0], field), getattr(remote, field), advice
                )
        backends = remotes[0].attention_backend, remote.attention_backend
        if len({is_to_be_packed(local.attention_backend, backend) for backend in backends}) > 1:
            advice = (
                "some ranks of that engine keep K and V in another order than the others: start it with one back end"
            )
            raise LayoutMismatch(f"attention_backend of rank {remote.tp_rank}", *backends, advice)
    return by_rank


def _require_context_parallel(local: RankLayout, remote: RankLayout) -> None:
    """The sizes of context parallelism that `partners` knows how to pair, and that the built-in connector serves."""
    ours, theirs = local.dcp_size, remote.dcp_size
    if any(side.dcp_size not in (1, side.tp_size) for side in (local, remote)) or max(ours, theirs) % min(ours, theirs):
        advice = "each has to be 1 or that engine's tensor parallel size, and one has to divide the other"
        raise LayoutMismatch("dcp_size", ours, theirs, advice)
    remote_fits = remote.pcp_size in (1, theirs) or ours == theirs == 1
    if local.pcp_size != 1 or not remote_fits:
        advice = "a decode engine needs 1, a prefill engine 1 or its dcp_size, or any size where nobody has a dcp_size"
        raise LayoutMismatch("pcp_size", local.pcp_size, remote.pcp_size, advice)


def _require_same_layers(local: RankLayout, remotes: Sequence[RankLayout]) -> None:
    """One kind of memory on each rank, and no layer that only one side caches."""
    sides = (local, *remotes)
    if not all(side.regions and all(region.pieces for region in side.regions) for side in sides):
        known = [sum(bool(region.pieces) for region in side.regions) for side in sides]
        advice = "there is no KV cache to read, or nothing is known about what is in it"
        raise LayoutMismatch("number of KV cache regions", known[0], min(known[1:]), advice)
    for side in sides:
        for region in side.regions:
            if region.memory_kind != side.memory_kind:
                advice = "keep the whole KV cache of an engine in one kind of memory"
                raise LayoutMismatch(f"memory of {region.name}", side.memory_kind, region.memory_kind, advice)
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
            ours_count, theirs_count = len(local.cache_groups), len(remote.cache_groups)
            raise LayoutMismatch(NUMBER_OF_GROUPS, ours_count, theirs_count, SAME_GROUPS)
        if _of_any_rank(remote) != _of_any_rank(remotes[0]):
            advice = "all ranks of an engine have to have the same block sizes"
            raise LayoutMismatch(f"block sizes of rank {remote.tp_rank}", groups, remote.cache_groups, advice)
    pairs = []
    for index, (ours, theirs) in enumerate(zip(local.cache_groups, groups, strict=True)):
        if bool(ours.tokens_per_kernel_block) != bool(theirs.tokens_per_kernel_block):
            here, there = ("tokens" if side.tokens_per_kernel_block else "states" for side in (ours, theirs))
            raise LayoutMismatch(f"KV cache group {index}", here, there, "start both engines with the same model")
        if ours.dcp_size > 1 < theirs.dcp_size and ours.positions_per_block != theirs.positions_per_block:
            here, there = (f"{side.positions_per_block} with dcp_size {side.dcp_size}" for side in (ours, theirs))
            raise LayoutMismatch(f"block size of KV cache group {index}", here, there, "use the same --block-size")
        # A pipeline stage may have no layer of a group.
        remote_ids = [_ids(remote, index, theirs) for remote in remotes if _blocks(remote, index)]
        local_ids = _ids(local, index, ours)
        pairs.append(GroupPair(local=ours, remote=theirs, local_ids=local_ids, remote_ids=min(remote_ids, default=0)))
    return tuple(pairs)


def _of_any_rank(layout: RankLayout) -> list[CacheGroup]:
    return [msgspec.structs.replace(group, dcp_rank=0) for group in layout.cache_groups]


def _blocks(layout: RankLayout, group: int) -> list[int]:
    return [region.num_blocks for region in layout.regions if region.group == group]


def _ids(layout: RankLayout, group: int, sizes: CacheGroup) -> int:
    """How many logical block ids of the group the rank has memory for."""
    return min(_blocks(layout, group), default=0) // sizes.kernel_blocks_per_block


# --- descriptors ----------------------------------------------------------------------------------------------------


class _Runs:
    """The runs of one side's descriptor list, each stretch once, and the numbers of their descriptors."""

    def __init__(self, side: RankLayout) -> None:
        self.runs: list[MemoryRun] = []
        self.count = 0
        self._where = side.device_id, side.memory_kind
        self._starts: dict[tuple[int, int, Place], int] = {}

    def start(self, address: int, length_bytes: int, place: Place) -> int:
        """Number of the descriptor of chunk 0 of block 0; the others follow as `steps` says."""
        key = (address, length_bytes, place)
        start = self._starts.setdefault(key, self.count)
        if start == self.count:
            for offset_bytes, stride_bytes, count in _run_shapes(place):
                self.runs.append(MemoryRun(address + offset_bytes, length_bytes, stride_bytes, count, *self._where))
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


def _read_plan(local: RankLayout, remote: RankLayout, copies: Sequence[Copy], groups: Sequence[GroupPair]) -> ReadPlan:
    local_runs, remote_runs = _Runs(local), _Runs(remote)
    alike: dict[tuple[int, tuple[int, int], tuple[int, int]], list[tuple[int, int]]] = {}
    for copy in copies:
        local_start = local_runs.start(copy.local_address, copy.length_bytes, copy.local)
        remote_start = remote_runs.start(copy.remote_address, copy.length_bytes, copy.remote)
        key = (copy.group, _steps(copy.local), _steps(copy.remote))
        alike.setdefault(key, []).append((local_start, remote_start))
    if max(local_runs.count, remote_runs.count) > _DESCRIPTORS_MAX:
        advice = f"at most {_DESCRIPTORS_MAX} can be addressed; use fewer or larger blocks"
        raise LayoutMismatch("number of descriptors", local_runs.count, remote_runs.count, advice)
    return ReadPlan(
        remote_rank=remote.rank,
        consumers=consumers(remote, local),
        local_runs=tuple(local_runs.runs),
        remote_runs=tuple(remote_runs.runs),
        groups=tuple(
            msgspec.structs.replace(pair, remote=theirs)
            for pair, theirs in zip(groups, remote.cache_groups, strict=True)
        ),
        rows=tuple(
            Rows(
                group=group,
                local_starts=np.array([[start] for start, _ in rows], np.int32),
                local_block_step=local_steps[0],
                local_chunk_step=local_steps[1],
                remote_starts=np.array([[start] for _, start in rows], np.int32),
                remote_block_step=remote_steps[0],
                remote_chunk_step=remote_steps[1],
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
