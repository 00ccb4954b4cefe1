"""How many blocks vLLM asks the pool for before it begins a request that has none.

vLLM 0.32 asks twice (`KVCacheManager.allocate_slots`, called by its `Scheduler`). First for the whole sequence, where
windows are bounded by what a step may need of them. Then for what it gives the request now: the tokens that are loaded,
or the first chunk of those that are computed. Either can be the larger one: of a window the first question leaves out
what lies before it twice, once by the bound. Where steps speculate it begins no load without room for one of them
beside it, and computes no prompt without slots for drafts behind it.

The answer is for an engine in which nothing else runs: the chunk is as long as a step may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import VllmConfig

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class Admission:
    """See the module's docstring."""

    def __init__(self, vllm_config: VllmConfig, manager: KVCacheManager) -> None:
        scheduler = vllm_config.scheduler_config
        self._manager = manager
        self._chunk_tokens: int = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        if (longest := scheduler.long_prefill_token_threshold) > 0:
            # Of a request behind which another one waits; one that is alone holds nobody up.
            if scheduler.long_prefill_token_threshold_adaptive:
                longest = max(longest, scheduler.max_num_batched_tokens // 2)
            self._chunk_tokens = min(self._chunk_tokens, longest)
        # One block too many for each group of states, which have room of their own for drafts.
        slots = _step_slots(vllm_config)
        self._step_blocks = sum(-(-slots // each.block_size) for each in manager.coordinator.single_type_managers)

    @property
    def pool_blocks(self) -> int:
        """Those that requests can have, and the null block."""
        return int(self._manager.block_pool.num_gpu_blocks)

    def blocks_of(self, request_id: str) -> set[int]:
        """What vLLM keeps for a request, slots for drafts included."""
        return {block_id for table in self._manager.get_block_ids(request_id) for block_id in table}

    def needs(self, request: Request, loaded: int | None) -> tuple[int, int, list[int]]:
        """What has to be in the pool: blocks for tokens, and beside them for a step that speculates. And the blocks of
        its prefix that are not in the pool, because other requests hold them or they are kept: they take their place,
        too.

        Args:
            loaded: of how many of its tokens the KV is loaded or found here; None: it loads nothing.
        """
        blocks, found, _ = self._manager.get_computed_blocks(request)
        tokens = min(request.num_tokens, self._manager.max_model_len)
        computed = found if loaded is None else max(found, loaded)
        now = computed if loaded is not None else min(tokens, found + self._chunk_tokens)

        def ask(num_tokens: int, *, is_whole: bool) -> int:
            asked: int = self._manager.coordinator.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=num_tokens,
                new_computed_blocks=blocks.blocks,
                num_encoder_tokens=0,
                total_computed_tokens=computed,
                num_local_computed_tokens=found,
                num_tokens_main_model=num_tokens,
                apply_admission_cap=is_whole,
                prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
            )
            return asked

        asked = max(ask(tokens, is_whole=True), ask(now, is_whole=False))
        prefix = {block.block_id: block for table in blocks.blocks for block in table if not block.is_null}
        return asked, self._step_blocks, [number for number, block in prefix.items() if block.ref_cnt > 0]


def _step_slots(vllm_config: VllmConfig) -> int:
    """Slots that a request may take in a step that speculates: a token, its drafts, and what is written ahead."""
    drafts: int = vllm_config.num_speculative_tokens
    ahead: int = vllm_config.num_lookahead_tokens
    return 1 + drafts + ahead if drafts else 0
