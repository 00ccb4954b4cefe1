"""READs that lie: NIXL says that they are complete, and one bit of what they have written is wrong.

With `verify: all` every one of them ends its request as Corrupt, and no other request is disturbed; without it the byte
oracle complains, which shows that they do lie.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.simulation import faults
from tests.simulation.faults import Fault, Kind, Plan, draw_plan
from tests.simulation.mutants.mutant import Patch
from tests.simulation.scripted import simulate

SEEDS_OF_A_SWARM = 4
NOWHERE = Fault(kind=Kind.READ_LIES, target="d8>p8", at_seconds=0.0, duration_seconds=0.0)
"""Between engines that there are not: all verify, and nothing is wrong."""


def lies(probability: float, at_seconds: float = 0.0, seconds: float = 20.0) -> list[Fault]:
    """On every link."""
    return [
        Fault(
            kind=Kind.READ_LIES,
            target=f"d{decode}>p{prefill}",
            at_seconds=at_seconds,
            duration_seconds=seconds,
            probability=probability,
        )
        for decode in range(3)
        for prefill in range(3)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_no_request_is_done_with_what_a_lying_read_has_left(seed: int) -> None:
    result = simulate(Plan(seed=seed, faults=lies(0.2)))
    assert result.violations == []
    assert result.outcomes["Corrupt"] > 5
    assert result.outcomes["done"] > 5


@pytest.mark.parametrize("seed", range(3))
def test_nor_among_other_faults(seed: int) -> None:
    drawn = [each for each in draw_plan(seed + 40).faults if each.kind is not Kind.TWO_RANKS and "." not in each.target]
    result = simulate(Plan(seed=seed, faults=[*drawn, *lies(0.2)]))
    assert result.violations == []
    assert result.outcomes["Corrupt"] > 0


def test_nor_in_the_seeds_that_draw_such_reads() -> None:
    """Some seeds of level 2 do, among all other faults."""
    drawn = (draw_plan(seed) for seed in range(200))
    lying = [plan for plan in drawn if any(fault.kind is Kind.READ_LIES for fault in plan.faults)]
    assert len(lying) > 10
    corrupt = 0
    for plan in lying[:SEEDS_OF_A_SWARM]:
        result = simulate(plan)
        assert result.violations == []
        corrupt += result.outcomes["Corrupt"]
    assert corrupt > 5


def test_where_no_read_lies_nothing_is_corrupt() -> None:
    result = simulate(Plan(seed=1, faults=lies(0.0)))
    assert result.violations == []
    assert result.outcomes["Corrupt"] == 0
    assert result.outcomes["done"] > 10


@pytest.mark.parametrize("seed", [3, 7])
def test_engines_that_verify_serve_and_let_go_as_soon_as_others(seed: int) -> None:
    """In seed 7 the last request for a lease reads nothing, and its engine has nothing else to do."""
    result = simulate(Plan(seed=seed, faults=[NOWHERE]))
    assert result.violations == []
    assert result.outcomes["done"] > 100


def test_without_the_option_it_is_the_byte_oracle_that_notices() -> None:
    plan = Plan(seed=1, faults=lies(0.2))
    shape = msgspec.structs.replace(faults.shape_of(plan), verify="off")
    with Patch() as patch:
        patch.attribute(faults, "shape_of", lambda plan: shape)
        from tests.simulation import cluster

        patch.attribute(cluster, "shape_of", lambda plan: shape)
        violations = simulate(plan).violations
    assert any("bytes" in str(each) or "invariant 3" in str(each) for each in violations), violations[:3]
