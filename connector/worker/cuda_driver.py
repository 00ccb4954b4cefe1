"""Four calls of CUDA's driver, by ctypes: its Python bindings come with some builds of torch only."""

from __future__ import annotations

import ctypes
from typing import Any

from connector.wire.device_allocations import Allocation

_LIBRARY = "libcuda.so.1"
_BUFFER_ID = 7
"""CU_POINTER_ATTRIBUTE_BUFFER_ID of cuda.h."""


class DriverError(Exception):
    """A call of CUDA's driver has failed, or there is no driver."""


class Driver:
    """Those calls of CUDA's driver that are needed here.

    Args:
        library: as ctypes loads it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def load(cls) -> Driver:
        """Raises DriverError."""
        try:
            return cls(ctypes.CDLL(_LIBRARY))
        except OSError as error:
            raise DriverError(str(error)) from error

    def allocation(self, address: int) -> Allocation:
        """The one that holds this address. Raises DriverError."""
        begin, length, buffer_id = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        at = ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(length), at)
        self._call("cuPointerGetAttribute", ctypes.byref(buffer_id), _BUFFER_ID, at)
        return Allocation(begin.value, length.value, buffer_id.value)

    def allocate_a_byte(self) -> ctypes.c_uint64:
        """On the current device. Raises DriverError."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(1))
        return address

    def give_back(self, address: ctypes.c_uint64) -> None:
        """Raises DriverError."""
        self._call("cuMemFree_v2", address)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DriverError(f"{name} failed: CUDA error {status}")
