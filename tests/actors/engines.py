"""Prefill and decode engines made of the production actors, real NIXL agents and real ZMQ sockets, and numpy memory.

Everything of vLLM is left out: a test plays the scheduler by delivering commands and reading worker events. Both
engines live in one process and one trio run; NIXL moves the bytes between their buffers as it would between processes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import trio

from connector.clock import BootClock, Clock, to_ns
from connector.config import ConnectorOptions
from connector.key_files import channel_access, listener_access
from connector.layout.geometry import RankId
from connector.layout.landing import Permute
from connector.layout.local import LocalRank
from connector.layout.shapes import LayerShape
from connector.observe.event_log import EventLog
from connector.observe.sinks import combined
from connector.observe.trace_writer import TraceWriter
from connector.ports.gate import Access
from connector.ports.nixl import MemoryRange, NixlEvent, NotificationReceived, PortCounts, PortReadEnded
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.side_channel import Listener
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.protocol import (
    GroupPull,
    LeaseComputing,
    LeaseGranted,
    PeerAddress,
    ReceiveEnded,
    ReleaseUnread,
    SendEnded,
    StartPull,
    SumsFound,
    SumsWanted,
    TrackLease,
    WorkerEvent,
)
from connector.runtime.context import WorkerContext
from connector.runtime.figures import Figures
from connector.runtime.listener import HandshakeListener
from connector.runtime.reads import DESCRIPTORS_AHEAD_MAX
from connector.runtime.recorder import Recorder
from connector.runtime.supervisor import Supervisor
from connector.wire.control import REQUEST_BYTES_MAX
from connector.wire.device_allocations import DeviceAllocations
from connector.wire.identity import KvIdentity
from connector.wire.inspection import EngineFacts
from statemachine.failures import Failure
from statemachine.lease import LeaseName
from statemachine.trace import TransitionRecord
from tests.rig import sums
from tests.rig.facts import LEAVE_SECRET, NO_IDENTITY, payload_of
from tests.rig.layouts import attention_rank, attention_shapes
from tests.rig.pulls import one_group
from tests.rig.sums import with_sums

LAYERS = 3
BLOCKS = 64
TOKENS = 32
HEADS = 4
HEAD_BYTES = 32
"""K and V of one head of one token."""
HASH = "same-model"
HOST = "127.0.0.1"
LEASE_SECONDS = 4.0
"""Of a lease that D keeps alive. It renews while more than half is left. However long this process stands still, as on
a machine that is busy with something else, its engines count `STEP_SECONDS_MAX`."""
STEP_SECONDS_MAX = 1.0
HELD_SECONDS = 1.5 * LEASE_SECONDS
"""Longer than a lease lasts that is not renewed, or only once."""

T = TypeVar("T")


class ListSink:
    """Keeps trace records."""

    def __init__(self) -> None:
        self.records: list[TransitionRecord] = []

    def write(self, *records: TransitionRecord) -> None:
        self.records.extend(records)

    def close(self) -> None:
        return

    def path(self, machine: str, subject: str) -> list[str]:
        """The states that one instance went through."""
        states = [r.to_state for r in self.records if r.machine == machine and r.subject == subject]
        return [state for i, state in enumerate(states) if i == 0 or states[i - 1] != state]


class SteadyClock:
    """What engines have for a clock here: it hardly goes on while this process stands still, which ends no lease and no
    request that a test wants alive. Everything of an engine is in one process, and so is its peer."""

    def __init__(self) -> None:
        self._true = BootClock()
        self._seen_ns = self._now_ns = self._true.now_ns()
        self._is_over = False

    def now_ns(self) -> int:
        seen_ns = self._true.now_ns()
        self._now_ns += min(seen_ns - self._seen_ns, to_ns(STEP_SECONDS_MAX))
        self._seen_ns = seen_ns
        return self._now_ns

    def wall(self) -> float:
        return self._true.wall()

    async def tick(self) -> None:
        """A task of the run: it goes on when nobody looks at it."""
        while not self._is_over:
            self.now_ns()
            await trio.sleep(STEP_SECONDS_MAX / 10)

    def stop(self) -> None:
        self._is_over = True


class WarpedClock:
    """A clock of its own for one engine: it runs at another rate than everybody else's (`true`), and can leap."""

    def __init__(self, rate: float = 1.0, true: Clock | None = None) -> None:
        self._true = true or BootClock()
        self._start_ns = self._true.now_ns()
        self._rate = rate
        self._leapt_ns = 0

    def now_ns(self) -> int:
        return self._start_ns + round((self._true.now_ns() - self._start_ns) * self._rate) + self._leapt_ns

    def wall(self) -> float:
        return self._true.wall()

    def leap(self, seconds: float) -> None:
        """This clock has gone on for so long while the others stood still."""
        self._leapt_ns += to_ns(seconds)

    def go_on(self, seconds: float) -> None:
        """So many seconds pass in no time, and this clock counts them at its rate."""
        self.leap(seconds * self._rate)


class WorkerEvents(list[WorkerEvent]):
    """What the engine thread was told. `breaks_on` is a kind of worker event on which telling it raises, once."""

    breaks_on: type[WorkerEvent] | None = None
    deliver: Callable[[SumsFound], None]
    """To the actors, which the engine thread does later."""

    def tell(self, event: WorkerEvent) -> None:
        if isinstance(event, SumsWanted):
            trio.lowlevel.current_trio_token().run_sync_soon(lambda: self.deliver(sums.found(event)))
            return
        if self.breaks_on is not None and isinstance(event, self.breaks_on):
            self.breaks_on = None
            raise RuntimeError("injected")
        self.append(event)


class HeardPort(RealNixlPort):
    """A real agent whose events a test can add to, on the clock of its engine."""

    on_event: Callable[[NixlEvent], None]
    clock: Clock

    def set_event_callback(self, on_event: Callable[[NixlEvent], None]) -> None:
        def hear(event: NixlEvent) -> None:
            if isinstance(event, PortReadEnded):
                event = msgspec.structs.replace(event, ended_ns=self.clock.now_ns())
            on_event(event)

        self.on_event = hear
        super().set_event_callback(hear)


NUMBER = 1
"""Of every lease here. Engines that answer as the built-in connector number none."""


def lease_of(request_id: str) -> LeaseName:
    """What P calls the lease of a request (its id on P)."""
    return LeaseName(request_id, NUMBER)


def lend_by_all(ranks: list[Engine], request_id: str) -> LeaseName:
    """Every rank of P finishes the prefill."""
    for each in ranks:
        each.lend(request_id)
    return lease_of(request_id)


@dataclass
class Engine:
    """One rank of an engine: memory, actors, and what they told the engine thread."""

    engine_id: str
    options: ConnectorOptions
    local: LocalRank
    memory: npt.NDArray[np.uint8]
    supervisor: Supervisor
    port: HeardPort
    control: Listener
    clock: Clock
    trace: ListSink
    figures: Figures
    events: WorkerEvents
    failures: list[tuple[str, Failure]]
    crashes: list[tuple[str, BaseException]]
    refused: list[str]
    """Why its sockets have not let somebody in."""
    control_key: str | None = None
    stages: int = 1
    """Of the engine."""
    device_allocations: DeviceAllocations | None = None
    """What it says of its memory, which is no device's."""
    life: str = field(default_factory=lambda: uuid.uuid4().hex)
    listener: HandshakeListener | None = None

    @property
    def address(self) -> PeerAddress:
        assert self.listener is not None
        return PeerAddress(
            engine_id=self.engine_id,
            host=HOST,
            port=self.listener.port,
            tp_size=self.local.layout.tp_size,
            pp_size=self.stages,
        )

    def by_head(self) -> npt.NDArray[np.uint8]:
        """The memory as shape [layers of its stage, blocks, heads of this rank, tokens, bytes]."""
        heads, tokens = max(1, HEADS // self.local.layout.tp_size), self.local.layout.kernel_block_size_tokens
        if self.local.layout.layout_name == "LBNHC":
            return self.memory.reshape(len(self.memory), BLOCKS, tokens, heads, -1).swapaxes(2, 3)
        return self.memory.reshape(len(self.memory), BLOCKS, heads, tokens, -1)

    def payload(self) -> bytes:
        """What the listener answers for this rank."""
        return payload_of(
            self.local.layout,
            self.port.agent_metadata,
            compatibility_hash=self.local.compatibility_hash,
            identity=self.local.identity,
            verify=self.options.verify,
            life=self.life,
            control_host=HOST,
            control_port=self.control.port,
            control_key=self.control_key,
            stages=self.stages,
            device_allocations=self.device_allocations,
        )

    def blocks(self, ids: list[int]) -> npt.NDArray[np.uint8]:
        """Contents of blocks in all layers, shape [layers, blocks, bytes]."""
        return self.memory[:, ids, :]

    def counts(self) -> PortCounts:
        return self.port.counts()

    def received(self, request_id: str) -> ReceiveEnded | None:
        found = [o for o in self.events if isinstance(o, ReceiveEnded) and o.request_id == request_id]
        assert len(found) <= 1, f"{request_id} was reported {len(found)} times"
        return found[0] if found else None

    def sent(self, request_id: str) -> SendEnded | None:
        found = [o for o in self.events if isinstance(o, SendEnded) and o.lease.request_id == request_id]
        assert len(found) <= 1, f"{request_id} was freed {len(found)} times"
        return found[0] if found else None

    # --- as the scheduler would ---------------------------------------------------------------------------------

    def lend(self, request_id: str, blocks: Sequence[int] = range(BLOCKS)) -> None:
        """Finish a prefill. `blocks`: those that have checksums, if any have."""
        lease = lease_of(request_id)
        self.supervisor.deliver(LeaseComputing(lease=lease))
        granted = LeaseGranted(lease=lease, blocks=1)
        self.supervisor.deliver(with_sums(granted, self.local.layout, [list(blocks)], self.options.verify))

    def borrow(
        self,
        request_id: str,
        lease: LeaseName,
        peer: PeerAddress,
        local: list[int],
        remote: list[int],
    ) -> None:
        """Read blocks."""
        self.pull(request_id, peer, local, remote, remote_request_id=lease.request_id)

    def release_unread(
        self, request_id: str, peer: Engine | PeerAddress, *, remote_request_id: str | None = None
    ) -> None:
        """Nothing is read of the request that P calls `remote_request_id`, by default `remote-<request_id>`."""
        self.supervisor.deliver(
            ReleaseUnread(
                request_id=request_id,
                peer=peer.address if isinstance(peer, Engine) else peer,
                lease=lease_of(remote_request_id or f"remote-{request_id}"),
                age_seconds=0.0,
            )
        )

    def wait_for(self, request_id: str, lease: LeaseName, peer: PeerAddress) -> None:
        """A request that will `borrow` waits in the scheduler's queue."""
        self.supervisor.deliver(TrackLease(request_id=request_id, peer=peer, lease=lease, age_seconds=0.0))

    def hear(self, sender: str, message: bytes) -> None:
        """A notification, as if NIXL had delivered it."""
        self.port.on_event(NotificationReceived(sender, message))

    def pull(
        self,
        request_id: str,
        peer: Engine | PeerAddress,
        local: list[int],
        remote: list[int],
        *,
        remote_request_id: str | None = None,
    ) -> None:
        """Read blocks of the request that P calls `remote_request_id`, by default `remote-<request_id>`."""
        groups = one_group(local, remote)
        self.pull_groups(request_id, peer, groups, None, remote_request_id=remote_request_id)

    def pull_groups(
        self,
        request_id: str,
        peer: Engine | PeerAddress,
        groups: tuple[GroupPull, ...],
        num_tokens: int | None,
        *,
        remote_request_id: str | None = None,
    ) -> None:
        self.supervisor.deliver(
            StartPull(
                request_id=request_id,
                peer=peer.address if isinstance(peer, Engine) else peer,
                lease=lease_of(remote_request_id or f"remote-{request_id}"),
                groups=groups,
                num_tokens=num_tokens,
                remote_num_tokens=num_tokens,
                age_seconds=0.0,
            )
        )


def answer_as_builtin(patch: pytest.MonkeyPatch) -> None:
    """Engines say nothing in handshakes that the built-in connector does not say."""
    payload = Engine.payload

    def without_facts(rank: Engine) -> bytes:
        found = msgspec.msgpack.decode(payload(rank))
        del found["actor"]
        return msgspec.msgpack.encode(found)

    patch.setattr(Engine, "payload", without_facts)
    patch.setattr("tests.actors.engines.NUMBER", 0)


@asynccontextmanager
async def engine(engine_id: str, **settings: Any) -> AsyncIterator[Engine]:
    """Start an engine of one rank, with the settings of `parallel_engine`."""
    async with parallel_engine(engine_id, 1, **settings) as ranks:
        yield ranks[0]


@asynccontextmanager
async def parallel_engine(
    engine_id: str,
    tp_size: int,
    *,
    options: ConnectorOptions | None = None,
    serves: bool = False,
    port: int = 0,
    life: str | None = None,
    compatibility_hash: str = HASH,
    identity: KvIdentity = NO_IDENTITY,
    head_bytes: int = HEAD_BYTES,
    tokens: int = TOKENS,
    stages: int = 1,
    layout_name: str = "LBHNC",
    permute: Permute = Permute.NEVER,
    clock: Clock | None = None,
    descriptors_ahead_max: int = DESCRIPTORS_AHEAD_MAX,
    is_warm: bool = True,
    also_trace: TraceWriter | None = None,
    device_allocations: DeviceAllocations | None = None,
) -> AsyncIterator[list[Engine]]:
    """Start an engine of several tensor-parallel ranks; its actors are stopped and its doors closed at the end.

    `also_trace` is given the records of all ranks too.

    The first rank has the listener, which answers for all of them. With several pipeline `stages`, each of which has a
    part of the layers, the ranks of the first one come first.
    """
    shapes = attention_shapes(layers=LAYERS, heads=HEADS, head_bytes=head_bytes)
    steady = SteadyClock()
    if clock is None:
        trio.lowlevel.spawn_system_task(steady.tick)
    ranks = [
        _rank(
            engine_id,
            {layer: shapes[layer] for layer in layers},
            RankId(pp_rank, tp_rank),
            tp_size,
            options or ConnectorOptions(),
            compatibility_hash,
            tokens,
            layout_name,
            identity=identity,
            permute=permute,
            clock=clock or steady,
            descriptors_ahead_max=descriptors_ahead_max,
            is_warm=is_warm,
            also_trace=also_trace,
        )
        for pp_rank, layers in enumerate(np.array_split(list(shapes), stages))
        for tp_rank in range(tp_size)
    ]
    for each in ranks:
        each.stages, each.life = stages, life or ranks[0].life
        each.device_allocations = device_allocations
    try:
        async with trio.open_nursery() as nursery:
            for each in ranks:
                await nursery.start(each.supervisor.run)
            if serves:
                ranks[0].listener = HandshakeListener(
                    side_channel=_channel(listener_access(ranks[0].options), ranks[0].refused),
                    host=HOST,
                    port=port,
                    payloads={each.local.layout.rank: each.payload() for each in ranks},
                    perf_counter=time.perf_counter,
                    log_bad_frame=lambda detail: None,
                    log_cut_off=lambda address, why: None,
                    log_crash=lambda name, error: ranks[0].crashes.append((name, error)),
                )
                await nursery.start(ranks[0].listener.run)
            try:
                yield ranks
            finally:
                if ranks[0].listener is not None:
                    ranks[0].listener.stop()
                for each in ranks:
                    each.supervisor.stop()
    finally:
        with trio.CancelScope(shield=True):
            for each in ranks:
                await each.port.aclose(1.0)
        steady.stop()


def _rank(
    engine_id: str,
    shapes: dict[str, LayerShape],
    rank: RankId,
    tp_size: int,
    options: ConnectorOptions,
    compatibility_hash: str,
    tokens: int,
    layout_name: str,
    *,
    identity: KvIdentity,
    permute: Permute,
    clock: Clock,
    descriptors_ahead_max: int,
    is_warm: bool,
    also_trace: TraceWriter | None,
) -> Engine:
    shape = next(iter(shapes.values()))
    block_bytes = tokens * max(1, HEADS // tp_size) * sum(each.bytes_per_unit for each in shape.components)
    memory = np.zeros((len(shapes), BLOCKS, block_bytes), np.uint8)
    layout = attention_rank(
        engine_id,
        shapes,
        address=memory.ctypes.data,
        blocks=BLOCKS,
        tokens=tokens,
        pp_rank=rank.pp_rank,
        tp_rank=rank.tp_rank,
        tp_size=tp_size,
        layout_name=layout_name,
    )
    local = LocalRank(
        layout=layout, shapes=shapes, compatibility_hash=compatibility_hash, identity=identity, permute=permute
    )
    port = HeardPort.open(uuid.uuid4().hex, [MemoryRange(memory.ctypes.data, memory.nbytes)])
    assert isinstance(port, HeardPort)
    port.clock = clock
    refused: list[str] = []
    side_channel = _channel(channel_access(options), refused)
    control = side_channel.listen(HOST, 0, frame_bytes_max=REQUEST_BYTES_MAX)
    trace, figures, events = ListSink(), Figures(), WorkerEvents()
    failures, crashes = list[tuple[str, Failure]](), list[tuple[str, BaseException]]()

    def log_failure(subject: str, failure: Failure) -> None:
        failures.append((subject, failure))

    context = WorkerContext(
        options=options,
        local=local,
        draw_name=lambda: uuid.uuid4().hex,
        nixl_port=port,
        side_channel=side_channel,
        clock=clock,
        recorder=Recorder(
            engine_id=engine_id,
            rank=rank.tp_rank,
            role="kv_both",
            clock=clock,
            sink=combined([trace] if also_trace is None else [trace, also_trace]),
        ),
        figures=figures,
        emit=events.tell,
        log_failure=log_failure,
        log_crash=lambda name, error: crashes.append((name, error)),
        event_log=EventLog(engine_id, rank.tp_rank, clock=clock, log_failure=log_failure),
        trace=also_trace,
    )
    supervisor = Supervisor(
        context,
        control=control,
        leave_secret=LEAVE_SECRET,
        deliver_posted=lambda: None,
        facts=EngineFacts(),
        descriptors_ahead_max=descriptors_ahead_max,
        is_warm=is_warm,
    )
    events.deliver = supervisor.deliver
    return Engine(
        engine_id,
        options,
        local,
        memory,
        supervisor,
        port,
        control,
        clock,
        trace,
        figures,
        events,
        failures,
        crashes,
        refused,
        control_key=side_channel.public_key,
    )


def _channel(access: Access, refused: list[str]) -> ZmqSideChannel:
    return ZmqSideChannel(access, lambda stranger, said: refused.append(said))


async def until(found: Callable[[], T | None], seconds: float = 10.0) -> T:
    """Wait until `found` returns something true, and return it."""
    with trio.fail_after(seconds):
        while True:
            value = found()
            if value:
                return value
            await trio.sleep(0.002)


async def read(d: Engine, p: Engine, request_id: str, block: int = 1) -> ReceiveEnded:
    """P lends the blocks of a request, and D reads one of them; what becomes of it."""
    p.lend(f"remote-{request_id}")
    d.pull(request_id, p, [block], [block])
    return await until(lambda: d.received(request_id))
