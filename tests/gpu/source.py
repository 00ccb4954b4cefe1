"""Another process whose memory on a device is read: `python -m tests.gpu.source DEVICE BYTES CONTENT`.

All its bytes are CONTENT. It is to devices what tests/bench/source.py is to the host.
"""

from __future__ import annotations

import base64
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from connector.ports.nixl_agent import RealNixlPort
from tests.bench.source import Source, other_process, tell, wait_for_end
from tests.gpu.device_memory import DeviceMemory, make_current, use


@contextmanager
def source_on(device: torch.device, length_bytes: int, content: int = 1) -> Iterator[Source]:
    """Such a process. It is killed in the end."""
    with other_process("tests.gpu.source", device, length_bytes, content) as (pid, said):
        yield Source(pid, base64.b64decode(said["metadata"]), said["address"], device.index or 0)


def main() -> None:
    device, length_bytes, content = torch.device(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    use(device)
    memory = DeviceMemory(device)
    memory.place(np.full(length_bytes, content, np.uint8))
    memory.upload()
    port = RealNixlPort.open(str(uuid.uuid4()), memory.ranges, prepare_thread=make_current(device))
    port.expect_notifications(True)  # a first READ needs this side's polls to connect
    tell({"metadata": base64.b64encode(port.agent_metadata).decode(), "address": memory.ranges[0].address})
    wait_for_end()
    port.close_blocking(5)


if __name__ == "__main__":
    main()
