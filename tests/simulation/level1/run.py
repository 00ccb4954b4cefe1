"""One run of level 1: a cluster, its requests, the faults of a plan, and the verdict of the oracles.

    safety phase     requests arrive, in bursts too; faults come and go; nothing wrong may happen
    liveness phase   no faults, no new requests: everything that was begun ends
    probes           one request for every pair of engines: it is served
    shutdown         every peer is retired, and nothing is left

The run is a pure function of the plan (and of the cores, which tests break). The collector of cyclic garbage is
switched off while it lasts: a run makes a few ten thousand objects, and they all live until its end.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from connector.runtime.recorder import Recorder
from statemachine.failures import ConnectorStopped
from statemachine.remote_engine import Stop
from statemachine.trace import TransitionRecord
from tests.simulation.coverage import MACHINES
from tests.simulation.faults import DEATH_NOTICED_SECONDS, Fault, Kind, Plan
from tests.simulation.level1.clock import SLEW_PPB_MAX, DriftingClock
from tests.simulation.level1.decode import DecodeEngine, DecodeLife, DecodeRank, Pull
from tests.simulation.level1.faults import LINK_KINDS, end_ns
from tests.simulation.level1.heap import MILLISECOND, SECOND, EventHeap
from tests.simulation.level1.oracles import BLOCKS_OF_A_PROMPT_MAX, Oracles
from tests.simulation.level1.prefill import PrefillEngine, PrefillLife, Prompt
from tests.simulation.level1.reader import Reader
from tests.simulation.level1.shape import RANKS_MAX, draw_cluster
from tests.simulation.level1.transport import LATE_SECONDS_MAX, Transport
from tests.simulation.level1.world import ENTRY_FIELDS, Cores, World, entries
from tests.simulation.verdict import Violation

LIVENESS_NS = 120 * SECOND
LIVENESS_STEP_NS = SECOND // 10
PROBE_NS = 5 * SECOND
SETTLING_NS = 80 * SECOND
"""Longer than any lease, and than the back-off of an incompatible peer."""
SHUTDOWN_NS = round((LATE_SECONDS_MAX + 1) * SECOND)
SWEEP_NS = 5 * SECOND
DEATH_NOTICED_NS = round(DEATH_NOTICED_SECONDS * SECOND)
RESTART_NS_MIN = 10 * MILLISECOND
RESTART_NS_MAX = SECOND
"""How long a crashed engine stays away."""

HOST_GONE = 0.5
"""How often nothing is left of a dead engine that could refuse a connection."""
TWO_HOLDERS = 0.12
"""How often two decode engines get the answer of one prompt."""
BURST = 0.02
"""How often an arrival begins a burst."""
BURST_PROMPTS_MAX = 40
BURST_SPEEDUP = 20
PROMPT_LENGTHS = 256
PROMPT_BLOCKS_MAX = 24
PROBE_BLOCKS = 2


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run did, and what was wrong. What is made from the log is made when it is asked for."""

    plan: Plan
    violations: list[Violation]
    requests: int
    outcomes: Counter[str]
    faults_fired: Counter[Kind]
    virtual_seconds: float
    real_seconds: float
    coverage: Counter[str]
    log: list[Any] = field(repr=False)
    engines: dict[str, DecodeEngine | PrefillEngine] = field(repr=False)

    @property
    def transitions(self) -> Counter[tuple[str, str, str]]:
        """How often each (machine, state, event) of the tables was taken."""
        befores, events = self.log[4::ENTRY_FIELDS], self.log[5::ENTRY_FIELDS]
        counted = Counter(
            (before.state, event.__class__) for before, event in zip(befores, events, strict=True) if before is not None
        )
        names = {pair: machine.name for machine in MACHINES for pair in machine.table}
        return Counter(
            {
                (names[state, event], state.value, event.__name__): count
                for (state, event), count in counted.items()
                if (state, event) in names
            }
        )

    def fingerprint(self) -> str:
        """Of everything that was stepped, when, on what, and of how the requests ended."""
        digest = hashlib.sha256()
        for at_ns, scope, name, subject, before, event, after in entries(self.log):
            state = before and before.state.value
            line = f"{at_ns} {scope.names()} {name} {subject} {state} {event} {after.state.value}\n"
            digest.update(line.encode())
        digest.update(repr(sorted(self.outcomes.items())).encode())
        return digest.hexdigest()

    def trace(self) -> Iterator[TransitionRecord]:
        """The log as production's trace would have it, as far as level 1 knows."""
        return (record for _, record in self.timed_trace())

    def timed_trace(self) -> Iterator[tuple[float, TransitionRecord]]:
        """The same, with the second of virtual time in which each record was written. Production's recorder makes them
        from the log, one for each rank."""
        recorders: dict[tuple[str, int], tuple[Recorder, _PastClock]] = {}
        written: list[TransitionRecord] = []
        for at_ns, scope, machine, subject, before, event, after in entries(self.log):
            engine_id, rank = scope.names()
            if (engine_id, rank) not in recorders:
                home = self.engines.get(engine_id) or self.engines[engine_id.partition("-")[0]]
                clock = _PastClock(home.clock)
                recorder = Recorder(
                    engine_id=engine_id, rank=rank, role="kv_both", clock=clock, sink=_ListSink(written)
                )
                recorders[engine_id, rank] = recorder, clock
            recorder, clock = recorders[engine_id, rank]
            clock.true_ns = at_ns
            observe = recorder.observer(scope.engine_id if isinstance(scope, Reader) else None)
            observe(clock.now_ns(), [(machine, subject, before, event if before is not None else None, after)])
            recorder.catch_up()
            for record in written:
                yield at_ns / SECOND, record
            written.clear()

    def trace_lines(self) -> bytes:
        """The trace as JSON lines."""
        return b"".join(msgspec.json.encode(record) + b"\n" for record in self.trace())


class _PastClock:
    """A clock of the run as it was at `true_ns`, as far as its present rate tells. Implements `Clock`."""

    def __init__(self, clock: DriftingClock) -> None:
        self.true_ns = 0
        self._clock = clock

    def now_ns(self) -> int:
        return self._clock.local_ns(self.true_ns)

    def wall(self) -> float:
        return self._clock.wall(self.true_ns)


class _ListSink:
    def __init__(self, records: list[TransitionRecord]) -> None:
        self._records = records

    def write(self, *records: TransitionRecord) -> None:
        self._records.extend(records)

    def close(self) -> None:
        """There is nothing to close."""


def simulate(plan: Plan, cores: Cores | None = None) -> Result:
    """Run a plan. Whatever the cores do wrong is in `violations`, an exception out of them too."""
    started = time.perf_counter()
    collects = gc.isenabled()
    gc.disable()
    try:
        run = Level1Run(plan, cores or Cores())
        run.run()
        return run.result(time.perf_counter() - started)
    finally:
        if collects:
            gc.enable()


class Level1Run:
    """See the module's docstring."""

    def __init__(self, plan: Plan, cores: Cores) -> None:
        self._plan = plan
        self._cluster = cluster = draw_cluster(plan.seed)
        self._heap = heap = EventHeap()
        self._oracles = Oracles(heap, cluster, plan.faults)
        self._world = World(plan.seed, cluster, cores, self._oracles, heap)
        self._transport = Transport(self._world)
        self._prefills = [PrefillEngine(self._world, name) for name in cluster.base.prefill_names]
        self._decodes = [DecodeEngine(self._world, self._transport, name) for name in cluster.base.decode_names]
        for decode in self._decodes:
            decode.others = [each for each in self._decodes if each is not decode and not each.is_builtin]
        self._own_decodes = [decode for decode in self._decodes if not decode.is_builtin]
        self._two_holders: dict[str, Fault] = {}
        self._engines: dict[str, DecodeEngine | PrefillEngine] = {}
        self._engines |= {engine.name: engine for engine in self._prefills}
        self._engines |= {engine.name: engine for engine in self._decodes}
        self._chance = self._world.chance("clients")
        self._lengths = [
            max(1, min(PROMPT_BLOCKS_MAX, round(self._chance.lognormvariate(math.log(median), cluster.spread))))
            for median in [cluster.median_blocks] * PROMPT_LENGTHS
        ]
        assert PROMPT_BLOCKS_MAX <= BLOCKS_OF_A_PROMPT_MAX
        self._safety_ns = round(cluster.base.safety_seconds * SECOND)
        self._arrival_ns = SECOND / cluster.requests_per_second
        self._in_burst = 0
        self._prompts = 0
        self._sweeps = True

    def result(self, real_seconds: float) -> Result:
        pulls = self._oracles.pulls
        outcomes: Counter[str] = Counter()
        for pull in pulls:
            if pull.is_lost:
                outcomes["lost with its engine"] += 1
            elif pull.is_guest:
                outcomes["served by a built-in engine"] += 1
            elif not pull.awaited:
                outcomes["not awaited"] += 1
            else:
                outcomes["done" if pull.failure is None else pull.failure.kind] += 1
        requests, log = len(pulls), list(self._world.log)
        # What holds on to the log and to the requests in circles would wait for the collector.
        self._oracles.forget()
        self._world.log.clear()
        return Result(
            plan=self._plan,
            violations=self._oracles.violations,
            requests=requests,
            outcomes=outcomes,
            faults_fired=self._world.fired,
            virtual_seconds=self._heap.now_ns / SECOND,
            real_seconds=real_seconds,
            coverage=self._oracles.coverage,
            log=log,
            engines=self._engines,
        )

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._oracles.complain("health", f"{error!r} in {where.name}, line {where.lineno} of {where.filename}")

    def _run(self) -> None:
        heap = self._heap
        for fault in self._plan.faults:
            heap.at(round(fault.at_seconds * SECOND), self._begin_fault, fault)
        heap.after(0, self._arrive, None)
        heap.after(SWEEP_NS, self._sweep, None)
        heap.run_until(self._safety_ns)
        self._live()
        if self._oracles.isolates:
            self._probe()
        self._sweeps = False
        self._shut_down()

    # --- safety -----------------------------------------------------------------------------------------------------

    def _arrive(self, _: None) -> None:
        """One prompt, and the time of the next: a Poisson process with bursts."""
        random = self._chance.random
        heap = self._heap
        prefills = self._prefills
        self._prompts = content = self._prompts + 1
        prefill = prefills[int(random() * len(prefills))]
        readers = self._draw_decodes(prefill)
        prefill.submit(Prompt(prefill, readers, content, self._lengths[int(random() * PROMPT_LENGTHS)]))
        delay = -math.log(1.0 - random()) * self._arrival_ns
        if self._in_burst:
            self._in_burst -= 1
            delay /= BURST_SPEEDUP
        elif random() < BURST:
            self._in_burst = int(random() * BURST_PROMPTS_MAX)
        at_ns = heap.now_ns + int(delay)
        if at_ns < self._safety_ns:
            heap.at(at_ns, self._arrive, None)

    def _draw_decodes(self, prefill: PrefillEngine) -> list[DecodeEngine]:
        """Who gets the answer. A built-in P cannot tell two engines apart, and two built-in ones nobody can."""
        random = self._chance.random
        decodes = self._own_decodes if prefill.is_builtin else self._decodes
        first = decodes[int(random() * len(decodes))]
        if prefill.is_builtin or not first.others:
            return [first]
        fault = self._two_holders.get(prefill.name)
        if random() < TWO_HOLDERS or (fault is not None and random() < fault.probability):
            self._world.fired[Kind.TWO_HOLDERS] += 1
            return [first, first.others[int(random() * len(first.others))]]
        return [first]

    def _sweep(self, _: None) -> None:
        for decode in self._decodes:
            if decode.life.frozen_until_ns <= self._heap.now_ns:
                for rank in decode.life.ranks:
                    rank.retire_idle()
        if self._sweeps:
            self._heap.after(SWEEP_NS, self._sweep, None)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _begin_fault(self, fault: Fault) -> None:
        heap = self._heap
        until_ns = end_ns(fault)
        kind = fault.kind
        if kind in LINK_KINDS:
            source, _, target = fault.target.partition(">")
            if kind is Kind.LINK_RESET:
                self._reset_links(fault)
                return
            link = self._world.links[source, target]
            link.begin(fault)
            heap.at(until_ns, link.end, fault)
            return
        engine = self._engines[fault.target]
        if isinstance(engine, PrefillEngine):
            self._disturb_prefill(engine, fault, until_ns)
        else:
            self._disturb_decode(engine, fault, until_ns)

    def _disturb_prefill(self, engine: PrefillEngine, fault: Fault, until_ns: int) -> None:
        match fault.kind:
            case Kind.CRASH_NEW_ID | Kind.CRASH_SAME_ID:
                self._crash_prefill(engine, fault, until_ns)
            case Kind.INCOMPATIBLE:
                self._strike(fault)
                engine.is_incompatible = True
                self._heap.at(until_ns, self._be_compatible, engine)
            case Kind.HANDSHAKE_REFUSED:
                self._strike(fault)
                engine.refuses = True
                self._heap.at(until_ns, self._answer_again, engine)
            case Kind.TWO_HOLDERS:
                self._two_holders[engine.name] = fault
                self._heap.at(until_ns, self._stop_sharing, engine.name)
            case _:
                self._disturb_either(engine, fault, until_ns)

    def _disturb_decode(self, engine: DecodeEngine, fault: Fault, until_ns: int) -> None:
        match fault.kind:
            case Kind.CRASH_DECODE:
                self._crash_decode(engine, fault, until_ns)
            case Kind.ABORT:
                engine.abort = fault
                self._heap.at(until_ns, self._stop_aborting, (engine, fault))
            case Kind.BAD_PARAMS:
                engine.bad_params = fault
                self._heap.at(until_ns, self._stop_misleading, (engine, fault))
            case Kind.LONG_QUEUE:
                engine.queue_until_ns = max(engine.queue_until_ns, until_ns)
            case Kind.ROUTER_RETRY:
                engine.retry = fault
                self._heap.at(until_ns, self._stop_retrying, (engine, fault))
            case Kind.ACTOR_CRASH:
                self._crash_actor((engine, fault, until_ns))
            case _:
                self._disturb_either(engine, fault, until_ns)

    def _disturb_either(self, engine: DecodeEngine | PrefillEngine, fault: Fault, until_ns: int) -> None:
        now_ns = self._heap.now_ns
        chance = self._world.chance(f"{fault.kind.value} of {fault.target} at {fault.at_seconds}")
        match fault.kind:
            case Kind.PAUSE:
                life = engine.life
                if life.frozen_until_ns < until_ns:
                    self._strike(fault)
                    self._oracles.stop(engine.name, until_ns)
                    life.freeze(until_ns)
            case Kind.STOP_POLLING:
                self._strike(fault)
                engine.polls_from_ns = max(engine.polls_from_ns, until_ns)
            case Kind.CLOCK_SLEW:
                self._strike(fault)
                self._slew(engine, chance.choice([-SLEW_PPB_MAX, SLEW_PPB_MAX]))
            case Kind.WALL_CLOCK_JUMP:
                self._strike(fault)
                engine.clock.jump_wall(now_ns, chance.uniform(-1e5, 1e5))
            case _:
                pass

    def _strike(self, fault: Fault) -> None:
        self._world.fired[fault.kind] += 1

    @staticmethod
    def _be_compatible(engine: PrefillEngine) -> None:
        engine.is_incompatible = False

    def _stop_sharing(self, name: str) -> None:
        self._two_holders.pop(name, None)

    @staticmethod
    def _answer_again(engine: PrefillEngine) -> None:
        engine.refuses = False

    @staticmethod
    def _stop_retrying(fault: tuple[DecodeEngine, Fault]) -> None:
        if fault[0].retry is fault[1]:
            fault[0].retry = None

    def _slew(self, engine: DecodeEngine | PrefillEngine, rate_ppb: int) -> None:
        engine.clock.change_rate(self._heap.now_ns, rate_ppb)
        for rank in engine.life.ranks:
            for executor in rank.readers.values() if isinstance(rank, DecodeRank) else [rank]:
                executor.look_at_clock()

    def _reset_links(self, fault: Fault) -> None:
        """Again and again while the fault lasts."""
        heap = self._heap
        source, _, target = fault.target.partition(">")
        chance = self._world.transport_chance
        for connection in list(self._prefill(target).life.connections):
            if connection.rank.life.engine.name == source and chance.random() < fault.probability:
                self._strike(fault)
                connection.reader.lose_link(connection)
        again_ns = heap.now_ns + int(chance.uniform(0.02, 1.0) * SECOND)
        if again_ns < end_ns(fault):
            heap.at(again_ns, self._reset_links, fault)

    def _prefill(self, name: str) -> PrefillEngine:
        engine = self._engines[name]
        assert isinstance(engine, PrefillEngine)
        return engine

    @staticmethod
    def _stop_aborting(fault: tuple[DecodeEngine, Fault]) -> None:
        if fault[0].abort is fault[1]:
            fault[0].abort = None

    @staticmethod
    def _stop_misleading(fault: tuple[DecodeEngine, Fault]) -> None:
        if fault[0].bad_params is fault[1]:
            fault[0].bad_params = None

    def _crash_prefill(self, engine: PrefillEngine, fault: Fault, until_ns: int) -> None:
        old = engine.life
        if old.is_dead:
            return  # Who killed it brings it back.
        self._strike(fault)
        old.die()
        engine.is_host_gone = engine.chance.random() < HOST_GONE
        self._heap.after(DEATH_NOTICED_NS, self._notice_death, engine.life)
        ranks = len(old.ranks)
        if fault.kind is Kind.CRASH_NEW_ID:
            engine_id = f"{engine.name}-life{engine.lives + 1}"
        else:
            engine_id = old.engine_id
            if self._cluster.resizes:
                ranks = 1 + RANKS_MAX - ranks
        self._heap.at(self._restart_ns(until_ns), engine.start, (engine_id, ranks))

    def _notice_death(self, life: PrefillLife) -> None:
        for connection in list(life.connections):
            connection.reader.lose_link(connection)
            self._transport.break_connection(connection)

    def _crash_decode(self, engine: DecodeEngine, fault: Fault, until_ns: int) -> None:
        if engine.life.is_dead:
            return
        self._strike(fault)
        engine.life.die()
        self._heap.at(self._restart_ns(until_ns), lambda _: engine.start(), None)

    def _restart_ns(self, until_ns: int) -> int:
        now_ns = self._heap.now_ns
        return max(now_ns + RESTART_NS_MIN, min(until_ns, now_ns + RESTART_NS_MAX))

    def _crash_actor(self, fault: tuple[DecodeEngine, Fault, int]) -> None:
        """Again and again while the fault lasts; not one that is down, or crashes would pile up."""
        engine, what, until_ns = fault
        heap, chance = self._heap, engine.chance
        if heap.now_ns >= until_ns:
            return
        readers = [reader for rank in engine.life.ranks for reader in rank.readers.values() if not reader.is_closed]
        if readers:
            self._strike(what)
            self._oracles.crash(engine.name)
            chance.choice(readers).crash()
        heap.after(int(chance.uniform(0.05, 0.5) * SECOND), self._crash_actor, fault)

    # --- liveness ---------------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return any(engine.life.is_busy for engine in self._engines.values())

    def _live(self) -> None:
        heap = self._heap
        give_up_ns = heap.now_ns + LIVENESS_NS
        while self._is_busy and heap.now_ns < give_up_ns:
            heap.run_until(heap.now_ns + LIVENESS_STEP_NS)
        heap.run_until(heap.now_ns + SETTLING_NS)
        self._oracles.check_all_ended(self._cluster.decode_ranks)
        self._check_at_rest("after the liveness phase")

    def _probe(self) -> None:
        heap, oracles = self._heap, self._oracles
        pairs = [
            (prefill, decode)
            for prefill in self._prefills
            for decode in (self._own_decodes if prefill.is_builtin else self._decodes)
        ]
        not_served = self._probe_each(pairs)
        # Only the first one may meet a built-in engine that came back.
        once_more = [
            (prompt.engine, prompt.decodes[0])
            for prompt, pull in not_served
            if pull is not None and oracles.meets_another_life(pull, pull.failure)
        ]
        not_served = [each for each in not_served if (each[0].engine, each[0].decodes[0]) not in once_more]
        for prompt, pull in [*not_served, *(self._probe_each(once_more) if once_more else ())]:
            pair = f"{prompt.decodes[0].name} from {prompt.engine.name}"
            oracles.complain("recovery", f"the probe of {pair} was not served: {pull.failure if pull else None}")
        heap.run_until(heap.now_ns + SETTLING_NS)
        self._check_at_rest("after the probes")

    def _probe_each(self, pairs: Iterable[tuple[PrefillEngine, DecodeEngine]]) -> list[tuple[Prompt, Pull | None]]:
        """Those that were not served."""
        heap, pulls = self._heap, self._oracles.pulls
        first, probes = len(pulls), []
        for prefill, decode in pairs:
            self._prompts += 1
            prompt = Prompt(prefill, [decode], self._prompts, PROBE_BLOCKS, is_probe=True)
            probes.append(prompt)
            prefill.submit(prompt)
        heap.run_until(heap.now_ns + PROBE_NS)
        served = {pull.prompt for pull in pulls[first:] if pull.is_ended and pull.failure is None}
        found = {pull.prompt: pull for pull in reversed(pulls[first:])}
        return [(prompt, found.get(prompt)) for prompt in probes if prompt not in served]

    def _check_at_rest(self, when: str) -> None:
        for decode in self._own_decodes:
            life = decode.life
            assert isinstance(life, DecodeLife)
            self._check_pool(decode.name, when, len(life.free), self._cluster.decode_blocks)
            for rank in life.ranks:
                flying = sum(len(connection.flying) for connection in rank.connections())
                unclean = [reader.engine_id for reader in rank.readers.values() if not reader.core.is_unused]
                if flying or unclean or rank.pulls or any(rank.writing):
                    self._oracles.complain(
                        "leaks",
                        f"{when} rank {rank.number} of {decode.name} has {flying} READs, {len(rank.pulls)} requests, "
                        f"and something left to do with {unclean}",
                    )
        for prefill in self._prefills:
            self._check_pool(prefill.name, when, len(prefill.life.free), self._cluster.prefill_blocks)
            for lender in prefill.life.ranks:
                if lender.open_leases or lender.is_watching:
                    self._oracles.complain("leaks", f"{when} {prefill.name} lends {lender.open_leases} requests")

    def _check_pool(self, engine: str, when: str, free: int, blocks: int) -> None:
        if free != blocks:
            self._oracles.complain("leaks", f"{when} {engine} has {free} of {blocks} blocks")

    # --- the end ----------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        stop = Stop(failure=ConnectorStopped(detail="it is shutting down"))
        for decode in self._decodes:
            for rank in decode.life.ranks:
                for reader in list(rank.readers.values()):
                    reader.deliver(stop)
        self._heap.run_until(self._heap.now_ns + SHUTDOWN_NS)
        for decode in self._decodes:
            for rank in decode.life.ranks:
                if rank.readers or rank.agents:
                    self._oracles.complain(
                        "leaks", f"{decode.name} did not stop: {list(rank.readers)}, {len(rank.agents)} agents"
                    )
