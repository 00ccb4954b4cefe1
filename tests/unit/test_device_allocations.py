"""What UCX tells device memory by: asked of CUDA's driver, said in the handshake, and compared by who would read.

No device is needed: the driver is a stand-in of this file, and `tests/gpu/test_buffer_ids.py` asks the real one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connector.layout.geometry import LayoutMismatch
from connector.machine import boot_id, process_namespace
from connector.ports.nixl import MemoryRange
from connector.runtime import mapped_memory
from connector.runtime.mapped_memory import MappedMemory
from connector.wire.device_allocations import Allocation, DeviceAllocations
from connector.worker import device_allocations as module
from connector.worker.cuda_driver import Driver, DriverError

FIRST_LIFE, SECOND_LIFE = "1" * 32, "2" * 32
HERE, ELSEWHERE = "0a", "0b"


class Library:
    """Memory as CUDA's driver numbers it; addresses are given out one after another."""

    def __init__(self, broken: str = "") -> None:
        self.allocations: list[Allocation] = []
        self.given_back: list[int] = []
        self._broken = broken

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name == object.__getattribute__(self, "_broken"):
            return lambda *arguments: 201
        return object.__getattribute__(self, name)

    def cuMemAlloc_v2(self, address: Any, length: ctypes.c_size_t) -> int:  # noqa: N802
        made = Allocation(0x7000_0000 + 0x1000 * len(self.allocations), length.value, 1 + len(self.allocations))
        self.allocations.append(made)
        address._obj.value = made.address
        return 0

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:  # noqa: N802
        self.given_back.append(address.value)
        return 0

    def cuMemGetAddressRange_v2(self, begin: Any, length: Any, address: ctypes.c_uint64) -> int:  # noqa: N802
        found = self._of(address.value)
        begin._obj.value, length._obj.value = found.address, found.length_bytes
        return 0

    def cuPointerGetAttribute(self, value: Any, attribute: int, address: ctypes.c_uint64) -> int:  # noqa: N802
        assert attribute == 7
        value._obj.value = self._of(address.value).buffer_id
        return 0

    def _of(self, address: int) -> Allocation:
        return next(each for each in self.allocations if each.address <= address < each.address + each.length_bytes)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """That of a device of CUDA, on which 256 and 512 bytes are allocated."""
    made = Library()
    made.allocations = [Allocation(0x1000, 0x100, 3), Allocation(0x2000, 0x200, 4)]
    use(monkeypatch, made)
    return made


def use(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(Driver, "load", lambda: Driver(library))
    monkeypatch.setattr(module.current_platform, "is_cuda", lambda: True)


def on_device(address: int, length: int = 16) -> MemoryRange:
    return MemoryRange(address, length, 0, "VRAM")


# --- P says it ------------------------------------------------------------------------------------------------------


def test_each_allocation_is_said_once_as_a_whole(library: Library) -> None:
    ranges = [on_device(0x1000), on_device(0x1080), on_device(0x2010), MemoryRange(0x9000, 16)]
    said = module.device_allocations(ranges)
    assert said is not None
    assert said.allocations == (Allocation(0x1000, 0x100, 3), Allocation(0x2000, 0x200, 4))
    assert (said.machine, said.process_id, said.process_namespace) == (boot_id(), os.getpid(), process_namespace())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=DeviceAllocations) == said


def test_memory_of_the_host_has_no_such_numbers(library: Library) -> None:
    assert module.device_allocations([MemoryRange(0x1000, 16)]) is None


def test_of_a_device_that_is_not_cuda_nothing_is_said(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(module.current_platform, "is_cuda", lambda: False)
    assert module.device_allocations([on_device(0x1000)]) is None
    module.shift_buffer_ids()
    assert not library.given_back


@pytest.mark.parametrize("broken", ["cuMemGetAddressRange_v2", "cuPointerGetAttribute"])
def test_a_driver_that_does_not_say_it_ends_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    use(monkeypatch, Library(broken))
    lines: list[str] = []
    monkeypatch.setattr(module._log, "warning", lambda line, *arguments: lines.append(line % arguments))
    library = Library(broken)
    library.allocations = [Allocation(0x1000, 0x100, 3)]
    use(monkeypatch, library)
    assert module.device_allocations([on_device(0x1000)]) is None
    assert f"({broken} failed: CUDA error 201)" in lines[0]


def test_without_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr("connector.worker.cuda_driver._LIBRARY", "libthere-is-none.so.1")
    with pytest.raises(DriverError, match="libthere-is-none"):
        Driver.load()
    assert module.device_allocations([on_device(0x1000)]) is None
    module.shift_buffer_ids()


def test_an_engine_that_is_started_again_numbers_its_memory_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = set()
    for _ in range(3):
        library = Library()
        use(monkeypatch, library)
        module.shift_buffer_ids()
        assert sorted(library.given_back) == [each.address for each in library.allocations], "nothing is kept"
        assert len(library.allocations) <= module.SHIFT_MAX
        numbers.add(Driver(library).allocate_a_byte().value)
    assert len(numbers) > 1


@pytest.mark.parametrize("broken", ["cuMemAlloc_v2", "cuMemFree_v2"])
def test_a_driver_that_allocates_nothing_ends_no_engine(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    use(monkeypatch, Library(broken))
    module.shift_buffer_ids()


def test_where_nothing_tells_machines_apart_all_count_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("connector.machine._BOOT_ID", tmp_path / "hidden")
    monkeypatch.setattr("connector.machine._OWN_NAMESPACE", tmp_path / "hidden")
    nowhere = said(machine=boot_id(), namespace=process_namespace())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(nowhere), type=DeviceAllocations) == nowhere
    known = MappedMemory(boot_id(), {}, is_on_device=True)
    known.note(nowhere, FIRST_LIFE)
    with pytest.raises(LayoutMismatch):
        known.require_unlike(nowhere, SECOND_LIFE)


# --- D compares -----------------------------------------------------------------------------------------------------


def said(
    *, pid: int = 70, namespace: int = 4026, machine: str = HERE, address: int = 0x1000, buffer_id: int = 3
) -> DeviceAllocations:
    allocations = (Allocation(0x9000_0000, 16, 1), Allocation(address, 0x100, buffer_id))
    return DeviceAllocations(machine=machine, process_id=pid, process_namespace=namespace, allocations=allocations)


def mapped(variables: Mapping[str, str] | None = None, *, is_on_device: bool = True) -> MappedMemory:
    """What has been connected to `said()` of the first life, at other addresses too."""
    made = MappedMemory(HERE, variables or {}, is_on_device=is_on_device)
    made.note(said(), FIRST_LIFE)
    made.note(said(machine=ELSEWHERE, address=0x5000), FIRST_LIFE)
    made.note(None, FIRST_LIFE)
    return made


@pytest.mark.parametrize("address", [0x1000, 0x10FF])
def test_memory_that_ucx_would_take_for_that_of_the_process_before_is_refused(address: int) -> None:
    allocation = Allocation(address, 0x100, 3)
    again = msgspec.structs.replace(said(), allocations=(Allocation(0x8000_0000, 16, 1), allocation))
    with pytest.raises(LayoutMismatch) as raised:
        mapped().require_unlike(again, SECOND_LIFE)
    assert raised.value.field == "device memory"
    assert raised.value.remote == f"process 70, address {address:#x}, buffer 3"


@pytest.mark.parametrize(
    "other",
    [
        {"pid": 71},
        {"namespace": 4027},
        {"buffer_id": 4},
        {"address": 0x1100},
        {"address": 0xFFF},
        {"machine": ELSEWHERE},
    ],
    ids=str,
)
def test_memory_that_differs_in_one_number_is_read(other: dict[str, Any]) -> None:
    new = said(**other)
    new = msgspec.structs.replace(new, allocations=new.allocations[1:])
    mapped().require_unlike(new, SECOND_LIFE)


def test_as_many_numbers_are_known_as_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "KEPT_MAX", 4)
    known = mapped()
    known.note(said(buffer_id=4), SECOND_LIFE)
    assert known._known == 3, "what is said again takes no more room"
    known.note(said(pid=71, address=0x3000), SECOND_LIFE)
    assert known._known == sum(map(len, known._mapped.values())) <= 4
    known.require_unlike(said(), SECOND_LIFE)  # what was met first is forgotten first
    with pytest.raises(LayoutMismatch):
        known.require_unlike(said(pid=71, address=0x3000), FIRST_LIFE)


def test_the_same_life_is_met_again_and_again() -> None:
    mapped().require_unlike(said(), FIRST_LIFE)


def test_an_engine_that_does_not_say_it_is_read() -> None:
    mapped().require_unlike(None, SECOND_LIFE)


@pytest.mark.parametrize("off", ["n", "NO", "off", "0"])
def test_where_ucx_keeps_no_mappings_everything_is_read(off: str) -> None:
    mapped({"UCX_CUDA_IPC_CACHE": off}).require_unlike(said(), SECOND_LIFE)


def test_who_reads_into_memory_of_the_host_maps_nothing() -> None:
    mapped(is_on_device=False).require_unlike(said(), SECOND_LIFE)


def test_where_nvlink_joins_nodes_the_machine_makes_no_difference() -> None:
    joined = mapped({"UCX_CUDA_IPC_ENABLE_MNNVL": "y"})
    for machine in (HERE, ELSEWHERE):
        with pytest.raises(LayoutMismatch):
            joined.require_unlike(said(machine=machine), SECOND_LIFE)
