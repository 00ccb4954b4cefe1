"""Checksums between actors on real NIXL and ZMQ: a block that is not what was lent ends as Corrupt, nothing else does.

The engine thread's part is played by tests/rig/sums.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from connector.config import ConnectorOptions
from connector.protocol import AbortPull, LeaseGranted, ReceiveEnded, SumsFound
from connector.tools.asking import Address
from connector.tools.explanation import explain, find, live_of
from connector.tools.live import Question, opened_surveyor
from connector.wire.control import NO_SUMS
from connector.wire.inspection import RequestRow
from statemachine.failures import BadParams, ChecksumsMissing, Corrupt, Incompatible, TransferError
from statemachine.remote_engine import NotificationFailed
from tests.actors.engines import BLOCKS, HOST, Engine, engine, lease_of, parallel_engine, until
from tests.actors.test_peers import is_served
from tests.actors.test_pull import run

ALL = ConnectorOptions(verify="all")
OFF = ConnectorOptions()


def fill(*engines: Engine) -> None:
    for number, each in enumerate(engines):
        flat = each.memory.reshape(-1)
        flat[:] = (flat.size * number + np.arange(flat.size)) % 251


async def read_unsummed(d: Engine, p: Engine, *, corrupts: bool = False) -> list[SumsFound]:
    """D has read one block for request a. What its engine thread has summed, now and later; nobody has been told."""
    fill(p)
    found: list[SumsFound] = []
    d.events.deliver = found.append
    p.lend("remote-a")
    if corrupts:
        p.memory[1, 1, 7] ^= 16
    d.pull("a", p, [1], [1])
    await until(lambda: found)
    return found


async def pulled(d: Engine, p: Engine, name: str, local: list[int], remote: list[int]) -> ReceiveEnded:
    d.pull(name, p, local, remote)
    return await until(lambda: d.received(name))


@pytest.mark.parametrize(("of_p", "of_d"), [("all", "all"), ("all", "sampled"), ("sampled", "sampled"), ("all", "off")])
def test_what_was_lent_is_accepted(of_p: str, of_d: str) -> None:
    async def test() -> None:
        theirs, ours = ConnectorOptions(verify=of_p), ConnectorOptions(verify=of_d)
        async with engine("p", serves=True, options=theirs) as p, engine("d", options=ours) as d:
            fill(p)
            for turn in range(3):
                p.lend(f"remote-{turn}")
                ended = await pulled(d, p, str(turn), [1, 2, 3], [9, 4, 5])
                assert ended.failure is None, ended.failure
                assert (d.blocks([1, 2, 3]) == p.blocks([9, 4, 5])).all()
                assert not (await until(lambda turn=turn: p.sent(f"remote-{turn}"))).expired

    run(test)


@pytest.mark.parametrize("block", [9, 4, 5])
def test_a_byte_that_changes_after_the_sum_was_made_is_noticed(block: int) -> None:
    """In P's memory, where the READ finds it as it would find what a wire has changed."""

    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, engine("d", options=ALL) as d:
            fill(p)
            p.lend("remote-a")
            p.memory[1, block, 7] ^= 16
            failure = (await pulled(d, p, "a", [1, 2, 3], [9, 4, 5])).failure
            assert isinstance(failure, Corrupt)
            names = [region.name for region in p.local.layout.regions]
            assert (failure.region, failure.block, failure.differing) == (names[1], block, 1)
            assert failure.compared == 3 * len(names)
            assert d.trace.path("request", "a")[-1] == "failed"
            # It is not tried again, nothing is quarantined, and the next one is served.
            assert d.trace.path("peer", "p")[-1] == "ready"
            p.lend("remote-b")
            assert (await pulled(d, p, "b", [1, 2, 3], [9, 4, 5])).failure is None

    run(test)


def test_without_the_option_it_is_not_noticed() -> None:
    """Guards the test above."""

    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, engine("d", options=OFF) as d:
            fill(p)
            p.lend("remote-a")
            p.memory[1, 9, 7] ^= 16
            assert (await pulled(d, p, "a", [1], [9])).failure is None

    run(test)


def test_blocks_that_were_not_lent_with_the_lease_are_refused() -> None:
    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, engine("d", options=ALL) as d:
            fill(p)
            p.lend("remote-a", blocks=[3, 4])
            failure = (await pulled(d, p, "a", [1], [5])).failure
            assert isinstance(failure, BadParams)
            assert "not lent" in str(failure)

    run(test)


def test_checksums_that_do_not_come_are_what_is_waited_for() -> None:
    """The lease was granted, and P does not answer: the connection stands, and no READ begins."""

    async def test() -> None:
        hasty = ConnectorOptions(verify="all", request_timeout_seconds=3.0)
        async with (
            engine("p", serves=True, options=ALL) as p,
            engine("d", serves=True, options=ALL) as d,
            engine("hasty", serves=True, options=hasty) as of_few_seconds,
            opened_surveyor(seconds=30.0) as surveyor,
        ):
            for each in (d, of_few_seconds):
                await is_served(each, p, f"before-{each.engine_id}")
                p.supervisor.deliver(LeaseGranted(lease=lease_of(f"remote-{each.engine_id}"), blocks=1))
            d.pull("a", p, [1], [9], remote_request_id="remote-d")
            place = Address(HOST, d.address.port)
            found = await surveyor.survey([place], [Question(what="requests"), Question(what="peers")])
            (row,) = found.engines[0].of(RequestRow)
            assert (row.state, row.waits_for) == ("pending_handshake", "checksums")
            _, live = live_of(found.rows())
            (answer,) = (explain(case, live) for case in find("a", [], live))
            assert answer.cause.startswith("Waiting for the checksums of its blocks (verify) from prefill engine p")
            of_few_seconds.pull("b", p, [1], [9], remote_request_id="remote-hasty")
            await until(lambda: of_few_seconds.received("b"), 30.0)
            place = Address(HOST, of_few_seconds.address.port)
            found = await surveyor.survey([place], [Question(what="records")])
            records, live = live_of(found.rows())
            (answer,) = (explain(case, live) for case in find("b", records, live))
            assert "the checksums of its blocks (verify) from prefill engine p did not come" in answer.cause

    run(test)


def test_what_p_could_make_no_checksums_of_is_not_waited_for() -> None:
    """Nor is it read: the engine that reads is to verify everything."""

    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, engine("d", serves=True, options=ALL) as d:
            p.supervisor.deliver(LeaseGranted(lease=lease_of("remote-a"), blocks=1, sums=NO_SUMS))
            ended = await pulled(d, p, "a", [1], [9])
            assert isinstance(ended.failure, ChecksumsMissing)
            p.lend("remote-b")
            assert (await pulled(d, p, "b", [2], [9])).failure is None, "the connection stands"

    run(test)


@pytest.mark.parametrize(("of_p", "of_d"), [("off", "sampled"), ("sampled", "all")])
def test_an_engine_that_makes_fewer_checksums_is_refused(of_p: str, of_d: str) -> None:
    async def test() -> None:
        theirs, ours = ConnectorOptions(verify=of_p), ConnectorOptions(verify=of_d)
        async with engine("p", serves=True, options=theirs) as p, engine("d", options=ours) as d:
            p.lend("remote-a")
            failure = (await pulled(d, p, "a", [1], [1])).failure
            assert isinstance(failure, Incompatible)
            assert (failure.field, failure.local, failure.remote) == ("verify", of_d, of_p)
            assert d.counts().remote_agents == d.counts().descriptor_lists == 0

    run(test)


def test_parts_of_blocks_are_refused_and_not_read_unverified() -> None:
    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, parallel_engine("d", 2, options=ALL) as ds:
            for d in ds:
                d.pull("a", p, [1], [1])
                failure = (await until(lambda d=d: d.received("a"))).failure
                assert isinstance(failure, Incompatible)
                assert failure.field == "verify"

    run(test)


def test_each_rank_of_p_has_checksums_of_its_own() -> None:
    async def test() -> None:
        async with parallel_engine("p", 2, serves=True, options=ALL) as ps, engine("d", options=ALL) as d:
            fill(*ps)
            for turn, rank in enumerate((None, 0, 1)):
                for each in ps:
                    each.lend(f"remote-{turn}")
                if rank is not None:
                    ps[rank].memory[0, 5, 3] ^= 1
                d.pull(str(turn), ps[0].address, [1], [5])
                failure = (await until(lambda turn=turn: d.received(str(turn)))).failure
                assert (failure is None) == (rank is None), failure

    run(test)


def test_a_lease_of_which_p_knows_nothing_ends_as_ever() -> None:
    """No sums come, and the hold says why."""

    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, engine("d", options=ALL) as d:
            failure = (await pulled(d, p, "a", [1], [1])).failure
            assert failure is not None
            assert failure.kind == "LeaseOver"

    run(test)


def test_a_request_that_is_aborted_while_its_blocks_are_summed_ends() -> None:
    """The engine thread does not answer; nothing waits for it."""

    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, engine("d", options=ALL) as d:
            found = await read_unsummed(d, p)
            d.supervisor.deliver(AbortPull(request_id="a"))
            ended = await until(lambda: d.received("a"))
            assert ended.failure is not None
            assert ended.failure.kind == "AbortedByClient"
            assert not ended.quarantined
            d.supervisor.deliver(found[0])  # too late: nobody hears of it

    run(test)


def test_what_was_summed_for_a_request_that_has_ended_says_nothing_of_the_next_one() -> None:
    """Which has the same id, over the same connection."""

    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, engine("d", options=ALL) as d:
            found = await read_unsummed(d, p)
            d.supervisor.deliver(AbortPull(request_id="a"))
            await until(lambda: d.received("a"))
            d.events.clear()
            p.lend("remote-b")
            p.memory[1, 1, 7] ^= 16
            d.pull("a", p, [1], [1], remote_request_id="remote-b")
            await until(lambda: len(found) == 2)
            for each in found:
                d.supervisor.deliver(each)
            assert isinstance((await until(lambda: d.received("a"))).failure, Corrupt)

    run(test)


def test_what_was_read_over_a_connection_that_is_lost_meanwhile_is_compared_too() -> None:
    """What made it suspect is another request's; this one is still reading, and its READ counts."""

    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, engine("d", options=ALL) as d:
            found = await read_unsummed(d, p, corrupts=True)
            (actor,) = d.supervisor._peers.values()
            lost = TransferError(peer="p", operation="notify", error="REMOTE_DISCONNECT", transport_lost=True)
            actor.tell(NotificationFailed(connection=1, failure=lost))
            await until(lambda: d.trace.path("peer", "p").count("ready") == 2)
            assert not d.received("a")
            d.supervisor.deliver(found[0])
            assert isinstance((await until(lambda: d.received("a"))).failure, Corrupt)

    run(test)


def test_all_blocks_of_a_cache_are_compared() -> None:
    async def test() -> None:
        async with engine("p", serves=True, options=ALL) as p, engine("d", options=ALL) as d:
            fill(p)
            everything = list(range(BLOCKS))
            for block in (1, BLOCKS - 2):  # in no sample
                p.lend(f"remote-{block}")
                p.memory[-1, block, -1] ^= 128
                failure = (await pulled(d, p, str(block), everything, everything)).failure
                assert isinstance(failure, Corrupt)
                assert failure.block == block

    run(test)
