"""What a rank of ours says in a handshake, for tests without a scheduler process."""

from __future__ import annotations

import msgspec

from connector.layout.advertised import describe
from connector.layout.geometry import RankLayout
from connector.wire.device_allocations import DeviceAllocations
from connector.wire.handshake import ActorExtension, encode_payload
from connector.wire.identity import KvIdentity
from connector.wire.metadata import encode_agent_metadata

NO_IDENTITY = KvIdentity(factors={}, layers={}, group_tokens=())
"""An identity from which no other differs, where a test compares none."""

LEAVE_SECRET = b"of the same rank"
"""In `wire.administration.Leave`, where a test needs no other."""


def facts(
    *,
    life: str = "0123456789abcdef" * 2,
    tp_size: int = 1,
    dcp_size: int = 1,
    pp_size: int = 1,
    tp_rank: int = 0,
    pp_rank: int = 0,
    control_host: str = "10.0.0.1",
    control_port: int = 40_000,
    control_key: str | None = None,
    identity: KvIdentity = NO_IDENTITY,
    verify: str = "off",
    device_allocations: DeviceAllocations | None = None,
) -> ActorExtension:
    """What the only rank of an engine says, unless told otherwise."""
    return ActorExtension(
        life=life,
        tp_size=tp_size,
        dcp_size=dcp_size,
        pp_size=pp_size,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        control_host=control_host,
        control_port=control_port,
        control_key=control_key,
        identity=identity,
        verify=verify,
        device_allocations=device_allocations,
    )


def payload_of(
    layout: RankLayout,
    agent_metadata: bytes,
    *,
    compatibility_hash: str,
    life: str,
    control_host: str,
    control_port: int,
    stages: int = 1,
    control_key: str | None = None,
    identity: KvIdentity = NO_IDENTITY,
    verify: str = "off",
    device_allocations: DeviceAllocations | None = None,
) -> bytes:
    """What the listener answers for the rank; `agent_metadata` is NIXL's, `stages` those of its engine. The identity
    is told with the cache groups of `layout`."""
    group_tokens = tuple(group.tokens_per_kernel_block for group in layout.cache_groups)
    extension = facts(
        life=life,
        tp_size=layout.tp_size,
        dcp_size=layout.dcp_size,
        pp_size=stages,
        tp_rank=layout.tp_rank,
        pp_rank=layout.pp_rank,
        control_host=control_host,
        control_port=control_port,
        control_key=control_key,
        identity=msgspec.structs.replace(identity, group_tokens=group_tokens),
        verify=verify,
        device_allocations=device_allocations,
    )
    return encode_payload(compatibility_hash, encode_agent_metadata(describe(layout, agent_metadata)), extension)
