"""What no connector can beat on this machine: the same bytes without one, and a question without a connector behind it.

`python -m tests.bench limits`; part of `make bench`. 134 MB, as the cases `pages-*` move them: copied within a process,
read from another one with a system call, read with NIXL alone, all of it in memory such as the KV cache of an engine on
CPUs is, and once in huge pages; the round trip of a small message between two processes over TCP, of which a handshake
or a hold needs at least one; and what a step that computes pays for bytes that arrive beside it, as in the cases
`busy-*`, whoever copies them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from tests.bench.case import BLOCK_BYTES, PAGE_BYTES, SMALL_BLOCKS, percentile
from tests.bench.cases.steps import PACE_SECONDS, PIECES
from tests.bench.source import MemoryPages, Source, memory_of, other_process, pages, source, tell
from tests.rig import OURS, EngineOptions
from tests.rig.forward import forward_pass
from tests.rig.messages import Forward

LENGTH_BYTES = 1 << 27
FOUR = 4
"""Requests of that length in the cases `four*`: more than a processor's cache holds."""
PAGE_SIZES_BYTES = (4096, 16_384, 65_536, 1 << 20)
REPEATS = 7
ROUND_TRIPS = 500
IOVECS_MAX = 1024
"""That Linux takes in one call."""
BUILTIN_THREADS = 4
"""With which the built-in connector has its NIXL agent copy."""
BUSY_SECONDS = 0.3
PACED_BYTES = SMALL_BLOCKS * BLOCK_BYTES


@dataclass(frozen=True)
class Limit:
    """One thing that is measured without a connector: a value for each repetition."""

    name: str
    unit: str
    values: list[float]


def limits() -> list[Limit]:
    """All of them; half a minute."""
    memory = memory_of(FOUR * LENGTH_BYTES, MemoryPages.SMALL)
    with source(FOUR * LENGTH_BYTES, MemoryPages.SMALL) as other:
        found = [
            *_copies(memory[:LENGTH_BYTES]),
            *_system_calls(memory, other),
            *_raw_reads(memory, other),
            *_busy_steps(other),
        ]
    memory = memory_of(FOUR * LENGTH_BYTES, MemoryPages.HUGE)
    with source(FOUR * LENGTH_BYTES, MemoryPages.HUGE) as other:
        found += _raw_read(memory, other, PAGE_BYTES, scattered=True, times=FOUR, memory_pages=MemoryPages.HUGE)
    return [*found, *_round_trips()]


def _rates(name: str, move: Callable[[], object], times: int = 1) -> Limit:
    """In GB/s, of a call that moves so many times 134 MB; the first call, into memory that nobody has touched, does not
    count."""
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - started)
    return Limit(name, "GB/s", [times * LENGTH_BYTES / each / 1e9 for each in seconds[1:]])


def _shuffled(page_bytes: int) -> npt.NDArray[np.int32]:
    ids = np.arange(LENGTH_BYTES // page_bytes, dtype=np.int32)
    np.random.default_rng(1).shuffle(ids)
    return ids


def _size(page_bytes: int) -> str:
    return f"{page_bytes >> 20} MiB" if page_bytes >= 1 << 20 else f"{page_bytes >> 10} KiB"


# --- within a process -------------------------------------------------------------------------------------------------


def _copies(memory: npt.NDArray[np.uint8]) -> Iterator[Limit]:
    import torch

    from_memory = memory_of(memory.nbytes, MemoryPages.SMALL)
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
    for page_bytes in PAGE_SIZES_BYTES:
        ids = _shuffled(page_bytes)
        move = _system_call(memory.ctypes.data, ids, other.pid, other.address, ids[::-1], page_bytes)
        yield _rates(f"process_vm_readv, {_size(page_bytes)}, scattered", move)


def _system_call(
    address: int,
    ids: npt.NDArray[np.int32],
    pid: int,
    remote_address: int,
    remote_ids: npt.NDArray[np.int32],
    page_bytes: int,
) -> Callable[[], None]:
    """What reads those pages of another process into pages of this one; the interpreter is free meanwhile."""
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t

    def iovecs(first: int, ids: npt.NDArray[np.int32]) -> Any:
        return (_Iovec * len(ids))(*((first + int(each) * page_bytes, page_bytes) for each in ids))

    calls = [
        (
            iovecs(address, ids[start : start + IOVECS_MAX]),
            iovecs(remote_address, remote_ids[start : start + IOVECS_MAX]),
        )
        for start in range(0, len(ids), IOVECS_MAX)
    ]

    def move() -> None:
        for into, out_of in calls:
            moved = read(pid, into, len(into), out_of, len(out_of), 0)
            if moved != len(into) * page_bytes:
                raise OSError(ctypes.get_errno(), f"process_vm_readv moved {moved} bytes")

    return move


def _raw_reads(memory: npt.NDArray[np.uint8], other: Source) -> Iterator[Limit]:
    """NIXL alone, from descriptor lists that are prepared once."""
    for page_bytes in PAGE_SIZES_BYTES:
        yield from _raw_read(memory, other, page_bytes, scattered=True)
    yield from _raw_read(memory, other, 65_536, scattered=False)
    yield from _raw_read(memory, other, 65_536, scattered=True, threads=BUILTIN_THREADS)
    yield from _raw_read(memory, other, 65_536, scattered=True, times=FOUR)


def _raw_read(
    memory: npt.NDArray[np.uint8],
    other: Source,
    page_bytes: int,
    *,
    scattered: bool,
    threads: int = 0,
    times: int = 1,
    memory_pages: MemoryPages = MemoryPages.SMALL,
) -> Iterator[Limit]:
    """READs of 134 MB one after another, each of other memory."""
    import nixl._api as nixl

    config = nixl.nixl_agent_config(enable_prog_thread=threads > 0, num_threads=threads)
    agent = nixl.nixl_agent(f"raw-{uuid.uuid4()}", config)
    registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    peer = agent.add_remote_agent(other.metadata).decode()
    count = LENGTH_BYTES // page_bytes
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages(memory.ctypes.data, page_bytes, times * count), "DRAM")
    remote = agent.prep_xfer_dlist(peer, pages(other.address, page_bytes, times * count), "DRAM")
    ids = _shuffled(page_bytes) if scattered else np.arange(count, dtype=np.int32)
    remote_ids = ids[::-1].copy() if scattered else ids

    def move() -> None:
        for first in range(0, times * count, count):
            handle = agent.make_prepped_xfer("READ", local, first + ids, remote, first + remote_ids, b"")
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)

    order = "scattered" if scattered else "in order"
    more = f", {threads} threads" if threads else ", four of other memory each" if times > 1 else ""
    more += ", memory in huge pages" if memory_pages is MemoryPages.HUGE else ""
    yield _rates(f"NIXL READ, {_size(page_bytes)}, {order}{more}", move, times)
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


# --- a step beside it -------------------------------------------------------------------------------------------------


def _busy_steps(other: Source) -> Iterator[Limit]:
    """How much longer a step that computes takes while 17 MB arrive every 10 ms: by a thread of the same process, and
    by a process of its own, which shares no more than the machine with the step."""
    for forward, pieces in PIECES.items():
        step = forward_pass(EngineOptions(OURS, "kv_consumer", 0, forward=forward, forward_pieces=pieces))
        for who, copied in (("a process", _copied_by_a_process), ("a thread", _copied_by_a_thread)):
            with copied(other) as copying:
                ratios = []
                for _ in range(REPEATS):
                    alone = _step_seconds(step)
                    with copying():
                        ratios.append(_step_seconds(step) / alone)
            what = "multiplies" if forward is Forward.MULTIPLIES else "holds the interpreter"
            yield Limit(f"step that {what} beside {who} that copies", "of one alone", ratios)


def _step_seconds(step: Callable[[], None]) -> float:
    steps, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < BUSY_SECONDS:
        step()
        steps += 1
    return passed / steps


def _copy_at_pace(into: int, pid: int, address: int, is_over: Callable[[], bool]) -> None:
    """17 MB every 10 ms, as long as the machine keeps up."""
    ids = _shuffled(PAGE_BYTES)[: PACED_BYTES // PAGE_BYTES]
    move = _system_call(into, ids, pid, address, ids[::-1], PAGE_BYTES)
    move()  # into memory that nobody has touched
    while not is_over():
        began = time.monotonic()
        move()
        time.sleep(max(0.0, PACE_SECONDS - (time.monotonic() - began)))


@contextmanager
def _copied_by_a_process(other: Source) -> Iterator[Callable[[], Any]]:
    with other_process("tests.bench.limits", other.pid, other.address) as (pid, _):
        os.kill(pid, signal.SIGSTOP)

        @contextmanager
        def copying() -> Iterator[None]:
            os.kill(pid, signal.SIGCONT)
            yield
            os.kill(pid, signal.SIGSTOP)

        yield copying


@contextmanager
def _copied_by_a_thread(other: Source) -> Iterator[Callable[[], Any]]:
    into = memory_of(LENGTH_BYTES, MemoryPages.SMALL)

    @contextmanager
    def copying() -> Iterator[None]:
        enough = threading.Event()
        arguments = (into.ctypes.data, other.pid, other.address, enough.is_set)
        thread = threading.Thread(target=_copy_at_pace, args=arguments)
        thread.start()
        try:
            yield
        finally:
            enough.set()
            thread.join()

    yield copying


def _copy(pid: int, address: int) -> None:
    """The other process of `_copied_by_a_process`."""
    into = memory_of(LENGTH_BYTES, MemoryPages.SMALL)
    tell("ready")
    _copy_at_pace(into.ctypes.data, pid, address, lambda: False)


# --- as another process -----------------------------------------------------------------------------------------------


def _answer() -> None:
    """The other process of `_round_trips`."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as answering:
        tell(answering.bind_to_random_port("tcp://127.0.0.1"))
        while True:
            answering.send_multipart(answering.recv_multipart())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _copy(int(sys.argv[1]), int(sys.argv[2]))
    else:
        _answer()
