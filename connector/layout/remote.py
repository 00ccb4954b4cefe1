"""What a peer's metadata means: from the handshake map to a `RankLayout` whose regions have pieces.

A peer says where its regions begin, how long their blocks are and perhaps which layers they hold, but not where in a
block a layer lies. That follows from what we know, because both engines run the same model with the same cache groups:

* if the peer names no layers, its region holds the layers of our region of the same name;
* what a rank holds of a layer follows from the layer's shape, the rank and the tensor parallel size;
* where that lies in a block follows from the name of the layout and the block size.

Where layers have unlike numbers of KV heads, two things do not follow: how many ranks hold the same head, if all that
we see of it is one head on each rank of ours; and the block sizes of the cache groups, which vLLM makes so that pages
come out alike, and pages do not shrink in proportion when ranks hold replicas. An engine of ours says both (`Stated`);
a built-in one has to have our tensor parallel size.

The advertised block lengths must then equal what this adds up to. If our blocks carry no padding, the peer's must not
either; if ours do (pages of unlike layers), the peer's padding may differ. A rank of a pipeline stage has some of the
layers; whether all ranks together have every layer is checked when the reads are planned.

With ring buffers, blocks hold pages of different sizes, and layers of several groups begin at one address. One length
is advertised for such a region, that of one of the pages; the others must fit into the stride. Which layers share a
region depends on the sizes of pages, so a peer of another tensor parallel size must name them.

All input is untrusted: what does not fit raises LayoutMismatch, and no piece lies outside of the peer's blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec

from connector.layout.advertised import (
    AdvertisedRegion,
    advertised_regions,
    kernel_blocks_per_state,
    layers_in_order,
    sizing_region,
)
from connector.layout.compatibility import (
    SAME_GROUPS,
    SAME_LAYOUT,
    SAME_MODEL,
    SAME_ROWS,
    SAME_STATES,
    has_ring_buffers,
    is_to_be_packed,
    require_same_form,
    require_same_sizes,
)
from connector.layout.geometry import CacheGroup, LayoutMismatch, Piece, RankId, RankLayout, Region
from connector.layout.local import LocalRank
from connector.layout.shapes import (
    ImpossibleShard,
    LayerShape,
    counted_by,
    moved,
    of_unit,
    page_strides,
    paged_pieces,
    shard,
    state_pieces,
    widened,
)
from connector.layout.steps import Steps, finish
from connector.ports.nixl import MemoryKind
from connector.wire.identity import KvIdentity
from connector.wire.metadata import SHARED_GROUP, AgentMetadata


class Stated(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine of ours says of a rank beyond its metadata; a built-in one says nothing. Untrusted.

    Attributes:
        heads: KV heads on that rank, by layer.
        groups: number of the cache group, by layer: that of its block table. Where groups share memory nothing else
            shows it.
        group_tokens: tokens of a kernel block, by cache group; 0 where a block is a state.
    """

    heads: Mapping[str, int]
    groups: Mapping[str, int]
    group_tokens: tuple[int, ...]


def stated_by(identity: KvIdentity) -> Stated:
    """What a peer's identity says of that."""
    heads = {name: layer.heads for name, layer in identity.layers.items() if layer.heads}
    groups = {name: layer.group for name, layer in identity.layers.items()}
    return Stated(heads=heads, groups=groups, group_tokens=identity.group_tokens)


def layout_from_metadata(
    metadata: AgentMetadata, *, rank: RankId, tp_size: int, local: LocalRank, stated: Stated | None = None
) -> RankLayout:
    """The layout of the rank that sent `metadata`, which is `rank` of an engine with `tp_size` ranks in each stage.

    Raises LayoutMismatch when it describes something other than what that rank of our model would have.
    """
    ours = own_regions(local.layout)
    return finish(layout_in_steps(metadata, rank=rank, tp_size=tp_size, local=local, ours=ours, stated=stated))


def layout_in_steps(
    metadata: AgentMetadata,
    *,
    rank: RankId,
    tp_size: int,
    local: LocalRank,
    ours: OwnRegions,
    stated: Stated | None,
) -> Steps[RankLayout]:
    """`layout_from_metadata`, with a pause wherever one is possible; `ours` are the regions of `local`."""
    layout = local.layout
    packs = not local.not_packed and is_to_be_packed(layout.attention_backend, metadata.attn_backend_name)
    of_peer = local.as_shaped if packs else local.shapes
    shapes = of_peer.values()
    factors = _head_factors(shapes, layout.tp_size, tp_size, stated)
    groups = _groups(layout, metadata, rank, shapes, stated)
    require_same_form(layout, metadata, groups, shapes, tp_size, local.not_packed)
    yield
    peer = _Peer(
        metadata=metadata,
        tp_rank=rank.tp_rank,
        tp_size=tp_size,
        groups=groups,
        shapes=of_peer,
        factors=factors,
        has_rings=has_ring_buffers(shapes),
    )
    try:
        regions = yield from _regions(ours, peer)
    except ImpossibleShard as error:
        raise LayoutMismatch("tp_size", layout.tp_size, tp_size, str(error)) from error
    theirs = RankLayout(
        engine_id=metadata.engine_id,
        pp_rank=rank.pp_rank,
        tp_rank=rank.tp_rank,
        tp_size=tp_size,
        dcp_size=metadata.dcp_size,
        pcp_size=metadata.pcp_size,
        regions=regions,
        kernel_block_size_tokens=metadata.block_size,
        kernel_blocks_per_block=metadata.physical_blocks_per_logical_kv_block,
        layout_name=metadata.kv_cache_layout,
        attention_backend=metadata.attn_backend_name,
        device_id=metadata.device_id,
        groups=groups,
        pages_in_rows=metadata.packed_member_layouts,
    )
    require_same_sizes(metadata, theirs)
    if stated is not None:
        _require_same_groups(groups, of_peer, stated)
    return theirs


def _require_same_groups(groups: tuple[CacheGroup, ...], shapes: Mapping[str, LayerShape], stated: Stated) -> None:
    """Refuse a peer with other groups, which it says last: a difference in sizes explains more."""
    if len(stated.group_tokens) != len(groups):
        raise LayoutMismatch("number of cache groups", len(groups), len(stated.group_tokens), SAME_GROUPS)
    for layer, shape in shapes.items():
        group = stated.groups.get(layer, shape.group)
        if group != shape.group:
            raise LayoutMismatch(f"cache group of {layer}", shape.group, group, SAME_GROUPS)


class _Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's metadata, and what is derived for it."""

    metadata: AgentMetadata
    tp_rank: int
    tp_size: int
    groups: tuple[CacheGroup, ...]
    shapes: Mapping[str, LayerShape]
    factors: Mapping[str, int]
    """How many units of a layer's shape are one of the peer's; 1 where nothing is said."""
    has_rings: bool

    def stated(self, field: str) -> list[object]:
        """A list that the format allows to be left out, and that we need."""
        values: list[object] | None = getattr(self.metadata, field)
        if values is None:
            raise LayoutMismatch(field, "required", "not sent", "run the same vLLM version on both engines")
        return values


def _head_factors(
    shapes: Iterable[LayerShape], our_tp_size: int, tp_size: int, stated: Stated | None
) -> dict[str, int]:
    """How many units of each layer of heads are one of the peer's, where they are more than one.

    That is so only where `units` counts our ranks, and the peer has fewer heads in all, or fewer ranks. Which of ours
    hold the same head follows then: replicas are neighbours.
    """
    of_heads = [shape for shape in shapes if shape.holds_heads]
    if stated is None:
        numbers = {shape.components[0].units for shape in of_heads}
        if our_tp_size != tp_size and (len(numbers) > 1 or any(shape.heads_unknown for shape in of_heads)):
            advice = (
                "its layers have unlike numbers of KV heads, of which that engine says nothing: start both with the "
                "same tensor parallel size, or that one with this connector"
            )
            raise LayoutMismatch("tp_size", our_tp_size, tp_size, advice)
        return {}
    factors: dict[str, int] = {}
    for shape in of_heads:
        heads = stated.heads.get(shape.name)
        if heads is None:
            continue  # another stage has it, or it is missing, which is found out where regions are compared
        units = shape.components[0].units
        expected = max(1, units // tp_size)
        if shape.heads_unknown and units > heads * tp_size:
            factor, rest = divmod(units, heads * tp_size)
            if rest:
                raise LayoutMismatch("tp_size", our_tp_size, tp_size, f"{shape.name} cannot be split over both")
            factors[shape.name] = factor
        elif heads != expected and not shape.heads_unknown:
            field = f"KV heads of {shape.name} on each of {tp_size} ranks"
            raise LayoutMismatch(field, expected, heads, SAME_MODEL)
    return factors


def _groups(
    ours: RankLayout,
    metadata: AgentMetadata,
    rank: RankId,
    shapes: Iterable[LayerShape],
    stated: Stated | None,
) -> tuple[CacheGroup, ...]:
    """The peer's cache groups. If it states one block size for all, and ours differ, its own differ in proportion."""
    if stated is not None and len(stated.group_tokens) != len(ours.cache_groups):
        stated = None  # refused in the end, if nothing says better why
    sharded = {shape.group for shape in shapes if shape.dcp_sharded}
    groups: list[CacheGroup] = []
    for index, group in enumerate(ours.cache_groups):
        if not group.tokens_per_kernel_block:
            groups.append(group)
            continue
        if stated is not None:
            tokens = stated.group_tokens[index]
            if not tokens:
                raise LayoutMismatch(f"cache group {index}", "blocks of tokens", "states", SAME_GROUPS)
        else:
            tokens, rest = divmod(metadata.block_size * group.tokens_per_kernel_block, ours.kernel_block_size_tokens)
            if rest:
                advice = "use block sizes of which one divides the other"
                raise LayoutMismatch(
                    f"block size of cache group {index}",
                    f"{group.tokens_per_kernel_block} with {ours.kernel_block_size_tokens} in all",
                    f"unknown with {metadata.block_size} in all",
                    advice,
                )
        dcp_size = metadata.dcp_size if index in sharded else 1
        groups.append(
            CacheGroup(
                tokens_per_kernel_block=tokens,
                kernel_blocks_per_block=metadata.physical_blocks_per_logical_kv_block,
                dcp_size=dcp_size,
                dcp_rank=rank.tp_rank % dcp_size,
            )
        )
    return tuple(groups)


class OwnRegions(msgspec.Struct, frozen=True, kw_only=True):
    """Our own layout, indexed by what a peer's is compared with."""

    layout: RankLayout
    held: Mapping[str, Region]
    """By layer."""
    advertised: Mapping[int, AdvertisedRegion]
    """By address."""


def own_regions(layout: RankLayout) -> OwnRegions:
    """The same for all peers."""
    return OwnRegions(
        layout=layout,
        held={piece.layer: region for region in layout.regions for piece in region.pieces},
        advertised={region.members[0].base_address: region for region in advertised_regions(layout)},
    )


def _regions(ours: OwnRegions, peer: _Peer) -> Steps[tuple[Region, ...]]:
    names = [cast(str, name) for name in peer.stated("region_names")]
    in_region = {region.name: region for region in ours.advertised.values()}
    total = Counter(names)
    parts: Counter[str] = Counter()
    owners: dict[str, str] = {}
    regions: list[Region] = []
    for index, name in enumerate(names):
        members = peer.metadata.region_members[index] if peer.metadata.region_members else None
        if members is None:
            # The same layers share memory with the layer of that name on both sides.
            members = in_region[name].layers if name in in_region else [name]
        for layer in (name, *members):
            if layer not in ours.held or not members:
                raise LayoutMismatch(f"KV cache region {layer}", "absent", "present", SAME_LAYOUT)
            if owners.setdefault(layer, name) != name:
                # Pieces of both would be taken for replicas of each other.
                raise LayoutMismatch(f"KV cache region of {layer}", owners[layer], name, SAME_LAYOUT)
        regions.extend(_region(ours, peer, index, members, parts[name], total[name]))
        parts[name] += 1
        yield
    return tuple(regions)


def _region(ours: OwnRegions, peer: _Peer, index: int, members: Sequence[str], part: int, parts: int) -> list[Region]:
    """Region `index` of the peer, once for each cache group in it; it is number `part` of the `parts` of its name."""
    metadata = peer.metadata
    by_group: dict[int, list[str]] = {}
    for layer in members:
        by_group.setdefault(ours.held[layer].group, []).append(layer)
    expected_group = next(iter(by_group)) if len(by_group) == 1 else SHARED_GROUP
    group = peer.stated("region_group_ids")[index]
    if group != expected_group:
        raise LayoutMismatch(f"cache group of {members[0]}", expected_group, group, SAME_GROUPS)
    sizing = sizing_region([ours.held[layer] for layer in members])
    regions: list[Region] = []
    for layers in by_group.values():
        known = ours.held[layers[0]]
        alike = all(peer.shapes[layer].whole_blocks and _is_held_alike(peer.shapes[layer]) for layer in layers)
        if alike and not peer.has_rings:
            _require_parts(layers[0], 1, parts)
            advertised = ours.advertised[known.base_address]
            if layers[0] in ours.layout.pages_in_rows and not metadata.packed_member_layouts:
                known = _page_of_row(ours.layout, known, layers[0])
                advertised = msgspec.structs.replace(advertised, block_length_bytes=known.block_length_bytes)
            regions.append(_like_ours(ours.layout, known, advertised, layers, peer, index))
            continue
        is_state = peer.shapes[layers[0]].is_state
        # Peers count and measure states in kernel blocks too.
        ratio = metadata.physical_blocks_per_logical_kv_block if is_state else 1
        if is_state:
            pieces = _state(peer, layers, parts)
        else:
            pitch_bytes = _pitch_bytes(known, len(layers), metadata.block_lens[index])
            pieces = _pages(peer, layers, pitch_bytes, part, parts)
        region = Region(
            name=layers[0],
            base_address=metadata.kv_caches_base_addr[index],
            block_length_bytes=metadata.block_lens[index] * ratio,
            block_stride_bytes=metadata.block_strides[index] * ratio,
            num_blocks=cast(int, peer.stated("region_num_blocks")[index]) // ratio,
            memory_kind=cast(MemoryKind, peer.stated("region_mem_types")[index]),
            group=known.group,
            pieces=pieces,
        )
        regions.append(_checked(ours.layout, sizing, known, region, peer))
    return regions


def _state(peer: _Peer, layers: Sequence[str], parts: int) -> tuple[Piece, ...]:
    """Pieces of the state of a layer, which has its blocks to itself in any layout."""
    _require_parts(layers[0], 1, parts)
    return state_pieces(peer.shapes[layers[0]], tp_rank=peer.tp_rank, tp_size=peer.tp_size)


def _is_held_alike(shape: LayerShape) -> bool:
    """By all ranks of all engines."""
    return [component.units for component in shape.components] == [1]


def _page_of_row(ours: RankLayout, row: Region, layer: str) -> Region:
    """The page of a layer as a region of its own, which it is in a pipeline stage."""
    offset_bytes, length_bytes = ours.pages_in_rows[layer]
    pieces = [piece for piece in row.pieces if piece.layer == layer]
    return msgspec.structs.replace(
        row, name=layer, block_length_bytes=length_bytes, pieces=tuple(moved(pieces, -offset_bytes))
    )


def _like_ours(
    ours: RankLayout, known: Region, advertised: AdvertisedRegion, layers: Sequence[str], peer: _Peer, index: int
) -> Region:
    """A region of the peer's whose blocks are of the size of ours, and have to hold everything where ours hold it.
    `advertised`: as peers see `known`."""
    metadata = peer.metadata
    length_bytes, stride_bytes = metadata.block_lens[index], metadata.block_strides[index]
    # Where the length is that of other blocks at this address, the stride says how long these are.
    expected_stride = stride_bytes if known.block_length_bytes == length_bytes else advertised.block_stride_bytes
    for field, here, there in (
        (f"layers that share blocks with {known.name}", layers_in_order(known), list(layers)),
        ("kv_cache_layout", ours.layout_name, metadata.kv_cache_layout),
        (f"block length of {known.name}", advertised.block_length_bytes, length_bytes),
        (f"block stride of {known.name}", expected_stride, stride_bytes),
    ):
        if here != there:
            raise LayoutMismatch(field, here, there, SAME_ROWS)
    return msgspec.structs.replace(
        known,
        base_address=metadata.kv_caches_base_addr[index],
        block_stride_bytes=stride_bytes,
        num_blocks=cast(int, peer.stated("region_num_blocks")[index]),
        memory_kind=cast(MemoryKind, peer.stated("region_mem_types")[index]),
    )


def _pitch_bytes(known: Region, count: int, length_bytes: int) -> int | None:
    """How far apart `count` layers are in a block of the peer's; None: as far as their pages are long.

    Where pages of one size, padded perhaps, fill our block `known`, they fill the peer's.
    """
    layers = layers_in_order(known)
    starts = [min(piece.offset_bytes for piece in known.pieces if piece.layer == layer) for layer in layers]
    pitch_bytes, rest = divmod(known.block_length_bytes, len(layers))
    if rest or starts != [pitch_bytes * index for index in range(len(layers))]:
        return None
    return length_bytes // count


def _pages(peer: _Peer, layers: Sequence[str], pitch_bytes: int | None, part: int, parts: int) -> tuple[Piece, ...]:
    """Pieces of the pages of `layers`, which lie in one block in this order."""
    metadata = peer.metadata
    pieces: list[Piece] = []
    offset_bytes = 0
    for layer in layers:
        shape = peer.shapes[layer]
        factor = peer.factors.get(layer, 1)
        if factor > 1:
            shape = counted_by(shape, factor)
        start, stop = shard(shape.components[0].units, peer.tp_rank, peer.tp_size)
        try:
            strides = page_strides(
                metadata.kv_cache_layout,
                layers=len(layers),
                blocks=metadata.num_blocks,
                heads=stop - start,
                tokens=peer.groups[shape.group].tokens_per_kernel_block // shape.tokens_per_entry,
                bytes_per_token=sum(component.bytes_per_unit for component in shape.components),
            )
            heads_are_apart = stop - start > 1 and strides.head >= strides.block
            strides = msgspec.structs.replace(strides, head=strides.head if stop - start > 1 else 0)
            of_layer = paged_pieces(shape, tp_rank=peer.tp_rank, tp_size=peer.tp_size, strides=strides)
        except ValueError as error:
            raise LayoutMismatch("kv_cache_layout", "a known one", metadata.kv_cache_layout, str(error)) from error
        _require_parts(layer, stop - start if heads_are_apart else 1, parts)
        if in_row := metadata.packed_member_layouts.get(layer):
            offset_bytes = in_row[0]  # pages in a row may be padded, each to its own size
        of_layer = of_unit(of_layer, start + part) if heads_are_apart else of_layer
        pieces.extend(moved(widened(of_layer, factor), offset_bytes))
        offset_bytes += strides.layer if pitch_bytes is None else pitch_bytes
    return tuple(pieces)


def _require_parts(layer: str, expected: int, parts: int) -> None:
    if parts != expected:
        raise LayoutMismatch(f"number of KV cache regions of {layer}", expected, parts, SAME_LAYOUT)


def _checked(ours: RankLayout, sizing: Region, known: Region, region: Region, peer: _Peer) -> Region:
    """The peer's region, if its blocks are what they should be; it advertises the length of those like `sizing`."""
    content_bytes = _content_bytes(region, peer.groups)
    length_bytes = region.block_length_bytes
    lengths = {each.block_length_bytes // kernel_blocks_per_state(each, ours) for each in (sizing, known)}
    if len(lengths) > 1:
        # The advertised length is that of another cache group's blocks at this address; the stride bounds this one's.
        length_bytes = region.block_stride_bytes
        fits, expected = content_bytes <= length_bytes, f"at least {content_bytes}"
        if peer.has_rings:
            padding_bytes = known.block_length_bytes - _content_bytes(known, ours.cache_groups)
            block_length_bytes = min(content_bytes + padding_bytes, length_bytes)
            region = msgspec.structs.replace(region, block_length_bytes=block_length_bytes)
    elif known.block_length_bytes == _content_bytes(known, ours.cache_groups):
        fits, expected = content_bytes == length_bytes, str(content_bytes)
    else:
        fits, expected = content_bytes <= length_bytes, f"at least {content_bytes}"
    if not fits:
        ranks = f"rank {peer.tp_rank} of {peer.tp_size}"
        advice = SAME_MODEL if peer.groups[region.group].tokens_per_kernel_block else SAME_STATES
        raise LayoutMismatch(f"block length of {region.name} on {ranks}", expected, length_bytes, advice)
    return region


def _content_bytes(region: Region, groups: Sequence[CacheGroup]) -> int:
    """Bytes of a block up to the end of its last piece."""
    positions = groups[region.group].positions_per_kernel_block
    return max(
        piece.offset_bytes
        + (piece.stop - piece.start - 1) * piece.unit_stride_bytes
        + (positions // piece.tokens_per_entry - 1) * piece.token_stride_bytes
        + (piece.lanes - 1) * piece.lane_stride_bytes
        + piece.bytes_per_lane
        for piece in region.pieces
    )
