"""A handful of mutants is noticed, and the catalogue is in order. `make mutants` runs all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from connector.runtime.peer_actor import PeerActor
from statemachine import request
from tests.simulation.cluster import simulate
from tests.simulation.faults import Plan
from tests.simulation.mutants import __main__ as program
from tests.simulation.mutants import actors, machines, ranks, runner, wire
from tests.simulation.mutants.catalogue import CATALOGUE, FIELD_FAILURES
from tests.simulation.mutants.mutant import Mutant, Patch
from tests.simulation.mutants.runner import Verdict, complaints, in_processes, judge, plans_used

HANDFUL = (
    "believe what was begun",
    "report before drained",
    "first sample lets go",
    "replaced engine kept",
    "drift ignored",
    "one handshake at a time",
    "one rank speaks for all",
    "tail not zeroed",
)
"""Every part of the product, and oracles of every sort: bytes, reuse, leases, leaks, proofs, delay."""

CONTROL = Mutant(name="control", row=None, broken="nothing is", apply=lambda patch: None, seeds=3)


@pytest.mark.parametrize("name", HANDFUL)
def test_a_mutant_is_noticed(name: str) -> None:
    verdict = judge(CATALOGUE[name])
    assert verdict.oracle == CATALOGUE[name].oracle, verdict.detail
    assert complaints(verdict.plans[-1:]) == []


def test_a_control_that_breaks_nothing_lives() -> None:
    verdict = judge(CONTROL)
    assert verdict.oracle is None
    assert len(verdict.plans) == CONTROL.seeds
    assert "was silent" in verdict.detail


def test_an_oracle_that_is_not_the_named_one_does_not_kill() -> None:
    reported_twice = CATALOGUE["reported twice"]
    wrong = Mutant(name="x", row=None, broken="x", apply=reported_twice.apply, oracle="isolation", seeds=1)
    verdict = judge(wrong)
    assert verdict.oracle is None
    assert "not report once" in verdict.detail


def test_the_catalogue_is_in_order() -> None:
    every = [*actors.MUTANTS, *machines.MUTANTS, *ranks.MUTANTS, *wire.MUTANTS]
    assert len(every) >= 60
    assert len({mutant.name for mutant in every}) == len(every) == len(CATALOGUE)
    assert {mutant.row for mutant in every} - {None} == set(FIELD_FAILURES)
    for mutant in every:
        assert mutant.broken, mutant.name
        assert mutant.oracle, mutant.name


def test_a_patch_leaves_nothing_behind() -> None:
    report, table = PeerActor._report, dict(request.MACHINE.table)
    untouched = simulate(Plan(seed=1, faults=[])).fingerprint()
    with Patch() as patch:
        for mutant in CATALOGUE.values():
            mutant.apply(patch)
        assert PeerActor._report is not report
        assert request.MACHINE.table != table
    assert PeerActor._report is report
    assert request.MACHINE.table == table
    assert simulate(Plan(seed=1, faults=[])).fingerprint() == untouched


def test_a_patch_refuses_what_does_not_exist() -> None:
    with Patch() as patch:
        with pytest.raises(AttributeError):
            patch.attribute(PeerActor, "_no_such_method", None)
        with pytest.raises(KeyError):
            patch.handler(request.MACHINE, (request.State.DONE, request.Aborted), lambda value, event: (value, ()))


# --- the runner -----------------------------------------------------------------------------------------------------


def _double(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number * 2


def _spin(number: int) -> int:
    while number:
        pass
    return number


def test_jobs_run_in_processes_of_their_own() -> None:
    answers = dict(in_processes(range(5), _double, at_once=2))
    assert isinstance(answers.pop(3), RuntimeError)
    assert answers == {0: 0, 1: 2, 2: 4, 4: 8}


def test_a_job_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "REAL_SECONDS_MAX", 0.3)
    answers = dict(in_processes([1, 0], _spin, at_once=2))
    assert isinstance(answers[1], TimeoutError)
    assert answers[0] == 0


def test_plans_are_run_without_mutants_once_each() -> None:
    plans = [Plan(seed=seed, faults=[]) for seed in range(3)]
    other = msgspec.structs.replace(plans[0], faults=list(next(CATALOGUE["back off for ever"].plans()).faults))
    verdicts = [Verdict(oracle="bytes", plans=used, seconds=0.0, detail="") for used in (plans[:1], plans, [other])]
    assert plans_used(verdicts) == [plans, [other]]


@pytest.mark.parametrize(
    ("answer", "wrong", "status"),
    [
        (Verdict(oracle="bytes", plans=[Plan(seed=0, faults=[])], seconds=0.1, detail="x"), [], 0),
        (Verdict(oracle="bytes", plans=[Plan(seed=0, faults=[])], seconds=0.1, detail="x"), ["seed 0: bytes: x"], 1),
        (Verdict(oracle=None, plans=[], seconds=0.1, detail="silent"), [], 1),
        (TimeoutError("it was ended"), [], 1),
    ],
)
def test_the_exit_status_says_whether_all_is_well(
    answer: object, wrong: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_all(jobs: list[Any], work: Callable[[Any], object], at_once: int) -> list[tuple[Any, object]]:
        return [(job, answer if work is judge else wrong) for job in jobs]

    monkeypatch.setattr(program, "in_processes", answer_all)
    monkeypatch.setattr("sys.argv", ["mutants", "--only", "reported twice"])
    assert program.main() == status
