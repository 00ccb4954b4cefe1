"""The processes of a simulated engine: the ranks that run the production actors, and the listener.

`Process` is one life of one engine. Each `Rank` of it is a worker process on a machine of its own, with a clock, a KV
cache, a NIXL agent, a control socket and actors; one listener answers the handshakes about all of them. A rank may die
alone, and then nothing is heard of it any more; the rest of its engine goes on until it is killed too.
"""

from __future__ import annotations

import enum
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import trio

from connector.clock import NS_PER_SECOND, Clock, to_ns
from connector.config import ConnectorOptions
from connector.layout.local import LocalRank
from connector.observe.event_log import EventLog
from connector.observe.flight_recorder import BAD_ENDS_KEPT, STEPS_KEPT, FlightRecorder
from connector.ports.nixl import MemoryRange, PortCounts
from connector.protocol import (
    AfterSteps,
    Command,
    LeaseGranted,
    PeerAddress,
    StartPull,
    SumsWanted,
    WorkerEvent,
    WorkerStopped,
)
from connector.runtime.context import WorkerContext
from connector.runtime.draining import EngineDraining, OwnWorker
from connector.runtime.figures import Figures
from connector.runtime.listener import HandshakeListener
from connector.runtime.recorder import Recorder
from connector.runtime.supervisor import Supervisor
from connector.wire import control
from connector.wire.administration import Leave
from connector.wire.bounded import DecodeFailed
from connector.wire.identity import KvIdentity
from connector.wire.inspection import EngineFacts
from connector.worker.step_fence import StepFence
from statemachine.draining import State
from statemachine.failures import Failure
from statemachine.granting import LentCounts
from statemachine.trace import TransitionRecord
from tests.rig import sums
from tests.rig.facts import LEAVE_SECRET, payload_of
from tests.simulation.active_faults import ActiveFaults
from tests.simulation.agenda import Agenda
from tests.simulation.fake_network import FakeNetwork, FakeSideChannel
from tests.simulation.fake_nixl import FakeNixlWorld
from tests.simulation.faults import QUARANTINE_SHARE, Kind
from tests.simulation.model import WORD_BYTES, RankMemory
from tests.simulation.names import names_drawn_by
from tests.simulation.oracles import Oracles
from tests.simulation.shapes import LATE_DEVICE_SECONDS_MAX, LATE_DEVICES, RANK_LAG_SECONDS_MAX, EngineShape, Model

NOTHING_LEFT = PortCounts(0, 0, 0, 1)
"""What the port of a rank has that has stopped: its own memory."""
PORT = 5600
"""Of all side channels."""
CONTROL_PORT = 5601
"""Of the control sockets of engines that have the same ports in all their lives."""
GRACE_LEASES = 2
"""How many lease times a grace period lasts."""
DESCRIPTORS_AHEAD_MAX = 8
"""Few, because requests are small here: READs shall have to wait for their turn."""

LATE_WRITE_SHARE = 0.9
"""Of the time for which a device is late: when it writes what its steps write last."""

DRIFT_PPB_MAX = 500_000
"""How fast or slow the crystal of a machine may run."""
SLEW_PPB_MAX = 83_333_000
"""What chrony adds to it at most; `DRIFT_DIVISOR` of the core's claims allows for both, on two machines."""


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
    moments: list[float] = field(default_factory=list)
    """When each record of `trace` was written, in seconds of virtual time."""
    steps_kept: int = STEPS_KEPT
    """By each flight recorder."""
    all_drain: bool = False
    """Whether any engine may be told to end, at any time; otherwise those of which the plan says so."""
    small_quarantines: frozenset[str] = frozenset()
    """Engines whose quarantine few blocks fill."""
    known_peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """That option, of engines that have it."""

    def options_of(self, engine: str) -> ConnectorOptions:
        options = self.options
        if engine in self.small_quarantines:
            options = msgspec.structs.replace(options, quarantine_limit=QUARANTINE_SHARE)
        if engine in self.known_peers:
            options = msgspec.structs.replace(options, known_peers=self.known_peers[engine])
        return options


class Machine:
    """Time on one machine: trio's, a little fast or slow, and at another rate after each `slew`; its wall time jumps.

    `drift_ppb`: of its crystal.
    """

    def __init__(self, drift_ppb: int) -> None:
        self._drift_ppb = drift_ppb
        self._rate_ppb = drift_ppb
        # When the present rate began, in true and in local time.
        self._since_ns = 0
        self._local_since_ns = 0
        self.wall_error_seconds = 0.0

    def now_ns(self) -> int:
        elapsed_ns = round(trio.current_time() * NS_PER_SECOND) - self._since_ns
        return self._local_since_ns + elapsed_ns + elapsed_ns * self._rate_ppb // NS_PER_SECOND

    def slew(self, rate_ppb: int) -> None:
        """From now on run this much faster or slower than the crystal does."""
        self._local_since_ns, self._since_ns = self.now_ns(), round(trio.current_time() * NS_PER_SECOND)
        self._rate_ppb = self._drift_ppb + rate_ppb


class ProcessClock:
    """The clock of one process: that of its machine, from another zero."""

    def __init__(self, machine: Machine, offset_ns: int) -> None:
        self.machine = machine
        self._offset_ns = offset_ns

    def now_ns(self) -> int:
        return self._offset_ns + self.machine.now_ns()

    def ahead_by(self, offset_ns: int) -> ProcessClock:
        """The clock of another process on the same machine."""
        return ProcessClock(self.machine, self._offset_ns + offset_ns)

    def wall(self) -> float:
        return 1.7e9 + trio.current_time() + self.machine.wall_error_seconds


class SilentEventLog(EventLog):
    """Takes its lines where nobody reads them but `said`, which is told the cause and the text of each."""

    def __init__(
        self,
        engine_id: str,
        rank: int,
        clock: Clock,
        log_failure: Callable[[str, Failure], None],
        said: Callable[[str, str], None],
    ) -> None:
        super().__init__(
            engine_id, rank, clock=clock, log_failure=log_failure, now=lambda: clock.now_ns() / NS_PER_SECOND
        )
        self._said = said

    def write(self, cause: str, text: str, level: int = logging.INFO) -> None:
        self._said(cause, text)


SUMMED_AFTER_SECONDS = 0.002
"""With the engine's next step."""


class Variant(enum.Enum):
    """What an engine serves: all that are to work together the same."""

    SAME = "same"
    OTHER_MODEL = "another model"
    OTHER_WEIGHTS = "other weights under the same name"
    OTHER_BLOCKS = "blocks of another length"


def _identity(variant: Variant) -> KvIdentity:
    if variant is Variant.OTHER_MODEL:
        factors = {"model": "another model"}  # an engine that cannot say what its weights are
    else:
        factors = {"model": "model", "weights": "others" if variant is Variant.OTHER_WEIGHTS else "the same"}
    return KvIdentity(factors=factors, layers={}, group_tokens=())


class Owner(Protocol):
    """The engine that a process is a life of."""

    name: str

    @property
    def lent_prefills(self) -> int:
        """Those that are lent, or were accepted and will be."""
        ...

    def hear(self, tp_rank: int, event: WorkerEvent) -> None:
        """The connector emitted a worker event on this rank."""


class SimulatedEngine(Owner, Protocol):
    """An engine of a cluster, which lives several times."""

    process: Process
    """Its life of now."""

    def start(self, engine_id: str, variant: Variant = ...) -> None:
        """A new life, with an empty cache. It has to be `run`."""

    def crash(self) -> None:
        """The process is gone, and everybody who waits for it is told."""

    async def run(self) -> None:
        """Until the process stops or dies."""


class _StepEnd(NamedTuple):
    """Of a device, in virtual time."""

    at_seconds: float

    def query(self) -> bool:
        return trio.current_time() >= self.at_seconds

    def synchronize(self) -> None:
        raise AssertionError("simulated time does not pass in a call")


class Rank:
    """One worker process of one life of an engine. Its owner hears the worker events, and nothing after the death."""

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
        self._leaves_ns: int | None = None
        self.has_stopped = False
        """It has said that it can serve no more."""
        self.has_ended = trio.Event()
        self._around = around
        self._engine = engine
        self._scope = trio.CancelScope()
        name = f"{engine.name}.{tp_rank}"
        ranges = [MemoryRange(memory.address, memory.flat.nbytes)]
        keeps_ports = around.faults.is_planned(Kind.PORTS_KEPT, engine.name)
        self.port = around.nixl.open(
            f"{name}.{process.life}",
            ranges,
            clock.now_ns,
            reads_inline=around.reads_inline,
            place=name if keeps_ports else None,
        )
        word_bytes = WORD_BYTES // 2 if process.variant is Variant.OTHER_BLOCKS else WORD_BYTES
        shapes = memory.shapes(word_bytes=word_bytes)
        side_channel = FakeSideChannel(around.network, name)
        control_port = CONTROL_PORT if keeps_ports else 0
        self.control = side_channel.listen(name, control_port, frame_bytes_max=control.REQUEST_BYTES_MAX)
        self.control.on_arrival = self._overhear
        self.host = name
        self._tp_size = process.shape.tp_size
        self._owner = f"{engine.name}.{process.life}"
        self._local = LocalRank(
            layout=memory.layout(process.engine_id, shapes),
            shapes=shapes,
            compatibility_hash="same",
            identity=_identity(process.variant),
        )
        self.problems_said: Counter[str] = Counter()
        """How often it was said that a known peer cannot be met, by its place."""
        self.figures = Figures()
        context = WorkerContext(
            options=around.options_of(engine.name),
            local=self._local,
            draw_name=names_drawn_by(f"{self._owner} {tp_rank}"),
            nixl_port=self.port,
            side_channel=side_channel,
            clock=clock,
            recorder=Recorder(
                engine_id=process.engine_id,
                rank=tp_rank,
                role="kv_both",
                clock=clock,
                sink=self,
                figures=self.figures,
                flight=FlightRecorder(around.steps_kept, min(around.steps_kept, BAD_ENDS_KEPT)),
            ),
            figures=self.figures,
            emit=self._emit,
            log_failure=lambda subject, failure: self._log_failure(subject, failure),
            log_crash=lambda actor, error: around.oracles.crash(engine.name, actor, error),
            event_log=SilentEventLog(process.engine_id, tp_rank, clock, self._log_failure, self._note_line),
        )
        self.supervisor = Supervisor(
            context,
            control=self.control,
            leave_secret=LEAVE_SECRET,
            deliver_posted=lambda: None,
            facts=EngineFacts(),
            descriptors_ahead_max=DESCRIPTORS_AHEAD_MAX,
        )
        self._lag_seconds = chance.uniform(0.0, RANK_LAG_SECONDS_MAX) if tp_rank else 0.0
        # From a copy, which leaves what is drawn after this as it was without late devices.
        device = random.Random()
        device.setstate(chance.getstate())
        self._late_seconds = device.uniform(0.0, LATE_DEVICE_SECONDS_MAX) if device.random() < LATE_DEVICES else 0.0
        """For so long its device writes on into blocks that the engine has given to their next owner already."""
        self._fence = StepFence(lambda: _StepEnd(trio.current_time() + self._late_seconds))

    def payload(self, life: str) -> bytes:
        """What the listener says of this rank."""
        return payload_of(
            self._local.layout,
            self.port.agent_metadata,
            compatibility_hash=self._local.compatibility_hash,
            identity=self._local.identity,
            verify=self._around.options.verify,
            life=life,
            control_host=self.host,
            control_port=self.control.port,
        )

    async def run(self) -> None:
        try:
            with self._scope:
                await self.supervisor.run()
        finally:
            self.has_ended.set()

    def deliver(self, command: Command) -> None:
        """Hand a command to the actors, as soon as this rank comes to it; commands keep their order."""
        if not self._lag_seconds:
            self.supervisor.deliver(self._with_steps(command))
            return

        def deliver() -> None:
            if not self.is_dead:
                self.supervisor.deliver(self._with_steps(command))

        self._around.agenda.after(self._lag_seconds, deliver)

    def _with_steps(self, command: Command) -> Command | AfterSteps:
        if not self._late_seconds or not isinstance(command, StartPull):
            return command
        # The step that used the blocks last has been given to the device, and comes to them in time before its end.
        self._fence.note_step()
        self._around.agenda.after(LATE_WRITE_SHARE * self._late_seconds, lambda: self._write_late(command))
        return self._fence.with_steps(command)

    def _write_late(self, command: StartPull) -> None:
        # Not when the actors have stopped: the prompt may be computed here then, and a device does that after this.
        if not self.is_dead and self.supervisor._stopped is None:
            self.memory.forget(command.local_block_ids)

    @property
    def has_given_memory_back(self) -> bool:
        """It has ended, and nothing of it can read or write there."""
        return self.is_dead or (self.has_ended.is_set() and self.port.counts_at_close == NOTHING_LEFT)

    def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self.port.kill()
            self._around.network.kill(self.host)
            self._scope.cancel()

    def blocks_written_to(self) -> set[int]:
        """Blocks that READs may still write into."""
        reads = [read for read in self._around.nixl.reads_in_flight() if read.initiator is self.port]
        return self.memory.blocks_at(to for read in reads for to, _, _ in read.pieces[read.copied :])

    def write(self, *records: TransitionRecord) -> None:
        if not self.is_dead:
            for record in records:
                self._around.trace.append(record)
                self._around.moments.append(trio.current_time())

    def close(self) -> None:
        """The sink of the trace has nothing to close."""

    def _emit(self, event: WorkerEvent) -> None:
        self.has_stopped |= isinstance(event, WorkerStopped)
        if isinstance(event, SumsWanted):
            self._around.agenda.after(SUMMED_AFTER_SECONDS, lambda: self._find_sums(event))
            return
        if not self.is_dead:
            self._engine.hear(self.tp_rank, event)

    def _find_sums(self, wanted: SumsWanted) -> None:
        """The engine thread does it with its next step."""
        if not self.is_dead:
            self.supervisor.deliver(sums.found(wanted))

    def grant(self, granted: LeaseGranted, block_ids: Sequence[list[int]]) -> None:
        """Lend the blocks of `block_ids`, by cache group, with the checksums that the option asks for."""
        self.deliver(sums.with_sums(granted, self._local.layout, block_ids, self._around.options.verify))

    def _overhear(self, frames: tuple[bytes, ...]) -> None:
        """A message has arrived at the control socket: whether a lease may end depends on what P was told."""
        try:
            message = control.decode_request(frames)
        except DecodeFailed:
            return
        oracles, now_ns = self._around.oracles, self.clock.now_ns()
        if isinstance(message, Leave) and self._leaves_ns is None:
            self._leaves_ns = now_ns + message.grace_ns
        if not isinstance(message, control.Hold | control.Release):
            return  # it changes no lease
        for lease in message.leases:
            lent = oracles.lent(self._owner, lease, self.tp_rank)
            if lent is None:
                continue
            if isinstance(message, control.Hold):
                oracles.hold(lent, message, now_ns, self._leaves_ns)
            else:
                oracles.release(lent, message)

    def _note_line(self, cause: str, line: str) -> None:
        """A line about a known peer begins with "the engine at", and its place."""
        if cause == "known peers":
            self.problems_said[line.split()[3]] += 1

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
        self.life_name = f"{chance.getrandbits(128):032x}"
        self.clock = _new_clock(chance)
        self.listener_clock = self.clock.ahead_by(listener_offset_ns)
        self._is_dead = False
        self.is_stopping = False  # in an orderly way
        self.is_asleep = False
        """Its ranks have ended, or are about to; others will take their places."""
        self.has_ended = False
        self.refuses_because: str | None = None
        """A worker has said that it can serve no more."""
        self._around = around
        self._engine = engine
        self._scope = trio.CancelScope()
        self._chance = chance
        self._nursery: trio.Nursery
        self.ranks: list[Rank] = []
        for tp_rank in range(self.shape.tp_size):
            clock = _new_clock(chance) if tp_rank else self.clock
            memory = RankMemory(around.model, self.shape, tp_rank, blocks)
            self.ranks.append(Rank(around, engine, self, tp_rank, clock, memory, chance))
        host = self.address.host
        side_channel = FakeSideChannel(around.network, host)
        self.draining: EngineDraining | None = None
        """Of an engine that will be told to end."""
        if around.all_drain or around.faults.is_planned(Kind.DRAIN, engine.name):
            self.draining = EngineDraining(
                side_channel=side_channel,
                workers=self._workers(),
                clock=self.listener_clock,
                grace_ns=to_ns(GRACE_LEASES * around.options.kv_lease_duration),
                lease_ns=to_ns(around.options.kv_lease_duration),
                count=lambda: LentCounts(engine.lent_prefills, 0),
                on_change=lambda value: None,
                say=lambda line: None,
                log_crash=lambda task, error: around.oracles.crash(engine.name, task, error),
            )
        self.listener = HandshakeListener(
            side_channel=side_channel,
            host=host,
            port=PORT,
            payloads=self._payloads(),
            perf_counter=lambda: self.listener_clock.now_ns() / NS_PER_SECOND,
            log_bad_frame=lambda detail: None,
            log_cut_off=lambda address, why: None,
            log_crash=lambda task, error: around.oracles.crash(engine.name, task, error),
            draining=self.draining,
        )

    def _workers(self) -> list[OwnWorker]:
        return [OwnWorker(rank.host, rank.control.port, None, LEAVE_SECRET) for rank in self.ranks]

    def _payloads(self) -> dict[tuple[int, int], bytes]:
        return {(0, rank.tp_rank): rank.payload(self.life_name) for rank in self.ranks}

    @property
    def place(self) -> str:
        """Of its side channel, as an operator names it."""
        return f"{self.address.host}:{PORT}"

    @property
    def accepts_prefills(self) -> bool:
        """Whether those that come now will be lent."""
        return self.draining is None or self.draining.value.state is State.SERVING

    @property
    def grants(self) -> bool:
        """Whether those that were accepted are lent when they finish now."""
        if self.accepts_prefills or self.draining is None:
            return True
        return self.listener_clock.now_ns() < self.draining.value.stops_granting_ns

    @property
    def address(self) -> PeerAddress:
        host = f"{self._engine.name}.sim"
        return PeerAddress(engine_id=self.engine_id, host=host, port=PORT, tp_size=self.shape.tp_size)

    async def run(self) -> None:
        """Until `stop` or `kill`."""
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
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
        self.is_stopping = True
        for rank in self.ranks:
            rank.supervisor.stop()
        self.listener.stop()

    async def fall_asleep(self, timeout_seconds: float) -> None:
        """Stop the ranks, and wait until they have ended, for so long at most. The listener goes on."""
        self.is_asleep = True
        for rank in self.ranks:
            rank.supervisor.stop()
        with trio.move_on_after(timeout_seconds):
            for rank in self.ranks:
                await rank.has_ended.wait()

    def begin_anew(self, life: int) -> None:
        """For peers it is another life from now on."""
        self.life = life
        self.life_name = f"{self._chance.getrandbits(128):032x}"

    def replace(self, rank: Rank) -> None:
        """In its place there is one with the same memory and the same clock."""
        new = Rank(self._around, self._engine, self, rank.tp_rank, rank.clock, rank.memory, self._chance)
        self.ranks[rank.tp_rank] = new
        self._nursery.start_soon(new.run)

    def serve_anew(self) -> None:
        """All ranks have been replaced."""
        self.is_asleep = False
        self.listener.answer_with(self._payloads())
        self.listener.tell_workers(self._workers())

    def stop_serving(self, reason: str) -> None:
        """A worker can serve KV no more."""
        if self.refuses_because is None:
            self.refuses_because = reason
            self.listener.stop_serving(reason)

    def has_died(self) -> bool:
        return self._is_dead

    @property
    def has_lost_a_rank(self) -> bool:
        return any(rank.is_dead for rank in self.ranks)

    def kill(self) -> None:
        self._is_dead = True
        for rank in self.ranks:
            rank.kill()
        self._around.network.kill(self.address.host)
        self._scope.cancel()

    def blocks_written_to(self) -> set[int]:
        """Blocks that READs of any rank may still write into."""
        return set().union(*(rank.blocks_written_to() for rank in self.ranks))


def _new_clock(chance: random.Random) -> ProcessClock:
    """On a machine of its own."""
    return ProcessClock(Machine(chance.randint(-DRIFT_PPB_MAX, DRIFT_PPB_MAX)), chance.randrange(10**15))
