"""An engine that sleeps (`--enable-sleep-mode`), and its memory with it.

A sleeping engine gives the memory of its KV cache back to the device, and finds other memory at the same addresses when
it wakes up. Before the one and after the other vLLM calls a hook of the connector, from 0.33 on. So everything that
touches that memory ends with the first and begins anew with the second (`worker.actors`): for peers the engine has been
started again. Requests that wait in its queue meanwhile are made known to those who come after. On the way to sleep
vLLM clears its prefix cache, which it cannot while a block is lent, is being read into or is in quarantine; so nothing
is in flight then. If something is after all, the engine does not fall asleep.

What a peer has mapped of a device's memory by CUDA IPC nobody makes it forget: it would keep that memory from being
free, and read the old one when the engine is awake. So UCX is told not to use it, as the built-in connector does. On
one machine such engines do not read over NVLink.

Before 0.33 nothing says when memory goes. There, and of an engine that is not told to have sleep mode but could sleep
all the same (`memory_stays`), nothing is given up. What NIXL knows of an engine that is staged on the host is memory of
the host, which stays.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from connector.runtime.mapped_memory import reaches_other_nodes
from connector.staging import asks_for_staging, is_staged
from connector.unsupported import UnsupportedCache
from connector.versions import is_vllm_at_least

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

_HOOKS_FROM = "0.33"
_WITHOUT_CUDA_IPC = "TLS=^cuda_ipc"
_CUDA_IPC = frozenset(("all", "cuda", "cuda_ipc"))
"""What UCX_TLS calls it, alone or with others."""


class MemoryInUse(RuntimeError):
    """The engine was to fall asleep while something may still read or write the memory of its KV cache. That stays.

    `why`: what shows it.
    """

    def __init__(self, why: str) -> None:
        super().__init__(
            f"this engine cannot sleep, because the memory of its KV cache is in use: {why}. Restart it, or wait until "
            "nothing is transferred"
        )
        self.why = why


def supports_sleep_mode(kv_transfer_config: KVTransferConfig) -> bool:
    """Whether an engine with this connector may sleep."""
    follows = is_vllm_at_least(_HOOKS_FROM) and _has_ucx_alone(kv_transfer_config)
    return follows or asks_for_staging(kv_transfer_config)


def _has_ucx_alone(kv_transfer_config: KVTransferConfig) -> bool:
    """Of other back ends nobody knows when they let go of memory. What is no list is refused elsewhere."""
    backends = kv_transfer_config.get_from_extra_config("backends", ["UCX"])
    return not isinstance(backends, list) or all(each == "UCX" for each in backends)


def follows_sleep(vllm_config: VllmConfig) -> bool:
    """Whether memory that NIXL knows goes when the engine sleeps, and vLLM says so before."""
    sleeps: bool = vllm_config.model_config is not None and vllm_config.model_config.enable_sleep_mode
    return sleeps and not is_staged(vllm_config) and is_vllm_at_least(_HOOKS_FROM)


def require_sleep_mode_supported(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedCache, at start in both processes, for an engine that may sleep and must not."""
    if not vllm_config.model_config.enable_sleep_mode or is_staged(vllm_config):
        return
    if not supports_sleep_mode(vllm_config.kv_transfer_config):
        expected = (
            f"false, or vLLM {_HOOKS_FROM} and backends UCX alone, or kv_buffer_device cpu: a sleeping engine gives the"
            " memory of its KV cache back, and NIXL would go on reading and writing it; for NVLink between nodes"
            " --enable-cumem-allocator is enough"
        )
        raise UnsupportedCache("enable_sleep_mode", True, expected)
    transports = os.environ.get("UCX_TLS", "").strip()
    if transports and _has_cuda_ipc(transports):
        expected = (
            "a list without cuda_ipc, by which others map this engine's memory and keep it when it sleeps, or none"
        )
        raise UnsupportedCache("enable_sleep_mode with UCX_TLS", transports, expected)
    if reaches_other_nodes(os.environ):
        expected = "n: it is for cuda_ipc, by which others map this engine's memory and keep it when it sleeps"
        raise UnsupportedCache("enable_sleep_mode with UCX_CUDA_IPC_ENABLE_MNNVL", "y", expected)


def ucx_config(vllm_config: VllmConfig) -> str | None:
    """How UCX is configured for this engine alone, as NIXL takes it; variables of the environment have precedence."""
    return _WITHOUT_CUDA_IPC if follows_sleep(vllm_config) else None


def _has_cuda_ipc(transports: str) -> bool:
    """Of a value of UCX_TLS: a list, or, behind `^`, what is left out."""
    names = {name.strip().partition(":")[0] for name in transports.lower().removeprefix("^").split(",")}
    is_named = not names.isdisjoint(_CUDA_IPC)
    return is_named != transports.startswith("^")
