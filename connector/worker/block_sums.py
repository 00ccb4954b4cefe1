"""Checksums of blocks of the KV cache, where they lie: on a processor or on a device, without a copy to the host.

The sum of a block is that of its words of four bytes, each multiplied by an odd number of 64 bits that belongs to its
place, modulo 2 ** 64. Odd numbers are invertible there, so one word that differs always changes the sum; several that
differ, or words that have changed places, do in all but one of 2 ** 32 cases and mostly many more. (Words of eight
bytes would be faster, and two of them whose highest bits are wrong would always cancel: only the lowest bit of the
number counts for these.) It is no digest: one that forges KV on purpose can forge its sum.

One reduction of torch does it on a processor and on a device, instead of a hash such as xxh3 on the host: one side may
have its blocks on a device and the other on the host, and both have to find the same number, which sums of integers are
in whatever order a device adds them.

On the engine thread, in pieces of a few megabytes. On a device the kernels run in a stream of their own, beside the
forward pass: what they read has been written and is not written again before the sums are known. Blocks that are lent
need care for that. A request may end while the device still works on its last step (drafts, and states that depend on
how many were accepted, come after the tokens that vLLM is told of), or, where steps overlap, on one more that was begun
before its end was known. So the sums of a lease come after the steps that the device had been given before
(`note_step`). The thread waits for these and for the kernels alone, and vLLM, which can look for waits of the engine
thread (VLLM_GPU_SYNC_CHECK), is told that this one is meant. Figures: docs/performance.md.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from connector.protocol import Stretch
from connector.worker.cache_memory import WORDS, Numbers, allocations, to_device, word_of
from connector.worker.device_stream import may_wait, stream_beside_steps

_AT_ONCE_BYTES = 8 << 20
"""How many bytes of blocks are summed at once. Several times as much memory is taken for a moment."""


class BlockSums:
    """Sums blocks that lie in the allocations behind `caches`, all on one device."""

    def __init__(self, caches: Iterable[torch.Tensor]) -> None:
        found = allocations(caches)
        self._starts, self._bytes = list(found), list(found.values())
        self._device = self._bytes[0].device
        self._stream = None if self._device.type == "cpu" else stream_beside_steps(self._device)
        # The end of the last step that was noted, in the stream of steps.
        self._step_end: torch.Event | None = None
        # By the number of words.
        self._factors: dict[int, torch.Tensor] = {}

    def note_step(self) -> None:
        """The device has been given a whole step, drafts included. Waits for nothing."""
        if self._stream is not None:
            self._step_end = torch.accelerator.current_stream(self._device).record_event()

    def of(self, stretches: Sequence[Stretch], *, after_steps: bool = False) -> Numbers:
        """The sums of all blocks of all stretches, one after another, shape [blocks].

        `after_steps`: what the steps that were noted have written is in them.
        """
        if after_steps and self._stream is not None and self._step_end is not None:
            self._stream.wait_event(self._step_end)
        with contextlib.nullcontext() if self._stream is None else self._stream:
            sums = [part for stretch in stretches for part in self._of(stretch)]
            if not sums:
                return np.empty(0, np.int64)
            with may_wait():
                found: Numbers = torch.cat(sums).cpu().numpy()
            return found

    def _of(self, stretch: Stretch) -> Iterable[torch.Tensor]:
        owner = int(np.searchsorted(self._starts, stretch.address, side="right")) - 1
        offset = stretch.address - self._starts[owner]
        # Blocks are gathered by as wide words as their places allow, and summed by words that only their length
        # decides: both sides have to sum alike.
        gathered = word_of((offset, stretch.stride_bytes, stretch.length_bytes))
        summed = WORDS[math.gcd(4, stretch.length_bytes)]
        memory = self._bytes[owner]
        words = memory[: memory.numel() // gathered.itemsize * gathered.itemsize].view(gathered)
        row = stretch.length_bytes // gathered.itemsize
        step = stretch.stride_bytes // gathered.itemsize
        blocks = to_device(stretch.blocks, self._device)
        rows = words.as_strided((stretch.count, row), (step, 1), offset // gathered.itemsize)
        factors = self._factors_of(stretch.length_bytes // summed.itemsize)
        for some in blocks.split(max(1, _AT_ONCE_BYTES // stretch.length_bytes)):
            content = rows.index_select(0, some).view(summed)
            yield (content.to(torch.int64) * factors).sum(1)

    def _factors_of(self, words: int) -> torch.Tensor:
        found = self._factors.get(words)
        if found is None:
            found = self._factors[words] = to_device(factors(words), self._device)
        return found


def factors(words: int) -> Numbers:
    """Odd numbers, one for each place of a block: those of SplitMix64 with the lowest bit set."""
    mixed = (np.arange(1, words + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: Numbers = ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
    return odd
