"""Prepared descriptor lists for each peer, or descriptor lists made for each request: what either costs.

`python -m tests.bench.bench_descriptors` prints two tables in markdown. A READ of the same blocks is made ready twice:

  prepared     once per peer: runs of blocks (address, length, stride, count) on both sides, as `AgentCore` has
               them; per request: descriptor ids, then make_prepped_xfer
  per request  nothing in advance: addresses of all blocks on both sides, get_xfer_descs, then initialize_xfer

Both get their ids or addresses from numpy, in rows of one region each. "build" is everything up to the handle, "post"
from there to the end of the READ (over CMA the copy itself, made by the processor). Medians; the two forms alternate.
Blocks of a request are scattered over the pool, or consecutive on both sides, where NIXL can join prepared neighbours.

Memory is what the C heap grows by while things are held (mallinfo2), and for the plan what Python does (tracemalloc).
The peers' agents live in a process of their own.

What it does not show: an RDMA NIC, a GPU, a peer whose layout cuts blocks into many stretches (each is one more run).
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import mmap
import statistics
import time
import tracemalloc
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from connector.layout.geometry import CacheGroup, Piece, RankLayout, Region
from connector.layout.plan import EnginePlan
from connector.ports.nixl import MemoryRange
from connector.ports.nixl_agent import RealNixlPort
from tests.bench.source import other_process, tell, wait_for_end
from tests.rig.layouts import plan_engine

REGIONS = (32, 64, 128)
POOLS = (1_000, 10_000, 100_000)
REQUESTS = (64, 512)
BLOCK_BYTES = 4096
PEERS = 16
"""Agents of each number of regions."""
LISTS = 1000
"""Prepared lists held at once, spread over these agents."""
PLANS = 20
REPEATS = 7

Blocks = npt.NDArray[np.int64]


class Memory:
    """Address space for the largest pool. Only what is read or written takes memory."""

    def __init__(self) -> None:
        size_bytes = max(POOLS) * BLOCK_BYTES
        self._maps = []
        for _ in range(max(REGIONS)):
            pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_NOHUGEPAGE)
            self._maps.append(pages)
        self.addresses: list[int] = [np.frombuffer(pages, np.uint8).ctypes.data for pages in self._maps]

    def ranges(self, regions: int) -> list[MemoryRange]:
        return [MemoryRange(address, max(POOLS) * BLOCK_BYTES) for address in self.addresses[:regions]]


# --- the peers ------------------------------------------------------------------------------------------------------


def serve() -> None:
    """The other process: agents with memory to read, until standard input ends."""
    memory = Memory()
    ports = {
        regions: [RealNixlPort.open(f"peer-{uuid.uuid4()}", memory.ranges(regions)) for _ in range(PEERS)]
        for regions in REGIONS
    }
    metadata = {
        regions: [base64.b64encode(port.agent_metadata).decode() for port in some] for regions, some in ports.items()
    }
    tell({"metadata": metadata, "addresses": memory.addresses})
    wait_for_end()
    for some in ports.values():
        for port in some:
            port.close_blocking(5)


# --- what is compared -----------------------------------------------------------------------------------------------


def _rows(addresses: Sequence[int], pool: int) -> npt.NDArray[np.uint64]:
    return np.array([(address, BLOCK_BYTES, 0, BLOCK_BYTES, pool) for address in addresses], np.uint64)


def _ids(regions: int, pool: int, blocks: Blocks) -> npt.NDArray[np.int32]:
    starts = np.arange(regions, dtype=np.int32)[:, None] * pool
    ids: npt.NDArray[np.int32] = (starts + blocks.astype(np.int32)).ravel()
    return ids


def _descriptors(addresses: npt.NDArray[np.uint64], blocks: Blocks) -> npt.NDArray[np.uint64]:
    described = np.zeros((addresses.size * blocks.size, 3), np.uint64)
    described[:, 0] = (addresses[:, None] + (blocks * BLOCK_BYTES).astype(np.uint64)).ravel()
    described[:, 1] = BLOCK_BYTES
    return described


@dataclass
class Setting:
    """One agent, one peer's memory, and how much of it is in use."""

    agent: Any
    peer: str
    regions: int
    pool: int
    local: npt.NDArray[np.uint64]
    remote: npt.NDArray[np.uint64]

    def prepare(self) -> tuple[Any, Any]:
        return (
            self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", _rows(self.local.tolist(), self.pool), "DRAM"),
            self.agent.prep_xfer_dlist(self.peer, _rows(self.remote.tolist(), self.pool), "DRAM"),
        )

    def build_prepared(self, prepared: tuple[Any, Any], ours: Blocks, theirs: Blocks) -> Any:
        local_ids, remote_ids = _ids(self.regions, self.pool, ours), _ids(self.regions, self.pool, theirs)
        return self.agent.make_prepped_xfer("READ", prepared[0], local_ids, prepared[1], remote_ids, b"")

    def build_per_request(self, ours: Blocks, theirs: Blocks) -> Any:
        local = self.agent.get_xfer_descs(_descriptors(self.local, ours), "DRAM")
        remote = self.agent.get_xfer_descs(_descriptors(self.remote, theirs), "DRAM")
        return self.agent.initialize_xfer("READ", local, remote, self.peer, b"")

    def read(self, handle: Any) -> None:
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


_LIBC = ctypes.CDLL(None)
_LIBC.mallinfo2.restype = _MallInfo


def heap_bytes() -> int:
    """In use, what malloc has mapped for single large pieces included."""
    found = _LIBC.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _tables_of_blocks(pool: int, request: int, *, consecutive: bool) -> tuple[Blocks, Blocks]:
    """Local and remote block ids; the local ones rise, as the connector's do."""
    if consecutive:
        return np.arange(request), np.arange(request) + pool // 4
    chance = np.random.default_rng(pool)
    return np.sort(chance.permutation(pool)[:request]), chance.permutation(pool)[:request]


# --- measuring ------------------------------------------------------------------------------------------------------


def request_row(setting: Setting, request: int, *, consecutive: bool) -> str:
    """Build and post of one request, both ways."""
    ours, theirs = _tables_of_blocks(setting.pool, request, consecutive=consecutive)
    prepared = setting.prepare()
    ways: dict[str, Callable[[], Any]] = {
        "prepared": lambda: setting.build_prepared(prepared, ours, theirs),
        "per request": lambda: setting.build_per_request(ours, theirs),
    }
    build: dict[str, list[float]] = {name: [] for name in ways}
    post: dict[str, list[float]] = {name: [] for name in ways}
    held: dict[str, int] = {}
    for turn in range(REPEATS + 1):
        for name, way in ways.items():
            before = heap_bytes()
            build_seconds, handle = _seconds(way)
            held[name] = heap_bytes() - before
            post_seconds, _ = _seconds(lambda handle=handle: setting.read(handle))
            del handle
            if turn:  # the first one connects, and touches memory
                build[name].append(build_seconds)
                post[name].append(post_seconds)
    for handle in prepared:
        setting.agent.release_dlist_handle(handle)
    cells = [setting.regions, f"{setting.pool:,}", request, "consecutive" if consecutive else "scattered"]
    for name in ways:
        cells += [
            f"{statistics.median(build[name]) * 1e6:,.0f}",
            f"{statistics.median(post[name]) * 1e3:.1f}",
            f"{held[name] / 1e3:,.0f}",
        ]
    return _line(cells)


def peers_row(agent: Any, regions: int, pool: int, said: Any, local: Sequence[int]) -> str:
    """What peers cost that nothing is read from."""
    metadata = [base64.b64decode(text) for text in said["metadata"][str(regions)]]
    remote = said["addresses"][:regions]
    agent.remove_remote_agent(agent.add_remote_agent(metadata[0]).decode())  # what the first one costs, all share
    before = heap_bytes()
    added = [_seconds(lambda one=one: agent.add_remote_agent(one).decode()) for one in metadata]
    agent_bytes = (heap_bytes() - before) / PEERS
    names = [name for _, name in added]

    def prepare(name: str, addresses: Sequence[int]) -> tuple[float, Any]:
        return _seconds(lambda: agent.prep_xfer_dlist(name, _rows(addresses, pool), "DRAM"))

    local_lists = [prepare("NIXL_INIT_AGENT", local[:regions]) for _ in range(PEERS)]
    before = heap_bytes()
    lists = [prepare(names[number % PEERS], remote) for number in range(LISTS)]
    lists_bytes = heap_bytes() - before
    for _, handle in local_lists + lists:
        agent.release_dlist_handle(handle)
    for name in names:
        agent.remove_remote_agent(name)
    plan_bytes = _plan_bytes(regions, pool, local, remote)
    return _line(
        [
            regions,
            f"{pool:,}",
            f"{statistics.median(seconds for seconds, _ in local_lists) * 1e6:.0f}",
            f"{statistics.median(seconds for seconds, _ in lists) * 1e6:.0f}",
            f"{sum(seconds for seconds, _ in lists) * 1e3:.0f}",
            f"{statistics.median(seconds for seconds, _ in added) * 1e6:.0f}",
            f"{lists_bytes / LISTS / 1e3:.1f}",
            f"{lists_bytes / 1e6:.1f}",
            f"{agent_bytes / 1e3:.0f}",
            f"{plan_bytes / 1e3:.0f}",
            f"{1000 * (lists_bytes / LISTS + agent_bytes + plan_bytes) / 1e6:.0f}",
        ]
    )


def _plan_bytes(regions: int, pool: int, local: Sequence[int], remote: Sequence[int]) -> float:
    """Of one plan, the layouts it was made from excluded."""
    ours, theirs = _layout("decode", regions, pool, local), _layout("prefill", regions, pool, remote)
    plan_engine(ours, [theirs])
    tracemalloc.start()
    plans: list[EnginePlan] = [plan_engine(ours, [theirs]) for _ in range(PLANS)]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / len(plans)


def _layout(engine_id: str, regions: int, pool: int, addresses: Sequence[int]) -> RankLayout:
    return RankLayout(
        engine_id=engine_id,
        tp_rank=0,
        tp_size=1,
        dcp_size=1,
        pcp_size=1,
        regions=tuple(
            Region(
                name=f"layers.{index}",
                base_address=address,
                block_length_bytes=BLOCK_BYTES,
                block_stride_bytes=BLOCK_BYTES,
                num_blocks=pool,
                memory_kind="DRAM",
                pieces=(
                    Piece(
                        layer=f"layers.{index}",
                        component="block",
                        start=0,
                        stop=1,
                        offset_bytes=0,
                        bytes_per_unit=BLOCK_BYTES,
                        unit_stride_bytes=BLOCK_BYTES,
                    ),
                ),
            )
            for index, address in enumerate(addresses[:regions])
        ),
        kernel_block_size_tokens=16,
        kernel_blocks_per_block=1,
        layout_name="LBHNC",
        attention_backend="ANY",
        groups=(CacheGroup(tokens_per_kernel_block=0),),
    )


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _print_header(*names: str) -> None:
    print(_line(names))
    print(_line(["---"] * len(names)), flush=True)


def measure(said: Any) -> None:
    import nixl._api as nixl

    memory = Memory()
    agent = nixl.nixl_agent(f"reader-{uuid.uuid4()}", nixl.nixl_agent_config(enable_prog_thread=False))
    described = [(part.address, part.length_bytes, 0, "") for part in memory.ranges(max(REGIONS))]
    registered = agent.register_memory(described, "DRAM")
    print(
        f"\nPeers: {PEERS} agents and {LISTS:,} lists measured; the last column is theirs and the plan's, times 1,000\n"
    )
    _print_header(
        "regions",
        "blocks in pool",
        "prepare local us",
        "prepare remote us",
        f"all {LISTS:,} lists ms",
        "add_remote_agent us",
        "KB per list",
        f"MB of {LISTS:,} lists",
        "KB per agent",
        "KB per plan",
        "MB for 1,000 peers",
    )
    for regions in REGIONS:
        for pool in POOLS:
            print(peers_row(agent, regions, pool, said, memory.addresses), flush=True)
    print("\nRequests\n")
    _print_header(
        "regions",
        "blocks in pool",
        "request",
        "blocks are",
        *(f"{way}: {what}" for way in ("prepared", "per request") for what in ("build us", "post ms", "KB held")),
    )
    for regions in REGIONS:
        peer = agent.add_remote_agent(base64.b64decode(said["metadata"][str(regions)][0])).decode()
        local, remote = (np.array(side[:regions], np.uint64) for side in (memory.addresses, said["addresses"]))
        for pool in POOLS:
            setting = Setting(agent, peer, regions, pool, local, remote)
            for request in REQUESTS:
                for consecutive in (False, True):
                    print(request_row(setting, request, consecutive=consecutive), flush=True)
        agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.bench_descriptors", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().serve:
        serve()
        return
    with other_process("tests.bench.bench_descriptors", "--serve") as (_, said):
        measure(said)


if __name__ == "__main__":
    main()
