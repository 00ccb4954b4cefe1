"""What is left to do when a request's READs have ended, and when vLLM may be told that it is loaded.

Blocks that were left in the peer's order are put in ours (`landing`), what no READ has written is zeroed
(`cache_memory`), what needs the order of attention on CPUs is packed (`packing`), and what is staged on the host is
copied to the device (`host_staging`).

Two things can fail. Then the requests are told why (`Finished.failed`), and the engine goes on. They are packing, for
which a kernel of vLLM is called, for one request alone; and where a device has no memory left, the copy of one request
from the host, or else all that is left to do in that step. The same goes for memory of the host
(`memory_shortage`).

When. On a processor all this has been done when the call returns. A device does it later, and what a READ writes goes
past its streams: if vLLM were told at once, it could free the blocks (the client leaves) and give them to another
request, whose READ might write into them before the device permutes or zeroes what it takes for the first one's. So a
request is reported when the device says that its part has been done, which is asked in each step. That part has a
stream of its own: in the stream of forward passes it would come after them, and be reported a step later still. No pass
uses the blocks before they are reported, so nothing else orders the two.

Copies from the host are different: READs write to the host then, and never to the device. They are in the stream of
forward passes, before the pass that uses the blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from connector.protocol import Memory, Permutation
from connector.worker.cache_memory import CacheMemory
from connector.worker.device_stream import stream_beside_steps
from connector.worker.landing import BlockPermuter
from connector.worker.memory_shortage import lacks_memory
from connector.worker.packing import PackedBlocks
from statemachine.failures import DeviceMemoryExhausted, Failure, PackingFailed

if TYPE_CHECKING:
    from connector.worker.host_staging import HostStaging

Run: TypeAlias = Callable[[Callable[[], None]], Callable[[], bool]]
"""Runs work on memory, now or later; the answer says whether it has been done."""


class Loaded(NamedTuple):
    """A request whose READs have ended, and what is left to do before it may be used."""

    request_id: str
    block_ids: tuple[list[int], ...]
    """Per cache group: the blocks that were read into."""
    permutation: Permutation | None
    """Those that were left in the peer's order of heads and tokens."""
    unfilled: Memory | None
    """Parts of them that no READ has written."""


class Finished(NamedTuple):
    """Requests with which nothing is left to do."""

    usable: set[str]
    failed: dict[str, Failure]
    """Those whose KV may not be used, and why."""


class Finishing:
    """See the module's docstring. On the engine thread.

    Args:
        run: how work on the registered memory is run, `run_on(device)` of that memory.
        staging: set where that memory is on the host and stands for the device's.
        packed_blocks: set where READs may leave what is to be packed.
        synchronizes: wait for the device first. On ROCm, kernels for states may not see what was written into them
            otherwise; the built-in connector waits too.
    """

    def __init__(
        self,
        run: Run,
        permuter: BlockPermuter,
        cache_memory: CacheMemory,
        staging: HostStaging | None = None,
        *,
        packed_blocks: PackedBlocks | None = None,
        synchronizes: bool = False,
    ) -> None:
        self._run = run
        self._permuter = permuter
        self._cache_memory = cache_memory
        self._staging = staging
        self._packed_blocks = packed_blocks
        # Of requests in `running`.
        self._spoilt: dict[str, Failure] = {}
        self._synchronizes = synchronizes
        self.running: deque[tuple[Callable[[], bool], set[str]]] = deque()
        """What a device may not have done yet, in its order: whether it has, and for which requests."""

    def finish(self, loaded: Sequence[Loaded]) -> Finished:
        """Begin with these; returns the requests, of these and of those before, that are finished now."""
        if loaded and self._synchronizes:
            torch.accelerator.synchronize()
        to_change = {each.request_id for each in loaded if each.permutation is not None or each.unfilled is not None}
        if to_change:
            self.running.append((self._run(partial(self._change, loaded)), to_change))
        finished = {each.request_id for each in loaded} - to_change
        while self.running and self.running[0][0]():
            finished |= self.running.popleft()[1]
        if self._staging is not None:
            for each in loaded:
                self._load_from_host(self._staging, each)
        if not self._spoilt:
            return Finished(finished, {})
        failed = {each: self._spoilt.pop(each) for each in finished & self._spoilt.keys()}
        return Finished(finished - failed.keys(), failed)

    def _load_from_host(self, staging: HostStaging, loaded: Loaded) -> None:
        try:
            staging.load(loaded.block_ids)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            self._spoilt[loaded.request_id] = DeviceMemoryExhausted(error=str(error))

    def _change(self, loaded: Sequence[Loaded]) -> None:
        """All memory that these have left to be changed."""
        permutations = [
            each.permutation for each in loaded if each.permutation is not None and not each.permutation.packs
        ]
        try:
            self._permuter.permute(permutations)
            # What is to be packed is zeroed where it lies now.
            self._cache_memory.zero([each.unfilled for each in loaded if each.unfilled is not None])
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            # Which of these are as they should be is not known. What was begun is in the stream, and they are told
            # after it.
            failure = DeviceMemoryExhausted(error=str(error))
            for each in loaded:
                if each.permutation is not None or each.unfilled is not None:
                    self._spoilt[each.request_id] = failure
            return
        for each in loaded:
            if each.permutation is not None and each.permutation.packs:
                self._pack(each.request_id, each.permutation)

    def _pack(self, request_id: str, permutation: Permutation) -> None:
        assert self._packed_blocks is not None
        try:
            self._packed_blocks.pack(permutation)
        except Exception as error:  # a kernel that does not want one request's blocks must not end the engine
            self._spoilt[request_id] = PackingFailed(error=repr(error))


def run_on(device: torch.device) -> Run:
    """For memory of this device."""
    if device.type == "cpu":
        return run_at_once
    stream = stream_beside_steps(device)

    def run_in_stream(work: Callable[[], None]) -> Callable[[], bool]:
        with stream:
            work()
        event: torch.Event = stream.record_event()
        return lambda: bool(event.query())

    return run_in_stream


def run_at_once(work: Callable[[], None]) -> Callable[[], bool]:
    """For memory of the host."""
    work()
    return lambda: True
