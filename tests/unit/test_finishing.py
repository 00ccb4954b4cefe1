"""When vLLM is told that a request has been loaded: when a device has done what was left to do, and not before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from connector.layout.landing import landing_steps
from connector.protocol import Memory, Permutation
from connector.worker.cache_memory import CacheMemory
from connector.worker.finishing import Finishing, Loaded, run_on
from connector.worker.landing import BlockPermuter
from connector.worker.packing import PackedBlocks
from statemachine.failures import DeviceMemoryExhausted, PackingFailed


class LateDevice:
    """Does what it is told when a test says so, in order."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []

    def run(self, work: Callable[[], None]) -> Callable[[], bool]:
        done = False

        def do() -> None:
            nonlocal done
            work()
            done = True

        self.queue.append(do)
        return lambda: done

    def do_next(self) -> None:
        self.queue.pop(0)()


def finishing(device: LateDevice) -> tuple[Finishing, torch.Tensor]:
    """Of 16 blocks with 2 heads of 4 tokens."""
    cache = torch.arange(1, 16 * 2 * 4 * 8 + 1, dtype=torch.int32).reshape(16, 2, 4, 8)
    return Finishing(device.run, BlockPermuter({0: [cache]}), CacheMemory([cache])), cache


def plain(name: str) -> Loaded:
    return Loaded(name, ([1],), None, None)


def partly(name: str, cache: torch.Tensor, block: int) -> Loaded:
    """A request of which no READ has written the last token of a block."""
    address = cache[block, :, -1].data_ptr()
    unfilled = Memory(addresses=np.array([address]), lengths=np.array([cache[block, 0, -1].nbytes]))
    return Loaded(name, ([block],), None, unfilled)


def other_order(name: str, block: int) -> Loaded:
    """A request whose block has tokens before heads."""
    assert landing_steps(heads=2, tokens=4, head_step=32, token_step=8, heads_first=False, chunks=1) is not None
    return Loaded(
        name, ([block],), Permutation(heads_first=False, chunks=(1,), kernel_blocks=(np.array([block]),)), None
    )


def test_a_request_is_told_when_the_device_has_done_its_part() -> None:
    device = LateDevice()
    ours, cache = finishing(device)
    before = cache.clone()
    assert ours.finish([partly("a", cache, 3), plain("b")]).usable == {"b"}
    assert ours.finish([]).usable == set()
    assert torch.equal(cache, before)
    device.do_next()
    assert not cache[3, 0, -1].any()
    assert ours.finish([]).usable == {"a"}
    assert ours.finish([]).usable == set()


def test_requests_of_several_steps_are_told_in_the_devices_order() -> None:
    device = LateDevice()
    ours, cache = finishing(device)
    assert ours.finish([partly("a", cache, 3), other_order("b", 4)]).usable == set()
    assert ours.finish([other_order("c", 5), plain("d")]).usable == {"d"}
    assert len(device.queue) == 2, "one piece of work for all requests of a step"
    device.do_next()
    assert ours.finish([]).usable == {"a", "b"}
    device.do_next()
    assert ours.finish([plain("e")]).usable == {"c", "e"}


def test_a_processor_has_done_it_at_once() -> None:
    _, cache = finishing(LateDevice())
    ours = Finishing(run_on(cache.device), BlockPermuter({0: [cache]}), CacheMemory([cache]))
    assert ours.finish([partly("a", cache, 3)]).usable == {"a"}
    assert not cache[3, 0, -1].any()


def test_nothing_is_asked_of_a_device_for_requests_that_are_whole() -> None:
    device = LateDevice()
    ours, _ = finishing(device)
    assert ours.finish([plain("a"), plain("b")]).usable == {"a", "b"}
    assert not device.queue


class FailsFor(PackedBlocks):
    """Blocks that a kernel does not want to pack."""

    def __init__(self, block: int, cache: torch.Tensor) -> None:
        super().__init__()
        self._block = block
        self._cache = cache

    def pack(self, permutation: Permutation) -> None:
        (blocks,) = permutation.kernel_blocks
        if self._block in blocks:
            raise RuntimeError("no kernel")
        self._cache[blocks] = -self._cache[blocks]


def to_pack(name: str, cache: torch.Tensor, block: int) -> Loaded:
    """A request of whose block no READ has written the last token."""
    permutation = Permutation(heads_first=True, chunks=(1,), kernel_blocks=(np.array([block]),), packs=True)
    return partly(name, cache, block)._replace(permutation=permutation)


def test_a_block_that_cannot_be_packed_fails_its_request_alone() -> None:
    device = LateDevice()
    _, cache = finishing(device)
    ours = Finishing(device.run, BlockPermuter({0: [cache]}), CacheMemory([cache]), packed_blocks=FailsFor(4, cache))
    before = cache.clone()
    a, b, c = (to_pack(name, cache, block) for name, block in (("a", 3), ("b", 4), ("c", 5)))
    assert ours.finish([a, b, c, plain("d")]) == ({"d"}, {})
    device.do_next()
    assert ours.finish([]) == ({"a", "c"}, {"b": PackingFailed(error="RuntimeError('no kernel')")})
    assert torch.equal(cache[3, :, :-1], -before[3, :, :-1])
    assert ours.finish([plain("b")]) == ({"b"}, {}), "the next request of that name has nothing to do with it"


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["device", "host"],
)
def test_a_device_without_memory_fails_the_requests_of_that_step_and_no_others(error: Exception) -> None:
    """And not before it has done what it had begun with."""
    device = LateDevice()
    _, cache = finishing(device)

    class Full(BlockPermuter):
        def permute(self, permutations: Sequence[Permutation]) -> None:
            if any(4 in each.kernel_blocks[0] for each in permutations):
                raise error
            super().permute(permutations)

    ours = Finishing(device.run, Full({0: [cache]}), CacheMemory([cache]))
    assert ours.finish([other_order("a", 4), partly("b", cache, 3), plain("c")]).usable == {"c"}
    assert ours.finish([other_order("d", 5)]) == (set(), {})
    device.do_next()
    assert ours.finish([]) == (set(), dict.fromkeys("ab", DeviceMemoryExhausted(error=str(error))))
    device.do_next()
    assert ours.finish([]) == ({"d"}, {})


def test_what_is_to_be_packed_is_zeroed_before_it() -> None:
    """Where the block has landed: the place of its tokens is another one afterwards."""
    _, cache = finishing(LateDevice())

    class Turns(PackedBlocks):
        def pack(self, permutation: Permutation) -> None:
            (blocks,) = permutation.kernel_blocks
            cache[blocks] = cache[blocks].flip(2)

    before = cache.clone()
    ours = Finishing(run_on(cache.device), BlockPermuter({0: [cache]}), CacheMemory([cache]), packed_blocks=Turns())
    request = to_pack("a", cache, 3)
    unfilled = Memory(
        addresses=np.array([cache[3, head, -1].data_ptr() for head in range(2)]),
        lengths=np.array([cache[3, 0, -1].nbytes] * 2),
    )
    assert ours.finish([request._replace(unfilled=unfilled)]).usable == {"a"}
    assert not cache[3, :, 0].any()
    assert torch.equal(cache[3, :, 1:], before[3, :, :-1].flip(1))
