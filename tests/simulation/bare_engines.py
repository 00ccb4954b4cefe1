"""A decode rank and its prefill engines: the production actors alone, where nothing goes wrong and nothing is copied.

For benchmarks, and for tests that count. Requests begin, and their READs end, when the caller says so; nobody else
plays a scheduler. NIXL is always the simulator's. `on_fakes`: so is the side channel, and time jumps; a run is the same
each time. `on_sockets`: the side channel is real ZMQ, and time is real.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import trio
from trio.testing import MockClock

from connector.clock import BootClock, Clock
from connector.config import ConnectorOptions
from connector.layout.local import LocalRank
from connector.observe.flight_recorder import FlightRecorder
from connector.ports.nixl import MemoryRange
from connector.ports.side_channel import Listener, SideChannel
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.protocol import (
    Command,
    LeaseComputing,
    LeaseGranted,
    PeerAddress,
    ReceiveEnded,
    SendEnded,
    StartPull,
    TrackLease,
    WorkerEvent,
)
from connector.runtime.context import WorkerContext
from connector.runtime.figures import Figures
from connector.runtime.listener import HandshakeListener
from connector.runtime.recorder import Recorder
from connector.runtime.supervisor import Supervisor
from connector.wire.control import REQUEST_BYTES_MAX
from connector.wire.inspection import EngineFacts
from statemachine.failures import Failure
from statemachine.lease import LeaseName
from tests.rig.facts import LEAVE_SECRET, NO_IDENTITY, payload_of
from tests.rig.layouts import attention_rank, attention_shapes
from tests.rig.pulls import one_group
from tests.simulation.agenda import Agenda
from tests.simulation.cluster import make_trio_deterministic
from tests.simulation.fake_network import LOOPBACK, FakeNetwork, FakeSideChannel
from tests.simulation.fake_nixl import FakeNixlWorld, FlyingRead
from tests.simulation.names import names_drawn_by
from tests.simulation.process import Machine, ProcessClock, SilentEventLog

HEADS = 72
"""As many as ranks at most: each has one of its own then."""
HEAD_BYTES = 16
TOKENS = 4
POOL_BLOCKS = 64
REQUEST_BLOCKS = 8
"""Of a request, unless the caller says otherwise: the first ones, on both sides. All requests share them."""
SHAPES = attention_shapes(layers=1, heads=HEADS, head_bytes=HEAD_BYTES)
OPTIONS = ConnectorOptions(peer_limit=2048)
LIFE = "0" * 32
"""Of every engine: nobody restarts."""
STEP_SECONDS = 0.001
"""Of an engine; in virtual time long enough for all messages of a request."""
WAIT_SECONDS_MAX = 60.0

STEPS_KEPT = 1
"""Of the flight recorders: full before anything is measured, and what leaves one shares no time with what stays."""

T = TypeVar("T")


class HeldReads(FakeNixlWorld):
    """READs that are posted stay in flight until `end_oldest`."""

    def __init__(self, agenda: Agenda) -> None:
        super().__init__(agenda)
        self._flying: deque[FlyingRead] = deque()

    @property
    def flying(self) -> int:
        return len(self._flying)

    def launch(self, read: FlyingRead) -> None:
        self._flying.append(read)

    def end_oldest(self) -> None:
        self.end(self._flying.popleft(), None)

    def end_newest(self) -> None:
        self.end(self._flying.pop(), None)


@dataclass(frozen=True, kw_only=True)
class Doors:
    """What time the processes see, where their side channels come from, and on which hosts they are; by name."""

    clock: Clock
    open_channel: Callable[[str], SideChannel]
    host_of: Callable[[str], str]


class Rank:
    """A worker process: production actors, a NIXL of the simulator, and no engine around them.

    `memory`: shape [blocks, bytes], all of one rank's KV cache.
    """

    def __init__(
        self,
        doors: Doors,
        world: FakeNixlWorld,
        engine_id: str,
        memory: npt.NDArray[np.uint8],
        emit: Callable[[WorkerEvent], None],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        name = f"{engine_id}.{tp_rank}"
        layout = attention_rank(
            engine_id,
            SHAPES,
            address=memory.ctypes.data,
            blocks=len(memory),
            tokens=TOKENS,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
        self._local = LocalRank(layout=layout, shapes=SHAPES, compatibility_hash="same", identity=NO_IDENTITY)
        self._host = doors.host_of(name)
        self.port = world.open(name, [MemoryRange(memory.ctypes.data, memory.nbytes)], doors.clock.now_ns)
        side_channel = doors.open_channel(name)
        self._control: Listener = side_channel.listen(self._host, 0, frame_bytes_max=REQUEST_BYTES_MAX)
        context = WorkerContext(
            options=OPTIONS,
            local=self._local,
            draw_name=names_drawn_by(name),
            nixl_port=self.port,
            side_channel=side_channel,
            clock=doors.clock,
            recorder=Recorder(
                engine_id=engine_id,
                rank=tp_rank,
                role="kv_consumer",
                clock=doors.clock,
                sink=None,
                flight=FlightRecorder(steps_kept=STEPS_KEPT, bad_ends_kept=STEPS_KEPT),
            ),
            figures=Figures(),
            emit=emit,
            log_failure=_refuse_failure,
            log_crash=_refuse_crash,
            event_log=SilentEventLog(engine_id, tp_rank, doors.clock, _refuse_failure, lambda cause, text: None),
        )
        self.supervisor = Supervisor(
            context,
            control=self._control,
            leave_secret=LEAVE_SECRET,
            deliver_posted=lambda: None,
            facts=EngineFacts(),
        )

    def payload(self) -> bytes:
        """What the listener answers for this rank."""
        return payload_of(
            self._local.layout,
            self.port.agent_metadata,
            compatibility_hash=self._local.compatibility_hash,
            life=LIFE,
            control_host=self._host,
            control_port=self._control.port,
        )


def _refuse_failure(subject: str, failure: Failure) -> None:
    raise AssertionError(f"{subject}: {failure}")


def _refuse_crash(name: str, error: BaseException) -> None:
    raise AssertionError(f"{name} crashed") from error


class Prefill:
    """A prefill engine: its ranks, and the listener that answers for them."""

    def __init__(
        self,
        doors: Doors,
        world: FakeNixlWorld,
        engine_id: str,
        memory: npt.NDArray[np.uint8],
        ranks: int,
        emit: Callable[[WorkerEvent], None],
    ) -> None:
        self.ranks = [Rank(doors, world, engine_id, memory, emit, tp_rank=rank, tp_size=ranks) for rank in range(ranks)]
        host = doors.host_of(engine_id)
        self.listener = HandshakeListener(
            side_channel=doors.open_channel(engine_id),
            host=host,
            port=0,
            payloads={(0, number): rank.payload() for number, rank in enumerate(self.ranks)},
            perf_counter=time.perf_counter,
            log_bad_frame=lambda detail: _refuse_crash(detail, ValueError()),
            log_cut_off=lambda address, why: None,
            log_crash=_refuse_crash,
        )
        self.address = PeerAddress(engine_id=engine_id, host=host, port=self.listener.port, tp_size=ranks)

    async def start(self, nursery: trio.Nursery) -> None:
        for rank in self.ranks:
            await nursery.start(rank.supervisor.run)
        await nursery.start(self.listener.run)

    def deliver(self, command: Command) -> None:
        for rank in self.ranks:
            rank.supervisor.deliver(command)


class BareEngines:
    """See the module's docstring.

    Requests are numbered by the caller, from 0; request n is read from prefill engine n modulo their number.
    """

    def __init__(self, doors: Doors, world: HeldReads, *, peers: int, ranks: int, pool_blocks: int) -> None:
        self._world = world
        self._ranks = ranks
        memory = np.zeros((pool_blocks, HEADS * HEAD_BYTES * TOKENS), np.uint8)
        self.prefills = [Prefill(doors, world, f"p{number}", memory, ranks, self._hear) for number in range(peers)]
        self.decode = Rank(doors, world, "d", memory, self._hear)
        self.reported = 0
        """Requests that D has reported."""
        self.freed = 0
        """Leases that have ended, counted on each rank of P."""

    async def start(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.decode.supervisor.run)
        for prefill in self.prefills:
            await prefill.start(nursery)

    async def begin(self, first: int, stop: int) -> None:
        """Begin requests `first` to `stop`, and return when all their READs are in flight."""
        flying = self._world.flying + (stop - first) * self._ranks
        for number in range(first, stop):
            self.lend(number)
            self.announce(number)
            self.pull(number)
        await until(lambda: self._world.flying == flying)

    async def end(self, count: int) -> None:
        """End the READs of the `count` oldest requests, and return when these have been reported and released."""
        reported, freed = self.reported + count, self.freed + count * self._ranks
        for _ in range(count * self._ranks):
            self._world.end_oldest()
        await until(lambda: self.reported == reported and self.freed == freed)

    async def pull_and_end(self, number: int) -> None:
        """A request that was announced, when nothing else is open."""
        self.pull(number)
        await until(lambda: self._world.flying == self._ranks)
        await self.end(1)

    async def end_newest(self) -> None:
        """The same of the READ that was posted last."""
        reported = self.reported + 1
        self._world.end_newest()
        await until(lambda: self.reported == reported)

    # --- as the schedulers would ------------------------------------------------------------------------------------

    def lend(self, number: int) -> None:
        """P has finished a prefill."""
        prefill, lease = self._prefill(number), self._lease(number)
        prefill.deliver(LeaseComputing(lease=lease))
        prefill.deliver(LeaseGranted(lease=lease, blocks=REQUEST_BLOCKS))

    def announce(self, number: int) -> None:
        """D has heard of the request."""
        lease, address = self._lease(number), self._prefill(number).address
        self.decode.supervisor.deliver(
            TrackLease(request_id=lease.request_id, peer=address, lease=lease, age_seconds=0.0)
        )

    def pull(self, number: int, blocks: int = REQUEST_BLOCKS) -> None:
        """D has allocated its blocks."""
        self.decode.supervisor.deliver(self.pull_command(number, blocks))

    def pull_command(self, number: int, blocks: int) -> StartPull:
        lease = self._lease(number)
        return StartPull(
            request_id=lease.request_id,
            lease=lease,
            peer=self._prefill(number).address,
            groups=one_group(list(range(blocks)), list(range(blocks))),
            num_tokens=None,
            remote_num_tokens=None,
            age_seconds=0.0,
        )

    def _prefill(self, number: int) -> Prefill:
        return self.prefills[number % len(self.prefills)]

    def _lease(self, number: int) -> LeaseName:
        return LeaseName(request_name(number), 1)

    def _hear(self, event: WorkerEvent) -> None:
        match event:
            case ReceiveEnded(failure=failure):
                assert failure is None, failure
                self.reported += 1
            case SendEnded(expired=expired):
                assert not expired
                self.freed += 1
            case _:
                pass


def request_name(number: int) -> str:
    """As long as those of vLLM."""
    return f"cmpl-{number:032x}-0"


async def until(is_so: Callable[[], bool]) -> None:
    """Wait, with a bound, a step of the engine at a time."""
    with trio.fail_after(WAIT_SECONDS_MAX):
        while not is_so():
            await trio.sleep(STEP_SECONDS)


def on_fakes(
    use: Callable[[BareEngines], Awaitable[T]], *, peers: int = 1, ranks: int = 1, pool_blocks: int = POOL_BLOCKS
) -> T:
    """Run `use` with `peers` prefill engines of `ranks` ranks each, in virtual time."""
    make_trio_deterministic(0)
    agenda, clock = Agenda(), MockClock(autojump_threshold=0)
    agenda.drive(clock)

    async def main() -> T:
        network = FakeNetwork(agenda)
        doors = Doors(
            clock=ProcessClock(Machine(0), 0),
            open_channel=lambda name: FakeSideChannel(network, name),
            host_of=lambda name: name,
        )
        return await _run(doors, HeldReads(agenda), use, peers=peers, ranks=ranks, pool_blocks=pool_blocks)

    return trio.run(main, clock=clock)


def on_sockets(
    use: Callable[[BareEngines], Awaitable[T]], *, peers: int = 1, ranks: int = 1, pool_blocks: int = POOL_BLOCKS
) -> T:
    """The same with ZMQ sockets, in real time."""

    async def main() -> T:
        agenda = Agenda()
        # A channel has threads of its own. Those of many processes would be many.
        ours, theirs = ZmqSideChannel(), ZmqSideChannel()
        doors = Doors(
            clock=BootClock(),
            open_channel=lambda name: ours if name == "d.0" else theirs,
            host_of=lambda name: LOOPBACK,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agenda.run)
            found = await _run(doors, HeldReads(agenda), use, peers=peers, ranks=ranks, pool_blocks=pool_blocks)
            nursery.cancel_scope.cancel()
        return found

    return trio.run(main)


async def _run(
    doors: Doors,
    world: HeldReads,
    use: Callable[[BareEngines], Awaitable[T]],
    *,
    peers: int,
    ranks: int,
    pool_blocks: int,
) -> T:
    engines = BareEngines(doors, world, peers=peers, ranks=ranks, pool_blocks=pool_blocks)
    async with trio.open_nursery() as nursery:
        await engines.start(nursery)
        found = await use(engines)
        nursery.cancel_scope.cancel()
    return found
