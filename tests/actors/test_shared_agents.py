"""Two actors that know one built-in engine by different sizes: they stand on the same agents."""

from __future__ import annotations

import msgspec
import pytest
import trio

from connector.ports import nixl
from connector.protocol import PeerAddress
from connector.runtime.connections import Connections
from connector.runtime.peer_actor import PeerActor
from connector.runtime.reads import Reads
from statemachine.failures import Failure
from statemachine.peer import State
from statemachine.remote_engine import LinkLost, Retire
from tests.actors import engines
from tests.actors.engines import Engine, answer_as_builtin, engine, lend_by_all, parallel_engine, until
from tests.actors.test_pull import run


@pytest.fixture(autouse=True)
def builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one KV head, which answer as the built-in connector does: nothing tells TP 1 from TP 2."""
    answer_as_builtin(monkeypatch)
    monkeypatch.setattr(engines, "HEADS", 1)


class Two:
    """The actors of `d` for the same engine."""

    def __init__(self, d: Engine, ranks: list[Engine]) -> None:
        self.d = d
        self.ranks = ranks
        self.requests = 0

    def address(self, tp_size: int) -> PeerAddress:
        return msgspec.structs.replace(self.ranks[0].address, tp_size=tp_size)

    def actor(self, tp_size: int) -> PeerActor:
        (found,) = [each for key, each in self.d.supervisor._peers.items() if key.tp_size == tp_size]
        return found

    def begin(self, tp_size: int) -> str:
        self.requests += 1
        name = f"r{self.requests}"
        self.d.borrow(name, lend_by_all(self.ranks, f"remote-{name}"), self.address(tp_size), [1], [1])
        return name

    async def read(self, tp_size: int) -> None:
        name = self.begin(tp_size)
        ended = await until(lambda: self.d.received(name))
        assert ended.failure is None, ended.failure

    def lose(self, tp_size: int) -> None:
        """Something makes the connection of this actor suspect."""
        self.actor(tp_size).tell(LinkLost(connection=1, detail="by the test"))


def test_what_fails_at_one_is_rebuilt_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent is removed when the READs of the other have ended, and not counted as removed before."""
    held: list[tuple[Reads, nixl.NixlEvent]] = []
    holds = False
    receive = Reads._receive

    def slow(self: Reads, event: nixl.NixlEvent) -> None:
        if holds and isinstance(event, nixl.PortReadEnded):
            held.append((self, event))
        else:
            receive(self, event)

    monkeypatch.setattr(Reads, "_receive", slow)

    async def test() -> None:
        nonlocal holds
        async with parallel_engine("p", 2, serves=True) as ps, engine("d") as d:
            two = Two(d, ps)
            await two.read(1)
            await two.read(2)
            holds = True
            reading = two.begin(2)
            await until(lambda: held)
            two.lose(1)
            await until(lambda: two.actor(2).core.state is State.DRAINING)
            await trio.sleep(0.1)
            assert two.actor(1).core.state is State.DISCONNECTING
            holds = False
            receive(*held[0])
            await until(lambda: State.DISCONNECTING not in (two.actor(1).core.state, two.actor(2).core.state))
            assert (await until(lambda: d.received(reading))).failure is None
            await two.read(1)
            await two.read(2)
            assert d.crashes == []

    run(test)


def test_who_retires_leaves_the_agent_to_the_other() -> None:
    async def test() -> None:
        async with parallel_engine("p", 2, serves=True) as ps, engine("d") as d:
            two = Two(d, ps)
            await two.read(1)
            await two.read(2)
            loaded = d.counts().remote_agents
            two.actor(2).tell(Retire())
            await until(lambda: len(d.supervisor._peers) == 1)
            await two.read(1)
            assert two.actor(1).core.state is State.READY
            assert d.counts().remote_agents < loaded, "that of the second rank, which only TP 2 deals with"
            await two.read(2)

    run(test)


class Owner:
    def agent_lost(self, agent: nixl.AgentName, failure: Failure) -> None:
        raise AssertionError("nobody has given it up")


def test_an_agent_that_is_loaded_while_its_last_owner_lets_go_stays_loaded() -> None:
    """Both are handed to NIXL's thread in one turn, so it is loaded, which it was already, and then removed."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            reads, first, second = d.supervisor._reads, Owner(), Owner()
            name = await reads.load_agent(p.port.agent_metadata, first)
            assert name is not None
            loaded: list[nixl.AgentName | None] = []

            async def load() -> None:
                loaded.append(await reads.load_agent(p.port.agent_metadata, second))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(load)
                while not reads._agents._removed:
                    await trio.lowlevel.checkpoint()
                await reads.unload_agent(name, first, None, lambda: None)
            assert loaded == [name]
            assert d.counts().remote_agents == 1
            await reads.unload_agent(name, second, None, lambda: None)
            assert d.counts().remote_agents == 0
            assert reads._agents._removed == {}

    run(test)


def test_a_release_is_sent_before_its_connection_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that needs nothing more gives its place to another one, perhaps in the turn in which it says so."""
    notify = Connections.notify

    def and_retire(self: Connections, number: int, rank: int, message: bytes) -> None:
        notify(self, number, rank, message)
        if message.startswith(b"remote-") and rank == 1:
            self._put(Retire())

    monkeypatch.setattr(Connections, "notify", and_retire)

    async def test() -> None:
        async with parallel_engine("p", 2, serves=True) as ps, engine("d") as d:
            two, reads = Two(d, ps), 8
            for _ in range(reads):
                await two.read(2)
                await until(lambda: not d.supervisor._peers)
            for p in ps:
                await until(lambda p=p: all(p.sent(f"remote-r{number}") for number in range(1, reads + 1)))

    run(test)
