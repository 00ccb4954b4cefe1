"""The stream of a device in which the connector's own work runs, beside the forward passes; waits for a device; and
which device is the current one of a thread.

The stream has a higher priority than theirs. The hardware has few queues, and streams of one priority share them: one
of the usual priority may stand in the queue of the forward pass and wait for its end. The connector's kernels are
small, and a request waits for them.
"""

from __future__ import annotations

import contextlib

import torch


def stream_beside_steps(device: torch.device) -> torch.Stream:
    """A new one; the usual priority is 0, and a lower number is a higher one."""
    return torch.Stream(device, priority=-1)


def make_current(device: torch.device) -> None:
    """In a thread of ours, before anything of CUDA is called in it. A new thread has the first device of the process
    for its current one, and much of CUDA makes a context there, of some hundred MB, which may be another rank's device:
    also a question about an event of this one, and the end of an event."""
    if device.type != "cpu":
        from vllm.platforms import current_platform

        current_platform.set_device(device)


def may_wait() -> contextlib.AbstractContextManager[None]:
    """Around a wait of the engine thread that is meant; vLLM can look for others (VLLM_GPU_SYNC_CHECK)."""
    # Imported here because tests on a device run without vLLM, and nobody looks for waits then.
    try:
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed
    except ModuleNotFoundError:
        return contextlib.nullcontext()
    allowed: contextlib.AbstractContextManager[None] = gpu_sync_allowed()
    return allowed
