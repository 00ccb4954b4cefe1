"""The timeline page in a browser: it filters, explains a request, and answers clicks and keys."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from connector.observe.history import histories, stories
from connector.tools.timeline.export import SHOWN, Complaint, Fault, SimulatedRun
from tests.unit.browser import Browser
from tests.unit.timeline_load import LEASE_SECONDS, MARGIN_SECONDS, trace
from tests.unit.timeline_page import QUEUED, chosen, count, fill, middle_of, told, with_queue, written

SMALL = 60


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(told(SMALL), tmp_path_factory.mktemp("small"))


# --- filters --------------------------------------------------------------------------------------------------------


def test_filters_by_outcome_peer_and_duration(page: Browser, tmp_path: Path) -> None:
    shown = told(400)
    page.open(written(shown, tmp_path))
    failed = page.evaluate("doc.stories.filter((story) => doc.outcomes[story.outcome] === 'failed').length")
    assert failed > 0
    page.click_on("[data-outcome=failed]")
    assert count(page) == f"{failed} of 400 requests"
    page.click_on("[data-outcome=expired]")
    assert int(count(page).split()[0]) > failed
    page.click_on("#clear")
    assert count(page) == "400 requests"
    page.evaluate("byId('peer').value = 'prefill-a', byId('peer').dispatchEvent(new Event('change'))")
    of_one = int(count(page).split()[0])
    assert 100 < of_one < 300
    fill(page, "shortest", "50ms")
    fill(page, "longest", "0.1 s")
    assert page.evaluate("app.stories.every((story) => story.took >= 5e4 && story.took <= 1e5)")
    assert 0 < int(count(page).split()[0]) < of_one
    fill(page, "longest", "soon")
    assert page.evaluate("byId('longest').hasAttribute('aria-invalid')")


def test_the_wait_in_the_queue_of_vllm_counts(page: Browser, tmp_path: Path) -> None:
    """In the duration, which the filter and the slowest go by; in what lived at a moment; and in the times."""
    page.open(written(stories(histories(with_queue(trace(SMALL)))), tmp_path))
    took = page.evaluate(f"doc.byKey.get('{QUEUED}').took")
    read = page.evaluate(f"(([bar]) => bar.end - bar.steps[0].at)(doc.byKey.get('{QUEUED}').requests)")
    assert took == pytest.approx(read + 12.8e6, abs=2)
    fill(page, "shortest", "12.8 s")
    assert page.evaluate("app.stories.map((story) => story.name)") == [QUEUED]
    assert page.evaluate("slowestOf(doc.stories, 1)[0].name") == QUEUED
    page.evaluate("app.goTo(app.stories[0].start + 1e6)")
    page.wait_for("document.querySelectorAll('.alive li').length > 0")
    assert "in vLLM's queue" in page.evaluate("document.querySelector('.alive').innerText")
    times = page.evaluate("stateTimes(doc, doc.stories, 'request')[0]")
    assert (times["state"], times["count"], times["p99"]) == ("in vLLM's queue", 1, 12.8e6)
    page.evaluate("app.choose(app.stories[0], true)")
    assert "12.8 s" in page.evaluate("document.querySelector('.facts').innerText")
    assert page.evaluate("document.querySelectorAll('.sides .state.queued').length") == 1
    assert "in vLLM's queue" in page.evaluate("document.querySelector('.legend').innerText")
    assert page.evaluate("document.querySelectorAll('.steps tbody tr')[1].innerText").startswith("+")
    page.evaluate("showKeys(app, byId('keys'))")
    assert "in vLLM's queue" in page.evaluate("byId('keys').innerText")


def test_a_trace_of_one_side_has_the_times_of_that_side(page: Browser, tmp_path: Path) -> None:
    records = [each for each in trace(SMALL) if each.machine != "lease"]
    page.open(written(stories(histories(records)), tmp_path))
    assert page.evaluate("document.querySelectorAll('#panel table.times').length") == 1
    assert "null" not in page.evaluate("panel.innerText")


def test_a_lease_that_was_held_and_not_read_says_who_held_it(page: Browser, tmp_path: Path) -> None:
    """As of a client that left while its request was in vLLM's queue on D."""
    records = [each for each in trace(SMALL) if each.machine != "request"]
    page.open(written(stories(histories(records)), tmp_path))
    page.evaluate("app.choose(app.stories.find((story) => story.holds.length), true)")
    assert "held it, and made no request of it" in page.evaluate("document.querySelector('.facts').innerText")


def test_a_filter_that_matches_nothing_says_so_and_can_be_cleared(page: Browser, small: str) -> None:
    page.open(small)
    fill(page, "query", "nobody has this id")
    assert page.evaluate("!byId('empty').hidden && byId('empty').innerText").startswith("No request matches")
    page.click_on("#empty button")
    assert page.evaluate("byId('empty').hidden")
    assert count(page) == f"{SMALL} requests"


# --- one request ----------------------------------------------------------------------------------------------------


def test_a_click_shows_the_path_of_a_request_through_its_states(page: Browser, small: str) -> None:
    page.open(small)
    name = page.evaluate("doc.stories.find((s) => doc.outcomes[s.outcome] === 'done' && !s.retries).name")
    page.click(*middle_of(page, name))
    assert chosen(page) == name
    assert name in page.evaluate("panel.innerText")
    visited = "[...document.querySelectorAll('.chart .visited text:first-of-type')].map((each) => each.textContent)"
    assert page.evaluate(visited) == ["pending handshake", "reading", "done"]
    assert page.evaluate("document.querySelectorAll('.chart .arrow.lit').length") == 2
    assert page.evaluate("document.querySelectorAll('.sides .arrow.lit').length") == 2  # the grant, and the release
    assert page.evaluate("[...document.querySelectorAll('.steps tbody b')].map((each) => each.textContent)") == [
        "Created",
        "PeerReady",
        "ReadCompleted",
    ]
    assert "proof margin" in page.evaluate("panel.innerText")
    page.click_on(".tabs button:last-child")
    assert page.evaluate(visited) == ["computing", "held", "done"]
    page.click_on("#close")
    assert chosen(page) is None


def test_lanes_of_p_lie_above_those_of_d_by_engine_and_rank(page: Browser, tmp_path: Path) -> None:
    records = [msgspec.structs.replace(each, rank=rank) for each in trace(SMALL) for rank in (1, 0)]
    page.open(written(stories(histories(records)), tmp_path))
    drawn = page.evaluate("lanes.lanes.map((lane) => [lane.side, lane.engine, lane.rank])")
    assert drawn == [
        [side, f"{role}-{name}", rank]
        for side, role in (("P", "prefill"), ("D", "decode"))
        for name in ("a", "b")
        for rank in (0, 1)
    ]
    heights = page.evaluate("lanes.lanes.map((lane) => [lane.top, lane.top + lane.tall])")
    assert all(0 < bottom <= top for (_, bottom), (top, _) in pairwise(heights))


def test_the_lease_drains_and_what_d_relies_on_is_less_by_the_margin(page: Browser, small: str) -> None:
    """Each says how much of the lease is left: P's bar is full when it is granted and when it is renewed."""
    page.open(small)
    page.evaluate("app.choose(doc.stories.find((s) => doc.outcomes[s.outcome] === 'done' && !s.retries), true)")
    lent, relied_on = (
        page.evaluate(
            f"(() => {{ const bar = app.selected.{bars}[0];"
            " return drainPoints(bar, fullDrain(app.selected.leases[0]), bar.start, bar.end); })()"
        )
        for bars in ("leases", "holds")
    )
    lease_us = 1e6 * LEASE_SECONDS
    lent = lent[:4]  # from the grant to the first hold, and from there on
    assert [level for _, level in lent[::2]] == [1, 1]
    for (begun, before), (ended, after) in (*zip(lent[::2], lent[1::2], strict=True), relied_on[:2]):
        assert ended > begun
        assert before - after == pytest.approx((ended - begun) / lease_us)
    assert relied_on[0][1] == pytest.approx(1 - MARGIN_SECONDS / LEASE_SECONDS)
    # Both are drawn, one within the other.
    tops = page.evaluate(
        "['drain', 'proof'].map((name) => document.querySelector('.sides path.' + name).getBBox().y)"
        ".concat(document.querySelector('.sides path.drain').getBBox().height)"
    )
    assert tops[1] - tops[0] == pytest.approx(tops[2] * MARGIN_SECONDS / LEASE_SECONDS, abs=0.02)
    assert "margin" in page.evaluate("panel.innerText")


def test_a_retry_and_a_failure_are_told_with_their_reason(page: Browser, tmp_path: Path) -> None:
    page.open(written(told(400), tmp_path))
    page.evaluate("app.choose(doc.stories.find((story) => story.retries), true)")
    assert "↻ 1" in page.evaluate("panel.innerText")
    assert page.evaluate(
        "[...document.querySelectorAll('.chart .label')].some((each) => /1, 4/.test(each.textContent))"
    )
    page.evaluate("app.choose(doc.stories.find((story) => story.deciding.reason === 'HandshakeTimeout'), true)")
    assert "HandshakeTimeout" in page.evaluate("document.querySelector('.reason').innerText")


def test_a_request_whose_beginning_is_missing_is_drawn_and_was_not_tried_again(page: Browser, tmp_path: Path) -> None:
    """Its first record was in a file that was deleted when there were too many."""
    records = [each for each in trace(SMALL) if not (each.machine == "request" and each.from_state is None)]
    page.open(written(stories(histories(records)), tmp_path))
    page.evaluate("app.choose(doc.stories.find((s) => s.requests.length && doc.outcomes[s.outcome] === 'done'), true)")
    page.frame()
    assert page.evaluate("lanes.x(app.bar.end) - lanes.x(app.bar.start)") > 20
    assert page.evaluate("Math.min(...doc.bars.map((bar) => bar.retries))") == 0


def test_a_state_of_a_later_version_is_shown_by_its_name(page: Browser, tmp_path: Path) -> None:
    later = {"reading": "settling"}
    records = [
        msgspec.structs.replace(
            each,
            from_state=later.get(each.from_state or "", each.from_state),
            to_state=later.get(each.to_state, each.to_state),
        )
        if each.machine == "request"
        else each
        for each in trace(SMALL)
    ]
    page.open(written(stories(histories(records)), tmp_path))
    assert "settling" in page.evaluate("document.querySelector('.times').innerText")
    page.evaluate("app.choose(doc.stories.find((s) => doc.outcomes[s.outcome] === 'done' && s.requests.length), true)")
    page.frame()
    assert "settling" in page.evaluate("document.querySelector('.steps').innerText")


def test_a_request_is_in_sight_however_long_its_lease_goes_on(page: Browser, tmp_path: Path) -> None:
    """P did not live to end it."""
    records = [each for each in trace(400) if each.event != "ReaderDone"]
    page.open(written(stories(histories(records)), tmp_path))
    page.evaluate("app.choose(doc.stories.find((s) => s.isOver && s.leases[0].start > s.start - 1e5), true)")
    page.frame()
    assert page.evaluate("app.selected.leases[0].end === doc.end")
    assert page.evaluate("lanes.x(app.selected.end) - lanes.x(app.selected.start)") > 50


def test_what_lived_is_told_by_rank_where_several_have_it(page: Browser, tmp_path: Path) -> None:
    records = [msgspec.structs.replace(each, rank=rank) for each in trace(SMALL) for rank in (0, 1)]
    page.open(written(stories(histories(records)), tmp_path))
    page.evaluate("app.goTo(doc.stories[9].requests[0].visits[1].start + 1)")
    page.wait_for("document.querySelectorAll('.alive li').length > 0")
    listed = page.evaluate("[...document.querySelectorAll('.alive li')].map((each) => each.innerText)")
    assert {"rank 0", "rank 1"} == {rank for each in listed for rank in ("rank 0", "rank 1") if rank in each}


def test_every_state_of_every_machine_has_its_place_in_the_chart(page: Browser, small: str) -> None:
    page.open(small)
    for machine in SHOWN:
        states = {state.value for state in machine.states}
        assert set(page.evaluate(f"Object.keys(PLACES['{machine.name}'])")) == states
        arrows = {
            f"{source.value}>{target.value}"
            for (source, _), transition in machine.table.items()
            for target in transition.targets
        }
        assert set(page.evaluate(f"Object.keys(BENDS['{machine.name}'])")) <= arrows


def test_the_link_names_the_request_and_the_time(page: Browser, small: str) -> None:
    page.open(small)
    name = page.evaluate("app.choose(doc.stories[7], true), app.goTo(doc.stories[7].start), app.selected.name")
    page.wait_for("location.hash.includes('t=')")
    link, cursor = page.evaluate("location.href"), page.evaluate("app.cursor")
    page.open(link)
    assert chosen(page) == name
    assert page.evaluate("app.cursor") == pytest.approx(cursor, abs=1)
    page.open(f"{small}#r={name.removesuffix('-0-d')}")  # what the client called it
    assert chosen(page) == name


# --- keys, pointer and time -----------------------------------------------------------------------------------------


def test_keys_move_zoom_choose_and_close(page: Browser, small: str) -> None:
    page.open(small)
    everything = page.evaluate("lanes.view")
    page.press("+")
    narrower = page.evaluate("lanes.view")
    assert narrower[1] - narrower[0] < everything[1] - everything[0]
    page.press("ArrowRight")
    assert page.evaluate("lanes.view")[0] > narrower[0]
    page.press("ArrowLeft")
    assert page.evaluate("lanes.view")[0] == pytest.approx(narrower[0], rel=1e-6)
    page.press("-")
    page.press("0")
    assert page.evaluate("lanes.view") == pytest.approx(everything)
    page.press("ArrowDown")
    first = chosen(page)
    assert first is not None
    page.press("ArrowDown")
    assert chosen(page) not in (None, first)
    page.press("ArrowUp")
    assert chosen(page) == first
    page.press("Enter")
    view = page.evaluate("lanes.view")
    assert view[1] - view[0] < everything[1] - everything[0]
    page.press("Escape")
    assert chosen(page) is None
    page.press("/")
    assert page.evaluate("document.activeElement.id") == "query"
    page.type("00042")
    page.press("Enter")
    assert chosen(page) == "cmpl-00042-0-d"
    page.press("Escape")
    page.press("Escape")
    assert count(page) == f"{SMALL} requests"
    page.press("?")
    assert page.evaluate("byId('keys').open")
    page.press("Escape")
    assert not page.evaluate("byId('keys').open")


def test_shift_and_an_arrow_move_the_cursor(page: Browser, small: str) -> None:
    page.open(small)
    start, end = page.evaluate("lanes.view")
    assert page.evaluate("app.cursor") is None
    page.press("ArrowRight", shift=True)
    assert page.evaluate("app.cursor") == pytest.approx(start + (end - start) / 100)
    page.press("ArrowRight", shift=True)
    page.press("ArrowRight", shift=True)
    page.press("ArrowLeft", shift=True)
    assert page.evaluate("app.cursor") == pytest.approx(start + (end - start) / 50)
    assert page.evaluate("lanes.view") == [start, end]  # the arrows alone move that
    page.evaluate("app.goTo(doc.start + 1e6), setView(doc.start + 1e6, doc.start + 2e6)")
    page.press("ArrowLeft", shift=True)
    assert page.evaluate("app.cursor") == pytest.approx(page.evaluate("doc.start + 0.99e6"))
    assert page.evaluate("lanes.view[0] < app.cursor && app.cursor < lanes.view[1]")


def test_c_copies_a_link_to_what_is_seen(page: Browser, small: str) -> None:
    page.allow("clipboardReadWrite", "clipboardSanitizedWrite")
    page.open(small)
    page.evaluate("app.choose(doc.stories[11], true), app.goTo(doc.stories[11].start)")
    name, cursor = chosen(page), page.evaluate("app.cursor")
    page.press("c")
    page.wait_for("byId('link').textContent === 'Copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.evaluate("location.href") != small
    page.open(copied)
    assert chosen(page) == name
    assert page.evaluate("app.cursor") == pytest.approx(cursor, abs=1)


def test_the_steps_of_a_request_are_reached_and_used_by_the_keyboard(page: Browser, small: str) -> None:
    page.open(small)
    page.evaluate("app.choose(doc.stories.find((story) => doc.outcomes[story.outcome] === 'failed'), true)")
    focused = "document.activeElement.closest('.steps tbody tr')"
    page.evaluate("document.querySelector('.tabs button:last-child').focus()")
    at = page.evaluate("app.bar.steps.map((step) => step.at)")
    assert len(at) > 2
    for number, moment in enumerate(at):
        page.press("Tab")
        assert page.evaluate(f"{focused} && {focused}.sectionRowIndex") == number
        page.press("Enter")
        assert page.evaluate("app.cursor") == moment
        assert page.evaluate(f"{focused}.sectionRowIndex") == number  # and the next Tab leads to the next step
    # Where the cursor is, it is in the figure of both sides too.
    page.wait_for("document.querySelectorAll('.sides line.cursor').length === 1")
    page.press("Tab")
    assert not page.evaluate(f"Boolean({focused})")


def test_who_uses_the_keyboard_keeps_his_place_in_the_panel(page: Browser, small: str) -> None:
    """What is shown there is made anew, and the focus would fall back to the beginning of the page."""
    page.open(small)
    page.evaluate("document.querySelector('.slowest button').focus()")
    page.press("Enter")
    assert chosen(page) == page.evaluate("slowestOf(doc.stories, 1)[0].name")
    assert page.evaluate("document.activeElement.id") == "panel"
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "link"
    page.evaluate("document.querySelectorAll('.tabs button')[1].focus()")
    page.press("Enter")
    assert page.evaluate("app.bar.machine") == "hold"
    assert page.evaluate("document.activeElement.textContent") == "hold"
    page.press("Escape")
    assert chosen(page) is None
    assert page.evaluate("document.activeElement.id") == "panel"


def test_wheel_zooms_at_the_pointer_and_a_drag_moves(page: Browser, small: str) -> None:
    page.open(small)
    at = "lanes.time(600 - byId('lanes').getBoundingClientRect().x)"
    before, view = page.evaluate(at), page.evaluate("lanes.view")
    page.wheel(600, 400, -200, ctrl=True)
    after = page.evaluate("lanes.view")
    assert after[1] - after[0] < view[1] - view[0]
    assert page.evaluate(at) == pytest.approx(before, abs=(after[1] - after[0]) / 100)
    page.drag(600, 600, 500, 600)
    assert page.evaluate("lanes.view")[0] > after[0]
    assert chosen(page) is None


def test_the_cursor_says_what_lived_and_playing_moves_it(page: Browser, small: str) -> None:
    page.open(small)
    page.evaluate("app.goTo(doc.stories[9].requests[0].visits[1].start + 1)")
    page.wait_for("document.querySelectorAll('.alive li').length > 0")
    listed = page.evaluate("[...document.querySelectorAll('.alive .id')].map((each) => each.textContent)")
    assert page.evaluate("doc.stories[9].name") in listed
    assert "reading" in page.evaluate("byId('alive').innerText")
    before = page.evaluate("app.cursor")
    page.press(" ")
    page.wait_for(f"app.cursor > {before}")
    page.press(" ")
    assert not page.evaluate("app.isPlaying")
    page.evaluate("byId('scrubber').value = 5000, byId('scrubber').dispatchEvent(new Event('input'))")
    assert page.evaluate("app.cursor") == pytest.approx(page.evaluate("(doc.start + doc.end) / 2"), rel=1e-3)


# --- what comes from outside ----------------------------------------------------------------------------------------


def test_ids_are_text_whatever_they_say(page: Browser, tmp_path: Path) -> None:
    hostile = '</script><img src=x onerror="window.hit=1"><!--<script>&amp;\''
    records = [
        msgspec.structs.replace(
            each,
            subject=each.subject.replace("cmpl-00003", hostile),
            remote_request_id=each.remote_request_id and each.remote_request_id.replace("cmpl-00003", hostile),
            detail=hostile,
            reason=hostile if each.to_state == "done" else each.reason,
        )
        for each in trace(20)
    ]
    page.open(written(stories(histories(records)), tmp_path))
    assert count(page) == "20 requests"
    page.evaluate("app.choose(doc.stories.find((story) => story.name.includes('onerror')), true)")
    assert hostile in page.evaluate("panel.innerText")
    page.move(*middle_of(page, page.evaluate('app.selected.name.replaceAll("\'", "\\\\\'")')))
    page.frame()
    assert page.evaluate("document.images.length") == 0
    assert page.evaluate("window.hit === undefined")


def test_the_command_for_a_request_can_be_pasted_whatever_its_client_calls_it(page: Browser, tmp_path: Path) -> None:
    name = "it's $'$&; `touch b`"
    records = [
        msgspec.structs.replace(each, subject=each.subject.replace("cmpl-00003", name))
        if each.machine == "request"
        else each
        for each in trace(20)
    ]
    page.open(written(stories(histories(records)), tmp_path))
    page.evaluate("app.choose(doc.stories.find((story) => story.name.includes('touch')), true)")
    words = shlex.split(page.evaluate("panel.querySelector('.command').textContent"))
    assert words[:2] == ["nixl-actor", "why"]
    assert words[2].startswith(name)
    assert words[3:] == ["--trace", "DIRECTORY"]


def test_nothing_is_loaded_from_anywhere(page: Browser, small: str) -> None:
    page.open(small)
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    refused = "fetch('data:,x').then(() => 'fetched', () => 'refused')"
    assert page.evaluate(refused) == "refused"
    assert "Content Security Policy" in page.complaints.pop(0)
    page.complaints.clear()  # Chromium says it once more


# --- words ------------------------------------------------------------------------------------------------------------


def test_times_are_said_as_people_say_them(page: Browser, small: str) -> None:
    page.open(small)
    said = page.evaluate("[250, 1500, 59.94e6, 59.996e6, 119.7e6, 3599.4e6, 3600e6, 135000e6, -7260e6].map(duration)")
    assert said == [
        "250 µs",
        "1.5 ms",
        "59.9 s",
        "1 min 0 s",
        "2 min 0 s",
        "59 min 59 s",
        "1 h 0 min",
        "37 h 30 min",
        "−2 h 1 min",
    ]
    page.evaluate("app.choose(doc.stories[5], true)")
    wall = datetime.fromtimestamp(page.evaluate("doc.zeroWall + app.selected.start / 1e6"), UTC)
    assert f"{wall:%H:%M:%S}." in page.evaluate("document.querySelector('.facts').innerText")


# --- what is missing ------------------------------------------------------------------------------------------------


def test_a_trace_without_requests_says_so(page: Browser, tmp_path: Path) -> None:
    page.open(written([], tmp_path))
    assert "There are no requests" in page.evaluate("byId('empty').innerText")
    for key in ("ArrowDown", "+", " ", "Escape"):
        page.press(key)


def test_one_side_alone_is_shown_as_that(page: Browser, tmp_path: Path) -> None:
    for machine, missing in (("lease", "D's side is not in this trace"), ("request", "P's side is not in this trace")):
        shown = stories(histories(each for each in trace(20) if each.machine == machine))
        page.open(written(shown, tmp_path))
        assert missing in page.evaluate("byId('about').textContent")
        page.evaluate("app.choose(doc.stories[3], true)")
        assert page.evaluate("document.querySelectorAll('.sides .state').length") > 0


# --- a simulated run, and how it looks ------------------------------------------------------------------------------


def test_faults_and_complaints_of_a_simulated_run_are_drawn(page: Browser, tmp_path: Path) -> None:
    run = SimulatedRun(
        zero_wall=1_790_000_000.0,
        command="python -m tests.simulation --seed 4",
        faults=(
            Fault(kind="read_stall", target="decode-a>prefill-a", at_seconds=0.2, duration_seconds=0.5),
            Fault(kind="pause", target="prefill-b.0", at_seconds=0.3, duration_seconds=0.0, probability=0.5),
        ),
        complaints=(Complaint(oracle="block reuse", detail="handed out while a READ may write", at_seconds=0.7),),
    )
    page.open(written(told(SMALL), tmp_path, simulated=run))
    assert "block reuse" in page.evaluate("panel.innerText")
    assert "--seed 4" in page.evaluate("panel.innerText")
    x, y = page.evaluate(
        "(() => { const box = byId('lanes').getBoundingClientRect();"
        " return [box.x + lanes.x(0.4e6), box.y + RULER + LANE_PAD + FAULT_ROW / 2]; })()"
    )
    page.move(x, y)
    page.frame()
    assert "read stall" in page.evaluate("byId('tip').innerText")
    page.click_on(".complaints button")
    assert page.evaluate("app.cursor") == pytest.approx(0.7e6)
    page.wait_for("/read stall/.test(byId('alive').innerText)")


def test_light_and_dark_follow_the_system_or_the_reader(page: Browser, small: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.open(small)
    light = page.evaluate(ground)
    page.press("t")
    dark = page.evaluate(ground)
    assert dark != light
    page.size(1280, 800, dark=True)
    page.open(small)
    assert page.evaluate(ground) == dark
    page.press("t")
    assert page.evaluate(ground) == light


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_nothing_is_wider_than_the_window(page: Browser, small: str, width: int) -> None:
    page.size(width, 800)
    page.open(small)
    page.evaluate("app.choose(doc.stories[3], true)")
    page.frame()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("panel.scrollWidth <= panel.clientWidth + 1")
    assert page.evaluate("scroller.clientHeight") > 150
