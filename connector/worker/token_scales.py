"""Has scales that lie in the KV cache laid out before anything is read into it.

With a cache type such as int8_per_token_head, attention keeps the scale of each token of each head behind its numbers.
vLLM's Triton attention makes its view of them in the first forward pass of a layer, and sets those of all blocks to 1
then. Where CUDA graphs have attention in them, that pass comes before there are requests. Otherwise, as with
--enforce-eager, it is that of the first request: the KV that was read for it, and for others by then, would be
multiplied by 1. So each layer does it when the cache is registered, before anybody can read, and finds it done later;
with buffers on the host too, from which KV is copied into the same blocks.

How a layer does it is no interface of vLLM's. An engine in which it cannot be seen to have been done does not start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import kv_cache_uses_per_token_head_scales

from connector.unsupported import UnsupportedCache
from connector.worker.device_stream import may_wait

_LAY_OUT = "_ensure_scale_caches"
_VIEWS = ("_k_scale_cache", "_v_scale_cache")
"""Names in an attention layer's implementation: the method that makes the views of its scales, and the attributes that
hold them, None before."""


def lay_out_scales(vllm_config: VllmConfig) -> None:
    """For all layers whose scales lie in the cache, also those that share the cache of another one; waits for the
    device. Once, when layers have their caches, and nothing is in these yet. Raises UnsupportedCache."""
    devices: set[torch.device] = set()
    # As in a forward pass, which may find tensors that can be written to in this mode only.
    with torch.inference_mode():
        for name, layer in _layers_with_scales(vllm_config):
            _lay_out(name, layer)
            devices.add(layer.kv_cache.device)
    for device in devices:
        if device.type != "cpu":
            with may_wait():
                torch.accelerator.current_stream(device).synchronize()


def _layers_with_scales(vllm_config: VllmConfig) -> Iterator[tuple[str, Any]]:
    # An abstract class, which a type checker does not take for a type to look up.
    kind = cast(type[Any], AttentionLayerBase)
    for name, layer in get_layers_from_vllm_config(vllm_config, kind).items():
        has_scales = kv_cache_uses_per_token_head_scales(str(getattr(layer, "kv_cache_dtype", "auto")))
        if has_scales and layer.kv_cache.numel():
            yield name, layer


def _lay_out(name: str, layer: Any) -> None:
    attention = getattr(layer, "impl", None)
    why: Exception | None = None
    try:
        getattr(attention, _LAY_OUT)(layer.kv_cache)
    except Exception as error:  # whatever another version of it raises
        why = error
    if why is not None or any(getattr(attention, view, None) is None for view in _VIEWS):
        expected = (
            f"a type without scales of each token, because {type(attention).__name__} of this vLLM may set them all to"
            " 1 with the first request, over KV that was read"
        )
        raise UnsupportedCache("--kv-cache-dtype", f"{layer.kv_cache_dtype} ({name})", expected) from why
