"""Breadth-first search over the worlds of one product."""

from __future__ import annotations

import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from statemachine.kernel import Event
from tests.explore.product import Cores, Product
from tests.explore.shelf import Taken
from tests.explore.world import Broken, Choice, Rules, Turn, World

_NOBODY = -1


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search that found nothing wrong.

    Attributes:
        ends: worlds in which nothing is left to happen.
        deepest: choices on the longest of the shortest ways to a world.
        cores: distinct states of single cores.
        taken: every transition of a machine that was taken.
        events: every kind of event that a core has taken in.
    """

    product: Product
    states: int
    edges: int
    ends: int
    deepest: int
    cores: int
    seconds: float
    taken: frozenset[Taken]
    events: frozenset[type[Event]]

    def __str__(self) -> str:
        return (
            f"{self.states:,} states, {self.edges:,} edges, {self.ends:,} ends, {self.deepest} choices deep, "
            f"{self.cores:,} states of cores, {len(self.taken)} transitions taken, {self.seconds:.1f} s"
        )


class Violation(Exception):
    """An invariant does not hold. `scenario` is the shortest sequence of choices that leads there."""

    def __init__(self, invariant: str, scenario: list[str]) -> None:
        steps = "\n".join(f"  {number:3}. {step}" for number, step in enumerate(scenario, 1))
        super().__init__(f"{invariant}, after\n{steps}")
        self.invariant = invariant
        self.scenario = scenario


class _Packing:
    """Worlds as tuples of numbers. Most of a world is equal to the same part of another one, so parts are kept once."""

    def __init__(self) -> None:
        self._numbers: list[dict[Any, int]] = [{} for _ in World._fields]
        self._parts: list[list[Any]] = [[] for _ in World._fields]

    def pack(self, world: World) -> tuple[int, ...]:
        packed = []
        for numbers, parts, part in zip(self._numbers, self._parts, world, strict=True):
            number = numbers.get(part)
            if number is None:
                number = numbers[part] = len(parts)
                parts.append(part)
            packed.append(number)
        return tuple(packed)

    def unpack(self, packed: tuple[int, ...]) -> World:
        return World(*[parts[number] for parts, number in zip(self._parts, packed, strict=True)])


class TooManyStates(Exception):
    """The search was given up; the product is too wide."""


def explore(product: Product, cores: Cores | None = None, progress: Callable[[int], None] | None = None) -> Explored:
    """Search everything within `product`.

    Args:
        cores: the classes of the cores; production's by default.
        progress: told of the number of states now and then.

    Raises:
        Violation: something is wrong.
        TooManyStates: there is too much to search.
    """
    rules = Rules(product, cores or Cores())
    began = time.perf_counter()
    packing = _Packing()
    index: dict[tuple[int, ...], int] = {}
    parents: list[tuple[int, str]] = []
    depths = array("l")
    frontier: deque[tuple[int, tuple[int, ...]]] = deque()
    for said, world in rules.starts():
        index[packing.pack(rules.canonical(world))] = len(parents)
        frontier.append((len(parents), packing.pack(world)))
        parents.append((_NOBODY, said))
        depths.append(0)
    ends: list[int] = []
    edges = 0
    # Worlds in which nothing is awaited that has a bound.
    quiet: list[int] = []
    # Edges that are no deviation, for the way back from these; and those of them that somebody may count on.
    sources, targets = array("l"), array("l")
    sure_sources, sure_targets = array("l"), array("l")
    while frontier:
        here, packed = frontier.popleft()
        world = packing.unpack(packed)
        if not rules.left_over(world):
            ends.append(here)
        if not rules.awaited(world):
            quiet.append(here)
        for choice in rules.choices(world):
            if choice.cost > world.budget:
                continue
            turn = Turn(rules, world, choice.cost)
            try:
                choice.execute(turn)
            except Broken as broken:
                raise Violation(str(broken), [*scenario_of(parents, here), choice.said]) from broken
            there = turn.world()
            edges += 1
            key = packing.pack(rules.canonical(there))
            known = index.get(key)
            if known is None:
                known = index[key] = len(parents)
                if known >= product.states_max:
                    raise TooManyStates(f"more than {product.states_max:,} states in the product {product.name!r}")
                if progress is not None and known % 50_000 == 0:
                    progress(known)
                parents.append((here, sys.intern(choice.said)))
                depths.append(depths[here] + 1)
                frontier.append((known, packing.pack(there)))
            if choice.cost == 0:
                sources.append(here)
                targets.append(known)
                if choice.is_sure:
                    sure_sources.append(here)
                    sure_targets.append(known)
    stuck = first_stuck(len(parents), ends, sources, targets)
    if stuck is not None:
        said = "no end is reachable without deviations"
        raise _stuck(rules, parents, stuck, rules.left_over, said, lambda choice: choice.cost == 0)
    waiting = first_stuck(len(parents), quiet, sure_sources, sure_targets)
    if waiting is not None:
        said = "if what is late never comes, a wait does not end"
        raise _stuck(rules, parents, waiting, rules.awaited, said, lambda choice: choice.is_sure)
    return Explored(
        product=product,
        states=len(parents),
        edges=edges,
        ends=len(ends),
        deepest=max(depths),
        cores=len(rules.shelf),
        seconds=time.perf_counter() - began,
        taken=frozenset(rules.shelf.taken),
        events=frozenset(rules.shelf.events),
    )


def scenario_of(parents: list[tuple[int, str]], here: int) -> list[str]:
    """The choices on the way there. The first world has the parent -1."""
    steps: list[str] = []
    while here != _NOBODY:
        here, said = parents[here]
        steps.append(said)
    return [step for step in reversed(steps) if step]


def first_stuck(states: int, ends: list[int], sources: array[int], targets: array[int]) -> int | None:
    """Liveness: walk back from the ends over these edges; every world must be met."""
    before: list[list[int]] = [[] for _ in range(states)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    reaches_end = bytearray(states)
    for end in ends:
        reaches_end[end] = 1
    frontier = list(ends)
    while frontier:
        for each in before[frontier.pop()]:
            if not reaches_end[each]:
                reaches_end[each] = 1
                frontier.append(each)
    stuck = reaches_end.find(0)
    return stuck if stuck >= 0 else None


def _stuck(
    rules: Rules,
    parents: list[tuple[int, str]],
    stuck: int,
    left_in: Callable[[World], list[str]],
    said: str,
    may_happen: Callable[[Choice], bool],
) -> Violation:
    """Walk the scenario again, and on by what may happen, to where it rests; say what is left over there."""
    scenario = scenario_of(parents, stuck)
    world = _replay(rules, scenario)
    seen: set[World] = set()
    while world not in seen:
        seen.add(world)
        for choice in rules.choices(world):
            if may_happen(choice):
                turn = Turn(rules, world, 0)
                choice.execute(turn)
                world = turn.world()
                scenario = [*scenario, choice.said]
                break
    left = "; ".join(left_in(world)) or "it goes round in circles"
    return Violation(f"liveness (4, 8): {said}: {left}", scenario)


def _replay(rules: Rules, scenario: list[str]) -> World:
    starts = dict(rules.starts())
    steps = list(scenario)
    world = starts[steps.pop(0)] if steps and steps[0] in starts else starts[""]
    for said in steps:
        choice = next(each for each in rules.choices(world) if each.said == said)
        turn = Turn(rules, world, choice.cost)
        choice.execute(turn)
        world = turn.world()
    return world
