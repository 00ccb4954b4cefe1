"""With 10,000 requests of simulated plans of faults an operator does not wait: the summary, why, and the timeline page.

The page opens within three seconds and answers within a tenth of one; for other programs run here too, what is late is
asked for again, until three answers were in time. The summary takes a few times what it takes to decode the lines, and
`why` a part of that. `tests/bench/bench_tools.py` measures more.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from connector.observe.history import histories, stories
from connector.observe.traced import QUEUED
from connector.tools.trace_reader import read_trace
from tests.unit.browser import Browser
from tests.unit.timeline_page import chosen, count, fill, measured_ms, middle_of
from tests.unit.traced_run import write_runs

REQUESTS = 10_000
ROUNDS = 3
SUMMARY_MAX = 5.0
"""Times what it takes to decode the lines; 2.3 were seen."""
WHY_SHARE_MAX = 0.6
"""Of what the summary takes on the same processor, both without their start: processors are not alike, and neither are
the libraries that a start loads."""
OPEN_MS_MAX = 3_000
ANSWER_MS_MAX = 100
PATIENCE_SECONDS = 60.0
"""For answers in time of a page whose machine is busy. Of one that is slow none come."""
DECODE = """
import json, pathlib, sys
for path in pathlib.Path(sys.argv[1]).iterdir():
    for line in path.read_bytes().splitlines():
        json.loads(line)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traces")
    requests, _ = write_runs(directory, REQUESTS)
    assert requests >= REQUESTS
    return directory


@pytest.fixture(scope="module")
def large(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of the page, as the command writes it."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    command("trace", "export", str(traces), "--html", str(path))
    return path.as_uri()


def command(*arguments: str) -> tuple[str, float]:
    """What it says, and how many seconds of processors it takes in a process of its own, its start included."""
    return python("-m", "connector", *arguments)


def python(*arguments: str) -> tuple[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return said, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


WATCH = """(() => {
  window.unanswered = window.slowest = 0;
  if (window.isWatched) return;
  window.isWatched = true;
  const answered = (event) => {
    window.unanswered--;
    window.slowest = Math.max(window.slowest, performance.now() - event.timeStamp);
  };
  for (const kind of ['keydown', 'pointerup', 'click', 'input']) addEventListener(kind, (event) => {
    window.unanswered++;
    requestAnimationFrame(() => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => answered(event);
      port2.postMessage(0);
    });
  }, { capture: true });
})()"""
"""A key or click is answered when the next frame has been drawn: what is sent right before that arrives right after."""


def answer_ms(page: Browser, act: Callable[[], object]) -> float:
    """How long the slowest of the answers took."""
    page.evaluate(WATCH)
    act()
    page.wait_for("window.slowest && !window.unanswered")
    took: float = page.evaluate("window.slowest")
    return took


def within_bound(page: Browser, what: str, act: Callable[[], object]) -> int:
    """Returns how many times it was done, an odd number."""
    return in_time(what, lambda: answer_ms(page, act), ANSWER_MS_MAX)


def in_time(what: str, measure: Callable[[], float], most_ms: float) -> int:
    """Two of three have to be in time, or three of nine or more. Returns how many there were, an odd number."""
    took = [measure() for _ in range(ROUNDS)]
    until = time.monotonic() + PATIENCE_SECONDS
    while not (is_in_time := statistics.median(sorted(took)[: 2 * ROUNDS - 1]) < most_ms) and time.monotonic() < until:
        took += [measure() for _ in range(2 * ROUNDS)]
    sys.stdout.write(f"{what}: {', '.join(f'{each:.0f}' for each in took)} ms\n")
    assert is_in_time, what
    return len(took)


def shown(page: Browser) -> int:
    return int(count(page).split()[0].replace(",", ""))


def test_the_summary_takes_a_few_times_what_it_takes_to_decode_the_lines(traces: Path) -> None:
    seconds, decoding = [], []
    for _ in range(ROUNDS):
        said, took = command("trace", "summary", str(traces), "--json")
        seconds.append(took)
        decoding.append(python("-c", DECODE, str(traces))[1])
    assert json.loads(said)["requests"] >= REQUESTS * 0.9  # those that D has heard of
    sys.stdout.write(f"summary: {', '.join(f'{each:.2f}' for each in seconds)} s of processors\n")
    sys.stdout.write(f"decoding: {', '.join(f'{each:.2f}' for each in decoding)} s of processors\n")
    assert min(seconds) < SUMMARY_MAX * min(decoding)


def test_why_takes_a_part_of_what_the_summary_takes(traces: Path, tmp_path: Path) -> None:
    write_runs(tmp_path, 1)
    told = stories(histories(read_trace(traces)))
    named = Counter(each.subject for story in told for each in story.requests[:1])
    name = next(
        story.requests[0].subject
        for story in told
        if story.requests and story.requests[0].state == "done" and named[story.requests[0].subject] == 1
    )
    start, seconds, whole = [], [], []
    for _ in range(ROUNDS):
        start.append(command("trace", "summary", str(tmp_path), "--json")[1])
        said, took = command("why", name, "--trace", str(traces))
        seconds.append(took)
        whole.append(command("trace", "summary", str(traces), "--json")[1])
    assert said.startswith("Done: its KV was loaded in")
    assert name in said
    sys.stdout.write(f"why: {', '.join(f'{each:.2f}' for each in seconds)} s of processors\n")
    sys.stdout.write(f"start: {', '.join(f'{each:.2f}' for each in start)} s of processors\n")
    assert min(seconds) - min(start) < WHY_SHARE_MAX * (min(whole) - min(start))


def test_the_page_opens_in_three_seconds_at_most(page: Browser, large: str) -> None:
    def open_ms() -> float:
        page.open(large)
        return measured_ms(page, "open")

    in_time("open", open_ms, OPEN_MS_MAX)
    assert shown(page) >= REQUESTS


def test_the_page_and_the_summary_say_the_same(page: Browser, traces: Path, large: str) -> None:
    said, _ = command("trace", "summary", str(traces), "--json")
    summed = {
        (each["machine"], each["state"]): each["times"]
        for each in json.loads(said)["states"]
        if each["machine"] in ("request", "lease")
    }
    page.open(large)
    queued = page.evaluate("QUEUED")
    """What the page calls the state in words."""
    seen = {
        (machine, QUEUED if each["state"] == queued else each["state"]): each
        for machine in ("request", "lease")
        for each in page.evaluate(f"stateTimes(doc, doc.stories, '{machine}')")
    }
    assert set(seen) == {key for key, times in summed.items() if times["count"]}
    for key, shown_us in seen.items():
        assert shown_us["count"] == summed[key]["count"], key
        for each in ("p50", "p95", "p99"):
            # The page takes them from times of day, by which the clock of an engine may be fast or slow.
            expected = pytest.approx(1e6 * summed[key][each], rel=1e-3, abs=20)
            assert shown_us[each] == expected, (key, each)


def test_every_filter_answers_at_once(page: Browser, large: str) -> None:
    page.open(large)
    everything = shown(page)
    texts = itertools.cycle(["s3-d", "s4-p", "s5-d"])
    within_bound(page, "query", lambda: fill(page, "query", next(texts)))
    assert 0 < shown(page) < everything
    assert page.evaluate("app.stories.every((story) => story.text.includes('s5-d'))")
    fill(page, "query", "nobody")
    assert shown(page) == 0
    within_bound(page, "Escape", lambda: page.press("Escape"))
    assert shown(page) == everything
    failed = page.evaluate("doc.stories.filter((story) => doc.outcomes[story.outcome] === 'failed').length")
    within_bound(page, "outcome", lambda: page.click_on("[data-outcome=failed]"))
    assert shown(page) == failed > 100
    within_bound(page, "outcomes", lambda: page.click_on("[data-outcome=done]"))
    assert failed < shown(page) < everything
    page.click_on("#clear")
    within_bound(page, "shortest", lambda: fill(page, "shortest", "50 ms"))
    within_bound(page, "longest", lambda: fill(page, "longest", "2 s"))
    assert 0 < shown(page) < everything
    assert page.evaluate("app.stories.every((story) => story.took >= 5e4 && story.took <= 2e6)")
    page.click_on("#clear")
    assert shown(page) == everything
    # The browser's own list of a <select> is no part of the page; what it does to it is.
    engine = page.evaluate(
        "[...byId('peer').options].map((each) => each.value).find((each) => each.startsWith('s7-d'))"
    )

    def filter_ms() -> float:
        page.evaluate(f"byId('peer').value = {json.dumps(engine)}, byId('peer').dispatchEvent(new Event('change'))")
        return measured_ms(page, "filter")

    in_time("filter", filter_ms, ANSWER_MS_MAX)
    assert page.evaluate(f"app.stories.every((story) => story.engines.has({json.dumps(engine)}))")
    assert 0 < shown(page) < everything


def choose_slowest(page: Browser) -> None:
    page.press("Escape")
    page.click_on(".slowest button")


def test_clicks_answer_at_once(page: Browser, large: str) -> None:
    page.open(large)
    page.evaluate("app.choose(doc.stories.find((s) => s.retries && s.requests.length), true), app.choose(null)")
    page.frame()
    name = page.evaluate(
        "doc.stories.find((s) => s.requests.length && s.deciding.isShown && s.start > lanes.view[0]"
        " && s.end < lanes.view[1] && lanes.x(s.end) - lanes.x(s.start) > 8).key"
    )
    within_bound(page, "click on a bar", lambda: page.click(*middle_of(page, name)))
    picked = chosen(page)
    assert picked is not None
    assert picked in page.evaluate("panel.innerText")
    assert page.evaluate("document.querySelectorAll('.chart .visited').length") > 1
    within_bound(page, "click on a step", lambda: page.click_on(".steps tbody tr:last-child td"))
    assert page.evaluate("app.cursor") == page.evaluate("app.bar.steps[app.bar.steps.length - 1].at")
    page.click_on("#close")
    assert chosen(page) is None
    within_bound(page, "click on the slowest", partial(choose_slowest, page))
    assert chosen(page) == page.evaluate("slowestOf(app.stories, 1)[0].name")
    within_bound(page, "click on All", lambda: page.click_on("#all"))
    x, y = page.evaluate("(() => { const box = byId('overview').getBoundingClientRect(); return [box.x, box.y]; })()")
    page.evaluate("setView(doc.start, doc.start + 1e6)")
    within_bound(page, "click on the overview", lambda: page.click(x + 400, y + 20))
    assert page.evaluate("lanes.view[0] > doc.start + 1e6")


def test_keys_answer_at_once(page: Browser, large: str) -> None:
    page.open(large)
    everything = page.evaluate("lanes.view")
    times = {}
    for key in ("+", "ArrowRight", "ArrowLeft", "-", "0", "ArrowDown", "ArrowUp", "Enter"):
        times[key] = within_bound(page, key, partial(page.press, key))
        if key == "0":
            assert page.evaluate("lanes.view") == pytest.approx(everything)
    row = max(0, times["ArrowDown"] - 1 - times["ArrowUp"])
    assert chosen(page) == page.evaluate(f"app.stories[{row}].name")
    view = page.evaluate("lanes.view")
    assert view[1] - view[0] < (everything[1] - everything[0]) / 10
    within_bound(page, "Shift ArrowRight", lambda: page.press("ArrowRight", shift=True))
    assert page.evaluate("app.cursor") > view[0]
    within_bound(page, "t", lambda: page.press("t"))
    page.press("Escape")
    assert chosen(page) is None
    page.press("/")
    page.type("s9-p0")
    page.press("Enter")
    assert "s9-p0" in page.evaluate("app.selected.text")
