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
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import msgspec
import trio
from trio.testing import MockClock

from connector.config import ConnectorOptions
from connector.observe import catalogue
from connector.ports.nixl import PortCounts
from connector.runtime.mailbox import Mailbox
from connector.runtime.restarts import RESTART_DELAY_SECONDS_MAX
from connector.tools.conformance import check_records
from connector.wire import control
from connector.wire.administration import Meet
from connector.wire.notifications import encode_release
from statemachine import request
from statemachine.draining import State
from statemachine.lease import Lease, LeaseName
from statemachine.trace import TransitionRecord
from tests.simulation.active_faults import ActiveFaults
from tests.simulation.agenda import Agenda, Signal
from tests.simulation.coverage import TransitionKey, counted_transitions
from tests.simulation.engines import (
    REQUEST_BLOCKS_MAX,
    WRONG_TP_SIZES,
    DecodeEngine,
    Engine,
    Prefilled,
    PrefillEngine,
    prompt_tokens,
)
from tests.simulation.fake_network import FakeLink, FakeNetwork
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
from tests.simulation.meetings import Meetings
from tests.simulation.oracles import BUILTIN_READERS, InjectedCrash, Oracles
from tests.simulation.process import (
    GRACE_LEASES,
    PORT,
    SLEW_PPB_MAX,
    Process,
    Rank,
    Surroundings,
    Variant,
)
from tests.simulation.shapes import HEARD_SECONDS_MAX
from tests.simulation.verdict import Violation

LIVENESS_SECONDS = 120.0
"""Long enough for a backlog of prompts behind leases that nobody takes over."""
PROBE_SECONDS = 5.0
PROBE_INTERVAL_SECONDS = 0.1
"""A peer of the probe before, which is unused since then, can be given up for this one."""
SHUTDOWN_SECONDS = 10.0
RESTART_SECONDS_MIN = 0.01
LAST_RANK_SECONDS_MAX = 0.3
"""How long the rest of an engine may outlive one of its ranks."""
SAMPLES_SHARE = 0.08
"""How many prompts have two samples on one engine."""
SPREAD_SHARE = 0.2
"""How many have samples on several engines."""
SLEW_SECONDS_MAX = 0.6
"""How long a clock keeps its rate while it is slewed, if not all the time."""
STOP_TOLD_SECONDS = 0.01
"""How soon a worker says that it can serve no more."""
RESET_SECONDS_MAX = 0.4
"""How often links are reset, or metadata dropped, while that fault lasts."""
BURST_MEAN = 3
"""Prompts that arrive together, on average."""
GARBAGE_SECONDS = 0.02
"""How often garbage comes while that fault lasts."""
FLOODING_STRANGERS = 3
FLOOD_GAP_SECONDS = 0.005
"""How often each of them sends a message; most cost ten units."""
GARBAGE = (
    b"",
    b"\xff\xfe",
    b"nonsense",
    b"nobody:1",
    b"nobody:99999999999",
    b":1",
    b"HB:",
    b"HB:nobody,,nothing",
    b"HB:\xff",
    b"\x93\xacget_meta_msg\x00\x05",
    b"\x93\xacget_meta_msg\xff\xff",
    bytes(2000),
    *control.encode_request(
        control.Hold(engine_id="stranger", rank=0, ranks=1, sent_ns=1, leases=(LeaseName("nobody", 1),))
    ),
    *control.encode_request(
        control.Release(engine_id="stranger", rank=1, ranks=1024, leases=(LeaseName("nobody", 0),) * 3)
    ),
    *control.encode_answer(control.HoldAnswer(sent_ns=0)),
)


def _release_by_a_stranger(leases: Iterable[Lease]) -> tuple[bytes, ...] | None:
    """Of what a rank is promised: tools are told by which engine and under which name it is held."""
    for lease in leases:
        for holder in lease.holders:
            for reader in sorted(holder.promised):
                release = control.Release(
                    engine_id=holder.engine_id, rank=reader.rank, ranks=holder.ranks, leases=(lease.name,)
                )
                return control.encode_request(release)
    return None


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


def simulate(plan: Plan) -> Result:
    """Run a plan. Whatever the product does wrong is in `violations`; what raises is a fault of the simulator."""
    return run_cluster(plan, Cluster)


def run_cluster(plan: Plan, make: Callable[[Plan, Agenda], Cluster]) -> Result:
    """Run a plan on a cluster of some kind; see `simulate`."""
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


class Cluster:
    """See the module's docstring."""

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
        self._prefills: list[PrefillEngine] = []
        self._decodes: list[DecodeEngine] = []
        self._nursery: trio.Nursery

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

    def _make_engines(self, around: Surroundings) -> None:
        self._prefills = [PrefillEngine(around, name, self._engine_chance(name)) for name in self._shape.prefill_names]
        self._decodes = [DecodeEngine(around, name, self._engine_chance(name)) for name in self._shape.decode_names]

    @property
    def _engines(self) -> list[Engine]:
        return [*self._prefills, *self._decodes]

    def _engine_chance(self, name: str) -> random.Random:
        return generator(self._plan.seed, f"engine {name}")

    def _note_copied(self, read: FlyingRead) -> None:
        agent_name = read.initiator.agent_name
        rank = self._engine(agent_name).process.ranks[rank_of(agent_name) or 0]
        if rank.port is read.initiator:
            (block,) = rank.memory.blocks_at([read.pieces[0][0]])
            self._oracles.note_read_end(engine_of(agent_name), rank.tp_rank, block)

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

    async def _ask(self, prefill: PrefillEngine, decode: DecodeEngine) -> None:
        """One prompt through both engines; sometimes with several samples, which share P's blocks."""
        self._numbers += 1
        number = self._numbers
        blocks = self._chance.randint(1, REQUEST_BLOCKS_MAX)
        prefilled = await prefill.prefill(f"{prefill.name}-r{number}", number, prompt_tokens(number, blocks))
        if prefilled is None:
            return
        if not self._shape.numbers_leases:
            prefilled = replace(prefilled, lease=LeaseName(prefilled.request_id, 0))
        await self._agenda.sleep(self._chance.uniform(0.0001, 0.006))
        if self._faults.hits(Kind.TWO_RANKS, prefill.name):
            await self._read_with_two_ranks(prefill, prefilled)
            return
        samples = self._draw_samples(prefill, decode, number)
        misdirected = None
        if self._faults.hits(Kind.WRONG_SIZES, decode.name):
            misdirected = self._begin(decode.serve_misdirected(f"{decode.name}-r{number}.astray", prefilled))
        served: list[Signal | trio.Event] = []
        for engine, request_ids in samples:
            if engine.process.has_died():
                continue
            engine.announce(request_ids, prefilled)
            served += [self._begin(engine.serve(request_id, prefilled)) for request_id in request_ids]
        for each in (*served, misdirected):
            if each is not None:
                await each.wait()
        await self._repeat(decode, number, prefilled)

    def _draw_samples(
        self, prefill: PrefillEngine, decode: DecodeEngine, number: int
    ) -> list[tuple[DecodeEngine, list[str]]]:
        """Which engines are asked for which samples. A balancer may spread the samples of a prompt over engines."""
        chance = self._chance
        kind = chance.random()
        counts = {decode.name: 2 if kind < SAMPLES_SHARE else 1}
        spreads = self._faults.hits(Kind.TWO_HOLDERS, prefill.name) or kind > 1.0 - SPREAD_SHARE
        if spreads and len(self._decodes) > 1:
            self._oracles.coverage["samples on several engines"] += 1
            for other in self._decodes:
                if other is not decode and (len(self._decodes) == 2 or chance.random() < 0.7):
                    counts[other.name] = chance.randint(1, 2)
        return [
            (engine, [f"{engine.name}-r{number}.{sample}" for sample in range(counts[engine.name])])
            for engine in self._decodes
            if engine.name in counts
        ]

    async def _repeat(self, decode: DecodeEngine, number: int, prefilled: Prefilled) -> None:
        """A router repeats itself: on the same engine, which may have restarted since, or on another one."""
        if self._faults.hits(Kind.ROUTER_RETRY, decode.name) is None:
            return
        await self._agenda.sleep(self._chance.uniform(0.0, 0.3))
        engine = decode if self._chance.random() < 0.5 else self._chance.choice(self._decodes)
        await engine.serve_again(f"{engine.name}-r{number}.again", prefilled)

    async def _read_with_two_ranks(self, prefill: PrefillEngine, prefilled: Prefilled) -> None:
        """A built-in engine whose two ranks both read from this one, and say so; the first one says it twice."""
        ranks, oracles, name = prefill.process.ranks, self._oracles, BUILTIN_READERS
        oracles.take_over(prefilled.owner, prefilled.request_id, name, name, 2)
        for reader in (0, 0, 1):
            await self._agenda.sleep(self._chance.uniform(0.0, 0.2))
            oracles.let_go(prefilled.owner, prefilled.request_id, name, reader)
            rank = ranks[reader * len(ranks) // 2]
            release = encode_release(prefilled.request_id, 2 // len(ranks))
            self._around.nixl.send(f"{name}.{reader}", rank.port, release)

    async def _inflict(self, fault: Fault) -> None:
        """Faults that are events; the others are looked up by the fakes."""
        await trio.sleep_until(fault.at_seconds)
        match fault.kind:
            case Kind.CRASH_NEW_ID | Kind.CRASH_SAME_ID | Kind.CRASH_DECODE:
                await self._crash(self._engine(fault.target), fault)
            case Kind.STOP:
                engine = self._engine(fault.target)
                if not engine.process.has_died():
                    self._strike(fault)
                    await self._stop(engine, fault)
            case Kind.DRAIN:
                await self._drain(self._engine(fault.target), fault)
            case Kind.INCOMPATIBLE:
                await self._replace_by_another_model(self._engine(fault.target), fault)
            case Kind.PAUSE:
                self._strike(fault)
                ports = [rank.port for rank in self._ranks(fault)]
                for port in ports:
                    port.pause()
                await trio.sleep_until(fault.end_seconds)
                for port in ports:
                    port.resume()
            case Kind.WALL_CLOCK_JUMP:
                self._strike(fault)
                jump = generator(self._plan.seed, str(fault.at_seconds)).uniform(-1e5, 1e5)
                for rank in self._ranks(fault):
                    rank.clock.machine.wall_error_seconds += jump
            case Kind.CLOCK_SLEW:
                await self._slew_clocks(fault)
            case Kind.LINK_RESET:
                await self._reset_links(fault)
            case Kind.METADATA_DROPPED:
                await self._drop_metadata(fault)
            case Kind.WORKER_STOPS:
                await self._break_ports(self._engine(fault.target), fault)
            case Kind.KNOWN_PEER:
                self._name_peer(fault)
            case Kind.GARBAGE:
                await self._send_garbage(fault)
            case Kind.FLOOD:
                await self._flood(fault)
            case Kind.ACTOR_CRASH | Kind.CONTROL_CRASH | Kind.KEEPER_CRASH:
                await self._crash_actors(fault)
            case _:
                pass

    async def _crash(self, engine: Engine, fault: Fault) -> None:
        if engine.process.has_died():
            return  # It lies dead already; who killed it brings it back.
        self._strike(fault)
        old = engine.process
        ranks = self._ranks(fault)
        if len(ranks) < len(old.ranks):
            for rank in ranks:
                rank.kill()
            await trio.sleep(generator(self._plan.seed, str(fault.at_seconds)).uniform(0.0, LAST_RANK_SECONDS_MAX))
            if engine.process is not old or old.has_died():
                return
        engine.crash()
        # Counted from now: the last rank may have died late, and the port is free when its tasks have ended.
        await trio.sleep_until(max(fault.end_seconds, trio.current_time() + RESTART_SECONDS_MIN))
        self._restart(engine, old.engine_id if fault.kind is Kind.CRASH_SAME_ID else None)

    async def _drain(self, engine: Engine, fault: Fault) -> None:
        """An operator lets an engine drain, ends it when it says that it has, and starts another in its place."""
        process = engine.process
        if process.has_died() or process.is_stopping or process.draining is None:
            return
        self._strike(fault)
        process.draining.ask("fault")
        draining = process.draining
        patience_seconds = 2 * GRACE_LEASES * self._oracles.options.kv_lease_duration
        with trio.move_on_after(patience_seconds):
            while draining.value.state is not State.DRAINED and engine.process is process and not process.has_died():
                await trio.sleep(0.01)
        if engine.process is not process or process.has_died() or process.is_stopping:
            return
        if draining.value.state is not State.DRAINED:
            self._oracles.complain("draining", f"{engine.name} did not drain within {patience_seconds:g} s")
        elif (lent := engine.lent_prefills) and process.listener_clock.now_ns() < draining.value.ends_ns:
            self._oracles.complain("draining", f"{engine.name} said that it had drained with {lent} prefill(s) lent")
        self._oracles.coverage["an engine drained"] += draining.value.state is State.DRAINED
        keeps_id = generator(self._plan.seed, f"drain at {fault.at_seconds}").random() < 0.5
        await self._stop(engine, fault, process.engine_id if keeps_id else None)

    async def _stop(self, engine: Engine, fault: Fault, engine_id: str | None = None) -> None:
        """An orderly shutdown in the middle of everything, and a restart."""
        stopping = engine.process
        stopping.stop()
        with trio.move_on_after(SHUTDOWN_SECONDS):
            while not stopping.has_ended:
                await trio.sleep(0.01)
        if not stopping.has_ended:
            self._oracles.complain("leaks", f"{engine.name} did not stop")
        await trio.sleep(2 * HEARD_SECONDS_MAX)  # what was said before may still be on its way to a rank
        if stopping.has_died() or stopping.has_lost_a_rank:
            return
        self._oracles.check_all_reported(engine.name)
        engine.crash()
        await trio.sleep_until(max(fault.end_seconds, trio.current_time() + RESTART_SECONDS_MIN))
        self._restart(engine, engine_id)

    async def _replace_by_another_model(self, engine: Engine, fault: Fault) -> None:
        """An operator's mistake, and its correction."""
        if engine.process.has_died():
            return
        self._strike(fault)
        engine.crash()
        await trio.sleep(RESTART_SECONDS_MIN)
        chance = generator(self._plan.seed, f"variant at {fault.at_seconds}")
        wrong = self._restart(
            engine, None, chance.choice([Variant.OTHER_MODEL, Variant.OTHER_BLOCKS, Variant.OTHER_WEIGHTS])
        )
        await trio.sleep_until(max(fault.end_seconds, trio.current_time()))
        if engine.process is wrong and not wrong.has_died():
            engine.crash()
            await trio.sleep(RESTART_SECONDS_MIN)
            self._restart(engine, None)

    def _restart(self, engine: Engine, engine_id: str | None, variant: Variant = Variant.SAME) -> Process:
        """A new life; without an engine id, a new one is drawn, as vLLM does."""
        engine.start(engine_id or f"{engine.name}-life{engine.process.life + 1}", variant)
        self._nursery.start_soon(engine.run)
        return engine.process

    def _name_peer(self, fault: Fault) -> None:
        """An operator names a prefill engine to a decode engine: by an option, or by a message to the life of now."""
        names = fault.target.split(">")
        decode, prefill = (self._engine(name) for name in names)
        assert isinstance(decode, DecodeEngine)
        assert isinstance(prefill, PrefillEngine)
        told = decode.process
        if fault.at_seconds > 0.0:
            if told.has_died() or told.is_stopping:
                return
            meet = control.encode_request(Meet(places=(prefill.process.place,)))
            for rank in told.ranks:
                self._around.network.inject(rank.host, rank.control.port, meet)
        self._strike(fault)
        is_by_option = fault.at_seconds == 0.0
        # A message may be lost that comes while something else goes wrong.
        if self._oracles.isolates and (is_by_option or not self._oracles.is_disturbed(*names)):
            self._meetings.watch(decode, prefill, None if is_by_option else told)

    async def _send_garbage(self, fault: Fault) -> None:
        chance = generator(self._plan.seed, f"garbage at {fault.at_seconds}")
        while trio.current_time() < fault.end_seconds:
            self._strike(fault)
            frames = tuple(chance.choice(GARBAGE) for _ in range(chance.randint(0, 3)))
            self._around.network.inject(f"{fault.target}.sim", PORT, frames)
            rank = chance.choice(self._ranks(fault))
            self._around.network.inject(rank.host, rank.control.port, frames[:1] or (chance.choice(GARBAGE),))
            self._around.nixl.send("stranger.1", rank.port, chance.choice(GARBAGE))
            for each in self._ranks(fault):
                if (forged := _release_by_a_stranger(each.supervisor._lease_keeper.leases())) is not None:
                    self._around.network.inject(each.host, each.control.port, forged)
                    self._oracles.coverage["released by a stranger in the name of a holder"] += 1
            await trio.sleep(GARBAGE_SECONDS)

    async def _flood(self, fault: Fault) -> None:
        """Strangers send to all sockets of an engine whatever they can; who is cut off comes back from elsewhere."""
        chance = generator(self._plan.seed, f"flood at {fault.at_seconds}")
        network = self._around.network
        strangers = itertools.count(1)
        links: dict[tuple[str, int], list[FakeLink]] = {}
        while trio.current_time() < fault.end_seconds:
            self._strike(fault)
            sockets = [(f"{fault.target}.sim", PORT), *((r.host, r.control.port) for r in self._ranks(fault))]
            for address in sockets:
                open_links = links.setdefault(address, [])
                for ended in [link for link in open_links if not link.send((chance.choice(GARBAGE),))]:
                    ended.close()
                    open_links.remove(ended)
                if len(open_links) < FLOODING_STRANGERS:
                    open_links.append(FakeLink(network, f"stranger.{next(strangers)}", *address))
            await trio.sleep(FLOOD_GAP_SECONDS)
        for link in itertools.chain(*links.values()):
            link.close()

    async def _slew_clocks(self, fault: Fault) -> None:
        chance = generator(self._plan.seed, f"slew at {fault.at_seconds}")
        machines = [rank.clock.machine for rank in self._ranks(fault)]
        keeps_seconds = chance.choice([SLEW_SECONDS_MAX, inf])
        while trio.current_time() < fault.end_seconds:
            self._strike(fault)
            for machine in machines:
                machine.slew(chance.choice([-SLEW_PPB_MAX, SLEW_PPB_MAX, chance.randint(-SLEW_PPB_MAX, SLEW_PPB_MAX)]))
            rest_seconds = fault.end_seconds - trio.current_time()
            await trio.sleep(
                rest_seconds if keeps_seconds == inf else min(chance.uniform(0.0, keeps_seconds), rest_seconds)
            )
        for machine in machines:
            machine.slew(0)

    async def _reset_links(self, fault: Fault) -> None:
        chance = generator(self._plan.seed, f"resets at {fault.at_seconds}")
        decode, prefill = map(engine_of, fault.target.split(">"))

        def is_meant(source: str, target: str) -> bool:
            return (engine_of(source), engine_of(target)) == (decode, prefill) and fault.hits((source, target))

        while trio.current_time() < fault.end_seconds:
            if chance.random() < fault.probability and self._around.network.reset_links(is_meant):
                self._strike(fault)
            await trio.sleep(chance.uniform(0.0, RESET_SECONDS_MAX))

    async def _drop_metadata(self, fault: Fault) -> None:
        """NIXL forgets what was loaded of a prefill engine, again and again."""
        chance = generator(self._plan.seed, f"metadata dropped at {fault.at_seconds}")
        decode, prefill = map(engine_of, fault.target.split(">"))
        while trio.current_time() < fault.end_seconds:
            for rank in self._engine(decode).process.ranks:
                for agent in rank.port.agents_of(prefill):
                    if fault.hits((rank.port.agent_name, agent)) and chance.random() < fault.probability:
                        rank.port.forget_agent(agent)
                        self._strike(fault)
            await trio.sleep(chance.uniform(0.0, RESET_SECONDS_MAX))

    async def _break_ports(self, engine: Engine, fault: Fault) -> None:
        """A worker can serve no more; its engine goes on until somebody restarts it. One that is shutting down does not
        say so."""
        broken = engine.process
        if broken.has_died() or broken.is_stopping:
            return
        self._strike(fault)
        ranks = [rank for rank in self._ranks(fault) if not rank.is_dead]
        for rank in ranks:
            rank.port.break_down("a fault of the plan")
        await trio.sleep(STOP_TOLD_SECONDS)
        for rank in ranks:
            if not (rank.has_stopped or rank.is_dead or rank.port.is_paused or broken.is_stopping):
                self._oracles.complain(
                    "health", f"rank {rank.tp_rank} of {engine.name} does not say that it has stopped"
                )
        await trio.sleep_until(max(fault.end_seconds, trio.current_time() + RESTART_SECONDS_MIN))
        if engine.process is not broken or broken.has_died():
            return
        engine.crash()
        await trio.sleep(RESTART_SECONDS_MIN)
        self._restart(engine, None)

    async def _crash_actors(self, fault: Fault) -> None:
        chance = generator(self._plan.seed, f"crash at {fault.at_seconds}")
        while trio.current_time() < fault.end_seconds:
            self._crash_one(fault, chance)
            await trio.sleep(chance.uniform(0.05, 0.5))

    def _crash_one(self, fault: Fault, chance: random.Random) -> None:
        """Unless it waits for its restart: crashes would pile up in front of everything else."""
        if fault.kind is Kind.CONTROL_CRASH:
            listeners: list[Any] = [rank.control for rank in self._ranks(fault)]
            if rank_of(fault.target) is None:
                listeners.append(self._engine(fault.target).process.listener._listener)
            listener = chance.choice(listeners)
            if not listener.waiting:
                self._strike(fault)
                listener.poison(_Poison())
            return
        supervisor = chance.choice(self._ranks(fault)).supervisor
        if fault.kind is Kind.KEEPER_CRASH:
            inbox: Mailbox[Any] = supervisor._lease_keeper._inbox
            if len(inbox) == 0:
                self._strike(fault)
                inbox.put(_Poison())
            return
        actors = list(supervisor._peers.values())
        if actors and not (actor := chance.choice(actors))._inbox:
            self._strike(fault)
            actor.tell(_Poison())

    def _strike(self, fault: Fault) -> None:
        self._faults.fired[fault.kind] += 1

    def _engine(self, name: str) -> Engine:
        return next(engine for engine in self._engines if engine.name == engine_of(name))

    def _ranks(self, fault: Fault) -> list[Rank]:
        """Those that a fault of an engine hits."""
        ranks, number = self._engine(fault.target).process.ranks, rank_of(fault.target)
        return ranks if number is None else [ranks[number]]

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

    async def _probe_pair(self, prefill: PrefillEngine, decode: DecodeEngine) -> None:
        request_id = f"{decode.name}-probe-of-{prefill.name}"
        await trio.sleep(PROBE_INTERVAL_SECONDS)
        with trio.move_on_after(PROBE_SECONDS) as patience:
            await self._run(self._probe(request_id, prefill, decode))
        pull = self._oracles.pulls.get(request_id)
        if patience.cancelled_caught or pull is None:
            self._oracles.complain("recovery", f"{request_id} did not end")
        elif pull.failure is not None and not pull.is_aborted:
            self._oracles.complain("recovery", f"{request_id}: {pull.failure}")

    async def _probe(self, request_id: str, prefill: PrefillEngine, decode: DecodeEngine) -> None:
        """A request of this pair; the oracles judge it like any other, except that it must succeed."""
        prefilled: Prefilled | None = None
        while prefilled is None and not prefill.process.has_died():  # one in some is given up
            self._numbers += 1
            prefilled = await prefill.prefill(f"{prefill.name}-r{self._numbers}", self._numbers, 32)
        assert prefilled is not None, "every engine lives again when the faults are over"
        decode.announce([request_id], prefilled)
        await decode.serve(request_id, prefilled, is_urgent=True)

    async def _check_at_rest(self, when: str) -> None:
        for engine in self._engines:
            if len(engine.pool) != engine.pool.blocks:
                missing = engine.pool.blocks - len(engine.pool)
                self._oracles.complain("leaks", f"{when} {engine.name} misses {missing} blocks")
            for rank in engine.process.ranks:
                for leftover in self._leftovers(rank):
                    self._oracles.complain("leaks", f"{when} rank {rank.tp_rank} of {engine.name} {leftover}")
        for read in self._around.nixl.reads_in_flight():
            self._oracles.complain("leaks", f"{when} READ {read.handle} of {read.initiator.agent_name} is in flight")

    def _leftovers(self, rank: Rank) -> list[str]:
        """What a rank should not have when nobody wants anything any more."""
        supervisor, counts = rank.supervisor, rank.port.counts()
        found = [f"has READs: {counts}"] if counts.reads else []
        if supervisor._lease_keeper.leases():
            found.append("has open leases")
        quarantined = sum(actor.quarantined_blocks() for actor in supervisor._peers.values())
        if (counted := supervisor._roster.quarantined_blocks) or quarantined:
            found.append(f"counts {counted} blocks in quarantine, and has {quarantined}")
        if len(supervisor._peers) > self._shape.peer_limit:
            found.append(f"knows {len(supervisor._peers)} peers")
        connections = [each for actor in supervisor._peers.values() for each in actor._connections._by_number.values()]
        wanted = sum(remote.link is not None for connection in connections for remote in connection.ranks)
        if (opened := self._around.network.unclosed_links(rank.host)) != wanted:
            found.append(f"has {opened} control connections open, and {wanted} in use")
        gauges = {key: value for key, value in rank.figures.gauges().items() if value}
        peers = Counter(catalogue.PEERS.key(actor.core.state.value) for actor in supervisor._peers.values())
        if gauges != peers:
            found.append(f"shows {gauges} and has {dict(peers)}")
        busy = [engine_id for engine_id, actor in supervisor._peers.items() if not actor.is_unused]
        return found + [f"has something to do for {engine_id}" for engine_id in busy]

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
                if rank.port.counts_at_close != PortCounts(0, 0, 0, 1):
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


class _Poison:
    """A message on which an actor crashes: looking at its class, or at its frames, raises."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise InjectedCrash("a fault of the plan")

    @property
    def frames_untrusted(self) -> tuple[bytes, ...]:
        raise InjectedCrash("a fault of the plan")

    def __getattr__(self, name: str) -> Any:
        raise InjectedCrash("a fault of the plan")
