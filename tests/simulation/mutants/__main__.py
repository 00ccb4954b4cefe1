"""Every mutant, and what kills it: `python -m tests.simulation.mutants`.

    --only NAME   this one (may be given again)
    --jobs N      so many at a time

Each runs until the oracle that it names complains. Then the unbroken product runs on the same plans and seeds, where
nothing may complain. Exit status 1 when a mutant lives or a plan fails without one.
"""

from __future__ import annotations

import argparse
import sys

from tests.simulation.mutants.catalogue import CATALOGUE
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.runner import Verdict, complaints, in_processes, judge, plans_used


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_mutants(mutants: list[Mutant], jobs: int) -> list[tuple[Mutant, Verdict]]:
    say(f"{'mutant':45} {'row':>4}  {'killed by':12} {'seed':>4} {'seconds':>8}")
    judged: list[tuple[Mutant, Verdict]] = []
    for mutant, answer in in_processes(mutants, judge, jobs):
        if not isinstance(answer, Verdict):
            answer = Verdict(oracle=None, plans=[], seconds=0.0, detail=str(answer))
        judged.append((mutant, answer))
        row = "-" if mutant.row is None else str(mutant.row)
        seed = str(answer.plans[-1].seed) if answer.oracle else "-"
        say(f"{mutant.name:45} {row:>4}  {answer.oracle or 'LIVES':12} {seed:>4} {answer.seconds:>8.1f}")
        if answer.oracle is None:
            say(f"    {mutant.broken}: {answer.detail}")
    return judged


def run_unbroken(judged: list[tuple[Mutant, Verdict]], jobs: int) -> tuple[int, list[str]]:
    """How many runs there were, and what was wrong with them."""
    used = plans_used(verdict for _, verdict in judged)
    found: list[str] = []
    for plans, answer in in_processes(used, complaints, jobs):
        wrong = [str(answer)] if isinstance(answer, Exception) else answer
        assert isinstance(wrong, list)
        found += [f"{each}, with the faults {plans[0].faults}" for each in wrong]
    return sum(map(len, used)), found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.mutants", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", action="append", choices=sorted(CATALOGUE), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    judged = run_mutants([CATALOGUE[name] for name in arguments.only or CATALOGUE], arguments.jobs)
    runs, wrong = run_unbroken(judged, arguments.jobs)
    for line in wrong:
        say(f"without a mutant, {line}")
    living = sum(verdict.oracle is None for _, verdict in judged)
    say(f"mutants      {len(judged)}, {living} live")
    say(f"unbroken     {runs} runs on the same plans and seeds, {len(wrong)} with complaints")
    return 1 if living or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
