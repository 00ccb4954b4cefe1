"""What do READs cost the agent's thread that stay in flight, as they do over a network?

`python -m tests.bench.bench_in_flight`: the NIXL port posts READs of eight scattered pages over TCP from another
process that is stopped, so that none of them ends; then the process goes on. Half a minute; two processes.

Columns
  posted       from the first order until NIXL has all READs, which are ordered as `connector/runtime/reads.py` does
  checks       calls of `check_xfer_state` for each READ posted
  waiting      cores that this process takes while all of them are in flight and nothing else happens
  ended        from when the source goes on until the end of the last one has been told

What it does not show: a network card. TCP has the two processes copy, on the cores that both share.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from typing import Any

import numpy as np
import trio

from connector.ports.nixl import MemoryRange, MemoryRun, NixlEvent, PortBroken, PortReadEnded, ReadPosted
from connector.ports.nixl_agent import RealNixlPort
from connector.runtime.reads import ORDERS_AHEAD_MIN
from tests.bench.source import Source, source
from tests.rig.process import stop_process

READS = (64, 256, 1024, 4096)
DESCRIPTORS = 8
PAGE_BYTES = 4096
PAGES = 4096
SETTLES_SECONDS, WAITING_SECONDS = 0.3, 1.0
LIMIT_SECONDS = 120.0


class Reader:
    """A port that reads the same scattered pages again and again."""

    def __init__(self, pages: Source, reads: int) -> None:
        self._memory = np.ones(PAGES * PAGE_BYTES, np.uint8)
        ranges = [MemoryRange(self._memory.ctypes.data, self._memory.nbytes)]
        self.port = RealNixlPort.open(f"reader-{uuid.uuid4()}", ranges, owner=self._memory)
        self.port.set_event_callback(self._on_event)
        self._pages = pages
        self._ids = np.random.default_rng(1).permutation(PAGES).astype(np.int32)[:DESCRIPTORS]
        self._reads, self._ordered, self._begun, self._ended = reads, 0, 0, 0
        self._lists = (0, 0)
        self.all_posted, self.all_ended = trio.Event(), trio.Event()
        self.checks = 0
        agent = self.port._core._agent
        check = agent.check_xfer_state

        def counted(transfer: Any) -> Any:
            self.checks += 1
            return check(transfer)

        agent.check_xfer_state = counted

    async def connect(self) -> None:
        peer = await self.port.add_remote_agent(self._pages.metadata)
        address = self._memory.ctypes.data
        local = await self.port.prepare_local([MemoryRun(address, PAGE_BYTES, PAGE_BYTES, PAGES)])
        remote = await self.port.prepare_remote(peer, [MemoryRun(self._pages.address, PAGE_BYTES, PAGE_BYTES, PAGES)])
        self._lists = (local, remote)
        await trio.sleep(SETTLES_SECONDS)
        self.checks = 0

    def order(self) -> None:
        while self._ordered < self._reads and self._ordered - self._begun < ORDERS_AHEAD_MIN:
            self._ordered += 1
            local, remote = self._lists
            self.port.post_read(local, self._ids, remote, self._ids)

    def _on_event(self, event: NixlEvent) -> None:
        match event:
            case ReadPosted():
                self._begun += 1
                self.order()
                if self._begun == self._reads:
                    self.all_posted.set()
            case PortReadEnded(error=error):
                assert error is None, error
                self._ended += 1
                if self._ended == self._reads:
                    self.all_ended.set()
            case PortBroken(error=error):
                raise SystemExit(error)


async def measure(pages: Source, reads: int) -> None:
    reader = Reader(pages, reads)
    await reader.connect()
    stop_process(pages.pid)
    try:
        started = time.perf_counter()
        reader.order()
        await reader.all_posted.wait()
        posted_ms, checks = (time.perf_counter() - started) * 1e3, reader.checks
        await trio.sleep(SETTLES_SECONDS)
        started, started_cpu = time.perf_counter(), time.process_time()
        await trio.sleep(WAITING_SECONDS)
        waiting = (time.process_time() - started_cpu) / (time.perf_counter() - started)
    finally:
        os.kill(pages.pid, signal.SIGCONT)
    started = time.perf_counter()
    await reader.all_ended.wait()
    ended_ms = (time.perf_counter() - started) * 1e3
    print(f"{reads:>8,}{posted_ms:12.0f}{checks / reads:10.1f}{waiting:10.2f}{ended_ms:10.0f}", flush=True)
    await reader.port.aclose(5.0)


async def run() -> None:
    print(f"{'READs':>8}{'posted, ms':>12}{'checks':>10}{'waiting':>10}{'ended, ms':>10}")
    with source(PAGES * PAGE_BYTES) as pages:
        for reads in READS:
            with trio.fail_after(LIMIT_SECONDS):
                await measure(pages, reads)


def main() -> None:
    os.environ["UCX_TLS"] = "tcp,self"
    trio.run(run)


if __name__ == "__main__":
    main()
