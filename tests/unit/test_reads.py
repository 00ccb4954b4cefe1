"""What the actors of a rank share of the NIXL port: agents that several stand on, and READs that come to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from connector.clock import BootClock
from connector.ports import nixl
from connector.ports.nixl import DescriptorIds, NixlEvent, PortClosed, ReadPosted
from connector.runtime.figures import Figures
from connector.runtime.reads import DESCRIPTORS_AHEAD_MAX, DESCRIPTORS_PER_TURN, ORDERS_AHEAD_MIN, ReadOrder, Reads
from statemachine.failures import Failure, TransferError
from statemachine.remote_engine import ReadEnded

LOST = TransferError(peer="p", operation="READ", error="lost", transport_lost=True)
LATER = TransferError(peer="p", operation="READ", error="another", transport_lost=True)


def nothing(*said: object) -> None:
    return


class Port:
    """It begins nothing before it is told to. The metadata of an agent is its name."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.removed: list[str] = []
        self.ordered: list[int] = []
        self.local_ids: list[int] = []  # the first one of each
        self.is_closed = False
        self.tell: Callable[[NixlEvent], None] = nothing

    def set_event_callback(self, on_event: Callable[[NixlEvent], None]) -> None:
        self.tell = on_event

    async def add_remote_agent(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name not in self.loaded:
            self.loaded.append(name)
        return name

    async def remove_remote_agent(self, agent: str) -> None:
        self.loaded.remove(agent)
        self.removed.append(agent)

    def post_read(self, local: int, local_ids: DescriptorIds, remote: int, remote_ids: DescriptorIds) -> int:
        if self.is_closed:
            raise PortClosed("d")
        self.local_ids.append(int(local_ids[0]))
        self.ordered.append(len(self.ordered))
        return self.ordered[-1]

    def end(self, handle: int, error: str | None = None, *, was_posted: bool = True) -> None:
        self.tell(nixl.PortReadEnded(handle=handle, ended_ns=7, error=error, was_posted=was_posted))


def reads_of(port: Any, log_crash: Callable[..., None] = nothing) -> Reads:
    return Reads(
        port=port,
        clock=BootClock(),
        figures=Figures(),
        emit=nothing,
        on_notification=nothing,
        on_unreachable=nothing,
        on_broken=nothing,
        log_crash=log_crash,
    )


class Owner:
    """Who stands on agents."""

    def __init__(self) -> None:
        self.lost: list[tuple[str, Failure]] = []
        self.over: list[str] = []

    def agent_lost(self, agent: str, failure: Failure) -> None:
        self.lost.append((agent, failure))

    async def let_go(self, reads: Reads, agent: str = "p", failure: Failure | None = None) -> None:
        await reads.unload_agent(agent, self, failure, lambda: self.over.append(agent))


def test_an_agent_is_removed_when_the_last_who_stands_on_it_lets_go() -> None:
    async def test() -> None:
        port = Port()
        reads = reads_of(port)
        one, other = Owner(), Owner()
        assert await reads.load_agent(b"p", one) == "p"
        assert await reads.load_agent(b"p", other) == "p"
        await one.let_go(reads)
        assert (port.removed, one.over, other.lost) == ([], ["p"], [])
        assert await reads.load_agent(b"p", one) == "p", "nothing was wrong with it"
        await one.let_go(reads)
        await other.let_go(reads)
        assert (port.removed, other.over) == (["p"], ["p"])
        assert await reads.load_agent(b"p", one) == "p"

    trio.run(test)


class Lists(Port):
    """It prepares lists when it is told to, and is slow to release them."""

    def __init__(self) -> None:
        super().__init__()
        self.prepares = trio.Event()
        self.lists: set[int] = set()
        self.releases = 0

    async def prepare_local(self, runs: object) -> int:
        await self.prepares.wait()
        self.lists.add(len(self.lists))
        return len(self.lists) - 1

    async def release_descriptor_list(self, handle: int) -> None:
        self.releases += 1
        await trio.sleep(0.01)
        self.lists.remove(handle)


def test_of_two_lists_of_the_same_memory_one_is_released_although_nobody_wants_it_any_more() -> None:
    async def test() -> None:
        port = Lists()
        reads = reads_of(port)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(reads.local_list, (nixl.MemoryRun(0, 1, 1, 1),))
            await trio.testing.wait_all_tasks_blocked()
            port.prepares.set()
            while not port.releases:
                await trio.sleep(0)
            nursery.cancel_scope.cancel()
        assert len(port.lists) == reads.local_lists == 1

    trio.run(test)


def test_who_stands_on_an_agent_does_not_load_it_again() -> None:
    async def test() -> None:
        reads, one = reads_of(Port()), Owner()
        await reads.load_agent(b"p", one)
        assert await reads.load_agent(b"p", one) is None, "READs of its last connection have not ended"

    trio.run(test)


def test_an_agent_that_somebody_has_given_up_for_a_failure_is_given_up_by_all_and_over_when_it_was_removed() -> None:
    async def test() -> None:
        port = Port()
        reads = reads_of(port)
        one, other, third = Owner(), Owner(), Owner()
        for each in (one, other, third):
            await reads.load_agent(b"p", each)
        await one.let_go(reads, failure=LOST)
        assert reads.is_lost("p")
        assert (other.lost, third.lost, one.lost) == ([("p", LOST)], [("p", LOST)], [])
        assert await reads.load_agent(b"p", Owner()) is None
        await other.let_go(reads, failure=LATER)
        await third.let_go(reads)
        assert third.lost == [("p", LOST)], "once"
        assert port.removed == ["p"]
        assert (one.over, other.over, third.over) == (["p"], ["p"], ["p"])
        assert await reads.load_agent(b"p", one) == "p"
        assert not reads.is_lost("p")

    trio.run(test)


def test_who_gave_up_a_shared_agent_waits_for_those_who_still_read() -> None:
    async def test() -> None:
        port = Port()
        reads = reads_of(port)
        one, other = Owner(), Owner()
        for each in (one, other):
            await reads.load_agent(b"p", each)
        await one.let_go(reads, failure=LOST)
        assert (port.removed, one.over) == ([], []), "what failed may write for as long as the agent is loaded"
        await other.let_go(reads, failure=LOST)
        assert (port.removed, one.over, other.over) == (["p"], ["p"], ["p"])

    trio.run(test)


def test_an_agent_that_nixl_does_not_remove_is_over_all_the_same() -> None:
    class Failing(Port):
        async def remove_remote_agent(self, agent: str) -> None:
            raise PortClosed("d")

    async def test() -> None:
        reads, one, other = reads_of(Failing()), Owner(), Owner()
        for each in (one, other):
            await reads.load_agent(b"p", each)
        await one.let_go(reads, failure=LOST)
        with pytest.raises(PortClosed):
            await other.let_go(reads, failure=LOST)
        assert (one.over, other.over) == (["p"], ["p"])
        await one.let_go(reads)
        assert one.over == ["p", "p"], "the port knows nothing of it any more"

    trio.run(test)


class Orders:
    """READs of requests that are called by their first one, and what became of them."""

    def __init__(self) -> None:
        self.port = Port()
        self.crashes: list[object] = []
        self.reads = reads_of(self.port, lambda *crash: self.crashes.append(crash))
        self.wanted = True
        self.ended: dict[int, ReadEnded] = {}

    def order(self, *numbers: int, descriptors: int = 1) -> None:
        self.reads.order([self._one(str(numbers[0]), number, descriptors) for number in numbers])

    def _one(self, request_id: str, number: int, descriptors: int) -> ReadOrder:
        ids = np.full(descriptors, number, np.int32)
        return ReadOrder(
            request_id=request_id,
            read=number,
            connection=1,
            peer="p",
            local=1,
            local_ids=ids,
            remote=2,
            remote_ids=ids,
            is_wanted=lambda: self.wanted,
            on_end=self._note_end,
        )

    def _note_end(self, end: ReadEnded, event: nixl.PortReadEnded | None) -> None:
        assert end.read not in self.ended
        self.ended[end.read] = end


def test_a_read_that_nixl_refuses_to_post_has_ended() -> None:
    """Nothing was handed over, so nothing can land: the order is answered, and its blocks need no quarantine."""
    orders = Orders()
    orders.order(0)
    orders.port.end(0, "NIXL_ERR_INVALID_PARAM", was_posted=False)
    end = orders.ended[0]
    assert end.failure is not None
    assert (end.failure.operation, end.failure.error) == ("post_read", "NIXL_ERR_INVALID_PARAM")
    assert end.is_quiescent
    assert end.was_wanted
    assert orders.crashes == []


def test_a_read_that_is_ordered_of_a_closed_port_has_ended() -> None:
    orders = Orders()
    orders.port.is_closed = True
    orders.order(0, 1)
    assert [end.failure is not None and end.failure.operation for end in orders.ended.values()] == ["post_read"] * 2
    assert orders.reads.in_flight == 0


def test_a_read_over_which_the_port_raises_has_ended() -> None:
    """A bug, said once; the request fails at once, and its blocks need no quarantine: nothing was ordered."""
    orders = Orders()

    def refuse(*ids: object) -> int:
        raise OSError("injected")

    orders.port.post_read = refuse  # type: ignore[assignment]
    orders.order(0)
    end = orders.ended[0]
    assert end.failure is not None
    assert "injected" in end.failure.error
    assert end.is_quiescent
    assert len(orders.crashes) == 1
    assert orders.reads.in_flight == 0


def test_a_large_request_lets_others_in_between() -> None:
    orders = Orders()
    orders.order(*range(ORDERS_AHEAD_MIN + 3), descriptors=DESCRIPTORS_PER_TURN)
    orders.order(100, descriptors=2)
    orders.order(200, 201, descriptors=DESCRIPTORS_PER_TURN // 2)
    for handle in range(ORDERS_AHEAD_MIN + 6):
        orders.port.end(handle)
    large = list(range(ORDERS_AHEAD_MIN + 3))
    turns = [*large[: ORDERS_AHEAD_MIN + 1], 100, 200, 201, *large[ORDERS_AHEAD_MIN + 1 :]]
    assert orders.port.local_ids == turns, "the turn after the first ones was given before there were others"


def test_what_is_withdrawn_before_its_turn_ends_at_once_and_the_next_one_has_its_turn() -> None:
    orders = Orders()
    orders.order(*range(4), descriptors=DESCRIPTORS_PER_TURN)
    orders.order(10, 11, descriptors=DESCRIPTORS_PER_TURN)
    orders.order(20, descriptors=2)
    assert orders.port.local_ids == [0, 1]
    orders.reads.withdraw("p", "10")
    orders.reads.withdraw("another engine", "20")
    orders.reads.withdraw("p", "unknown")
    assert {number: end.was_wanted for number, end in orders.ended.items()} == {10: False, 11: False}
    orders.reads.withdraw("p", "0")
    assert {number for number, end in orders.ended.items() if not end.was_wanted} == {2, 3, 10, 11}
    assert orders.reads.waiting() == ["20"]
    assert orders.reads.in_flight == 2, "what was ordered may still write"
    orders.port.end(0)
    assert orders.port.local_ids == [0, 1, 20]
    assert orders.ended[0].was_wanted


def test_the_ranks_of_a_small_request_are_read_in_one_turn() -> None:
    """Otherwise many requests at once would all be done last."""
    orders = Orders()
    orders.order(0)
    orders.order(*range(1, 9), descriptors=512)
    orders.order(*range(9, 17), descriptors=512)
    for handle in range(17):
        orders.port.end(handle)
    assert orders.port.local_ids == list(range(17))


FIRST = 4
SIZE = DESCRIPTORS_AHEAD_MAX // FIRST
"""Of READs that the port is given four at a time."""


def test_little_is_ordered_ahead_of_the_port() -> None:
    """The next one's turn comes when NIXL has one of them, or when one has ended."""
    orders = Orders()
    orders.order(*range(FIRST + 3), descriptors=SIZE)
    assert len(orders.port.ordered) == FIRST
    orders.port.tell(ReadPosted(0))
    assert len(orders.port.ordered) == FIRST + 1
    orders.port.end(0)
    assert len(orders.port.ordered) == FIRST + 1, "its turn was over already"
    orders.port.end(1)
    orders.port.end(2, "NIXL_ERR_BACKEND")
    assert len(orders.port.ordered) == FIRST + 3
    assert orders.reads.in_flight == FIRST
    assert [end.failure is None for end in orders.ended.values()] == [True, True, False]


def test_however_large_they_are_one_is_ordered_while_another_is_posted() -> None:
    orders = Orders()
    orders.order(*range(5), descriptors=DESCRIPTORS_AHEAD_MAX)
    assert len(orders.port.ordered) == ORDERS_AHEAD_MIN


def test_small_reads_are_ordered_together() -> None:
    """A turn of the trio loop between any few of them would cost more than they do."""
    orders = Orders()
    for number in range(64):
        orders.order(number, descriptors=32)
    assert len(orders.port.ordered) == 64


def test_a_read_that_is_given_up_before_its_turn_is_not_posted() -> None:
    orders = Orders()
    orders.order(*range(FIRST + 2), descriptors=SIZE)
    orders.wanted = False
    orders.port.end(0)
    assert len(orders.port.ordered) == FIRST
    assert {read: end.was_wanted for read, end in orders.ended.items()} == {0: True, FIRST: False, FIRST + 1: False}
    assert orders.crashes == []
