"""How CUDA numbers what a process allocates, by which UCX tells old memory from new (docs/nixl.md fact 40)."""

from __future__ import annotations

import pytest
import torch

from connector.worker.cuda_driver import Driver

ALLOCATION_BYTES = 64 << 20
"""Such a one torch asks of CUDA by itself."""


@pytest.mark.usefixtures("gpu")
def test_the_driver_names_the_allocation_and_counts() -> None:
    driver = Driver.load()
    buffer_ids = []
    for _ in range(3):
        driver.give_back(driver.allocate_a_byte())
        memory = torch.empty(ALLOCATION_BYTES, dtype=torch.uint8, device="cuda")
        found = driver.allocation(memory.data_ptr() + ALLOCATION_BYTES // 2)
        assert found.address <= memory.data_ptr()
        assert found.address + found.length_bytes >= memory.data_ptr() + ALLOCATION_BYTES
        assert driver.allocation(memory.data_ptr()) == found
        buffer_ids.append(found.buffer_id)
        del memory
        torch.cuda.empty_cache()
    assert len(set(buffer_ids)) == len(buffer_ids), "an allocation that is made again has another number"


@pytest.mark.usefixtures("gpu")
def test_small_allocations_before_it_shift_the_number() -> None:
    """What `shift_buffer_ids` relies on."""
    driver = Driver.load()

    def number_after(small: int) -> int:
        for _ in range(small):
            driver.give_back(driver.allocate_a_byte())
        memory = torch.empty(ALLOCATION_BYTES, dtype=torch.uint8, device="cuda")
        number = driver.allocation(memory.data_ptr()).buffer_id
        del memory
        torch.cuda.empty_cache()
        return number

    kept = driver.allocate_a_byte()
    try:
        first, second, third = number_after(0), number_after(0), number_after(100)
    finally:
        driver.give_back(kept)
    assert third - second >= (second - first) + 100
