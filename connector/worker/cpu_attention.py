"""The order in which vLLM's attention on CPUs keeps K and V, which is not that of the tensor's shape.

To it a block of a head is a block of K and then a block of V, each in an order that suits the instruction set it
computes with. All known ones are lanes (`Component.bytes_per_lane`):

* vec and vec16: K is a lane for each of its elements, [elements][tokens]; V is a single lane, [tokens][elements].
* amx: K is a single lane, of tiles of 16 tokens; V has a lane for each 16 elements, of tiles of 2 tokens. What a tile
  does with the tokens in it does not matter, because blocks of whole tiles are all that this instruction set accepts.

Which of these a layer has is told to peers (`element_order`): blocks in another order are refused in the handshake.
Only those of a peer on GPUs, which lie as the tensor's shape says, can be put in our order once they have been read, on
an engine that allows it (`why_not_packed`; `packing` does it).

The metadata builder writes the instruction set into the layer before any cache is registered. Of one that is not in the
table blocks can be exchanged as they are, but only with an engine whose blocks are of the same size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, is_quantized_kv_cache

from connector.families import family_of
from connector.layout.compatibility import CPU_ATTENTION
from connector.layout.local import LocalRank
from connector.layout.shapes import LayerShape
from connector.worker.packing import PackedBlocks, PackedLayer

_LANES: Mapping[str, tuple[int | None, int | None]] = {"vec": (1, None), "vec16": (1, None), "amx": (None, 16)}
"""Elements in a lane of K and of V, by instruction set; None: all of them."""

_NOT_HERE = "the decode engine cannot put what it reads in the order of attention on CPUs"


def as_stored(
    shapes: Mapping[str, LayerShape], specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig
) -> dict[str, LayerShape]:
    """The shapes of all layers, with the order of those that CPU attention computes."""
    in_order = {
        name: _as_stored(shapes[name], specs[name], getattr(layer, "isa", ""))
        for name, layer in layers_of(vllm_config, shapes).items()
        if _is_on_cpus(layer)
    }
    return {**shapes, **in_order}


def layers_of(vllm_config: VllmConfig, names: Iterable[str]) -> Mapping[str, Any]:
    """Those of the forward pass that have these names; of a cache that is no layer's there is none."""
    # An abstract class, which a type checker does not take for a type to look up.
    kind = cast(type[Any], AttentionLayerBase)
    layers: Mapping[str, Any] = get_layers_from_vllm_config(vllm_config, kind, list(names))
    return layers


def why_not_packed(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    shapes: Mapping[str, LayerShape],
    specs: Mapping[str, KVCacheSpec],
) -> str:
    """Why this engine cannot put K and V in its own order that lie as `shapes` say, and what to do; empty: it can."""
    if vllm_config.kv_transfer_config.get_from_extra_config("enforce_handshake_compat", True):
        return (
            "start both engines with the same attention back end: on CPUs K and V of a block have another order than "
            "on GPUs. A decode engine on CPUs puts what it reads in its own with enforce_handshake_compat=false"
        )
    if (groups := len(kv_cache_config.kv_cache_groups)) != 1:
        return f"{_NOT_HERE}: that needs one KV cache group (--disable-hybrid-kv-cache-manager), and it has {groups}"
    layers = layers_of(vllm_config, shapes)
    for name, shape in shapes.items():
        layer, spec = layers.get(name), specs[name]
        sizes = [component.bytes_per_unit for component in shape.components]
        names = [component.name for component in shape.components]
        if not family_of(spec).packs or names != ["k", "v"] or sizes[0] != sizes[1]:
            return f"{_NOT_HERE}: that needs full attention with K and V of equal size, and {name} has other caches"
        if layer is None or not _is_on_cpus(layer):
            return f"{_NOT_HERE}: that needs attention on CPUs in every layer, and {name} has another back end"
        if is_quantized_kv_cache(layer.kv_cache_dtype):
            return f"{_NOT_HERE}: that needs a KV cache that is not quantized (--kv-cache-dtype auto)"
    return ""


def packed_blocks(vllm_config: VllmConfig, local: LocalRank, caches: Mapping[str, torch.Tensor]) -> PackedBlocks:
    """For this rank, whose caches are `caches`, by layer."""
    layers = layers_of(vllm_config, local.as_shaped)
    return PackedBlocks(PackedLayer(layers[name], caches[name]) for name in local.as_shaped)


def element_order(layer: AttentionLayerBase) -> str:
    """How K and V of a head lie in a block: texts that are equal for equal orders; empty: as the shape says."""
    if not _is_on_cpus(layer):
        return ""
    instruction_set = str(getattr(layer, "isa", ""))
    # Instruction sets with the same lanes keep K and V in the same order.
    lanes = _LANES.get(instruction_set)
    return next((name for name, each in _LANES.items() if each == lanes), instruction_set)


def _is_on_cpus(layer: AttentionLayerBase) -> bool:
    return bool(layer.get_attn_backend().get_name() == CPU_ATTENTION)


def _as_stored(shape: LayerShape, spec: KVCacheSpec, instruction_set: str) -> LayerShape:
    assert isinstance(spec, AttentionSpec)
    elements = _LANES.get(instruction_set)
    if elements is None or [component.name for component in shape.components] != ["k", "v"]:
        return msgspec.structs.replace(shape, whole_blocks=True)
    item_bytes = spec.dtype.itemsize
    components = tuple(
        msgspec.structs.replace(component, bytes_per_lane=count * item_bytes if count else component.bytes_per_unit)
        for component, count in zip(shape.components, elements, strict=True)
    )
    return msgspec.structs.replace(shape, components=components)
