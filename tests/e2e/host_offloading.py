"""An offloading back end of vLLM's `OffloadingConnector` for engines whose KV cache lies in main memory already.

vLLM's own one copies with a GPU's streams and refuses a CPU. All else here is vLLM's: what is stored and evicted when,
and the bookkeeping in the scheduler. Pages are copied at once, on the engine thread.

    "spec_name": "HostOffloadingSpec", "spec_module_path": "tests.e2e.host_offloading", "cpu_bytes_to_use": ...
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    """Chunks of one block."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return HostOffloadingWorker(kv_caches, self.num_chunks)


class HostOffloadingWorker(OffloadingWorker):
    """A page of each tensor for each chunk."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._tensors = [each.tensor for each in kv_caches.tensors]
        self._chunks = [torch.empty(num_chunks, each.shape[1], dtype=each.dtype) for each in self._tensors]
        self._of_group = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_load=True)

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, host: CPULoadStoreSpec, *, is_load: bool) -> bool:
        started, length_bytes = time.monotonic(), 0
        for number, block, chunk in _pages(engine, host):
            for tensor in self._of_group[number]:
                page, kept = self._tensors[tensor][block], self._chunks[tensor][chunk]
                (page if is_load else kept).copy_(kept if is_load else page)
                length_bytes += page.nbytes
        self._finished.append(TransferResult(job_id, True, length_bytes, time.monotonic() - started))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """A copy is over when it has been submitted."""


def _pages(engine: GPULoadStoreSpec, host: CPULoadStoreSpec) -> Iterable[tuple[int, int, int]]:
    """Number of the cache group, block and chunk of each page."""
    groups = (number for number, size in enumerate(engine.group_sizes) for _ in range(size))
    return zip(groups, engine.block_ids.tolist(), host.block_ids.tolist(), strict=True)
