"""`make soak` in small: days of fewer minutes, fewer engines. And that it would notice, and where it goes on."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from statemachine.roster import Roster
from tests.simulation import soak
from tests.simulation.active_faults import ActiveFaults
from tests.simulation.cluster import Result
from tests.simulation.faults import Fault, Kind, Plan
from tests.simulation.soak import Campaign, Course, Done
from tests.simulation.verdict import Violation

pytestmark = pytest.mark.timeout(400)

SHORT = Course(
    engines=3,
    hours=14,
    hour_seconds=200.0,
    episode_seconds=100.0,
    busy_seconds_max=8.0,
    warm_up_hours=3,
    compared_hours=4,
    blocks_growth_max=10_000,
    say=lambda line: None,
)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_short_one_passes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: Counter[Kind] = Counter()
    expect = ActiveFaults.expect

    def expect_and_count(self: ActiveFaults, faults: Iterable[Fault]) -> None:
        faults = list(faults)
        planned.update(fault.kind for fault in faults)
        expect(self, faults)

    monkeypatch.setattr(ActiveFaults, "expect", expect_and_count)
    result, hours = soak.soak(seed, SHORT)
    assert result.violations == []
    assert len(hours) >= SHORT.hours - 1
    assert result.virtual_seconds >= SHORT.hours * SHORT.hour_seconds
    assert result.requests > 1000
    assert result.outcomes["done"] > 0.5 * result.requests
    assert sum(result.faults_fired.values()) > 100
    # Each once, but for engines that are dead, or end already; and some die while they drain.
    assert 10 < planned[Kind.DRAIN] / 2 < result.faults_fired[Kind.DRAIN] <= planned[Kind.DRAIN]
    assert result.coverage["an engine drained"] > result.faults_fired[Kind.DRAIN] / 2


def test_what_is_kept_of_each_request_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps it, and although nothing else is wrong with it."""
    kept: list[object] = []
    ask = Roster._ask

    def ask_and_keep(self: Roster, asked: Any, now_ns: int) -> Any:
        kept.append([object() for _ in range(20)])
        return ask(self, asked, now_ns)

    monkeypatch.setattr(Roster, "_ask", ask_and_keep)
    result, _ = soak.soak(0, SHORT)
    assert [violation.oracle for violation in result.violations] == ["memory"]
    assert "builtins.list" in result.violations[0].detail


def test_both_ways_to_evict_a_peer_are_taken() -> None:
    """In the shape of some seeds; a run of any of them takes the one or the other."""
    courses = [soak.SoakCluster(Plan(seed=seed, faults=[]), soak.Agenda(), Course()) for seed in range(12)]
    places = {course._shape.peer_limit for course in courses}
    assert places == {soak.PLACES, soak.FEW_PLACES}
    assert Course().engines > soak.FEW_PLACES
    assert all(course._oracles.options.engine_ttl < Course().episode_seconds * 6 for course in courses)


def result_of(plan: Plan, violations: list[Violation]) -> Result:
    return Result(
        plan=plan,
        violations=violations,
        requests=7,
        outcomes=Counter(),
        faults_fired=Counter(),
        virtual_seconds=24 * soak.HOUR_SECONDS,
        real_seconds=600.0,
        transitions=Counter(),
        trace=[],
        moments=[],
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds that were run, none of which takes any time; 2 fails."""
    seeds: list[int] = []

    def run(seed: int, course: Course) -> tuple[Result, list[soak.Memory]]:
        seeds.append(seed)
        wrong = [Violation(oracle="bytes", detail="wrong", at_seconds=1.0)] if seed == 2 else []
        return result_of(Plan(seed=seed, faults=[]), wrong), []

    monkeypatch.setattr(soak, "soak", run)
    return seeds


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["soak", *map(str, arguments)])
    return soak.main()


def test_a_campaign_goes_on_where_it_was(
    runs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state" / "soak.jsonl"
    assert call(monkeypatch, "--state", state) == 0
    assert call(monkeypatch, "--state", state) == 0
    assert runs == [0, 1]
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == (
        "campaign     2 seeds done, 48 virtual hours, 14 requests, "
        "144 virtual hours and 6.0 seeds per hour of wall-clock time"
    )
    for _ in range(2):  # one that has failed is run again first
        assert call(monkeypatch, "--state", state, "--seeds", 5) == 1
        assert "seed 2 FAILED" in capsys.readouterr().out
    assert runs == [0, 1, 2, 2]
    assert Campaign(state, 24).done == {seed: Done(seed=seed, hours=24, requests=7, seconds=600.0) for seed in (0, 1)}


def test_a_seed_that_ran_for_less_is_not_done_for_more(
    runs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "soak.jsonl"
    for hours in (2, 24, 2):
        assert call(monkeypatch, "--state", state, "--hours", hours) == 0
    assert runs == [0, 0, 1]


def test_a_seed_can_be_run_again(runs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "soak.jsonl"
    for _ in range(2):
        assert call(monkeypatch, "--state", state, "--seed", 7) == 0
    assert runs == [7, 7]


def test_the_whole_day_is_what_is_promised() -> None:
    course = Course()
    assert (course.hours, course.engines, course.warm_up_hours) == (24, 8, 2)
    assert dataclasses.replace(course, hours=1).hour_seconds == 3600.0
