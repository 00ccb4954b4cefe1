"""What one rank says about its KV cache in the handshake.

`AgentMetadata` is the map that the built-in connector of the same version sends and expects: same keys, same types. Its
numbers become addresses that NIXL reads from, so `decode_agent_metadata` bounds all of them and checks that they fit
together. What they mean belongs to layout: `advertised` makes the map from a `RankLayout`, `remote` reads it.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from connector.wire.bounded import IDENTIFIER_PATTERN, DecodeFailed, decode_msgpack

REGIONS_MAX = 100_000
METADATA_BYTES_MAX = 48 << 20
AGENT_BYTES_MAX = 16 << 20
"""NIXL's own part grows with the registered ranges: 440 kB for 10,000."""

SHARED_GROUP = -1
"""Group id of a region in which several cache groups have their blocks."""

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


def _require_length(metadata: AgentMetadata, field: str, regions: int) -> None:
    values = getattr(metadata, field)
    if values is not None and len(values) != regions:
        raise DecodeFailed(f"{field} has {len(values)} entries for {regions} regions")
