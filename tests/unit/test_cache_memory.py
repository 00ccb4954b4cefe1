"""Zeroing by address: exactly the named bytes, in whichever allocation they are, and with few operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.protocol import Memory
from connector.worker import cache_memory
from connector.worker.cache_memory import CacheMemory
from tests.rig.kernels import DEVICE, counted, never_waiting
from tests.unit.properties import on_any_machine


def memory(*stretches: tuple[int, int]) -> Memory:
    return Memory(
        addresses=np.array([address for address, _ in stretches], np.int64),
        lengths=np.array([length for _, length in stretches], np.int64),
    )


def test_only_the_named_bytes_are_zeroed() -> None:
    one, other = torch.full((4, 8), 7, dtype=torch.uint8), torch.full((32,), 7, dtype=torch.uint8)
    CacheMemory([one[1:], other]).zero([memory((one.data_ptr() + 3, 6)), memory((other.data_ptr() + 31, 1))])
    assert one.flatten().nonzero().flatten().tolist() == [*range(3), *range(9, 32)]
    assert other.nonzero().flatten().tolist() == list(range(31))


def test_views_of_one_allocation_and_other_types_of_elements() -> None:
    """Layers are views, of elements of several bytes, and bytes are what is zeroed."""
    rows = torch.ones(4, 2, 8, dtype=torch.bfloat16)
    layers = [rows[:, 0], rows[:, 1]]
    row_bytes = 2 * 8 * 2
    CacheMemory(layers).zero([memory(*((layers[1].data_ptr() + row * row_bytes, 16) for row in range(4)))])
    assert (rows[:, 0] == 1).all()
    assert (rows[:, 1] == 0).all()


def test_nothing_to_zero() -> None:
    CacheMemory([]).zero([])
    cache = torch.ones(3)
    CacheMemory([cache]).zero([memory()])
    assert (cache == 1).all()


@settings(on_any_machine, max_examples=300)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    unit=st.sampled_from([1, 2, 3, 4, 8, 12, 16]),
    stretches=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 20)), max_size=12),
    at_once=st.sampled_from([1, 7, 1000]),
)
def test_any_stretches(sizes: list[int], unit: int, stretches: list[tuple[int, int, int]], at_once: int) -> None:
    """Of any length and alignment; they may overlap, and need not be in order."""
    caches = [torch.full((size,), 9, dtype=torch.uint8) for size in sizes]
    expected = [cache.clone() for cache in caches]
    named = []
    for number, start, length in stretches:
        cache, right = caches[number % len(sizes)], expected[number % len(sizes)]
        if (start + length) * unit <= cache.numel():
            named.append((cache.data_ptr() + start * unit, length * unit))
            right[start * unit : (start + length) * unit] = 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cache_memory, "_UNITS_AT_ONCE", at_once)
        CacheMemory(caches).zero([memory(*named[::2]), memory(*named[1::2])])
    for cache, right in zip(caches, expected, strict=True):
        assert torch.equal(cache, right)


def heads_of_the_last_tokens(layers: Sequence[torch.Tensor], blocks: Sequence[int], tokens: int) -> Memory:
    """The last tokens of each head of these blocks, a stretch each; layers are [blocks, heads, tokens, content]."""
    stretches = []
    for layer in layers:
        token_bytes = layer[0, 0, 0].nbytes
        block, head, _, _ = (step * layer.element_size() for step in layer.stride())
        start = layer.storage_offset() * layer.element_size() + (layer.shape[2] - tokens) * token_bytes
        stretches += [
            (layer.untyped_storage().data_ptr() + start + number * block + unit * head, tokens * token_bytes)
            for number in blocks
            for unit in range(layer.shape[1])
        ]
    return memory(*stretches)


@pytest.mark.parametrize("requests", [1, 16])
def test_all_stretches_of_an_allocation_are_one_operation(requests: int) -> None:
    """However many layers, heads and requests there are."""
    whole = torch.ones(6, 16, 8, 64, 256, dtype=torch.bfloat16)
    caches = CacheMemory(whole)
    unfilled = [heads_of_the_last_tokens(whole, [number], 16) for number in range(requests)]
    assert sum(each.lengths.size for each in unfilled) == requests * 6 * 8
    with counted() as operations:
        caches.zero(unfilled)
    assert operations == {"index_fill_": 1}
    assert not whole[:, :requests, :, 48:].any()
    assert whole[:, :requests, :, :48].all()
    assert whole[:, requests:].all()


def test_layers_with_allocations_of_their_own_are_one_operation_each() -> None:
    layers = [torch.ones(4, 2, 16, 8) for _ in range(5)]
    caches = CacheMemory(layers)
    with counted() as operations:
        caches.zero([heads_of_the_last_tokens(layers, [1, 3], 4)])
    assert operations == {"index_fill_": 5}


def test_the_engine_thread_does_not_wait_for_the_device() -> None:
    """One copy of the index, from a pinned clone of it, and one kernel."""
    whole = torch.empty(6, 16, 8, 64, 256, dtype=torch.bfloat16, device=DEVICE)
    caches = CacheMemory(whole)
    unfilled = [heads_of_the_last_tokens(whole, [3, 5], 16)]
    with never_waiting(), counted() as operations:
        caches.zero(unfilled)
    assert operations == {"clone": 1, "_to_copy": 1, "index_fill_": 1}


@pytest.mark.parametrize("copy", [lambda host: host.to(DEVICE), lambda host: host.to(DEVICE, non_blocking=True)])
def test_a_copy_that_waits_is_noticed(copy: object) -> None:
    """Guards the test above, and those of landing."""
    assert callable(copy)
    with never_waiting(), pytest.raises(AssertionError):
        copy(torch.arange(3))
