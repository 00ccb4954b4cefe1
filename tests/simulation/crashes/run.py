"""The plan that is played for each point, and what must hold; see the package's docstring.

One decode engine and four prefill engines, a dozen requests in a few seconds of virtual time: served, tried again,
aborted, refused for their parameters, quarantined, killed over; a lease that nobody takes, garbage on both sockets,
a tool that asks. Then probes: requests long after the fault, one of them from an engine that has no points.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio
from trio.testing import MockClock

from connector.config import ConnectorOptions
from connector.observe.log import get_logger
from connector.ports.side_channel import SideChannelError
from connector.protocol import (
    AbortPull,
    LeaseComputing,
    LeaseGranted,
    PeerAddress,
    StartPull,
    TrackLease,
)
from connector.step_metadata import WorkerReport
from connector.wire.inspection import Inspect, encode_question
from statemachine.lease import LeaseName
from tests.rig.pulls import one_group
from tests.simulation.agenda import Agenda
from tests.simulation.cluster import make_trio_deterministic
from tests.simulation.crashes.engines import BLOCKS, PORT, Engine
from tests.simulation.crashes.points import Awaits, Injected, Points, Site
from tests.simulation.fake_network import FakeNetwork, FakeSideChannel
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
MOMENTS = (0.4, 1.0, 2.0, 2.25, 9.0)
"""When awaits are made to raise that go on waiting: idle and connected, one READ hangs, another one does, P dies over
one, all is quiet."""
PROBES_AT = 14.0
"""Long after everything else."""
PROBED_AFTER_SECONDS = 5.0
"""How long after a fault a request has to be served."""
RESTART_SECONDS = 5.0
"""The longest pause of an actor that crashes again and again."""
REPORTED_SECONDS_MAX = (
    OPTIONS.request_timeout_seconds + OPTIONS.quiesce_timeout_seconds + RESTART_SECONDS + 10 * STEP_SECONDS
)
AT_ONCE_SECONDS = 2.5 * STEP_SECONDS
END_SECONDS = 26.0
REQUEST_BLOCKS = 3

SILENT = frozenset({"log"})
"""Kinds of points of which the log cannot say anything."""


class Rules(NixlRules):
    """READs of some agents are held up for a while, or fail."""

    def __init__(self) -> None:
        self.stalled_until: dict[str, float] = {}
        self.failing: Counter[str] = Counter()

    def read_stalls_until(self, initiator: str, target: str) -> float:
        return self.stalled_until.get(target, 0.0)

    def read_error(self, initiator: str, target: str) -> bool:
        if not self.failing[target]:
            return False
        self.failing[target] -= 1
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


def play(
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
    points = Points(target, error, struck)
    agenda, clock = Agenda(), MockClock(autojump_threshold=0)
    agenda.drive(clock)
    lines, breaks = _Lines(), _Breaks(points)
    logger = get_logger().logger
    propagates, level = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    logger.addHandler(breaks)
    play = _Play(points, agenda, moment)
    try:
        trio.run(play.run, clock=clock, instruments=[Awaits(points)])
    finally:
        logger.removeHandler(lines)
        logger.removeHandler(breaks)
        logger.propagate = propagates
        logger.setLevel(level)
    complaints = play.complaints
    if not (target is None and struck is None) and points.hit is None:
        complaints.append("the point was never reached")
    is_said = any("injected" in text for text in lines.texts)
    if points.hit is not None and points.hit[0].kind not in SILENT and not is_said:
        complaints.append("the log says nothing of it")
    return Verdict(points.sites, points.waiting, points.hit and points.hit[0], complaints, play.died, lines.texts)


class _Play:
    """The plan."""

    def __init__(self, points: Points, agenda: Agenda, moment: float | None) -> None:
        self.points = points
        self._moment = moment
        self.complaints: list[str] = []
        self.died = False
        self._agenda = agenda
        self._network = FakeNetwork(agenda)
        self._rules = Rules()
        self._world = FakeNixlWorld(agenda, self._rules, self._note_misuse)
        self._asked: dict[str, Asked] = {}
        self._free = list(range(BLOCKS))
        self._quarantined: list[list[int]] = []
        self._lent: dict[str, tuple[str, float]] = {}
        self._leases: dict[str, LeaseName] = {}
        self._remote_free = 0

    def _note_misuse(self, detail: str) -> None:
        self.complaints.append(f"misuse of NIXL: {detail}")

    def _complain(self, detail: str) -> None:
        self.complaints.append(f"{trio.current_time():.2f} s: {detail}")

    # --- the plan ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        nobodys = Points()  # the last engine meets no faults
        self.prefills = {
            name: Engine(
                nobodys if name == "p3" else self.points,
                self._world,
                self._network,
                name,
                OPTIONS,
                lambda results, report, name=name: self._hear_of_lent(name, results),
            )
            for name in ("p0", "p1", "p2", "p3")
        }
        self.decode = Engine(self.points, self._world, self._network, "d", OPTIONS, self._hear_of_loaded)
        for engine in self.prefills.values():
            engine.memory[:] = [[(ord(engine.name[1]) * 31 + block * 7 + 1) % 251] for block in range(BLOCKS)]
        async with trio.open_nursery() as nursery:
            for engine in self._engines:
                await nursery.start(engine.thread.host)
                await nursery.start(engine.listener.host)
            nursery.start_soon(self._step)
            await trio.sleep(0.05)
            self.points.armed = True
            if self._moment is not None:
                self._agenda.at(self._moment, self.points.strike)
            await self._play()
            await self._probe()
            self._check_at_rest()
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

    async def _play(self) -> None:
        rules, agenda = self._rules, self._agenda
        sleep = trio.sleep_until
        await self._ask("served", "p0")
        await self._ask("meets p2", "p2")
        await sleep(MOMENTS[0])
        for number, prefill in enumerate(("p0", "p1", "p0")):
            await self._ask(f"together {number}", prefill)
        await sleep(0.6)
        rules.failing["p0.0"] = 1
        await self._ask("tried again", "p0")
        await sleep(0.9)
        rules.stalled_until["p0.0"] = 1.1
        await self._ask("aborted", "p0")
        await trio.sleep(2 * STEP_SECONDS)
        self.decode.commands.append(AbortPull(request_id="aborted"))
        await sleep(1.3)
        await self._ask("of blocks that there are not", "p0", remote=[BLOCKS + 9])
        self._announce("needs nothing", "p0")
        self._settle("needs nothing", "p0")
        await sleep(1.5)
        await self._ask("used before", "p0", lease=self._leases["served"])
        await self._ask("of wrong sizes", "p0", tp_size=2)
        self._announce("left the queue", "p1")
        self._lend("p1", "left the queue")
        await trio.sleep(4 * STEP_SECONDS)
        self._settle("left the queue", "p1")
        await sleep(1.8)
        rules.stalled_until["p1.0"] = 4.4
        await self._ask("in quarantine", "p1")
        self._lend("p0", "nobody's")
        agenda.after(0.0, lambda: self._network.inject("p0.host", PORT, (b"garbage",)))
        agenda.after(0.0, lambda: self._network.inject("p0.0", self.prefills["p0"].control.port, (b"garbage",)))
        self._world.send("stranger", self.prefills["p0"].port, b"garbage")
        await self._inspect("p0")
        await self._inspect("d")
        await sleep(2.2)
        rules.stalled_until["p2.0"] = 9.0
        await self._ask("killed over", "p2")
        await trio.sleep(3 * STEP_SECONDS)
        self.prefills["p2"].kill()
        await sleep(2.6)
        await self._ask("of the dead", "p2")
        await sleep(6.0)
        for name in ("p0", "p1"):
            await self._ask(f"in the end {name}", name)
        await sleep(PROBES_AT)

    async def _probe(self) -> None:
        """Requests that come later."""
        for name in ("p0", "p1", "p3"):
            await self._ask(f"probe {name}", name)
        await trio.sleep(2.0)
        hit = self.points.hit
        if hit is not None and hit[1] > PROBES_AT - PROBED_AFTER_SECONDS:
            return
        for name in ("p0", "p1", "p3"):
            asked = self._asked.get(f"probe {name}")
            excused = self.decode.has_died or self.prefills[name].has_died
            if asked is not None and (asked.failed or not asked.reported) and not excused:
                self._complain(f"a request from {name} that comes later is not served")
        await trio.sleep_until(END_SECONDS - 4.0)

    async def _shut_down(self) -> None:
        self._free_of_points()
        for engine in self._engines:
            if not engine.is_killed:
                engine.shut_down()
        with trio.move_on_after(8.0):
            while not all(e.is_killed or (e.thread.has_ended and e.listener.has_ended) for e in self._engines):
                await trio.sleep(0.05)
        for engine in self._engines:
            if not engine.is_killed and not (engine.thread.has_ended and engine.listener.has_ended):
                self._complain(f"{engine.name} does not stop")

    def _free_of_points(self) -> None:
        self.died = any(engine.has_died for engine in self._engines)

    # --- what a scheduler does ----------------------------------------------------------------------------------------

    def _lend(self, prefill: str, request_id: str) -> LeaseName | None:
        """P has computed the prompt of a request; None: it lends nothing any more."""
        engine = self.prefills[prefill]
        lease = LeaseName(f"{prefill}-{request_id}", len(self._leases) + 1)
        self._leases[request_id] = lease
        if engine.is_killed:
            return lease
        if engine.heard.stopped is not None or engine.listener.is_dead:
            return None
        engine.commands.append(LeaseComputing(lease=lease))
        engine.commands.append(LeaseGranted(lease=lease, lease_seconds=OPTIONS.kv_lease_duration, blocks=3))
        self._lent[lease.request_id] = (prefill, trio.current_time())
        return lease

    def _announce(self, request_id: str, prefill: str, address: PeerAddress | None = None) -> None:
        lease = self._leases.get(request_id) or LeaseName(f"{prefill}-{request_id}", len(self._leases) + 1)
        self._leases[request_id] = lease
        peer = address or self.prefills[prefill].address
        self.decode.commands.append(TrackLease(request_id=request_id, peer=peer, lease=lease, age_seconds=0.0))

    def _settle(self, request_id: str, prefill: str) -> None:
        address, lease = self.prefills[prefill].address, self._leases[request_id]
        self.decode.commands.append(_pull(request_id, address, lease, (), awaited=False))

    async def _ask(
        self,
        request_id: str,
        prefill: str,
        *,
        remote: Sequence[int] | None = None,
        lease: LeaseName | None = None,
        tp_size: int = 1,
    ) -> None:
        """A prompt through P to D."""
        if lease is None:
            lease = self._lend(prefill, request_id)
            if lease is None:
                return  # D computes it
        else:
            self._leases[request_id] = lease
        engine = self.prefills[prefill].address
        address = PeerAddress(engine_id=engine.engine_id, host=engine.host, port=engine.port, tp_size=tp_size)
        await trio.sleep(1.5 * STEP_SECONDS)
        self._announce(request_id, prefill, address)
        await trio.sleep(1.5 * STEP_SECONDS)
        local = [self._free.pop(0) for _ in range(REQUEST_BLOCKS)]
        if remote is None:
            first = len(self._asked) * REQUEST_BLOCKS % (BLOCKS - REQUEST_BLOCKS)
            remote = range(first, first + REQUEST_BLOCKS)
        self._check_unwritten(local, "hands out")
        self.decode.memory[local] = 0
        self._asked[request_id] = Asked(
            prefill, trio.current_time(), local, list(remote), was_dead=self.decode.thread.is_dead
        )
        groups = one_group(local, list(remote) + list(range(REQUEST_BLOCKS - len(remote))))
        self.decode.commands.append(_pull(request_id, address, lease, groups))

    async def _inspect(self, name: str) -> None:
        """A tool asks an engine."""
        engine = self.decode if name == "d" else self.prefills[name]
        channel = FakeSideChannel(self._network, "tool")
        with trio.move_on_after(0.1), contextlib.suppress(SideChannelError):  # or it has died
            link = await channel.open_link(engine.host, engine.control.port)
            for number, what in enumerate(("engine", "peers", "requests", "leases", "records")):
                link.send(encode_question(Inspect(number=number, what=what)))  # type: ignore[arg-type]
            while True:
                await link.receive()

    # --- what it hears ------------------------------------------------------------------------------------------------

    def _hear_of_lent(self, name: str, results: object) -> None:
        for request_id in results.finished_sending:  # type: ignore[attr-defined]
            if self._lent.pop(request_id, None) is None:
                self._complain(f"{name} freed {request_id}, which it does not lend")

    def _hear_of_loaded(self, results: object, report: WorkerReport | None) -> None:
        quarantined = report.quarantined if report is not None else []
        kept = {block for blocks in quarantined for block in blocks}
        self._quarantined += quarantined
        for request_id in sorted(results.finished_recving):  # type: ignore[attr-defined]
            asked = self._asked.get(request_id)
            if asked is None:
                self._complain(f"{request_id} was reported, and nobody waits for it")
                continue
            asked.reported.append(trio.current_time())
            asked.failed = request_id in results.failed_recving  # type: ignore[attr-defined]
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
        expected = self.prefills[asked.prefill].memory[asked.remote] if not asked.failed else None
        if expected is not None and (self.decode.memory[asked.local] != expected).any():
            self._complain(f"{request_id} is done, and has other bytes than its own")

    def _check_unwritten(self, blocks: list[int], action: str) -> None:
        start, length = self.decode.memory.ctypes.data, self.decode.memory.strides[0]
        for read in self._world.reads_in_flight():
            if read.initiator is self.decode.port and any(read.writes_into(start + b * length, length) for b in blocks):
                self._complain(f"D {action} blocks {blocks} that a READ may write into")

    def _check_at_rest(self) -> None:
        for request_id, asked in self._asked.items():
            if not asked.reported:
                self._complain(f"{request_id} was never reported")
        if not self.decode.thread.is_dead and (self._quarantined or len(self._free) != BLOCKS):
            self._complain(f"{BLOCKS - len(self._free)} blocks of D are missing, in quarantine {self._quarantined}")
        for request_id, (prefill, _) in self._lent.items():
            if not self.prefills[prefill].is_killed:
                self._complain(f"{prefill} never freed {request_id}")

    def _check_engine_threads(self) -> None:
        for engine in self._engines:
            for error in engine.heard.raised:
                self.complaints.append(f"out of a method that vLLM calls on {engine.name}: {error!r}")
        self.died |= any(engine.has_died for engine in self._engines)


def _pull(
    request_id: str, address: PeerAddress, lease: LeaseName, groups: object, *, awaited: bool = True
) -> StartPull:
    return StartPull(
        request_id=request_id,
        peer=address,
        lease=lease,
        groups=groups,  # type: ignore[arg-type]
        num_tokens=None,
        remote_num_tokens=None,
        awaited=awaited,
        age_seconds=0.0,
    )
