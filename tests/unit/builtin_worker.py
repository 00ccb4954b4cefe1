"""The built-in connector's worker, asked what it makes of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any
from unittest import mock

import msgspec
import torch
from nixl._api import nixl_agent, nixl_agent_config
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.wire.metadata import AgentMetadata


@cache
def _agent() -> Any:
    # A progress thread would take a core until the tests end.
    return nixl_agent("builtin", nixl_agent_config(enable_prog_thread=False, num_threads=0))


def builtin_registration(
    config: VllmConfig, caches: KVCacheConfig, tensors: Mapping[str, torch.Tensor]
) -> tuple[NixlAgentMetadata, str, list[tuple[int, int]]]:
    """What the built-in connector makes of the same cache: metadata, hash, registered (address, length)."""
    # Making one takes longer than everything else here, and what its worker says has nothing of it but its metadata.
    agent = _agent()
    with mock.patch.object(base_worker, "NixlWrapper", return_value=agent):
        worker = NixlPullConnectorWorker(config, "prefill-engine", caches)
    registered: list[tuple[int, int]] = []
    get_reg_descs = type(agent).get_reg_descs

    def record(ranges: Any, *rest: Any) -> Any:
        # NIXL calls this too, with lists of its own.
        if isinstance(ranges, list):
            registered.extend((address, length) for address, length, _, _ in ranges)
        return get_reg_descs(agent, ranges, *rest)

    try:
        with mock.patch.object(agent, "get_reg_descs", record):
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
