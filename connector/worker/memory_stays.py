"""The memory of the KV cache stays where it is for as long as NIXL may read and write it.

vLLM lets an engine sleep, or give up its KV cache alone, whenever its allocator can do that
(`--enable-cumem-allocator`), also without `--enable-sleep-mode`: over `/sleep` and `/release_kv_cache_memory`, and by
`LLM.sleep`. After it wakes up the same addresses are other memory. NIXL would go on with what it has registered, and
peers with what they have mapped: requests would be done with what stood there before. vLLM tells a connector nothing
of it.

What frees that memory is a sleep-mode backend, which vLLM lets others provide. So the worker's is replaced by one that
gives nothing up. Where it is the only worker of its engine it refuses, and the caller gets the error. Of several
workers none may: vLLM stops listening at the first one that has failed, and takes the answers of the others, which stay
in their queues, for those to its next step, with which the engine ends. So these say it in the log and go on; the
engine passes for one that sleeps until it is woken up, and everything is as it was.
"""

from __future__ import annotations

import contextlib

from vllm.config import VllmConfig
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

from connector.observe.log import get_logger

NAME, NAME_OF_SEVERAL = "nixl_actor_memory_stays", "nixl_actor_memory_stays_of_several"

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
    """Gives nothing up, and refuses to."""

    def suspend(self, level: int = 1) -> None:
        self._refuse(MemoryIsRegistered(f"sleep level {level}"))

    def discard(self, tags: tuple[str, ...]) -> None:
        self._refuse(MemoryIsRegistered(f"release of {', '.join(tags)}"))

    def resume(self, tags: list[str] | None = None) -> None:
        """Everything is there."""

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    def _refuse(self, refusal: MemoryIsRegistered) -> None:
        raise refusal


class MemoryStaysOfSeveral(MemoryStays):
    """Gives nothing up, and says so in the log alone."""

    def _refuse(self, refusal: MemoryIsRegistered) -> None:
        get_logger().error("MemoryIsRegistered: %s. No memory was given up", refusal)


def keep_memory(vllm_config: VllmConfig) -> None:
    """From now on this worker gives no memory up."""
    backends = {NAME: MemoryStays, NAME_OF_SEVERAL: MemoryStaysOfSeveral}
    for name, backend in backends.items():
        with contextlib.suppress(ValueError):  # several connectors of one process: it is registered
            SleepModeBackendFactory.register_backend(name, __name__, backend.__name__)
    is_alone = vllm_config.parallel_config.world_size == 1
    vllm_config.model_config.sleep_mode_backend = NAME if is_alone else NAME_OF_SEVERAL
