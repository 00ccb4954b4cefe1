"""The KV cache as plain memory: bytes by address, for zeroing what no READ has written.

On the engine thread, before vLLM is told that the request is loaded, so that the forward pass that uses the blocks
comes after it on the same stream. Where KV is staged on the host, it is the host's memory that is zeroed, before the
blocks are copied to the device.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import torch

from connector.protocol import Memory


class CacheMemory:
    """Zeroes stretches of the allocations that back `caches`."""

    def __init__(self, caches: Iterable[torch.Tensor]) -> None:
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
        self._starts = sorted(storages)
        self._bytes = [
            torch.empty(0, dtype=torch.uint8, device=storages[start].device).set_(storages[start])
            for start in self._starts
        ]

    def zero(self, memory: Memory) -> None:
        """Zero all stretches; each lies within one allocation."""
        for address, length in zip(memory.addresses.tolist(), memory.lengths.tolist(), strict=True):
            index = bisect.bisect_right(self._starts, address) - 1
            offset = address - self._starts[index]
            self._bytes[index][offset : offset + length].zero_()
