"""What no connector can beat on this machine: the same bytes without one, and a question without a connector behind it.

`python -m tests.bench limits`; part of `make bench`. 134 MB, as the cases `pages-*` move them: copied within a process,
read from another one with a system call, read with NIXL alone; and the round trip of a small message between two
processes over TCP, of which a handshake or a hold needs at least one.
"""

from __future__ import annotations

import ctypes
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from tests.bench.case import percentile
from tests.bench.source import Source, other_process, pages, source, tell

LENGTH_BYTES = 1 << 27
PAGE_SIZES_BYTES = (4096, 16_384, 65_536, 1 << 20)
REPEATS = 7
ROUND_TRIPS = 500
IOVECS_MAX = 1024
"""That Linux takes in one call."""
BUILTIN_THREADS = 4
"""With which the built-in connector has its NIXL agent copy."""


@dataclass(frozen=True)
class Limit:
    """One thing that is measured without a connector: a value for each repetition."""

    name: str
    unit: str
    values: list[float]


def limits() -> list[Limit]:
    """All of them; a quarter of a minute."""
    memory = np.zeros(LENGTH_BYTES, dtype=np.uint8)
    with source(LENGTH_BYTES) as other:
        found = [*_copies(memory), *_system_calls(memory, other), *_raw_reads(memory, other)]
    return [*found, *_round_trips()]


def _rates(name: str, move: Callable[[], object]) -> Limit:
    """In GB/s; the first call, into memory that nobody has touched, does not count."""
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - started)
    return Limit(name, "GB/s", [LENGTH_BYTES / each / 1e9 for each in seconds[1:]])


def _shuffled(page_bytes: int) -> npt.NDArray[np.int32]:
    ids = np.arange(LENGTH_BYTES // page_bytes, dtype=np.int32)
    np.random.default_rng(1).shuffle(ids)
    return ids


def _size(page_bytes: int) -> str:
    return f"{page_bytes >> 20} MiB" if page_bytes >= 1 << 20 else f"{page_bytes >> 10} KiB"


# --- within a process -------------------------------------------------------------------------------------------------


def _copies(memory: npt.NDArray[np.uint8]) -> Iterator[Limit]:
    import torch

    from_memory = np.ones_like(memory)
    yield _rates("memcpy (numpy)", lambda: np.copyto(memory, from_memory))
    into, out_of = torch.from_numpy(memory), torch.from_numpy(from_memory)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield _rates("memcpy (torch, one thread)", lambda: into.copy_(out_of))
    torch.set_num_threads(threads)


# --- from another process ---------------------------------------------------------------------------------------------


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _system_calls(memory: npt.NDArray[np.uint8], other: Source) -> Iterator[Limit]:
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t

    def iovecs(address: int, ids: npt.NDArray[np.int32], page_bytes: int) -> Any:
        return (_Iovec * len(ids))(*((address + int(each) * page_bytes, page_bytes) for each in ids))

    for page_bytes in PAGE_SIZES_BYTES:
        local, remote = _shuffled(page_bytes), _shuffled(page_bytes)[::-1]
        calls = [
            (
                iovecs(memory.ctypes.data, local[start : start + IOVECS_MAX], page_bytes),
                iovecs(other.address, remote[start : start + IOVECS_MAX], page_bytes),
            )
            for start in range(0, len(local), IOVECS_MAX)
        ]

        def move(calls: list[tuple[Any, Any]] = calls) -> None:
            for into, out_of in calls:
                moved = read(other.pid, into, len(into), out_of, len(out_of), 0)
                if moved != len(into) * into[0].length:
                    raise OSError(ctypes.get_errno(), f"process_vm_readv moved {moved} bytes")

        yield _rates(f"process_vm_readv, {_size(page_bytes)}, scattered", move)


def _raw_reads(memory: npt.NDArray[np.uint8], other: Source) -> Iterator[Limit]:
    """NIXL alone, from descriptor lists that are prepared once."""
    for page_bytes in PAGE_SIZES_BYTES:
        yield from _raw_read(memory, other, page_bytes, scattered=True)
    yield from _raw_read(memory, other, 65_536, scattered=False)
    yield from _raw_read(memory, other, 65_536, scattered=True, threads=BUILTIN_THREADS)


def _raw_read(
    memory: npt.NDArray[np.uint8], other: Source, page_bytes: int, *, scattered: bool, threads: int = 0
) -> Iterator[Limit]:
    import nixl._api as nixl

    config = nixl.nixl_agent_config(enable_prog_thread=threads > 0, num_threads=threads)
    agent = nixl.nixl_agent(f"raw-{uuid.uuid4()}", config)
    registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    peer = agent.add_remote_agent(other.metadata).decode()
    count = LENGTH_BYTES // page_bytes
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages(memory.ctypes.data, page_bytes, count), "DRAM")
    remote = agent.prep_xfer_dlist(peer, pages(other.address, page_bytes, count), "DRAM")
    ids = _shuffled(page_bytes) if scattered else np.arange(count, dtype=np.int32)
    remote_ids = ids[::-1].copy() if scattered else ids

    def move() -> None:
        handle = agent.make_prepped_xfer("READ", local, ids, remote, remote_ids, b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)

    order = "scattered" if scattered else "in order"
    with_threads = f", {threads} threads" if threads else ""
    yield _rates(f"NIXL READ, {_size(page_bytes)}, {order}{with_threads}", move)
    agent.release_dlist_handle(local)
    agent.release_dlist_handle(remote)
    agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)


# --- a question -------------------------------------------------------------------------------------------------------


def _round_trips() -> Iterator[Limit]:
    """From a REQ socket to a ROUTER in another process and back, as a handshake asks."""
    with other_process("tests.bench.limits") as (_, port), zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.connect(f"tcp://127.0.0.1:{port}")
        medians, late = [], []
        for _ in range(REPEATS):
            seconds = []
            for _ in range(ROUND_TRIPS):
                started = time.perf_counter()
                asking.send(b"question")
                asking.recv()
                seconds.append(time.perf_counter() - started)
            medians.append(percentile(seconds, 50) * 1e6)
            late.append(percentile(seconds, 99) * 1e6)
    yield Limit("ZMQ round trip, p50", "us", medians)
    yield Limit("ZMQ round trip, p99", "us", late)


def _answer() -> None:
    """The other process of `_round_trips`."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as answering:
        tell(answering.bind_to_random_port("tcp://127.0.0.1"))
        while True:
            answering.send_multipart(answering.recv_multipart())


if __name__ == "__main__":
    _answer()
