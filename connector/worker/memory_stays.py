"""The memory of the KV cache stays where it is for as long as NIXL may read and write it.

vLLM lets an engine sleep, or give up its KV cache alone, whenever its allocator can do that
(`--enable-cumem-allocator`), also without `--enable-sleep-mode`: over `/sleep` and `/release_kv_cache_memory`, and by
`LLM.sleep`. After it wakes up the same addresses are other memory. NIXL would go on with what it has registered, and
peers with what they have mapped: requests would be done with what stood there before. vLLM tells a connector nothing
of it.

What frees that memory is a sleep-mode backend, which vLLM lets others provide. So the worker's is replaced by one that
refuses.
"""

from __future__ import annotations

import contextlib

from vllm.config import ModelConfig
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

NAME = "nixl_actor_memory_stays"

_WHAT_TO_DO = (
    "NIXL reads and writes the memory of this engine's KV cache, and vLLM does not say when it goes and comes: use "
    "sleep level 0, which only pauses, or kv_buffer_device cpu, with which NIXL knows memory of the host alone"
)


class MemoryIsRegistered(RuntimeError):
    """The engine was asked to give up memory that NIXL reads and writes. Nothing was given up.

    `asked`: what for.
    """

    def __init__(self, asked: str) -> None:
        super().__init__(f"{asked} is refused: {_WHAT_TO_DO}")
        self.asked = asked


class MemoryStays(SleepModeBackend):
    """Gives nothing up."""

    def suspend(self, level: int = 1) -> None:
        raise MemoryIsRegistered(f"sleep level {level}")

    def discard(self, tags: tuple[str, ...]) -> None:
        raise MemoryIsRegistered(f"release of {', '.join(tags)}")

    def resume(self, tags: list[str] | None = None) -> None:
        """Everything is there."""

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True


def keep_memory(model_config: ModelConfig) -> None:
    """From now on this worker gives no memory up."""
    with contextlib.suppress(ValueError):  # several connectors of one process: it is registered
        SleepModeBackendFactory.register_backend(NAME, __name__, MemoryStays.__name__)
    model_config.sleep_mode_backend = NAME
