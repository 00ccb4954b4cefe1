"""A handful of mutants is noticed, and the catalogue is in order. `make mutants` runs all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector.runtime.peer_actor import PeerActor
from statemachine import request
from statemachine.lease import LeaseName
from statemachine.remote_engine.claims import Claims
from tests.explore import explore
from tests.simulation.faults import Plan
from tests.simulation.mutants import __main__ as program
from tests.simulation.mutants import runner
from tests.simulation.mutants.catalogue import CATALOGUE, PARTS, TABLE, table
from tests.simulation.mutants.mutant import ByTest, Edit, Explored, Mutant, Patch, Seeds, Set
from tests.simulation.mutants.places import CORE, ONE, within
from tests.simulation.mutants.rules import RULES
from tests.simulation.mutants.runner import OneTest, Planned, Verdict, complaints, in_processes, judge, runs_used

ROOT = Path(__file__).parents[2]

HANDFUL = (
    "done without proof",
    "report before drained",
    "an error is the end",
    "the first engine lets go for all",
    "lease never expires",
    "drift ignored",
    "a release is said once",
    "a READ that errs early raises no suspicion",
    "the executor drops the quarantine",
    "ends of leases lost",
    "one of several sources read",
    "any state will do",
)
"""Every part of the product and every place: the model checker, all levels of the simulator, tests."""

CONTROL = Mutant(
    name="control", broken="nothing is", changes=(), place=Seeds(level=1, oracle="bytes", faults=(), count=2)
)


@pytest.mark.timeout(2 * runner.REAL_SECONDS_MAX)  # one that hangs is to be named by the runner
@pytest.mark.parametrize("name", HANDFUL)
def test_a_mutant_is_noticed(name: str) -> None:
    mutant = CATALOGUE[name]
    ((_, verdict),) = in_processes([mutant], judge, 1)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.oracle is not None, verdict.detail
    assert verdict.oracle.startswith(mutant.place.oracle)


def test_a_control_that_breaks_nothing_lives() -> None:
    verdict = judge(CONTROL)
    assert verdict.oracle is None
    assert len(verdict.runs) == 2
    assert "was silent" in verdict.detail


def test_an_oracle_that_is_not_the_named_one_does_not_kill() -> None:
    reported_twice = CATALOGUE["reported twice"]
    wrong = Mutant(name="x", broken="x", changes=reported_twice.changes, place=Explored(within(ONE, 0), "invariant 7"))
    verdict = judge(wrong)
    assert verdict.oracle is None
    assert "not invariant 2" in verdict.detail


# --- the catalogue --------------------------------------------------------------------------------------------------


def test_the_catalogue_is_in_order() -> None:
    every = [mutant for part in PARTS.values() for mutant in part]
    assert len(every) == len(CATALOGUE), "names are unique"
    of_the_cores = sum(len(part) for name, part in PARTS.items() if "machine" in name)
    assert of_the_cores >= 100
    for mutant in every:
        assert mutant.broken, mutant.name
        assert mutant.changes, mutant.name


def test_every_rule_of_the_cores_is_removed_once() -> None:
    removed = {mutant.rule for mutant in CATALOGUE.values()} - {None}
    assert removed == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_rules_are_quoted_as_they_are(name: str) -> None:
    where, quotation = RULES[name]
    said = " ".join((where.__doc__ or "").split())
    assert quotation in said


def test_every_test_that_a_mutant_names_exists() -> None:
    for mutant in CATALOGUE.values():
        if isinstance(mutant.place, ByTest):
            path, *_, function = mutant.place.test.partition("[")[0].split("::")
            # A suite that several implementations of a port have to pass is a class beside the files that name these.
            written = [ROOT / path, *(ROOT / path).parent.glob("*_suite.py")]
            assert any(f"def {function}(" in file.read_text() for file in written), mutant.name


def test_the_table_is_that_of_the_catalogue() -> None:
    assert TABLE.read_text() == table(), "python -m tests.simulation.mutants --table"


# --- breaking and mending -------------------------------------------------------------------------------------------


def test_every_mutant_can_be_applied_and_leaves_nothing_behind() -> None:
    report, table_before = PeerActor._report.__code__, dict(request.MACHINE.table)
    resend, untouched = Claims.resend_ns, explore(within(ONE, 1))
    for mutant in CATALOGUE.values():
        with Patch() as patch:
            mutant.apply(patch)
    assert PeerActor._report.__code__ is report
    assert request.MACHINE.table == table_before
    assert Claims.resend_ns is resend
    again = explore(within(ONE, 1))
    assert (again.states, again.edges) == (untouched.states, untouched.edges)


def test_an_edit_is_seen_wherever_the_function_is_held() -> None:
    abort = request.MACHINE.table[request.State.READING, request.Aborted].handler
    with Patch() as patch:
        Edit(request._abort_reading, "State.FAILED", "State.EXPIRED").apply(patch)
        value = request.Request(request_id="r", lease=LeaseName("r", 1), peer="p", retries_left=0)
        assert abort(value, request.Aborted())[0].state is request.State.EXPIRED
    assert abort(value, request.Aborted())[0].state is request.State.FAILED


def test_edits_of_one_function_add_up() -> None:
    with Patch() as patch:
        Edit(request._abort_reading, "State.FAILED", "State.EXPIRED").apply(patch)
        Edit(request._abort_reading, "State.EXPIRED", "State.DONE").apply(patch)


def test_what_does_not_exist_cannot_be_changed() -> None:
    with Patch() as patch:
        with pytest.raises(AttributeError):
            Set(PeerActor, "_no_such_method", None).apply(patch)
        with pytest.raises(ValueError, match="0 times"):
            Edit(Claims.leave, "no such text", "").apply(patch)
        with pytest.raises(ValueError, match="times"):
            Edit(Claims.leave, "claim", "").apply(patch)
        with pytest.raises(ValueError, match="no_such_name"):
            Edit(Claims.leave, "del claim.users[request_id]", "no_such_name()").apply(patch)


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


def test_a_job_that_hangs_is_ended_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "REAL_SECONDS_MAX", 0.5)
    answers = in_processes([1, 0], _spin, at_once=1)
    job, answer = next(answers)
    assert job == 1
    assert isinstance(answer, TimeoutError)
    monkeypatch.undo()  # the other one may take as long as its machine does
    assert list(answers) == [(0, 0)]


def test_what_mutants_went_through_is_run_once_without_them() -> None:
    plans = [Planned(2, Plan(seed=seed, faults=[])) for seed in range(3)]
    others = [Planned(1, Plan(seed=0, faults=[])), OneTest("a::b"), within(ONE, 0), within(ONE, 2), within(ONE, 1)]
    verdicts = [Verdict(oracle="x", runs=runs, seconds=0.0, detail="") for runs in (plans[:1], plans, others)]
    assert runs_used(verdicts) == [[within(ONE, 2)], plans, [others[0]], [OneTest("a::b")]]


def test_complaints_say_where() -> None:
    good = OneTest(f"{CORE}::test_a_request_that_needs_no_read_is_done_at_once")
    with Patch() as patch:
        CATALOGUE["park full hits"].apply(patch)
        ((_, answer),) = in_processes([[good]], complaints, 1)
    assert isinstance(answer, list)
    assert answer
    assert answer[0].startswith(f"test {good.name}")


def test_a_test_that_is_not_there_is_no_verdict() -> None:
    missing = Mutant(name="x", broken="x", changes=(), place=ByTest(f"{CORE}::test_no_such_test"))
    ((_, answer),) = in_processes([missing], judge, 1)
    assert isinstance(answer, RuntimeError)


@pytest.mark.parametrize(
    ("answer", "wrong", "status"),
    [
        (Verdict(oracle="invariant 2", runs=[within(ONE, 0)], seconds=0.1, detail="x"), [], 0),
        (Verdict(oracle="invariant 2", runs=[within(ONE, 0)], seconds=0.1, detail="x"), ["product: x"], 1),
        (Verdict(oracle=None, runs=[], seconds=0.1, detail="silent"), [], 1),
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
