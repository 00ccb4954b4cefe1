"""A DeepSeek-V4 with random weights: windows of latents, compressed latents with an indexer, and compressors' states.

vLLM loads it by the names of the published checkpoints, which transformers does not write, so its tensors are made one
by one. The sizes that are not small are those that vLLM's CPU kernels ask for: the heads', and the number of experts.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.e2e.tiny_model import BEGIN_TOKEN, DEFAULT_CACHE, END_TOKEN, SEED, cached_model, vocabulary

COMPRESS_RATIOS = (4, 128, 4)
"""Tokens that have one entry, by layer; each layer has a window of single tokens too."""
SLIDING_WINDOW_TOKENS = 128

_HIDDEN, _HEADS, _HEAD = 256, 4, 512
_QUERY_RANK, _OUTPUT_RANK, _OUTPUT_GROUPS = 128, 64, 4
_INDEX_HEADS, _INDEX_HEAD = 4, 128
_EXPERTS, _EXPERT_SIZE = 256, 64
_STREAMS = 4
"""Copies of the residual stream."""


def tiny_deepseek_v4(cache: Path = DEFAULT_CACHE) -> Path:
    """Folder with the model and its tokenizer, built when it is not there yet."""
    return cached_model("deepseek-v4", _save, cache, Path(__file__))


def _save(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(_configuration()))
    save_file(_Weights().tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _configuration() -> dict[str, object]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": _HIDDEN,
        "num_hidden_layers": len(COMPRESS_RATIOS),
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "qk_rope_head_dim": 64,
        "q_lora_rank": _QUERY_RANK,
        "o_lora_rank": _OUTPUT_RANK,
        "o_groups": _OUTPUT_GROUPS,
        "sliding_window": SLIDING_WINDOW_TOKENS,
        "compress_ratios": COMPRESS_RATIOS,
        "index_topk": 512,
        "index_n_heads": _INDEX_HEADS,
        "index_head_dim": _INDEX_HEAD,
        "hc_mult": _STREAMS,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "n_routed_experts": _EXPERTS,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": _EXPERT_SIZE,
        "n_shared_experts": 1,
        "expert_dtype": "fp8",
        "swiglu_limit": 10.0,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
        "num_hash_layers": 0,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "compress_rope_theta": 40000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 8192,
        "vocab_size": len(vocabulary()),
        "bos_token_id": vocabulary()[BEGIN_TOKEN],
        "eos_token_id": vocabulary()[END_TOKEN],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


class _Weights:
    """All tensors of the checkpoint, by name."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(SEED)
        self.tensors: dict[str, torch.Tensor] = {}
        tokens = len(vocabulary())
        self._draw("embed", tokens, _HIDDEN, deviation=1.0)
        self._draw("head", tokens, _HIDDEN)
        self._norm("norm", _HIDDEN)
        self._mix("hc_head", _STREAMS, scales=1)
        for layer, ratio in enumerate(COMPRESS_RATIOS):
            self._layer(f"layers.{layer}", ratio)

    def _layer(self, name: str, ratio: int) -> None:
        for part in ("attn", "ffn"):
            self._mix(f"{name}.hc_{part}", (2 + _STREAMS) * _STREAMS, scales=3)
            self._norm(f"{name}.{part}_norm", _HIDDEN)
        attention = f"{name}.attn"
        self._plain(f"{attention}.attn_sink", _HEADS)
        self._draw(f"{attention}.wq_a", _QUERY_RANK, _HIDDEN)
        self._norm(f"{attention}.q_norm", _QUERY_RANK)
        self._draw(f"{attention}.wq_b", _HEADS * _HEAD, _QUERY_RANK)
        self._draw(f"{attention}.wkv", _HEAD, _HIDDEN)
        self._norm(f"{attention}.kv_norm", _HEAD)
        self._draw(f"{attention}.wo_a", _OUTPUT_GROUPS * _OUTPUT_RANK, _HEADS * _HEAD // _OUTPUT_GROUPS)
        self._draw(f"{attention}.wo_b", _HIDDEN, _OUTPUT_GROUPS * _OUTPUT_RANK)
        self._compressor(f"{attention}.compressor", _HEAD, ratio)
        if ratio == 4:
            self._draw(f"{attention}.indexer.wq_b", _INDEX_HEADS * _INDEX_HEAD, _QUERY_RANK)
            self._draw(f"{attention}.indexer.weights_proj", _INDEX_HEADS, _HIDDEN)
            self._compressor(f"{attention}.indexer.compressor", _INDEX_HEAD, ratio)
        self._draw(f"{name}.ffn.gate", _EXPERTS, _HIDDEN)
        self.tensors[f"{name}.ffn.gate.bias"] = torch.zeros(_EXPERTS)
        for expert in (*(f"experts.{number}" for number in range(_EXPERTS)), "shared_experts"):
            self._draw(f"{name}.ffn.{expert}.w1", _EXPERT_SIZE, _HIDDEN)
            self._draw(f"{name}.ffn.{expert}.w2", _HIDDEN, _EXPERT_SIZE)
            self._draw(f"{name}.ffn.{expert}.w3", _EXPERT_SIZE, _HIDDEN)

    def _compressor(self, name: str, head: int, ratio: int) -> None:
        width = head * (2 if ratio == 4 else 1)  # entries of 4 tokens overlap
        self._draw(f"{name}.wkv", width, _HIDDEN)
        self._draw(f"{name}.wgate", width, _HIDDEN)
        self._plain(f"{name}.ape", ratio, width)
        self._norm(f"{name}.norm", head)

    def _mix(self, name: str, rows: int, *, scales: int) -> None:
        self._plain(f"{name}_fn", rows, _STREAMS * _HIDDEN)
        self._plain(f"{name}_base", rows)
        self.tensors[f"{name}_scale"] = torch.ones(scales)

    def _draw(self, name: str, *size: int, deviation: float = 0.08) -> None:
        values = torch.randn(*size, generator=self._generator) * deviation
        self.tensors[f"{name}.weight"] = values.to(torch.bfloat16)

    def _plain(self, name: str, *size: int) -> None:
        self.tensors[name] = torch.randn(*size, generator=self._generator) * 0.08

    def _norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
