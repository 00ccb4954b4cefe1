"""Names that hang or are slow, in the threads of the real `trio.to_thread`: nobody else waits for them."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from connector.ports import host_names
from connector.ports.host_names import HostNames
from connector.ports.side_channel import NameNotResolved
from tests.rig.name_server import NameServer, name_server

MORE_THAN_TRIO_HAS = 60
"""Threads; trio's own limiter lets 40 run."""


def run(test: Callable[[NameServer], Awaitable[None]], clock: trio.abc.Clock | None = None) -> None:
    async def main() -> None:
        with trio.fail_after(15):
            await test(server)

    with name_server() as server:
        trio.run(main, clock=clock)


async def given_up(names: HostNames, host: str, seconds: float = 0.05) -> None:
    with trio.move_on_after(seconds) as scope:
        await names.address(host, 5600)
    assert scope.cancelled_caught


async def once_there_is_room(names: HostNames, host: str) -> str:
    """Its address; a thread that was let go ends when it pleases."""
    while True:
        try:
            return await names.address(host, 5600)
        except NameNotResolved:
            await trio.sleep(0.005)


async def given_up_once_asked(names: HostNames, server: NameServer, host: str, times: int) -> None:
    """Until the name server was asked `times` times in all: a thread may be slow to start."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(names.address, host, 5600)
        while server.asked[host] < times:
            await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    assert server.asked[host] == times


def test_names_that_hang_delay_no_other_name_and_no_other_thread() -> None:
    """Scenario 61. Whoever has asked for them has given up, and their threads are still there."""

    async def test(server: NameServer) -> None:
        names = HostNames()
        async with trio.open_nursery() as nursery:
            for number in range(MORE_THAN_TRIO_HAS):
                nursery.start_soon(given_up, names, f"hang-{number}")
        for _ in range(2):
            assert await names.address("found-a", 5600) == "127.0.0.1"
        assert await trio.to_thread.run_sync(lambda: "another thread") == "another thread"
        with pytest.raises(NameNotResolved, match="known") as failed:
            await names.address("unknown", 5601)
        assert (failed.value.host, failed.value.port) == ("unknown", 5601)

    run(test)


def test_all_who_want_a_name_share_one_question() -> None:
    async def test(server: NameServer) -> None:
        names = HostNames()
        failed = []

        async def want() -> None:
            try:
                await names.address("hang", 5600)
            except NameNotResolved as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(given_up, names, "hang")
            for _ in range(20):
                nursery.start_soon(want)
            await trio.sleep(0.2)
            server.let_go()
        assert len(failed) == 20
        assert server.asked["hang"] == 1

    run(test)


def test_an_old_question_is_asked_again_for_who_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is back answers a new question; the old one may have been lost."""

    async def test(server: NameServer) -> None:
        names = HostNames()
        await given_up_once_asked(names, server, "hang", times=1)
        await given_up(names, "hang")
        assert server.asked["hang"] == 1
        monkeypatch.setattr(host_names, "AGAIN_SECONDS", 0.1)
        await trio.sleep(0.1)
        await given_up_once_asked(names, server, "hang", times=2)

    run(test)


def test_an_answer_that_comes_too_late_is_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first name server is silent: the resolver asks the second one when who asked has given up."""

    async def answered_late(names: HostNames, server: NameServer, host: str) -> None:
        await given_up_once_asked(names, server, host, times=1)
        await trio.sleep(host_names.SLOW_SECONDS)
        server.let_go()
        while names._inquiries:  # a thread may be slow to end
            await trio.sleep(0.005)

    async def test(server: NameServer) -> None:
        names = HostNames()
        await answered_late(names, server, "late")
        for _ in range(3):
            assert await names.address("late", 5600) == "127.0.0.1"
        assert server.asked["late"] == 1

    async def test_for_a_while(server: NameServer) -> None:
        names = HostNames()
        await answered_late(names, server, "late")
        await trio.sleep(host_names.KEPT_SECONDS)
        await given_up_once_asked(names, server, "late", times=2)

    run(test)
    monkeypatch.setattr(host_names, "KEPT_SECONDS", 0.1)
    run(test_for_a_while)


def test_what_was_found_at_once_is_not_kept() -> None:
    """A host may have another address by now."""

    async def test(server: NameServer) -> None:
        names = HostNames()
        for times in (1, 2):
            await names.address("found", 5600)
            assert server.asked["found"] == times

    run(test)


def test_who_asks_again_hears_what_an_older_question_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_names, "AGAIN_SECONDS", 0.1)

    async def test(server: NameServer) -> None:
        names, found = HostNames(), []

        async def want() -> None:
            found.append(await names.address("late", 5600))

        await given_up_once_asked(names, server, "late", times=1)
        await trio.sleep(0.1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(want)
            while server.asked["late"] < 2:
                await trio.sleep(0.005)
            server.let_go()
        assert found == ["127.0.0.1"]

    run(test)


def test_that_a_name_is_not_known_is_heard_from_the_newest_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_names, "AGAIN_SECONDS", 0.1)

    async def test(server: NameServer) -> None:
        names = HostNames()
        await given_up_once_asked(names, server, "lost", times=1)
        await trio.sleep(0.1)
        for times in (2, 3):
            with pytest.raises(NameNotResolved, match="known"):
                await names.address("lost", 5600)
            assert server.asked["lost"] == times

    run(test)


def test_beyond_a_number_names_wait_for_a_name_server_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a start, where prefill engines are named and not addressed."""
    monkeypatch.setattr(host_names, "QUESTIONS_MAX", 4)

    async def test(server: NameServer) -> None:
        names, found = HostNames(), list[str]()
        server.slow_seconds = 0.05

        async def look_up(host: str) -> None:
            found.append(await names.address(host, 5600))

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(look_up, f"slow-{number}")
        assert found == ["127.0.0.1"] * 40

    run(test)


def test_a_name_that_waits_for_room_is_refused_when_the_oldest_question_has_hung_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However new those are that have taken the place of others."""
    monkeypatch.setattr(host_names, "QUESTIONS_MAX", 2)
    clock = trio.testing.MockClock()
    refused: list[NameNotResolved] = []

    async def test(server: NameServer) -> None:
        names = HostNames()

        async def ask() -> None:
            with pytest.raises(NameNotResolved, match="2 questions wait for a name server") as failed:
                await names.address("found-new", 5600)
            refused.append(failed.value)

        for host, seconds in (("hang-0", 0.8 * host_names.AGAIN_SECONDS), ("hang-1", 0.0)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(names.address, host, 5600)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            clock.jump(seconds)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert refused == []
            clock.jump(0.2 * host_names.AGAIN_SECONDS)
            await trio.testing.wait_all_tasks_blocked()
            assert len(refused) == 1
            nursery.cancel_scope.cancel()

    run(test, clock)


def test_beyond_a_number_that_hang_names_are_refused_but_not_those_that_were_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_names, "QUESTIONS_MAX", 4)
    monkeypatch.setattr(host_names, "AGAIN_SECONDS", 0.5)

    async def test(server: NameServer) -> None:
        names = HostNames()
        await names.address("found-before", 5600)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(given_up, names, f"hang-{number}")
        with pytest.raises(NameNotResolved, match="4 questions wait for a name server"):
            await names.address("found-new", 5600)
        monkeypatch.setattr(host_names, "AGAIN_SECONDS", 0.0)
        await given_up(names, "hang-0")  # it is being asked about already
        assert await names.address("found-before", 5600) == "127.0.0.1"
        server.let_go()
        assert await once_there_is_room(names, "found-new") == "127.0.0.1"

    run(test)


def test_a_name_may_be_that_of_several_hosts() -> None:
    async def test(server: NameServer) -> None:
        names = HostNames()
        assert await names.addresses("several", 5600) == ("127.0.0.1", "127.0.0.2")
        assert await names.address("several", 5600) == "127.0.0.1"
        assert await names.addresses("found", 5600) == ("127.0.0.1",)
        assert await names.addresses("[::1]", 5600) == ("::1",)
        with pytest.raises(NameNotResolved, match="known"):
            await names.addresses("unknown", 5600)

    run(test)


def test_a_host_that_has_an_address_of_each_kind_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {socket.AF_INET6: "::1", socket.AF_INET: "127.0.0.1"}
    found = [(kind, socket.SOCK_STREAM, 6, "", (address, 0)) for kind, address in kinds.items()]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    async def main() -> None:
        assert await HostNames().addresses("localhost", 5600) == ("127.0.0.1",)

    trio.run(main)
