"""One plan for each geometry: what was planned for one engine serves every other that differs in addresses only.

Deriving and checking layouts and planning READs takes milliseconds, and a decode rank may meet a thousand engines that
run the same model with the same sizes. What all of that looks at is, beside ourselves, what the ranks say about
themselves (`AgentMetadata`). Of the addresses in there it matters only how regions lie in each other. So a `Geometry`
is all that the ranks say, with each base address split in two:

* the start of the region's extent. An extent is memory whose regions reach into each other, as the layers of one tensor
  with blocks outermost do. Extents differ from process to process; a plan is moved by adding their starts.
* the offset in the extent, which decides what is joined, and what is refused.

Two geometries are equal only if every value in them is. So whatever would refuse an engine has accepted one that said
the same, and what is refused is not kept: it is looked at again each time. The bytes of NIXL's own metadata are left
out, and the numbers of devices, which go into a plan with the addresses.

Why regions of different extents have no part in each other's plan: two stretches are joined where one begins at the end
of the other, in the first block of both. If their regions have several blocks, the second region then begins before the
first one ends, and both are of one extent; and if they have one, they are not joined (`copies`). Where layouts have
blocks outermost, the length of a whole row of regions is checked too (`compatibility`), so they have one extent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from connector.layout.geometry import RankId
from connector.layout.plan import EnginePlan
from connector.layout.remote import Stated
from connector.layout.steps import Steps
from connector.ports.nixl import MemoryKind, MemoryRun
from connector.wire.metadata import AgentMetadata

ITEMS_MAX = 250_000
"""Regions and runs of all plans that are kept, a few hundred bytes each."""

_encoder = msgspec.msgpack.Encoder()


class RankGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of one rank is. The extents are numbered by the first region of each."""

    rank: RankId
    starts: tuple[int, ...]
    """Address of each extent."""
    ends: tuple[int, ...]
    """One past its last block, the space between two blocks included."""
    device_id: int


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as the planner sees it.

    Attributes:
        key: everything that decides about its plan, encoded: the sizes, then each rank. Equal only if all of it is.
        ranks: the rest.
        items: number of regions of all ranks.
    """

    key: tuple[bytes, ...]
    ranks: tuple[RankGeometry, ...]
    items: int


class _Run(msgspec.Struct, frozen=True, gc=False):
    """A run of remote memory without its address."""

    extent: int
    offset_bytes: int
    length_bytes: int
    stride_bytes: int
    count: int
    memory_kind: MemoryKind


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of the first engine of a geometry, and its remote runs wherever they are."""

    plan: EnginePlan
    runs: tuple[tuple[_Run, ...], ...]
    """The remote runs of each read of the plan."""
    items: int


def geometry_in_steps(
    ranks: Sequence[tuple[RankId, AgentMetadata, Stated | None]], *, own_engine_id: str, tp_size: int, dcp_size: int
) -> Steps[Geometry]:
    """What is known of an engine whose ranks said this, while a client said the sizes."""
    engines = {own_engine_id: 0}
    said = [_encoder.encode((tp_size, dcp_size))]
    placed: list[RankGeometry] = []
    for rank, metadata, stated in ranks:
        starts, ends, extents, offsets = _extents(metadata)
        placed.append(RankGeometry(rank=rank, starts=starts, ends=ends, device_id=metadata.device_id))
        without_addresses = msgspec.structs.replace(
            metadata,
            # Which ids are the same is all that is looked at.
            engine_id=str(engines.setdefault(metadata.engine_id, len(engines))),
            agent_metadata=b"",
            kv_caches_base_addr=offsets,
            device_id=0,
        )
        said.append(_encoder.encode((rank, without_addresses, extents, stated)))
        yield
    items = sum(len(metadata.kv_caches_base_addr) for _, metadata, _ in ranks)
    return Geometry(key=tuple(said), ranks=tuple(placed), items=items)


def _extents(metadata: AgentMetadata) -> tuple[tuple[int, ...], tuple[int, ...], list[int], list[int]]:
    """Starts and ends of the extents; of each region the number of its extent, and its offset in there."""
    addresses = metadata.kv_caches_base_addr
    counts = metadata.region_num_blocks or [metadata.num_blocks] * len(addresses)
    row_is_checked = metadata.kv_cache_layout.startswith("B")
    found: list[tuple[int, int]] = []
    extent_of = [0] * len(addresses)
    for index in sorted(range(len(addresses)), key=addresses.__getitem__):
        start, end = addresses[index], addresses[index] + counts[index] * metadata.block_strides[index]
        if found and (row_is_checked or start < found[-1][1]):
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
        extent_of[index] = len(found) - 1
    numbers: dict[int, int] = {}
    for extent in extent_of:
        numbers.setdefault(extent, len(numbers))
    in_turn = list(numbers)
    offsets = [address - found[extent][0] for address, extent in zip(addresses, extent_of, strict=True)]
    return (
        tuple(found[extent][0] for extent in in_turn),
        tuple(found[extent][1] for extent in in_turn),
        [numbers[extent] for extent in extent_of],
        offsets,
    )


class PlanCache:
    """The plans of one local rank, by geometry. The ones that were asked for last are kept, up to `items_max`."""

    def __init__(self, items_max: int = ITEMS_MAX) -> None:
        self._items_max = items_max
        self._items = 0
        # The one that was asked for last is last.
        self._kept: dict[tuple[bytes, ...], _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, wanted: Geometry) -> EnginePlan | None:
        """The plan for an engine, made from that for another one of its geometry."""
        kept = self._kept.pop(wanted.key, None)
        if kept is None:
            return None
        self._kept[wanted.key] = kept
        places = {place.rank: place for place in wanted.ranks}
        reads = tuple(
            msgspec.structs.replace(read, remote_runs=_placed(runs, places[read.remote_rank]))
            for read, runs in zip(kept.plan.reads, kept.runs, strict=True)
        )
        return msgspec.structs.replace(kept.plan, reads=reads)

    def keep(self, planned: Geometry, plan: EnginePlan) -> None:
        """`plan` was made for an engine of this geometry."""
        places = {place.rank: place for place in planned.ranks}
        runs = tuple(_without_addresses(read.remote_runs, places[read.remote_rank]) for read in plan.reads)
        items = planned.items + sum(map(len, runs))
        if items > self._items_max or planned.key in self._kept:
            return
        self._kept[planned.key] = _Kept(plan=plan, runs=runs, items=items)
        self._items += items
        while self._items > self._items_max:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._items -= oldest.items


def _placed(runs: Sequence[_Run], place: RankGeometry) -> tuple[MemoryRun, ...]:
    starts, device_id = place.starts, place.device_id
    return tuple(
        MemoryRun(
            starts[run.extent] + run.offset_bytes,
            run.length_bytes,
            run.stride_bytes,
            run.count,
            device_id,
            run.memory_kind,
        )
        for run in runs
    )


def _without_addresses(runs: Sequence[MemoryRun], place: RankGeometry) -> tuple[_Run, ...]:
    by_address = sorted((start, extent) for extent, start in enumerate(place.starts))
    found: list[_Run] = []
    for run in runs:
        start, extent = by_address[bisect_right(by_address, (run.address, len(by_address))) - 1]
        end = run.address + (run.count - 1) * run.stride_bytes + run.length_bytes
        assert start <= run.address < end <= place.ends[extent], f"{run} is not in one extent"
        offset_bytes = run.address - start
        found.append(_Run(extent, offset_bytes, run.length_bytes, run.stride_bytes, run.count, run.memory_kind))
    return tuple(found)
