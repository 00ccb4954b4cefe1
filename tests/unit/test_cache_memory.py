"""Zeroing by address: exactly the named bytes, in whichever allocation they are."""

from __future__ import annotations

import numpy as np
import torch

from connector.protocol import Memory
from connector.worker.cache_memory import CacheMemory


def memory(*stretches: tuple[int, int]) -> Memory:
    return Memory(
        addresses=np.array([address for address, _ in stretches], np.int64),
        lengths=np.array([length for _, length in stretches], np.int64),
    )


def test_only_the_named_bytes_are_zeroed() -> None:
    one, other = torch.full((4, 8), 7, dtype=torch.uint8), torch.full((32,), 7, dtype=torch.uint8)
    CacheMemory([one[1:], other]).zero(memory((one.data_ptr() + 3, 6), (other.data_ptr() + 31, 1)))
    assert one.flatten().nonzero().flatten().tolist() == [*range(3), *range(9, 32)]
    assert other.nonzero().flatten().tolist() == list(range(31))


def test_views_of_one_allocation_and_other_types_of_elements() -> None:
    """Layers are views, of elements of several bytes, and bytes are what is zeroed."""
    rows = torch.ones(4, 2, 8, dtype=torch.bfloat16)
    layers = [rows[:, 0], rows[:, 1]]
    row_bytes = 2 * 8 * 2
    CacheMemory(layers).zero(memory(*((layers[1].data_ptr() + row * row_bytes, 16) for row in range(4))))
    assert (rows[:, 0] == 1).all()
    assert (rows[:, 1] == 0).all()


def test_nothing_to_zero() -> None:
    CacheMemory([]).zero(memory())
