"""What the bytes of this rank's KV cache mean (`wire.identity`), from vLLM's configuration and its layers.

The layers are those that the forward pass uses, with the scales that were loaded with the weights: vLLM hands its KV
cache to a connector when the model has been loaded. Per-token scales lie in the cache beside the numbers, and are
transferred with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.transformers_utils.config import is_rope_parameters_nested
from vllm.v1.kv_cache_interface import KVCacheSpec, kv_cache_uses_per_token_head_scales

from connector.layout.geometry import CacheGroup
from connector.layout.shapes import SLOTS, STATE_OF_RANK, LayerShape, shard
from connector.observe.log import get_logger
from connector.weights import WeightsUnknown, weights_fingerprint
from connector.wire.bounded import shorten
from connector.wire.identity import (
    CACHE_DTYPE,
    CONFIG,
    DRAFT,
    DRAFT_CACHE_DTYPE,
    E4B15,
    FACTORS_MAX,
    FNUZ,
    IN_ARRAYS,
    IN_SLOTS,
    LONG_ROPE,
    MODEL,
    OF_ROCM,
    QUANTIZATION,
    REVISION,
    TEMPERATURE_TUNING,
    VALUE_LENGTH_MAX,
    WEIGHTS,
    KvIdentity,
    LayerIdentity,
)
from connector.worker.compatibility_hash import compatibility_factors
from connector.worker.cpu_attention import element_order, layers_of
from connector.worker.turboquant import is_in_arrays

NONE = "none"

_NOT_OF_KV = frozenset(
    (
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        TEMPERATURE_TUNING,
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "max_model_len",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "quantization_config",
        "return_dict",
        "sep_token_id",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
"""Entries of a configuration that change no KV, or are compared otherwise: generation defaults, labels, versions. vLLM
writes `max_model_len` into that of MiniMax-M2, to size a rotary cache by it."""

_TURBOQUANT_FP8 = "turboquant_k8v4"
"""The type of TurboQuant whose keys are FP8."""

_SHORT_UP_TO = "original_max_position_embeddings"

_AUTO = -1
"""What `--max-model-len auto` is in the configuration."""

_LLAMA_4 = "llama4_text"
_NOT_TUNED_UP_TO = 32768
"""The longest request, in tokens, with which vLLM does not scale the queries of Llama 4 of its own accord."""

_log = get_logger()


def kv_identity(
    vllm_config: VllmConfig,
    attention_backend: str,
    specs: Mapping[str, KVCacheSpec],
    shapes: Mapping[str, LayerShape],
    *,
    tp_rank: int,
    tp_size: int,
    groups: Sequence[CacheGroup],
) -> KvIdentity:
    """The identity of this rank, whose layers are those of `shapes`, and whose cache groups are `groups`."""
    return KvIdentity(
        factors=_factors(vllm_config, attention_backend),
        layers=_layers(vllm_config, specs, shapes, tp_rank=tp_rank, tp_size=tp_size),
        group_tokens=tuple(group.tokens_per_kernel_block for group in groups),
    )


# --- of the whole engine ----------------------------------------------------------------------------------------------


def _factors(vllm_config: VllmConfig, attention_backend: str) -> dict[str, str]:
    hashed = compatibility_factors(vllm_config, attention_backend)
    del hashed["speculative_config"]
    model = vllm_config.model_config
    factors = {name: _text(value) for name, value in hashed.items()}
    factors[CACHE_DTYPE] = _cache_dtype(vllm_config.cache_config.cache_dtype, model)
    factors |= _of_model("", model, vllm_config.load_config)
    factors[QUANTIZATION] = _text(model.quantization or NONE)
    factors |= _of_draft(vllm_config)
    factors |= _of_long_rope(model)
    factors |= _of_temperature_tuning(model)
    factors |= _of_configuration(model)
    return dict(list(factors.items())[:FACTORS_MAX])


def _of_model(prefix: str, model: ModelConfig, load: Any) -> dict[str, str]:
    """The names of the model, and its weights where they are known."""
    said = {prefix + MODEL: _text(model.model), prefix + REVISION: _text(model.revision or NONE)}
    try:
        said[prefix + WEIGHTS] = weights_fingerprint(model, load)
    except WeightsUnknown as unknown:
        _log.info("peers are not told which weights %s has (%s): only its name is compared", model.model, unknown)
    return said


def _of_draft(vllm_config: VllmConfig) -> dict[str, str]:
    """The factors of speculative decoding that has KV of its own, which is transferred with the model's."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return {f"{DRAFT}method": NONE}
    draft = speculative.draft_model_config
    auxiliary_layers = getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    cache_dtype = speculative.kv_cache_dtype or vllm_config.cache_config.cache_dtype
    return {
        f"{DRAFT}method": _text(speculative.method),
        f"{DRAFT}{DRAFT_CACHE_DTYPE}": _cache_dtype(cache_dtype, draft),
        f"{DRAFT}auxiliary_layer_ids": _text(auxiliary_layers or NONE),
        f"{DRAFT}code_revision": _text(draft.code_revision or NONE),
        **_of_model(DRAFT, draft, speculative.draft_load_config or vllm_config.load_config),
    }


def _of_long_rope(model: ModelConfig) -> dict[str, str]:
    """Which list of rotary factors a model uses that has two. vLLM takes the same one for all prompts of an engine, by
    the longest request that the engine allows and not by the prompt."""
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    by_layer_type = rope.values() if is_rope_parameters_nested(rope) else (rope,)
    limits = [each[_SHORT_UP_TO] for each in by_layer_type if each and each.get("rope_type") == "longrope"]
    if not limits:
        return {}
    longest = _longest_when_loaded(model)
    return {LONG_ROPE: ", ".join("long" if longest > limit else "short" for limit in limits)}


def _of_temperature_tuning(model: ModelConfig) -> dict[str, str]:
    """Whether a model's layers without rotary embedding scale their queries by position, where it has such layers. That
    changes the hidden states, and so the KV of all later layers.

    For Llama 4 vLLM decides it by the generation config, or else by the longest request that the engine allows. It
    writes the result into a copy of the configuration that only the language model has.
    """
    chosen = getattr(model.hf_text_config, TEMPERATURE_TUNING, None)
    if chosen is None:
        return {}
    if model.hf_text_config.model_type == _LLAMA_4 and not model.using_transformers_backend():
        generation = model.try_get_generation_config() | model.override_generation_config
        chosen = generation.get(TEMPERATURE_TUNING, _longest_when_loaded(model) > _NOT_TUNED_UP_TO)
    return {TEMPERATURE_TUNING: "on" if chosen else "off"}


def _longest_when_loaded(model: ModelConfig) -> int:
    """The longest request, in tokens, that the engine allowed when it made the layers, which decide by it.

    With `--max-model-len auto` that is what vLLM takes from the model's configuration. It makes it what fits into
    memory afterwards, and tells the workers before they have a KV cache.
    """
    if model.original_max_model_len == _AUTO:
        return int(model.get_and_verify_max_len(_AUTO))
    return int(model.max_model_len)


def _of_configuration(model: ModelConfig) -> dict[str, str]:
    """Entry by entry, so that people are told which one differs: rope_parameters, for instance."""
    entries = model.hf_text_config.to_dict()
    chosen = sorted(name for name in entries if name not in _NOT_OF_KV)
    return {CONFIG + name: _text(json.dumps(entries[name], sort_keys=True, default=str)) for name in chosen}


def _cache_dtype(chosen: str, model: ModelConfig) -> str:
    """`auto` is the model's own, and the same as that written out."""
    return str(chosen) if chosen != "auto" else str(model.dtype).removeprefix("torch.")


def _text(value: object) -> str:
    """Within the bounds of the wire, and other texts for other values."""
    said = str(value) or "''"
    if len(said) <= VALUE_LENGTH_MAX and said.isprintable():
        return said
    digest = hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{shorten(said, VALUE_LENGTH_MAX - 20)} ({digest})"


# --- of each layer ----------------------------------------------------------------------------------------------------


def _layers(
    vllm_config: VllmConfig,
    specs: Mapping[str, KVCacheSpec],
    shapes: Mapping[str, LayerShape],
    *,
    tp_rank: int,
    tp_size: int,
) -> dict[str, LayerIdentity]:
    layers = layers_of(vllm_config, shapes)
    scales = _scales(layers)
    identities: dict[str, LayerIdentity] = {}
    for name, shape in shapes.items():
        layer = layers.get(name)
        k_scales, v_scales = scales.get(name, ((), ()))
        identities[name] = LayerIdentity(
            group=shape.group,
            dtype=_layer_dtype(layer, specs[name]),
            fp8=_kind_of_fp8(layer, specs[name]),
            order=_order(layer, specs[name]),
            k_scales=k_scales,
            v_scales=v_scales,
            first_head=shard(shape.components[0].units, tp_rank, tp_size)[0] if k_scales else 0,
            heads=specs[name].num_kv_heads if shape.holds_heads else 0,
            content_bytes=_content_bytes(shape, specs[name]),
        )
    return identities


def _content_bytes(shape: LayerShape, spec: KVCacheSpec) -> tuple[int, ...]:
    """Bytes of content in a unit of each component, the same on any number of ranks."""
    first = shape.components[0]
    if first.name == STATE_OF_RANK:
        return (first.units * first.bytes_per_unit,)
    if first.name == SLOTS:
        # A back end has as many slots for a head as it wants, or one for the heads of all, and then each is longer.
        return (spec.num_heads * first.bytes_per_unit // spec.num_kv_heads,)
    return tuple(component.bytes_per_unit for component in shape.components)


def _order(layer: Any, spec: KVCacheSpec) -> str:
    """Empty: as the tensor's shape says. One back end may keep K and V together or apart, as the environment says."""
    if getattr(spec, "num_head_slots", None) is not None:
        # What lies in the slots, and how, differs from one back end to the next.
        return IN_SLOTS if layer is None else f"{IN_SLOTS}, as {layer.get_attn_backend().get_name()} orders them"
    if is_in_arrays(layer):
        return IN_ARRAYS
    if _is_indexer_of_rocm(layer, spec):
        return f"{OF_ROCM}, {'token by token' if spec.block_size == 1 else '16 tokens together'}"
    return element_order(layer) if layer is not None else ""


def _is_indexer_of_rocm(layer: Any, spec: KVCacheSpec) -> bool:
    """Whether the quantized keys by which sparse attention chooses its tokens lie as vLLM's kernels for ROCm have them.
    The layer does not always say so, and has the shape and the back end's name of any other platform."""
    if layer is None or not current_platform.is_rocm() or getattr(spec, "dtype", None) is not torch.uint8:
        return False
    return bool(layer.get_attn_backend().get_name().endswith("_INDEXER"))


def _layer_dtype(layer: Any, spec: KVCacheSpec) -> str:
    """What the numbers in the cache are. Quantized ones have a name, and lie in tensors of plain bytes."""
    chosen = str(getattr(layer, "kv_cache_dtype", "auto"))
    if _is_quantized(chosen):
        return chosen
    dtypes = spec.dtypes if hasattr(spec, "dtypes") else (getattr(spec, "dtype", chosen),)
    return _text(", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _kind_of_fp8(layer: Any, spec: KVCacheSpec) -> str:
    """Empty: OCP's, or no FP8. The platform decides it, and no name of a type says it."""
    chosen = str(getattr(layer, "kv_cache_dtype", "auto"))
    if chosen == _TURBOQUANT_FP8:
        # Late: what is imported here is Triton's.
        from vllm.v1.attention.ops.triton_turboquant_decode import _use_fp8_e4b15

        return E4B15 if _use_fp8_e4b15(layer.kv_cache.device.index or 0) else ""
    # Indexers and latents of DeepSeek have FP8 and scales in tensors of bytes, and no name.
    has_fp8 = chosen.startswith("fp8") or (not _is_quantized(chosen) and getattr(spec, "dtype", None) is torch.uint8)
    return FNUZ if has_fp8 and current_platform.is_fp8_fnuz() else ""


def _is_quantized(dtype: str) -> bool:
    return dtype not in ("auto", "bfloat16", "float16", "float32", "half", "float")


_Scales = tuple[float, ...]


def _scales(layers: Mapping[str, Any]) -> dict[str, tuple[_Scales, _Scales]]:
    """K's and V's of each layer that multiplies what it has stored. One copy from the device for all of them."""
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    for name, layer in layers.items():
        dtype = str(getattr(layer, "kv_cache_dtype", "auto"))
        if _is_quantized(dtype) and not kv_cache_uses_per_token_head_scales(dtype):
            found = [getattr(layer, field, None) for field in ("_k_scale", "_v_scale")]
            tensors += [torch.empty(0) if scale is None else scale.detach().flatten() for scale in found]
            names.append(name)
    if not names:
        return {}
    device = next(tensor.device for tensor in tensors)
    flat = torch.cat([tensor.to(device=device, dtype=torch.float32) for tensor in tensors]).tolist()
    values: list[_Scales] = []
    for tensor in tensors:
        values.append(tuple(flat[: tensor.numel()]))
        del flat[: tensor.numel()]
    return {name: (values[2 * index], values[2 * index + 1]) for index, name in enumerate(names)}
