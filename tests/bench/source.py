"""The other process of a benchmark that needs no engine: one whose memory is read.

`python -m tests.bench.source BYTES PAGES` serves that much memory through the NIXL port. A benchmark that needs more of
its source brings a module of its own, and starts it in the same way.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from connector.ports.nixl import MemoryRange
from connector.ports.nixl_agent import RealNixlPort

_SIGN = "@"
"""Begins the line with what the process says; UCX may print others."""


@contextmanager
def other_process(module: str, *arguments: object) -> Iterator[tuple[int, Any]]:
    """`python -m module arguments`: its id, and what it has told (`tell`). It is killed in the end."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, next(msgspec.json.decode(line[1:]) for line in process.stdout if line.startswith(_SIGN))
    finally:
        process.kill()
        process.wait()


def tell(said: object) -> None:
    """In the other process: say what the reader has to know."""
    print(_SIGN + msgspec.json.encode(said).decode(), flush=True)


def wait_for_end() -> None:
    """In the other process: until the reader is gone."""
    sys.stdin.read()


@dataclass(frozen=True)
class Source:
    """Memory of another process."""

    pid: int
    metadata: bytes
    """Of its NIXL agent."""
    address: int
    device_id: int = 0
    """Of the memory, as NIXL numbers devices."""


class MemoryPages(StrEnum):
    """Of the operating system, under memory that was written to."""

    SMALL = "small"
    """As under the KV cache of an engine on CPUs: torch asks for no others, unless THP_MEM_ALLOC_ENABLE is 1."""
    HUGE = "huge"
    """numpy asks for them, where Linux gives them to those who ask (`transparent_hugepage`: madvise)."""


def memory_of(length_bytes: int, memory_pages: MemoryPages) -> npt.NDArray[np.uint8]:
    """So many bytes that were written to."""
    if memory_pages is MemoryPages.HUGE:
        return np.ones(length_bytes, dtype=np.uint8)
    import torch

    return torch.ones(length_bytes, dtype=torch.uint8).numpy()


@contextmanager
def source(length_bytes: int, memory_pages: MemoryPages = MemoryPages.HUGE) -> Iterator[Source]:
    """A process with so much memory, registered and written to."""
    with other_process("tests.bench.source", length_bytes, memory_pages) as (pid, said):
        yield Source(pid, base64.b64decode(said["metadata"]), said["address"])


def pages(address: int, page_bytes: int, count: int, device_id: int = 0) -> npt.NDArray[np.uint64]:
    """The descriptor run of `count` pages that lie one after another, as NIXL takes it."""
    return np.array([[address, page_bytes, device_id, page_bytes, count]], dtype=np.uint64)


def main() -> None:
    memory = memory_of(int(sys.argv[1]), MemoryPages(sys.argv[2]))
    ranges = [MemoryRange(memory.ctypes.data, memory.nbytes)]
    port = RealNixlPort.open(f"source-{uuid.uuid4()}", ranges)
    tell({"metadata": base64.b64encode(port.agent_metadata).decode(), "address": memory.ctypes.data})
    wait_for_end()
    port.close_blocking(5)


if __name__ == "__main__":
    main()
