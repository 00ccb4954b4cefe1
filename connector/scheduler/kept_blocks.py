"""Blocks of the cache that no request holds, and that are not in the pool: nobody knows by when they come back.

    quarantined   a READ that has failed may still write into them; until it ends, which may be never
    lent back     of answers that a prefill engine may read back; for the length of their leases at most

vLLM takes for granted that what a request misses comes back when others end. One that needs more blocks than are left
beside these waits for none of the others, and everybody behind it would wait with it: such a request is passed over
until they are back (`statemachine/loads.py`). How many it needs is what vLLM asks for (`Admission`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from connector.scheduler.cache_groups import NULL_BLOCK_ID
from connector.scheduler.vllm_admission import Admission
from statemachine.loads import Room

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


class KeptBlocks:
    """See the module's docstring. Lives on the scheduler's thread. What is asked of each request that waits looks at
    counts, and does not go through all that is kept.

    Attributes:
        quarantined: how many blocks, whatever the number of ranks. Asked for in every step.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._admission: Admission | None = None
        self.quarantined = 0
        # How many ranks keep each block out of the pool; and with them how many answers it is lent back of. Never 0.
        self._quarantined: Counter[int] = Counter()
        self._kept: Counter[int] = Counter()
        # The blocks of each answer that is lent back, by request.
        self._of_answer: dict[str, set[int]] = {}

    @property
    def lent_back(self) -> int:
        """How many blocks beside those, whatever the number of answers."""
        return len(self._kept) - self.quarantined

    @property
    def is_none(self) -> bool:
        return not self._kept

    def bind(self, pool: BlockPool, admission: Admission) -> None:
        """Where the engine's blocks are, and what requests need of them."""
        self._pool, self._admission = pool, admission

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """A rank has READs that may still write into these blocks."""
        self._quarantined.update(block_ids)
        self.quarantined = len(self._quarantined)
        self._kept.update(block_ids)
        if (pool := self._pool) is not None:
            pool.touch([pool.blocks[block_id] for block_id in block_ids])

    def lift(self, block_ids: Sequence[int]) -> None:
        """It has none any more. What others keep is not looked at: when an engine that hung has ended, hundreds of
        requests come back in one step."""
        _take_off(self._quarantined, block_ids)
        self.quarantined = len(self._quarantined)
        _take_off(self._kept, block_ids)
        if (pool := self._pool) is not None:
            pool.free_blocks([pool.blocks[block_id] for block_id in block_ids])

    def lend_back(self, request_id: str, tables: Iterable[Sequence[int]]) -> None:
        """An answer is lent that has these blocks; vLLM keeps them until `end`, and all others that the request has."""
        block_ids = {block_id for table in tables for block_id in table}
        if self._admission is not None:
            block_ids |= self._admission.blocks_of(request_id)
        block_ids.discard(NULL_BLOCK_ID)
        self._of_answer[request_id] = block_ids
        self._kept.update(block_ids)

    def end(self, request_ids: Iterable[str]) -> None:
        """vLLM frees the blocks of these requests; whichever of them were lent back."""
        if self._of_answer:
            for request_id in request_ids:
                _take_off(self._kept, self._of_answer.pop(request_id, ()))

    def room_for(self, request: Request, loaded: int | None) -> Room:
        """Whether a request fits into what is left, once all that is not kept has come back. `loaded` is as in
        `Admission.needs`."""
        if self.is_none:
            return Room.ENOUGH
        assert self._admission is not None
        needs, blocks = self._admission.needs(request, loaded), self._admission.pool_blocks
        if _fits(*needs, self._kept, blocks):
            return Room.ENOUGH
        return Room.TAKEN_BY_LENT_BACK if _fits(*needs, self._quarantined, blocks) else Room.LACKING


def _fits(asked: int, for_a_step: int, held: Sequence[int], kept: Collection[int], blocks: int) -> bool:
    needed = asked + sum(block_id not in kept for block_id in held)
    # vLLM asks for more than there are where a request has to wait for a step, whatever is kept.
    if needed > blocks:
        return True
    return needed + for_a_step + len(kept) <= blocks - 1  # without the null block


def _take_off(counts: Counter[int], block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        counts[block_id] -= 1
        if counts[block_id] <= 0:
            del counts[block_id]
