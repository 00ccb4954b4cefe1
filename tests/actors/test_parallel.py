"""Engines of several ranks, and of different block sizes: which ranks are asked, read and told, and what arrives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import trio

from connector.config import ConnectorOptions
from connector.runtime.messages import GroupPull, PeerAddress, TrackLease
from statemachine.failures import BadParams, HandshakeRefused, HandshakeTimeout, Incompatible
from tests.actors.engines import BLOCKS, HEADS, LAYERS, Engine, parallel_engine, until


def run(test: Callable[[], Awaitable[None]], seconds: float = 30.0) -> None:
    async def main() -> None:
        with trio.fail_after(seconds):
            await test()

    trio.run(main)


def fill(ranks: list[Engine], seed: int = 1) -> npt.NDArray[np.uint8]:
    """Give the ranks random KV, replicas alike; returns it as shape [layers, blocks, heads, tokens, bytes]."""
    _, _, _, tokens, head_bytes = ranks[0].by_head().shape
    whole = np.random.default_rng(seed).integers(1, 255, (LAYERS, BLOCKS, HEADS, tokens, head_bytes), np.uint8)
    for number, each in enumerate(ranks):
        each.by_head()[:] = whole[:, :, heads_of(number, len(ranks))]
    return whole


def heads_of(tp_rank: int, tp_size: int) -> slice:
    start = tp_rank * HEADS // tp_size
    return slice(start, max(start + 1, (tp_rank + 1) * HEADS // tp_size))


def lend(ranks: list[Engine], request_id: str) -> float:
    return min(each.lend(request_id) for each in ranks)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2), (4, 2), (1, 4), (8, 1), (2, 8)])
def test_every_rank_gets_its_heads_and_every_lease_ends(prefill: int, decode: int) -> None:
    """8 ranks are more than there are heads: each is held by two."""

    async def test() -> None:
        async with parallel_engine("p", prefill, serves=True) as ps, parallel_engine("d", decode) as ds:
            whole = fill(ps)
            ends = lend(ps, "remote-a")
            for each in ds:
                each.pull("a", ps[0], [5, 6, 7], [1, 2, 9], lease_expires_at=ends)
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


def test_heads_that_several_ranks_hold_are_read_once() -> None:
    async def test() -> None:
        async with parallel_engine("p", 8, serves=True) as ps, parallel_engine("d", 1) as (d,):
            fill(ps)
            d.pull("a", ps[0], [5], [1], lease_expires_at=lend(ps, "remote-a"))
            await until(lambda: d.received("a"))
            assert len([r for r in d.trace.records if r.machine == "transfer" and r.from_state is None]) == HEADS

    run(test)


def test_heartbeats_reach_every_rank() -> None:
    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=1.2)
        async with (
            parallel_engine("p", 2, serves=True, options=options) as ps,
            parallel_engine("d", 1, options=options) as (d,),
        ):
            for each in ps:
                each.lend("remote-a", lease_seconds=1.2)
            d.supervisor.deliver(TrackLease(request_id="a", peer=ps[0].address, remote_request_id="remote-a"))
            await trio.sleep(2.5)
            assert [each.sent("remote-a") for each in ps] == [None, None]

    run(test)


def test_rank_that_the_peer_does_not_have_fails_the_request_and_leaves_nothing() -> None:
    """The parameters claim more ranks than the engine has; its listener stays silent about the second."""

    async def test() -> None:
        options = ConnectorOptions(handshake_timeout_seconds=0.5)
        async with parallel_engine("p", 1, serves=True) as (p,), parallel_engine("d", 1, options=options) as (d,):
            address = PeerAddress(engine_id="p", host="127.0.0.1", port=p.address.port, tp_size=2)
            d.pull("a", address, [1], [1], lease_expires_at=lend([p], "remote-a"))
            ended = await until(lambda: d.received("a"))
            assert isinstance(ended.failure, HandshakeTimeout | HandshakeRefused)
            await until(lambda: d.counts().remote_agents == 0)
            assert d.counts().descriptor_lists == 0

    run(test)


def test_stages_of_a_pipeline_are_refused_by_name() -> None:
    async def test() -> None:
        async with parallel_engine("p", 1, serves=True) as (p,), parallel_engine("d", 1) as (d,):
            address = msgspec.structs.replace(p.address, pp_size=2)
            d.pull("a", address, [1], [1], lease_expires_at=lend([p], "remote-a"))
            ended = await until(lambda: d.received("a"))
            assert isinstance(ended.failure, Incompatible)
            assert (ended.failure.field, ended.failure.local, ended.failure.remote) == ("pp_size", "1", "2")
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
            d.pull("warm", ps[0], [5], [1], lease_expires_at=lend(ps, "remote-warm"))
            assert (await until(lambda: d.received("warm"))).failure is None
            ends = lend(ps, "remote-a")
            await ps[1].port.aclose(1.0)
            d.pull("a", ps[0], [6], [2], lease_expires_at=ends)
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
            d.pull_groups("a", ps[0], (group,), num_tokens, lease_expires_at=lend(ps, "remote-a"))
            ended = await until(lambda: d.received("a"))
            assert ended.failure is None
            if ended.unfilled is not None:
                offsets = ended.unfilled.addresses - d.memory.ctypes.data
                for offset, length in zip(offsets, ended.unfilled.lengths, strict=True):
                    d.memory.reshape(-1)[offset : offset + length] = 0
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


def test_window_is_not_read_in_smaller_blocks_than_ours() -> None:
    """The first of our blocks would be filled in part, and vLLM's prefix cache would take it for whole."""

    async def test() -> None:
        async with parallel_engine("p", 1, serves=True, tokens=16) as ps, parallel_engine("d", 1, tokens=32) as (d,):
            fill(ps)
            # Of 64 tokens, P keeps the last 16.
            group = GroupPull(local_block_ids=[5], local_first=1, remote_block_ids=[7], window_tokens=16)
            d.pull_groups("a", ps[0], (group,), 64, lease_expires_at=lend(ps, "remote-a"))
            ended = await until(lambda: d.received("a"))
            assert isinstance(ended.failure, BadParams)
            assert "sliding window" in str(ended.failure)
            await until(lambda: ps[0].sent("remote-a"))

    run(test)
