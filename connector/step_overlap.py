"""Whether an engine may read KV from others, seen from its ranks and from what vLLM does with the blocks of a request
that has ended.

Where steps overlap, a step may still write into the blocks of a request that was aborted or preempted after it had
been scheduled. A step that follows comes later on the device, so vLLM may give such blocks away at once. A READ is not
ordered with the device: what the step writes may land on top of what was read. So vLLM keeps these blocks until the
step is over, but only where its `kv_role` is one that consumes (`Scheduler.defer_block_free`), because a producer is
taken to read nothing. With read-back (`bidirectional_kv_xfer`) one does.

It is the role of the whole engine that counts: that of `MultiConnector`, where this connector is one of several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from connector.config import ConnectorOptions
from connector.unsupported import UnsupportedCache

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


def may_read(vllm_config: VllmConfig) -> bool:
    """Whether all ranks can load KV, and vLLM keeps blocks for long enough that a READ may be made into what it hands
    out."""
    if vllm_config.parallel_config.prefill_context_parallel_size > 1:
        return False  # copies read nothing (`worker/parallelism.py`)
    return bool(vllm_config.kv_transfer_config.is_kv_consumer or vllm_config.max_concurrent_batches == 1)


def require_role_that_reads(vllm_config: VllmConfig, options: ConnectorOptions, own: KVTransferConfig) -> None:
    """Raise UnsupportedCache for an engine that would read, and whose role makes vLLM believe that it does not.

    `own` is the configuration of this connector: that of the engine, or one of several in it.
    """
    if options.bidirectional_kv_xfer:
        reads = "bidirectional_kv_xfer"
    elif own.is_kv_consumer:
        reads = f"a connector of kv_role {own.kv_role} in it"
    else:
        return
    # Pipeline stages overlap as well; an engine that reads has one (`worker/parallelism.py`).
    if not vllm_config.scheduler_config.async_scheduling:
        return
    for config in (vllm_config.kv_transfer_config, own):
        if not config.is_kv_consumer:
            expected = (
                "kv_both, or any with --no-async-scheduling. vLLM lets a producer reuse blocks that a step under way"
                " may still write, and KV that is read into them could be overwritten"
            )
            found = f"{config.kv_role} with {reads} and async scheduling"
            raise UnsupportedCache(f"kv_role of {config.kv_connector},", found, expected)
