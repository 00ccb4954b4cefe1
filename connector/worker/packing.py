"""Packs blocks that READs have left as the tensor's shape says: puts K and V in the order of attention on CPUs.

Which blocks these are, and of which engines, says `connector/layout/landing.py`. The layer that will compute with the
blocks writes them, as it writes the tokens that it computes itself: nothing here knows its order, or its instruction
set.

On the engine thread, before vLLM is told that the request is loaded, as every permutation on a processor: what is
packed is copied twice, and then written once by the kernel. A request is packed as a whole or has failed: what its
blocks hold then is no request's KV.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from connector.protocol import Permutation
from connector.worker.landing import MOVED_AT_ONCE_BYTES, in_landing_layout


class PackedLayer(NamedTuple):
    """A layer of attention on CPUs, and its cache: a view of shape [kernel blocks, heads, tokens, K and V]."""

    attention: Any
    cache: torch.Tensor

    def pack(self, blocks: torch.Tensor, *, heads_first: bool, chunks: int) -> None:
        """Write these kernel blocks anew. Raises what the layer's kernel raises."""
        _, _, tokens, content = self.cache.shape
        as_read = in_landing_layout(self.cache, heads_first=heads_first, chunks=chunks)
        within = torch.arange(tokens)
        for some in blocks.split(max(1, MOVED_AT_ONCE_BYTES // self.cache[0].nbytes)):
            # A copy, because what is written goes over what is read.
            copy = as_read.index_select(0, some).flatten(2, 3).transpose(1, 2)
            k, v = (part.reshape(-1, *part.shape[2:]) for part in copy.split(content // 2, dim=-1))
            slots = (some[:, None] * tokens + within).flatten()
            self.attention.impl.do_kv_cache_update(self.attention, k, v, self.cache, slots)


class PackedBlocks:
    """Packs blocks of `layers`, all of one cache group. On the engine thread."""

    def __init__(self, layers: Iterable[PackedLayer] = ()) -> None:
        self._layers = tuple(layers)

    def pack(self, permutation: Permutation) -> None:
        """All blocks of a request. Raises what a kernel raises, and then the blocks hold no request's KV."""
        (kernel_blocks,), (chunks,) = permutation.kernel_blocks, permutation.chunks
        blocks = torch.from_numpy(kernel_blocks)
        for layer in self._layers:
            layer.pack(blocks, heads_first=permutation.heads_first, chunks=chunks)
