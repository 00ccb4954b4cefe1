"""An attention back end that keeps the tokens of a block in order, as those of accelerators do.

That for CPUs keeps them in an order that depends on the processor. Its layers learn it when they are to compute, which
in the rig they never are, so their blocks are read only into blocks of the same size. Of a back end only its name and
what it says of KV caches matter here.
"""

from __future__ import annotations

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


class OrderedAttention(CPUAttentionBackend):  # type: ignore[misc]  # mypy is not shown vLLM's types
    """See the module's docstring."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM knows its back ends by name; this one is free

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]
