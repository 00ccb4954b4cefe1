"""The order in which vLLM's attention on CPUs keeps K and V, which is not that of the tensor's shape.

To it a block of a head is a block of K and then a block of V, each in an order that suits the instruction set it
computes with. All known ones are lanes (`Component.bytes_per_lane`):

* vec and vec16: K is a lane for each of its elements, [elements][tokens]; V is a single lane, [tokens][elements].
* amx: K is a single lane, of tiles of 16 tokens; V has a lane for each 16 elements, of tiles of 2 tokens. What a tile
  does with the tokens in it does not matter, because blocks of whole tiles are all that this instruction set accepts.

Which of these a layer has is told to peers (`element_order`): blocks in another order are refused in the handshake.

The metadata builder writes the instruction set into the layer before any cache is registered. Of one that is not in the
table blocks can be exchanged as they are, but only with an engine whose blocks are of the same size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from connector.layout.compatibility import CPU_ATTENTION
from connector.layout.shapes import LayerShape

_LANES: Mapping[str, tuple[int | None, int | None]] = {"vec": (1, None), "vec16": (1, None), "amx": (None, 16)}
"""Elements in a lane of K and of V, by instruction set; None: all of them."""


def as_stored(
    shapes: Mapping[str, LayerShape], specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig
) -> dict[str, LayerShape]:
    """The shapes of all layers, with the order of those that CPU attention computes."""
    # An abstract class, which a type checker does not take for a type to look up.
    kind = cast(type[Any], AttentionLayerBase)
    layers = get_layers_from_vllm_config(vllm_config, kind, list(shapes))
    in_order = {
        name: _as_stored(shapes[name], specs[name], getattr(layer, "isa", ""))
        for name, layer in layers.items()
        if layer.get_attn_backend().get_name() == CPU_ATTENTION
    }
    return {**shapes, **in_order}


def element_order(layer: AttentionLayerBase) -> str:
    """How K and V of a head lie in a block: texts that are equal for equal orders; empty: as the shape says."""
    if layer.get_attn_backend().get_name() != CPU_ATTENTION:
        return ""
    instruction_set = str(getattr(layer, "isa", ""))
    # Instruction sets with the same lanes keep K and V in the same order.
    lanes = _LANES.get(instruction_set)
    return next((name for name, each in _LANES.items() if each == lanes), instruction_set)


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
