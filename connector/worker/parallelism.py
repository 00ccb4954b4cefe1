"""Which part of the KV cache a worker holds, seen from other engines.

Other engines know a rank by its pipeline stage and by its number among those of the stage that hold different parts:

* tensor parallel ranks hold different heads;
* context parallel decoding (DCP) gives the tensor parallel ranks of MLA different tokens: block after block in turn;
* context parallel prefill (PCP) makes copies, of which the first serves everybody; with DCP over the same ranks these
  hold different tokens, and are the ranks that count.

What goes together follows the built-in connector of the same vLLM version, but for pipeline stages: it starts with them
and serves nobody, because it takes every stage for the first one. Here the ranks of all stages are read.
"""

from __future__ import annotations

import msgspec
from vllm import envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.parallel_state import (
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from connector.layout.geometry import RankId
from connector.unsupported import UnsupportedCache


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place in its engine."""

    rank: RankId
    size: int
    """Ranks of a stage that hold different parts, which `rank` counts."""
    tp_rank: int
    tp_size: int
    """vLLM's own: which share of the heads is held."""
    dcp_size: int
    pcp_size: int
    is_copy: bool
    """Holds the same as another rank, which is the one that peers are told about."""

    is_last_stage: bool

    @property
    def number(self) -> int:
        """This rank's number among those of all stages, for logs and traces."""
        return self.rank.pp_rank * self.size + self.rank.tp_rank


def ranks_of(parallel: ParallelConfig) -> int:
    """Ranks of all stages of one engine that hold different parts: one more than the highest `Placement.number`."""
    split = _prefills_split_tokens(parallel)
    of_a_stage = parallel.prefill_context_parallel_size if split else parallel.tensor_parallel_size
    return int(parallel.pipeline_parallel_size * of_a_stage)


def _prefills_split_tokens(parallel: ParallelConfig) -> bool:
    return bool(parallel.prefill_context_parallel_size > 1 and parallel.decode_context_parallel_size > 1)


def placement(vllm_config: VllmConfig) -> Placement:
    """Where this process stands in the engine. Its process groups exist."""
    parallel = vllm_config.parallel_config
    dcp_size, pcp_size = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    pp_rank = get_pp_group().rank_in_group
    pcp_rank = get_pcp_group().rank_in_group if pcp_size > 1 else 0
    tp_rank, tp_size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    prefills_split_tokens = _prefills_split_tokens(parallel)
    return Placement(
        rank=RankId(pp_rank, pcp_rank if prefills_split_tokens else tp_rank),
        size=pcp_size if prefills_split_tokens else tp_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
        dcp_size=dcp_size,
        pcp_size=pcp_size,
        is_copy=pcp_rank > 0 and not prefills_split_tokens,
        is_last_stage=pp_rank == parallel.pipeline_parallel_size - 1,
    )


def require_supported_parallelism(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedCache for sizes that cannot be served, in both processes at start."""
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    reads = transfer.kv_role != "kv_producer" or transfer.get_from_extra_config("bidirectional_kv_xfer", False)
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1 and reads:
            expected = "1, or any with kv_role kv_producer and without bidirectional_kv_xfer"
            raise UnsupportedCache(f"{name} of an engine that reads KV,", getattr(parallel, name), expected)
    # vLLM 0.33 has no other executor of Ray, and no such variable.
    is_new = getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    if parallel.pipeline_parallel_size > 1 and parallel.use_ray and not is_new:
        # vLLM hears of the last stage alone there, and waits for all before it frees what was lent.
        stages = f"0 with pipeline_parallel_size {parallel.pipeline_parallel_size}"
        raise UnsupportedCache("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", stages, "1, which is vLLM's default")
    tp_size, dcp_size = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    pcp_size = parallel.prefill_context_parallel_size
    if dcp_size == 1:
        return
    model = vllm_config.model_config
    if model is not None and not model.use_mla:
        raise UnsupportedCache("decode_context_parallel_size of a model without MLA,", dcp_size, 1)
    if pcp_size > 1 and (tp_size, dcp_size) != (1, pcp_size):
        sizes = f"{dcp_size} with prefill_context_parallel_size {pcp_size} and tensor_parallel_size {tp_size}"
        expected = f"{pcp_size} with tensor_parallel_size 1"
        raise UnsupportedCache("decode_context_parallel_size", sizes, expected)
    if pcp_size == 1 and dcp_size != tp_size:
        raise UnsupportedCache("decode_context_parallel_size", dcp_size, f"1 or the tensor_parallel_size {tp_size}")
