"""Blocks of the cache that no request holds, and that are not in the pool: nobody knows by when they come back.

    quarantined   a READ that has failed may still write into them; until it ends, which may be never
    lent back     of answers that a prefill engine may read back; for the length of their leases at most

vLLM takes for granted that what a request misses comes back when others end. One that needs more blocks than are left
beside these waits for none of the others, and everybody behind it would wait with it: such a request is passed over
until they are back (`statemachine/loads.py`). How many it needs is what vLLM itself asks for before it admits a
request: windows and states have bounds of their own, and what it finds in the prefix cache is there already. Where
steps speculate, vLLM begins no load without room for one of them beside it, and computes no prompt without slots for
drafts behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from connector.scheduler.cache_groups import NULL_BLOCK_ID
from statemachine.loads import Room

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class KeptBlocks:
    """See the module's docstring. Lives on the scheduler's thread. What is asked of each request that waits looks at
    counts, and does not go through all that is kept.

    Args:
        step_slots: that a request may take in a step that speculates; 0: none does.

    Attributes:
        quarantined: how many blocks, whatever the number of ranks. Asked for in every step.
    """

    def __init__(self, step_slots: int = 0) -> None:
        self._step_slots = step_slots
        # Blocks. One too many for each group of states, which have room of their own for drafts.
        self._for_a_step = 0
        self._manager: KVCacheManager | None = None
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

    def bind(self, manager: KVCacheManager) -> None:
        """Who gives the engine's blocks to requests."""
        self._manager = manager
        if self._step_slots:
            groups = manager.coordinator.single_type_managers
            self._for_a_step = sum(-(-self._step_slots // each.block_size) for each in groups)

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """A rank has READs that may still write into these blocks."""
        self._quarantined.update(block_ids)
        self.quarantined = len(self._quarantined)
        self._kept.update(block_ids)
        if self._manager is not None:
            pool = self._manager.block_pool
            pool.touch([pool.blocks[block_id] for block_id in block_ids])

    def lift(self, block_ids: Sequence[int]) -> None:
        """It has none any more. What others keep is not looked at: when an engine that hung has ended, hundreds of
        requests come back in one step."""
        _take_off(self._quarantined, block_ids)
        self.quarantined = len(self._quarantined)
        _take_off(self._kept, block_ids)
        if self._manager is not None:
            pool = self._manager.block_pool
            pool.free_blocks([pool.blocks[block_id] for block_id in block_ids])

    def lend_back(self, request_id: str, tables: Iterable[Sequence[int]]) -> None:
        """An answer is lent that has these blocks; vLLM keeps all of them until `end`, whatever part is lent."""
        block_ids = {block_id for table in tables for block_id in table} - {NULL_BLOCK_ID}
        self._of_answer[request_id] = block_ids
        self._kept.update(block_ids)

    def end(self, request_ids: Iterable[str]) -> None:
        """vLLM frees the blocks of these requests; whichever of them were lent back."""
        if self._of_answer:
            for request_id in request_ids:
                _take_off(self._kept, self._of_answer.pop(request_id, ()))

    def room_for(self, request: Request, loaded: int) -> Room:
        """Whether a request fits into what is left, once all that is not kept has come back. `loaded`: of how many of
        its tokens the KV may be loaded or found here."""
        if self.is_none:
            return Room.ENOUGH
        assert self._manager is not None
        asked, held = _needed(self._manager, request, loaded)
        if self._fits(asked, held, self._kept):
            return Room.ENOUGH
        return Room.TAKEN_BY_LENT_BACK if self._fits(asked, held, self._quarantined) else Room.LACKING

    def _fits(self, asked: int, held: Sequence[int], kept: Collection[int]) -> bool:
        assert self._manager is not None
        blocks: int = self._manager.block_pool.num_gpu_blocks
        needed = asked + sum(block_id not in kept for block_id in held)
        # vLLM asks for more than there are where a request has to wait for a step, whatever is kept.
        if needed > blocks:
            return True
        return needed + self._for_a_step + len(kept) <= blocks - 1  # without the null block


def _needed(manager: KVCacheManager, request: Request, loaded: int) -> tuple[int, list[int]]:
    """How many blocks a request asks the pool for; and those of its prefix that are not in the pool, because other
    requests hold them or they are kept: they take their place, too."""
    blocks, found, _ = manager.get_computed_blocks(request)
    tokens = min(request.num_tokens, manager.max_model_len)
    asked = min(
        manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=found,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        for computed in {found, max(found, loaded)}
    )
    prefix = {block.block_id: block for table in blocks.blocks for block in table if not block.is_null}
    return int(asked), [number for number, block in prefix.items() if block.ref_cnt > 0]


def _take_off(counts: Counter[int], block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        counts[block_id] -= 1
        if counts[block_id] <= 0:
            del counts[block_id]
