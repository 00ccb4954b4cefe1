"""The short form of `make chaos` (see `tests/chaos`): the same promises, 40 seconds and a fixed seed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.chaos.drains import COMMAND, SIGTERM
from tests.chaos.plan import DECODE, LIFE_KINDS, draw_plan
from tests.chaos.report import RIGHT, render
from tests.chaos.run import run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 9
SECONDS = 40.0
LIFE_GAP_SECONDS = 6.0
OTHER_GAP_SECONDS = 2.5
LATE_MAX = 6.0
"""Every fault of the plan is to happen, however slowly engines start."""
RIGHT_ANSWERS_MIN, LOADED_MIN = 20, 5
"""Of each decode engine. A quiet machine of two cores gives ten times as many."""

_log = logging.getLogger(__name__)


def test_nothing_that_is_done_to_prefill_engines_breaks_a_promise(tmp_path: Path) -> None:
    """Scenarios 1, 2, 8, 11, 14, 19, 30, 32, 40, 43, 45, 47, 48, 50, 51, 54 and 61, all at once."""
    plan = draw_plan(SEED, SECONDS, life_gap_seconds=LIFE_GAP_SECONDS, other_gap_seconds=OTHER_GAP_SECONDS)
    assert {fault.kind for fault in plan.of(LIFE_KINDS)} == set(LIFE_KINDS)
    report = run(plan, "ours", tmp_path, _log.info, LATE_MAX)
    said = f"{plan}\n{render([report])}"
    assert report.broken_promises == [], said
    assert sum(report.faults.get(kind.value, 0) for kind in LIFE_KINDS) == len(plan.of(LIFE_KINDS)), said
    assert {each.way for each in report.drains} == {COMMAND, SIGTERM}, said
    for engine in DECODE:
        assert report.calls[engine].outcomes[RIGHT] >= RIGHT_ANSWERS_MIN, said
        assert report.calls[engine].loaded >= LOADED_MIN, said
        assert report.calls[engine].failures, said
