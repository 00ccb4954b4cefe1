"""What a request and a peer cost while there are many of them.

    python -m tests.bench.bench_scale [LEVEL ...] [--axis AXIS ...] [--json FILE] [--from FILE ...] [--plots DIRECTORY]

One decode rank reads from prefill engines, all in this process, at three levels:

    cores       `RemoteEngine` and `Lending` alone, handed to each other (level 1 of the simulator, without its world)
    actors      the production actors of both sides, on the simulator's network and its NIXL (level 2)
    sockets     the same over real ZMQ sockets, in real time; only the data are the simulator's

A number of requests is open at any time: announced and started, their leases held, their READs in flight. Whenever some
end, as many begin. One axis varies while the others stay at `STANDARD`:

    peers       prefill engines
    open        requests that are open at once, over all of them
    ranks       of each engine, all of which the decode rank reads from

What is measured, by rank of the prefill engine:

    us/READ     processor time of a request, from its command to its confirmed release: both sides, and the fakes
    KiB/open    memory of an open request, on both sides
    ms/peer     processor time from the first command that names an engine to the end of its first request
    KiB/peer    memory of an engine that was met and that nobody uses, on D and of its links

Each line should be flat, or fall with the ranks, which share what a request has once. Of the processor it is the time
of this process, which a busy machine disturbs less than the clock: the lowest of `ROUNDS`. Memory is what tracemalloc
counts, in a round of its own. The collector of cyclic garbage is off: its rounds grow with what lives, whoever made it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import trio

from tests.bench.scale_cores import Cores
from tests.bench.scale_load import Cost, Load, Measure, Memory, measure_cost, measure_memory
from tests.bench.scale_plots import plot
from tests.simulation.bare_engines import on_fakes, on_sockets

ROUNDS = 2
STANDARD = Load(peers=10, open=100, ranks=1)
AXES: dict[str, tuple[int, ...]] = {
    "peers": (10, 100, 1_000),
    "open": (10, 100, 1_000, 10_000),
    "ranks": (1, 2, 8, 72),
}
FIGURES = {"read_us": "us/READ", "open_kib": "KiB/open", "peer_ms": "ms/peer", "peer_kib": "KiB/peer"}

LEVELS: dict[str, Callable[[Load, Measure[Any]], Any]] = {
    "cores": lambda load, measure: trio.run(measure, Cores(load), load),
    "actors": lambda load, measure: on_fakes(lambda side: measure(side, load), peers=load.peers, ranks=load.ranks),
    "sockets": lambda load, measure: on_sockets(lambda side: measure(side, load), peers=load.peers, ranks=load.ranks),
}


@dataclass(frozen=True)
class Point:
    """One load at one level, and what came of it."""

    level: str
    axis: str
    load: Load
    cost: Cost
    memory: Memory

    @property
    def place(self) -> int:
        """On its axis."""
        place: int = getattr(self.load, self.axis)
        return place

    @property
    def figures(self) -> dict[str, float]:
        return asdict(self.cost) | asdict(self.memory)


def measure_point(level: str, axis: str, place: int) -> Point:
    load = replace(STANDARD, **{axis: place})
    if axis == "peers":
        load = replace(load, open=max(load.open, place))  # so that each peer has some
    run = LEVELS[level]
    costs: list[Cost] = [run(load, measure_cost) for _ in range(ROUNDS)]
    lowest = Cost(**{name: min(getattr(each, name) for each in costs) for name in asdict(costs[0])})
    return Point(level, axis, load, lowest, run(load, measure_memory))


def show(points: Sequence[Point]) -> None:
    """A table in markdown: a row for each figure on each axis, with its places from left to right."""
    levels = list(dict.fromkeys(point.level for point in points))
    print(f"| | {' | '.join(levels)} |")
    print("|---" * (1 + len(levels)) + "|")
    for axis, name in itertools.product(AXES, FIGURES):
        curves = [curve(points, level, axis, name) for level in levels]
        if any(curves):
            places = " / ".join(f"{place:,}" for place in AXES[axis])
            cells = [" / ".join(f"{y:.3g}" for _, y in each) for each in curves]
            print(f"| {FIGURES[name]}, {axis} {places} | {' | '.join(cells)} |")


def curve(points: Sequence[Point], level: str, axis: str, name: str) -> list[tuple[int, float]]:
    """A figure over the places of an axis."""
    return sorted((each.place, each.figures[name]) for each in points if (each.level, each.axis) == (level, axis))


def read(paths: Iterable[Path]) -> list[Point]:
    """What `--json` has written."""
    found = [each for path in paths for each in json.loads(path.read_text())]
    return [
        Point(each["level"], each["axis"], Load(**each["load"]), Cost(**each["cost"]), Memory(**each["memory"]))
        for each in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_scale")
    parser.add_argument("level", nargs="*", metavar="LEVEL", help=f"of {', '.join(LEVELS)}; all by default")
    parser.add_argument("--axis", action="append", choices=AXES, help="all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--from", dest="files", type=Path, nargs="+", metavar="FILE", help="measure nothing; read these"
    )
    parser.add_argument("--plots", type=Path, metavar="DIRECTORY", help="draw scale.png and scale.svg there")
    arguments = parser.parse_args()
    if unknown := [level for level in arguments.level if level not in LEVELS]:
        parser.error(f"no such level: {', '.join(unknown)}")
    points = read(arguments.files) if arguments.files else list(_measure_all(arguments.level, arguments.axis))
    show(points)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    if arguments.plots is not None:
        levels = list(dict.fromkeys(point.level for point in points))
        curves = {key: curve(points, *key) for key in itertools.product(levels, AXES, FIGURES)}
        plot(curves, arguments.plots)


def _measure_all(levels: list[str], axes: list[str] | None) -> Iterable[Point]:
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # a thousand peers have some nine thousand
    gc.disable()
    for level in levels or LEVELS:
        for axis in axes or AXES:
            for place in AXES[axis]:
                yield measure_point(level, axis, place)
                gc.collect()


if __name__ == "__main__":
    main()
