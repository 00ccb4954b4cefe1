"""Putting blocks in order that READs have left in the peer's: before the report, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig

from connector.config import ConnectorOptions
from connector.protocol import Memory, Permutation, ReceiveEnded
from connector.worker import landing
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.landing import BlockPermuter
from connector.worker.memory_shortage import lacks_memory
from statemachine.failures import AbortedByClient
from tests.rig.kernels import DEVICE, counted, never_waiting
from tests.rig.pulls import pull
from tests.unit.vllm_setup import (
    LAYERS,
    allocate,
    attention_spec,
    cache_config,
    layer_name,
)


def permutation(*tables: list[int], chunks: int = 1, heads_first: bool = True) -> Permutation:
    return Permutation(
        kernel_blocks=tuple(np.array(table, np.int64) for table in tables),
        chunks=(chunks,) * len(tables),
        heads_first=heads_first,
    )


def make_cache(
    blocks: int, heads: int, tokens: int, content: int, *, padding: int, dtype: torch.dtype, heads_first: bool = False
) -> torch.Tensor:
    """With padding after each block: [blocks, heads, tokens, content]."""
    page = heads * tokens * content
    words = torch.arange(blocks * (page + padding)).remainder(251).to(dtype)
    rows = words.view(blocks, page + padding)[:, :page]
    if heads_first:
        return rows.view(blocks, heads, tokens, content)
    return rows.view(blocks, tokens, heads, content).transpose(1, 2)


def in_landing_layout(page: torch.Tensor, heads: int, tokens: int, *, chunks: int, heads_first: bool) -> torch.Tensor:
    """What the bytes of a block mean: [heads, tokens, bytes]."""
    if heads_first:
        return page.view(chunks, heads, tokens // chunks, -1).transpose(0, 1).reshape(heads, tokens, -1)
    return page.view(tokens, heads, -1).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("content", [1, 3, 16])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("ours", ["heads first", "tokens first"])
@pytest.mark.parametrize(
    ("chunks", "heads_first"), [(1, True), (1, False), (2, True), (2, False), (4, True), (8, True)]
)
def test_only_the_named_blocks_change(
    dtype: torch.dtype, content: int, padding: int, ours: str, chunks: int, heads_first: bool
) -> None:
    """Of any type and alignment, several requests at once, and in groups whose blocks are not the same."""
    heads, tokens = 3, 8
    caches = {
        group: make_cache(8, heads, tokens, content, padding=padding, dtype=dtype, heads_first=ours == "heads first")
        for group in (0, 1)
    }
    before = {group: cache.untyped_storage().tolist() for group, cache in caches.items()}
    tables = {0: [6, 1, 3], 1: [0, 7]}
    expected = {}
    for group, cache in caches.items():
        pages = cache if ours == "heads first" else cache.transpose(1, 2)
        right = cache.clone().view(torch.uint8)
        for block in tables[group]:
            page = pages[block].clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten()
            right[block] = in_landing_layout(page, heads, tokens, chunks=chunks, heads_first=heads_first)
        expected[group] = right
    order = {"chunks": chunks, "heads_first": heads_first}
    request, other = permutation([6], [0], **order), permutation([1, 3], [7], **order)
    BlockPermuter({group: [cache] for group, cache in caches.items()}).permute([request, other])
    for group, cache in caches.items():
        assert torch.equal(cache.view(torch.uint8), expected[group])
        if padding:
            storage = torch.tensor(cache.untyped_storage().tolist()).view(8, -1)
            old = torch.tensor(before[group]).view(8, -1)
            page_bytes = cache[0].nbytes
            assert torch.equal(storage[:, page_bytes:], old[:, page_bytes:])


def test_requests_of_one_step_may_have_landed_in_different_orders() -> None:
    """From several peers."""
    cache = make_cache(8, 2, 8, 4, padding=0, dtype=torch.int16, heads_first=True)
    before = cache.clone()
    BlockPermuter({0: [cache]}).permute(
        [
            permutation([5], chunks=2),
            permutation([1], heads_first=False),
            permutation([6, 2], chunks=4),
            permutation([3]),
        ]
    )
    for block, chunks, heads_first in ((5, 2, True), (1, 1, False), (6, 4, True), (2, 4, True)):
        page = before[block].view(torch.uint8).flatten()
        right = in_landing_layout(page, 2, 8, chunks=chunks, heads_first=heads_first)
        assert torch.equal(cache[block].view(torch.uint8), right)
    assert torch.equal(cache[[0, 3, 4, 7]], before[[0, 3, 4, 7]])


def test_what_lands_where_it_stays_costs_nothing() -> None:
    layers = [make_cache(8, 2, 8, 4, padding=0, dtype=torch.int16, heads_first=True)]
    blocks = BlockPermuter({0: layers})
    with counted() as operations:
        blocks.permute([permutation([5, 1])])
    assert not operations


def test_more_blocks_than_are_moved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = (make_cache(9, 2, 4, 8, padding=0, dtype=torch.int16) for _ in range(2))
    BlockPermuter({0: [cache]}).permute([permutation([8, 0, 3, 5, 1])])
    monkeypatch.setattr(landing, "MOVED_AT_ONCE_BYTES", 2 * cache[0].nbytes)
    BlockPermuter({0: [other]}).permute([permutation([8, 0, 3, 5, 1])])
    assert torch.equal(cache, other)


FULL_HOST = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "67108864 bytes. Error code 12 (Cannot allocate memory)"
)
full = pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), FULL_HOST, MemoryError()], ids=["device", "host", "numpy"]
)


class FullDevice:
    """Has memory for so many blocks at once. Counts the times that it had not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, blocks_max: int, error: Exception) -> None:
        self.refused = 0
        select = torch.Tensor.index_select

        def limited(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
            if len(index) > blocks_max:
                self.refused += 1
                raise error
            return select(tensor, dim, index)

        monkeypatch.setattr(torch.Tensor, "index_select", limited)


@full
@pytest.mark.parametrize("blocks_max", [1, 2, 3])
def test_a_device_with_little_memory_moves_fewer_blocks_at_once(
    monkeypatch: pytest.MonkeyPatch, blocks_max: int, error: Exception
) -> None:
    """Each block once all the same: a second time would spoil it."""
    cache, other = (make_cache(9, 2, 4, 8, padding=0, dtype=torch.int16) for _ in range(2))
    BlockPermuter({0: [cache]}).permute([permutation([8, 0, 3, 5, 1, 6, 2])])
    device = FullDevice(monkeypatch, blocks_max, error)
    BlockPermuter({0: [other]}).permute([permutation([8, 0, 3, 5, 1, 6, 2])])
    assert torch.equal(cache, other)
    assert 1 <= device.refused <= 2


@full
def test_not_even_one_block_has_room(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    cache = make_cache(9, 2, 4, 8, padding=0, dtype=torch.int16)
    before = cache.clone()
    FullDevice(monkeypatch, 0, error)
    with pytest.raises(type(error)) as raised:
        BlockPermuter({0: [cache]}).permute([permutation([8, 0, 3])])
    assert raised.value is error
    assert torch.equal(cache, before)


@pytest.mark.parametrize("take", [torch.empty, np.empty])
def test_what_is_raised_for_want_of_the_hosts_memory_is_known(take: Callable[[int], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        take(1 << 58)
    assert lacks_memory(raised.value)
    assert not lacks_memory(RuntimeError("index out of range"))


def test_the_engine_thread_does_not_wait_for_the_device() -> None:
    """One copy of the numbers for all layers, from a pinned clone of them; two kernels for each layer."""
    layers = [torch.empty(9, 16, 8, 64, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2) for _ in range(5)]
    with never_waiting(), counted() as operations:
        BlockPermuter({0: layers}).permute([permutation([8, 0, 3]), permutation([5, 1])])
    assert operations == {"clone": 1, "_to_copy": 1, "index_select": 5, "index_copy_": 5}


def test_blocks_are_in_order_when_vllm_is_told(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The step that reports a request has put its blocks in order, then zeroed the rest; a failed one's stay."""
    monkeypatch.setattr(config.cache_config, "kv_cache_layout", "LBNHC")
    monkeypatch.setattr(config.kv_transfer_config, "enable_permute_local_kv", True)
    caches = cache_config(attention_spec(), layout="LBNHC")
    tensors = allocate(caches, layout="LBNHC")
    generator = torch.Generator().manual_seed(3)
    for tensor in tensors.values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    worker = ConnectorWorker(config, caches, ConnectorOptions())
    worker.register_kv_caches(tensors)
    try:
        last = tensors[layer_name(LAYERS - 1)]
        token_bytes = last[0, :, 0].nbytes
        # The last token of block 4 of one layer.
        address = last[4].data_ptr() + (last.shape[2] - 1) * token_bytes
        unfilled = Memory(addresses=np.array([address]), lengths=np.array([token_bytes]))
        for request_id, blocks, failure in (("a", [9, 4], None), ("b", [2], AbortedByClient()), ("c", [11], None)):
            worker.ledger.enter(pull(request_id, blocks))
            ended = ReceiveEnded(
                request_id=request_id,
                failure=failure,
                local_block_ids=blocks,
                quarantined=False,
                permutation=permutation(blocks),
                unfilled=unfilled if request_id == "a" else None,
            )
            worker.ledger.record(ended)
        results = worker.get_transfer_results()
        assert (results.finished_recving, results.failed_recving) == ({"a", "b", "c"}, {"b"})
        for name, tensor in tensors.items():
            expected = before[name].clone()
            for block in (9, 4, 11):
                expected[block] = before[name][block].transpose(0, 1).reshape(expected[block].shape)
            if tensor is last:
                expected[4, :, -1] = 0
            assert torch.equal(tensor, expected)
        once = last.clone()
        assert not worker.get_transfer_results().finished_recving
        assert torch.equal(last, once)
    finally:
        worker.shutdown()
