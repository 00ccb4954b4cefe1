"""Blocks of another order or size: READs of what is contiguous on both sides, or long READs and then a permutation.

`python -m tests.bench.bench_landing` prints a table in markdown. P has the heads of a block before its tokens (LBHNC),
D the same or the tokens before the heads (LBNHC). One request is read in two ways, through real NIXL between two
processes:

  scattered   to where the KV is to stay: a descriptor for each head of each token, or of each of P's smaller blocks
  landing     to a landing layout, one descriptor for each block of P; then the blocks are put in order

"ids" is the time to number the descriptors, "READ" from there to its end (over CMA: the copy itself, made by the
processor), "order" the permutation, with one thread. Medians; the two ways alternate. The last column is the time of
all of scattered divided by that of all of landing. What arrives is compared with what was sent, both ways.

What it does not show: an RDMA NIC, where each descriptor is a work request, and a GPU, whose memory the permutation
goes through several times faster than one core does through main memory. Both should favour landing more.
"""

from __future__ import annotations

import argparse
import base64
import math
import time
import uuid
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import torch
import trio

from connector.layout.blocks import GroupBlocks
from connector.layout.geometry import RankLayout
from connector.layout.landing import Permute
from connector.layout.plan import EnginePlan
from connector.layout.shapes import LayerShape
from connector.layout.sources import partners
from connector.ports.nixl import MemoryRange, NixlEvent, PortReadEnded
from connector.ports.nixl_agent import RealNixlPort
from connector.protocol import Permutation
from connector.worker.landing import BlockPermuter, landing_caches
from tests.bench.source import other_process, tell, wait_for_end
from tests.rig.layouts import attention_rank, attention_shapes, plan_engine

LAYERS = 16
HEADS = 8
HEAD_BYTES = 512
"""K and V of one head of one token: 128 elements of 2 bytes each."""
REQUEST_TOKENS = 2048
POOL = 2
"""So many times the request."""
REPEATS = 5
CASES = (
    # D's order of axes; tensor parallel size and tokens of a block: of D, of P.
    ("LBNHC", 1, 16, 1, 16),
    ("LBNHC", 1, 64, 1, 64),
    ("LBNHC", 2, 16, 1, 16),
    ("LBNHC", 1, 16, 2, 16),
    ("LBNHC", 1, 64, 1, 16),
    ("LBHNC", 1, 64, 1, 16),
    ("LBHNC", 1, 128, 1, 16),
    ("LBHNC", 2, 64, 1, 16),
    ("LBHNC", 1, 64, 2, 16),
)

Case: TypeAlias = tuple[str, int, int, int, int]


class Said(msgspec.Struct):
    """What the other process says of one prefill rank."""

    address: int
    agent_metadata: str


def _shapes() -> dict[str, LayerShape]:
    return attention_shapes(layers=LAYERS, heads=HEADS, head_bytes=HEAD_BYTES)


def _pattern(tp_size: int, tokens: int) -> torch.Tensor:
    """The KV of a pool, all heads: [layers, blocks, heads, tokens, bytes]; every head of every token has its own."""
    blocks = POOL * REQUEST_TOKENS // tokens
    words = torch.arange(LAYERS * blocks * HEADS * tokens, dtype=torch.int64) * 0x1E3779B97F4A7C15
    content = words[:, None].expand(-1, HEAD_BYTES // 8)
    return content.reshape(LAYERS, blocks, HEADS, tokens, -1)


def _rank(engine_id: str, address: int, layout_name: str, tokens: int, tp_rank: int, tp_size: int) -> RankLayout:
    return attention_rank(
        engine_id,
        _shapes(),
        address=address,
        blocks=POOL * REQUEST_TOKENS // tokens,
        tokens=tokens,
        tp_rank=tp_rank,
        tp_size=tp_size,
        layout_name=layout_name,
    )


# --- the peer -------------------------------------------------------------------------------------------------------


def serve(tp_size: int, tokens: int) -> None:
    """The other process: prefill ranks with memory to read, until standard input ends."""
    whole = _pattern(tp_size, tokens)
    parts = [part.contiguous() for part in whole.chunk(tp_size, dim=2)]
    ports = [
        RealNixlPort.open(f"prefill-{uuid.uuid4()}", [MemoryRange(part.data_ptr(), part.nbytes)]) for part in parts
    ]
    for port in ports:
        port.expect_notifications(True)  # a first READ needs this side's polls to connect
    said = [
        Said(part.data_ptr(), base64.b64encode(port.agent_metadata).decode())
        for part, port in zip(parts, ports, strict=True)
    ]
    tell(said)
    wait_for_end()
    for port in ports:
        port.close_blocking(5)


# --- measuring ------------------------------------------------------------------------------------------------------


class Times(msgspec.Struct):
    """Of one request, in seconds."""

    ids: float
    read: float
    order: float
    descriptors: int

    @property
    def whole(self) -> float:
        return self.ids + self.read + self.order


class Reader:
    """Decode rank 0: its memory, its agent and the prepared lists of both ways."""

    def __init__(self, case: Case) -> None:
        layout_name, self.decode_tp, self.tokens, self.prefill_tp, self.prefill_tokens = case
        blocks = POOL * REQUEST_TOKENS // self.tokens
        sizes = {"H": HEADS // self.decode_tp, "N": self.tokens}
        outer, inner = layout_name[2:4]
        memory = torch.zeros(LAYERS, blocks, sizes[outer], sizes[inner], HEAD_BYTES // 8, dtype=torch.int64)
        self.by_head = memory if outer == "H" else memory.transpose(2, 3)
        self.range = MemoryRange(memory.data_ptr(), memory.nbytes)
        self.layout = _rank("decode", memory.data_ptr(), layout_name, self.tokens, 0, self.decode_tp)
        by_layer = dict(zip(_shapes(), self.by_head, strict=True))
        self.permuter = BlockPermuter(landing_caches(self.layout, by_layer))
        chance = np.random.default_rng(1)
        self.ours = chance.permutation(blocks)[: REQUEST_TOKENS // self.tokens]
        self.theirs = chance.permutation(POOL * REQUEST_TOKENS // self.prefill_tokens)[
            : REQUEST_TOKENS // self.prefill_tokens
        ]

    async def measure(self, said: Sequence[Said]) -> dict[str, Times]:
        """Medians of both ways."""
        numbers = partners(0, self.decode_tp, self.prefill_tp)
        remotes = [
            _rank("prefill", said[number].address, "LBHNC", self.prefill_tokens, number, self.prefill_tp)
            for number in numbers
        ]
        plans = {
            "scattered": plan_engine(self.layout, remotes),
            "landing": plan_engine(self.layout, remotes, Permute.ORDERS),
        }
        send, events = trio.open_memory_channel[NixlEvent](math.inf)
        port = RealNixlPort.open(f"decode-{uuid.uuid4()}", [self.range])
        port.set_event_callback(send.send_nowait)
        agents = {
            number: await port.add_remote_agent(base64.b64decode(said[number].agent_metadata)) for number in numbers
        }
        found: dict[str, list[Times]] = {way: [] for way in plans}
        lists = {
            way: [
                (
                    await port.prepare_local(read.local_runs),
                    await port.prepare_remote(agents[read.remote_rank.tp_rank], read.remote_runs),
                )
                for read in plan.reads
            ]
            for way, plan in plans.items()
        }
        for turn in range(REPEATS + 1):
            for way, plan in plans.items():
                self.by_head.zero_()
                times = await self._request(plan, port, lists[way], events)
                if not turn:
                    self._require_arrived()
                else:  # the first one connects, and touches memory
                    found[way].append(times)
        await port.aclose(5)
        return {way: sorted(of_way, key=lambda times: times.whole)[REPEATS // 2] for way, of_way in found.items()}

    async def _request(
        self, plan: EnginePlan, port: RealNixlPort, lists: Sequence[tuple], events: trio.MemoryReceiveChannel[NixlEvent]
    ) -> Times:
        started = time.perf_counter()
        pairs = plan.pair([GroupBlocks(local=self.ours, remote=self.theirs)])
        ids = [read.descriptor_ids(of_read) for read, of_read in zip(plan.reads, pairs, strict=True)]
        numbered = time.perf_counter()
        posted = set()
        for (local, remote), (local_ids, remote_ids) in zip(lists, ids, strict=True):
            posted.add(port.post_read(local, local_ids, remote, remote_ids))
        while posted:
            event = await events.receive()
            if isinstance(event, PortReadEnded):
                assert event.error is None, event
                posted.remove(event.handle)
        read = time.perf_counter()
        if plan.landing is not None:
            order = {"chunks": plan.landing.chunks, "heads_first": plan.landing.heads_first}
            self.permuter.permute([Permutation(kernel_blocks=(self.ours,), **order)])
        ordered = time.perf_counter()
        return Times(
            ids=numbered - started,
            read=read - numbered,
            order=ordered - read,
            descriptors=sum(local_ids.size for local_ids, _ in ids),
        )

    def _require_arrived(self) -> None:
        heads = HEADS // self.decode_tp
        sent = _pattern(self.prefill_tp, self.prefill_tokens)[:, self.theirs, :heads]
        got = self.by_head[:, self.ours]
        assert torch.equal(got.transpose(2, 3).flatten(1, 2), sent.transpose(2, 3).flatten(1, 2))


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _row(case: Case) -> str:
    *_, prefill_tp, prefill_tokens = case
    with other_process("tests.bench.bench_landing", "--serve", prefill_tp, prefill_tokens) as (_, said):
        reader = Reader(case)
        found = trio.run(reader.measure, msgspec.convert(said, list[Said]))
    cells: list[object] = [*case]
    for times in found.values():
        cells += [f"{times.descriptors:,}", *(f"{part * 1e3:.0f}" for part in (times.ids, times.read))]
    scattered, landing = found["scattered"], found["landing"]
    cells += [f"{landing.order * 1e3:.0f}", f"{scattered.whole / landing.whole:.1f}"]
    return _line(cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_landing", description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    torch.set_num_threads(1)
    names = ["D's order", "D_TP", "D's block", "P_TP", "P's block"]
    names += [f"{way}: {what}" for way in ("scattered", "landing") for what in ("descriptors", "ids ms", "READ ms")]
    names += ["landing: order ms", "scattered / landing"]
    print(_line(names))
    print(_line(["---"] * len(names)), flush=True)
    for case in CASES:
        print(_row(case), flush=True)


if __name__ == "__main__":
    main()
