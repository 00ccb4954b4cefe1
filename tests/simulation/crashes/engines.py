"""Engines for a run in which anything may raise: what vLLM would call of theirs is the production code, and so is all
behind it but the ports.

The thread of the actors is a task here (`HostedThread`): the production `ActorThread` with its mailbox and its way of
dying, in a trio run that it shares. What is played is the part of vLLM: an engine steps, hands out what the scheduler
has decided, and takes what the connector says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trio

from connector.config import ConnectorOptions
from connector.layout.local import LocalRank
from connector.observe.log import EventLog, FailureLog, log_crash
from connector.observe.trace_log import JsonLinesSink
from connector.ports.nixl import MemoryRange
from connector.protocol import Command, PeerAddress
from connector.runtime.listener import HandshakeListener
from connector.runtime.recorder import Recorder
from connector.runtime.supervisor import Supervisor
from connector.runtime.thread import ActorMain, ActorThread
from connector.step_metadata import StepMetadata, WorkerReport
from connector.wire.control import MESSAGE_BYTES_MAX
from connector.worker.cache_memory import CacheMemory
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.finishing import Finishing, run_at_once
from connector.worker.landing import LandedBlocks
from connector.worker.ledger import TransferLedger
from tests.rig.facts import payload_of
from tests.rig.layouts import attention_rank, attention_shapes
from tests.simulation.crashes.points import OWNER, Door, Points, guarded
from tests.simulation.fake_network import FakeNetwork, FakeSideChannel
from tests.simulation.fake_nixl import FakeNixlWorld
from tests.simulation.process import Machine, ProcessClock

BLOCKS = 64
TOKENS = 4
HEADS = 2
HEAD_BYTES = 16
SHAPES = attention_shapes(layers=1, heads=HEADS, head_bytes=HEAD_BYTES)
BLOCK_BYTES = TOKENS * HEADS * HEAD_BYTES
PORT = 5600

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

    def __init__(self, options: ConnectorOptions, clock: ProcessClock, memory: Any, points: Points, owner: str) -> None:
        config: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
            observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        )
        super().__init__(config, config, options)
        self._clock = clock  # type: ignore[assignment]
        self.ledger = TransferLedger(clock, options.kv_lease_duration)
        self.figures_of_actors = self._figures
        self._finishing = Finishing(run_at_once, LandedBlocks({}), CacheMemory([torch.from_numpy(memory)]))
        if points.armed:
            raise AssertionError("a start is no point")
        self._figures = Door(points, owner, "figures", self._figures)  # type: ignore[assignment]
        self.ledger._stats = Door(points, owner, "figures", self.ledger._stats)  # type: ignore[assignment]


@dataclass
class Heard:
    """What an engine has been told of its requests, in order of telling."""

    received: list[tuple[str, bool]] = field(default_factory=list)
    """Request id, and whether it failed."""
    sent: list[str] = field(default_factory=list)
    stopped: str | None = None
    raised: list[BaseException] = field(default_factory=list)
    """Out of methods that vLLM calls."""


class Engine:
    """One engine of one rank: a worker, and a listener for handshakes.

    Args:
        hear: called with each step's results and report.
    """

    def __init__(
        self,
        points: Points,
        world: FakeNixlWorld,
        network: FakeNetwork,
        name: str,
        options: ConnectorOptions,
        hear: Callable[[Any, WorkerReport | None], None],
    ) -> None:
        self.name = name
        self.heard = Heard()
        self.commands: list[Command] = []
        self._hear = hear
        self.is_killed = False
        self.memory = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self.clock = ProcessClock(Machine(0), hash(name) % 7)
        self.host = f"{name}.0"
        self.port = world.open(self.host, [MemoryRange(self.memory.ctypes.data, self.memory.nbytes)], self.clock.now_ns)
        self._network = network
        layout = attention_rank(name, SHAPES, address=self.memory.ctypes.data, blocks=BLOCKS, tokens=TOKENS)
        local = LocalRank(layout=layout, shapes=SHAPES, compatibility_hash="same")
        channel = FakeSideChannel(network, self.host)
        self.control = channel.listen(self.host, 0, frame_bytes_max=MESSAGE_BYTES_MAX)
        self.worker = HostedWorker(options, self.clock, self.memory, points, name)
        worker, log_failure = self.worker, FailureLog(name, 0)

        async def make_supervisor() -> Supervisor:
            return Supervisor(
                options=options,
                local=local,
                nixl_port=_NixlDoor(points, name, "nixl", self.port),  # type: ignore[arg-type]
                side_channel=Door(points, name, "side channel", channel, SIDE_CHANNEL_KINDS),  # type: ignore[arg-type]
                control=Door(points, name, "listener", self.control),  # type: ignore[arg-type]
                clock=self.clock,
                recorder=Recorder(
                    engine_id=name,
                    rank=0,
                    role="kv_both",
                    clock=self.clock,
                    sink=JsonLinesSink(Door(points, name, "trace file", NoFiles())),  # type: ignore[arg-type]
                    figures=_Figures(points, name, worker),  # type: ignore[arg-type]
                ),
                emit=worker._emit,
                log_failure=log_failure,
                log_crash=log_crash,
                event_log=EventLog(name, 0, clock=self.clock, log_failure=log_failure),
                hear_engine=lambda: self.thread.hear(),
            )

        self.thread = HostedThread(
            name,
            make_supervisor,
            worker._note_death,
            guarded(points, name, "figures", "note_wake_up", worker.figures_of_actors.note_wake_up),
        )
        worker._thread = self.thread

        async def make_listener() -> HandshakeListener:
            payload = payload_of(
                layout,
                self.port.agent_metadata,
                compatibility_hash="same",
                life=name.encode().hex().zfill(32),
                control_host=self.host,
                control_port=self.control.port,
            )
            side_channel = Door(
                points, name, "side channel", FakeSideChannel(network, f"{name}.host"), SIDE_CHANNEL_KINDS
            )
            return HandshakeListener(
                side_channel=side_channel,  # type: ignore[arg-type]
                host=f"{name}.host",
                port=PORT,
                payloads={(0, 0): payload},
                perf_counter=lambda: self.clock.now_ns() / 1e9,
                log_bad_frame=lambda detail: None,
                log_cut_off=lambda address, why: None,
                log_crash=log_crash,
            )

        self.listener = HostedThread(f"{name} listener", make_listener, lambda error: log_crash("listener", error))

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(engine_id=self.name, host=f"{self.name}.host", port=PORT, tp_size=1)

    @property
    def has_died(self) -> bool:
        """One of its threads has."""
        return self.thread.is_dead or self.listener.is_dead

    def step(self) -> None:
        """What vLLM calls with each step."""
        commands, self.commands = self.commands, []
        worker = self.worker
        try:
            worker.start_load_kv(StepMetadata(commands))
            results = worker.get_transfer_results()
            worker.take_stats()
            report = worker.take_report()
        except Exception as error:
            self.heard.raised.append(error)
            return
        if report is not None and report.stopped is not None:
            self.heard.stopped = report.stopped
        self._hear(results, report)

    def kill(self) -> None:
        """Its machine is gone."""
        self.is_killed = True
        self.port.kill()
        for host in (self.host, f"{self.name}.host"):
            self._network.kill(host)

    def shut_down(self) -> None:
        try:
            self.worker.shutdown()
        except Exception as error:
            self.heard.raised.append(error)
        self.listener.stop(0.0)


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
