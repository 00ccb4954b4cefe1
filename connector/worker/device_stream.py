"""The stream of a device in which the connector's own work runs, beside the forward passes; and waits for a device.

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


def may_wait() -> contextlib.AbstractContextManager[None]:
    """Around a wait of the engine thread that is meant; vLLM can look for others (VLLM_GPU_SYNC_CHECK)."""
    # Imported here because tests on a device run without vLLM, and nobody looks for waits then.
    try:
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed
    except ModuleNotFoundError:
        return contextlib.nullcontext()
    allowed: contextlib.AbstractContextManager[None] = gpu_sync_allowed()
    return allowed
