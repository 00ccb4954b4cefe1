"""Every mutant, and what notices it: `python -m tests.simulation.mutants`.

    --only NAME   this one (may be given again)
    --jobs N      so many at a time; as many as there are cores, when not given
    --table       write the table of TABLE.md from the catalogue, and run nothing

Each runs where the catalogue says, until the oracle that it names complains. Then the unbroken product runs in the same
places, where nothing may complain. Exit status 1 when a mutant lives, or when something complains without one.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.simulation.mutants.catalogue import CATALOGUE, TABLE, table
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.runner import Planned, Verdict, complaints, in_processes, judge, runs_used


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_mutants(mutants: list[Mutant], jobs: int) -> list[tuple[Mutant, Verdict]]:
    say(f"{'mutant':50} {'row':>4} {'seconds':>8}  {'where':32} {'seed':>4}  noticed by")
    judged: list[tuple[Mutant, Verdict]] = []
    for mutant, answer in in_processes(mutants, judge, jobs):
        if not isinstance(answer, Verdict):
            answer = Verdict(oracle=None, runs=[], seconds=0.0, detail=str(answer))
        judged.append((mutant, answer))
        row = "-" if mutant.row is None else str(mutant.row)
        last = answer.runs[-1] if answer.runs else None
        seed = str(last.plan.seed) if isinstance(last, Planned) and answer.oracle else "-"
        noticed = mutant.place.oracle if answer.oracle else "LIVES"
        say(f"{mutant.name:50} {row:>4} {answer.seconds:>8.1f}  {mutant.place!s:32} {seed:>4}  {noticed}")
        if answer.oracle is None:
            say(f"    {mutant.broken}: {answer.detail}")
    return judged


def run_unbroken(judged: list[tuple[Mutant, Verdict]], jobs: int) -> tuple[int, list[str]]:
    """How many runs there were, and what was wrong with them."""
    used = runs_used(verdict for _, verdict in judged)
    found: list[str] = []
    for _, answer in in_processes(used, complaints, jobs):
        wrong = answer if isinstance(answer, list) else [str(answer)]
        found += wrong
    return sum(map(len, used)), found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.mutants", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", action="append", choices=sorted(CATALOGUE), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        TABLE.write_text(table())
        return 0
    judged = run_mutants([CATALOGUE[name] for name in arguments.only or CATALOGUE], arguments.jobs)
    runs, wrong = run_unbroken(judged, arguments.jobs)
    for line in wrong:
        say(f"without a mutant, {line}")
    living = sum(verdict.oracle is None for _, verdict in judged)
    say(f"mutants      {len(judged)}, {living} live")
    say(f"unbroken     {runs} runs in the same places, {len(wrong)} with complaints")
    return 1 if living or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
