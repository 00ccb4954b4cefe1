"""The simulator for people: `python -m tests.simulation --seed N`.

    --level 1          the two cores under an event heap, fast; 2 (the default): the production actors; vllm: the
                       production actors between engines with vLLM's own scheduler
    --seed N           the first seed; the plan of faults is drawn from it
    --seeds COUNT      so many seeds from there on
    --seconds N        seed after seed until the time is up
    --until-failure    seed after seed until one fails
    --faults FILE      replay the plan in this file (its seed counts, the options above do not)
    --fingerprint      say one digest of everything that all seeds traced; equal in every process and on every machine
    --trace FILE       write all transition records there, as JSON lines
    --html FILE        write the timeline page of a seed there, with its faults; of several seeds, that of the first one
                       that fails, or the last one. The shrunk plan of one that fails has a page of its own beside it

A seed is printed before it runs, so that one that hangs is known. A plan that fails is shrunk and written to a file;
the command that replays it is printed. Exit status 1 when a seed failed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tests.simulation.coverage import TransitionKey, coverage_lines
from tests.simulation.faults import LEVEL1_KINDS, LEVEL2_KINDS, VLLM_KINDS, Kind, Plan, draw_plan
from tests.simulation.shrink import shrink
from tests.simulation.timeline import write_page

FAILURES = Path(".state/simulation")
VIOLATIONS_SHOWN = 5


@dataclass(frozen=True)
class Level:
    """How the seeds of a level are run."""

    name: str
    simulate: Callable[[Plan], Any]
    kinds: tuple[Kind, ...]

    def draw(self, seed: int) -> Plan:
        return draw_plan(seed, self.kinds)


# What a level needs is imported only for it.


def _simulate_cores(plan: Plan) -> Any:
    from tests.simulation.level1.run import simulate

    return simulate(plan)


def _simulate_actors(plan: Plan) -> Any:
    from tests.simulation.scripted import simulate

    return simulate(plan)


def _simulate_with_vllm(plan: Plan) -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    from tests.simulation.vllm.cluster import simulate

    return simulate(plan)


LEVELS = {
    level.name: level
    for level in (
        Level("1", _simulate_cores, LEVEL1_KINDS),
        Level("2", _simulate_actors, LEVEL2_KINDS),
        Level("vllm", _simulate_with_vllm, VLLM_KINDS),
    )
}


@dataclass
class Totals:
    """Sums over all seeds."""

    seeds: int = 0
    failed: int = 0
    requests: int = 0
    virtual_seconds: float = 0.0
    real_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[Kind] = field(default_factory=Counter)
    transitions: Counter[TransitionKey] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)
    fingerprints: list[str] = field(default_factory=list)

    def add(self, result: Any) -> None:
        self.seeds += 1
        self.failed += bool(result.violations)
        self.requests += result.requests
        self.virtual_seconds += result.virtual_seconds
        self.real_seconds += result.real_seconds
        self.outcomes += result.outcomes
        self.faults += result.faults_fired
        self.transitions += result.transitions
        self.coverage += result.coverage


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def read_plan(path: Path) -> Plan:
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def plans(arguments: argparse.Namespace, level: Level) -> Iterable[Plan]:
    if arguments.faults is not None:
        return [read_plan(arguments.faults)]
    if arguments.seconds is not None:
        end = time.monotonic() + arguments.seconds
        seeds = itertools.takewhile(lambda seed: time.monotonic() < end, itertools.count(arguments.seed))
        return (level.draw(seed) for seed in seeds)
    if arguments.until_failure:
        return (level.draw(seed) for seed in itertools.count(arguments.seed))
    return (level.draw(seed) for seed in range(arguments.seed, arguments.seed + arguments.seeds))


def command(level: Level, what: str) -> str:
    return f"python -m tests.simulation --level {level.name} {what}"


def explain(result: Any, level: Level, html: Path | None) -> None:
    """What went wrong, and how to see it again."""
    for violation in result.violations[:VIOLATIONS_SHOWN]:
        say(f"  {violation.at_seconds:10.4f} s  {violation.oracle}: {violation.detail}")
    if len(result.violations) > VIOLATIONS_SHOWN:
        say(f"  and {len(result.violations) - VIOLATIONS_SHOWN} more")
    first = result.violations[0]
    smallest = shrink(result.plan, first.oracle, level.simulate)
    smallest = msgspec.structs.replace(smallest, comment=f"{first.oracle}: {first.detail}")
    FAILURES.mkdir(parents=True, exist_ok=True)
    path = FAILURES / f"level-{level.name}-seed-{smallest.seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(smallest)) + b"\n")
    say(f"  {len(result.plan.faults)} faults shrunk to {len(smallest.faults)}; replay with")
    replay = command(level, f"--faults {path}")
    say(f"  {replay}")
    if html is not None:
        shrunk = html.with_stem(f"{html.stem}-shrunk")
        write_page(level.simulate(smallest), shrunk, command=replay)
        say(f"  {shrunk}")


def summarize(totals: Totals, level: Level) -> None:
    rate = totals.requests / totals.real_seconds if totals.real_seconds else 0.0
    say(f"seeds        {totals.seeds}")
    say(f"requests     {totals.requests} ({rate:.0f} a second)")
    say(f"virtual time {totals.virtual_seconds:.0f} s in {totals.real_seconds:.1f} s")
    say("outcomes     " + ", ".join(f"{kind} {count}" for kind, count in totals.outcomes.most_common()))
    say("faults       " + ", ".join(f"{kind.value} {totals.faults[kind]}" for kind in level.kinds))
    if totals.coverage:
        say("coverage     " + ", ".join(f"{what} {count}" for what, count in sorted(totals.coverage.items())))
    for line in coverage_lines(totals.transitions):
        say(line)
    if totals.fingerprints:
        say("fingerprint  " + hashlib.sha256("".join(totals.fingerprints).encode()).hexdigest())
    say("verdict      " + (f"{totals.failed} of {totals.seeds} seeds FAILED" if totals.failed else "all passed"))


def run(arguments: argparse.Namespace, level: Level, trace: BinaryIO | None) -> Totals:
    totals = Totals()
    html: Path | None = arguments.html
    for plan in plans(arguments, level):
        say(f"seed {plan.seed}")
        result = level.simulate(plan)
        totals.add(result)
        if arguments.fingerprint:
            totals.fingerprints.append(result.fingerprint())
        if trace is not None:
            trace.write(result.trace_lines())
        if html is not None:
            what = f"--seed {plan.seed}" if arguments.faults is None else f"--faults {arguments.faults}"
            write_page(result, html, command=command(level, what))
        if result.violations:
            explain(result, level, html)
            html = None
            if arguments.until_failure:
                break
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--level", choices=list(LEVELS), default="2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, metavar="COUNT")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--until-failure", action="store_true")
    parser.add_argument("--faults", type=Path, metavar="FILE")
    parser.add_argument("--fingerprint", action="store_true")
    parser.add_argument("--trace", type=Path, metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    level = LEVELS[arguments.level]
    if arguments.trace is None:
        totals = run(arguments, level, None)
    else:
        with arguments.trace.open("wb") as trace:
            totals = run(arguments, level, trace)
    summarize(totals, level)
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
