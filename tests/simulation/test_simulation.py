"""The simulator over a few dozen seeds, its own determinism, and that a failing plan is shrunk.

A seed that fails here is replayed by `python -m tests.simulation --seed N`, which shrinks it too. Plans that once found
a bug are in regressions/ and run as well. That the oracles do complain is shown by test_mutants.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import msgspec
import pytest

from tests.simulation.__main__ import main, read_plan
from tests.simulation.cluster import simulate
from tests.simulation.divergence import HASH_SEEDS, first_divergence, trace_in_a_process_of_its_own
from tests.simulation.faults import Fault, Kind, Plan, draw_plan, draw_shape
from tests.simulation.model import SecondGroup
from tests.simulation.mutants.catalogue import CATALOGUE
from tests.simulation.mutants.mutant import Patch
from tests.simulation.shrink import shrink

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))
SEEDS = 30
SEEDS_OF_A_MUTANT = 12


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int) -> None:
    result = simulate(draw_plan(seed))
    assert result.violations == []
    assert result.requests > 10  # few, where the only prefill engine is dead for most of the time
    assert result.outcomes["done"] > 0


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_regression(path: Path) -> None:
    assert simulate(read_plan(path)).violations == []


def test_without_faults_every_request_is_served() -> None:
    seeds = [seed for seed in range(200) if not draw_plan(seed).faults][:3]
    assert len(seeds) == 3
    for seed in seeds:
        result = simulate(draw_plan(seed))
        assert set(result.outcomes) <= {"done", "not awaited", "AbortedByClient", "TooManyPeers"}


@pytest.mark.parametrize("seed", [3, 7])
def test_a_seed_gives_the_same_trace_in_every_process(seed: int) -> None:
    one, other = (trace_in_a_process_of_its_own(["--seed", str(seed)], hash_seed) for hash_seed in HASH_SEEDS)
    assert one.count(b"\n") > 500
    assert first_divergence(one, other) is None


def test_engines_of_every_sort_meet() -> None:
    """Of the seeds above; the simulator has to keep them apart from plain ones."""
    shapes = [draw_shape(seed) for seed in range(SEEDS)]
    pairs = [
        (shape.model, shape.engines[prefill], shape.engines[decode])
        for shape in shapes
        for prefill in shape.prefill_names
        for decode in shape.decode_names
    ]
    assert {(model.heads, p.tp_size, d.tp_size) for model, p, d in pairs} == set(product((1, 2), repeat=3))
    assert {model.second for model, _, _ in pairs} == set(SecondGroup)
    assert {(p.block_tokens > d.block_tokens) - (p.block_tokens < d.block_tokens) for _, p, d in pairs} == {-1, 0, 1}
    plans = [draw_plan(seed) for seed in range(SEEDS)]
    of_ranks = {fault.kind for plan in plans for fault in plan.faults if "." in fault.target}
    assert of_ranks >= {Kind.PAUSE, Kind.READ_STALL, Kind.NOTIFICATION_LOSS}


def test_ranks_disagree_and_tails_are_zeroed() -> None:
    stall = Fault(kind=Kind.READ_STALL, target="d0.1>p0", at_seconds=0.5, duration_seconds=9.0)
    seed = next(seed for seed in range(SEEDS) if draw_shape(seed).engines["d0"].tp_size > 1)
    result = simulate(Plan(seed=seed, faults=[stall]))
    assert result.violations == []
    assert result.coverage["a rank failed alone"]
    seed = next(
        seed
        for seed in range(SEEDS)
        if draw_shape(seed).engines["d0"].block_tokens > draw_shape(seed).engines["p0"].block_tokens
    )
    assert simulate(Plan(seed=seed, faults=[])).coverage["tail zeroed"]


def test_a_divergence_is_found_where_it_begins() -> None:
    one = b"".join(b"record %d\n" % number for number in range(20))
    found = first_divergence(one, one.replace(b"record 12", b"record twelve"))
    assert found is not None
    assert (found.line, found.first, found.second) == (13, b"record 12", b"record twelve")
    assert found.before == [b"record %d" % number for number in range(7, 12)]
    shorter = first_divergence(one, one[: one.index(b"record 19")])
    assert shorter is not None
    assert (shorter.line, shorter.first, shorter.second) == (20, b"record 19", None)
    assert "the trace has ended" in str(shorter)
    assert first_divergence(one, one) is None


@pytest.mark.parametrize("level", ["1", "2"])
def test_the_command_line_says_what_happened(
    level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulation", "--level", level, "--seed", "3", "--seeds", "2"])
    assert main() == 0
    said = capsys.readouterr().out
    for line in ("seeds        2", "requests", "virtual time", "faults       message_loss", "transitions taken"):
        assert line in said
    assert said.endswith("verdict      all passed\n")


def test_different_seeds_give_different_traces() -> None:
    assert simulate(draw_plan(0)).fingerprint() != simulate(draw_plan(2)).fingerprint()


def test_a_plan_survives_its_file() -> None:
    plan = draw_plan(7)
    assert plan.faults
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_a_failing_plan_is_shrunk_to_the_fault_that_matters() -> None:
    harmless = [Fault(kind=Kind.WALL_CLOCK_JUMP, target="d0", at_seconds=at, duration_seconds=0.1) for at in (0.5, 1.0)]
    stall = Fault(kind=Kind.READ_STALL, target="d0>p0", at_seconds=0.0, duration_seconds=6.0)
    with Patch() as patch:
        CATALOGUE["quarantine not reported"].apply(patch)
        for seed in range(SEEDS_OF_A_MUTANT):
            plan = Plan(seed=seed, faults=[harmless[0], stall, harmless[1]])
            if any(each.oracle == "block reuse" for each in simulate(plan).violations):
                assert shrink(plan, "block reuse", simulate).faults == [stall]
                return
    pytest.fail("no seed failed")
