"""The CPU platform as an accelerator whose memory NIXL cannot reach, so that connectors stage KV on the host.

The KV cache stays in main memory, but no connector registers it: it is copied to and from the connector's buffers by
vLLM's own copy operation, block by block, with what an accelerator's platform adds to it.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform

DEVICE_TYPE = "cuda"
"""One that the built-in connector stages for, too."""


def copy_blocks(
    source: torch.Tensor, destination: torch.Tensor, source_blocks: torch.Tensor, destination_blocks: torch.Tensor
) -> None:
    """Blocks of one layer, as logical views see them, by way of a copy, as over a bus."""
    destination[destination_blocks] = source[source_blocks].clone()


def pretend_accelerator() -> None:
    """For the rest of this process; to be called when vLLM's configuration is made."""
    current_platform.device_type = DEVICE_TYPE
    current_platform.insert_blocks_to_device = copy_blocks
    current_platform.swap_out_blocks_to_host = copy_blocks
