"""Zeroing what no READ has written: one operation for each stretch, or one for all of an allocation.

`python -m tests.bench.bench_zeroing` prints a table in markdown, of the time of the engine thread for one request whose
last block of 64 tokens is filled in part: of each head of each layer, the last 16 tokens are zeroed, as a P with blocks
of 16 tokens leaves them. "Each" zeroes one stretch after another. Medians, one thread; the two ways alternate, and both
zero the same bytes.

What it does not show: a GPU, where an operation is a kernel that costs the engine thread some five microseconds to
launch, and what is zeroed goes by at a thousand gigabytes a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from connector.protocol import Memory
from connector.worker.cache_memory import CacheMemory

REPEATS = 31
BLOCKS, TOKENS, LEFT_TOKENS = 64, 64, 16
HEAD_BYTES = 512
"""K and V of one head of one token: 128 elements of 2 bytes each."""
CASES = (
    # Layers, heads of this rank, blocks that are filled in part (requests that are reported in one step).
    (32, 8, 1),
    (64, 8, 1),
    (32, 8, 14),
    (32, 1, 14),
)


def _unfilled(caches: torch.Tensor, blocks: int) -> Memory:
    """The last tokens of the first blocks: [layers, blocks, heads, tokens, bytes]."""
    layer, block, head, token, _ = caches.stride()
    starts = caches.data_ptr() + (TOKENS - LEFT_TOKENS) * token
    for count, step in ((caches.shape[0], layer), (blocks, block), (caches.shape[2], head)):
        starts = np.add.outer(starts, np.arange(count) * step)
    addresses = starts.ravel()
    return Memory(addresses=addresses, lengths=np.full(addresses.size, LEFT_TOKENS * token))


def _zero_each(flat: torch.Tensor, memory: Memory) -> None:
    start = flat.data_ptr()
    for address, length in zip(memory.addresses.tolist(), memory.lengths.tolist(), strict=True):
        flat[address - start : address - start + length].zero_()


def _measure(*ways: Callable[[], None]) -> list[float]:
    """Milliseconds of each, medians; the first turn touches memory and does not count."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(REPEATS + 1):
        for way, found in zip(ways, seconds, strict=True):
            started = time.perf_counter()
            way()
            found.append(time.perf_counter() - started)
    return [statistics.median(found[1:]) * 1e3 for found in seconds]


def _row(layers: int, heads: int, blocks: int) -> str:
    caches = torch.ones(layers, BLOCKS, heads, TOKENS, HEAD_BYTES, dtype=torch.uint8)
    memory = _unfilled(caches, blocks)
    at_once = partial(CacheMemory(caches).zero, [memory])
    each, together = _measure(partial(_zero_each, caches.view(-1), memory), at_once)
    stretches, zeroed = memory.addresses.size, int(memory.lengths.sum())
    assert int(caches.count_nonzero()) == caches.numel() - zeroed
    cells = (layers, heads, blocks, f"{stretches:,}", f"{zeroed:,}")
    return "| " + " | ".join(map(str, cells)) + f" | {each:.2f} | {together:.2f} | {each / together:.1f} |"


def main() -> None:
    torch.set_num_threads(1)
    print("| layers | heads | blocks | stretches | bytes | each: ms | at once: ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        print(_row(*case))


if __name__ == "__main__":
    main()
