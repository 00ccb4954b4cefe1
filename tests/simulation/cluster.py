"""One run of the simulator: a cluster, its requests, the faults of a plan, and the verdict of the oracles.

The run is a pure function of the plan. Time is a `MockClock` that jumps to whatever comes next; trio's choice between
tasks that could run is drawn from the seed; every other draw comes from a named generator of the seed. Two names that
this needs are private in trio, and asserted to exist.

    safety phase     requests arrive, faults come and go; nothing wrong may happen
    liveness phase   no faults, no new requests: everything that was begun ends
    probes           one request for every pair of engines: it is served
    shutdown         every process stops, and nothing is left of it
"""

from __future__ import annotations

import hashlib
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import trio
from trio.testing import MockClock

from connector.config import ConnectorOptions
from connector.runtime.restarts import RESTART_DELAY_SECONDS_MAX
from connector.tools.conformance import check_records
from statemachine import request
from statemachine.trace import TransitionRecord
from tests.simulation.active_faults import ActiveFaults
from tests.simulation.agenda import Agenda, Signal
from tests.simulation.coverage import TransitionKey, counted_transitions
from tests.simulation.engines import (
    WRONG_TP_SIZES,
)
from tests.simulation.fake_network import FakeNetwork
from tests.simulation.fake_nixl import STRAY_GRACE_SECONDS, FakeNixlWorld, FlyingRead
from tests.simulation.faults import (
    QUIESCE_SECONDS,
    Fault,
    Kind,
    Plan,
    Shape,
    engine_of,
    generator,
    rank_of,
    shape_of,
)
from tests.simulation.inflictor import SHUTDOWN_SECONDS, Inflictor
from tests.simulation.meetings import Meetings
from tests.simulation.oracles import Oracles
from tests.simulation.process import NOTHING_LEFT, PORT, Process, SimulatedEngine, Surroundings
from tests.simulation.verdict import Violation

P = TypeVar("P", bound=SimulatedEngine)
D = TypeVar("D", bound=SimulatedEngine)

LIVENESS_SECONDS = 120.0
"""Long enough for a backlog of prompts behind leases that nobody takes over."""
PROBE_SECONDS = 5.0
PROBE_INTERVAL_SECONDS = 0.1
"""A peer of the probe before, which is unused since then, can be given up for this one."""
SPREAD_SHARE = 0.2
"""How many have samples on several engines."""
BURST_MEAN = 3
"""Prompts that arrive together, on average."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run did, and what was wrong."""

    plan: Plan
    violations: list[Violation]
    requests: int
    outcomes: Counter[str]
    faults_fired: Counter[Kind]
    virtual_seconds: float
    real_seconds: float
    transitions: Counter[TransitionKey]
    trace: list[TransitionRecord]
    moments: list[float]
    """When each record of `trace` was written, in seconds of virtual time."""
    coverage: Counter[str] = field(default_factory=Counter)
    """What the schedulers did, as far as they count it."""

    def trace_lines(self) -> bytes:
        """The trace as JSON lines."""
        return b"".join(msgspec.json.encode(record) + b"\n" for record in self.trace)

    def timed_trace(self) -> Iterable[tuple[float, TransitionRecord]]:
        """Every record, with the second of virtual time in which it was written."""
        return zip(self.moments, self.trace, strict=True)

    def fingerprint(self) -> str:
        return hashlib.sha256(self.trace_lines()).hexdigest()


def run_cluster(plan: Plan, make: Callable[[Plan, Agenda], Cluster[Any, Any]]) -> Result:
    """Run a plan. Whatever the product does wrong is in `violations`; what raises is a fault of the simulator."""
    make_trio_deterministic(plan.seed)
    started = time.perf_counter()
    agenda, clock = Agenda(), MockClock(autojump_threshold=0)
    agenda.drive(clock)
    cluster = make(plan, agenda)
    with counted_transitions() as transitions:
        trio.run(cluster.run, clock=clock)
    return cluster.result(time.perf_counter() - started, transitions)


def make_trio_deterministic(seed: int) -> None:
    internals: Any = trio._core._run
    assert hasattr(internals, "_ALLOW_DETERMINISTIC_SCHEDULING"), "trio has changed; find its successor"
    assert hasattr(internals, "_r"), "trio has changed; find its successor"
    internals._ALLOW_DETERMINISTIC_SCHEDULING = True
    internals._r.seed(seed)


def options_of(shape: Shape) -> ConnectorOptions:
    """Short times, so that every limit is met within a run."""
    return ConnectorOptions(
        kv_lease_duration=shape.lease_seconds,
        lease_limit_seconds=shape.lease_limit_seconds,
        request_timeout_seconds=shape.request_timeout_seconds,
        handshake_timeout_seconds=shape.handshake_timeout_seconds,
        quiesce_timeout_seconds=QUIESCE_SECONDS,
        backend_grace_seconds=1.2 * STRAY_GRACE_SECONDS,  # by whatever clock
        backoff_initial_seconds=0.1,
        backoff_max_seconds=1.0,
        incompatible_backoff_seconds=3.0,
        peer_limit=shape.peer_limit,
        quarantine_limit=1.0,  # but for an engine whose quarantine is to be filled: `Surroundings.options_of`
        verify=shape.verify,
    )


class Cluster(ABC, Generic[P, D]):
    """See the module's docstring. Prefill engines are `P`, decode engines `D`."""

    def __init__(self, plan: Plan, agenda: Agenda) -> None:
        self._plan = plan
        self._agenda = agenda
        self._shape = self._draw_shape()
        self._trace: list[TransitionRecord] = []
        self._chance = generator(plan.seed, "clients")
        self._faults = ActiveFaults(plan)
        self._oracles = Oracles(
            options=self._options(),
            faults=plan.faults,
            isolates=self._shape.peer_limit >= self._engine_ids(),
        )
        self._numbers = 0
        self._open_requests = 0
        self._meetings = Meetings(agenda, self._oracles)
        self._seconds = 0.0
        self._prefills: list[P] = []
        self._decodes: list[D] = []
        self._nursery: trio.Nursery
        self._inflictor: Inflictor

    def _draw_shape(self) -> Shape:
        return shape_of(self._plan)

    def _options(self) -> ConnectorOptions:
        return options_of(self._shape)

    def _engine_ids(self) -> int:
        """How many prefill engines a decode engine gets to know."""
        new_ids = (Kind.CRASH_NEW_ID, Kind.INCOMPATIBLE, Kind.STOP, Kind.WORKER_STOPS, Kind.DRAIN)
        engines = self._shape.prefills + sum(2 * (fault.kind in new_ids) for fault in self._plan.faults)
        # Who is described with other sizes counts once more for each.
        misdirects = any(fault.kind is Kind.WRONG_SIZES for fault in self._plan.faults)
        return engines * (len(WRONG_TP_SIZES) if misdirects else 1)

    def result(self, real_seconds: float, transitions: Counter[TransitionKey]) -> Result:
        self._oracles.coverage["an agent of an ended process was loaded in another"] += self._around.nixl.mistaken
        # What stands in the trace must be what the machines allow, as for a trace of real engines.
        not_allowed = [
            Violation(oracle="trace", detail=str(finding), at_seconds=self._seconds)
            for finding in check_records(self._trace).findings
        ]
        return Result(
            plan=self._plan,
            violations=self._oracles.violations + not_allowed,
            requests=len(self._oracles.pulls),
            outcomes=self._oracles.outcomes(),
            faults_fired=self._faults.fired,
            virtual_seconds=self._seconds,
            real_seconds=real_seconds,
            transitions=transitions,
            trace=self._trace,
            moments=self._around.moments,
            coverage=+self._oracles.coverage,
        )

    async def run(self) -> None:
        agenda = self._agenda
        around = self._around = self._surroundings(agenda)
        around.nixl.note_copied = self._note_copied
        self._make_engines(around)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._inflictor = Inflictor(
                self._plan, self._engines, around, self._meetings, self._faults.fired, nursery.start_soon
            )
            for engine in self._engines:
                nursery.start_soon(engine.run)
            await trio.sleep(0.01)
            await self._live()
            await self._shut_down()
            self._check_attempts()
            self._seconds = trio.current_time()
            nursery.cancel_scope.cancel()

    def _surroundings(self, agenda: Agenda) -> Surroundings:
        return Surroundings(
            agenda=agenda,
            network=FakeNetwork(agenda, self._faults),
            nixl=FakeNixlWorld(agenda, self._faults, self._note_misuse),
            faults=self._faults,
            oracles=self._oracles,
            options=self._oracles.options,
            trace=self._trace,
            reads_inline=self._shape.reads_inline,
            model=self._shape.model,
            engines=self._shape.engines,
            small_quarantines=frozenset(
                fault.target for fault in self._plan.faults if fault.kind is Kind.FULL_QUARANTINE
            ),
            known_peers=self._known_peers(),
        )

    def _known_peers(self) -> dict[str, tuple[str, ...]]:
        """That option, of the engines that have it."""
        known: dict[str, tuple[str, ...]] = {}
        for fault in self._plan.faults:
            if fault.kind is Kind.KNOWN_PEER and fault.at_seconds == 0.0:
                decode, prefill = fault.target.split(">")
                known[decode] = (*known.get(decode, ()), f"{prefill}.sim:{PORT}")
        return known

    async def _live(self) -> None:
        """Everything from the start of the engines to their shutdown."""
        await self._safety_phase()
        await self._come_to_rest()
        await self._probe_all()

    @abstractmethod
    def _make_engines(self, around: Surroundings) -> None:
        """Fill `_prefills` and `_decodes`."""

    @property
    def _engines(self) -> list[P | D]:
        return [*self._prefills, *self._decodes]

    def _engine_chance(self, name: str) -> random.Random:
        return generator(self._plan.seed, f"engine {name}")

    def _note_copied(self, read: FlyingRead) -> None:
        agent_name = read.initiator.agent_name
        rank = self._process_of(agent_name).ranks[rank_of(agent_name) or 0]
        if rank.port is read.initiator:
            (block,) = rank.memory.blocks_at([read.pieces[0][0]])
            self._oracles.note_read_end(engine_of(agent_name), rank.tp_rank, block)

    def _process_of(self, agent_name: str) -> Process:
        return next(each.process for each in self._engines if each.name == engine_of(agent_name))

    def _note_misuse(self, detail: str) -> None:
        self._oracles.complain("agents", detail)

    # --- safety -----------------------------------------------------------------------------------------------------

    async def _safety_phase(self) -> None:
        await self._endure(self._plan.faults, self._arrivals(), self._shape.safety_seconds)

    async def _endure(self, faults: Iterable[Fault], arrivals: Coroutine[Any, Any, None], end_seconds: float) -> None:
        """Clients that arrive, and these faults, until that moment."""
        async with trio.open_nursery() as nursery:
            for fault in faults:
                nursery.start_soon(self._inflict, fault)
            self._agenda.start(arrivals)
            await trio.sleep_until(end_seconds)

    async def _inflict(self, fault: Fault) -> None:
        await self._inflictor.inflict(fault)

    async def _arrivals(self) -> None:
        """Prompts at random, now and then several at once."""
        chance, end = self._chance, self._shape.safety_seconds
        while True:
            await self._agenda.sleep(chance.expovariate(self._shape.requests_per_second / BURST_MEAN))
            if trio.current_time() >= end:
                return
            for _ in range(chance.randint(1, 2 * BURST_MEAN - 1)):
                self._begin(self._ask(chance.choice(self._prefills), chance.choice(self._decodes)))

    def _begin(self, script: Coroutine[Any, Any, None]) -> Signal | trio.Event:
        """Run a client's script, and count it as open until it ends, which the signal says."""
        ended = Signal(self._agenda)

        def end() -> None:
            self._open_requests -= 1
            ended.set()

        self._open_requests += 1
        self._agenda.start(script, end)
        return ended

    async def _run(self, script: Coroutine[Any, Any, None]) -> None:
        """Run a client's script from a task, until it ends."""
        ended = trio.Event()
        self._agenda.start(script, ended.set)
        await ended.wait()

    @abstractmethod
    async def _ask(self, prefill: P, decode: D) -> None:
        """The script of a client: one prompt through both engines."""

    # --- liveness ---------------------------------------------------------------------------------------------------

    async def _come_to_rest(self) -> None:
        with trio.move_on_after(LIVENESS_SECONDS):
            while self._open_requests:
                await trio.sleep(0.1)
        # What nobody took over ends by itself, from when the lease keeper heard of it; it may be about to crash again.
        await trio.sleep(2 * RESTART_DELAY_SECONDS_MAX + self._oracles.options.kv_lease_duration + 1.0)
        self._oracles.check_all_ended()
        await self._meetings.settle()
        await self._check_at_rest("after the liveness phase")

    async def _probe_all(self) -> None:
        for prefill in self._prefills:
            for decode in self._decodes:
                await self._probe_pair(prefill, decode)

    async def _probe_pair(self, prefill: P, decode: D) -> None:
        request_id = f"{decode.name}-probe-of-{prefill.name}"
        await trio.sleep(PROBE_INTERVAL_SECONDS)
        with trio.move_on_after(PROBE_SECONDS) as patience:
            await self._run(self._probe(request_id, prefill, decode))
        pull = self._oracles.pulls.get(request_id)
        if patience.cancelled_caught or pull is None:
            self._oracles.complain("recovery", f"{request_id} did not end")
        elif pull.failure is not None and not pull.is_aborted:
            self._oracles.complain("recovery", f"{request_id}: {pull.failure}")

    @abstractmethod
    async def _probe(self, request_id: str, prefill: P, decode: D) -> None:
        """A request of this pair; the oracles judge it like any other, except that it must succeed."""

    @abstractmethod
    async def _check_at_rest(self, when: str) -> None:
        """Complain about what an engine should not have when nobody wants anything any more."""

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        await trio.sleep(self._oracles.options.kv_lease_duration + 1.0)
        await self._check_at_rest("before the shutdown")
        for engine in self._engines:
            for rank in engine.process.ranks:
                if dead := rank.port.agents_of_the_dead():
                    self._oracles.complain("leaks", f"{engine.name} holds on to {dead}, whose successors it has met")
        self._meetings.end()
        self._check_problems_said()
        for engine in self._engines:
            engine.process.stop()
        await trio.sleep(SHUTDOWN_SECONDS)
        for engine in self._engines:
            if not engine.process.has_ended:
                self._oracles.complain("leaks", f"{engine.name} did not stop")
                continue
            for rank in engine.process.ranks:
                if rank.port.counts_at_close != NOTHING_LEFT:
                    self._oracles.complain(
                        "leaks", f"rank {rank.tp_rank} of {engine.name} left {rank.port.counts_at_close}"
                    )

    def _check_problems_said(self) -> None:
        """Once for each time that a known peer had been met, and once before."""
        for decode in self._decodes:
            for rank in decode.process.ranks:
                for place, count in rank.problems_said.items():
                    prefill = engine_of(place)
                    met = sum(
                        record.machine == "peer"
                        and record.to_state == "ready"
                        and (record.engine_id, record.rank) == (decode.process.engine_id, rank.tp_rank)
                        and record.subject.partition("-")[0] == prefill
                        for record in self._trace
                    )
                    if count > met + 1:
                        whose = f"rank {rank.tp_rank} of {decode.name}"
                        self._oracles.complain(
                            "met", f"{whose} has met {prefill} {met} times, and said {count} times why it had not"
                        )

    def _check_attempts(self) -> None:
        readings = Counter(
            (record.subject, record.rank)
            for record in self._trace
            if record.machine == "request"
            and record.event == request.PeerReady.__name__
            and record.to_state == "reading"
        )
        for (request_id, _), attempts in readings.items():
            self._oracles.check_attempts(attempts, request_id)
