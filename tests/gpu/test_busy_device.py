"""What is left to do with the blocks of a loaded request, on a device that is busy with a forward pass.

The engine thread must not wait for it, vLLM must not be told before it has been done, and the bytes must be right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from connector.protocol import AfterSteps, Memory, Permutation, Stretch
from connector.worker.block_sums import BlockSums
from connector.worker.cache_memory import CacheMemory
from connector.worker.finishing import Finishing, Loaded, run_on
from connector.worker.landing import BlockPermuter
from connector.worker.step_fence import StepFence, end_of_steps_on
from tests.gpu.patience import patient
from tests.rig.pulls import pull

pytestmark = pytest.mark.timeout(patient(120))

BLOCKS, HEADS, TOKENS, CONTENT = 64, 8, 16, 64
LANDED = [5, 9, 40]
DONE_SECONDS = patient(30.0)


@pytest.fixture
def cache(device: torch.device) -> torch.Tensor:
    numbers = torch.arange(BLOCKS * HEADS * TOKENS * CONTENT, dtype=torch.int32, device=device)
    return numbers.reshape(BLOCKS, HEADS, TOKENS, CONTENT) + 1


def request(cache: torch.Tensor) -> Loaded:
    """Its blocks have tokens before heads, and of the last one the last token was not read."""
    last = cache[LANDED[-1]]
    addresses = np.array([head[-1].data_ptr() for head in last])
    lengths = np.full(HEADS, last[0, -1].nbytes)
    permutation = Permutation(heads_first=False, chunks=(1,), kernel_blocks=(np.array(LANDED),))
    return Loaded("request", ([],), permutation, Memory(addresses=addresses, lengths=lengths))


def expected(cache: torch.Tensor) -> torch.Tensor:
    """What the cache must be afterwards."""
    found = cache.clone()
    for block in LANDED:
        found[block] = cache[block].reshape(TOKENS, HEADS, CONTENT).transpose(0, 1)
    found[LANDED[-1], :, -1] = 0
    return found


def finishing_of(cache: torch.Tensor) -> Finishing:
    return Finishing(run_on(cache.device), BlockPermuter({0: [cache]}), CacheMemory([cache]))


def wait(finishing: Finishing, finished: set[str]) -> None:
    deadline = time.monotonic() + DONE_SECONDS
    while not finished:
        assert time.monotonic() < deadline, "the device has not done it"
        finished = finishing.finish([]).usable
    assert finished == {"request"}


def test_blocks_are_put_in_order_and_zeroed(cache: torch.Tensor) -> None:
    after, finishing = expected(cache), finishing_of(cache)
    wait(finishing, finishing.finish([request(cache)]).usable)
    assert torch.equal(cache, after)


@contextmanager
def forward_pass(device: torch.device) -> Iterator[torch.Event]:
    """In the device's current stream; the event is its end."""
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize(device)
    for _ in range(200):
        matrix = torch.mm(matrix, matrix).clamp_(-1, 1)
    end = torch.Event(device)
    end.record(torch.cuda.current_stream(device))
    yield end
    torch.cuda.synchronize(device)


def test_the_engine_thread_does_not_wait_for_a_busy_device(cache: torch.Tensor, gpu: torch.device) -> None:
    after, finishing = expected(cache), finishing_of(cache)
    loaded = request(cache)
    finishing.finish([loaded])  # kernels are loaded at their first use, which waits
    torch.cuda.synchronize(gpu)
    finishing.finish([])
    cache.copy_(expected_before(after))
    with forward_pass(gpu) as end:
        torch.cuda.set_sync_debug_mode("error")
        try:
            finished = finishing.finish([loaded]).usable
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not end.query(), "the pass was over too soon for this test to say anything"
        wait(finishing, finished)
        before_the_end = not end.query()
    print(f"{gpu}: finished {'beside' if before_the_end else 'after'} the forward pass")  # noqa: T201
    assert torch.equal(cache, after)


def expected_before(after: torch.Tensor) -> torch.Tensor:
    """A cache that becomes `after`, but for what is zeroed."""
    found = after.clone()
    for block in LANDED:
        found[block] = after[block].transpose(0, 1).reshape(HEADS, TOKENS, CONTENT)
    return found


def test_what_a_step_has_yet_to_write_is_written_when_it_is_checked(cache: torch.Tensor, gpu: torch.device) -> None:
    """A lease is granted, and its blocks are summed, while the device still works on the last steps of its request."""
    sums = BlockSums([cache])
    blocks = Stretch(
        address=cache.data_ptr(),
        stride_bytes=cache[0].nbytes,
        length_bytes=cache[0].nbytes,
        count=BLOCKS,
        blocks=np.array(LANDED, np.int64),
    )
    before = sums.of([blocks])
    with forward_pass(gpu) as end:
        cache.add_(1)
        sums.note_step()
        assert not end.query(), "the pass was over too soon for this test to say anything"
        found = sums.of([blocks], after_steps=True)
    assert found.tolist() == sums.of([blocks]).tolist() != before.tolist()


def test_a_read_waits_for_the_steps_that_were_given_before_it(gpu: torch.device) -> None:
    """With the device's own events, which the actors' thread asks. Which steps they are is the business of
    tests/unit/test_step_fence.py."""
    end_of_steps = end_of_steps_on(gpu)
    assert end_of_steps is not None
    fence, told = StepFence(end_of_steps), list[bool]()

    def ask(waiting: AfterSteps) -> bool:
        thread = threading.Thread(target=lambda: told.append(waiting.are_over()))
        thread.start()
        thread.join()
        return told[-1]

    fence.note_step()
    torch.cuda.synchronize(gpu)
    first = fence.with_steps(pull("a", [1]))
    assert isinstance(first, AfterSteps)
    assert ask(first)
    with forward_pass(gpu) as end:
        torch.cuda.set_sync_debug_mode("error")
        try:
            fence.note_step()
            second = fence.with_steps(pull("b", [1]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert isinstance(second, AfterSteps)
        is_over = ask(second)
        assert not end.query(), "the pass was over too soon for this test to say anything"
        assert not is_over
        torch.cuda.synchronize(gpu)
        assert ask(second)
