"""What one rank says about its KV cache in the handshake.

`AgentMetadata` is the map that the built-in connector of the same version sends and expects: same keys, same types. Its
numbers become addresses that NIXL reads from, so `decode_agent_metadata` bounds all of them and checks that they fit
together. `describe` makes it from a `RankLayout`, which is what the rest of the code uses; the other way is that of
`peer_layout.understand`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from connector.layout.geometry import RankLayout, Region
from connector.wire.bounded import IDENTIFIER_PATTERN, DecodeFailed, decode_msgpack

REGIONS_MAX = 100_000
METADATA_BYTES_MAX = 48 << 20
AGENT_BYTES_MAX = 16 << 20
"""NIXL's own part grows with the registered ranges: 440 kB for 10,000."""

SHARED_GROUP = -1
"""Group id of a region in which several cache groups have their blocks."""

RING, REPLICATED = "ring", "replicated"
"""Components of layers whose blocks are one per request and alike on all ranks: ring buffers, and whole states."""

_ADDRESS_MAX = 2**63 - 1
_Name: TypeAlias = Annotated[str, Meta(max_length=512, pattern=IDENTIFIER_PATTERN)]
_Address: TypeAlias = Annotated[int, Meta(ge=1, le=_ADDRESS_MAX)]
_Length: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 40)]
_BlockCount: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Size: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
_Group: TypeAlias = Annotated[int, Meta(ge=-1, le=4096)]
_Offset: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40)]
_Members: TypeAlias = Annotated[list[_Name], Meta(max_length=REGIONS_MAX)]


class AgentMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The handshake map of one rank. Lists have one entry per region."""

    engine_id: _Name
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=AGENT_BYTES_MAX)]
    """NIXL's own part, for `add_remote_agent`."""
    kv_caches_base_addr: Annotated[list[_Address], Meta(min_length=1, max_length=REGIONS_MAX)]
    device_id: Annotated[int, Meta(ge=0, le=4096)]
    num_blocks: _BlockCount
    """Kernel blocks."""
    block_lens: list[_Length]
    """Bytes of one kernel block."""
    block_strides: list[_Length]
    """Bytes from one kernel block to the next."""
    kv_cache_layout: _Name
    block_size: _Size
    """Tokens of one kernel block."""
    ssm_sizes: tuple[_Offset, _Offset]
    attn_backend_name: _Name
    physical_blocks_per_logical_kv_block: _Size
    region_num_blocks: list[_BlockCount] | None = None
    region_group_ids: list[_Group] | None = None
    region_names: list[_Name] | None = None
    region_mem_types: list[_Name] | None = None
    dcp_size: _Size = 1
    pcp_size: _Size = 1
    ple_block_len: _Length | None = None
    region_members: Annotated[list[_Members], Meta(max_length=REGIONS_MAX)] = msgspec.field(default_factory=list)
    packed_member_layouts: Annotated[dict[_Name, tuple[_Offset, _Length]], Meta(max_length=REGIONS_MAX)] = (
        msgspec.field(default_factory=dict)
    )


_decoder = msgspec.msgpack.Decoder(AgentMetadata)
_encoder = msgspec.msgpack.Encoder()


def encode_agent_metadata(metadata: AgentMetadata) -> bytes:
    """Message pack bytes that the built-in connector decodes too."""
    return _encoder.encode(metadata)


def decode_agent_metadata(data_untrusted: bytes) -> AgentMetadata:
    """Read a peer's metadata. Raises DecodeFailed for anything that is malformed or does not fit together."""
    metadata = decode_msgpack(_decoder, data_untrusted, bytes_max=METADATA_BYTES_MAX)
    regions = len(metadata.kv_caches_base_addr)
    for field in ("block_lens", "block_strides", "region_num_blocks", "region_group_ids", "region_names"):
        _require_length(metadata, field, regions)
    _require_length(metadata, "region_mem_types", regions)
    if metadata.region_members:
        _require_length(metadata, "region_members", regions)
    block_counts = metadata.region_num_blocks or [metadata.num_blocks] * regions
    for address, length, stride, count in zip(
        metadata.kv_caches_base_addr, metadata.block_lens, metadata.block_strides, block_counts, strict=True
    ):
        if stride < length:
            raise DecodeFailed(f"block stride {stride} is less than block length {length}")
        if address + stride * (count - 1) + length > _ADDRESS_MAX:
            raise DecodeFailed(f"region at {address:#x} runs past the end of the address space")
    for kind in metadata.region_mem_types or ():
        if kind not in ("DRAM", "VRAM"):
            raise DecodeFailed("region_mem_types names an unknown kind of memory")
    return metadata


class AdvertisedRegion(msgspec.Struct, frozen=True, kw_only=True):
    """The regions of one address, of different cache groups, as the one region that peers are told about.

    Sizes are of kernel blocks also where a block is a state, which is not split.
    """

    members: tuple[Region, ...]
    name: str
    block_length_bytes: int
    block_stride_bytes: int
    num_blocks: int
    group: int

    @property
    def layers(self) -> list[str]:
        """The layers that have memory here, group by group."""
        return [layer for member in self.members for layer in layers_in_order(member)]


def layers_in_order(region: Region) -> list[str]:
    """The layers of a region in the order in which they lie in a block."""
    return list(dict.fromkeys(piece.layer for piece in sorted(region.pieces, key=lambda piece: piece.offset_bytes)))


def sizing_region(members: Sequence[Region]) -> Region:
    """Of regions at one address, that whose blocks' length is advertised."""
    # The built-in connector lets the last latent cache decide, and without any the first cache. Where one stands for
    # a layer within it, a whole row comes last, because the other layers that begin with the row are the first ones.
    latent = [region for region in members if any(piece.component == "latent" for piece in region.pieces)]
    rows = [region for region in latent if region.block_length_bytes == region.block_stride_bytes]
    return (rows or latent or members[:1])[-1]


def advertised_regions(layout: RankLayout) -> list[AdvertisedRegion]:
    """The regions as peers see them, in the order of `layout`."""
    by_address: dict[int, list[Region]] = {}
    for region in layout.regions:
        by_address.setdefault(region.base_address, []).append(region)
    return [_advertised(tuple(members), layout) for members in by_address.values()]


def kernel_blocks_per_state(region: Region, layout: RankLayout) -> int:
    """How many of the kernel blocks that are advertised make one block of `region`: 1 unless it holds states."""
    is_state = not layout.cache_groups[region.group].tokens_per_kernel_block
    return layout.kernel_blocks_per_block if is_state else 1


def _advertised(members: tuple[Region, ...], layout: RankLayout) -> AdvertisedRegion:
    sizes = sizing_region(members)
    parts = kernel_blocks_per_state(sizes, layout)
    groups = {region.group for region in members}
    return AdvertisedRegion(
        members=members,
        name=members[0].name,
        block_length_bytes=sizes.block_length_bytes // parts,
        block_stride_bytes=sizes.block_stride_bytes // parts,
        num_blocks=sizes.num_blocks * parts,
        group=groups.pop() if len(groups) == 1 else SHARED_GROUP,
    )


def ssm_sizes(layout: RankLayout) -> tuple[int, int]:
    """Bytes of the convolution's part and of the SSM's part of a state; zeros where no state is split over ranks."""
    for region in layout.regions:
        *_, last = region.pieces
        if last.component == "ssm":
            return last.offset_bytes, (last.stop - last.start) * last.bytes_per_unit
    return 0, 0


def replicated_block_length(layout: RankLayout) -> int | None:
    """Bytes of a block of the states that all ranks hold alike, as advertised; None where there are none."""
    for region in layout.regions:
        if region.pieces[0].component == REPLICATED:
            return region.block_length_bytes // kernel_blocks_per_state(region, layout)
    return None


def describe(layout: RankLayout, nixl_metadata: bytes) -> AgentMetadata:
    """The metadata that tells a peer about `layout`; `nixl_metadata` is the agent's own part."""
    regions = advertised_regions(layout)
    return AgentMetadata(
        engine_id=layout.engine_id,
        agent_metadata=nixl_metadata,
        kv_caches_base_addr=[region.members[0].base_address for region in regions],
        device_id=layout.device_id,
        num_blocks=min(region.num_blocks for region in regions),
        block_lens=[region.block_length_bytes for region in regions],
        block_strides=[region.block_stride_bytes for region in regions],
        kv_cache_layout=layout.layout_name,
        block_size=layout.kernel_block_size_tokens,
        ssm_sizes=ssm_sizes(layout),
        attn_backend_name=layout.attention_backend,
        physical_blocks_per_logical_kv_block=layout.kernel_blocks_per_block,
        region_num_blocks=[region.num_blocks for region in regions],
        region_group_ids=[region.group for region in regions],
        region_names=[region.name for region in regions],
        region_mem_types=[region.members[0].memory_kind for region in regions],
        dcp_size=layout.dcp_size,
        pcp_size=layout.pcp_size,
        ple_block_len=replicated_block_length(layout),
        region_members=[region.layers for region in regions],
        packed_member_layouts={},
    )


def _require_length(metadata: AgentMetadata, field: str, regions: int) -> None:
    values = getattr(metadata, field)
    if values is not None and len(values) != regions:
        raise DecodeFailed(f"{field} has {len(values)} entries for {regions} regions")
