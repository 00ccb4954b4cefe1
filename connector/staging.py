"""Host staging: KV that travels through main memory, because NIXL cannot register the device's own.

The user asks for it with `kv_buffer_device: cpu` on an accelerator. Then each layer has a buffer on the host, of as
many blocks as on the device, and everything that NIXL and peers see (regions, descriptors, addresses) is that of the
buffers. A block has the same id in both, so what keeps a block from being used again (a lease on P; on D a READ in
flight, or a quarantine) keeps both of its copies, and a block that is saved is never one that a READ may write into.

* P saves a block when a step has written into it (`scheduler/host_saves` decides, `worker/host_staging` copies), before
  the step's result is known to anybody, and so before its request can be lent.
* D loads a request's blocks after its last READ, and before it reports the request as loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from connector.unsupported import UnsupportedCache

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


def is_staged(vllm_config: VllmConfig) -> bool:
    """Whether KV travels through host buffers; the same in the scheduler process and in the workers."""
    return asks_for_staging(vllm_config.kv_transfer_config)


def asks_for_staging(kv_transfer_config: KVTransferConfig) -> bool:
    """`is_staged`, of what the command line says of transfers."""
    on_host: bool = kv_transfer_config.kv_buffer_device == "cpu"
    return on_host and current_platform.device_type != "cpu"


def require_saves(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedCache for an engine whose stages would not all be told to save what a step has written.

    With drafts, vLLM's V1 model runner puts this off until they are made, which is done in the last stage only. D would
    read from the buffers of the others what was in them before.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    speculates = vllm_config.speculative_config is not None
    if is_staged(vllm_config) and stages > 1 and speculates and not vllm_config.use_v2_model_runner:
        expected = (
            "1 there, or any without speculative_config, or with the device's own kv_buffer_device, or with vLLM's V2"
            " model runner: the V1 model runner has only the last stage save its KV when it speculates"
        )
        field = "kv_buffer_device cpu with speculative_config and pipeline_parallel_size"
        raise UnsupportedCache(field, stages, expected)


def advertised_layout_name(vllm_config: VllmConfig) -> str:
    """The order of axes that peers are told: the engine's, unless host buffers can have one that suits more peers."""
    name: str = vllm_config.cache_config.get_resolved_kv_cache_layout().name
    permutes = is_staged(vllm_config) and vllm_config.kv_transfer_config.enable_permute_local_kv
    if permutes and name == "LBNHC" and not vllm_config.model_config.use_mla:
        return "LBHNC"
    return name
