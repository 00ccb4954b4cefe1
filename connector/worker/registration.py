"""From vLLM's KV cache tensors to what is registered with NIXL and told to peers.

`register_kv_caches` hands us one tensor view per layer; usually all of them share one allocation. From them and the
engine's configuration `derive_registration` makes four things: what each layer caches in the whole model
(`families`; `cpu_attention` and `turboquant` for orders that only attention layers know), the `RankLayout` (where each
block of each layer lies and what it holds, `cache_regions`), the memory ranges to register (whole allocations, each
once), and what tells engines that can exchange KV from those that cannot (`compatibility_hash`, `kv_identity`). A
built-in D has to accept the result and a built-in P has to look the same to us, so the order of regions, their names
and the granularity follow the built-in connector of the same vLLM version:

* regions are in natural order of layer names (layers.2 before layers.10), but with ring buffers in vLLM's own order;
* blocks are kernel blocks: when the attention backend cannot work with the configured block size, vLLM splits each
  block into several of a size that it can, as many in all cache groups. States (SSM) and ring buffers are not split.

`require_supported` says at start, in both processes, what cannot be transferred. A layout that peers could not derive
from what is advertised is refused too, when the tensors are there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import (
    get_current_attn_backends,
    get_current_attn_backends_and_specs,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.worker.utils import select_common_block_size

from connector.families import Holds, family_of, layer_shapes, layer_specs, require_known_spec
from connector.layout.advertised import describe
from connector.layout.geometry import CacheGroup, LayoutMismatch, RankLayout, Region
from connector.layout.landing import Permute
from connector.layout.local import LocalRank
from connector.layout.remote import layout_from_metadata
from connector.layout.shapes import LATENT, LayerShape
from connector.ports.nixl import MemoryKind, MemoryRange
from connector.staging import advertised_layout_name, is_staged, require_saves
from connector.unsupported import UnsupportedCache
from connector.wire.metadata import AgentMetadata
from connector.worker.cache_regions import device_id, has_latent_rows, memory_kind, merge, paged_regions, state_region
from connector.worker.compatibility_hash import compatibility_hash
from connector.worker.cpu_attention import as_stored, why_not_packed
from connector.worker.kv_identity import kv_identity
from connector.worker.parallelism import Placement, placement, require_supported_parallelism
from connector.worker.sleep_mode import require_sleep_mode_supported
from connector.worker.turboquant import undivided


class Registration(LocalRank, frozen=True, kw_only=True):
    """What a worker registers and advertises."""

    ranges: tuple[MemoryRange, ...]
    """Whole allocations that hold the regions, each once."""

    def agent_metadata(self, nixl_metadata: bytes) -> AgentMetadata:
        """What peers are told; `nixl_metadata` is the agent's own part, made after registering `ranges`."""
        return describe(self.layout, nixl_metadata)


def require_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise UnsupportedCache for an engine that cannot be served, whatever its tensors will look like."""
    require_supported_parallelism(vllm_config)
    require_saves(vllm_config)
    if not kv_cache_config.kv_cache_groups:
        raise UnsupportedCache("a model", "without a KV cache", "models that have one; leave --kv-transfer-config out")
    for group in kv_cache_config.kv_cache_groups:
        if group.host_resident or not group.enable_kv_transfer:
            where = "in memory of the host" if group.host_resident else "on the device only, as a copy"
            found = f"(layers {group.layer_names[0]} ...) that is kept {where}"
            raise UnsupportedCache("a KV cache group", found, "caches without HiSparse, which divides them in this way")
    for layer, spec in layer_specs(kv_cache_config).items():
        require_known_spec(layer, spec)
        if family_of(spec).holds is Holds.RING and is_staged(vllm_config):
            raise UnsupportedCache("kv_buffer_device cpu with", f"the ring buffer {layer}", "the device's own memory")
    buffer_device = vllm_config.kv_transfer_config.kv_buffer_device
    if buffer_device != current_platform.device_type and not is_staged(vllm_config):
        supported = dict.fromkeys((current_platform.device_type, "cpu"))
        raise UnsupportedCache("kv_buffer_device", buffer_device, " or ".join(supported))
    require_sleep_mode_supported(vllm_config)


def derive_registration(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> Registration:
    """Describe this rank's KV cache. Called once, in the worker, with all layers' tensors.

    `kv_caches` maps layer names to views of shape [blocks, heads, tokens, content]: the engine's, or the host buffers
    that stand for them (`host_staging`). Layers without a cache of their own (they share another layer's) may be among
    them and are skipped. Raises UnsupportedCache.
    """
    require_supported(vllm_config, kv_cache_config)
    place = placement(vllm_config)
    tp_rank, tp_size = place.tp_rank, place.tp_size
    specs = layer_specs(kv_cache_config)
    prefix_caching = vllm_config.cache_config.enable_prefix_caching
    by_specs = layer_shapes(
        kv_cache_config,
        vllm_config.model_config,
        tp_size,
        prefix_caching=prefix_caching,
        draft_config=_draft_config(vllm_config),
    )
    as_shaped = undivided(by_specs, vllm_config)
    shapes = as_stored(as_shaped, specs, vllm_config)
    not_packed = why_not_packed(vllm_config, kv_cache_config, as_shaped, specs)
    backends = get_current_attn_backends(vllm_config)
    block_size_tokens = _block_size_tokens(vllm_config, kv_cache_config)
    kernel_block_size_tokens = _kernel_block_size_tokens(vllm_config, kv_cache_config, backends, block_size_tokens)
    ratio = block_size_tokens // kernel_block_size_tokens
    layers = _layers(kv_cache_config, kv_caches, specs)
    layout_name = advertised_layout_name(vllm_config)
    has_states = any(shapes[layer].is_state and family_of(specs[layer]).holds is not Holds.RING for layer in layers)
    has_rows = has_latent_rows(vllm_config, [kv_caches[layer] for layer in layers], layout_name, states=has_states)
    regions = _regions(kv_cache_config, kv_caches, layers, specs, shapes, place, ratio, in_latent_rows=has_rows)
    first = kv_caches[layers[0]]
    backend_name = backends[0].get_name()
    layout = RankLayout(
        engine_id=vllm_config.kv_transfer_config.engine_id,
        pp_rank=place.rank.pp_rank,
        tp_rank=place.rank.tp_rank,
        tp_size=place.size,
        dcp_size=place.dcp_size,
        pcp_size=place.pcp_size,
        regions=merge(regions),
        kernel_block_size_tokens=kernel_block_size_tokens,
        kernel_blocks_per_block=ratio,
        layout_name=layout_name,
        attention_backend=backend_name,
        device_id=device_id(first),
        groups=_cache_groups(vllm_config, kv_cache_config, kv_caches, shapes, place, ratio),
        pages_in_rows=_pages_in_rows(regions, specs, ratio) if has_rows else {},
    )
    registration = Registration(
        layout=layout,
        shapes=shapes,
        ranges=_ranges([kv_caches[layer] for layer in layers]),
        compatibility_hash=compatibility_hash(vllm_config, backend_name),
        identity=kv_identity(
            vllm_config,
            backend_name,
            specs,
            shapes,
            tp_rank=tp_rank,
            tp_size=tp_size,
            groups=layout.cache_groups,
        ),
        permute=_permute(vllm_config, layout.memory_kind),
        as_shaped={} if not_packed else as_shaped,
        not_packed=not_packed,
    )
    _require_complete_metadata(registration)
    return registration


def _draft_config(vllm_config: VllmConfig) -> ModelConfig | None:
    """Of a draft model with KV of its own, which is transferred with the model's."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    config: ModelConfig | None = speculative.draft_model_config
    return config


def _layers(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, KVCacheSpec]
) -> list[str]:
    """Those with a cache of their own, in the order of their regions. Raises UnsupportedCache if one has no tensor."""
    in_order = kv_caches if _has_rings(kv_cache_config) else sorted(kv_caches, key=_natural_order)
    layers = [layer for layer in in_order if layer in specs]
    missing = specs.keys() - set(layers)
    if missing or not layers:
        raise UnsupportedCache("KV cache without a tensor, layer", min(missing, default="any"), "one tensor per layer")
    return layers


def _regions(
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    layers: list[str],
    specs: Mapping[str, KVCacheSpec],
    shapes: Mapping[str, LayerShape],
    place: Placement,
    ratio: int,
    *,
    in_latent_rows: bool,
) -> list[Region]:
    """Those of each layer in turn. Blocks of tokens are split into `ratio` kernel blocks, states are not."""
    num_blocks, has_rings = kv_cache_config.num_blocks, _has_rings(kv_cache_config)
    regions: list[Region] = []
    for layer in layers:
        shape, cache, page_bytes = shapes[layer], kv_caches[layer], specs[layer].page_size_bytes
        if shape.is_state:
            region = state_region(
                shape, cache, num_blocks=num_blocks, page_bytes=page_bytes, tp_rank=place.tp_rank, tp_size=place.tp_size
            )
            regions.append(region)
        else:
            regions += paged_regions(
                shape,
                cache,
                num_blocks=num_blocks * ratio,
                page_bytes=page_bytes // ratio,
                tp_rank=place.tp_rank,
                tp_size=place.tp_size,
                has_rings=has_rings,
                in_latent_rows=in_latent_rows,
            )
    return regions


def _pages_in_rows(
    regions: Iterable[Region], specs: Mapping[str, KVCacheSpec], ratio: int
) -> dict[str, tuple[int, int]]:
    """`regions`: of one layer each."""
    of_rows = [region for region in regions if region.pieces[0].component == LATENT]
    return {
        region.name: (region.pieces[0].offset_bytes, specs[region.name].page_size_bytes // ratio) for region in of_rows
    }


def _permute(vllm_config: VllmConfig, kind: MemoryKind) -> Permute:
    if vllm_config.kv_transfer_config.enable_permute_local_kv:
        return Permute.ORDERS
    # A device permutes while the engine thread goes on; a processor does it on the engine thread, which takes as long
    # as reading smaller blocks head by head (docs/performance.md).
    return Permute.BLOCK_SIZES if kind == "VRAM" else Permute.NEVER


def _require_complete_metadata(registration: Registration) -> None:
    """A peer must be able to derive our whole layout from what we advertise and the layout's name."""
    ours = registration.layout
    try:
        derived = layout_from_metadata(describe(ours, b""), rank=ours.rank, tp_size=ours.tp_size, local=registration)
    except LayoutMismatch as mismatch:
        raise UnsupportedCache(mismatch.field, mismatch.local, mismatch.remote) from mismatch
    for region, as_seen in zip(ours.regions, derived.regions, strict=True):
        if region != as_seen:
            raise UnsupportedCache(f"order of axes of {region.name}", "other than its name says", ours.layout_name)


def _block_size_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """The block size that is advertised: one for all groups of tokens."""
    sizes = [
        group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups if _holds(group) is Holds.TOKENS
    ]
    return math.lcm(*sizes) if sizes else vllm_config.cache_config.block_size


def _holds(group: KVCacheGroupSpec) -> Holds:
    return family_of(group.kv_cache_spec).holds


def _has_rings(kv_cache_config: KVCacheConfig) -> bool:
    return any(_holds(group) is Holds.RING for group in kv_cache_config.kv_cache_groups)


def _cache_groups(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    shapes: Mapping[str, LayerShape],
    place: Placement,
    ratio: int,
) -> tuple[CacheGroup, ...]:
    """Sizes of the kernel blocks of each group, from the tensors, and which of several ranks' blocks these are."""
    groups: list[CacheGroup] = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if _holds(group) is not Holds.TOKENS:
            if _holds(group) is Holds.RING and spec.dcp_sharded and place.dcp_size > 1:
                field = f"decode_context_parallel_size with ring buffers of {group.layer_names}"
                raise UnsupportedCache(field, place.dcp_size, "1, or ring buffers that are not split")
            groups.append(CacheGroup(tokens_per_kernel_block=0))
            continue
        # A pipeline stage may have no layer of a group.
        expected = spec.block_size // ratio
        layers = [layer for layer in group.layer_names if layer in shapes]
        tokens = {kv_caches[layer].shape[2] * shapes[layer].tokens_per_entry for layer in layers} | {expected}
        if len(tokens) != 1:
            raise UnsupportedCache(f"KV cache group of {group.layer_names} with block sizes", tokens, expected)
        dcp_size = place.dcp_size if spec.dcp_sharded else 1
        in_turn = vllm_config.parallel_config.cp_kv_cache_interleave_size
        if dcp_size > 1 and in_turn != spec.block_size:
            raise UnsupportedCache("cp_kv_cache_interleave_size", in_turn, f"the block size {spec.block_size}")
        groups.append(
            CacheGroup(
                tokens_per_kernel_block=expected,
                kernel_blocks_per_block=ratio,
                dcp_size=dcp_size,
                dcp_rank=place.rank.tp_rank % dcp_size,
            )
        )
    return tuple(groups)


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


def _ranges(caches: list[torch.Tensor]) -> tuple[MemoryRange, ...]:
    ranges: dict[int, MemoryRange] = {}
    for cache in caches:
        storage = cache.untyped_storage()
        address = storage.data_ptr()
        ranges.setdefault(
            address,
            MemoryRange(
                address=address,
                length_bytes=storage.nbytes(),
                device_id=device_id(cache),
                memory_kind=memory_kind(cache),
            ),
        )
    return tuple(ranges.values())
