"""Blocks of the cache that no request holds, and that are not in the pool: nobody knows by when they come back.

    quarantined   a READ that has failed may still write into them; until it ends, which may be never
    lent back     of answers that a prefill engine may read back; for the length of their leases at most

vLLM serves its queue in order, and stops at the first request whose blocks it cannot have. It takes for granted that
what is missing comes back when others end. One that needs more blocks than are left beside these waits for none of the
others, and everybody behind it would wait with it: such a request is passed over until they are back. It is passed over
only where it is certain that it does not fit; where it cannot be told, vLLM's own rule holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from connector.families import Keeps
from connector.scheduler.cache_groups import NULL_BLOCK_ID, TransferGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class KeptBlocks:
    """See the module's docstring. Lives on the scheduler's thread.

    Args:
        groups: cache groups of the engine. Those whose tables keep everything say how many blocks a request needs.

    Attributes:
        quarantined: how many blocks, whatever the number of ranks. Asked for in every step.
    """

    def __init__(self, groups: Sequence[TransferGroup]) -> None:
        self._block_sizes = [group.block_size for group in groups if group.keeps == Keeps()]
        self._pool: BlockPool | None = None
        self.quarantined = 0
        # How many ranks keep each block out of the pool; never 0.
        self._quarantined: Counter[int] = Counter()
        # How many answers each block is lent back of; never 0. And the blocks of each of them, by request.
        self._lent_back: Counter[int] = Counter()
        self._of_answer: dict[str, list[int]] = {}

    @property
    def lent_back(self) -> int:
        """How many blocks, whatever the number of answers."""
        return len(self._lent_back)

    def bind(self, pool: BlockPool) -> None:
        """The pool of the engine's blocks."""
        self._pool = pool

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """A rank has READs that may still write into these blocks."""
        self._quarantined.update(block_ids)
        self.quarantined = len(self._quarantined)
        if self._pool is not None:
            self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def lift(self, block_ids: Sequence[int]) -> None:
        """It has none any more. What others keep is not looked at: when an engine that hung has ended, hundreds of
        requests come back in one step."""
        _take_off(self._quarantined, block_ids)
        self.quarantined = len(self._quarantined)
        if self._pool is not None:
            self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def lend_back(self, request_id: str, tables: Iterable[Sequence[int]]) -> None:
        """The blocks of an answer are lent; vLLM keeps them until `end`."""
        block_ids = [block_id for table in tables for block_id in table if block_id != NULL_BLOCK_ID]
        self._of_answer[request_id] = block_ids
        self._lent_back.update(block_ids)

    def end(self, request_ids: Iterable[str]) -> None:
        """vLLM frees the blocks of these requests; whichever of them were lent back."""
        if self._of_answer:
            for request_id in request_ids:
                _take_off(self._lent_back, self._of_answer.pop(request_id, ()))

    def leave_room(self, num_tokens: int, num_cached: int) -> bool:
        """Whether a request of so many tokens, of which so many have blocks already, may fit into what is left."""
        if self._pool is None or not (self.quarantined or self._lent_back):
            return True
        cached = sum(num_cached // size for size in self._block_sizes)
        # What it finds in the prefix cache may be lent back.
        shared = min(cached, len(self._lent_back))
        return len(self._lent_back) - shared <= self._left_beside_quarantine(num_tokens)

    def would_leave_room(self, num_tokens: int) -> bool:
        """Whether it might fit if nothing were lent back."""
        return self._left_beside_quarantine(num_tokens) >= 0

    def _left_beside_quarantine(self, num_tokens: int) -> int:
        """Blocks, when a request has all that it needs; negative: it lacks some."""
        assert self._pool is not None
        usable: int = self._pool.num_gpu_blocks - 1  # without the null block
        needed = sum(-(-num_tokens // size) for size in self._block_sizes)
        return usable - self.quarantined - needed


def _take_off(counts: Counter[int], block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        counts[block_id] -= 1
        if counts[block_id] <= 0:
            del counts[block_id]
