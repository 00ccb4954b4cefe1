"""The processes of a simulated engine: the ranks that run the production actors, and the listener.

`Process` is one life of one engine. Each `Rank` of it is a worker process with a clock, a KV cache, a NIXL agent and
actors of its own; one listener answers the handshakes about all of them. A rank may die alone, and then nothing is
heard of it any more; the rest of its engine goes on until it is killed too.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from typing import Protocol

import trio

from connector.config import ConnectorOptions
from connector.ports.nixl import MemoryRange
from connector.runtime.clock import NS_PER_SECOND
from connector.runtime.context import LocalRank
from connector.runtime.listener import HandshakeListener
from connector.runtime.messages import Command, Outcome, PeerAddress
from connector.runtime.supervisor import Supervisor
from connector.runtime.tracked import Recorder
from connector.wire.handshake import encode_payload
from connector.wire.metadata import describe, encode_agent_metadata
from statemachine import request
from statemachine.failures import Failure
from statemachine.trace import TransitionRecord
from tests.simulation.agenda import Agenda
from tests.simulation.fake_network import FakeNetwork, FakeSideChannel
from tests.simulation.fake_nixl import FakeNixlWorld
from tests.simulation.faults import ActiveFaults
from tests.simulation.model import WORD_BYTES, EngineShape, Model, RankMemory
from tests.simulation.oracles import Oracles

PORT = 5600
RANK_LAG_SECONDS_MAX = 0.0005
"""How much later than the first one another rank may take up a step."""
DRIFT_PPB_MAX = 45_000
"""Two clocks drift apart by at most twice this, which is within what the product allows for."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all engines share."""

    agenda: Agenda
    network: FakeNetwork
    nixl: FakeNixlWorld
    faults: ActiveFaults
    oracles: Oracles
    options: ConnectorOptions
    trace: list[TransitionRecord]
    reads_inline: bool
    model: Model = field(default_factory=Model)
    engines: dict[str, EngineShape] = field(default_factory=dict)
    """Those that are not built the usual way."""


class ProcessClock:
    """The clock of one process: trio's, from another zero, running a little fast or slow; its wall time jumps."""

    def __init__(self, offset_ns: int, drift_ppb: int) -> None:
        self._offset_ns = offset_ns
        self._drift_ppb = drift_ppb
        self.wall_error_seconds = 0.0

    def now_ns(self) -> int:
        true_ns = round(trio.current_time() * NS_PER_SECOND)
        return self._offset_ns + true_ns + true_ns * self._drift_ppb // NS_PER_SECOND

    def true_seconds(self, local_ns: int) -> float:
        """When, in trio's time, this clock shows `local_ns`."""
        return (local_ns - self._offset_ns) / (1 + self._drift_ppb / NS_PER_SECOND) / NS_PER_SECOND

    def ahead_by(self, offset_ns: int) -> ProcessClock:
        """The clock of another process on the same machine: at the same pace, from another zero."""
        return ProcessClock(self._offset_ns + offset_ns, self._drift_ppb)

    def wall(self) -> float:
        return 1.7e9 + trio.current_time() + self.wall_error_seconds


class Variant(enum.Enum):
    """What an engine serves: all that are to work together the same."""

    SAME = "same"
    OTHER_MODEL = "another model"
    OTHER_BLOCKS = "blocks of another length"


class Owner(Protocol):
    """The engine that a process is a life of."""

    name: str

    def hear(self, tp_rank: int, outcome: Outcome) -> None:
        """The connector emitted an outcome on this rank."""


class Rank:
    """One worker process of one life of an engine. Its owner hears the outcomes, and nothing after the death."""

    def __init__(
        self,
        around: Surroundings,
        engine: Owner,
        process: Process,
        tp_rank: int,
        clock: ProcessClock,
        memory: RankMemory,
        chance: random.Random,
    ) -> None:
        self.tp_rank = tp_rank
        self.clock = clock
        self.memory = memory
        self.is_dead = False
        self._around = around
        self._engine = engine
        self._scope = trio.CancelScope()
        name = f"{engine.name}.{tp_rank}"
        ranges = [MemoryRange(memory.address, memory.flat.nbytes)]
        self.port = around.nixl.open(f"{name}.{process.life}", ranges, clock.now_ns, reads_inline=around.reads_inline)
        word_bytes = WORD_BYTES // 2 if process.variant is Variant.OTHER_BLOCKS else WORD_BYTES
        shapes = memory.shapes(word_bytes=word_bytes)
        self._local = LocalRank(
            layout=memory.layout(process.engine_id, shapes),
            shapes=shapes,
            compatibility_hash="another-model" if process.variant is Variant.OTHER_MODEL else "same-model",
        )
        self.supervisor = Supervisor(
            options=around.options,
            local=self._local,
            nixl_port=self.port,
            side_channel=FakeSideChannel(around.network, name),
            clock=clock,
            recorder=Recorder(engine_id=process.engine_id, rank=tp_rank, role="worker", clock=clock, sink=self),
            emit=self._emit,
            log_failure=lambda subject, failure: self._log_failure(subject, failure),
            log_crash=lambda actor, error: around.oracles.crash(engine.name, actor, error),
            jitter=random.Random(chance.getrandbits(64)),
        )
        self._lag_seconds = chance.uniform(0.0, RANK_LAG_SECONDS_MAX) if tp_rank else 0.0

    def payload(self, incarnation: str) -> bytes:
        """What the listener says of this rank."""
        metadata = encode_agent_metadata(describe(self._local.layout, self.port.agent_metadata))
        return encode_payload(self._local.compatibility_hash, metadata, incarnation)

    async def run(self) -> None:
        with self._scope:
            await self.supervisor.run()

    def deliver(self, command: Command) -> None:
        """Hand a command to the actors, as soon as this rank comes to it; commands keep their order."""
        if not self._lag_seconds:
            self.supervisor.deliver(command)
            return

        def deliver() -> None:
            if not self.is_dead:
                self.supervisor.deliver(command)

        self._around.agenda.after(self._lag_seconds, deliver)

    def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self.port.kill()
            self._scope.cancel()

    def blocks_written_to(self) -> set[int]:
        """Blocks that READs may still write into."""
        reads = [read for read in self._around.nixl.reads_in_flight() if read.initiator is self.port]
        return self.memory.blocks_at(to for read in reads for to, _, _ in read.pieces[read.copied :])

    def write(self, record: TransitionRecord) -> None:
        if not self.is_dead:
            self._around.trace.append(record)
            if record.event == request.PeerReady.__name__ and record.to_state == request.State.READING.value:
                self._check_proof(record)

    def _check_proof(self, record: TransitionRecord) -> None:
        """The one look inside an actor: wrong by a clock's error, a proof would be caught by chance only."""
        assert record.peer is not None
        proof = self.supervisor._peers[record.peer]._runs[record.subject].machine.value.proof
        assert proof is not None
        self._around.oracles.check_proof(record.subject, self.clock.true_seconds(proof.proven_until_ns))

    def close(self) -> None:
        """The sink of the trace has nothing to close."""

    def _emit(self, outcome: Outcome) -> None:
        if not self.is_dead:
            self._engine.hear(self.tp_rank, outcome)

    def _log_failure(self, subject: str, failure: Failure) -> None:
        if not self.is_dead:
            self._around.oracles.note_failure(self._engine.name, subject, failure)


class Process:
    """One life of an engine; see the module's docstring.

    Args:
        blocks: of the KV cache of each rank.
        listener_offset_ns: how much the clock of the process that answers handshakes is ahead of that of rank 0.
    """

    def __init__(
        self,
        around: Surroundings,
        engine: Owner,
        engine_id: str,
        life: int,
        chance: random.Random,
        *,
        blocks: int,
        variant: Variant = Variant.SAME,
        listener_offset_ns: int = 0,
    ) -> None:
        self.engine_id = engine_id
        self.life = life
        self.variant = variant
        self.shape = around.engines.get(engine.name, EngineShape())
        self.incarnation = f"{chance.getrandbits(128):032x}"
        self.clock = ProcessClock(chance.randrange(10**15), chance.randint(-DRIFT_PPB_MAX, DRIFT_PPB_MAX))
        self.listener_clock = self.clock.ahead_by(listener_offset_ns)
        self._is_dead = False
        self.has_ended = False
        self._around = around
        self._engine = engine
        self._scope = trio.CancelScope()
        self.ranks: list[Rank] = []
        for tp_rank in range(self.shape.tp_size):
            clock = self.clock.ahead_by(chance.randrange(10**15)) if tp_rank else self.clock
            memory = RankMemory(around.model, self.shape, tp_rank, blocks)
            self.ranks.append(Rank(around, engine, self, tp_rank, clock, memory, chance))
        host = self.address.host
        self.listener = HandshakeListener(
            side_channel=FakeSideChannel(around.network, host),
            host=host,
            port=PORT,
            payloads={(0, rank.tp_rank): rank.payload(self.incarnation) for rank in self.ranks},
            clock=self.listener_clock,
            log_bad_frame=lambda detail: None,
        )

    @property
    def address(self) -> PeerAddress:
        host = f"{self._engine.name}.sim"
        return PeerAddress(engine_id=self.engine_id, host=host, port=PORT, tp_size=self.shape.tp_size)

    async def run(self) -> None:
        """Until `stop` or `kill`."""
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    for rank in self.ranks:
                        nursery.start_soon(rank.run)
                    nursery.start_soon(self.listener.run)
            except Exception as error:
                self._around.oracles.crash(self._engine.name, "the supervisor or the listener", error)
        self.has_ended = True

    def deliver(self, command: Command) -> None:
        """The scheduler tells every rank."""
        for rank in self.ranks:
            rank.deliver(command)

    def stop(self) -> None:
        for rank in self.ranks:
            rank.supervisor.stop()
        self.listener.stop()

    def has_died(self) -> bool:
        return self._is_dead

    @property
    def has_lost_a_rank(self) -> bool:
        return any(rank.is_dead for rank in self.ranks)

    def kill(self) -> None:
        self._is_dead = True
        for rank in self.ranks:
            rank.kill()
        self._scope.cancel()

    def blocks_written_to(self) -> set[int]:
        """Blocks that READs of any rank may still write into."""
        return set().union(*(rank.blocks_written_to() for rank in self.ranks))
