"""Permutes blocks that READs have left in the peer's order (`connector/layout/landing.py`), on the device.

On the engine thread, before vLLM is told that the request is loaded. On a processor it waits for the permutation, which
takes about as long as the READ before it. On a device it only launches two kernels for each layer, for all requests of
a step, in the current stream, which is one of their own beside that of forward passes (`finishing`). Figures:
docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from connector.layout.geometry import RankLayout
from connector.layout.landing import landing_layers, landing_steps
from connector.protocol import Permutation
from connector.worker.cache_memory import Numbers, to_device, word_of
from connector.worker.memory_shortage import lacks_memory

MOVED_AT_ONCE_BYTES = 64 << 20
"""How much of one layer is moved at once. So much device memory is taken for a moment; less where vLLM leaves less."""


def landing_caches(layout: RankLayout, caches: Mapping[str, torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """By cache group, those of `caches` (by layer) whose blocks may be left in another order than that of `layout`."""
    return {group: [caches[layer] for layer in layers] for group, layers in landing_layers(layout).items()}


class BlockPermuter:
    """Puts blocks of `caches` in order: by cache group, views of shape [kernel blocks, heads, tokens, content]."""

    def __init__(self, caches: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self._caches = {group: [_as_words(cache) for cache in of_group] for group, of_group in caches.items()}

    def permute(self, permutations: Sequence[Permutation]) -> None:
        """All blocks of all requests, each of which is named once; on the current stream, without waiting for it."""
        alike: dict[tuple[int, bool, int], list[Numbers]] = {}
        for request in permutations:
            for group in self._caches:
                order = (group, request.heads_first, request.chunks[group])
                alike.setdefault(order, []).append(request.kernel_blocks[group])
        for (group, heads_first, chunks), tables in alike.items():
            views = [_views(cache, heads_first=heads_first, chunks=chunks) for cache in self._caches[group]]
            moved = [each for each in views if each is not None]
            if moved:
                blocks = to_device(np.concatenate(tables), moved[0].stays.device)
                for each in moved:
                    each.permute(blocks)


def in_landing_layout(cache: torch.Tensor, *, heads_first: bool, chunks: int) -> torch.Tensor:
    """`cache`, a view of shape [kernel blocks, heads, tokens, content], with each token where a READ has left it.

    Shape [kernel blocks, heads, chunks, tokens of a chunk, content].
    """
    views = _views(cache, heads_first=heads_first, chunks=chunks)
    return cache.unflatten(2, (chunks, -1)) if views is None else views.lands


def in_parts(count: int, at_once: int, move: Callable[[slice], None]) -> None:
    """Move `count` things, so many at a time (at least one), and fewer where the device has no memory for them. `move`
    may be called again for some of those for which it has raised. Raises what says `lacks_memory` where not even one
    fits."""
    first, at_once = 0, max(1, at_once)
    while first < count:
        end = min(first + at_once, count)
        try:
            move(slice(first, end))
        except (RuntimeError, MemoryError) as error:
            if end - first == 1 or not lacks_memory(error):
                raise
            at_once = (end - first) // 2
        else:
            first = end


class _Views(NamedTuple):
    """Two views of one cache, of shape [kernel blocks, heads, chunks, tokens of a chunk, content]."""

    stays: torch.Tensor
    lands: torch.Tensor

    def permute(self, blocks: torch.Tensor) -> None:
        """Raises what says `lacks_memory` where not even one block fits beside the cache."""

        def move(part: slice) -> None:
            # Where memory is short nothing has been written yet: it is taken before that.
            self.stays.index_copy_(0, blocks[part], self.lands.index_select(0, blocks[part]))

        in_parts(len(blocks), MOVED_AT_ONCE_BYTES // self.stays[0].nbytes, move)


def _views(cache: torch.Tensor, *, heads_first: bool, chunks: int) -> _Views | None:
    """The cache as its blocks are to stay, and as they land; None where that is the same."""
    blocks, heads, tokens, content = cache.shape
    block_step, head_step, token_step, _ = cache.stride()
    steps = landing_steps(
        heads=heads,
        tokens=tokens,
        head_step=head_step,
        token_step=token_step,
        heads_first=heads_first,
        chunks=chunks,
    )
    if steps is None:
        return None
    shape = (blocks, heads, chunks, tokens // chunks, content)
    return _Views(*(cache.as_strided(shape, (block_step, *each, 1)) for each in steps))


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    steps = (*cache.stride()[:3], cache.shape[3], cache.storage_offset())
    return cache.view(word_of(step * cache.element_size() for step in steps))
