"""What one rank says about its KV cache in the handshake.

`AgentMetadata` is the map that the built-in connector of the same version sends and expects: same keys, same types. Its
numbers become addresses that NIXL reads from, so `decode_agent_metadata` bounds all of them and checks that they fit
together. `describe` and `understand` turn it from and into a `RankLayout`, which is what the rest of the code uses.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, cast

import msgspec
from msgspec import Meta

from connector.layout.geometry import LayoutMismatch, MemoryKind, RankLayout, Region
from connector.layout.shapes import page_strides, paged_pieces
from connector.wire.bounded import IDENTIFIER_PATTERN, DecodeFailed, decode_msgpack

REGIONS_MAX = 100_000
METADATA_BYTES_MAX = 48 << 20
AGENT_BYTES_MAX = 16 << 20
"""NIXL's own part grows with the registered ranges: 440 kB for 10,000."""

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


def describe(layout: RankLayout, nixl_metadata: bytes) -> AgentMetadata:
    """The metadata that tells a peer about `layout`; `nixl_metadata` is the agent's own part."""
    regions = layout.regions
    return AgentMetadata(
        engine_id=layout.engine_id,
        agent_metadata=nixl_metadata,
        kv_caches_base_addr=[region.base_address for region in regions],
        device_id=layout.device_id,
        num_blocks=min(region.num_blocks for region in regions),
        block_lens=[region.block_length_bytes for region in regions],
        block_strides=[region.block_stride_bytes for region in regions],
        kv_cache_layout=layout.layout_name,
        block_size=layout.kernel_block_size_tokens,
        ssm_sizes=(0, 0),
        attn_backend_name=layout.attention_backend,
        physical_blocks_per_logical_kv_block=layout.kernel_blocks_per_block,
        region_num_blocks=[region.num_blocks for region in regions],
        region_group_ids=[region.group for region in regions],
        region_names=[region.name for region in regions],
        region_mem_types=[region.memory_kind for region in regions],
        dcp_size=layout.dcp_size,
        pcp_size=layout.pcp_size,
        region_members=[],
        packed_member_layouts={},
    )


def understand(metadata: AgentMetadata, *, tp_rank: int, tp_size: int, local: object) -> RankLayout:
    """The layout of the rank that sent `metadata`, which is `tp_rank` of `tp_size`.

    Raises LayoutMismatch when it describes something other than full attention, or leaves out what we need to know.
    """
    for field, plain in (("ssm_sizes", (0, 0)), ("packed_member_layouts", {}), ("ple_block_len", None)):
        found = getattr(metadata, field)
        if found != plain:
            raise LayoutMismatch(field, plain, found, "only full-attention models are supported")
    names, kinds, counts, groups = (
        _stated(metadata, field)
        for field in ("region_names", "region_mem_types", "region_num_blocks", "region_group_ids")
    )
    regions = tuple(
        Region(
            name=cast(str, name),
            base_address=address,
            block_length_bytes=length,
            block_stride_bytes=stride,
            num_blocks=cast(int, count),
            memory_kind=cast(MemoryKind, kind),
            group=cast(int, group),
            pieces=paged_pieces(
                local.shapes[cast(str, name)],
                tp_rank=tp_rank,
                tp_size=tp_size,
                strides=page_strides(
                    metadata.kv_cache_layout,
                    layers=1,
                    blocks=cast(int, count),
                    heads=max(1, local.shapes[cast(str, name)].components[0].units // tp_size),
                    tokens=metadata.block_size,
                    bytes_per_token=sum(c.bytes_per_unit for c in local.shapes[cast(str, name)].components),
                ),
            ),
        )
        for name, address, length, stride, count, kind, group in zip(
            names,
            metadata.kv_caches_base_addr,
            metadata.block_lens,
            metadata.block_strides,
            counts,
            kinds,
            groups,
            strict=True,
        )
    )
    return RankLayout(
        engine_id=metadata.engine_id,
        tp_rank=tp_rank,
        tp_size=tp_size,
        dcp_size=metadata.dcp_size,
        pcp_size=metadata.pcp_size,
        regions=regions,
        kernel_block_size_tokens=metadata.block_size,
        kernel_blocks_per_block=metadata.physical_blocks_per_logical_kv_block,
        layout_name=metadata.kv_cache_layout,
        attention_backend=metadata.attn_backend_name,
        device_id=metadata.device_id,
    )


def _stated(metadata: AgentMetadata, field: str) -> list[object]:
    """A list that old versions may leave out, and that we cannot do without."""
    values: list[object] | None = getattr(metadata, field)
    if values is None:
        raise LayoutMismatch(field, "required", "not sent", "run the same vLLM version on both engines")
    return values


def _require_length(metadata: AgentMetadata, field: str, regions: int) -> None:
    values = getattr(metadata, field)
    if values is not None and len(values) != regions:
        raise DecodeFailed(f"{field} has {len(values)} entries for {regions} regions")
