"""Device memory of other processes that UCX of this one may still have mapped.

UCX takes the memory of a P that was started again for that of the one before where a few numbers are the same
(`wire.device_allocations`), and READs bring then what the dead process left. Nothing makes it forget before this
process ends. So a connection to such memory is refused. Only memory of this machine is compared, and of those that do
not say which one they are on, where this one does not know either: that of others is reached over the network, unless
UCX is told to use NVLink between nodes (`UCX_CUDA_IPC_ENABLE_MNNVL`).

What was connected counts as mapped, although UCX maps it with the first READ.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias

from connector.layout.geometry import LayoutMismatch
from connector.wire.device_allocations import Allocation, DeviceAllocations

KEPT_MAX = 1 << 16
"""Allocations that are known; those of the oldest numbers are forgotten. A P has some hundred."""

_ON, _OFF = ("y", "yes", "on", "1"), ("n", "no", "off", "0")
"""What UCX reads as such."""

_Number: TypeAlias = tuple[int, int, int]
"""Process id, its namespace, buffer id."""


def reaches_other_nodes(variables: Mapping[str, str]) -> bool:
    """Whether UCX is told, in this environment, to use NVLink between nodes."""
    return variables.get("UCX_CUDA_IPC_ENABLE_MNNVL", "").lower() in _ON


class MappedMemory:
    """Of one worker process, which runs on `machine`, and of a cache on a device or not.

    Args:
        variables: the environment.
    """

    def __init__(self, machine: str, variables: Mapping[str, str], *, is_on_device: bool) -> None:
        self._machine = machine
        self._is_needed = is_on_device and variables.get("UCX_CUDA_IPC_CACHE", "").lower() not in _OFF
        self._reaches_others = reaches_other_nodes(variables)
        # Allocations of that number, each with the life of the engine that had it last.
        self._mapped: OrderedDict[_Number, dict[Allocation, str]] = OrderedDict()
        self._known = 0

    def require_unlike(self, memory: DeviceAllocations | None, life: str) -> None:
        """Raise LayoutMismatch for memory of this life of an engine that UCX would take for that of another life."""
        if memory is None or not self._concerns(memory):
            return
        for allocation in memory.allocations:
            for other, its_life in self._mapped.get(_number(memory, allocation), {}).items():
                if its_life != life and other.address <= allocation.address < other.address + other.length_bytes:
                    raise LayoutMismatch(
                        "device memory",
                        "other numbers than the process before it had, which UCX of this engine has mapped",
                        f"process {memory.process_id}, address {allocation.address:#x}, buffer {allocation.buffer_id}",
                        "UCX would read what the dead process left: restart this engine, or that one once more, or "
                        "start this one with UCX_CUDA_IPC_CACHE=n",
                    )

    def note(self, memory: DeviceAllocations | None, life: str) -> None:
        """It may be mapped from now on."""
        if memory is None or not self._concerns(memory):
            return
        for allocation in memory.allocations:
            number = _number(memory, allocation)
            of_number = self._mapped.setdefault(number, {})
            self._known += allocation not in of_number
            of_number[allocation] = life
            self._mapped.move_to_end(number)
        while self._known > KEPT_MAX:
            self._known -= len(self._mapped.popitem(last=False)[1])

    def _concerns(self, memory: DeviceAllocations) -> bool:
        return self._is_needed and (self._reaches_others or memory.machine == self._machine)


def _number(memory: DeviceAllocations, allocation: Allocation) -> _Number:
    return memory.process_id, memory.process_namespace, allocation.buffer_id
