"""Engines of several ranks, and of different block sizes: which ranks are asked, read and told, and what arrives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import trio

from connector.config import ConnectorOptions
from connector.layout.landing import Permute
from connector.ports.nixl import ReadMeasured
from connector.protocol import GroupPull, PeerAddress, ReceiveEnded, TrackLease
from connector.worker.landing import BlockPermuter, landing_caches
from statemachine.failures import BadParams
from tests.actors.engines import (
    BLOCKS,
    HEADS,
    HELD_SECONDS,
    LAYERS,
    LEASE_SECONDS,
    Engine,
    lease_of,
    parallel_engine,
    until,
)


def run(test: Callable[[], Awaitable[None]], seconds: float = 100.0) -> None:
    async def main() -> None:
        with trio.fail_after(seconds):
            await test()

    trio.run(main)


def fill(ranks: list[Engine], seed: int = 1) -> npt.NDArray[np.uint8]:
    """Give the ranks random KV, replicas alike; returns it as shape [layers, blocks, heads, tokens, bytes]."""
    _, _, _, tokens, head_bytes = ranks[0].by_head().shape
    whole = np.random.default_rng(seed).integers(1, 255, (LAYERS, BLOCKS, HEADS, tokens, head_bytes), np.uint8)
    first = {0: 0}
    for each in ranks:
        (stage, tp_rank), tp_size = each.local.layout.rank, each.local.layout.tp_size
        layers = first[stage] + len(each.memory)
        each.by_head()[:] = whole[first[stage] : layers, :, heads_of(tp_rank, tp_size)]
        first[stage + 1] = layers
    return whole


def heads_of(tp_rank: int, tp_size: int) -> slice:
    start = tp_rank * HEADS // tp_size
    return slice(start, max(start + 1, (tp_rank + 1) * HEADS // tp_size))


def lend(ranks: list[Engine], request_id: str) -> None:
    for each in ranks:
        each.lend(request_id)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2), (4, 2), (1, 4), (8, 1), (2, 8)])
def test_every_rank_gets_its_heads_and_every_lease_ends(prefill: int, decode: int) -> None:
    """8 ranks are more than there are heads: each is held by two."""

    async def test() -> None:
        async with parallel_engine("p", prefill, serves=True) as ps, parallel_engine("d", decode) as ds:
            whole = fill(ps)
            lend(ps, "remote-a")
            for each in ds:
                each.pull("a", ps[0], [5, 6, 7], [1, 2, 9])
            for number, each in enumerate(ds):
                ended = await until(lambda each=each: each.received("a"))
                assert ended.failure is None
                heads = heads_of(number, decode)
                assert (each.by_head()[:, [5, 6, 7]] == whole[:, [1, 2, 9], heads]).all()
                assert not np.delete(each.memory, [5, 6, 7], axis=1).any()
            for each in ps:
                assert not (await until(lambda each=each: each.sent("remote-a"))).expired
            for each in ds:
                await until(lambda each=each: each.counts().reads == 0)
                assert each.crashes == []
        for each in ds:
            assert each.counts().remote_agents == 0
            assert each.counts().descriptor_lists == 0

    run(test)


def test_a_lease_waits_for_ranks_that_have_said_nothing_yet() -> None:
    """The first rank has released it before the second one has asked for it."""

    async def test() -> None:
        async with parallel_engine("p", 1, serves=True) as (p,), parallel_engine("d", 2) as (early, late):
            whole = fill([p])
            lend([p], "remote-a")
            early.pull("a", p, [5], [1])
            assert (await until(lambda: early.received("a"))).failure is None
            (actor,) = early.supervisor._peers.values()
            await until(lambda: actor.core.claimed() == [])
            assert p.sent("remote-a") is None
            late.pull("a", p, [5], [1])
            assert (await until(lambda: late.received("a"))).failure is None
            assert (late.by_head()[:, 5] == whole[:, 1, heads_of(1, 2)]).all()
            assert not (await until(lambda: p.sent("remote-a"))).expired

    run(test)


def test_heads_that_several_ranks_hold_are_read_once() -> None:
    async def test() -> None:
        async with parallel_engine("p", 8, serves=True) as ps, parallel_engine("d", 1) as (d,):
            fill(ps)
            lend(ps, "remote-a")
            d.pull("a", ps[0], [5], [1])
            await until(lambda: d.received("a"))
            await until(lambda: len(measured(d)) == HEADS)

    run(test)


def test_heartbeats_reach_every_rank() -> None:
    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
        async with (
            parallel_engine("p", 2, serves=True, options=options) as ps,
            parallel_engine("d", 1, options=options) as (d,),
        ):
            for each in ps:
                each.lend("remote-a")
            d.supervisor.deliver(
                TrackLease(request_id="a", peer=ps[0].address, lease=lease_of("remote-a"), age_seconds=0.0)
            )
            await trio.sleep(HELD_SECONDS)
            assert [each.sent("remote-a") for each in ps] == [None, None]

    run(test)


def test_rank_that_the_peer_does_not_have_fails_the_request_and_leaves_nothing() -> None:
    """The parameters claim more ranks than the engine has, which says itself how many it has."""

    async def test() -> None:
        options = ConnectorOptions(handshake_timeout_seconds=2.0)
        async with parallel_engine("p", 1, serves=True) as (p,), parallel_engine("d", 1, options=options) as (d,):
            address = PeerAddress(engine_id="p", host="127.0.0.1", port=p.address.port, tp_size=2)
            lend([p], "remote-a")
            d.pull("a", address, [1], [1])
            ended = await until(lambda: d.received("a"))
            assert isinstance(ended.failure, BadParams)
            assert (ended.failure.field, ended.failure.found) == ("tp_size", "2")
            await until(lambda: d.counts().remote_agents == 0)
            assert d.counts().descriptor_lists == 0

    run(test)


@pytest.mark.parametrize(("stages", "prefill", "decode"), [(2, 1, 1), (3, 2, 1), (2, 1, 2), (3, 1, 1)])
def test_every_pipeline_stage_is_read_and_told(stages: int, prefill: int, decode: int) -> None:
    async def test() -> None:
        async with (
            parallel_engine("p", prefill, serves=True, stages=stages) as ps,
            parallel_engine("d", decode) as ds,
        ):
            whole = fill(ps)
            lend(ps, "remote-a")
            for each in ds:
                each.pull("a", ps[0], [5, 6, 7], [1, 2, 9])
            for number, each in enumerate(ds):
                assert (await until(lambda each=each: each.received("a"))).failure is None
                assert (each.by_head()[:, [5, 6, 7]] == whole[:, [1, 2, 9], heads_of(number, decode)]).all()
            for each in ps:
                assert not (await until(lambda each=each: each.sent("remote-a"))).expired
            assert [each.counts().remote_agents for each in ds] == [max(1, prefill // decode) * stages] * decode

    run(test)


def test_a_stage_too_few_is_refused() -> None:
    """The parameters leave out that the engine has two."""

    async def test() -> None:
        async with parallel_engine("p", 1, serves=True, stages=2) as ps, parallel_engine("d", 1) as (d,):
            address = msgspec.structs.replace(ps[0].address, pp_size=1)
            lend(ps, "remote-a")
            d.pull("a", address, [1], [1])
            ended = await until(lambda: d.received("a"))
            assert isinstance(ended.failure, BadParams)
            assert (ended.failure.field, ended.failure.found) == ("pp_size", "1")
            assert d.counts().remote_agents == 0

    run(test)


@pytest.mark.parametrize(
    ("sizes", "field", "found"),
    [
        ({"pp_size": 1024, "tp_size": 1024}, "tp_size", "1024"),
        ({"dcp_size": 2, "tp_size": 2}, "dcp_size", "2"),
    ],
)
def test_sizes_that_the_peer_does_not_have_are_refused_by_name(sizes: dict[str, int], field: str, found: str) -> None:
    async def test() -> None:
        async with parallel_engine("p", 2, serves=True) as ps, parallel_engine("d", 1) as (d,):
            address = msgspec.structs.replace(ps[0].address, **sizes)
            lend(ps, "remote-a")
            d.pull("a", address, [1], [1])
            ended = await until(lambda: d.received("a"))
            assert isinstance(ended.failure, BadParams)
            assert (ended.failure.field, ended.failure.found) == (field, found)
            assert d.counts().remote_agents == 0

    run(test)


def test_rank_that_dies_fails_the_request_and_the_others_end_first() -> None:
    """Nothing is reported while another rank's READ may still write."""

    async def test() -> None:
        options = ConnectorOptions(transfer_retries=0)
        async with (
            parallel_engine("p", 2, serves=True) as ps,
            parallel_engine("d", 1, options=options) as (d,),
        ):
            fill(ps)
            lend(ps, "remote-warm")
            d.pull("warm", ps[0], [5], [1])
            assert (await until(lambda: d.received("warm"))).failure is None
            lend(ps, "remote-a")
            await ps[1].port.aclose(1.0)
            d.pull("a", ps[0], [6], [2])
            ended = await until(lambda: d.received("a"))
            assert ended.failure is not None
            assert not ended.quarantined
            await until(lambda: d.counts().reads == 0)
            assert d.crashes == []

    run(test)


@pytest.mark.parametrize(
    ("prefill_tokens", "decode_tokens", "num_tokens", "cached"),
    [
        (16, 32, 1, 0),  # half of our only block stays empty
        (16, 32, 40, 0),
        (16, 32, 40, 1),  # ours begins in the middle of their table
        (16, 32, 64, 1),
        (32, 16, 40, 0),  # theirs is longer than ours
        (32, 16, 40, 1),  # ours begins in the middle of a block of theirs
        (16, 64, 40, 0),
    ],
)
def test_blocks_of_different_sizes(prefill_tokens: int, decode_tokens: int, num_tokens: int, cached: int) -> None:
    """Tokens arrive where they belong after a prefix of `cached` blocks of D, and what stays empty is named."""

    async def test() -> None:
        async with (
            parallel_engine("p", 2, serves=True, tokens=prefill_tokens) as ps,
            parallel_engine("d", 1, tokens=decode_tokens) as (d,),
        ):
            whole = fill(ps)
            d.memory[:] = 255
            theirs = [20 + 2 * number for number in range(-(-num_tokens // prefill_tokens))]
            ours = [3 + 3 * number for number in range(-(-num_tokens // decode_tokens) - cached)]
            group = GroupPull(local_block_ids=ours, local_first=cached, remote_block_ids=theirs)
            lend(ps, "remote-a")
            d.pull_groups("a", ps[0], (group,), num_tokens)
            ended = await until(lambda: d.received("a"))
            assert ended.failure is None
            finish(d, ended)
            # [layers, heads, tokens of the request, bytes]
            sent = np.concatenate([whole[:, block] for block in theirs], axis=2)
            got = np.concatenate([d.by_head()[:, block] for block in ours], axis=2)
            start, count = cached * decode_tokens, got.shape[2]
            there = min(count, sent.shape[2] - start)
            needed = num_tokens - start
            assert (got[:, :, :needed] == sent[:, :, start : start + needed]).all()
            beyond = got[:, :, there:]
            assert not beyond.any()
            assert (np.delete(d.memory, ours, axis=1) == 255).all()

    run(test)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("tokens", "theirs", "layouts", "permute", "order"),
    [
        (32, [20, 7, 9], ("LBHNC", "LBNHC"), Permute.ORDERS, (1, True)),
        (32, [20, 7, 9], ("LBNHC", "LBHNC"), Permute.ORDERS, (1, False)),
        (16, [20, 7, 9, 3, 30], ("LBHNC", "LBNHC"), Permute.ORDERS, (2, True)),
        (16, [20, 7, 9, 3, 30], ("LBNHC", "LBHNC"), Permute.ORDERS, (1, False)),
        (16, [20, 7, 9, 3, 30], ("LBHNC", "LBHNC"), Permute.BLOCK_SIZES, (2, True)),
    ],
)
def test_blocks_that_land_in_the_peers_order(
    prefill: int,
    decode: int,
    tokens: int,
    theirs: list[int],
    layouts: tuple[str, str],
    permute: Permute,
    order: tuple[int, bool],
) -> None:
    """The engine thread is told which blocks to put in order and what to zero then; fewer descriptors do for that.

    P's smaller blocks leave a part of ours unfilled.
    """

    async def test() -> None:
        async with (
            parallel_engine("p", prefill, serves=True, tokens=tokens, layout_name=layouts[0]) as ps,
            parallel_engine("d", decode, layout_name=layouts[1], permute=permute) as ds,
            parallel_engine("plain", decode, layout_name=layouts[1]) as plain,
        ):
            whole = fill(ps)
            ours, count = [5, 2, 6], len(theirs) * tokens
            sent = np.concatenate([whole[:, block] for block in theirs], axis=2)
            group = GroupPull(local_block_ids=ours, local_first=0, remote_block_ids=theirs)
            ended = {}
            for each in (*ds, *plain):
                each.memory[:] = 255
                lend(ps, f"remote-{each.engine_id}")
                each.pull_groups(each.engine_id, ps[0], (group,), count)
            for each in (*ds, *plain):
                ended[each.engine_id] = report = await until(lambda each=each: each.received(each.engine_id))
                assert report.failure is None
                finish(each, report)
                got = np.concatenate([each.by_head()[:, block] for block in ours], axis=2)
                assert (got[:, :, :count] == sent[:, heads_of(each.local.layout.tp_rank, decode)]).all()
                assert not got[:, :, count:].any()
                assert (np.delete(each.memory, ours, axis=1) == 255).all()
            assert ended["plain"].permutation is None
            permutation = ended["d"].permutation
            assert [blocks.tolist() for blocks in permutation.kernel_blocks] == [ours]
            assert (permutation.chunks, permutation.heads_first) == ((order[0],), order[1])
            reads = max(1, prefill // decode)  # of each of our ranks
            assert await descriptors(ds, reads) < await descriptors(plain, reads)

    run(test)


def finish(rank: Engine, ended: ReceiveEnded) -> None:
    """What the engine thread does before it reports a request as loaded."""
    if ended.permutation is not None:
        layout = rank.local.layout
        caches = dict(
            zip((region.name for region in layout.regions), map(torch.from_numpy, rank.by_head()), strict=True)
        )
        BlockPermuter(landing_caches(layout, caches)).permute([ended.permutation])
    if ended.unfilled is not None:
        offsets = ended.unfilled.addresses - rank.memory.ctypes.data
        for offset, length in zip(offsets, ended.unfilled.lengths, strict=True):
            rank.memory.reshape(-1)[offset : offset + length] = 0


async def descriptors(ranks: list[Engine], reads: int) -> int:
    """Of all READs. What a READ was made of is told after its end, perhaps after the end of its request."""
    for each in ranks:
        await until(lambda rank=each: len(measured(rank)) == reads)
    return sum(event.descriptors for each in ranks for event in measured(each))


def measured(rank: Engine) -> list[ReadMeasured]:
    return [event for event in rank.events if isinstance(event, ReadMeasured)]


def test_a_peer_of_our_own_order_is_read_to_where_its_kv_stays() -> None:
    async def test() -> None:
        async with (
            parallel_engine("p", 1, serves=True) as (p,),
            parallel_engine("d", 1, permute=Permute.ORDERS) as (d,),
        ):
            whole = fill([p])
            lend([p], "remote-a")
            d.pull("a", p, [5], [1])
            ended = await until(lambda: d.received("a"))
            assert (ended.failure, ended.permutation) == (None, None)
            assert (d.by_head()[:, 5] == whole[:, 1]).all()

    run(test)
