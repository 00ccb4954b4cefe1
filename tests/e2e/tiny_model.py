"""Models small enough to serve twice on two cores, made here so that nothing is downloaded: one for each family whose
KV cache has a shape of its own.

A family is a function that returns a transformers configuration; weights, tokenizer and cache are the same for all.
Random weights with a standard deviation of 0.08 give varied greedy text: with the usual 0.02 the model repeats one
token, and an answer computed from wrong KV could not be told from a right one. float32 leaves no near ties for a
different order of summation to flip. The tokenizer maps each byte to one token, so that a prompt's length in tokens is
its length in bytes.

A model is built once per state of this file and kept in a cache folder; building writes beside it and renames, so
that two runs may meet.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_CACHE = Path(__file__).resolve().parents[2] / ".state" / "models"

LAYERS = 4
HIDDEN_SIZE = 256
ATTENTION_HEADS = 8
KV_HEADS = 4
CONTEXT_TOKENS = 8192
WEIGHT_STANDARD_DEVIATION = 0.08
SEED = 20240607

HEAD_DIMENSION = HIDDEN_SIZE // ATTENTION_HEADS
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIMENSION * 4
"""Keys and values of all layers of the Llama, float32."""

LATENT_LAYERS = 2
LATENT_RANK, LATENT_ROPE_DIMENSION = 512, 64
LATENT_BYTES_PER_TOKEN = LATENT_LAYERS * (LATENT_RANK + LATENT_ROPE_DIMENSION) * 4
"""Of one replica of what the DeepSeek caches, float32."""
LATENT_BLOCK_TOKENS = 16
"""Of vLLM's kernels for CPUs, whatever is asked for."""

SLIDING_WINDOW_TOKENS = 64
"""Of the Gemma."""

BEGIN_TOKEN, END_TOKEN = "<s>", "</s>"


def tiny_llama(cache: Path = DEFAULT_CACHE) -> Path:
    """Full attention in every layer, with grouped queries: one KV cache group."""
    return _cached("llama", _llama, cache)


def tiny_gemma(cache: Path = DEFAULT_CACHE) -> Path:
    """Two layers of sliding-window attention to each one of full attention: three KV cache groups over two tensors."""
    return _cached("gemma", _gemma, cache)


def tiny_deepseek(cache: Path = DEFAULT_CACHE) -> Path:
    """Multi-head latent attention: one vector per token and layer, the same on every rank of a tensor-parallel group.

    The ranks of the vector's parts are the only ones that vLLM's CPU kernels take.
    """
    return _cached("deepseek", _deepseek, cache)


def tiny_granite(cache: Path = DEFAULT_CACHE) -> Path:
    """Mamba-2 layers and one of full attention: convolution and state-space states beside KV."""
    return _cached("granite", _granite, cache)


def tiny_mixtral(cache: Path = DEFAULT_CACHE) -> Path:
    """Experts of which each token takes two; full attention."""
    return _cached("mixtral", _mixtral, cache)


def _llama() -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=LAYERS, intermediate_size=2 * HIDDEN_SIZE, **common())


def _gemma() -> PretrainedConfig:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_hidden_layers=6,
        sliding_window=SLIDING_WINDOW_TOKENS,
        head_dim=HEAD_DIMENSION,
        query_pre_attn_scalar=HEAD_DIMENSION,
        intermediate_size=2 * HIDDEN_SIZE,
        **common(),
    )


def _deepseek() -> PretrainedConfig:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        num_hidden_layers=LATENT_LAYERS,
        first_k_dense_replace=LATENT_LAYERS,
        intermediate_size=2 * HIDDEN_SIZE,
        kv_lora_rank=LATENT_RANK,
        qk_rope_head_dim=LATENT_ROPE_DIMENSION,
        qk_nope_head_dim=128,
        v_head_dim=128,
        q_lora_rank=None,
        # vLLM's CPU kernel for unscaled rotary embedding takes the rotary part of MLA's query for a whole one.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": CONTEXT_TOKENS // 2,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        **(common() | {"num_key_value_heads": ATTENTION_HEADS}),
    )


def _granite() -> PretrainedConfig:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=2 * HIDDEN_SIZE,
        attention_multiplier=HEAD_DIMENSION**-0.5,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_expand=1,
        mamba_chunk_size=64,
        **common(),
    )


def _mixtral() -> PretrainedConfig:
    from transformers import MixtralConfig

    return MixtralConfig(
        num_hidden_layers=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=HIDDEN_SIZE // 2,
        **common(),
    )


def common() -> dict[str, Any]:
    """Of all models' configurations."""
    return {
        "vocab_size": len(vocabulary()),
        "hidden_size": HIDDEN_SIZE,
        "num_attention_heads": ATTENTION_HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT_TOKENS,
        "initializer_range": WEIGHT_STANDARD_DEVIATION,
        "bos_token_id": vocabulary()[BEGIN_TOKEN],
        "eos_token_id": vocabulary()[END_TOKEN],
        "pad_token_id": vocabulary()[END_TOKEN],
        "tie_word_embeddings": False,
    }


def _cached(name: str, configuration: Callable[[], PretrainedConfig], cache: Path) -> Path:
    return cached_model(name, partial(_save_causal_model, configuration), cache, Path(__file__))


def cached_model(
    name: str, save: Callable[[Path], None], cache: Path, source: Path, special_tokens: Sequence[str] = ()
) -> Path:
    """Folder with the model and its tokenizer, as `save_pretrained` lays them out; built when it is not there yet.

    `save` writes the model and its configuration into a folder; `source` is the file whose state the model depends on.
    `special_tokens` follow those of the vocabulary that all models have.
    """
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    folder = cache / f"tiny-{name}-{key}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=cache))
    try:
        save(unfinished)
        _save_tokenizer(unfinished, special_tokens)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another run was first, with the same bytes
            raise


def _save_causal_model(configuration: Callable[[], PretrainedConfig], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_model(AutoModelForCausalLM, configuration, folder)


def save_model(kind: Any, configuration: Callable[[], PretrainedConfig], folder: Path) -> None:
    """One of a class of transformers that makes models of configurations, with random weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        kind.from_config(configuration(), dtype=torch.float32).save_pretrained(folder)


def _save_tokenizer(folder: Path, special_tokens: Sequence[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN_TOKEN, eos_token=END_TOKEN)
    wrapped.save_pretrained(folder)


def vocabulary() -> dict[str, int]:
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), BEGIN_TOKEN, END_TOKEN]
    return {token: index for index, token in enumerate(tokens)}
