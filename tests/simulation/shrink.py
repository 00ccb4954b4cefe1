"""From a plan that fails to a smaller one that fails in the same way: faults are dropped while it still does.

Delta debugging in its simplest form. Dropping one fault changes what the others hit, because the draws of the run
shift; so it goes round until a whole round drops nothing, or the number of runs is used up.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.simulation.cluster import Result, simulate
from tests.simulation.faults import Plan

RUNS_MAX = 100


def shrink(plan: Plan, oracle: str, run: Callable[[Plan], Result] = simulate) -> Plan:
    """A plan of as few of these faults as could be found on which this oracle still complains.

    `run`: the simulator on which the plan failed.
    """
    runs = 0
    number = 0
    unchanged = 0
    while plan.faults and unchanged < len(plan.faults) and runs < RUNS_MAX:
        number %= len(plan.faults)
        smaller = msgspec.structs.replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
        runs += 1
        if any(violation.oracle == oracle for violation in run(smaller).violations):
            plan, unchanged = smaller, 0
        else:
            number, unchanged = number + 1, unchanged + 1
    return plan
