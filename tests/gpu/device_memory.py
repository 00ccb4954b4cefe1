"""Arrays of the byte oracle, and the memory of a device that has their bytes.

The oracle writes and judges numpy arrays. Each has a twin on the device, whose address goes to NIXL: `upload` before
READs, `download` after them. On a processor the twin is memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from connector.ports.nixl import MemoryKind, MemoryRange

Bytes = npt.NDArray[np.uint8]


class DeviceMemory:
    """The memory of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self._arrays: list[Bytes] = []

    @property
    def memory_kind(self) -> MemoryKind:
        """As NIXL calls it."""
        return "DRAM" if self.device.type == "cpu" else "VRAM"

    @property
    def device_id(self) -> int:
        return self.device.index or 0

    @property
    def ranges(self) -> list[MemoryRange]:
        """What is to be registered."""
        return [
            MemoryRange(tensor.data_ptr(), tensor.nbytes, self.device_id, self.memory_kind) for tensor in self.tensors
        ]

    def place(self, array: Bytes) -> int:
        """Make the twin of an array; returns its address."""
        self._arrays.append(array)
        self.tensors.append(torch.empty(array.size, dtype=torch.uint8, device=self.device))
        return self.tensors[-1].data_ptr()

    def upload(self) -> None:
        """Have the device's bytes be those of the arrays."""
        for array, tensor in zip(self._arrays, self.tensors, strict=True):
            tensor.copy_(torch.from_numpy(array))
        self._synchronize()

    def download(self) -> None:
        """The other way round."""
        self._synchronize()
        for array, tensor in zip(self._arrays, self.tensors, strict=True):
            array[:] = tensor.cpu().numpy()

    def twin(self, view: torch.Tensor) -> torch.Tensor:
        """The same view of the device's bytes."""
        start = view.data_ptr()
        ((array, tensor),) = [
            (array, tensor)
            for array, tensor in zip(self._arrays, self.tensors, strict=True)
            if array.ctypes.data <= start < array.ctypes.data + array.size
        ]
        offset, rest_bytes = divmod(start - array.ctypes.data, view.element_size())
        assert rest_bytes == 0
        twin = torch.empty(0, dtype=view.dtype, device=self.device)
        return twin.set_(tensor.untyped_storage(), offset, view.shape, view.stride())

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)


def use(device: torch.device) -> None:
    """Make it the current device of this thread, as vLLM's workers do: what names no device or stream is of cuda:0.

    With a context: `set_device` makes none on the first device (pytorch/pytorch#155668), and calls of the driver fail
    without one.
    """
    if device.type != "cpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # a context is made with the first use


def make_current(device: torch.device) -> Callable[[], None] | None:
    """What the agent's thread has to do first, as in the product."""
    return None if device.type == "cpu" else lambda: use(device)
