"""The stream of a device in which the connector's own work runs, beside the forward passes.

It has a higher priority than theirs. The hardware has few queues, and streams of one priority share them: one of the
usual priority may stand in the queue of the forward pass and wait for its end. The connector's kernels are small, and a
request waits for them.
"""

from __future__ import annotations

import torch


def stream_beside_steps(device: torch.device) -> torch.Stream:
    """A new one; the usual priority is 0, and a lower number is a higher one."""
    return torch.Stream(device, priority=-1)
