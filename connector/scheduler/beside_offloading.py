"""Beside vLLM's `OffloadingConnector`: have it copy blocks to the host before KV is read into them.

That connector copies a request's blocks a step after they were computed, and does not keep them meanwhile. What it has
not copied when they are given to somebody else it copies before that step begins. It learns who was given blocks from
what vLLM schedules and from what it loads itself. Under `MultiConnector` it is not told of what another connector
loads: so the READ of one request would overwrite what is still to be copied of another, and the host's cache would hold
the KV of the former under the name of the latter.

Here it is told. This wraps a method of vLLM 0.32, because no interface says it. From 0.33 on that method looks at all
blocks by itself (vllm#46951).
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from connector.observe.log import get_logger
from connector.versions import is_vllm_at_least
from statemachine.failures import ADVICE_FOLLOWS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

OFFLOADING_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
OFFLOADING_CLASS = "OffloadingConnectorScheduler"
_METHOD = "update_state_after_alloc"
_GIVEN_OUT = "_current_batch_allocated_block_ids"
_MARK = "_is_told_of_reads_by_nixl_actor_connector"


def tell_offloading_of_reads() -> None:
    """From now on it hears of every block that is given out. For a time at which all connectors of this engine are
    made; calling it again changes nothing, nor does it where that connector is not used."""
    if is_vllm_at_least("0.33"):
        return
    module = sys.modules.get(OFFLOADING_MODULE)
    its_class = getattr(module, OFFLOADING_CLASS, None)
    own = getattr(its_class, _METHOD, None)
    if own is None or hasattr(own, _MARK):
        return

    @functools.wraps(own)
    def update_state_after_alloc(self: Any, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            given_out: set[int] | None = getattr(self, _GIVEN_OUT, None)
            if given_out is None:
                _say_once()
            else:
                # Those of a prefix hit have a hash, and are overwritten by nobody.
                given_out.update(
                    block.block_id
                    for table in blocks.blocks
                    for block in table
                    if not block.is_null and block.block_hash is None
                )
        own(self, request, blocks, num_external_tokens)

    setattr(update_state_after_alloc, _MARK, True)
    setattr(its_class, _METHOD, update_state_after_alloc)


@functools.cache
def _say_once() -> None:
    get_logger().warning(
        "OffloadingConnector of this vLLM cannot be told of blocks that KV is read into: a block that it still has to "
        "copy to the host may be overwritten first, and be taken from there by other "
        f"requests{ADVICE_FOLLOWS}take it out of MultiConnector on engines that read KV"
    )
