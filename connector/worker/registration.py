"""From vLLM's KV cache tensors to what is registered with NIXL and told to peers.

`register_kv_caches` hands us one tensor view per attention layer; usually all of them share one allocation. From them
and the engine's configuration `derive_registration` makes three things: the `RankLayout` (where each block of each
layer lies), the memory ranges to register (whole allocations, each once), and the compatibility hash. A built-in D has
to accept the result and a built-in P has to look the same to us, so the order of regions, their names and the
granularity follow the built-in connector of the same vLLM version:

* one region per layer, in natural order of layer names (layers.2 before layers.10), because K and V of a token are
  packed side by side;
* a layout that interleaves the heads of all blocks, or of all layers within a block, has no such region; the former is
  refused, the latter is one region of whole rows that the layers share;
* blocks are kernel blocks: when the attention backend cannot work with the configured block size, vLLM splits each
  block into several of a size that it can.

Only the plain case is covered; `require_supported` says at start, in both processes, what is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import (
    get_current_attn_backends,
    get_current_attn_backends_and_specs,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import select_common_block_size

from connector.layout.geometry import MemoryKind, RankLayout, Region
from connector.ports.nixl import MemoryRange
from connector.wire.compatibility import compatibility_hash
from connector.wire.metadata import AgentMetadata, describe


class UnsupportedCache(Exception):
    """This engine's configuration or KV cache is outside of what the connector can transfer.

    `field` is what stands in the way, `found` its value, `expected` what is supported.
    """

    def __init__(self, field: str, found: object, expected: object) -> None:
        super().__init__(f"the KV connector does not support {field} {found}; supported: {expected}")
        self.field = field
        self.found = str(found)
        self.expected = str(expected)


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker registers and advertises."""

    layout: RankLayout
    ranges: tuple[MemoryRange, ...]
    """Whole allocations that hold the regions, each once."""
    memory_kind: MemoryKind
    compatibility_hash: str

    def agent_metadata(self, nixl_metadata: bytes) -> AgentMetadata:
        """What peers are told; `nixl_metadata` is the agent's own part, made after registering `ranges`."""
        return describe(self.layout, nixl_metadata)


def require_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise UnsupportedCache unless the engine is the plain case: full attention, one group, TP only."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise UnsupportedCache(name, getattr(parallel, name), 1)
    if vllm_config.model_config.use_mla:
        raise UnsupportedCache("attention", "MLA", "full attention")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedCache("number of KV cache groups", len(groups), 1)
    if groups[0].host_resident or not groups[0].enable_kv_transfer:
        raise UnsupportedCache("KV cache group", "that is kept on the host or not transferable", "an ordinary one")
    for layer, spec in _layer_specs(kv_cache_config).items():
        # Subclasses are other things: MLA, sinks, ring buffers.
        if type(spec) is not FullAttentionSpec:
            raise UnsupportedCache(f"KV cache of {layer}", type(spec).__name__, FullAttentionSpec.__name__)
    buffer_device = vllm_config.kv_transfer_config.kv_buffer_device
    if buffer_device != current_platform.device_type:
        raise UnsupportedCache("kv_buffer_device", buffer_device, f"{current_platform.device_type} (no host staging)")


def derive_registration(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> Registration:
    """Describe this rank's KV cache. Called once, in the worker, with all layers' tensors.

    `kv_caches` maps layer names to views of shape [blocks, kv heads, tokens, content]. Layers without a cache of their
    own (they share another layer's) may be among them and are skipped. Raises UnsupportedCache.
    """
    require_supported(vllm_config, kv_cache_config)
    specs = _layer_specs(kv_cache_config)
    backends = get_current_attn_backends(vllm_config)
    block_size_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    kernel_block_size_tokens = _kernel_block_size_tokens(vllm_config, kv_cache_config, backends, block_size_tokens)
    ratio = block_size_tokens // kernel_block_size_tokens
    layers = [layer for layer in sorted(kv_caches, key=_natural_order) if layer in specs]
    missing = specs.keys() - set(layers)
    if missing:
        raise UnsupportedCache("KV cache without a tensor, layer", min(missing), "one tensor per layer")
    regions: dict[int, Region] = {}
    for layer in layers:
        page_bytes = specs[layer].page_size_bytes // ratio
        region = _region(layer, kv_caches[layer], kv_cache_config.num_blocks * ratio, page_bytes)
        regions.setdefault(region.base_address, region)
    first = kv_caches[layers[0]]
    backend_name = backends[0].get_name()
    return Registration(
        layout=RankLayout(
            engine_id=vllm_config.kv_transfer_config.engine_id,
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=get_tensor_model_parallel_world_size(),
            dcp_size=1,
            pcp_size=1,
            regions=tuple(regions.values()),
            kernel_block_size_tokens=kernel_block_size_tokens,
            kernel_blocks_per_block=ratio,
            layout_name=vllm_config.cache_config.get_resolved_kv_cache_layout().name,
            attention_backend=backend_name,
            device_id=_device_id(first),
        ),
        ranges=_ranges([kv_caches[layer] for layer in layers]),
        memory_kind=_memory_kind(first),
        compatibility_hash=compatibility_hash(vllm_config, backend_name),
    )


def _layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """The spec of each layer that has a cache of its own."""
    specs: dict[str, KVCacheSpec] = {}
    for group in kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            specs.update(group.kv_cache_spec.kv_cache_specs)
        else:
            specs.update(dict.fromkeys(group.layer_names, group.kv_cache_spec))
    return specs


def _natural_order(layer: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key that orders numbers inside names by value."""
    parts = re.split(r"(\d+)", layer)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts)


def _kernel_block_size_tokens(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, backends: list[type], block_size_tokens: int
) -> int:
    """The block size that all attention backends can work with, as vLLM chooses it."""
    in_use, specs = get_current_attn_backends_and_specs(vllm_config, kv_cache_config, backends)
    size: int = select_common_block_size(block_size_tokens, in_use, specs)
    return size


def _region(layer: str, cache: torch.Tensor, num_blocks: int, page_bytes: int) -> Region:
    """Where the blocks of `layer` lie. `num_blocks` and `page_bytes` count and measure kernel blocks."""
    if cache.ndim != 4 or cache.shape[0] < num_blocks:
        raise UnsupportedCache(f"KV cache of {layer} with shape", tuple(cache.shape), f"[{num_blocks}, ., ., .]")
    stride_bytes = cache.stride(0) * cache.element_size()
    storage = cache.untyped_storage()
    # An allocation of nothing but rows of this stride, perhaps rounded up to a page of memory at its end.
    storage_is_rows = 0 <= storage.nbytes() - num_blocks * stride_bytes < stride_bytes
    page_is_contiguous = cache[0].is_contiguous() and cache[0].nbytes == page_bytes
    if storage_is_rows and not page_is_contiguous:
        address, length_bytes = storage.data_ptr(), stride_bytes
    else:
        address, length_bytes = cache.data_ptr(), page_bytes
    end_bytes = cache.data_ptr() - address + _extent_bytes(cache[0])
    if end_bytes > length_bytes or stride_bytes < length_bytes:
        raise UnsupportedCache(f"KV cache of {layer} with strides", cache.stride(), "blocks that are contiguous")
    return Region(
        name=layer,
        base_address=address,
        block_length_bytes=length_bytes,
        block_stride_bytes=stride_bytes,
        num_blocks=num_blocks,
        memory_kind=_memory_kind(cache),
    )


def _extent_bytes(block: torch.Tensor) -> int:
    """Bytes from the first to the last element of a block."""
    last = sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True))
    extent_bytes: int = (last + 1) * block.element_size()
    return extent_bytes


def _ranges(caches: list[torch.Tensor]) -> tuple[MemoryRange, ...]:
    ranges: dict[int, MemoryRange] = {}
    for cache in caches:
        storage = cache.untyped_storage()
        address = storage.data_ptr()
        ranges.setdefault(
            address, MemoryRange(address=address, length_bytes=storage.nbytes(), device_id=_device_id(cache))
        )
    return tuple(ranges.values())


def _memory_kind(cache: torch.Tensor) -> MemoryKind:
    return "DRAM" if cache.device.type == "cpu" else "VRAM"


def _device_id(cache: torch.Tensor) -> int:
    """NIXL's device number; main memory is device 0."""
    device_id: int = max(cache.get_device(), 0)
    return device_id
