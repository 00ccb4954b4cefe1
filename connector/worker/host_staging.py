"""Buffers on the host that stand for the device's KV cache in every transfer, and the copies between the two.

Everything here runs on the engine thread, which issues the forward passes too: a save comes after the pass that wrote
the blocks, a load before the pass that uses them. The copy operation is vLLM's, for the platform. It takes logical
views, so the two sides may differ in the order of their axes. On the way to the host it returns when the bytes are
there; on the way back they are in the stream, before the next pass.

Blocks are copied one cache group at a time, and of that group's layers only. On the device layers of several groups may
share memory, which is told apart by whose block it is; here each layer has a buffer of its own. To copy all layers of a
block on the way back would put what the buffers of the other groups hold, which is anything, over the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.families import Holds, family_of, layer_specs
from connector.layout.shapes import page_strides
from connector.unsupported import UnsupportedCache
from connector.worker.landing import MOVED_AT_ONCE_BYTES, in_parts

Caches: TypeAlias = dict[str, torch.Tensor]
"""By layer: views of shape [blocks, heads, tokens, content]."""

Direction: TypeAlias = Literal["h2d", "d2h"]
"""Host to device, device to host."""

CopyBlocks: TypeAlias = Callable[[Caches, Caches, list[int], list[int], Direction], None]
"""vLLM's `CopyBlocksOp`: source, destination, their kernel block ids, direction."""


class CopyOperationMissing(RuntimeError):
    """A transfer was asked for before vLLM gave the operation that copies between device and host."""

    def __init__(self) -> None:
        super().__init__(
            "kv_buffer_device cpu: no copy operation was set, expected one from set_host_xfer_buffer_ops after the KV"
            " caches are registered; use a model runner that calls it, or kv_buffer_device of the device"
        )


def make_host_buffers(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], layout_name: str
) -> Caches:
    """A buffer for each layer that has a cache of its own, shaped as the device's view, with axes in the given order.

    Raises UnsupportedCache for an order in which layers are not outermost: buffers of layers lie apart.
    """
    if not layout_name.startswith("L"):
        advice = "L outermost with kv_buffer_device cpu, such as VLLM_KV_CACHE_LAYOUT=LBHNC"
        raise UnsupportedCache("KV cache layout", layout_name, advice)
    specs = layer_specs(kv_cache_config)
    buffers: Caches = {}
    for layer, cache in kv_caches.items():
        if layer not in specs:
            continue
        if cache.ndim != 4:
            raise UnsupportedCache(f"KV cache of {layer} with shape", tuple(cache.shape), "four axes")
        spec = specs[layer]
        # Peers count with the page of a state, which may be padded to that of attention; pages of tokens need nothing.
        page_bytes = spec.page_size_bytes if family_of(spec).holds is Holds.STATE else cache[0].nbytes
        buffers[layer] = _host_buffer(cache, layout_name, padding_bytes=page_bytes - cache[0].nbytes)
    return buffers


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are copied together: both sides' views, by layer."""

    device: Caches
    host: Caches
    kernel_blocks_per_block: int

    @property
    def kernel_block_bytes(self) -> int:
        """Of the layer whose are largest."""
        return max((cache[0].nbytes for cache in self.host.values()), default=1)

    def kernel_block_ids(self, block_ids: Sequence[int]) -> list[int]:
        ratio = self.kernel_blocks_per_block
        return [block_id * ratio + part for block_id in block_ids for part in range(ratio)]


class HostStaging:
    """Copies blocks between the KV cache `device` and the buffers `host` made for it."""

    def __init__(self, kv_cache_config: KVCacheConfig, device: Mapping[str, torch.Tensor], host: Caches) -> None:
        self._copy_operation: CopyBlocks | None = None
        self._groups: list[_Group] = []
        for group in kv_cache_config.kv_cache_groups:
            layers = [layer for layer in group.layer_names if layer in host]
            # A pipeline stage may have no layer of a group.
            (blocks,) = {host[layer].shape[0] for layer in layers} or {kv_cache_config.num_blocks}
            self._groups.append(
                _Group(
                    device={layer: device[layer] for layer in layers},
                    host={layer: host[layer] for layer in layers},
                    kernel_blocks_per_block=blocks // kv_cache_config.num_blocks,
                )
            )

    def set_copy_operation(self, copy_operation: CopyBlocks) -> None:
        self._copy_operation = copy_operation

    def require_copy_operation(self) -> CopyBlocks:
        """Raises CopyOperationMissing."""
        if self._copy_operation is None:
            raise CopyOperationMissing
        return self._copy_operation

    def save(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Device to host: logical blocks of each cache group. Raises what says `lacks_memory` where not even
        one fits beside the cache."""
        self._copy(block_ids, "d2h")

    def load(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Host to device: logical blocks of each cache group. Raises as `save` does."""
        self._copy(block_ids, "h2d")

    def _copy(self, block_ids: Sequence[Sequence[int]], direction: Direction) -> None:
        copy = self.require_copy_operation()
        for group, ids in zip(self._groups, block_ids, strict=True):
            if ids:
                _copy_group(copy, group, ids, direction)


def _copy_group(copy: CopyBlocks, group: _Group, block_ids: Sequence[int], direction: Direction) -> None:
    source, target = (group.device, group.host) if direction == "d2h" else (group.host, group.device)
    kernel_ids = group.kernel_block_ids(block_ids)

    def move(part: slice) -> None:
        copy(source, target, kernel_ids[part], kernel_ids[part], direction)

    with gpu_sync_allowed():
        # vLLM's operation gathers what it is to copy of a layer in the device's memory.
        in_parts(len(kernel_ids), MOVED_AT_ONCE_BYTES // group.kernel_block_bytes, move)


def _host_buffer(cache: torch.Tensor, layout_name: str, *, padding_bytes: int) -> torch.Tensor:
    """Zeros, in an allocation of its own. Not pinned: the allocator of pinned memory rounds up to powers of two."""
    blocks, heads, tokens, content = cache.shape
    item_bytes = cache.element_size()
    strides = page_strides(
        layout_name,
        layers=1,
        blocks=blocks,
        heads=heads,
        tokens=tokens,
        bytes_per_token=content * item_bytes,
        padding_bytes=padding_bytes,
    )
    elements = torch.zeros(strides.layer, dtype=torch.uint8).view(cache.dtype)
    steps = [step // item_bytes for step in (strides.block, strides.head, strides.token, item_bytes)]
    return elements.as_strided(cache.shape, steps)
