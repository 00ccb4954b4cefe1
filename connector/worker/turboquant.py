"""The two orders of a block of TurboQuant, of which nothing that peers are told shows which one a layer has.

Each token of each head has data and then metadata (norms, scales), as the tensor's shape says. Where FlyDSL is there
(ROCm on gfx950), a block of the same size holds the data of all tokens and heads, and behind it the metadata. Such a
block is told apart in the identity (`wire.identity`), and exchanged as it is: neither tokens nor heads can be cut out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.config import VllmConfig

from connector.layout.shapes import LayerShape
from connector.worker.cpu_attention import layers_of


def is_in_arrays(layer: Any) -> bool:
    """Whether the blocks of an attention layer hold the metadata of all tokens behind the data of all."""
    return bool(getattr(getattr(layer, "impl", None), "_soa_store", False))


def undivided(shapes: Mapping[str, LayerShape], vllm_config: VllmConfig) -> dict[str, LayerShape]:
    """The shapes of all layers, where those in arrays are read in whole blocks, from as many ranks."""
    in_arrays = {
        name: msgspec.structs.replace(shapes[name], whole_blocks=True, whole_ranks=True)
        for name, layer in layers_of(vllm_config, shapes).items()
        if is_in_arrays(layer)
    }
    return {**shapes, **in_arrays}
