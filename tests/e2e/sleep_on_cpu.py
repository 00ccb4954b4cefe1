"""Lets engines on CPUs sleep, as vLLM lets those on devices, from 0.33 on. For `EngineOptions.changes` of such engines.

vLLM's worker for CPUs ignores that it is told to. Here it calls the connector's hooks, as `Worker.sleep` and
`Worker.wake_up` do, and the memory of the KV cache goes in between: whoever touches it then has no more to say. Other
memory, zeroed, stands there after that. Weights stay.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

from tests.e2e.after_import import change_module

_MAP_FIXED, _NO_ACCESS, _PAGE = 0x10, 0, mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def _replace_pages(tensors: Iterator[Any], access: int) -> None:
    """By new ones, with this access. Those at the edges, which others may have too, stay."""
    for storage in {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}.values():
        begin = -(-storage.data_ptr() // _PAGE) * _PAGE
        end = (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        assert end > begin, "the KV cache is smaller than a page"
        if _libc.mmap(begin, end - begin, access, flags, -1, 0) != begin:
            raise OSError(ctypes.get_errno(), "mmap")


def _caches(worker: Any) -> Iterator[Any]:
    for each in worker.model_runner.kv_caches:
        yield from each if isinstance(each, list | tuple) else (each,)


def _let_workers_sleep(module: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    def sleep(self: Any, level: int = 1) -> None:
        if has_kv_transfer_group():
            get_kv_transfer_group().unregister_kv_caches()
        _replace_pages(_caches(self), _NO_ACCESS)

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            _replace_pages(_caches(self), mmap.PROT_READ | mmap.PROT_WRITE)
            if has_kv_transfer_group():
                get_kv_transfer_group().restore_kv_caches()

    module.CPUWorker.sleep, module.CPUWorker.wake_up = sleep, wake_up


def _say_that_they_can(module: Any) -> None:
    module.CpuPlatform.is_sleep_mode_available = lambda self: True


change_module("vllm.platforms.cpu", _say_that_they_can)
change_module("vllm.v1.worker.cpu_worker", _let_workers_sleep)
