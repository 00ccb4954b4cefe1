"""From vLLM's cache specs to what a layer caches in the whole model.

A spec says what one rank holds; `layer_shape` counts back to all ranks, so that the result is the same on every rank of
every engine that runs the model. Only two numbers cannot be counted back, because ranks may hold replicas: KV heads and
groups of Mamba's B and C, when there is one of them on this rank. Those come from the model's configuration; what a
wrong guess would do is known from the block lengths that peers advertise, and refused.

Two kinds of block are of a request and not of its tokens, and the same on all ranks: ring buffers, which hold the raw
keys of the tokens that are not yet compressed, and states that are not split, such as that of a short convolution. Each
is a state of one unit, which is copied as it is.

Specs are told apart by their exact class. A subclass that is not in the tables is another thing, with another meaning
of its blocks, and is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connector.layout.shapes import Component, LayerShape, attention, latent, mamba
from connector.wire.metadata import REPLICATED, RING
from connector.worker.unsupported import UnsupportedCache

# The tokens of sinks lie in blocks that each engine fills for itself; gaps open behind the prompt, which is all that D
# loads.
_HEAD_SPECS = (FullAttentionSpec, SinkFullAttentionSpec, RSWASpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
_LATENT_SPECS = (MLAAttentionSpec, SlidingWindowMLASpec)
_SPECS: tuple[type[KVCacheSpec], ...] = (*_HEAD_SPECS, *_LATENT_SPECS, CircularBufferSpec, MambaSpec)
_CLIPPED_SPECS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
_STATES = (MambaAttentionBackendEnum.MAMBA1, MambaAttentionBackendEnum.MAMBA2, MambaAttentionBackendEnum.GDN_ATTN)

_GROUP_COUNT_NAMES = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""What models call the number of groups of B and C in their configuration."""


def layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """The spec of each layer that has a cache of its own."""
    specs: dict[str, KVCacheSpec] = {}
    for group in kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            # Of a group of which this pipeline stage has no layer, it has those of all stages.
            of_group = group.kv_cache_spec.kv_cache_specs
            specs.update({layer: of_group[layer] for layer in group.layer_names})
        else:
            specs.update(dict.fromkeys(group.layer_names, group.kv_cache_spec))
    return specs


def require_known_spec(layer: str, spec: KVCacheSpec) -> None:
    """Raise UnsupportedCache unless `layer_shape` knows what a block of this layer holds."""
    if type(spec) not in _SPECS:
        raise UnsupportedCache(f"KV cache of {layer}", type(spec).__name__, _names(_SPECS))
    if isinstance(spec, AttentionSpec):
        if spec.tokens_per_state != 1 and not (isinstance(spec, _LATENT_SPECS) and spec.tokens_per_state >= 1):
            raise UnsupportedCache(f"tokens_per_state of {layer}", spec.tokens_per_state, "1, or more in latent caches")
        if isinstance(spec, CircularBufferSpec) and spec.page_size_padded is not None:
            # Its length is what tells peers how many tokens it holds.
            raise UnsupportedCache(f"ring buffer of {layer} with a page of", spec.page_size_padded, "no padding")
    elif isinstance(spec, MambaSpec):
        if not spec.tp_replicated:
            _require_known_state(layer, spec)
        if not is_conv_state_dim_first():
            raise UnsupportedCache("VLLM_SSM_CONV_STATE_LAYOUT", "SD", "DS")


def _require_known_state(layer: str, spec: MambaSpec) -> None:
    if spec.mamba_type not in _STATES:
        raise UnsupportedCache(f"state of {layer}", spec.mamba_type.name, ", ".join(kind.name for kind in _STATES))
    if [len(shape) for shape in spec.shapes] != [2, 2 if _is_mamba1(spec) else 3]:
        raise UnsupportedCache(f"state of {layer} with shapes", spec.shapes, "a convolution and an SSM state")


def layer_shapes(
    kv_cache_config: KVCacheConfig, model_config: ModelConfig, tp_size: int, *, prefix_caching: bool
) -> dict[str, LayerShape]:
    """What each layer caches in the whole model. Only for specs that `require_known_spec` has let pass."""
    specs = layer_specs(kv_cache_config)
    shapes = {
        layer: msgspec.structs.replace(
            _layer_shape(layer, specs[layer], group, model_config, tp_size),
            dcp_sharded=specs[layer].dcp_sharded,
            clipped=prefix_caching and isinstance(specs[layer], _CLIPPED_SPECS),
        )
        for group, members in enumerate(kv_cache_config.kv_cache_groups)
        for layer in members.layer_names
        if layer in specs
    }
    if all(shape.tokens_per_entry == 1 for shape in shapes.values()):
        return shapes
    # Beside compressed caches there are some whose block size is that of a kernel, whatever the engine's is.
    return {layer: msgspec.structs.replace(shape, whole_blocks=True) for layer, shape in shapes.items()}


def _layer_shape(layer: str, spec: KVCacheSpec, group: int, model_config: ModelConfig, tp_size: int) -> LayerShape:
    if isinstance(spec, MambaSpec) and spec.tp_replicated:
        return _undivided(layer, REPLICATED, spec.state_content_size_bytes, group)
    if isinstance(spec, MambaSpec):
        return _state_shape(layer, spec, group, model_config, tp_size)
    assert isinstance(spec, AttentionSpec)
    if isinstance(spec, CircularBufferSpec):
        return _undivided(layer, RING, spec.page_size_bytes, group)
    if isinstance(spec, _LATENT_SPECS):
        shape = latent(layer, bytes_per_token=spec.state_content_size_bytes, group=group)
        tokens_per_entry = int(spec.tokens_per_state)
        return msgspec.structs.replace(
            shape, tokens_per_entry=tokens_per_entry, whole_blocks=_has_scales_behind_the_tokens(spec)
        )
    if spec.num_heads != spec.num_kv_heads:
        # K and V in slots of their own, in an order that only the attention backend knows.
        slots = Component(name="kv_slots", units=spec.num_heads * tp_size, bytes_per_unit=spec.state_content_size_bytes)
        return LayerShape(name=layer, components=(slots,), group=group, whole_blocks=True, whole_ranks=True)
    heads = spec.num_kv_heads * tp_size
    if spec.num_kv_heads == 1:
        heads = min(heads, model_config.get_total_num_kv_heads())
    if spec.state_content_bytes is not None:
        # K and V of a head in a form of the attention backend, for instance with scales.
        component = Component(name="kv", units=heads, bytes_per_unit=spec.state_content_bytes)
        return LayerShape(name=layer, components=(component,), group=group)
    item_bytes = spec.dtype.itemsize
    return attention(
        layer, heads=heads, k_bytes=spec.head_size * item_bytes, v_bytes=spec.head_size_v * item_bytes, group=group
    )


def _undivided(layer: str, component: str, content_bytes: int, group: int) -> LayerShape:
    whole = Component(name=component, units=1, bytes_per_unit=content_bytes)
    return LayerShape(name=layer, components=(whole,), group=group, is_state=True)


def _has_scales_behind_the_tokens(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> bool:
    """Whether a block may hold the values of all its tokens and then the scales of all, as those of indexers do.

    Bytes that are not elements of a type: of a whole token only where the spec counts them and is not DeepSeek-V4's.
    """
    return spec.dtype is torch.uint8 and (spec.state_content_bytes is None or spec.model_version is not None)


def _state_shape(layer: str, spec: MambaSpec, group: int, model_config: ModelConfig, tp_size: int) -> LayerShape:
    (conv_channels, conv_rows), state = spec.shapes
    conv_type, state_type = spec.dtypes
    channel_bytes = conv_rows * _item_bytes(conv_type)
    head_bytes = math.prod(state[1:]) * _item_bytes(state_type)
    heads = state[0] * tp_size
    if _is_mamba1(spec):
        channels = conv_channels * tp_size
        return mamba(
            layer,
            channels=channels,
            groups=0,
            heads=heads,
            channel_bytes=channel_bytes,
            group_bytes=0,
            head_bytes=head_bytes,
            group=group,
        )
    # The convolution's channels are those of the state's heads, and two parts of equal size.
    head_channels = state[0] * state[1]
    part_channels = (conv_channels - head_channels) // 2
    if part_channels <= 0 or conv_channels != head_channels + 2 * part_channels:
        raise UnsupportedCache(
            f"state of {layer} with shapes", spec.shapes, "channels of the heads, and two equal parts"
        )
    if spec.mamba_type is MambaAttentionBackendEnum.GDN_ATTN:
        parts = (("conv_q", part_channels), ("conv_k", part_channels), ("conv_v", head_channels))
        components = [
            Component(name=name, units=channels * tp_size, bytes_per_unit=channel_bytes) for name, channels in parts
        ]
        components.append(Component(name="ssm", units=heads, bytes_per_unit=head_bytes))
        return LayerShape(name=layer, components=tuple(components), group=group, is_state=True)
    state_size = state[2]
    groups = part_channels // state_size
    if groups * state_size != part_channels:
        raise UnsupportedCache(f"state of {layer} with shapes", spec.shapes, f"groups of {state_size} channels")
    return mamba(
        layer,
        channels=head_channels * tp_size,
        groups=_total_groups(groups, model_config, tp_size),
        heads=heads,
        channel_bytes=channel_bytes,
        group_bytes=state_size * channel_bytes,
        head_bytes=head_bytes,
        group=group,
    )


def _total_groups(groups: int, model_config: ModelConfig, tp_size: int) -> int:
    """Groups of B and C in the model, of which this rank has `groups`; a single one may be a replica."""
    if groups == 1:
        text_config = model_config.hf_text_config
        for name in _GROUP_COUNT_NAMES:
            stated = getattr(text_config, name, None)
            if isinstance(stated, int):
                return min(stated, tp_size)
    return groups * tp_size


def _is_mamba1(spec: MambaSpec) -> bool:
    return spec.mamba_type is MambaAttentionBackendEnum.MAMBA1


def _item_bytes(dtype: torch.dtype) -> int:
    size: int = dtype.itemsize
    return size


def _names(classes: Sequence[type]) -> str:
    return ", ".join(kind.__name__ for kind in classes)
