"""One run of level 1: a cluster, its requests, the faults of a plan, and the verdict of the oracles.

    safety phase     requests arrive, in bursts too; faults come and go; nothing wrong may happen
    liveness phase   no faults, no new requests: everything that was begun ends
    probes           one request for every pair of engines: it is served
    shutdown         every peer is retired, and nothing is left

The run is a pure function of the plan (and of the machines, which tests break). The collector of cyclic garbage is
switched off while it lasts: a run makes a few ten thousand objects, and they all live until its end.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from statemachine.explore import Machines
from statemachine.failures import ConnectorStopped
from statemachine.trace import TransitionRecord
from tests.simulation.faults import Fault, Kind, Plan
from tests.simulation.level1.decode import DecodeEngine
from tests.simulation.level1.faults import LINK_KINDS, end_ns
from tests.simulation.level1.heap import MILLISECOND, SECOND, EventHeap
from tests.simulation.level1.oracles import BLOCKS_OF_A_PROMPT_MAX, Oracles
from tests.simulation.level1.prefill import RATE_PPB_MAX, PrefillEngine, PrefillLife, Prompt
from tests.simulation.level1.shape import draw_cluster
from tests.simulation.level1.transport import LATE_SECONDS_MAX, Transport
from tests.simulation.level1.world import World, entries
from tests.simulation.oracles import Violation

LIVENESS_NS = 120 * SECOND
LIVENESS_STEP_NS = SECOND // 10
PROBE_NS = 5 * SECOND
SETTLING_NS = 80 * SECOND
"""Longer than any lease, and than the back-off of an incompatible peer."""
SHUTDOWN_NS = round((LATE_SECONDS_MAX + 1) * SECOND)
SWEEP_NS = 5 * SECOND
DEATH_NOTICED_NS = 55 * MILLISECOND
RESTART_NS_MIN = 10 * MILLISECOND
RESTART_NS_MAX = SECOND
"""How long a crashed engine stays away."""

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
    machines: Machines = field(repr=False)
    log: list[Any] = field(repr=False)
    walls: dict[str, DecodeEngine | PrefillEngine] = field(repr=False)

    @property
    def transitions(self) -> Counter[tuple[str, str, str]]:
        """How often each (machine, state, event) of the tables was taken."""
        counted = Counter(zip(self.log[2::4], self.log[3::4], strict=True))
        machines = (self.machines.request, self.machines.lease, self.machines.peer, self.machines.transfer)
        names = {pair: machine.name for machine in machines for pair in machine.table}
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
        for at_ns, subject, state, event in entries(self.log):
            digest.update(f"{at_ns} {subject.names()} {state.value} {event.__name__}\n".encode())
        digest.update(repr(sorted(self.outcomes.items())).encode())
        return digest.hexdigest()

    def trace(self) -> Iterator[TransitionRecord]:
        """The log as production's trace would have it, as far as level 1 knows; ignored events are left out."""
        machines = (self.machines.request, self.machines.lease, self.machines.peer, self.machines.transfer)
        machine_of = {event: machine.name for machine in machines for event in machine.events}
        following: dict[int, str] = {}
        after: list[str] = []
        for _, subject, state, _ in reversed(list(entries(self.log))):
            after.append(following.get(id(subject), subject.value.state.value))
            following[id(subject)] = state.value
        for seq, ((at_ns, subject, state, event), to_state) in enumerate(
            zip(entries(self.log), reversed(after), strict=True)
        ):
            engine, rank, name = subject.names()
            home = self.walls.get(engine) or self.walls[engine.partition("-")[0]]
            yield TransitionRecord(
                seq=seq,
                wall=home.clock.wall(at_ns),
                mono_ns=home.clock.local_ns(at_ns),
                engine_id=engine,
                rank=rank,
                role="worker",
                machine=machine_of[event],
                subject=name,
                from_state=state.value,
                event=event.__name__,
                to_state=to_state,
            )

    def trace_lines(self) -> bytes:
        """The trace as JSON lines."""
        return b"".join(msgspec.json.encode(record) + b"\n" for record in self.trace())


def simulate(plan: Plan, machines: Machines | None = None) -> Result:
    """Run a plan. Whatever the machines do wrong is in `violations`, an exception out of them too."""
    started = time.perf_counter()
    collects = gc.isenabled()
    gc.disable()
    try:
        run = Level1Run(plan, machines or Machines())
        run.run()
        return run.result(time.perf_counter() - started)
    finally:
        if collects:
            gc.enable()


class Level1Run:
    """See the module's docstring."""

    def __init__(self, plan: Plan, machines: Machines) -> None:
        self._plan = plan
        self._cluster = cluster = draw_cluster(plan.seed)
        self._heap = heap = EventHeap()
        self._oracles = Oracles(heap, cluster, plan.faults)
        self._world = World(plan.seed, cluster, machines, self._oracles, heap)
        self._transport = Transport(self._world)
        self._prefills = [PrefillEngine(self._world, name) for name in cluster.base.prefill_names]
        self._decodes = [DecodeEngine(self._world, self._transport, name) for name in cluster.base.decode_names]
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
            machines=self._world.machines,
            log=log,
            walls=self._engines,
        )

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # A machine that breaks its own promises breaks the shell that drives it.
            self._oracles.complain("health", f"the shell crashed: {error!r}")

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
        prefills, decodes = self._prefills, self._decodes
        self._prompts = content = self._prompts + 1
        prefill = prefills[int(random() * len(prefills))]
        decode = decodes[int(random() * len(decodes))]
        prefill.submit(Prompt(prefill, decode, content, self._lengths[int(random() * PROMPT_LENGTHS)]))
        delay = -math.log(1.0 - random()) * self._arrival_ns
        if self._in_burst:
            self._in_burst -= 1
            delay /= BURST_SPEEDUP
        elif random() < BURST:
            self._in_burst = int(random() * BURST_PROMPTS_MAX)
        at_ns = heap.now_ns + int(delay)
        if at_ns < self._safety_ns:
            heap.at(at_ns, self._arrive, None)

    def _sweep(self, _: None) -> None:
        for decode in self._decodes:
            if decode.life.frozen_until_ns <= self._heap.now_ns:
                for rank in decode.life.ranks:
                    rank.sweep()
        if self._sweeps:
            self._heap.after(SWEEP_NS, self._sweep, None)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _begin_fault(self, fault: Fault) -> None:
        heap = self._heap
        until_ns = end_ns(fault)
        kind = fault.kind
        if kind in LINK_KINDS:
            source, _, target = fault.target.partition(">")
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
            case Kind.ACTOR_CRASH:
                self._crash_actor((engine, fault, until_ns))
            case _:
                self._disturb_either(engine, fault, until_ns)

    def _disturb_either(self, engine: DecodeEngine | PrefillEngine, fault: Fault, until_ns: int) -> None:
        now_ns = self._heap.now_ns
        chance = self._world.chance(f"{fault.kind.value} at {fault.at_seconds}")
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
            case Kind.CLOCK_DRIFT:
                self._strike(fault)
                engine.clock.change_rate(now_ns, chance.randint(-RATE_PPB_MAX, RATE_PPB_MAX))
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
        self._heap.after(DEATH_NOTICED_NS, self._notice_death, engine.life)
        fresh = f"{engine.name}-life{engine.lives + 1}"
        engine_id = old.engine_id if fault.kind is Kind.CRASH_SAME_ID else fresh
        self._heap.at(self._restart_ns(until_ns), engine.start, engine_id)

    def _notice_death(self, life: PrefillLife) -> None:
        for connection in list(life.connections):
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
        rank = chance.choice(engine.life.ranks)
        actors = [actor for actor in rank.peers.values() if actor.closed_until_ns <= heap.now_ns]
        if actors:
            self._strike(what)
            self._oracles.crash(engine.name)
            chance.choice(actors).crash()
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
        self._oracles.check_all_ended(self._cluster.decode_ranks, self._cluster.prefill_ranks)
        self._check_at_rest("after the liveness phase")

    def _probe(self) -> None:
        heap, oracles = self._heap, self._oracles
        first = len(oracles.pulls)
        probes = []
        for prefill in self._prefills:
            for decode in self._decodes:
                self._prompts += 1
                prompt = Prompt(prefill, decode, self._prompts, PROBE_BLOCKS, is_probe=True)
                probes.append(prompt)
                prefill.submit(prompt)
        heap.run_until(heap.now_ns + PROBE_NS)
        served = {pull.prompt for pull in oracles.pulls[first:] if pull.is_ended and pull.failure is None}
        for prompt in probes:
            if prompt not in served:
                found = next((pull.failure for pull in oracles.pulls[first:] if pull.prompt is prompt), None)
                pair = f"{prompt.decode.name} from {prompt.engine.name}"
                oracles.complain("recovery", f"the probe of {pair} was not served: {found}")
        heap.run_until(heap.now_ns + SETTLING_NS)
        self._check_at_rest("after the probes")

    def _check_at_rest(self, when: str) -> None:
        for decode in self._decodes:
            life = decode.life
            self._check_pool(decode.name, when, len(life.free), self._cluster.decode_blocks)
            for rank in life.ranks:
                flying = sum(len(connection.flying) for connection in rank.agents.values())
                unclean = [actor.engine_id for actor in rank.peers.values() if not actor.is_clean]
                if flying or rank.open_handles or unclean or any(rank.writing):
                    self._oracles.complain(
                        "leaks",
                        f"{when} rank {rank.number} of {decode.name} has {flying} READs, {rank.open_handles} handles, "
                        f"and something left of requests from {unclean}",
                    )
        for prefill in self._prefills:
            self._check_pool(prefill.name, when, len(prefill.life.free), self._cluster.prefill_blocks)
            for keeper in prefill.life.ranks:
                if keeper.leases:
                    self._oracles.complain("leaks", f"{when} {prefill.name} lends {list(keeper.leases)}")

    def _check_pool(self, engine: str, when: str, free: int, blocks: int) -> None:
        if free != blocks:
            self._oracles.complain("leaks", f"{when} {engine} has {free} of {blocks} blocks")

    # --- the end ----------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        stopped = ConnectorStopped(detail="it is shutting down")
        for decode in self._decodes:
            for rank in decode.life.ranks:
                for actor in list(rank.peers.values()):
                    actor.stop(stopped)
        self._heap.run_until(self._heap.now_ns + SHUTDOWN_NS)
        for decode in self._decodes:
            for rank in decode.life.ranks:
                if rank.peers or rank.agents:
                    self._oracles.complain(
                        "leaks", f"{decode.name} did not stop: {list(rank.peers)}, {len(rank.agents)} agents"
                    )
