"""What one rank says about its KV cache in the handshake.

`AgentMetadata` is the map that the built-in connector of the same version sends and expects: same keys, same types. Its
numbers become addresses that NIXL reads from, so `decode_agent_metadata` bounds all of them and checks that they fit
together. What they mean belongs to layout: `advertised` makes the map from a `RankLayout`, `remote` reads it.

Any process that answers at the address in a request may have sent it, and decoding keeps the interpreter from the
engine. So it is bounded by what an engine has, and not only by the size of what came.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from connector.wire.bounded import (
    ID_LENGTH_MAX,
    IDENTIFIER_PATTERN,
    NUMBER_MAX,
    DecodeFailed,
    Fields,
    Identifier,
    announced_length,
    decode_msgpack,
    require_beside,
)

REGIONS_MAX = 4096
"""A rank has at most so many regions, one for each tensor of each layer. The largest models have some hundred layers
and a few tensors in each."""
MEMBERS_MAX = 4 * REGIONS_MAX
"""Layers that all regions of one rank name together. One may have memory in several."""
AGENT_BYTES_MAX = 8 << 20
"""NIXL's own part grows with the registered ranges, by 44 bytes each over TCP, and with the network cards."""
FACTS_BYTES_MAX = 4 << 20
"""All the rest: a kilobyte for each region."""
METADATA_BYTES_MAX = AGENT_BYTES_MAX + FACTS_BYTES_MAX

SHARED_GROUP = -1
"""Group id of a region in which several cache groups have their blocks."""

_PER_REGION = Meta(max_length=REGIONS_MAX)
# Of a long list: which characters there are is looked at once for all, for a pattern costs more than making the text.
_NameInList: TypeAlias = Annotated[str, Meta(min_length=1, max_length=ID_LENGTH_MAX)]
_is_identifier = re.compile(IDENTIFIER_PATTERN).match
_Address: TypeAlias = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
_Length: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 40)]
_BlockCount: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Size: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
_Group: TypeAlias = Annotated[int, Meta(ge=-1, le=4096)]
_Offset: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40)]
_Lengths: TypeAlias = Annotated[list[_Length], _PER_REGION]
_Members: TypeAlias = Annotated[list[_NameInList], Meta(max_length=MEMBERS_MAX)]


class AgentMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The handshake map of one rank. Lists have one entry per region."""

    engine_id: Identifier
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=AGENT_BYTES_MAX)]
    """NIXL's own part, for `add_remote_agent`."""
    kv_caches_base_addr: Annotated[list[_Address], Meta(min_length=1, max_length=REGIONS_MAX)]
    device_id: Annotated[int, Meta(ge=0, le=4096)]
    num_blocks: _BlockCount
    """Kernel blocks."""
    block_lens: _Lengths
    """Bytes of one kernel block."""
    block_strides: _Lengths
    """Bytes from one kernel block to the next."""
    kv_cache_layout: Identifier
    block_size: _Size
    """Tokens of one kernel block."""
    ssm_sizes: tuple[_Offset, _Offset]
    attn_backend_name: Identifier
    physical_blocks_per_logical_kv_block: _Size
    region_num_blocks: Annotated[list[_BlockCount], _PER_REGION] | None = None
    region_group_ids: Annotated[list[_Group], _PER_REGION] | None = None
    region_names: Annotated[list[_NameInList], _PER_REGION] | None = None
    region_mem_types: Annotated[list[Literal["DRAM", "VRAM"]], _PER_REGION] | None = None
    dcp_size: _Size = 1
    pcp_size: _Size = 1
    ple_block_len: _Length | None = None
    region_members: Annotated[list[_Members], _PER_REGION] = msgspec.field(default_factory=list)
    """MEMBERS_MAX in all."""
    packed_member_layouts: Annotated[dict[Identifier, tuple[_Offset, _Length]], _PER_REGION] = msgspec.field(
        default_factory=dict
    )


_decoder = msgspec.msgpack.Decoder(AgentMetadata)
_members_decoder = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], _PER_REGION])
_encoder = msgspec.msgpack.Encoder()


def encode_agent_metadata(metadata: AgentMetadata) -> bytes:
    """Message pack bytes that the built-in connector decodes too."""
    return _encoder.encode(metadata)


def decode_agent_metadata(data_untrusted: bytes) -> AgentMetadata:
    """Read a peer's metadata. Raises DecodeFailed for anything that is malformed or does not fit together."""
    look = partial(_require_bounded, len(data_untrusted))
    metadata = decode_msgpack(_decoder, data_untrusted, bytes_max=METADATA_BYTES_MAX, look=look)
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
        if address + stride * (count - 1) + length > NUMBER_MAX:
            raise DecodeFailed(f"region at {address:#x} runs past the end of the address space")
    _require_names("region_names", metadata.region_names or ())
    for members in metadata.region_members:
        _require_names("region_members", members)
    return metadata


def _require_bounded(bytes_all: int, fields: Fields) -> None:
    require_beside("agent_metadata", fields, bytes_all, FACTS_BYTES_MAX)
    if "region_members" in fields:
        regions = _members_decoder.decode(fields["region_members"])
        members = sum(announced_length(memoryview(region)) for region in regions)
        if members > MEMBERS_MAX:
            raise DecodeFailed(f"region_members has {members} names, the limit is {MEMBERS_MAX}")


def _require_names(field: str, names: Iterable[str]) -> None:
    together = "".join(names)
    if together and _is_identifier(together) is None:
        raise DecodeFailed(f"{field} has a name with control characters")


def _require_length(metadata: AgentMetadata, field: str, regions: int) -> None:
    values = getattr(metadata, field)
    if values is not None and len(values) != regions:
        raise DecodeFailed(f"{field} has {len(values)} entries for {regions} regions")
