"""Agents that several peer actors stand on: who may remove them, and who has to wait."""

from __future__ import annotations

from typing import Any

import trio

from connector.clock import BootClock
from connector.runtime.reads import Reads


class Port:
    """As far as agents go. The metadata of an agent is its name."""

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


def reads_of(port: Any) -> Reads:
    def nothing(*said: object) -> None:
        return

    return Reads(
        port=port, clock=BootClock(), emit=nothing, on_notification=nothing, on_broken=nothing, log_crash=nothing
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
