"""What UCX of a decode engine finds its mappings of this rank's device memory by (`wire.device_allocations`).

`device_allocations` says it, so that D can refuse memory that its UCX would take for that of a process before this one.
`shift_buffer_ids` makes that rare: CUDA counts the allocations of a process, and an engine that is started again makes
the same ones in the same order, so it lets a random number of small ones come before.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

from vllm.platforms import current_platform

from connector.machine import boot_id, process_namespace
from connector.observe.log import get_logger
from connector.ports.nixl import MemoryRange
from connector.wire.device_allocations import DeviceAllocations
from connector.worker.cuda_driver import Driver, DriverError

SHIFT_MAX = 4096
"""Allocations of a byte, each of which is given back at once."""

_log = get_logger()


def device_allocations(ranges: Iterable[MemoryRange]) -> DeviceAllocations | None:
    """Of those ranges that are on a device of CUDA. None: there are none, or, with a line in the log, the driver does
    not say it."""
    on_device = [each for each in ranges if each.memory_kind == "VRAM"]
    if not (on_device and current_platform.is_cuda()):
        return None
    try:
        driver = Driver.load()
        found = dict.fromkeys(driver.allocation(each.address) for each in on_device)
    except DriverError as error:
        _log.warning(
            "CUDA does not say how its memory is numbered (%s): a decode engine on this machine cannot tell it from "
            "that of an engine that ran before in the same container",
            error,
        )
        return None
    return DeviceAllocations(
        machine=boot_id(),
        process_id=os.getpid(),
        process_namespace=process_namespace(),
        allocations=tuple(found),
    )


def shift_buffer_ids() -> None:
    """On CUDA; before the KV cache is allocated, with the device current."""
    if not current_platform.is_cuda():
        return
    try:
        driver = Driver.load()
        # One is kept meanwhile, so that the others do not each take memory from the device and give it back.
        kept = driver.allocate_a_byte()
        for _ in range(secrets.randbelow(SHIFT_MAX)):
            driver.give_back(driver.allocate_a_byte())
        driver.give_back(kept)
    except DriverError as error:
        _log.debug("buffer ids are as they come: %s", error)
