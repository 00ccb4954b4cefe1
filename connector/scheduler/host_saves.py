"""Which blocks a step's forward pass writes for requests that will be lent, when KV is staged on the host (`staging`).

Pure: what the scheduler decided for the step in, block ids out. It remembers nothing, because the scheduler's output
says where each request stands:

    first step, or first one after a preemption    everything from the request's first token on: blocks of a prefix hit
                                                   hold KV that perhaps nobody has ever copied to the host
    any other                                      from the first token of the step on

A block that a chunk of a prompt fills only in part is saved with that chunk, and again with each one that goes on
writing into it. (The built-in connector saves a block once, in the step in which it is allocated: what a later chunk
writes into the same block does not reach the host there.) A request that ends without being lent is in no later step.

A block of a prefix hit may be on loan to a decode engine that is reading it: it is overwritten with the bytes that it
has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from connector.scheduler.cache_groups import TransferGroup

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def blocks_to_save(
    output: SchedulerOutput, lenders: Collection[str], groups: Sequence[TransferGroup], *, drafts_max: int
) -> tuple[list[int], ...]:
    """Logical block ids to copy after this step, each once, per cache group; empty when there are none.

    Args:
        output: of the scheduler, with its block state.
        lenders: ids of the requests whose KV will be lent.
        groups: of the engine.
        drafts_max: speculative tokens of a step. A step that is scheduled before the last one's drafts were judged
            begins up to so many tokens earlier than the scheduler then knows.
    """
    state = output.kv_connector_block_state
    assert state is not None, "vLLM's scheduler tells a connector the block tables of every step"
    blocks: list[dict[int, None]] = [{} for _ in groups]
    for request_id, first, computed in _places(output):
        if request_id not in lenders:
            continue
        stop = computed + output.num_scheduled_tokens[request_id]
        tables = state.resolve_block_ids(request_id)
        for group, ids in zip(groups, blocks, strict=True):
            ids.update(dict.fromkeys(group.written(tables[group.group_id], max(0, first - drafts_max), stop)))
    return tuple(list(ids) for ids in blocks) if any(blocks) else ()


def _places(output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """(request id, first token that is not on the host, first token of the step) of all scheduled requests."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, 0, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, 0 if request_id in cached.resumed_req_ids else computed, computed
