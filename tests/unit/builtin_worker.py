"""The built-in connector's worker, asked what it makes of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.wire.metadata import AgentMetadata


def builtin_registration(
    config: VllmConfig, caches: KVCacheConfig, tensors: Mapping[str, torch.Tensor]
) -> tuple[NixlAgentMetadata, str, list[tuple[int, int]]]:
    """What the built-in connector makes of the same cache: metadata, hash, registered (address, length)."""
    worker = NixlPullConnectorWorker(config, "prefill-engine", caches)
    registered: list[tuple[int, int]] = []
    get_reg_descs = worker.nixl_wrapper.get_reg_descs

    def record(ranges: Any, *rest: Any) -> Any:
        # NIXL calls this too, with lists of its own.
        if isinstance(ranges, list):
            registered.extend((address, length) for address, length, _, _ in ranges)
        return get_reg_descs(ranges, *rest)

    worker.nixl_wrapper.get_reg_descs = record
    try:
        worker.register_kv_caches(dict(tensors))
        payload = worker.xfer_handshake_metadata
        assert payload is not None
        metadata = msgspec.msgpack.Decoder(NixlAgentMetadata).decode(payload.agent_metadata_bytes)
        return metadata, payload.compatibility_hash, registered
    finally:
        worker.shutdown()


def differing_fields(ours: AgentMetadata, theirs: NixlAgentMetadata) -> set[str]:
    """What of our metadata is not as the built-in connector says it of the same cache."""
    names = (field.name for field in msgspec.structs.fields(ours))
    return {name for name in names if getattr(ours, name) != getattr(theirs, name)}
