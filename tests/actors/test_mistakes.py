"""A bug of ours, in any step of an executor, costs the requests that it occurred with: they end, their blocks come
back, and the engine that they wanted is read from again. On real agents and sockets; the bug is an exception that a
method raises, once or always."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from connector.config import ConnectorOptions
from connector.protocol import StartPull
from connector.runtime.connections import Connections
from connector.runtime.lease_keeper import LeaseKeeper, LostEnd
from connector.runtime.peer_actor import PeerActor
from connector.runtime.supervisor import Supervisor
from statemachine import lending
from statemachine.lending import Lending
from tests.actors.engines import Engine, engine, read, until
from tests.actors.test_pull import run

BRIEF_BACKOFF = ConnectorOptions(backoff_initial_seconds=0.02, backoff_max_seconds=0.05, quiesce_timeout_seconds=0.2)


def always(*arguments: Any, **named: Any) -> bool:
    return True


def breaks(
    patch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    *,
    when: Callable[..., bool] = always,
    times: int = 1,
    after: bool = False,
) -> list[str]:
    """Raise in so many of those calls, before or `after` what it does; returns the calls that have raised."""
    original, raised = getattr(owner, name), list[str]()

    def broken(*arguments: Any, **named: Any) -> Any:
        hits = len(raised) < times and when(*arguments, **named)
        if hits and not after:
            raised.append(name)
            raise RuntimeError("injected")
        result = original(*arguments, **named)
        if hits:
            raised.append(name)
            raise RuntimeError("injected")
        return result

    patch.setattr(owner, name, broken)
    return raised


@asynccontextmanager
async def acquainted() -> AsyncIterator[tuple[Engine, Engine]]:
    """D, and P, from which it has read."""
    async with engine("p", serves=True) as p, engine("d", options=BRIEF_BACKOFF) as d:
        assert (await read(d, p, "before")).failure is None
        yield d, p


async def is_read_again(d: Engine, p: Engine) -> None:
    for number in range(100):
        if (await read(d, p, f"after-{number}", block=2)).failure is None:
            break
        await trio.sleep(0.05)
    else:
        raise AssertionError("the engine is not read from any more")
    (actor,) = d.supervisor._peers.values()
    assert not actor._pulls
    assert not actor.core.quarantined()
    assert d.crashes


def is_a_pull(*arguments: Any) -> bool:
    return any(isinstance(each, StartPull) for each in arguments)


@pytest.mark.parametrize("times", [1, 100])
def test_a_command_that_cannot_be_put_to_the_core(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Tried once more; after that the request ends."""

    async def test() -> None:
        async with acquainted() as (d, p):
            with monkeypatch.context() as patch:
                raised = breaks(patch, PeerActor, "_event_of_command", when=is_a_pull, times=times)
                ended = await read(d, p, "a")
                assert len(raised) == min(times, 2)
            assert (ended.failure is None) == (times == 1)
            assert not ended.quarantined
            await is_read_again(d, p)

    run(test)


def test_reads_that_cannot_be_ordered_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with acquainted() as (d, p):
            with monkeypatch.context() as patch:
                breaks(patch, PeerActor, "_orders", times=100)
                ended = await read(d, p, "a")
            assert ended.failure is not None
            assert "RuntimeError('injected'); please report it" in str(ended.failure)
            assert not ended.quarantined
            await is_read_again(d, p)

    run(test)


def test_a_read_of_which_nobody_can_say_whether_it_is_wanted_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with acquainted() as (d, p):
            (actor,) = d.supervisor._peers.values()
            with monkeypatch.context() as patch:
                breaks(patch, type(actor.core), "wants", times=100)
                ended = await read(d, p, "a")
            assert ended.failure is not None
            assert not ended.quarantined
            await is_read_again(d, p)

    run(test)


def test_a_report_that_raises_is_made_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with acquainted() as (d, p):
            with monkeypatch.context() as patch:
                breaks(patch, PeerActor, "_report")
                ended = await read(d, p, "a")
            assert ended.failure is not None
            assert ended.failure.kind == "ActorCrashed"
            assert not ended.quarantined, "its READs had ended"
            await is_read_again(d, p)

    run(test)


def test_what_follows_a_report_does_not_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with acquainted() as (d, p):
            with monkeypatch.context() as patch:
                raised = breaks(patch, PeerActor, "_report", after=True)
                assert (await read(d, p, "a")).failure is None
                await until(lambda: d.crashes and raised)
            await is_read_again(d, p)
            assert d.received("a") is not None  # which also asserts that it was told once

    run(test)


def test_an_engine_that_could_not_be_admitted_is_met_by_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", options=BRIEF_BACKOFF) as d:
            with monkeypatch.context() as patch:
                breaks(patch, Supervisor, "_admit")
                ended = await read(d, p, "a")
            assert ended.failure is not None
            assert not ended.quarantined, "nobody has begun a READ of it"
            await is_read_again(d, p)

    run(test)


@pytest.mark.parametrize("after", [False, True])
def test_a_connection_that_is_not_listened_to_is_taken_back(monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Its agents could never be loaded again."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", options=BRIEF_BACKOFF) as d:
            with monkeypatch.context() as patch:
                breaks(patch, Connections, "_listen", after=after)
                await read(d, p, "a")
            await is_read_again(d, p)

    run(test)


LENDS_FOR = 0.4
LENT_BRIEFLY = ConnectorOptions(kv_lease_duration=0.1, lease_limit_seconds=LENDS_FOR, decoder_kv_blocks_ttl=LENDS_FOR)


@pytest.mark.parametrize("lost", ["a grant", "the end"])
def test_an_end_that_is_lost_is_made_up_when_no_reader_can_believe_in_the_lease(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    async def test() -> None:
        async with engine("p", options=LENT_BRIEFLY) as p:
            with monkeypatch.context() as patch:
                if lost == "a grant":
                    raised = breaks(patch, Lending, "handle", when=is_a_grant)
                else:
                    raised = breaks(patch, LeaseKeeper, "_execute", when=is_an_end)
                began = trio.current_time()
                p.lend("a")
                await until(lambda: p.sent("a"))
            assert raised
            assert trio.current_time() - began >= 2 * LENDS_FOR
            assert any(isinstance(error, LostEnd) for _, error in p.crashes)
            p.lend("b")
            await until(lambda: p.sent("b"))
            await trio.sleep(4 * LENDS_FOR)
            assert sum(isinstance(error, LostEnd) for _, error in p.crashes) == 1

    run(test)


def is_a_grant(*arguments: Any) -> bool:
    return any(isinstance(each, lending.Granted) for each in arguments)


def is_an_end(*arguments: Any) -> bool:
    return any(isinstance(each, lending.FreeBlocks) for each in arguments)
