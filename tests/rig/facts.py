"""What a rank of ours adds to its handshake, for tests without a scheduler process."""

from __future__ import annotations

from connector.wire.handshake import ActorExtension


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
) -> ActorExtension:
    """Of the only rank of its engine, unless told otherwise."""
    return ActorExtension(
        life=life,
        tp_size=tp_size,
        dcp_size=dcp_size,
        pp_size=pp_size,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        control_host=control_host,
        control_port=control_port,
    )
