"""The compatibility hash: one value that differs when two engines cannot exchange KV.

Both engines compute it from their configuration and compare it before they decode anything else of the handshake. It
has to equal the built-in connector's hash of the same vLLM version bit for bit, or the two could not serve each other;
the factors and their spelling are therefore dictated by that version, and a test compares the two over several
configurations. What a hash cannot say is which factor differs; sizes that vary between healthy deployments (tensor
parallel size, block size, layout) are not in it and are compared one by one with the metadata (connector.layout).
"""

from __future__ import annotations

from typing import Any

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.config.utils import hash_factors
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION


def compatibility_hash(vllm_config: VllmConfig, attention_backend: str) -> str:
    """SHA-256 hex digest of everything that decides whether KV of this engine means the same on another one.

    `attention_backend` is the name of the first attention layer's backend (`AttentionBackend.get_name()`).
    """
    digest: str = hash_factors(compatibility_factors(vllm_config, attention_backend))
    return digest


def compatibility_factors(vllm_config: VllmConfig, attention_backend: str) -> dict[str, Any]:
    """What the hash is made of, so that people can be told which of it differs."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    return {
        "vllm_version": vllm_version,
        "nixl_connector_version": NIXL_CONNECTOR_VERSION,
        "transfer_mode": "pull",
        "model": model.model,
        "dtype": str(model.dtype),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_hidden_layers": model.get_total_num_hidden_layers(),
        "attn_backend_name": attention_backend,
        "cache_dtype": str(cache.cache_dtype),
        "is_hma_enabled": not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        "speculative_config": _speculative_factors(vllm_config),
    }


def _speculative_factors(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """What matters of a draft model whose own KV is transferred with the target's; None when there is none."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return None
    draft = speculative.draft_model_config
    auxiliary_layers = getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    return {
        "method": speculative.method,
        "model": draft.model,
        "revision": draft.revision,
        "code_revision": draft.code_revision,
        "parallel_drafting": speculative.parallel_drafting,
        # Unset means "as the target", and must hash like the target's value written out.
        "kv_cache_dtype": str(speculative.kv_cache_dtype or vllm_config.cache_config.cache_dtype),
        "auxiliary_layer_ids": None if auxiliary_layers is None else tuple(auxiliary_layers),
    }
