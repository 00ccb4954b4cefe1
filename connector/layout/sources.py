"""Which remote ranks are a rank's partners, and what it reads from which of them.

Ranks of two engines are partners when the parts of the model that they stand for overlap: rank r of n stands for r / n
to (r + 1) / n. Whatever the two sizes are, some partner holds every head, channel or replica that a rank needs. A rank
handshakes with all its partners, reads from as few of them as hold what it needs, and releases the blocks on every one,
because a remote rank keeps its blocks until all its partners have released them. So a replica that nobody reads is
released too, and no rank is read that does not wait for its reader.

Where an engine splits the tokens of each block table entry over its ranks (decode context parallel), a rank's partners
are those that hold tokens of its own. Pipeline stages hold layers of their own: a rank has its partners in every stage.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import msgspec

from connector.layout.geometry import LayoutMismatch, Piece, RankId, RankLayout, Region
from connector.layout.steps import Steps


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Units `start` to `stop` of a local piece come from `remote_piece` of remote rank `remote_rank`."""

    local_region: int
    local_piece: Piece
    remote_rank: RankId
    remote_region: int
    remote_piece: Piece
    start: int
    stop: int


def partners(tp_rank: int, tp_size: int, other_tp_size: int, dcp_size: int = 1, other_dcp_size: int = 1) -> range:
    """The partners of rank `tp_rank` of `tp_size` in an engine of `other_tp_size` ranks, in each stage.

    A `dcp_size` is 1 or the `tp_size`, and one of the two divides the other.
    """
    if other_dcp_size > 1:
        step = min(dcp_size, other_dcp_size)
        return range(tp_rank % step, other_tp_size if step == dcp_size else tp_rank % step + 1, step)
    return range(tp_rank * other_tp_size // tp_size, -(-(tp_rank + 1) * other_tp_size // tp_size))


def consumers(remote: RankLayout, local: RankLayout) -> int:
    """How many ranks of `local`'s engine are partners of the rank `remote`."""
    sizes = (local.tp_size, remote.tp_size, local.dcp_size, remote.dcp_size)
    return sum(remote.tp_rank in partners(tp_rank, *sizes) for tp_rank in range(local.tp_size))


def find_sources(local: RankLayout, remotes: Mapping[RankId, RankLayout]) -> Steps[list[Source]]:
    """Where every piece of `local` comes from. `remotes`: layouts by rank.

    Where several ranks hold the same, one is taken, a different one for different engines and ranks, so that many
    readers spread over the replicas. Raises LayoutMismatch when a piece is not held, not wholly, or not in that form.
    """
    holders: dict[tuple[str, str], list[_Holder]] = {}
    for remote in _by_preference(local, remotes):
        for key, of_rank in _holders([remote]).items():
            holders.setdefault(key, []).extend(of_rank)
        yield
    sources: list[Source] = []
    for index, region in enumerate(local.regions):
        for piece in region.pieces:
            of_piece = holders.get((piece.layer, piece.component), ())
            # Each part of the tokens is held by other ranks, and has to be covered by itself.
            for part in sorted({holder.dcp_rank for holder in of_piece}) or (0,):
                of_part = [holder for holder in of_piece if holder.dcp_rank == part]
                sources.extend(_cover(index, region, piece, of_part))
        yield
    return sources


def _by_preference(local: RankLayout, remotes: Mapping[RankId, RankLayout]) -> list[RankLayout]:
    ranks = sorted(remotes)
    # A hash of the name that is the same in every process, so that a restart chooses the same.
    turn = (zlib.crc32(local.engine_id.encode()) + local.tp_rank) % len(ranks)
    return [remotes[rank] for rank in ranks[turn:] + ranks[:turn]]


class _Holder(msgspec.Struct, frozen=True):
    rank: RankId
    dcp_rank: int
    region_index: int
    region: Region
    piece: Piece


def _holders(remotes: Sequence[RankLayout]) -> dict[tuple[str, str], list[_Holder]]:
    """Who holds units of a component of a layer, in the order of preference."""
    found: dict[tuple[str, str], list[_Holder]] = {}
    for layout in remotes:
        for index, region in enumerate(layout.regions):
            for piece in region.pieces:
                dcp_rank = layout.cache_groups[region.group].dcp_rank
                holder = _Holder(layout.rank, dcp_rank, index, region, piece)
                found.setdefault((piece.layer, piece.component), []).append(holder)
    return found


def _cover(index: int, region: Region, piece: Piece, holders: Sequence[_Holder]) -> list[Source]:
    """Take each unit of `piece` from the first holder that has it."""
    wanted = [(piece.start, piece.stop)]
    sources: list[Source] = []
    for holder in holders:
        still_wanted: list[tuple[int, int]] = []
        for start, stop in wanted:
            low, high = max(start, holder.piece.start), min(stop, holder.piece.stop)
            if low >= high:
                still_wanted.append((start, stop))
                continue
            _require_same_form(region, piece, holder)
            sources.append(
                Source(
                    local_region=index,
                    local_piece=piece,
                    remote_rank=holder.rank,
                    remote_region=holder.region_index,
                    remote_piece=holder.piece,
                    start=low,
                    stop=high,
                )
            )
            still_wanted.extend(part for part in ((start, low), (high, stop)) if part[0] < part[1])
        wanted = still_wanted
    if wanted:
        missing = " and ".join(f"{start} to {stop}" for start, stop in wanted)
        there = [f"{holder.piece.start} to {holder.piece.stop} on rank {holder.rank.tp_rank}" for holder in holders]
        raise LayoutMismatch(
            f"{piece.component} of {piece.layer}",
            f"units {piece.start} to {piece.stop}, with {missing} missing",
            ", ".join(there) or "absent",
            "start both engines with the same model, and with tensor parallel sizes that divide its KV heads",
        )
    return sources


def _require_same_form(region: Region, piece: Piece, holder: _Holder) -> None:
    theirs = holder.piece
    for field, here, there in (
        ("bytes", piece.bytes_per_unit, theirs.bytes_per_unit),
        ("lanes", piece.lanes, theirs.lanes),
        ("tokens", piece.tokens_per_entry, theirs.tokens_per_entry),
    ):
        if here != there:
            advice = "start both engines with the same model, attention back end and --kv-cache-dtype"
            raise LayoutMismatch(f"{field} of one unit of {piece.component} of {piece.layer}", here, there, advice)
    if region.group != holder.region.group:
        advice = "start both engines with the same model, and the hybrid KV cache manager on or off on both"
        raise LayoutMismatch(f"cache group of {piece.layer}", region.group, holder.region.group, advice)
