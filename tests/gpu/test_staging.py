"""KV that is staged on the host: a READ into a buffer there, and copies to a device that is busy with a forward pass.

The copies are in the stream of the pass, so the engine thread need not wait, and vLLM is told at once. What reaches the
device is what the other process has, with zeros for what no READ has filled; all else stays as it was.

The buffers of an engine are plain memory, which the device copies from when it pleases, and the caller may wait for it.
From pinned memory nobody waits. The copy operation of an engine is vLLM's; here it is torch's, block by block.
"""

from __future__ import annotations

import base64
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import trio

from connector.ports.nixl import MemoryRange, MemoryRun, NixlEvent, PortReadEnded
from connector.ports.nixl_agent import RealNixlPort
from connector.protocol import Memory
from connector.worker.cache_memory import CacheMemory
from connector.worker.device_stream import stream_beside_steps
from connector.worker.finishing import Finishing, Loaded, run_on
from connector.worker.landing import BlockPermuter
from tests.bench.source import Source, other_process, tell, wait_for_end
from tests.gpu.test_busy_device import forward_pass

BLOCKS, WORDS = 64, 16_384
BLOCK_BYTES = 4 * WORDS
LOADED, REMOTE = [5, 9, 40], [63, 0, 17]
"""Our blocks, and those of the other process that are read into them."""
UNFILLED_WORDS = 1000
"""At the end of the last block."""
NOT_READ, NOT_COPIED = -1, -2
READ_SECONDS = 60.0
COPIED_SECONDS = 0.02
"""More than three blocks take, in a stream that has nothing else to do; a pass takes several times as long."""


def content() -> np.ndarray:
    """Of the other process: no two words are equal, and none is zero."""
    return np.arange(1, BLOCKS * WORDS + 1, dtype=np.int32).reshape(BLOCKS, WORDS)


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    with other_process("tests.gpu.test_staging") as (pid, said):
        yield Source(pid, base64.b64decode(said["metadata"]), said["address"])


async def read(host: torch.Tensor, source: Source) -> None:
    send, events = trio.open_memory_channel[NixlEvent](math.inf)
    port = RealNixlPort.open(str(uuid.uuid4()), [MemoryRange(host.data_ptr(), host.nbytes)])
    try:
        with trio.fail_after(READ_SECONDS):
            port.set_event_callback(send.send_nowait)
            peer = await port.add_remote_agent(source.metadata)
            local = await port.prepare_local([MemoryRun(host.data_ptr(), BLOCK_BYTES, BLOCK_BYTES, BLOCKS)])
            remote = await port.prepare_remote(peer, [MemoryRun(source.address, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)])
            handle = port.post_read(local, np.array(LOADED, np.int32), remote, np.array(REMOTE, np.int32))
            while True:
                event = await events.receive()
                if isinstance(event, PortReadEnded) and event.handle == handle:
                    assert event.error is None
                    break
    finally:
        with trio.CancelScope(shield=True):
            await port.aclose(10)


class Copies:
    """From the host to the device, in the current stream."""

    def __init__(self, host: torch.Tensor, cache: torch.Tensor) -> None:
        self._host = host
        self._cache = cache

    def load(self, block_ids: Sequence[Sequence[int]]) -> None:
        for block in block_ids[0]:
            self._cache[block].copy_(self._host[block], non_blocking=True)


@contextmanager
def busy(device: torch.device) -> Iterator[torch.Event | None]:
    """With a forward pass in the current stream of a device, and the pass's end."""
    if device.type == "cpu":
        yield None
    else:
        with forward_pass(device) as end:
            yield end


def bytes_of(cache: torch.Tensor, beside: torch.Stream) -> torch.Tensor:
    """As they are now, on a device; fetched beside the pass."""
    with beside:
        return cache.cpu()


def untouched(cache: torch.Tensor, beside: torch.Stream, end: torch.Event) -> bool:
    """Whether nothing has been copied while the pass lasts. Beside it the copies would have been made long since."""
    time.sleep(COPIED_SECONDS)
    found = bytes_of(cache, beside)
    assert not end.query(), "the pass was over too soon for this test to say anything"
    return bool((found == NOT_COPIED).all())


def expected(elsewhere: int, *, unfilled: int | None = None) -> torch.Tensor:
    """`elsewhere` and `unfilled`: the words of the other blocks, and what is in place of those that no READ fills."""
    found = torch.full((BLOCKS, WORDS), elsewhere, dtype=torch.int32)
    found[LOADED] = torch.from_numpy(content())[REMOTE]
    if unfilled is not None:
        found[LOADED[-1], -UNFILLED_WORDS:] = unfilled
    return found


@pytest.mark.parametrize("pinned", [False, True], ids=["plain memory", "pinned memory"])
def test_what_was_read_into_memory_of_the_host_comes_to_a_busy_device(
    pinned: bool, device: torch.device, source: Source
) -> None:
    if pinned and device.type == "cpu":
        pytest.skip("memory is pinned for a device (--device cuda)")
    host = torch.empty(BLOCKS, WORDS, dtype=torch.int32, pin_memory=pinned).fill_(NOT_READ)
    cache = torch.full((BLOCKS, WORDS), NOT_COPIED, dtype=torch.int32, device=device)
    trio.run(read, host, source)
    assert torch.equal(host, expected(NOT_READ))

    finishing = Finishing(run_on(host.device), BlockPermuter({}), CacheMemory([host]), Copies(host, cache))
    rest = host[LOADED[-1], -UNFILLED_WORDS:]
    unfilled = Memory(addresses=np.array([rest.data_ptr()]), lengths=np.array([rest.nbytes]))
    if pinned:
        # Streams are made at their first use, and modules loaded, which waits for the device.
        beside = stream_beside_steps(device)
        bytes_of(cache, beside)
    with busy(device) as end:
        finished = finishing.finish([Loaded("request", (LOADED,), None, unfilled)]).usable
        assert finished == {"request"}
        if pinned:
            assert not end.query(), "the engine thread has waited, or the pass was over too soon for this test"
            assert untouched(cache, beside, end), "the copies are not in the stream of the pass"
        # Whatever comes next in the stream of the pass sees them.
        found = cache.clone()
    assert torch.equal(found.cpu(), expected(NOT_COPIED, unfilled=0))


def main() -> None:
    """The other process: its memory is read."""
    memory = content()
    port = RealNixlPort.open(str(uuid.uuid4()), [MemoryRange(memory.ctypes.data, memory.nbytes)])
    port.expect_notifications(True)  # a first READ needs this side's polls to connect
    tell({"metadata": base64.b64encode(port.agent_metadata).decode(), "address": memory.ctypes.data})
    wait_for_end()
    port.close_blocking(5)


if __name__ == "__main__":
    main()
