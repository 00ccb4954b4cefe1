"""Far ends of windows: blocks that vLLM frees on P with the last token of a prompt, and that D still needs.

A sliding window of w tokens has the last token of a prompt of n look back at the token n-w, and the one after it no
further than at the next. So where a block ends with the token n-w, vLLM frees it as soon as the prompt is computed, and
before it asks the connector what is to be kept. On D vLLM has the last token computed again, which looks at that block.
That is one prompt in as many as a block has tokens.

The block is the request's own while the step is scheduled that computes the last token. In that step a reference of our
own is taken on it, as for blocks in quarantine: whatever vLLM does with the request, nobody else gets the block. It is
let go when the lease ends; before that, when the request ends without being lent, loses its blocks (a preemption), or
comes to its last token once more. A step that writes the block may be under way then: vLLM counts the window from
what has been processed, so until that the block is one of the request's own, which vLLM keeps for as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from connector.scheduler.cache_groups import NULL_BLOCK_ID, TransferGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class FarEnds:
    """Those of the prompts that this engine computes for others. Lives on the scheduler's thread.

    `groups`: of the engine whose tables D takes from where P has left off; those without a window have none.
    """

    def __init__(self, groups: Sequence[TransferGroup]) -> None:
        self._groups = [group for group in groups if group.keeps.window is not None]
        self._pool: BlockPool | None = None
        # Of requests that are computed or lent, by id and cache group.
        self._held: dict[str, dict[int, int]] = {}

    @property
    def held(self) -> dict[str, list[int]]:
        """Ids of the blocks that are kept from the pool beside those of requests, by request."""
        return {request_id: list(blocks.values()) for request_id, blocks in self._held.items()}

    def bind(self, pool: BlockPool) -> None:
        """The pool of the engine's blocks."""
        self._pool = pool

    def follow(self, output: SchedulerOutput, prompts: Mapping[str, Request]) -> None:
        """A step is scheduled, and its tokens are not counted in any request yet. `prompts`: what is computed for other
        engines."""
        if not self._groups:
            return
        for request_id in output.preempted_req_ids or ():
            self._free(request_id)
        for request_id, request in prompts.items():
            scheduled = output.num_scheduled_tokens.get(request_id, 0)
            left = request.num_prompt_tokens - request.num_computed_tokens
            # Where steps speculate, vLLM puts places of drafts behind a last token that is computed alone.
            if 0 < left <= scheduled:
                self._hold(request, output)

    def lend(self, request: Request, num_tokens: int) -> dict[int, int]:
        """The request has ended, and is lent when so many of its tokens are computed: what is held of it from now on,
        block ids by cache group."""
        if request.num_prompt_tokens != num_tokens:
            self._free(request.request_id)
        return self._held.get(request.request_id, {})

    def let_go(self, request_id: str) -> None:
        """Its lease has ended, or it has ended without one."""
        self._free(request_id)

    def _hold(self, request: Request, output: SchedulerOutput) -> None:
        self._free(request.request_id)  # where it is computed again, or has gone on
        found = ((group.group_id, group.far_end(request.num_prompt_tokens)) for group in self._groups)
        places = {group_id: place for group_id, place in found if place is not None}
        state = output.kv_connector_block_state
        if not places or self._pool is None or state is None:
            return
        tables = state.resolve_block_ids(request.request_id)
        held = {group_id: tables[group_id][place] for group_id, place in places.items()}
        held = {group_id: block_id for group_id, block_id in held.items() if block_id != NULL_BLOCK_ID}
        self._pool.touch([self._pool.blocks[block_id] for block_id in held.values()])
        self._held[request.request_id] = held

    def _free(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held and self._pool is not None:
            self._pool.free_blocks([self._pool.blocks[block_id] for block_id in held.values()])
