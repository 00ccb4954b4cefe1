"""What the engine thread asks of an accelerator, without one: operations counted, and copies that would wait refused.

Tensors on torch's "meta" device stand for the accelerator's: they have shapes and strides, and no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")


class _Operations(TorchDispatchMode):
    """Counts operations by name, views apart: each of the others is at least one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if not operation.is_view:
            self.counts[operation.overloadpacket.__name__] += 1
        return operation(*arguments, **(options or {}))


class _Copies(TorchFunctionMode):
    """Raises AssertionError where the engine thread would wait for the device's stream, as CUDA does.

    It waits for a copy from the host that is not asked to be asynchronous, or comes from memory that is not pinned,
    and for every value that comes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pinned: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        options = dict(options or {})
        if function is torch.Tensor.is_pinned:
            return arguments[0].data_ptr() in self._pinned
        if function is torch.empty and options.pop("pin_memory", False):
            return self._pin(torch.empty(*arguments, **options))
        if function is torch.Tensor.pin_memory:
            return self._pin(arguments[0].clone())
        assert function not in (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero)
        result = function(*arguments, **options)
        if function in (torch.Tensor.to, torch.Tensor.copy_):
            source = arguments[0] if function is torch.Tensor.to else arguments[1]
            if result.device == DEVICE != source.device:
                assert options.get("non_blocking"), f"{function.__name__} waits for the stream"
                assert source.data_ptr() in self._pinned, f"{function.__name__} from memory that is not pinned"
        return result

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)  # its address is not given to another one
        self._pinned.add(tensor.data_ptr())
        return tensor


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each operation that is no view was called inside, by name."""
    operations = _Operations()
    with operations:
        yield operations.counts


@contextmanager
def never_waiting() -> Iterator[None]:
    """Nothing inside may wait for the device."""
    with _Copies():
        yield
