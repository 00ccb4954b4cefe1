"""What the actors of a rank share of the NIXL port: agents that several stand on, and READs that come to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import trio

from connector.clock import BootClock
from connector.ports.nixl import NixlCallFailed
from connector.runtime.reads import ReadOrder, Reads
from statemachine.remote_engine import ReadEnded


class Port:
    """It refuses every READ. The metadata of an agent is its name."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.removed: list[str] = []

    def set_event_callback(self, on_event: object) -> None:
        return

    async def add_remote_agent(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name not in self.loaded:
            self.loaded.append(name)
        return name

    async def remove_remote_agent(self, agent: str) -> None:
        self.loaded.remove(agent)
        self.removed.append(agent)

    async def post_read(self, *lists_and_ids: object) -> int:
        raise NixlCallFailed("post_read", "NIXL_ERR_INVALID_PARAM")


def nothing(*said: object) -> None:
    return


def reads_of(port: Any, log_crash: Callable[..., None] = nothing) -> Reads:
    return Reads(
        port=port, clock=BootClock(), emit=nothing, on_notification=nothing, on_broken=nothing, log_crash=log_crash
    )


def test_an_agent_is_removed_when_the_last_who_stands_on_it_lets_go() -> None:
    async def test() -> None:
        port = Port()
        reads = reads_of(port)
        assert await reads.load_agent(b"p", "one") == "p"
        assert await reads.load_agent(b"p", "other") == "p"
        await reads.unload_agent("p", "one")
        assert port.removed == []
        await reads.unload_agent("p", "other")
        assert port.removed == ["p"]
        assert await reads.load_agent(b"p", "one") == "p"

    trio.run(test)


def test_an_agent_that_somebody_has_given_up_is_loaded_by_nobody_until_it_was_removed() -> None:
    async def test() -> None:
        port = Port()
        reads = reads_of(port)
        await reads.load_agent(b"p", "one")
        await reads.load_agent(b"p", "other")
        assert await reads.load_agent(b"p", "one") is None, "READs of its last connection have not ended"
        await reads.unload_agent("p", "one")
        assert await reads.load_agent(b"p", "third") is None
        await reads.unload_agent("p", "other")
        assert await reads.load_agent(b"p", "third") == "p"

    trio.run(test)


def test_a_read_that_nixl_refuses_to_post_has_ended() -> None:
    """Nothing was handed over, so nothing can land: the order is answered, and its blocks need no quarantine."""

    async def test() -> None:
        ended: list[ReadEnded] = []
        crashes: list[object] = []
        port: Any = Port()
        reads = reads_of(port, lambda *crash: crashes.append(crash))
        ids = np.array([0], np.int32)
        order = ReadOrder(
            request_id="r",
            read=0,
            connection=1,
            peer="p",
            local=1,
            local_ids=ids,
            remote=2,
            remote_ids=ids,
            is_wanted=lambda: True,
            on_end=lambda end, event: ended.append(end),
        )
        async with trio.open_nursery() as nursery:
            reads.start(nursery)
            reads.order([order])
        (end,) = ended
        assert end.failure is not None
        assert (end.failure.operation, end.failure.error) == ("post_read", "NIXL_ERR_INVALID_PARAM")
        assert end.is_quiescent
        assert crashes == []

    trio.run(test)
