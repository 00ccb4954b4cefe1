"""Engines for a run in which anything may raise: what vLLM would call of theirs is the production code, and so is all
behind it but the ports.

The thread of the actors is a task here (`HostedThread`): the production `ActorThread` with its mailbox and its way of
dying, in a trio run that it shares. What is played is the part of vLLM: an engine steps, hands out what the scheduler
has decided, and takes what the connector says.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import trio
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from connector.clock import NS_PER_SECOND, to_ns
from connector.config import ConnectorOptions
from connector.layout.geometry import RankLayout
from connector.layout.local import LocalRank
from connector.observe.event_log import EventLog, FailureLog
from connector.observe.log import get_logger, log_crash
from connector.observe.trace_log import JsonLinesSink
from connector.ports.nixl import MemoryRange
from connector.protocol import Command, PeerAddress
from connector.runtime.context import WorkerContext
from connector.runtime.draining import EngineDraining, OwnWorker
from connector.runtime.listener import HandshakeListener
from connector.runtime.pace import PIECE_NS
from connector.runtime.recorder import Recorder
from connector.runtime.supervisor import Supervisor
from connector.runtime.thread import ActorMain, ActorThread
from connector.step_metadata import StepMetadata, WorkerReport
from connector.wire.control import REQUEST_BYTES_MAX
from connector.wire.inspection import EngineFacts
from connector.worker.block_sums import BlockSums
from connector.worker.cache_memory import CacheMemory
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.finishing import Finishing, run_at_once
from connector.worker.landing import BlockPermuter
from connector.worker.ledger import TransferLedger
from statemachine.draining import State
from statemachine.granting import LentCounts
from tests.rig.facts import LEAVE_SECRET, NO_IDENTITY, payload_of
from tests.rig.given_actors import give_actors
from tests.rig.layouts import attention_rank, attention_shapes
from tests.simulation.crashes.points import OWNER, Door, Points, guarded
from tests.simulation.fake_network import FakeNetwork, FakeSideChannel
from tests.simulation.fake_nixl import FakeNixlWorld
from tests.simulation.names import names_drawn_by
from tests.simulation.process import Machine, ProcessClock

BLOCKS = 64
TOKENS = 4
HEADS = 2
HEAD_BYTES = 16
SHAPES = attention_shapes(layers=1, heads=HEADS, head_bytes=HEAD_BYTES)
BLOCK_BYTES = TOKENS * HEADS * HEAD_BYTES
"""Of all ranks of an engine: first comes what the first rank has, which is the first head where there are two."""
PORT = 5600
GRACE_SECONDS = 6.0
"""How long an engine that drains waits for what it has lent."""

SIDE_CHANNEL_KINDS = {"connect": "requester", "open_link": "link", "listen": "listener"}


def as_owner(owner: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Tasks that are begun by a call of it are the owner's: it may be called from outside of all tasks."""

    def call(*arguments: Any) -> Any:
        token = OWNER.set(owner)
        try:
            return function(*arguments)
        finally:
            OWNER.reset(token)

    return call


class HostedThread(ActorThread[Any]):
    """An `ActorThread` that is a task of a run that there is already."""

    def __init__(
        self,
        owner: str,
        make_main: Callable[[], Awaitable[ActorMain[Any]]],
        on_error: Callable[[BaseException], None],
        on_wake_up: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        super().__init__(owner, make_main, on_error, on_wake_up)
        self.has_ended = False

    async def host(self, task_status: trio.TaskStatus[None]) -> None:
        """As `_run` does, up to the end of the thread. Its start is not at stake here."""
        OWNER.set(self._name)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._main_task)
                while not self._started.is_set():
                    await trio.sleep(0)
                task_status.started()
        except Exception as error:
            self.death = error
            self._on_error(error)
        else:
            if not self._ended:
                self.death = RuntimeError("the actors ended without being asked to")
                self._on_error(self.death)
        finally:
            self.has_ended = True

    def _deliver(self, command: Any) -> None:
        if not self.has_ended:  # a thread that has ended hears nothing
            as_owner(self._name, super()._deliver)(command)

    def stop(self, timeout_seconds: float) -> bool:
        """Nobody can wait for it here; the run does."""
        self._ended = True
        if self._main is not None and not self.has_ended:
            self._main.stop()
        return True


class NoFiles:
    """Where the lines of a trace go."""

    path = "nowhere"

    def write(self, line: bytes) -> int:
        return len(line)

    def flush(self) -> None:
        return

    def close(self) -> None:
        return


class HostedWorker(ConnectorWorker):
    """The production worker side, without the doors that `register_kv_caches` would open."""

    def __init__(
        self,
        options: ConnectorOptions,
        clock: ProcessClock,
        memory: npt.NDArray[np.uint8],
        layout: RankLayout,
        points: Points,
        owner: str,
    ) -> None:
        config: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
            observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        )
        super().__init__(config, config, options)
        caches = [torch.from_numpy(memory)]
        self._clock = clock
        self.ledger = TransferLedger(clock, options.kv_lease_duration)
        self.figures_of_actors = self._figures
        self._finishing = Finishing(run_at_once, BlockPermuter({}), CacheMemory(caches))
        if points.armed:
            raise AssertionError("a start is no point")
        self._figures = Door(points, owner, "figures", self._figures)  # type: ignore[assignment]
        self.ledger._stats = Door(points, owner, "figures", self.ledger._stats)  # type: ignore[assignment]
        if options.verify != "off":
            self._block_sums = Door(points, owner, "device", BlockSums(caches))  # type: ignore[assignment]
            self._layout = layout


@dataclass
class Heard:
    """What an engine has been told, and what has come out of it."""

    stopped: str | None = None
    raised: list[BaseException] = field(default_factory=list)
    """Out of methods that vLLM calls."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What an engine is.

    Attributes:
        ranks: one, or two that have a head each.
        is_builtin: its handshake says what a built-in engine's does; it still understands what is sent to one.
        has_points: False: it meets no faults.
        looks_at_files: its listener's thread looks at files of keys now and then.
        is_busy: what it computes takes its time, so that it is computed in pieces.
    """

    ranks: int = 1
    is_builtin: bool = False
    has_points: bool = True
    looks_at_files: bool = False
    is_busy: bool = False


SHAPE = Shape()


class Rank:
    """One worker process of an engine."""

    def __init__(
        self,
        points: Points,
        world: FakeNixlWorld,
        network: FakeNetwork,
        name: str,
        number: int,
        shape: Shape,
        options: ConnectorOptions,
        clock: ProcessClock,
    ) -> None:
        owner = f"{name}, rank {number}" if number else name
        self.host = f"{name}.{number}"
        self.memory = np.zeros((BLOCKS, BLOCK_BYTES // shape.ranks), np.uint8)
        address, length = self.memory.ctypes.data, self.memory.nbytes
        self.port = world.open(self.host, [MemoryRange(address, length)], clock.now_ns)
        self.layout = layout = attention_rank(
            name, SHAPES, address=address, blocks=BLOCKS, tokens=TOKENS, tp_rank=number, tp_size=shape.ranks
        )
        local = LocalRank(layout=layout, shapes=SHAPES, compatibility_hash="same", identity=NO_IDENTITY)
        channel = FakeSideChannel(network, self.host)
        self.control = channel.listen(self.host, 0, frame_bytes_max=REQUEST_BYTES_MAX)
        self.worker = worker = HostedWorker(options, clock, self.memory, layout, points, owner)
        worker._log_failure = log_failure = FailureLog(name, number)

        async def make_supervisor() -> Supervisor:
            context = WorkerContext(
                options=options,
                local=local,
                draw_name=names_drawn_by(owner),
                nixl_port=_NixlDoor(points, owner, "nixl", self.port),
                side_channel=Door(points, owner, "side channel", channel, SIDE_CHANNEL_KINDS),
                clock=clock,
                recorder=Recorder(
                    engine_id=name,
                    rank=number,
                    role="kv_both",
                    clock=clock,
                    sink=JsonLinesSink(Door(points, owner, "trace file", NoFiles())),  # type: ignore[arg-type]
                    figures=_Figures(points, owner, worker),  # type: ignore[arg-type]
                ),
                figures=worker.figures_of_actors,
                emit=worker._emit,
                log_failure=log_failure,
                log_crash=log_crash,
                event_log=EventLog(name, number, clock=clock, log_failure=log_failure),
            )
            supervisor = Supervisor(
                context,
                control=Door(points, owner, "listener", self.control),
                leave_secret=LEAVE_SECRET,
                deliver_posted=lambda: self.thread.deliver_posted(),
                facts=EngineFacts(),
            )
            if shape.is_busy:
                supervisor._context.pace._clock = _BusyClock(clock)
            return supervisor

        self.thread = HostedThread(
            owner,
            make_supervisor,
            worker._note_death,
            guarded(points, owner, "figures", "note_wake_up", worker.figures_of_actors.note_wake_up),
        )
        give_actors(worker, self.thread)

    def payload(self, name: str, shape: Shape, verify: str) -> bytes:
        """What the listener says of it."""
        payload = payload_of(
            self.layout,
            self.port.agent_metadata,
            compatibility_hash="same",
            life=name.encode().hex().zfill(32),
            control_host=self.host,
            control_port=self.control.port,
            verify=verify,
        )
        if not shape.is_builtin:
            return payload
        said = msgspec.msgpack.decode(payload)
        del said["actor"]
        return msgspec.msgpack.encode(said)


class Engine:
    """One engine: its worker processes, and a listener for handshakes.

    Args:
        hear: called with the number of a rank, and its results and report of a step.
        count_lent: how many prefills the scheduler lends.
    """

    def __init__(
        self,
        points: Points,
        world: FakeNixlWorld,
        network: FakeNetwork,
        name: str,
        options: ConnectorOptions,
        hear: Callable[[int, KVConnectorTransferResults, WorkerReport | None], None],
        shape: Shape = SHAPE,
        count_lent: Callable[[], int] = lambda: 0,
    ) -> None:
        self.name = name
        self.shape = shape
        self.heard = Heard()
        self.commands: list[Command] = []
        self._hear = hear
        self._network = network
        self.is_killed = False
        self.clock = ProcessClock(Machine(0), zlib.crc32(name.encode()) % 7)
        self.ranks = [
            Rank(points, world, network, name, number, shape, options, self.clock) for number in range(shape.ranks)
        ]
        self.host = f"{name}.host"
        owner = f"{name} listener"
        channel = FakeSideChannel(network, self.host)
        self.draining = EngineDraining(
            side_channel=Door(points, owner, "side channel", channel, SIDE_CHANNEL_KINDS),
            workers=[OwnWorker(rank.host, rank.control.port, None, LEAVE_SECRET) for rank in self.ranks],
            clock=self.clock,
            grace_ns=to_ns(GRACE_SECONDS),
            lease_ns=to_ns(options.kv_lease_duration),
            count=guarded(points, owner, "scheduler", "count", lambda: LentCounts(count_lent(), 0)),
            on_change=guarded(points, owner, "scheduler", "on_change", lambda value: None),
            say=lambda line: get_logger().warning("%s", line),
            log_crash=log_crash,
        )
        look_again = guarded(points, owner, "files of keys", "look_again", lambda: None)

        async def make_listener() -> HandshakeListener:
            return HandshakeListener(
                side_channel=Door(points, owner, "side channel", channel, SIDE_CHANNEL_KINDS),
                host=self.host,
                port=PORT,
                payloads={
                    (0, number): rank.payload(name, shape, options.verify) for number, rank in enumerate(self.ranks)
                },
                perf_counter=lambda: self.clock.now_ns() / NS_PER_SECOND,
                log_bad_frame=lambda detail: None,
                log_cut_off=lambda address, why: None,
                log_crash=log_crash,
                look_again=look_again if shape.looks_at_files else None,
                draining=self.draining,
            )

        self.listener = HostedThread(owner, make_listener, lambda error: log_crash("listener", error))

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(engine_id=self.name, host=self.host, port=PORT, tp_size=self.shape.ranks)

    @property
    def threads(self) -> list[HostedThread]:
        return [*(rank.thread for rank in self.ranks), self.listener]

    @property
    def has_died(self) -> bool:
        """One of its threads has."""
        return any(thread.is_dead for thread in self.threads)

    @property
    def lends(self) -> bool:
        """Whether a prefill that is finished now is lent."""
        return self.heard.stopped is None and not self.listener.is_dead and self.draining.value.state is State.SERVING

    @property
    def content(self) -> npt.NDArray[np.uint8]:
        """Of all blocks, shape [blocks, bytes]: that of all ranks, side by side."""
        return np.concatenate([rank.memory for rank in self.ranks], axis=1)

    def step(self) -> None:
        """What vLLM calls with each step, of each rank."""
        commands, self.commands = self.commands, []
        for number, rank in enumerate(self.ranks):
            worker = rank.worker
            try:
                worker.start_load_kv(StepMetadata(list(commands)))
                results = worker.get_transfer_results()
                worker.take_stats()
                report = worker.take_report()
            except Exception as error:
                self.heard.raised.append(error)
                continue
            if report is not None and report.stopped is not None:
                self.heard.stopped = report.stopped
            self._hear(number, results, report)

    def kill(self) -> None:
        """Its machine is gone."""
        self.is_killed = True
        for rank in self.ranks:
            rank.port.kill()
            self._network.kill(rank.host)
        self._network.kill(self.host)

    def shut_down(self) -> None:
        for rank in self.ranks:
            try:
                rank.worker.shutdown()
            except Exception as error:
                self.heard.raised.append(error)
        self.listener.stop(0.0)


class _BusyClock:
    """By which a computation takes its time: it has to be made in pieces."""

    def __init__(self, clock: ProcessClock) -> None:
        self._clock = clock
        self._read = 0

    def now_ns(self) -> int:
        self._read += 1
        return self._clock.now_ns() + self._read * PIECE_NS

    def wall(self) -> float:
        return self._clock.wall()


class _NixlDoor(Door):
    """What the port tells is told to its owner."""

    def set_event_callback(self, on_event: Callable[..., None]) -> None:
        self._behind.set_event_callback(as_owner(self._owner, on_event))


class _Figures:
    """What the recorder is given to count with: each transition is a point."""

    def __init__(self, points: Points, owner: str, worker: HostedWorker) -> None:
        self._points, self._owner, self._worker = points, owner, worker

    def count(self, steps: list[Any]) -> None:
        for step in steps:
            self._points.call(self._owner, "figures", "transition")
            self._worker.figures_of_actors.count([step])
