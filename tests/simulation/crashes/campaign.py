"""Which points of a run are tried, in what order, and what came of them; see the package's docstring."""

from __future__ import annotations

import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.simulation.crashes.points import FILE_AND_SOCKETS, Injected, InjectedOs, Site
from tests.simulation.crashes.run import MOMENTS, Verdict, play

OF_A_SITE_MAX = 40
"""Points of one site that are tried: an engine that steps asks for its figures a thousand times."""


@dataclass(frozen=True)
class Try:
    """One run: the point that raises, and what it raises."""

    site: Site
    error: type[Exception] = Injected
    number: int | None = None
    """Of the point; None: an await that goes on waiting raises."""
    moment: float | None = None
    struck: int | None = None
    """When it does, and which of those that wait then."""

    def play(self) -> Verdict:
        return play(self.number, self.error, moment=self.moment, struck=self.struck)

    def __str__(self) -> str:
        which = f"--point {self.number}" if self.number is not None else f"--moment {self.moment} --task {self.struck}"
        return f"{which}{' --os' * (self.error is InjectedOs)}   {' '.join(self.site)}"


@dataclass
class Found:
    """What came of a campaign."""

    tried: int = 0
    complaints: dict[str, list[Try]] = field(default_factory=lambda: defaultdict(list))
    """What was wrong, and at which points."""
    deaths: Counter[str] = field(default_factory=Counter)
    """Places at which a whole trio run died of it."""

    def note(self, tried: Try, verdict: Verdict) -> None:
        self.tried += 1
        if verdict.died:
            self.deaths[tried.site.place] += 1
        for complaint in verdict.complaints:
            self.complaints[complaint].append(tried)


def tries(sites: Sequence[Site]) -> list[Try]:
    """All that there are to make, `sites` being the points of a run without faults: of each site its points, spread
    where they are many, and the awaits that go on waiting at some moments."""
    strikes = [
        Try(site, moment=moment, struck=number)
        for moment in MOMENTS
        for number, site in enumerate(play(moment=moment).waiting)
    ]
    of_site: dict[Site, list[int]] = defaultdict(list)
    for number, site in enumerate(sites):
        of_site[site].append(number)
    found = []
    for site, numbers in of_site.items():
        pace = max(1, -(-len(numbers) // OF_A_SITE_MAX))
        errors = (Injected, InjectedOs) if site.kind in FILE_AND_SOCKETS else (Injected,)
        found += [Try(site, error, number) for number in numbers[::pace] for error in errors]
    return strikes + sorted(found, key=lambda each: (each.number or 0, each.error.__name__))


def one_of_each_site(everything: Sequence[Try], seed: int) -> list[Try]:
    """One point of each site and error, another one with each seed."""
    of_site: dict[tuple[Site, type[Exception], bool], list[Try]] = defaultdict(list)
    for each in everything:
        of_site[each.site, each.error, each.number is None].append(each)
    return [those[seed % len(those)] for those in of_site.values()]


def run(chosen: Iterable[Try], jobs: int = 1) -> Iterator[tuple[Try, Verdict]]:
    """Play each of them."""
    chosen = list(chosen)
    if jobs == 1:
        for each in chosen:
            yield each, each.play()
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from zip(chosen, pool.imap(Try.play, chosen, 16), strict=True)
