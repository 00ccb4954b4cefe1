"""From a plan that fails to a smaller one that fails in the same way: faults are dropped while it still does.

Delta debugging in its simplest form. Dropping one fault changes what the others hit, because the draws of the run
shift; so it goes round until a whole round drops nothing, or the number of runs is used up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from tests.simulation.faults import Plan
from tests.simulation.verdict import Violation

RUNS_MAX = 100


class Judged(Protocol):
    """The result of a run."""

    @property
    def violations(self) -> list[Violation]: ...


def shrink(plan: Plan, oracle: str, simulate: Callable[[Plan], Judged]) -> Plan:
    """A plan of as few of these faults as could be found on which this oracle still complains."""
    runs = 0
    number = 0
    unchanged = 0
    while plan.faults and unchanged < len(plan.faults) and runs < RUNS_MAX:
        number %= len(plan.faults)
        smaller = msgspec.structs.replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
        runs += 1
        if any(violation.oracle == oracle for violation in simulate(smaller).violations):
            plan, unchanged = smaller, 0
        else:
            number, unchanged = number + 1, unchanged + 1
    return plan
