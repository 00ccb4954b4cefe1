"""The KV cache as plain memory: bytes by address, for zeroing what no READ has written.

On the engine thread, in the current stream, which on a device is one beside that of forward passes. vLLM is told that
the request is loaded when the device has done it, so no pass uses the blocks before (`finishing`). Where KV is staged
on the host, it is the host's memory that is zeroed, before the blocks are copied to the device.

There may be thousands of stretches: one for each head of each layer of a block that is filled in part. All of one
allocation are zeroed with one operation, whose index is the only memory that it takes. Figures: docs/performance.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from connector.ports.nixl import MemoryKind, MemoryRange
from connector.ports.nixl_agent.core import PROBE_BYTES, Scratch
from connector.protocol import Memory

Numbers = npt.NDArray[np.int64]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes. Integers, because not every operation knows the types of quantised caches."""

_UNITS_AT_ONCE = 1 << 20
"""The longest index, in units. It takes eight bytes of device memory for each unit, and vLLM leaves little."""


def word_of(sizes: Iterable[int]) -> torch.dtype:
    """The longest word that divides all sizes in bytes, for few and wide accesses."""
    return WORDS[math.gcd(max(WORDS), *sizes)]


def to_device(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """On a device in the current stream; waits neither for it nor for the copy."""
    ours = torch.from_numpy(numbers)
    return ours if device.type == "cpu" else ours.pin_memory().to(device, non_blocking=True)


def scratch_beside(cache: torch.Tensor, device_id: int, memory_kind: MemoryKind) -> Scratch:
    """Memory of the cache's kind, for the first READ from each peer, on this device of this kind, as NIXL says it."""
    owner = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=cache.device)
    return Scratch(MemoryRange(owner.data_ptr(), PROBE_BYTES, device_id, memory_kind), owner)


def allocations(caches: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The allocations that back `caches`: all bytes of each, by the address of the first one, in that order."""
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    return {
        start: torch.empty(0, dtype=torch.uint8, device=storages[start].device).set_(storages[start])
        for start in sorted(storages)
    }


class CacheMemory:
    """Zeroes stretches of the allocations that back `caches`."""

    def __init__(self, caches: Iterable[torch.Tensor]) -> None:
        found = allocations(caches)
        self._starts = np.array(list(found), np.int64)
        self._bytes = list(found.values())

    def zero(self, memories: Sequence[Memory]) -> None:
        """Zero all stretches of all `memories`; each stretch lies within one allocation. Waits for no stream."""
        if not memories:
            return
        addresses = np.concatenate([memory.addresses for memory in memories])
        lengths = np.concatenate([memory.lengths for memory in memories])
        owners = np.searchsorted(self._starts, addresses, side="right") - 1
        for owner in np.unique(owners).tolist():
            of_owner = owners == owner
            _zero(self._bytes[owner], addresses[of_owner] - self._starts[owner], lengths[of_owner])


def _zero(memory: torch.Tensor, offsets: Numbers, lengths: Numbers) -> None:
    """`memory`: all bytes of an allocation."""
    # Stretches are parts of blocks that are alike, so that mostly each of them is one unit.
    unit_bytes = int(np.gcd.reduce(np.concatenate((offsets, lengths))))
    units = memory[: memory.numel() // unit_bytes * unit_bytes].view(word_of([unit_bytes]))
    units = units.view(memory.numel() // unit_bytes, -1)
    counts = lengths // unit_bytes
    before = np.cumsum(counts) - counts
    index = np.repeat(offsets // unit_bytes - before, counts) + np.arange(counts.sum())
    for start in range(0, index.size, _UNITS_AT_ONCE):
        some = to_device(index[start : start + _UNITS_AT_ONCE], memory.device)
        units.index_fill_(0, some, 0)
