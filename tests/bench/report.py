"""Figures of a run: their ratios, as a table and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.limits import Limit

WIDTH = 34


@dataclass(frozen=True)
class Figure:
    """One figure of one case over all its rounds, in their order."""

    case: str
    figure: str
    builtin: list[float]
    ours: list[float]

    @property
    def more_is_better(self) -> bool:
        """Of all figures but rates, less is."""
        return self.figure.startswith("GB/s")

    @property
    def ratios(self) -> list[float]:
        """Ours / built-in, of each round in which the built-in connector's figure is above 0."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.builtin, strict=True) if theirs > 0]

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios; None: there is none."""
        return statistics.median(self.ratios) if self.ratios else None


def table(figures: Iterable[Figure]) -> str:
    """Medians of both sides; the median, smallest and largest ratio."""
    lines = [f"    {'':{WIDTH}}{'built-in':>10}{'ours':>10}{'ratio':>8}{'from':>8}{'to':>8}"]
    for each in figures:
        medians = f"{statistics.median(each.builtin):>10.3f}{statistics.median(each.ours):>10.3f}"
        spread = ""
        if each.ratio is not None:
            spread = f"{each.ratio:>8.2f}{min(each.ratios):>8.2f}{max(each.ratios):>8.2f}"
        lines.append(f"    {each.figure:{WIDTH}}{medians}{spread}{'  (more is better)' if each.more_is_better else ''}")
    return "\n".join(lines)


def limits_table(limits: Iterable[Limit]) -> str:
    """The median, smallest and largest of each."""
    lines = [f"    {'':{WIDTH + 10}}{'median':>10}{'from':>10}{'to':>10}"]
    lines += [
        f"    {each.name:{WIDTH + 10}}{statistics.median(each.values):>10.2f}"
        f"{min(each.values):>10.2f}{max(each.values):>10.2f}  {each.unit}"
        for each in limits
    ]
    return "\n".join(lines)


def markdown(figures: Sequence[Figure], limits: Sequence[Limit], about: Mapping[str, str]) -> str:
    """Both tables for a page. `about`: what each case does. Ratios where ours is worse are bold."""
    lines = ["| case | figure | built-in | ours | ratio (from to) |", "|---|---|---|---|---|"]
    before = None
    for each in figures:
        case = "" if each.case == before else f"`{each.case}`: {about[each.case]}"
        before = each.case
        ratio = ""
        if each.ratio is not None:
            is_better = each.ratio >= 1 if each.more_is_better else each.ratio <= 1
            ratio = f"{each.ratio:.2f}" if is_better else f"**{each.ratio:.2f}**"
            ratio += f" ({min(each.ratios):.2f} to {max(each.ratios):.2f})"
        medians = (f"{statistics.median(values):.3g}" for values in (each.builtin, each.ours))
        lines.append(f"| {case} | {each.figure} | {' | '.join(medians)} | {ratio} |")
    if limits:
        lines += ["", "| without a connector | median | from | to | |", "|---|---|---|---|---|"]
    for limit in limits:
        values = (statistics.median(limit.values), min(limit.values), max(limit.values))
        lines.append(f"| {limit.name} | {' | '.join(f'{value:.3g}' for value in values)} | {limit.unit} |")
    return "\n".join(lines) + "\n"


def as_json(figures: Iterable[Figure], limits: Iterable[Limit]) -> dict[str, Any]:
    """All values, and the machine they are from."""
    machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    return {
        "machine": machine,
        "figures": [asdict(each) | {"ratio": each.ratio, "more_is_better": each.more_is_better} for each in figures],
        "limits": [asdict(each) for each in limits],
    }
