"""Polls that found nothing and polls that moved data, on machines of several kinds, told apart by what they cost.

The figures are those of two machines: processor time of polls in microseconds, as quantiles (docs/nixl.md fact 41).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from connector.ports.nixl_agent.poll_cost import PollCost

US = 1e-6
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99)
Costs = Sequence[float]
FAST: tuple[Costs, Costs] = ((2.0, 2.4, 2.8, 3.3, 5.0), (5.0, 6.0, 11.0, 16.0, 68.0))
SLOW: tuple[Costs, Costs] = ((8.0, 14.0, 19.0, 22.0, 33.0), (14.0, 28.0, 38.0, 73.0, 140.0))
machines = pytest.mark.parametrize("machine", [FAST, SLOW], ids=["fast", "slow"])
after_pauses = pytest.mark.parametrize("after_pause", [False, True], ids=["at once", "after a pause"])


def drawn(costs: Costs, generator: random.Random) -> float:
    """In seconds."""
    at = generator.random() * QUANTILES[-1]
    upper = next(number for number, quantile in enumerate(QUANTILES) if quantile >= at)
    below = max(0, upper - 1)
    share = (at - QUANTILES[below]) / max(QUANTILES[upper] - QUANTILES[below], 1e-9)
    return US * (costs[below] + share * (costs[upper] - costs[below]))


def taught(machine: tuple[Costs, Costs], polls: int = 500, cost: PollCost | None = None) -> PollCost:
    """After so many polls of each kind that found nothing."""
    cost, generator = cost or PollCost(), random.Random(1)
    for _ in range(polls):
        for after_pause in (False, True):
            cost.learn(drawn(machine[after_pause], generator), after_pause=after_pause)
    return cost


@machines
@after_pauses
def test_what_finds_nothing_is_not_taken_for_work(machine: tuple[Costs, Costs], after_pause: bool) -> None:
    cost, generator = taught(machine), random.Random(2)
    empty = [drawn(machine[after_pause], generator) for _ in range(5000)]
    taken = sum(cost.has_worked(each, 0, after_pause=after_pause) for each in empty)
    assert taken <= len(empty) / 50


@machines
@after_pauses
def test_what_moves_data_is_work(machine: tuple[Costs, Costs], after_pause: bool) -> None:
    least = 250 * US if after_pause else 100 * US
    assert taught(machine).has_worked(least, 0, after_pause=after_pause)
    assert PollCost().has_worked(least, 0, after_pause=after_pause), "before anything is learned"


@machines
@after_pauses
def test_a_long_transfer_is_not_taken_for_nothing(machine: tuple[Costs, Costs], after_pause: bool) -> None:
    """Meanwhile polls that find nothing do not come; afterwards what they cost is learned anew."""
    cost = taught(machine)
    for _ in range(10_000):
        assert cost.has_worked(250 * US, 0, after_pause=after_pause)
        cost.learn(250 * US, after_pause=after_pause)
    taught(machine, 200, cost)
    assert cost.has_worked(250 * US, 0, after_pause=after_pause)
    assert cost.has_worked(100 * US, 0, after_pause=False)


def test_a_machine_may_become_slower() -> None:
    cost = taught(SLOW, 200, taught(FAST))
    assert not cost.has_worked(30 * US, 0, after_pause=False)
    assert taught(FAST, 200, cost).has_worked(30 * US, 0, after_pause=False)


def test_after_a_pause_a_dear_poll_is_followed_by_another() -> None:
    cost = taught(FAST)
    assert cost.may_have_worked(30 * US, 0)
    assert not cost.has_worked(30 * US, 0, after_pause=True)


@machines
def test_reads_that_are_asked_about_cost_something(machine: tuple[Costs, Costs]) -> None:
    cost = taught(machine)
    asked = max(60 * US, machine[0][2] * US * (2.5 + 64 / 2))
    assert cost.has_worked(asked, 0, after_pause=False)
    assert not cost.has_worked(asked, 64, after_pause=False)
