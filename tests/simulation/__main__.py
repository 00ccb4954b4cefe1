"""The simulator for people: `python -m tests.simulation --seed N`.

    --seed N           the first seed; the plan of faults is drawn from it
    --seeds COUNT      so many seeds from there on
    --until-failure    seed after seed until one fails
    --faults FILE      replay the plan in this file (its seed counts, the options above do not)
    --scheduler KIND   script: engines whose schedulers are scripts (default); vllm: engines with vLLM's own scheduler
    --trace FILE       write all transition records there, as JSON lines

A seed is printed before it runs, so that one that hangs is known. A plan that fails is shrunk and written to a file;
the command that replays it is printed. Exit status 1 when a seed failed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from tests.simulation.cluster import MACHINES, Result, simulate
from tests.simulation.faults import Kind, Plan, draw_plan
from tests.simulation.shrink import shrink

FAILURES = Path(".state/simulation")
VIOLATIONS_SHOWN = 5


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
    transitions: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
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


def plans(arguments: argparse.Namespace) -> Iterable[Plan]:
    if arguments.faults is not None:
        return [read_plan(arguments.faults)]
    if arguments.until_failure:
        return (draw_plan(seed) for seed in itertools.count(arguments.seed))
    return (draw_plan(seed) for seed in range(arguments.seed, arguments.seed + arguments.seeds))


def simulator(scheduler: str) -> Callable[[Plan], Result]:
    """The simulator that goes with --scheduler; vLLM is imported only for its own."""
    if scheduler == "script":
        return simulate
    from tests.simulation.vllm.cluster import simulate as simulate_vllm

    return simulate_vllm


def explain(result: Result, scheduler: str) -> None:
    """What went wrong, and how to see it again."""
    for violation in result.violations[:VIOLATIONS_SHOWN]:
        say(f"  {violation.at_seconds:10.4f} s  {violation.oracle}: {violation.detail}")
    if len(result.violations) > VIOLATIONS_SHOWN:
        say(f"  and {len(result.violations) - VIOLATIONS_SHOWN} more")
    first = result.violations[0]
    smallest = shrink(result.plan, first.oracle, simulator(scheduler))
    smallest = msgspec.structs.replace(smallest, comment=f"{first.oracle}: {first.detail}")
    FAILURES.mkdir(parents=True, exist_ok=True)
    kind = "" if scheduler == "script" else f"{scheduler}-"
    path = FAILURES / f"{kind}seed-{smallest.seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(smallest)) + b"\n")
    say(f"  {len(result.plan.faults)} faults shrunk to {len(smallest.faults)}; replay with")
    option = "" if scheduler == "script" else f" --scheduler {scheduler}"
    say(f"  python -m tests.simulation{option} --faults {path}")


def summarize(totals: Totals) -> None:
    rate = totals.requests / totals.real_seconds if totals.real_seconds else 0.0
    say(f"seeds        {totals.seeds}")
    say(f"requests     {totals.requests} ({rate:.0f} a second)")
    say(f"virtual time {totals.virtual_seconds:.0f} s in {totals.real_seconds:.1f} s")
    say("outcomes     " + ", ".join(f"{kind} {count}" for kind, count in totals.outcomes.most_common()))
    say("faults       " + ", ".join(f"{kind.value} {totals.faults[kind]}" for kind in Kind))
    if totals.coverage:
        say("schedulers   " + ", ".join(f"{what} {count}" for what, count in sorted(totals.coverage.items())))
    for name, machine in MACHINES.items():
        pairs = [(state.value, event.__name__) for state, event in machine.table]
        missing = [f"{state}+{event}" for state, event in pairs if not totals.transitions[name, state, event]]
        never = f"; never {', '.join(missing)}" if missing else ""
        say(f"{name:12} {len(pairs) - len(missing)} of {len(pairs)} transitions taken{never}")
    say("verdict      " + (f"{totals.failed} of {totals.seeds} seeds FAILED" if totals.failed else "all passed"))


def run(arguments: argparse.Namespace, trace: BinaryIO | None) -> Totals:
    totals, simulate_one = Totals(), simulator(arguments.scheduler)
    for plan in plans(arguments):
        say(f"seed {plan.seed}")
        result = simulate_one(plan)
        totals.add(result)
        if trace is not None:
            trace.write(result.trace_lines())
        if result.violations:
            explain(result, arguments.scheduler)
            if arguments.until_failure:
                break
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, metavar="COUNT")
    parser.add_argument("--until-failure", action="store_true")
    parser.add_argument("--faults", type=Path, metavar="FILE")
    parser.add_argument("--scheduler", choices=("script", "vllm"), default="script")
    parser.add_argument("--trace", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.trace is None:
        totals = run(arguments, None)
    else:
        with arguments.trace.open("wb") as trace:
            totals = run(arguments, trace)
    summarize(totals)
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
