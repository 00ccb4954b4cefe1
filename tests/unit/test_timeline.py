"""The document behind the timeline page, and the page as a file."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connector.observe.history import OUTCOMES, Story, histories, stories
from connector.tools.timeline.export import (
    SCRIPTS,
    SHOWN,
    Complaint,
    Document,
    Fault,
    SimulatedRun,
    document,
    export_html,
    page,
)
from diagrams.draw import arrows
from tests.unit.timeline_load import BEGIN_WALL, LEASE_SECONDS, trace

STEP = 6


def told(requests: int = 30, **options: Any) -> list[Story]:
    return stories(histories(trace(requests, **options)))


def data_of(text: str) -> Any:
    """What is embedded in a page."""
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_every_story_and_history_is_there_with_its_steps() -> None:
    shown = told()
    made = document(shown, title="t")
    assert len(made.stories) == len(shown)
    for row, story in zip(made.stories, shown, strict=True):
        assert row.deciding == row.requests[0]
        for numbers, known in ((row.requests, story.requests), (row.holds, story.holds), (row.leases, story.leases)):
            for number, history in zip(numbers, known, strict=True):
                kept = made.histories[number]
                assert OUTCOMES[kept.outcome] == history.outcome
                events = [made.strings[step or 0] for step in kept.steps[1::STEP]]
                assert events == [record.event for record in history.records]
                assert made.strings[kept.subject] == history.subject
        assert row.held == row.leases


def test_times_are_microseconds_since_the_first_record() -> None:
    shown = told()
    made = document(shown, title="t")
    assert made.zero_wall == pytest.approx(BEGIN_WALL, abs=1.0)
    starts = [made.histories[row.leases[0]].steps[0] for row in made.stories]
    assert min(start for start in starts if start is not None) == 0
    number = made.stories[5].requests[0]
    passed = list(accumulate(step or 0 for step in made.histories[number].steps[0::STEP]))
    records = shown[5].requests[0].records
    assert passed[-1] - passed[0] == pytest.approx((records[-1].mono_ns - records[0].mono_ns) / 1e3, abs=1)


def test_the_wait_in_the_queue_of_vllm_is_before_the_first_step() -> None:
    """Of the first request too, where the document begins with it."""
    records = [
        msgspec.structs.replace(each, age_seconds=2.5) if each.event == "Created" and each.machine != "hold" else each
        for each in trace(30)
    ]
    made, before = document(stories(histories(records)), title="t"), document(told(), title="t")
    assert made.zero_wall == pytest.approx(before.zero_wall - 2.5)
    for row in made.stories:
        assert [made.histories[number].queued for number in (*row.requests, *row.leases)] == [2_500_000] * 2
        assert [made.histories[number].queued for number in row.holds] == [None]
    assert min(made.histories[row.leases[0]].steps[0] or 0 for row in made.stories) == 2_500_000
    assert {each.queued for each in before.histories} == {None}


def test_what_is_left_of_a_lease_is_in_its_steps() -> None:
    made = document(told(), title="t")
    lent = made.histories[made.stories[0].leases[0]]
    assert lent.steps[5] is None  # while it is computed
    assert lent.steps[STEP + 5] == LEASE_SECONDS * 1e6


def test_an_instance_whose_creation_is_missing_begins_with_what_is_known() -> None:
    records = [each for each in trace(5) if not (each.machine == "request" and each.from_state is None)]
    made = document(stories(histories(records)), title="t")
    first = made.histories[made.stories[0].requests[0]]
    assert made.strings[first.steps[1] or 0] == "(not recorded)"
    assert made.strings[first.steps[2] or 0] == "pending_handshake"
    assert first.steps[STEP] == 0


def test_every_history_has_its_outcome_and_a_story_that_of_the_rank_that_decides() -> None:
    shown = told(400)
    made = document(shown, title="t")
    for machine in SHOWN:
        outcomes = {OUTCOMES[each.outcome] for each in made.histories if SHOWN[each.machine].name == machine.name}
        assert (
            outcomes
            == {
                "request": {"done", "failed", "expired", "aborted", "open"},
                "hold": {"done", "expired", "open"},
                "lease": {"done", "expired", "open"},
            }[machine.name]
        )
    by_outcome = {story.deciding.outcome: story for story in shown}
    done, failed = by_outcome["done"], by_outcome["failed"]
    made = document([Story(requests=[*done.requests, *failed.requests]), Story(leases=done.leases)], title="t")
    both, lent = made.stories
    assert (both.deciding, lent.deciding) == (both.requests[1], lent.leases[0])


def test_the_charts_are_the_tables() -> None:
    made = document([], title="t")
    for machine in SHOWN:
        chart = made.machines[machine.name]
        drawn = {(source.value, target.value): events for (source, target), events in arrows(machine).items()}
        assert {(source, target): events for source, target, events in chart.arrows} == drawn
        assert set(chart.terminal) == {state.value for state in machine.terminal}


def test_a_simulated_run_counts_from_its_own_zero() -> None:
    fault = Fault(kind="pause", target="p0", at_seconds=1.5, duration_seconds=0.5)
    complaint = Complaint(oracle="bytes", detail="not those of the prompt", at_seconds=2.0)
    run = SimulatedRun(zero_wall=BEGIN_WALL - 10, command="again", faults=(fault,), complaints=(complaint,))
    made = document(told(), title="t", simulated=run)
    assert made.histories[made.stories[0].leases[0]].steps[0] == pytest.approx(10e6, abs=1e6)
    assert (made.faults, made.complaints, made.command) == ([fault], [complaint], "again")


def test_the_page_is_one_file_with_all_in_it(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    export_html(told(), path, title="A <title> & more")
    text = path.read_text()
    assert "<title>A &lt;title> &amp; more</title>" in text
    assert msgspec.convert(data_of(text), Document).title == "A <title> & more"
    assert "{{" not in text.replace("${{", "")
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg|http-equiv", "", text)


def test_its_policy_admits_its_own_script_and_style_and_nothing_else() -> None:
    text = page(document([], title="t"))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_ids_from_outside_cannot_end_the_element_that_they_are_in() -> None:
    hostile = "</script><script>alert(1)</script><!--\ud800"
    records = [
        msgspec.structs.replace(
            each,
            subject=hostile + each.subject,
            remote_request_id=each.remote_request_id and hostile + each.remote_request_id,
            detail=hostile,
        )
        for each in trace(3)
    ]
    text = page(document(stories(histories(records)), title="t"))
    assert text.count("</script>") == 2
    strings = data_of(text)["strings"]
    assert any(each and each.startswith("</script><script>alert(1)") for each in strings)


def test_no_script_makes_markup_from_text() -> None:
    folder = Path(__file__).parents[2] / "connector" / "tools" / "timeline"
    for name in SCRIPTS:
        source = (folder / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source)
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)
