"""Which points of a run are tried, in what order, and what came of them; see the package's docstring."""

from __future__ import annotations

import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.simulation.crashes.points import FILE_AND_SOCKETS, Injected, InjectedOs, Site
from tests.simulation.crashes.run import Verdict
from tests.simulation.crashes.scenes import SCENES, play

OF_A_SITE_MAX = 32
"""Points of one site that are tried: an engine that steps asks for its figures a thousand times."""
AGAIN_MAX = 1
"""The same, where an earlier scene has been at the same place."""


@dataclass(frozen=True)
class Try:
    """One run: the point that raises, and what it raises."""

    scene: str
    site: Site
    error: type[Exception] = Injected
    number: int | None = None
    """Of the point; None: an await that goes on waiting raises."""
    moment: float | None = None
    struck: int | None = None
    """When it does, and which of those that wait then."""

    def play(self) -> Verdict:
        return play(self.scene, self.number, self.error, moment=self.moment, struck=self.struck)

    def __str__(self) -> str:
        which = f"--point {self.number}" if self.number is not None else f"--moment {self.moment} --task {self.struck}"
        return f"--scene {self.scene} {which}{' --os' * (self.error is InjectedOs)}   {' '.join(self.site)}"


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


def references() -> dict[str, Verdict]:
    """Of all scenes, without a fault."""
    return {scene: play(scene) for scene in SCENES}


def tries(of_scenes: Mapping[str, Verdict]) -> list[Try]:
    """All that there are to make: of each site its points, spread where they are many, and the awaits that go on
    waiting at some moments. A later scene is there for what the earlier ones do not reach."""
    strikes: list[Try] = []
    found: list[Try] = []
    seen: set[tuple[str, str]] = set()
    """Kinds and places of earlier scenes."""
    struck: set[str] = set()
    """Places, too."""
    for scene, reference in of_scenes.items():
        of_moments = [
            Try(scene, site, moment=moment, struck=number)
            for moment in SCENES[scene].moments
            for number, site in enumerate(play(scene, moment=moment).waiting)
            if site.place not in struck
        ]
        strikes += of_moments
        struck |= {each.site.place for each in of_moments}
        of_site: dict[Site, list[int]] = defaultdict(list)
        for number, site in enumerate(reference.sites):
            of_site[site].append(number)
        of_scene = []
        for site, numbers in of_site.items():
            most = AGAIN_MAX if (site.kind, site.place) in seen else OF_A_SITE_MAX
            pace = max(1, -(-len(numbers) // most))
            errors = (Injected, InjectedOs) if site.kind in FILE_AND_SOCKETS else (Injected,)
            of_scene += [Try(scene, site, error, number) for number in numbers[::pace] for error in errors]
        found += sorted(of_scene, key=lambda each: (each.number or 0, each.error.__name__))
        seen |= {(site.kind, site.place) for site in of_site}
    return strikes + found


def one_of_each_site(everything: Sequence[Try], seed: int) -> list[Try]:
    """One point of each site of each scene, another one with each seed; with each error, and of those that wait."""
    of_site: dict[tuple[object, ...], list[Try]] = defaultdict(list)
    for each in everything:
        of_site[each.scene, each.site, each.error, each.number is None].append(each)
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
