"""Families of models: what the connector knows of each kind of cache spec, one row per spec class.

vLLM describes the cache of a layer by a spec, and what a spec means differs from class to class: what a block holds,
which blocks of a request are kept, what peers are told about it. All of that stands in `FAMILIES`; the rest of the
connector asks a row and does not look at the class. Specs are told apart by their exact class. A subclass without a row
of its own is another thing, whose blocks mean something else, and is refused by name.

A row has the rules

    require   which specs of the class can be transferred at all
    shape     what a layer caches in the whole model
    keeps     which blocks of a request a block table still has

and says what a block holds: tokens, a state, or a ring buffer. That decides what peers are told (`Holds`).

Shapes. A spec says what one rank holds; `shape` counts back to all ranks, so that the result is the same on every rank
of every engine that runs the model. Two numbers cannot be counted back, because ranks may hold replicas: KV heads and
groups of Mamba's B and C, when there is one of them on this rank. Those come from the model's configuration, or from
that of a draft model with KV of its own. Where these name several numbers of KV heads, nobody knows which of them is
that of a layer (`LayerShape.heads_unknown`).

Block tables. vLLM keeps one table per cache group. Each is positional: block i stands for the same stretch of the
request's tokens, and the null block stands in for what nobody needs any more. After n tokens a table still has

    everything        full attention, MLA
    the last tokens   sliding window: the w-1 that the token after the n-th looks back on;
                      chunked local attention: those of the chunk that this token belongs to
    one state         Mamba and its like: the block of the n-th token. Blocks after it are scratch space of speculative
                      decoding, blocks before it hold older states, if anything. A ring buffer is the only block of its
                      table; what it holds after more than n tokens has overwritten what was there after n.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

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
    iter_layer_specs,
)

from connector.layout.shapes import (
    KEYS_AND_VALUES,
    REPLICATED,
    RING,
    SLOTS,
    STATE_OF_RANK,
    Component,
    LayerShape,
    attention,
    latent,
    mamba,
)
from connector.unsupported import UnsupportedCache

_STATES = (MambaAttentionBackendEnum.MAMBA1, MambaAttentionBackendEnum.MAMBA2, MambaAttentionBackendEnum.GDN_ATTN)

_GROUP_COUNT_NAMES = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""What models call the number of groups of B and C in their configuration."""

_PLAIN_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Cache types that keep a number in each byte and nothing else, in tensors that do not say so."""


class Holds(enum.Enum):
    """What a block holds, and what peers are told of it."""

    TOKENS = "tokens"
    """Peers are told its block size. A block may be several kernel blocks."""
    STATE = "state"
    """The state after everything before it. Peers are told no block size, and a block is not split. Its page may be
    padded."""
    RING = "ring"
    """Like a state, the same on all ranks; its length says how many tokens it holds. An engine that has any advertises
    layers in vLLM's own order, with pages of unlike sizes at one address."""


class Keeps(msgspec.Struct, frozen=True, kw_only=True):
    """Which blocks of a request a block table still has. At most one is set, `retained` aside; none: all of them."""

    window: int | None = None
    """Tokens that a token's attention sees, itself included."""
    retained: int = 0
    """Tokens before the window that vLLM keeps too, for draft modules that look further back."""
    chunk: int | None = None
    """Tokens of a chunk of local attention."""
    is_state: bool = False
    """One block: the state of everything before it, or a ring buffer."""
    is_read_again: bool = True
    """Whether the last token of a prompt sees the others here when it is computed again. Not in a compressor's window:
    that is read when an entry is complete, and then none of its blocks has just been freed."""

    @property
    def is_clipped(self) -> bool:
        """Whether only the last tokens of a request are kept."""
        return self.window is not None or self.chunk is not None


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that has a cache of its own, on one rank."""

    name: str
    spec: Any
    """The cache spec, of the class of the row that is asked."""
    group: int
    """Number of its cache group."""
    model_config: ModelConfig
    draft_config: ModelConfig | None
    tp_size: int


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `require` raises UnsupportedCache; `shape` and `keeps` are for specs that it has let pass."""

    holds: Holds
    require: Callable[[str, Any], None]
    """Takes a layer's name and its spec."""
    shape: Callable[[Layer], LayerShape]
    keeps: Callable[[Any], Keeps]
    packs: bool = False
    """Whether attention on CPUs may put blocks in its own order that were read from attention elsewhere (`landing`)."""


# --- questions ------------------------------------------------------------------------------------------------------


def layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """The spec of each layer that has a cache of its own."""
    specs: dict[str, KVCacheSpec] = {}
    for group in kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            # If this pipeline stage has no layer of the group, the group lists those of all stages.
            of_group = group.kv_cache_spec.kv_cache_specs
            specs.update({layer: of_group[layer] for layer in group.layer_names})
        else:
            specs.update(dict.fromkeys(group.layer_names, group.kv_cache_spec))
    return specs


def family_of(spec: KVCacheSpec) -> Family:
    """The row of a layer, or of a cache group, whose layers are all of one row."""
    return FAMILIES[type(_any_layer(spec))]


def keeps(spec: KVCacheSpec) -> Keeps:
    """Which blocks the tables of a layer or of a cache group still have."""
    return family_of(spec).keeps(_any_layer(spec))


def require_known_spec(layer: str, spec: KVCacheSpec) -> None:
    """Raise UnsupportedCache unless there is a row for this layer, and the row can serve it."""
    family = FAMILIES.get(type(spec))
    if family is None:
        known = ", ".join(kind.__name__ for kind in FAMILIES)
        raise UnsupportedCache(f"KV cache of {layer}", type(spec).__name__, known)
    family.require(layer, spec)


def layer_shapes(
    kv_cache_config: KVCacheConfig,
    model_config: ModelConfig,
    tp_size: int,
    *,
    prefix_caching: bool,
    draft_config: ModelConfig | None = None,
) -> dict[str, LayerShape]:
    """What each layer caches in the whole model. Only for specs that `require_known_spec` has let pass.

    `draft_config`: of a model whose layers are among these, and that drafts for the other one.
    """
    specs = layer_specs(kv_cache_config)
    shapes: dict[str, LayerShape] = {}
    for group, members in enumerate(kv_cache_config.kv_cache_groups):
        for name in members.layer_names:
            spec = specs[name]
            layer = Layer(
                name=name,
                spec=spec,
                group=group,
                model_config=model_config,
                draft_config=draft_config,
                tp_size=tp_size,
            )
            shapes[name] = msgspec.structs.replace(
                family_of(spec).shape(layer),
                dcp_sharded=spec.dcp_sharded,
                clipped=prefix_caching and keeps(spec).is_clipped,
            )
    if all(shape.tokens_per_entry == 1 for shape in shapes.values()):
        return shapes
    # Beside compressed caches there are some whose block size is that of a kernel, whatever the engine's is.
    return {layer: msgspec.structs.replace(shape, whole_blocks=True) for layer, shape in shapes.items()}


def _any_layer(spec: KVCacheSpec) -> KVCacheSpec:
    return next(iter(iter_layer_specs(spec)))


# --- which specs can be transferred ---------------------------------------------------------------------------------


def _require_entry_per_token(layer: str, spec: AttentionSpec) -> None:
    if spec.tokens_per_state != 1:
        raise UnsupportedCache(f"tokens_per_state of {layer}", spec.tokens_per_state, "1, or more in latent caches")


def _require_whole_entries(layer: str, spec: AttentionSpec) -> None:
    if spec.tokens_per_state < 1:
        raise UnsupportedCache(f"tokens_per_state of {layer}", spec.tokens_per_state, "1, or more in latent caches")


def _require_plain_ring(layer: str, spec: CircularBufferSpec) -> None:
    _require_entry_per_token(layer, spec)
    if spec.page_size_padded is not None:
        # Its length is what tells peers how many tokens it holds.
        raise UnsupportedCache(f"ring buffer of {layer} with a page of", spec.page_size_padded, "no padding")


def _require_channels_first(layer: str, spec: MambaSpec) -> None:
    """A convolution is cut by channels, which DS has outermost. One that is copied whole needs it too: nothing that
    peers are told says which layout an engine has, and a state of the other one is as long."""
    if _may_have_convolution(spec) and not is_conv_state_dim_first():
        raise UnsupportedCache("VLLM_SSM_CONV_STATE_LAYOUT", "SD", "DS, which vLLM sets by itself on CPUs only")


def _may_have_convolution(spec: MambaSpec) -> bool:
    """Not the one recurrent state of linear attention. Kinds that nobody knows may."""
    return spec.mamba_type is not MambaAttentionBackendEnum.LINEAR or len(spec.shapes) != 1


# --- which blocks of a request are kept -----------------------------------------------------------------------------


def _keeps_everything(spec: KVCacheSpec) -> Keeps:
    return Keeps()


def _keeps_window(spec: SlidingWindowSpec) -> Keeps:
    return Keeps(window=spec.sliding_window, retained=spec.extra_retained_tokens)


def _keeps_window_of_latents(spec: SlidingWindowMLASpec) -> Keeps:
    # Compressors keep the tokens of an entry that is not complete yet in a window, of no type that a user chooses.
    is_compressor = spec.cache_dtype_str is None
    return msgspec.structs.replace(_keeps_window(spec), is_read_again=not is_compressor)


def _keeps_chunk(spec: ChunkedLocalAttentionSpec) -> Keeps:
    return Keeps(chunk=spec.attention_chunk_size)


def _keeps_one_block(spec: KVCacheSpec) -> Keeps:
    return Keeps(is_state=True)


# --- what a layer caches in the whole model -------------------------------------------------------------------------


def _heads(layer: Layer) -> LayerShape:
    """K and V of heads."""
    spec: AttentionSpec = layer.spec
    if spec.num_head_slots is not None:
        # Not one slot for each head, even where there are as many: K and V may have slots of their own, or all heads of
        # K one. Only the attention backend knows.
        units = spec.num_heads * layer.tp_size
        slots = Component(name=SLOTS, units=units, bytes_per_unit=spec.state_content_size_bytes)
        return LayerShape(name=layer.name, components=(slots,), group=layer.group, whole_blocks=True, whole_ranks=True)
    heads = spec.num_kv_heads * layer.tp_size
    heads_unknown = False
    if spec.num_kv_heads == 1 and layer.tp_size > 1:
        heads_in_all = _heads_in_all(layer)
        heads_unknown = heads_in_all is None
        if heads_in_all is not None:
            heads = min(heads, heads_in_all)
    if spec.state_content_bytes is not None:
        # K and V of a head in a form of the attention backend, for instance with scales.
        component = Component(name=KEYS_AND_VALUES, units=heads, bytes_per_unit=spec.state_content_bytes)
        shape = LayerShape(name=layer.name, components=(component,), group=layer.group)
    else:
        k_bytes, v_bytes = (size * spec.dtype.itemsize for size in (spec.head_size, spec.head_size_v))
        shape = attention(layer.name, heads=heads, k_bytes=k_bytes, v_bytes=v_bytes, group=layer.group)
    return msgspec.structs.replace(shape, heads_unknown=heads_unknown)


def _heads_in_all(layer: Layer) -> int | None:
    """How many KV heads a layer of attention has on all ranks, as configurations say; None: they name several numbers.

    Beside latent attention, which has none, these layers are the draft model's.
    """
    configs = [layer.model_config]
    if layer.draft_config is not None and not layer.draft_config.use_mla:
        configs = [layer.draft_config] if layer.model_config.use_mla else [*configs, layer.draft_config]
    numbers = {config.get_total_num_kv_heads() for config in configs}
    if len(numbers) > 1 or any(names_several_numbers_of_heads(config) for config in configs):
        return None
    return int(numbers.pop())


def names_several_numbers_of_heads(model_config: ModelConfig) -> bool:
    """Whether layers may have unlike numbers of KV heads, as far as the names of the configuration's entries show."""
    numbers = {model_config.get_total_num_kv_heads()}
    left: list[Any] = [model_config.hf_text_config.to_dict()]
    while left:
        for name, value in left.pop().items():
            if isinstance(value, dict):
                left.append(value)
            elif any(part in str(name) for part in _NAMES_OF_HEADS):
                values = value if isinstance(value, list | tuple) else [value]
                numbers.update(each for each in values if type(each) is int and each > 0)
    return len(numbers) > 1


_NAMES_OF_HEADS = ("key_value_heads", "kv_heads", "head_kv", "attention_groups", "query_group_num", "n_heads_in_group")
"""What entries are called that count KV heads, in the configurations of models."""


def _latent(layer: Layer) -> LayerShape:
    """One latent that all ranks hold; compressed perhaps, so that several tokens have one entry."""
    spec: MLAAttentionSpec | SlidingWindowMLASpec = layer.spec
    return msgspec.structs.replace(
        latent(layer.name, bytes_per_token=spec.state_content_size_bytes, group=layer.group),
        tokens_per_entry=int(spec.tokens_per_state),
        whole_blocks=_has_scales_behind_the_tokens(spec),
    )


def _ring(layer: Layer) -> LayerShape:
    """The raw keys of the tokens that are not yet compressed: one block per request, copied as it is."""
    return _undivided(layer, RING, layer.spec.page_size_bytes)


def _state(layer: Layer) -> LayerShape:
    """A state. One that is not split over ranks is copied as it is, and so is a rank's part of one in which it is not
    known what belongs to which head."""
    spec: MambaSpec = layer.spec
    if spec.tp_replicated:
        return _undivided(layer, REPLICATED, spec.state_content_size_bytes)
    split = _split_state(layer.name, spec, layer.group, layer.model_config, layer.tp_size)
    if split is not None:
        return split
    part = Component(name=STATE_OF_RANK, units=layer.tp_size, bytes_per_unit=spec.state_content_size_bytes)
    return LayerShape(name=layer.name, components=(part,), group=layer.group, is_state=True, whole_ranks=True)


def _undivided(layer: Layer, component: str, content_bytes: int) -> LayerShape:
    whole = Component(name=component, units=1, bytes_per_unit=content_bytes)
    return LayerShape(name=layer.name, components=(whole,), group=layer.group, is_state=True)


def _has_scales_behind_the_tokens(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> bool:
    """Whether a block may hold the values of all its tokens and then the scales of all, as those of indexers do.

    Only where the tensor is of plain bytes, and then not where these are elements of FP8, whose scale is no part of the
    block, nor where the spec counts what a whole token has. DeepSeek-V4 counts, and has scales behind all the same.
    """
    if spec.dtype is not torch.uint8:
        return False
    if spec.model_version is not None:
        return True
    # The name, because vLLM drops the kind of quantization where it makes one spec of those of a group with windows.
    return spec.state_content_bytes is None and spec.cache_dtype_str not in _PLAIN_FP8


def _split_state(layer: str, spec: MambaSpec, group: int, model_config: ModelConfig, tp_size: int) -> LayerShape | None:
    """A convolution and an SSM state by channels and heads; None for anything else."""
    if spec.mamba_type not in _STATES or [len(shape) for shape in spec.shapes] != [2, 2 if _is_mamba1(spec) else 3]:
        return None
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
        return None
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
        return None
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


# --- the table ------------------------------------------------------------------------------------------------------


def _row(
    holds: Holds,
    require: Callable[[str, Any], None],
    shape: Callable[[Layer], LayerShape],
    keeps: Callable[[Any], Keeps],
    *,
    packs: bool = False,
) -> Family:
    return Family(holds=holds, require=require, shape=shape, keeps=keeps, packs=packs)


FAMILIES: dict[type[KVCacheSpec], Family] = {
    FullAttentionSpec: _row(Holds.TOKENS, _require_entry_per_token, _heads, _keeps_everything, packs=True),
    # The tokens of sinks lie in blocks that each engine fills for itself.
    SinkFullAttentionSpec: _row(Holds.TOKENS, _require_entry_per_token, _heads, _keeps_everything),
    # Its gaps open behind the prompt, and nothing behind them is lent.
    RSWASpec: _row(Holds.TOKENS, _require_entry_per_token, _heads, _keeps_everything),
    SlidingWindowSpec: _row(Holds.TOKENS, _require_entry_per_token, _heads, _keeps_window),
    ChunkedLocalAttentionSpec: _row(Holds.TOKENS, _require_entry_per_token, _heads, _keeps_chunk),
    MLAAttentionSpec: _row(Holds.TOKENS, _require_whole_entries, _latent, _keeps_everything),
    SlidingWindowMLASpec: _row(Holds.TOKENS, _require_whole_entries, _latent, _keeps_window_of_latents),
    CircularBufferSpec: _row(Holds.RING, _require_plain_ring, _ring, _keeps_one_block),
    MambaSpec: _row(Holds.STATE, _require_channels_first, _state, _keeps_one_block),
}
