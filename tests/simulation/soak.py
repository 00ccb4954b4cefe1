"""Days of virtual time in one run: `python -m tests.simulation.soak`, or `make soak`.

    --seeds COUNT    so many seeds of the campaign, the first ones that are not done (1)
    --seed N         this one, whatever was done
    --hours H        of virtual time (24)
    --state FILE     where the seeds that are done are kept (.state/soak.jsonl)

Eight prefill and eight decode engines: the production actors on fake ports, as on level 2, and the same oracles. A seed
is a sequence of episodes of ten minutes. Each begins with some seconds of many requests and many faults; then requests
are few and far between, while engines die, are stopped or drain, restart with their old id or a new one, or are
replaced by one of another model at their address. At its end everything has to come to rest: nothing is open, in
flight, lent, held or missing, and a request of some pairs is served. Some seeds have fewer places for peers than there
are prefill engines, and each has a short time to live for engines that are gone, so that both kinds of eviction happen
all the time.

What a run of a day must not do is grow. After each hour, at rest, what the interpreter holds is counted: blocks of its
allocator, and resident memory. The simulator forgets what it has judged (`Oracles.forget_the_past`), and the tables
of the product that are bounded by a number (`TABLES`, and the flight recorder's steps) are kept so short that they are
full soon. The hours after the second are compared with the last ones.

A campaign is resumed: a seed that has passed is not run again, one that has failed or was interrupted is. Exit status 1
when a seed has failed; the trace of its last episode is written beside the state.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import resource
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import trio

from connector.config import ConnectorOptions
from connector.tools.conformance import check_records
from statemachine import lending
from statemachine.remote_engine import claims
from tests.simulation.__main__ import say
from tests.simulation.agenda import Agenda
from tests.simulation.cluster import BURST_MEAN, Result, run_cluster
from tests.simulation.coverage import TransitionKey, coverage_lines
from tests.simulation.faults import (
    LEVEL2_KINDS,
    WORKLOAD_KINDS,
    Fault,
    Kind,
    Plan,
    Shape,
    draw_fault,
    draw_model_and_engines,
    draw_shape,
    generator,
    perhaps_of_one_rank,
    verifying,
)
from tests.simulation.process import Surroundings
from tests.simulation.scripted import ScriptedCluster

STATE = Path(".state/soak.jsonl")
HOURS = 24
ENGINES = 8
"""Of each role."""
HOUR_SECONDS = 3600.0
EPISODE_SECONDS = 600.0
REST_SECONDS = 60.0
"""At the end of an episode nothing new happens for so long; whatever is open ends."""
BUSY_SECONDS_MAX = 20.0
FEW_EVERY_SECONDS = 20.0
"""How often requests come when there are few."""
FAULTS_MAX = 32
"""Of the busy time of an episode."""
CHURN_MAX = 8
"""Engines that go in an episode, perhaps for the rest of it."""
CHURN_KINDS = (Kind.CRASH_NEW_ID, Kind.CRASH_SAME_ID, Kind.INCOMPATIBLE, Kind.CRASH_DECODE, Kind.STOP, Kind.DRAIN)
CHURN_SECONDS = (0.0, 1.0, 30.0, EPISODE_SECONDS)
PLACES = 1024
"""For peers."""
FEW_PLACES = 6
"""Too few for all prefill engines."""
FEW_PLACES_SHARE = 0.35
VERIFYING_SHARE = 0.25
"""Of the seeds, in which READs may lie."""
TIMES_TO_LIVE = (60.0, 300.0, 1800.0)
TABLES = ((lending, "ENDED_MAX"), (lending, "HEARERS_MAX"), (claims, "CONSUMED_MAX"))
"""The bounds of tables that remember what is over."""
TABLE_MAX = 64
"""What these bounds are here."""

WARM_UP_HOURS = 2
COMPARED_HOURS = 5
"""From the second hour on, and before the end."""
BLOCKS_PER_REQUEST_MAX = 0.02
BLOCKS_GROWTH_MAX = 20_000
"""Of the allocator. What varies: who is connected to whom when an hour ends, how full the tables of new lives are."""
RESIDENT_GROWTH_MAX = 8 << 20

VIOLATIONS_SHOWN = 10
TYPES_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What the interpreter holds when an hour ends, and how many requests there were so far."""

    requests: int
    blocks: int
    resident_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """How long a run is, of what size, and what is said of it."""

    hours: float = HOURS
    engines: int = ENGINES
    warm_up_hours: int = WARM_UP_HOURS
    compared_hours: int = COMPARED_HOURS
    blocks_growth_max: int = BLOCKS_GROWTH_MAX
    episode_seconds: float = EPISODE_SECONDS
    busy_seconds_max: float = BUSY_SECONDS_MAX
    hour_seconds: float = HOUR_SECONDS
    say: Callable[[str], None] = say


class SoakCluster(ScriptedCluster):
    """See the module's docstring."""

    def __init__(self, plan: Plan, agenda: Agenda, course: Course) -> None:
        self._course = course
        super().__init__(plan, agenda)
        self.hours: list[Memory] = []
        self.requests = 0
        self.outcomes: Counter[str] = Counter()
        self._types: Counter[str] = Counter()

    def _draw_shape(self) -> Shape:
        seed, engines = self._plan.seed, self._course.engines
        chance = generator(seed, "soak")
        model, shapes = draw_model_and_engines(generator(seed, "ranks"), engines)
        shape = msgspec.structs.replace(
            draw_shape(seed),
            prefills=engines,
            decodes=engines,
            peer_limit=FEW_PLACES if chance.random() < FEW_PLACES_SHARE else PLACES,
            model=model,
            engines=shapes,
        )
        return verifying(shape) if generator(seed, "lying reads").random() < VERIFYING_SHARE else shape

    def _options(self) -> ConnectorOptions:
        chance = generator(self._plan.seed, "times to live")
        return msgspec.structs.replace(super()._options(), engine_ttl=chance.choice(TIMES_TO_LIVE))

    def _surroundings(self, agenda: Agenda) -> Surroundings:
        # The faults of an episode are drawn when engines are there already.
        return dataclasses.replace(super()._surroundings(agenda), steps_kept=TABLE_MAX, all_drain=True)

    def _engine_ids(self) -> int:
        """All that come and go within a time to live, by all sizes by which they are described."""
        return PLACES

    # --- the course -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        end_seconds = self._course.hours * self._course.hour_seconds
        for number in itertools.count():
            if trio.current_time() >= end_seconds or self._oracles.violations:
                break
            await self._episode(number)
            self._look_back()
            if trio.current_time() >= (len(self.hours) + 1) * self._course.hour_seconds:
                self._note_hour()
        self._judge_memory()
        await self._probe_all()

    async def _episode(self, number: int) -> None:
        begin_seconds = trio.current_time()
        chance = generator(self._plan.seed, f"episode {number}")
        quiet_seconds = self._course.episode_seconds - REST_SECONDS
        busy_seconds = chance.uniform(0.2, 1.0) * min(self._course.busy_seconds_max, quiet_seconds)
        faults = self._draw_faults(number, busy_seconds, quiet_seconds)
        faults = [msgspec.structs.replace(each, at_seconds=begin_seconds + each.at_seconds) for each in faults]
        self._faults.expect(faults)
        self._oracles.faults = faults
        arrivals = self._arrivals_until(begin_seconds + busy_seconds, begin_seconds + quiet_seconds)
        await self._endure(faults, arrivals, begin_seconds + quiet_seconds)
        await self._come_to_rest()
        for decode in self._decodes:
            await self._probe_pair(chance.choice(self._prefills), decode)
        await trio.sleep_until(max(begin_seconds + self._course.episode_seconds, trio.current_time()))

    def _draw_faults(self, number: int, busy_seconds: float, quiet_seconds: float) -> list[Fault]:
        """By a swarm, as those of a seed."""
        chance = generator(self._plan.seed, f"faults of episode {number}")
        busy = msgspec.structs.replace(self._shape, safety_seconds=busy_seconds)
        quiet = msgspec.structs.replace(self._shape, safety_seconds=quiet_seconds)
        allowed = [kind for kind in self._kinds() if chance.random() < 0.3] or [*WORKLOAD_KINDS]
        faults = [draw_fault(chance.choice(allowed), busy, chance) for _ in range(chance.randint(0, FAULTS_MAX))]
        faults = [perhaps_of_one_rank(each, self._shape, chance) for each in faults]
        for _ in range(chance.randint(0, CHURN_MAX)):
            gone = draw_fault(chance.choice(CHURN_KINDS), quiet, chance)
            longest_seconds = quiet_seconds - gone.at_seconds
            seconds = round(min(chance.choice(CHURN_SECONDS), longest_seconds), 3)
            faults.append(msgspec.structs.replace(gone, duration_seconds=seconds))
        return sorted(faults, key=lambda each: each.at_seconds)

    def _kinds(self) -> list[Kind]:
        """READs lie where engines verify. Known peers are named when an engine starts, and here the plan is not there
        yet."""
        is_possible = {Kind.READ_LIES: self._shape.verify != "off", Kind.KNOWN_PEER: False}
        return [kind for kind in LEVEL2_KINDS if is_possible.get(kind, True)]

    async def _arrivals_until(self, busy_until: float, until: float) -> None:
        """Many prompts at first, then few; now and then several at once."""
        chance = self._chance
        while True:
            is_busy = trio.current_time() < busy_until
            per_second = self._shape.requests_per_second / BURST_MEAN if is_busy else 1 / FEW_EVERY_SECONDS
            await self._agenda.sleep(chance.expovariate(per_second))
            if trio.current_time() >= until:
                return
            for _ in range(chance.randint(1, 2 * BURST_MEAN - 1)):
                self._begin(self._ask(chance.choice(self._prefills), chance.choice(self._decodes)))

    # --- what was -------------------------------------------------------------------------------------------------

    def _look_back(self) -> None:
        """Judge the trace of an episode, and forget everything that has ended with it."""
        self._check_attempts()
        for finding in check_records(self._trace, is_whole=False).findings:
            self._oracles.complain("trace", str(finding))
        self.requests += len(self._oracles.pulls)
        self.outcomes += self._oracles.outcomes()
        if self._oracles.violations:
            return
        self._trace.clear()
        self._around.moments.clear()
        self._around.nixl.forget_the_dead()
        self._oracles.forget_the_past({prefill.owner for prefill in self._prefills})
        for engine in self._engines:
            for rank in engine.process.ranks:
                rank.figures.take()  # as the engine does with each step

    def _note_hour(self) -> None:
        gc.collect()
        self.hours.append(
            Memory(requests=self.requests, blocks=sys.getallocatedblocks(), resident_bytes=_resident_bytes())
        )
        now = self.hours[-1]
        restarts = sum(engine.process.life for engine in self._engines)
        self._course.say(
            f"hour {len(self.hours):3}     requests {now.requests}, lives of engines {restarts}, "
            f"blocks {now.blocks}, resident {now.resident_bytes / 2**20:.1f} MiB"
        )
        if len(self.hours) == self._course.warm_up_hours:
            self._types = _types()

    def _judge_memory(self) -> None:
        """Whether the last hours hold more than those after the warm-up."""
        after = self.hours[self._course.warm_up_hours - 1 :]
        compared = self._course.compared_hours
        if len(after) < 2 * compared:
            return
        early, late = after[:compared], after[-compared:]
        requests = _median(late, "requests") - _median(early, "requests")
        blocks = _median(late, "blocks") - _median(early, "blocks")
        resident = _median(late, "resident_bytes") - _median(early, "resident_bytes")
        self._course.say(
            f"memory       {blocks:+.0f} blocks and {resident / 2**20:+.1f} MiB in {requests:.0f} requests "
            f"after hour {self._course.warm_up_hours}"
        )
        allowed = self._course.blocks_growth_max + BLOCKS_PER_REQUEST_MAX * requests
        if blocks > allowed or resident > RESIDENT_GROWTH_MAX:
            grown = _types() - self._types
            most = ", ".join(f"{name} {count:+}" for name, count in grown.most_common(TYPES_SHOWN))
            self._oracles.complain(
                "memory", f"{blocks:.0f} blocks and {resident:.0f} bytes more in {requests:.0f} requests: {most}"
            )

    def result(self, real_seconds: float, transitions: Counter[TransitionKey]) -> Result:
        # What stands in the trace are the probes at the end, and the episode of a violation.
        violations = list(self._oracles.violations)
        result = super().result(real_seconds, transitions)
        return dataclasses.replace(result, violations=violations, requests=self.requests, outcomes=self.outcomes)


def soak(seed: int, course: Course) -> tuple[Result, list[Memory]]:
    """One seed. Of a result with violations, `trace` is that of its last episode."""
    clusters: list[SoakCluster] = []

    def make(plan: Plan, agenda: Agenda) -> SoakCluster:
        clusters.append(SoakCluster(plan, agenda, course))
        return clusters[0]

    with _short_tables():
        result = run_cluster(Plan(seed=seed, faults=[]), make)
    return result, clusters[0].hours


@contextmanager
def _short_tables() -> Iterator[None]:
    """What is remembered of leases and links that are over is bounded, and the bounds are reached soon."""
    before = [getattr(module, name) for module, name in TABLES]
    for module, name in TABLES:
        setattr(module, name, TABLE_MAX)
    try:
        yield
    finally:
        for (module, name), value in zip(TABLES, before, strict=True):
            setattr(module, name, value)


def _median(hours: Sequence[Memory], name: str) -> float:
    values: list[float] = [getattr(each, name) for each in hours]
    return statistics.median(values)


def _types() -> Counter[str]:
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


def _resident_bytes() -> int:
    """Of no file: pages of libraries come and go with what else the machine does."""
    resident, of_files = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(of_files)) * resource.getpagesize()


# --- the campaign ---------------------------------------------------------------------------------------------------


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that has passed, as the state has it."""

    seed: int
    hours: float
    requests: int
    seconds: float


class Campaign:
    """Seeds that are done, in a file."""

    def __init__(self, path: Path, hours: float) -> None:
        self._path = path
        self._hours = hours
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = [msgspec.json.decode(line, type=Done) for line in lines]
        self.done = {each.seed: each for each in found if each.hours >= hours}

    def next_seed(self) -> int:
        return next(seed for seed in itertools.count() if seed not in self.done)

    def note(self, seed: int, result: Result) -> None:
        done = Done(seed=seed, hours=self._hours, requests=result.requests, seconds=round(result.real_seconds, 1))
        self.done[seed] = done
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(done) + b"\n")

    def __str__(self) -> str:
        done = self.done.values()
        wall_hours = sum(each.seconds for each in done) / HOUR_SECONDS
        hours = sum(each.hours for each in done)
        rates = f", {hours / wall_hours:.0f} virtual hours and {len(done) / wall_hours:.1f} seeds" if wall_hours else ""
        per_hour = f"{rates} per hour of wall-clock time" if rates else ""
        requests = sum(each.requests for each in done)
        return f"{len(done)} seeds done, {hours:g} virtual hours, {requests} requests{per_hour}"


def run_seed(seed: int, campaign: Campaign, course: Course, traces: Path) -> bool:
    """Whether it has passed."""
    course.say(f"seed {seed}")
    result, _ = soak(seed, course)
    hours, wall_hours = result.virtual_seconds / course.hour_seconds, result.real_seconds / HOUR_SECONDS
    rate = result.requests / result.real_seconds
    course.say(f"virtual time {hours:.1f} h in {result.real_seconds:.0f} s: {hours / wall_hours:.0f} hours per hour")
    course.say(f"requests     {result.requests} ({rate:.0f} a second)")
    course.say("outcomes     " + ", ".join(f"{kind} {count}" for kind, count in result.outcomes.most_common()))
    course.say("faults       " + ", ".join(f"{kind.value} {result.faults_fired[kind]}" for kind in LEVEL2_KINDS))
    for line in coverage_lines(result.transitions):
        course.say(line)
    for violation in result.violations[:VIOLATIONS_SHOWN]:
        course.say(f"  {violation.at_seconds:10.4f} s  {violation.oracle}: {violation.detail}")
    if result.violations:
        traces.mkdir(parents=True, exist_ok=True)
        path = traces / f"soak-seed-{seed}.jsonl"
        path.write_bytes(result.trace_lines())
        course.say(f"verdict      seed {seed} FAILED; its last episode: {path}")
        course.say(f"             again with python -m tests.simulation.soak --seed {seed}")
        return False
    campaign.note(seed, result)
    course.say("verdict      passed")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="COUNT")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--hours", type=float, default=HOURS)
    parser.add_argument("--state", type=Path, default=STATE, metavar="FILE")
    arguments = parser.parse_args()
    course = Course(hours=arguments.hours)
    campaign = Campaign(arguments.state, arguments.hours)
    say(f"campaign     {campaign}")
    passed = True
    for _ in range(arguments.seeds if arguments.seed is None else 1):
        seed = campaign.next_seed() if arguments.seed is None else arguments.seed
        passed = run_seed(seed, campaign, course, arguments.state.parent)
        if not passed:
            break
    say(f"campaign     {campaign}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
