"""What every scene is played with, and what must hold in it; see the package's docstring.

One decode engine and a few prefill engines, and a plan of some requests in a few seconds of virtual time
(`tests.simulation.crashes.scenes`). Then probes: requests long after the fault, one of them from an engine that has no
points.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeVar
from unittest import mock

import trio
from trio.testing import MockClock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from connector.config import ConnectorOptions
from connector.observe.log import get_logger
from connector.ports.side_channel import SideChannelError
from connector.protocol import (
    LeaseComputing,
    LeaseGranted,
    PeerAddress,
    ReleaseUnread,
    StartPull,
    TrackLease,
)
from connector.runtime import handshake
from connector.step_metadata import WorkerReport
from connector.wire.administration import Meet, decode_meet_report, decode_report, encode_drain
from connector.wire.control import encode_request
from connector.wire.inspection import Inspect
from statemachine.draining import State
from statemachine.lease import LeaseName
from tests.rig.pulls import one_group
from tests.simulation.agenda import Agenda
from tests.simulation.cluster import make_trio_deterministic
from tests.simulation.crashes.engines import BLOCKS, GRACE_SECONDS, PORT, SHAPE, Engine, Shape
from tests.simulation.crashes.points import Awaits, Injected, Points, Site, Span
from tests.simulation.fake_network import FakeNetwork, FakeSideChannel, NetworkRules
from tests.simulation.fake_nixl import FakeNixlWorld, NixlRules

OPTIONS = ConnectorOptions(
    kv_lease_duration=2.0,
    lease_limit_seconds=8.0,
    request_timeout_seconds=1.0,
    handshake_timeout_seconds=0.3,
    quiesce_timeout_seconds=0.9,
    backend_grace_seconds=0.6,
    backoff_initial_seconds=0.05,
    backoff_max_seconds=0.2,
    incompatible_backoff_seconds=0.2,
)
STEP_SECONDS = 0.02
PROBED_AFTER_SECONDS = 5.0
"""How long after a fault a request has to be served."""
RESTART_SECONDS = 5.0
"""The longest pause of an actor that crashes again and again."""
REPORTED_SECONDS_MAX = (
    OPTIONS.request_timeout_seconds + OPTIONS.quiesce_timeout_seconds + RESTART_SECONDS + 10 * STEP_SECONDS
)
AT_ONCE_SECONDS = 2.5 * STEP_SECONDS
AT_REST_SECONDS = 8.0
"""After the probes: for leases and back-offs to end."""
REQUEST_BLOCKS = 3

T = TypeVar("T")

SILENT = frozenset({"log"})
"""Kinds of points of which the log cannot say anything."""


class Lost(NetworkRules):
    """What is sent to some hosts is lost."""

    def __init__(self) -> None:
        self.hosts: set[str] = set()

    def delays(self, source: str, target: str) -> Sequence[float]:
        return () if target in self.hosts else super().delays(source, target)


class Rules(NixlRules):
    """READs of some agents are held up for a while, fail or lie; some descriptors are refused."""

    def __init__(self) -> None:
        self.stalled_until: dict[str, float] = {}
        self.failing: Counter[str] = Counter()
        self.lying: Counter[str] = Counter()
        self.refusing: Counter[str] = Counter()

    def read_stalls_until(self, initiator: str, target: str) -> float:
        return self.stalled_until.get(target, 0.0)

    def read_error(self, initiator: str, target: str) -> bool:
        if not self.failing[target]:
            return False
        self.failing[target] -= 1
        return True

    def read_lies(self, initiator: str, target: str) -> bool:
        if not self.lying[target]:
            return False
        self.lying[target] -= 1
        return True

    def prepare_refused(self, initiator: str, target: str) -> bool:
        if not self.refusing[target]:
            return False
        self.refusing[target] -= 1
        return True


@dataclass
class Asked:
    """A request that D was to load."""

    prefill: str
    started: float
    local: list[int]
    remote: list[int]
    reported: list[float] = field(default_factory=list)
    failed: bool = False
    was_dead: bool = False
    """When it began, the actors of D had died already."""


@dataclass(frozen=True)
class Verdict:
    """What came of one run."""

    sites: list[Site]
    waiting: list[Site]
    """Where tasks waited at the moment of the strike."""
    hit: Site | None
    complaints: list[str]
    died: bool
    """A whole trio run ended of it."""
    lines: list[str]
    reached: frozenset[Span]
    """Of a run without a fault: see `Points.reached`."""


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.texts.append(record.getMessage())


class _Breaks(logging.Handler):
    """A handler whose lines are points."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self._points = points

    def emit(self, record: logging.LogRecord) -> None:
        self._points.call("log", "log", f"{record.filename}:{record.lineno}")


def play_scene(
    make: Callable[[Points, Agenda, float | None], Scene],
    target: int | None = None,
    error: type[Exception] = Injected,
    *,
    moment: float | None = None,
    struck: int | None = None,
) -> Verdict:
    """One run.

    Args:
        target: the point at which `error` is raised.
        moment, struck: when it is raised out of an await that goes on waiting, and out of which.
    """
    make_trio_deterministic(0)
    has_fault = target is not None or struck is not None
    points = Points(target, error, struck, reached=None if has_fault else set())
    agenda, clock = Agenda(), MockClock(autojump_threshold=0)
    agenda.drive(clock)
    lines, breaks = _Lines(), _Breaks(points)
    logger = get_logger().logger
    propagates, level = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    logger.addHandler(breaks)
    scene = make(points, agenda, moment)
    try:
        with (
            mock.patch.object(trio.to_thread, "run_sync", _run_at_once),
            mock.patch.object(handshake, "ASKED_AT_ONCE", scene.asked_at_once),
        ):
            trio.run(scene.run, clock=clock, instruments=[Awaits(points)])
    finally:
        logger.removeHandler(lines)
        logger.removeHandler(breaks)
        logger.propagate = propagates
        logger.setLevel(level)
    complaints = scene.complaints
    if has_fault and points.hit is None:
        complaints.append("the point was never reached")
    is_said = any("injected" in text for text in lines.texts)
    if points.hit is not None and points.hit[0].kind not in SILENT and not is_said:
        complaints.append("the log says nothing of it")
    return Verdict(
        points.sites,
        points.waiting,
        points.hit and points.hit[0],
        complaints,
        scene.died,
        lines.texts,
        frozenset(points.reached or ()),
    )


async def _run_at_once(function: Callable[[], T], *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
    """What a thread would do: virtual time does not wait for threads."""
    await trio.lowlevel.checkpoint()
    return function()


class Scene(abc.ABC):
    """A plan, and what it is played with.

    Attributes:
        shapes: of the prefill engines, by name.
        options: of all engines.
        moments: when awaits are made to raise that go on waiting.
        probes_at: when the probes begin, long after everything else.
        probed: prefill engines that have to serve then.
        decode_shape: of the decode engine.
        asked_at_once: ranks of one engine that a handshake asks at a time.
    """

    shapes: ClassVar[dict[str, Shape]]
    options: ClassVar[ConnectorOptions] = OPTIONS
    moments: ClassVar[tuple[float, ...]]
    probes_at: ClassVar[float]
    probed: ClassVar[tuple[str, ...]]
    decode_shape: ClassVar[Shape] = SHAPE
    asked_at_once: ClassVar[int] = handshake.ASKED_AT_ONCE

    def __init__(self, points: Points, agenda: Agenda, moment: float | None) -> None:
        self.points = points
        self._moment = moment
        self.complaints: list[str] = []
        self.died = False
        self._agenda = agenda
        self._lost = Lost()
        self._network = FakeNetwork(agenda, self._lost)
        self._rules = Rules()
        self._world = FakeNixlWorld(agenda, self._rules, self._note_misuse)
        self._asked: dict[str, Asked] = {}
        self._free = list(range(BLOCKS))
        self._quarantined: list[list[int]] = []
        self._lent: dict[str, tuple[str, set[int]]] = {}
        self._leases: dict[str, LeaseName] = {}

    @abc.abstractmethod
    async def play(self) -> None:
        """The plan."""

    async def check_later(self) -> None:
        """What else must hold with the probes."""
        return

    async def before_the_end(self) -> None:
        """What goes on while the engines are shut down."""
        return

    def _note_misuse(self, detail: str) -> None:
        self.complaints.append(f"misuse of NIXL: {detail}")

    def _complain(self, detail: str) -> None:
        self.complaints.append(f"{trio.current_time():.2f} s: {detail}")

    # --- its course -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        nobodys = Points()
        self.prefills = {
            name: Engine(
                self.points if shape.has_points else nobodys,
                self._world,
                self._network,
                name,
                self.options,
                partial(self._hear_of_lent, name),
                shape,
                partial(self._count_lent, name),
            )
            for name, shape in self.shapes.items()
        }
        self.decode = Engine(
            self.points,
            self._world,
            self._network,
            "d",
            self.options,
            lambda rank, results, report: self._hear_of_loaded(results, report),
            self.decode_shape,
        )
        (self.reader,) = self.decode.ranks
        for engine in self.prefills.values():
            for rank in engine.ranks:
                seed = ord(engine.name[1]) * 31 + rank.layout.tp_rank * 13 + 1
                rank.memory[:] = [[(seed + block * 7) % 251] for block in range(BLOCKS)]
        async with trio.open_nursery() as nursery:
            for engine in self._engines:
                for thread in engine.threads:
                    await nursery.start(thread.host)
            nursery.start_soon(self._step)
            await trio.sleep(0.05)
            self.points.armed = True
            if self._moment is not None:
                self._agenda.at(self._moment, self.points.strike)
            await self.play()
            await trio.sleep_until(self.probes_at)
            await self._probe()
            await trio.sleep_until(self.probes_at + AT_REST_SECONDS)
            self._check_at_rest()
            await self.before_the_end()
            await self._shut_down()
            self.points.armed = False
            nursery.cancel_scope.cancel()
        self._check_engine_threads()

    @property
    def _engines(self) -> list[Engine]:
        return [*self.prefills.values(), self.decode]

    async def _step(self) -> None:
        while True:
            for engine in self._engines:
                if not engine.is_killed:
                    engine.step()
            await trio.sleep(STEP_SECONDS)

    async def _probe(self) -> None:
        """Requests that come later."""
        for name in self.probed:
            await self._ask(f"probe {name}", name)
        await trio.sleep(2.0)
        hit = self.points.hit
        if hit is not None and hit[1] > self.probes_at - PROBED_AFTER_SECONDS:
            return
        for name in self.probed:
            asked = self._asked.get(f"probe {name}")
            if asked is not None and (asked.failed or not asked.reported) and not self._is_excused(name):
                self._complain(f"a request from {name} that comes later is not served")
        await self.check_later()

    def _is_excused(self, name: str) -> bool:
        """Whether a whole trio run has ended of those that a request from this engine needs."""
        return self.decode.has_died or self.prefills[name].has_died

    async def _shut_down(self) -> None:
        self.died = any(engine.has_died for engine in self._engines)
        alive = [engine for engine in self._engines if not engine.is_killed]
        for engine in alive:
            engine.shut_down()
        with trio.move_on_after(8.0):
            while not all(thread.has_ended for engine in alive for thread in engine.threads):
                await trio.sleep(0.05)
        for engine in alive:
            if not all(thread.has_ended for thread in engine.threads):
                self._complain(f"{engine.name} does not stop")

    # --- what a scheduler does ----------------------------------------------------------------------------------------

    def _lend(self, prefill: str, request_id: str, blocks: Sequence[int]) -> LeaseName | None:
        """P has computed the prompt of a request; None: it lends nothing any more."""
        engine = self.prefills[prefill]
        lease = self._name_lease(request_id, prefill)
        if engine.is_killed:
            return lease
        if not engine.lends:
            return None
        engine.commands.append(LeaseComputing(lease=lease))
        engine.commands.append(
            LeaseGranted(
                lease=lease,
                blocks=len(blocks),
                block_ids=None if self.options.verify == "off" else (list(blocks),),
            )
        )
        self._lent[lease.request_id] = (prefill, set())
        return lease

    def _name_lease(self, request_id: str, prefill: str) -> LeaseName:
        number = 0 if self.prefills[prefill].shape.is_builtin else len(self._leases) + 1
        lease = self._leases[request_id] = LeaseName(f"{prefill}-{request_id}", number)
        return lease

    def _announce(self, request_id: str, prefill: str, address: PeerAddress | None = None) -> None:
        lease = self._leases.get(request_id) or self._name_lease(request_id, prefill)
        peer = address or self.prefills[prefill].address
        self.decode.commands.append(TrackLease(request_id=request_id, peer=peer, lease=lease, age_seconds=0.0))

    def _need_nothing(self, request_id: str, prefill: str) -> None:
        address, lease = self.prefills[prefill].address, self._leases[request_id]
        self.decode.commands.append(ReleaseUnread(request_id=request_id, peer=address, lease=lease, age_seconds=0.0))

    async def _ask(
        self,
        request_id: str,
        prefill: str,
        *,
        remote: Sequence[int] | None = None,
        lease: LeaseName | None = None,
        tp_size: int | None = None,
        waits_seconds: float = 0.0,
    ) -> None:
        """A prompt through P to D."""
        if remote is None:
            first = len(self._asked) * REQUEST_BLOCKS % (BLOCKS - REQUEST_BLOCKS)
            remote = range(first, first + REQUEST_BLOCKS)
        if lease is None:
            lease = self._lend(prefill, request_id, remote)
            if lease is None:
                return  # D computes it
        else:
            self._leases[request_id] = lease
        engine = self.prefills[prefill].address
        sizes = engine.tp_size if tp_size is None else tp_size
        address = PeerAddress(engine_id=engine.engine_id, host=engine.host, port=engine.port, tp_size=sizes)
        await trio.sleep(1.5 * STEP_SECONDS)
        self._announce(request_id, prefill, address)
        await trio.sleep(1.5 * STEP_SECONDS + waits_seconds)
        local = [self._free.pop(0) for _ in range(REQUEST_BLOCKS)]
        self._check_unwritten(local, "hands out")
        self.reader.memory[local] = 0
        self._asked[request_id] = Asked(
            prefill, trio.current_time(), local, list(remote), was_dead=self.reader.thread.is_dead
        )
        groups = one_group(local, list(remote) + list(range(REQUEST_BLOCKS - len(remote))))
        self.decode.commands.append(_pull(request_id, address, lease, groups))

    # --- what tools do ----------------------------------------------------------------------------------------------

    async def _inspect(self, name: str, whats: Sequence[str], *, seconds: float = 0.1) -> None:
        """A tool asks the first rank of an engine, several things at once."""
        rank = self._named(name).ranks[0]
        channel = FakeSideChannel(self._network, "tool")
        with trio.move_on_after(seconds), contextlib.suppress(SideChannelError):  # or it has died
            link = await channel.open_link(rank.host, rank.control.port)
            for number, what in enumerate(whats):
                link.send(encode_request(Inspect(number=number, what=what)))
            while True:
                await link.receive()

    async def _meet(self, places: Sequence[str]) -> dict[str, str]:
        """A tool names engines to D; how far each has come. Asked again until there is an answer, or for a while."""
        channel = FakeSideChannel(self._network, "tool")
        for _ in range(20):
            with trio.move_on_after(0.1), contextlib.suppress(SideChannelError):
                link = await channel.open_link(self.reader.host, self.reader.control.port)
                link.send(encode_request(Meet(places=tuple(places))))
                return {row.place: row.state for row in decode_meet_report(await link.receive()).rows}
        return {}

    async def _drain(self, name: str) -> None:
        """An operator lets an engine drain, and looks until it has."""
        engine, channel = self.prefills[name], FakeSideChannel(self._network, "tool")
        with trio.move_on_after(GRACE_SECONDS + RESTART_SECONDS):
            while engine.draining.value.state is not State.DRAINED:
                with trio.move_on_after(0.1), contextlib.suppress(SideChannelError):
                    decode_report(await channel.connect(engine.host, PORT).ask([encode_drain()]))
                await trio.sleep(0.1)

    def _named(self, name: str) -> Engine:
        return self.decode if name == "d" else self.prefills[name]

    # --- what it hears ------------------------------------------------------------------------------------------------

    def _count_lent(self, name: str) -> int:
        return sum(each == name for each, _ in self._lent.values())

    def _hear_of_lent(
        self, name: str, rank: int, results: KVConnectorTransferResults, report: WorkerReport | None
    ) -> None:
        """vLLM frees what all ranks say is free."""
        for request_id in results.finished_sending:
            _, ranks = self._lent.get(request_id, (name, {rank}))
            if rank in ranks:
                self._complain(f"{name} freed {request_id}, which it does not lend")
            ranks.add(rank)
            if len(ranks) == len(self.prefills[name].ranks):
                self._lent.pop(request_id, None)

    def _hear_of_loaded(self, results: KVConnectorTransferResults, report: WorkerReport | None) -> None:
        quarantined = report.quarantined if report is not None else []
        kept = {block for blocks in quarantined for block in blocks}
        self._quarantined += quarantined
        for request_id in sorted(results.finished_recving):
            asked = self._asked.get(request_id)
            if asked is None:
                self._complain(f"{request_id} was reported, and nobody waits for it")
                continue
            asked.reported.append(trio.current_time())
            asked.failed = request_id in results.failed_recving
            if len(asked.reported) > 1:
                self._complain(f"{request_id} was reported {len(asked.reported)} times")
                continue
            self._check_report(request_id, asked)
            if kept.isdisjoint(asked.local):
                self._give(asked.local)
        for blocks in report.lifted if report is not None else ():
            if blocks not in self._quarantined:
                self._complain(f"blocks {blocks} were never quarantined")
                continue
            self._quarantined.remove(blocks)
            self._give(blocks)

    def _give(self, blocks: list[int]) -> None:
        self._check_unwritten(blocks, "frees")
        self._free += blocks

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _check_report(self, request_id: str, asked: Asked) -> None:
        took = asked.reported[0] - asked.started
        if took > (AT_ONCE_SECONDS if asked.was_dead else REPORTED_SECONDS_MAX):
            self._complain(f"{request_id} was reported after {took:.2f} s")
        expected = self.prefills[asked.prefill].content[asked.remote] if not asked.failed else None
        if expected is not None and (self.reader.memory[asked.local] != expected).any():
            self._complain(f"{request_id} is done, and has other bytes than its own")

    def _check_unwritten(self, blocks: list[int], action: str) -> None:
        start, length = self.reader.memory.ctypes.data, self.reader.memory.strides[0]
        for read in self._world.reads_in_flight():
            if read.initiator is self.reader.port and any(read.writes_into(start + b * length, length) for b in blocks):
                self._complain(f"D {action} blocks {blocks} that a READ may write into")

    def _check_at_rest(self) -> None:
        for request_id, asked in self._asked.items():
            if not asked.reported:
                self._complain(f"{request_id} was never reported")
        if not self.reader.thread.is_dead and (self._quarantined or len(self._free) != BLOCKS):
            self._complain(f"{BLOCKS - len(self._free)} blocks of D are missing, in quarantine {self._quarantined}")
        for request_id, (prefill, _) in self._lent.items():
            if not self.prefills[prefill].is_killed:
                self._complain(f"{prefill} never freed {request_id}")

    def _check_engine_threads(self) -> None:
        for engine in self._engines:
            for error in engine.heard.raised:
                self.complaints.append(f"out of a method that vLLM calls on {engine.name}: {error!r}")
        self.died |= any(engine.has_died for engine in self._engines)


def _pull(request_id: str, address: PeerAddress, lease: LeaseName, groups: object) -> StartPull:
    return StartPull(
        request_id=request_id,
        peer=address,
        lease=lease,
        groups=groups,  # type: ignore[arg-type]
        num_tokens=None,
        remote_num_tokens=None,
        age_seconds=0.0,
    )
