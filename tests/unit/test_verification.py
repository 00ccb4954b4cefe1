"""Checksums of blocks: what they notice, which blocks have them, and what of a READ is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio.testing
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils import gpu_sync_debug

from connector.layout.advertised import describe
from connector.layout.geometry import BlockIdError, LayoutMismatch, RankLayout
from connector.layout.landing import Permute
from connector.layout.plan import EnginePlan
from connector.layout.verification import SAMPLED_BLOCKS, compared, lent_blocks, lent_runs, match, spread
from connector.nixl_connector import NixlActorConnector
from connector.protocol import Command, LeaseGranted, Stretch
from connector.runtime.peer_actor import PeerActor, _Pull
from connector.runtime.thread import ActorThread
from connector.runtime.verification import difference, known_sums, lease_sums, stretches
from connector.step_metadata import StepMetadata
from connector.wire.bounded import DecodeFailed
from connector.wire.control import (
    NO_SUMS,
    SUMS_PART_BYTES,
    SUMS_PARTS_MAX,
    AskSums,
    LeaseSums,
    Sums,
    decode_answer,
    decode_request,
    decode_sums,
    encode_answer,
    encode_request,
    encode_sums,
    sums_answer,
)
from connector.worker.block_sums import BlockSums, factors
from statemachine.lease import LeaseName
from statemachine.remote_engine import ResolveBlocks
from tests.rig.layouts import attention_rank, attention_shapes, plan_engine
from tests.rig.pulls import pull
from tests.rig.sums import factor, sum_of, sums_of
from tests.unit.vllm_setup import allocate, attention_spec, cache_config, engine_config, single_rank, write_model

LEASE = LeaseName("request", 3)
LAYERS, HEADS, HEAD_BYTES, TOKENS, BLOCKS = 3, 4, 32, 8, 64


def stretch(memory: torch.Tensor, length: int, stride: int, blocks: list[int], first: int = 0) -> Stretch:
    count = (memory.numel() - first - length) // stride + 1
    return Stretch(
        address=memory.data_ptr() + first,
        stride_bytes=stride,
        length_bytes=length,
        count=count,
        blocks=np.array(blocks, np.int64),
    )


@pytest.mark.parametrize(
    ("length", "stride", "first"),
    [(64, 64, 0), (64, 128, 64), (24, 40, 8), (12, 20, 4), (6, 10, 2), (7, 9, 3), (8, 12, 4), (4096, 4096, 0)],
)
def test_a_sum_is_that_of_its_words_by_places(length: int, stride: int, first: int) -> None:
    memory = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    wanted = [stretch(memory, length, stride, [3, 0, 1, 1], first), stretch(memory, length, stride, [2], first)]
    assert BlockSums([memory]).of(wanted).tolist() == sums_of(wanted).tolist()
    assert factors(20).tolist() == [factor(place) - (factor(place) >> 63 << 64) for place in range(20)]


def test_every_byte_counts_and_so_do_places() -> None:
    content = bytes(range(48)) * 2
    sums = {sum_of(content)}
    for place in range(len(content)):
        for bit in (1, 128):
            sums.add(sum_of(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]))
    sums.add(sum_of(content[8:16] + content[:8] + content[16:]))
    assert len(sums) == 2 * len(content) + 2


def test_two_errors_do_not_cancel_each_other() -> None:
    """The highest bits of two words, which they would if the sum were one of words of eight bytes."""
    content = bytes(64)
    for one in range(64):
        for other in range(one):
            wrong = bytearray(content)
            wrong[one] ^= 128
            wrong[other] ^= 128
            assert sum_of(bytes(wrong)) != sum_of(content)


def test_blocks_of_several_allocations_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.worker.block_sums._AT_ONCE_BYTES", 100)
    memories = [torch.arange(2_000, dtype=torch.int32).view(torch.uint8) + number for number in range(3)]
    wanted = [stretch(memory, 64, 64, list(range(20))) for memory in memories]
    assert BlockSums(memories).of(wanted).tolist() == sums_of(wanted).tolist()
    assert BlockSums(memories).of([]).tolist() == []


def test_vllm_is_told_that_the_engine_thread_may_wait_for_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under VLLM_GPU_SYNC_CHECK=error any other wait for the device raises."""
    memory = torch.zeros(1_000, dtype=torch.uint8)
    may_wait: list[bool] = []
    fetch = torch.Tensor.cpu

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        may_wait.append(gpu_sync_debug._allow_depth.get() > 0)
        return fetch(tensor)

    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")
    monkeypatch.setattr(torch.Tensor, "cpu", noted)
    BlockSums([memory]).of([stretch(memory, 64, 64, [1, 2])])
    assert may_wait == [True]
    assert gpu_sync_debug._allow_depth.get() == 0


class Device:
    """Stands for one that does what it has been given when somebody waits for it."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], object]] = []
        self._is_ours = False

    # The stream of steps.

    def record_event(self) -> int:
        return len(self.pending)

    # The stream of sums.

    def wait_event(self, event: int) -> None:
        assert not self._is_ours
        for write in self.pending[:event]:
            write()
        del self.pending[:event]

    def __enter__(self) -> Device:
        self._is_ours = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ours = False


def test_sums_of_a_lease_come_after_what_its_last_steps_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what was read nor the step that follows is waited for."""
    memory, device = torch.zeros(1_000, dtype=torch.uint8), Device()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda of: device)
    sums = BlockSums([memory])
    sums._stream = device  # type: ignore[assignment]
    wanted = [stretch(memory, 64, 64, [0])]
    device.pending.append(lambda: memory[64:128].fill_(7))
    sums.note_step()
    device.pending.append(lambda: memory.fill_(9))
    assert sums.of(wanted).tolist() == [0]
    found = sums.of(wanted, after_steps=True)
    assert memory[64:128].eq(7).all()
    assert found.tolist() == sums_of(wanted).tolist()


def lend_after_a_step(directory: Path) -> None:
    """A real worker makes a step, and then is told of a grant."""
    config = engine_config(write_model(directory / "model"))
    config.kv_transfer_config.kv_connector_extra_config = {"verify": "all"}
    caches = cache_config(attention_spec())
    granted = LeaseGranted(lease=LEASE, blocks=2, block_ids=([3, 4],))
    with single_rank(config, directory):
        connector = NixlActorConnector(config, KVConnectorRole.WORKER, caches)
        try:
            connector.register_kv_caches(allocate(caches))
            connector.bind_connector_metadata(StepMetadata())
            connector.wait_for_save()
            connector.bind_connector_metadata(StepMetadata(commands=[granted]))
            connector.start_load_kv(None)  # type: ignore[arg-type]
        finally:
            connector.shutdown()


def test_the_worker_sums_what_it_lends_after_the_steps_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def of(sums: BlockSums, wanted: Sequence[Stretch], *, after_steps: bool = False) -> np.ndarray:
        calls.append("lent" if after_steps else "read")
        return np.zeros(sum(each.blocks.size for each in wanted), np.int64)

    monkeypatch.setattr(BlockSums, "note_step", lambda sums: calls.append("step"))
    monkeypatch.setattr(BlockSums, "of", of)
    lend_after_a_step(tmp_path)
    assert calls == ["step", "lent"]


def test_a_grant_says_that_no_checksums_could_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads would wait for them until its deadline."""
    told: list[Command] = []

    def of(sums: BlockSums, wanted: list[Stretch], *, after_steps: bool = False) -> np.ndarray:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(BlockSums, "of", of)
    monkeypatch.setattr(ActorThread, "post", lambda thread, command: told.append(command))
    lend_after_a_step(tmp_path)
    (found,) = [each for each in told if isinstance(each, LeaseGranted)]
    assert (found.block_ids, found.sums) == (None, NO_SUMS)


def test_checksums_that_need_too_many_parts_are_said_not_to_be_there() -> None:
    asked = AskSums(lease=LEASE, part=0)
    too_long = bytes(SUMS_PARTS_MAX * SUMS_PART_BYTES + 1)
    assert sums_answer(asked, too_long) == Sums(lease=LEASE, part=0, parts=1, content=NO_SUMS)


@pytest.mark.parametrize("count", [0, 1, SAMPLED_BLOCKS, SAMPLED_BLOCKS + 1, 1000])
def test_a_sample_is_bounded_and_has_the_last_block(count: int) -> None:
    blocks = np.arange(100, 100 + count)
    found = spread(blocks)
    assert found.size == min(count, SAMPLED_BLOCKS)
    assert len(set(found.tolist())) == found.size
    if count:
        assert found[-1] == blocks[-1]
        assert found[0] == blocks[0]


# --- two ranks --------------------------------------------------------------------------------------------------------


class Side:
    """One rank with memory; all ranks of its engine have the same."""

    def __init__(self, name: str, *, tp_size: int = 1, tokens: int = TOKENS, layout: str = "LBHNC") -> None:
        self.shapes = attention_shapes(layers=LAYERS, heads=HEADS, head_bytes=HEAD_BYTES)
        heads = HEADS // tp_size
        size = LAYERS * BLOCKS * heads * tokens * 2 * HEAD_BYTES
        self.memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
        self.ranks = [
            attention_rank(
                name,
                self.shapes,
                address=self.memory.data_ptr(),
                blocks=BLOCKS,
                tokens=tokens,
                tp_rank=rank,
                tp_size=tp_size,
                layout_name=layout,
            )
            for rank in range(tp_size)
        ]

    @property
    def layout(self) -> RankLayout:
        return self.ranks[0]

    def bytes_of(self, address: int, length: int) -> torch.Tensor:
        first = address - self.memory.data_ptr()
        return self.memory[first : first + length]

    def sums(self, blocks: list[Any]) -> LeaseSums:
        return lease_sums(blocks, BlockSums([self.memory]).of(stretches(lent_runs(self.layout, blocks))))


def pair(p: Side, d: Side) -> EnginePlan:
    return plan_engine(d.layout, p.ranks, Permute.NEVER)


def ids(plan: EnginePlan, local: list[int], remote: list[int]) -> tuple[Any, Any]:
    """Descriptors of a READ of whole blocks: in every region, block by block."""
    (read,) = plan.reads
    runs = len(read.remote_runs)
    starts = np.arange(runs)[:, None] * BLOCKS
    return (
        (starts + np.array(local)).ravel().astype(np.int32),
        (starts + np.array(remote)).ravel().astype(np.int32),
    )


def carry_out(p: Side, d: Side, plan: EnginePlan, local_ids: Any, remote_ids: Any) -> None:
    (read,) = plan.reads
    for local, remote in zip(local_ids.tolist(), remote_ids.tolist(), strict=True):
        (to, at), (source, of) = divmod(local, BLOCKS), divmod(remote, BLOCKS)
        here, there = read.local_runs[to], read.remote_runs[source]
        d.bytes_of(here.address + at * here.stride_bytes, here.length_bytes)[:] = p.bytes_of(
            there.address + of * there.stride_bytes, there.length_bytes
        )


def test_what_was_read_is_compared_block_by_block() -> None:
    p, d = Side("p"), Side("d")
    plan = pair(p, d)
    matched = match(plan.reads[0], describe(p.layout, b""))
    blocks = lent_blocks(p.layout, [[5, 9, 2, 7]], sampled=False)
    known = known_sums(decode_sums(encode_sums(p.sums(blocks))), matched)
    local_ids, remote_ids = ids(plan, [1, 3, 4], [9, 2, 7])
    carry_out(p, d, plan, local_ids, remote_ids)
    each = compared(matched, local_ids, remote_ids, known.blocks, sampled=False)
    assert each.regions.size == 3 * LAYERS

    def differs() -> Any:
        return difference(each, BlockSums([d.memory]).of(stretches(each.local)), known)

    assert differs() is None
    for region in range(LAYERS):
        for number, (local, remote) in enumerate(zip([1, 3, 4], [9, 2, 7], strict=True)):
            run = plan.reads[0].local_runs[region]
            block = d.bytes_of(run.address + local * run.stride_bytes, run.length_bytes)
            block[region * 100 + number] ^= 1
            found = differs()
            assert found is not None
            names = describe(p.layout, b"").region_names
            assert names is not None
            assert (names[found.region], found.block, found.differing) == (names[region], remote, 1)
            block[region * 100 + number] ^= 1
    assert differs() is None


def test_a_block_that_was_not_lent_is_refused_unless_samples_are_compared() -> None:
    p, d = Side("p"), Side("d")
    plan = pair(p, d)
    matched = match(plan.reads[0], describe(p.layout, b""))
    local_ids, remote_ids = ids(plan, [1, 2], [5, 6])
    lent = [np.array([5, 7])]
    with pytest.raises(BlockIdError, match="6, which was not lent"):
        compared(matched, local_ids, remote_ids, lent, sampled=False)
    each = compared(matched, local_ids, remote_ids, lent, sampled=True)
    assert set(each.remote_blocks.tolist()) == {5}
    many = list(range(40))
    local_ids, remote_ids = ids(plan, many, many)
    each = compared(matched, local_ids, remote_ids, [np.array(many)], sampled=True)
    assert each.regions.size == SAMPLED_BLOCKS * LAYERS
    assert compared(matched, local_ids, remote_ids, [np.array([50])], sampled=True).order.size == 0


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ({}, {"tp_size": 2}),
        ({"tokens": 16}, {}),
        ({"layout": "LBNHC"}, {}),
    ],
    ids=["more ranks on D", "larger blocks on P", "another order"],
)
def test_pairs_that_do_not_read_whole_blocks_are_refused(p: dict[str, Any], d: dict[str, Any]) -> None:
    prefill, decode = Side("p", **p), Side("d", **d)
    read = plan_engine(decode.layout, prefill.ranks, Permute.NEVER).reads[0]
    metadata = describe(prefill.layout, b"")
    with pytest.raises(LayoutMismatch, match="verify is whole blocks here and parts of blocks there"):
        match(read, metadata)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_whole_blocks_of_as_many_ranks_or_more_are_compared(tp_size: int) -> None:
    prefill, decode = Side("p", tp_size=2), Side("d", tp_size=tp_size)
    plan = plan_engine(decode.layout, prefill.ranks[: 3 - tp_size], Permute.NEVER)
    assert len(plan.reads) == 3 - tp_size
    for read in plan.reads:
        metadata = describe(prefill.ranks[read.remote_rank.tp_rank], b"")
        assert match(read, metadata).regions.tolist() == list(range(LAYERS))


# --- on the way -------------------------------------------------------------------------------------------------------


class Spawning(dict[int, SimpleNamespace]):
    """Connections of an actor, by number."""

    spawn: Callable[..., object]


def test_sums_over_a_connection_that_was_given_up_resolve_nothing() -> None:
    """It stays until READs of other requests have ended on it. Meanwhile this one is read over the next."""
    actor, resolved = object.__new__(PeerActor), list[int]()
    have_come = {number: trio.Event() for number in (1, 2)}
    connections = Spawning((number, SimpleNamespace(sources=[SimpleNamespace(rank=0, match=1)])) for number in (1, 2))

    async def of_lease(connection: int, *_: object) -> list[object]:
        await have_come[connection].wait()
        return []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            connections.spawn = nursery.start_soon
            for number in (1, 2):
                actor._resolve_blocks(ResolveBlocks(request_id="a", connection=number))
            for number in (2, 1):
                have_come[number].set()
                await trio.testing.wait_all_tasks_blocked()

    vars(actor).update(
        _pulls={"a": _Pull(command=pull("a", [1]), began_ns=0, blocks=1)},
        _connections=connections,
        _sums=SimpleNamespace(of_lease=of_lease),
        _resolve=lambda effect, known: effect.connection,
        tell=resolved.append,
    )
    trio.run(main)
    assert resolved == [2]


def test_sums_travel_in_parts_of_bounded_size() -> None:
    blocks = [np.arange(200_000)]
    sums = lease_sums(blocks, np.arange(200_000) << 20)
    encoded = encode_sums(sums)
    parts, part = [], 0
    while True:
        asked = decode_request(encode_request(AskSums(lease=LEASE, part=part)))
        assert isinstance(asked, AskSums)
        answer = sums_answer(asked, encoded)
        if answer is None:
            break
        assert decode_answer(encode_answer(answer)) == answer
        assert answer.lease == LEASE
        assert len(answer.content) <= SUMS_PART_BYTES
        parts.append(answer.content)
        part += 1
    assert len(parts) == answer_parts(encoded) > 1
    assert decode_sums(b"".join(parts)) == sums


def answer_parts(encoded: bytes) -> int:
    answer = sums_answer(AskSums(lease=LEASE, part=0), encoded)
    assert answer is not None
    return answer.parts


@pytest.mark.parametrize(
    "sent",
    [
        LeaseSums(blocks=(b"123",), sums=b""),
        LeaseSums(blocks=(b"1234",), sums=b"12345678" * 2),
        LeaseSums(blocks=(b"1234",), sums=b"1234567"),
        LeaseSums(blocks=(), sums=b"12345678"),
    ],
)
def test_sums_that_do_not_fit_their_blocks(sent: LeaseSums) -> None:
    p, d = Side("p"), Side("d")
    matched = match(pair(p, d).reads[0], describe(p.layout, b""))
    one_region = msgspec.structs.replace(matched, groups=(0,))
    with pytest.raises(DecodeFailed):
        known_sums(sent, one_region)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80" * 10, encode_sums(LeaseSums(blocks=(), sums=b""))[:-1]])
def test_bytes_that_are_no_sums(content: bytes) -> None:
    with pytest.raises(DecodeFailed):
        decode_sums(content)
