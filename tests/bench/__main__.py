"""`make bench`: this connector beside the one built into vLLM, in turns, in one call.

    python -m tests.bench [CASE ...] [--pairs N] [--json FILE] [--pages DIRECTORY] [--list]

For each figure: the median of both sides, and the ratio ours / built-in as the median of the rounds' ratios, with the
smallest and the largest. A round of one side is followed by one of the other, so both see the same noise; figures of
two calls on a shared machine are not comparable, ratios are. README.md says what the figures do not show.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.case import Case
from tests.bench.cases import CASES
from tests.bench.limits import Limit, limits
from tests.bench.report import Figure, as_json, limits_table, markdown, table
from tests.bench.sides import WrongResult
from tests.e2e.engines import EngineFailed
from tests.rig import BUILTIN, OURS, RigError

PAIRS = 5
SECONDS_MAX = 110.0
"""Of one case, its engines' start included; if one more pair would make it longer, it has fewer, and says so."""
LIMITS = "limits"
"""Named like a case."""
ABOUT_LIMITS = "134 MB moved, a question asked and a step made beside a copy, without a connector"
BY_NAME = {case.name: case for case in CASES}


def measure(case: Case, pairs: int) -> list[Figure]:
    """Rounds of both sides in turns."""
    started = time.monotonic()
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, case.open(Path(directory)) as rounds:
        for number in range(1, pairs + 1):
            for label, figures in rounds(number):
                for name, value in figures.items():
                    found.setdefault(name, {BUILTIN.label: [], OURS.label: []})[label].append(value)
            expected_seconds = (time.monotonic() - started) * (number + 1) / number
            if number < pairs and expected_seconds > SECONDS_MAX:
                say(f"  {case.name}: {number} pairs instead of {pairs}")
                break
    return [Figure(case.name, name, values[BUILTIN.label], values[OURS.label]) for name, values in found.items()]


def run(names: Sequence[str], pairs: int, json_path: Path | None) -> tuple[list[Figure], list[Limit], list[str]]:
    """Measure and print one after another; the figures, the limits, and the names of cases that failed.

    A case fails when an engine dies, is late or answers wrongly, whichever connector it has: the others go on.
    """
    figures: list[Figure] = []
    measured: list[Limit] = []
    failed: list[str] = []
    for name in names:
        if name == LIMITS:
            measured = limits()
            print(f"\n{LIMITS}: {ABOUT_LIMITS}\n{limits_table(measured)}", flush=True)
        else:
            try:
                found = measure(BY_NAME[name], pairs)
            except (RigError, EngineFailed, WrongResult) as error:
                say(f"\n{name} failed: {error}")
                failed.append(name)
                continue
            print(f"\n{name}: {BY_NAME[name].about}\n{table(found)}", flush=True)
            figures += found
        if json_path is not None:  # after each, so that a run that is broken off is not lost
            json_path.write_text(json.dumps(as_json(figures, measured), indent=2) + "\n")
    return figures, measured, failed


def page_of(figures: Sequence[Figure], measured: Sequence[Limit], pairs: int) -> str:
    """The page of a run, as docs/performance.md shows it."""
    head = (
        "# Beside the built-in connector, case by case\n\n"
        f"Written by `python -m tests.bench --pages`; {pairs} pairs, fewer where a case takes too long. Medians, and "
        "the ratio\nours / built-in with the smallest and the largest. What it shows and what it does not: "
        "[performance.md](../performance.md).\n\n"
    )
    return head + markdown(figures, measured, {case.name: case.about for case in CASES})


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def list_cases() -> None:
    for case in CASES:
        print(f"{case.name if case.is_default else f'[{case.name}]':20} {case.about}")
    print(f"{LIMITS:20} {ABOUT_LIMITS}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", nargs="*", help="names; by default all but those that --list has in brackets")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--pages", type=Path, metavar="DIRECTORY", help="write a table there, and a plot of the ratios")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    arguments = parser.parse_args()
    known = [*BY_NAME, LIMITS]
    if unknown := [name for name in arguments.case if name not in known]:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(known)}")
    if arguments.list:
        list_cases()
        return 0
    by_default = [case.name for case in CASES if case.is_default]
    figures, measured, failed = run(arguments.case or [*by_default, LIMITS], arguments.pairs, arguments.json)
    if arguments.pages is not None:
        from tests.bench.plots import PICTURE, plot

        page = arguments.pages / f"{PICTURE}.md"
        paths = plot(figures, arguments.pages)
        page.write_text(page_of(figures, measured, arguments.pairs))
        for path in (*paths, page):
            print(path)
    print("\nWhat these figures do not show: tests/bench/README.md")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
