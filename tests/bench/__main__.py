"""`make bench`: this connector beside the one built into vLLM, in turns, in one call.

    python -m tests.bench [CASE ...] [--pairs N] [--json FILE] [--list]

For each figure: the median of both sides, and the ratio ours / built-in as the median of the rounds' ratios, with the
smallest and the largest. A round of one side is followed by one of the other, so both see the same noise; figures of
two calls on a shared machine are not comparable, ratios are. README.md says what the figures do not show.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.cases import CASES, Case
from tests.rig import BUILTIN, OURS

PAIRS = 5
SECONDS_MAX = 110.0
"""Of one case; then it has fewer pairs, and says so."""


@dataclass(frozen=True)
class Figure:
    """One figure of one case over all its rounds; `ratio` is ours / built-in."""

    case: str
    figure: str
    higher_is_better: bool
    builtin: list[float]
    ours: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.builtin, strict=True) if theirs]


def measure(case: Case, pairs: int) -> list[Figure]:
    started = time.monotonic()
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, case.open(Path(directory)) as rounds:
        for number in range(1, pairs + 1):
            for label, figures in rounds(number):
                for name, value in figures.items():
                    found.setdefault(name, {BUILTIN.label: [], OURS.label: []})[label].append(value)
            if time.monotonic() - started > SECONDS_MAX:
                say(f"  {case.name}: {number} pairs in {SECONDS_MAX:.0f} s, not {pairs}")
                break
    return [
        Figure(case.name, name, name in case.higher_is_better, values[BUILTIN.label], values[OURS.label])
        for name, values in found.items()
    ]


def show(case: Case, figures: list[Figure]) -> None:
    print(f"\n{case.name}: {case.about}")
    print(f"    {'':30}{'built-in':>10}{'ours':>10}{'ratio':>8}{'from':>8}{'to':>8}")
    for each in figures:
        medians = f"{statistics.median(each.builtin):>10.3f}{statistics.median(each.ours):>10.3f}"
        ratios = each.ratios
        spread = f"{statistics.median(ratios):>8.2f}{min(ratios):>8.2f}{max(ratios):>8.2f}" if ratios else ""
        print(f"    {each.figure:30}{medians}{spread}{'  (more is better)' if each.higher_is_better else ''}")
    sys.stdout.flush()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    by_name = {case.name: case for case in CASES}
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", nargs="*", help="names; all by default")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.case if name not in by_name]:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(by_name)}")
    chosen = [by_name[name] for name in arguments.case] or list(CASES)
    if arguments.list:
        for case in chosen:
            print(f"{case.name:20} {case.about}")
        return 0
    everything: list[Figure] = []
    for case in chosen:
        figures = measure(case, arguments.pairs)
        show(case, figures)
        everything += figures
    if arguments.json is not None:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
        report = {"machine": machine, "figures": [asdict(each) for each in everything]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print("\nWhat these figures do not show: tests/bench/README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
