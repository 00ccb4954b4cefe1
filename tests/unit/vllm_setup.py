"""Real vLLM configurations and KV caches for tests that compare us with the built-in connector, in one process.

No model is loaded and nothing is downloaded: a configuration file is all that `VllmConfig` needs. The KV cache comes
from vLLM's own allocator, so views, strides and the shared allocation are those of a running engine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, KVTransferConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
)
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache

KV_HEADS = 4
HEAD_SIZE = 32
LAYERS = 12
"""More than ten, so that natural and alphabetical order of layer names differ."""


BlockHasher = Callable[[Request], list[BlockHash]]


def write_model(directory: Path, **changes: Any) -> Path:
    """Configuration of a tiny Llama in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def write_latent_model(directory: Path) -> Path:
    """Configuration of a model that vLLM takes for one of latent attention."""
    return write_model(
        directory,
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        num_key_value_heads=8,
    )


def engine_config(model: Path, **changes: Any) -> VllmConfig:
    """Configuration of an engine with a NIXL connector; `changes` are engine arguments."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 64,
        "enforce_eager": True,
        "max_model_len": 2048,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu", engine_id="prefill-engine"
        ),
    }
    config = EngineArgs(**(arguments | changes)).create_engine_config()
    config.cache_config.kv_cache_layout = config.cache_config.kv_cache_layout or "LBHNC"
    return config


def latent_engine_config(directory: Path) -> VllmConfig:
    """Of an engine with a model of latent attention, on any machine: where there is AMX, vLLM prefers AMX_MLA.

    That one has another kernel block size, and no float32.
    """
    return engine_config(write_latent_model(directory), attention_backend="CPU_MLA")


@functools.cache
def scheduling_config(block_size: int, max_model_len: int) -> VllmConfig:
    """An engine configuration for vLLM's scheduler without an engine; shared, so copy it before changing it."""
    with tempfile.TemporaryDirectory() as directory:
        return engine_config(
            write_model(Path(directory) / "model"),
            block_size=block_size,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
        )


def draft_model(config: VllmConfig, drafts: int) -> SpeculativeConfig:
    """Speculative decoding as with a draft model that proposes so many tokens, without one."""
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_max=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    speculative.method = "draft_model"
    return speculative


@functools.cache
def block_hasher(block_tokens: int) -> BlockHasher:
    """How requests name their blocks for the prefix cache, of so many tokens each, by vLLM's own default."""
    hash_function = get_hash_fn_by_name(CacheConfig().prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher: BlockHasher = get_request_block_hasher(block_tokens, hash_function)
    return hasher


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def attention_layers(config: VllmConfig, count: int, head_size: int, kv_heads: int) -> list[Attention]:
    """vLLM's own, with two query heads for each KV head. Within `single_rank`."""
    with set_current_vllm_config(config):
        return [
            Attention(
                2 * kv_heads,
                head_size,
                scale=1.0,
                num_kv_heads=kv_heads,
                cache_config=config.cache_config,
                prefix=layer_name(index),
            )
            for index in range(count)
        ]


def attention_spec(block_size_tokens: int = 64, **changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{
            "block_size": block_size_tokens,
            "num_kv_heads": KV_HEADS,
            "head_size": HEAD_SIZE,
            "dtype": torch.float32,
            **changes,
        }
    )


def cache_config(
    spec: AttentionSpec, *, layers: int = LAYERS, num_blocks: int = 16, layout: str = "LBHNC"
) -> KVCacheConfig:
    """All layers in one group and one allocation, placed as vLLM places them for `layout`."""
    names = [layer_name(index) for index in range(layers)]
    page = spec.page_size_bytes
    block_outermost = KVCacheLayout[layout].is_block_outermost
    layer_stride = page if block_outermost else page * num_blocks
    if layout == "BHLNC":
        layer_stride = page // spec.num_kv_heads
    block_stride = page * layers if block_outermost else page
    if layout == "LHBNC":
        block_stride = page // spec.num_kv_heads
    tensor = KVCacheTensor(
        size=page * num_blocks * layers,
        layers=names,
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


def allocate(config: KVCacheConfig, *, layout: str = "LBHNC", kernel_block_size: int = 64) -> dict[str, torch.Tensor]:
    """The KV cache tensors as the model runner hands them to `register_kv_caches`, in an unhelpful order."""
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout], [kernel_block_size])
    return dict(sorted(caches.items()))


def allow_kernel_block_size(monkeypatch: pytest.MonkeyPatch, size_tokens: int) -> None:
    """Attention backends that can work with one block size only, as several GPU ones do."""
    for backend in (CPUAttentionBackend, CPUMLABackend):
        monkeypatch.setattr(
            backend, "get_supported_kernel_block_sizes", staticmethod(lambda kv_cache_spec=None: [size_tokens])
        )


@contextlib.contextmanager
def single_rank(config: VllmConfig, directory: Path) -> Iterator[None]:
    """vLLM's process groups for one rank; puts back the CPU affinity that the built-in connector changes."""
    affinity = os.sched_getaffinity(0)
    try:
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()
        os.sched_setaffinity(0, affinity)
