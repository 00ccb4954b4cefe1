"""Lets vLLM's CPU build divide the experts of a model among ranks. For `EngineOptions.changes` of such engines.

vLLM 0.32.0 hands the CPU's kernel the numbers that experts have in the whole model, of which a rank has a part; and it
does not implement two collectives for CPUs, with which data-parallel ranks exchange the tokens of a step.
"""

from __future__ import annotations

from typing import Any

from tests.e2e.after_import import change_module


def _number_experts_by_rank(module: Any) -> None:
    """An expert of another rank counts as the first of this one, with a weight of nothing."""
    experts = module.CPUUnquantizedExperts
    apply = experts.apply

    def apply_to_own(self: Any, **arguments: Any) -> None:
        if arguments["expert_map"] is not None:
            of_this_rank = arguments["expert_map"][arguments["topk_ids"].long()]
            arguments["topk_ids"] = of_this_rank.clamp(min=0).to(arguments["topk_ids"].dtype)
            arguments["topk_weights"] = arguments["topk_weights"].masked_fill(of_this_rank < 0, 0)
        apply(self, **arguments)

    experts.apply = apply_to_own


def _add_collectives(module: Any) -> None:
    import torch
    import torch.distributed as dist

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        """Tensors of several lengths, one after the other. Shapes: [sizes[rank], ...] -> [sum(sizes), ...]."""
        assert dim == 0
        if isinstance(input_, list):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
        lengths = sizes or [len(input_)] * self.world_size
        of_ranks = [input_.new_empty((max(lengths), *input_.shape[1:])) for _ in lengths]
        padded = torch.cat([input_, input_.new_zeros((max(lengths) - len(input_), *input_.shape[1:]))])
        dist.all_gather(of_ranks, padded, group=self.device_group)
        return torch.cat([tensor[:length] for tensor, length in zip(of_ranks, lengths, strict=True)])

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """The rank's part of a sum. Shapes: [sum(sizes), ...] -> [sizes[rank], ...]."""
        assert dim == 0
        lengths = sizes or [len(input_) // self.world_size] * self.world_size
        whole = input_.contiguous().clone()
        dist.all_reduce(whole, group=self.device_group)
        return whole.split(lengths)[self.rank_in_group].clone()

    module.CpuCommunicator.all_gatherv = all_gatherv
    module.CpuCommunicator.reduce_scatterv = reduce_scatterv


change_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe", _number_experts_by_rank)
change_module("vllm.distributed.device_communicators.cpu_communicator", _add_collectives)
