"""What is on the canvas of the timeline page: arrows, badges of retries, signs of how a bar has ended.

Two ways to see it: the calls that one drawing makes, and the pixels that are there afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connector.observe.history import histories, stories
from tests.unit.browser import Browser
from tests.unit.timeline_load import trace
from tests.unit.timeline_page import QUEUED, middle_of, told, with_queue, written

SMALL = 60
MANY = 400

DRAW = """(() => {
  const calls = [], real = lanes.context;
  lanes.context = new Proxy(real, {
    get: (target, name) => typeof target[name] !== 'function' ? target[name] : (...given) => {
      calls.push([name, ...given.filter((each) => typeof each !== 'object')]);
      return target[name](...given);
    },
    set: (target, name, value) => Reflect.set(target, name, value, target),
  });
  lanes.draw(app);
  lanes.context = real;
  return calls;
})()"""
"""Draws the lanes once. Every call of the canvas, with its numbers and texts."""

PIXELS = """(() => {
  const copy = document.createElement('canvas');
  copy.width = %(width)d;
  copy.height = %(height)d;
  const c = copy.getContext('2d', { willReadFrequently: true });
  c.drawImage(byId('lanes'), -(%(left)f), -(%(top)f));
  return [...c.getImageData(0, 0, copy.width, copy.height).data];
})()"""

Colour = tuple[int, int, int]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(told(SMALL), tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With retries, and with every outcome that a request can have."""
    return written(told(MANY), tmp_path_factory.mktemp("many"))


def choose(page: Browser, which: str) -> None:
    """The first story for which this is true, in the middle of the view."""
    page.evaluate(f"app.choose(doc.stories.find((story) => {which}), true)")
    page.frame()
    assert page.evaluate("app.selected !== null && app.selected.requests.length === 1")


def arrows(page: Browser) -> list[list[float]]:
    """From where to where arrows are drawn: the ends of the curves, each of which is stroked and has a tip there."""
    calls: list[Any] = page.evaluate(DRAW)
    found = []
    for at, call in enumerate(calls):
        if call[0] != "bezierCurveTo":
            continue
        begin, stroke, path, tip = calls[at - 1], calls[at + 1], calls[at + 2], calls[at + 3]
        assert (begin[0], stroke, path) == ("moveTo", ["stroke"], ["beginPath"])
        assert tip == ["moveTo", *call[5:]]
        assert calls[at + 6] == ["fill"]
        found.append([*begin[1:], *call[5:]])
    return found


def texts(page: Browser) -> list[list[Any]]:
    """What is written, and where."""
    return [call[1:] for call in page.evaluate(DRAW) if call[0] == "fillText"]


def pixels(page: Browser, left: float, top: float, width: int, height: int) -> list[list[Colour]]:
    """Rows of what is on the canvas. Between two pixels there is something of each."""
    page.evaluate("lanes.draw(app)")
    place = {"left": left, "top": top, "width": width, "height": height}
    data = page.evaluate(PIXELS % place)
    row = 4 * width
    return [
        [(data[at], data[at + 1], data[at + 2]) for at in range(begin, begin + row, 4)]
        for begin in range(0, row * height, row)
    ]


def colour(page: Browser, name: str) -> Colour:
    """That of the style sheet, as the page has it now."""
    text = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def likeness(seen: Colour, ground: Colour, ink: Colour) -> float:
    """0: the ground, 1: the ink."""
    return sum((s - g) * (i - g) for s, g, i in zip(seen, ground, ink, strict=True)) / sum(
        (i - g) ** 2 for g, i in zip(ground, ink, strict=True)
    )


# --- arrows ---------------------------------------------------------------------------------------------------------


def expected_arrows(page: Browser) -> list[Any]:
    """Of the chosen story: from the grant to every READ, and from the last one's end to the release. P lies above D."""
    expected: list[Any] = page.evaluate(
        """(() => {
          const [request] = app.selected.requests, [hold] = app.selected.holds, [lease] = app.selected.leases;
          const at = (bar, event) => bar.steps.filter((step) => step.event === event).map((step) => lanes.x(step.at));
          const below = lanes.rowTop(lease) + lanes.rowHeight - 2, above = lanes.rowTop(request);
          const grants = at(request, 'PeerReady').map((x) => [at(lease, 'Granted')[0], below, x, above]);
          return [...grants, [at(hold, 'Unwanted')[0], above, at(lease, 'ReaderDone')[0], below]];
        })()"""
    )
    return [pytest.approx(each, abs=0.01) for each in expected]


def test_arrows_lead_from_the_grant_to_the_read_and_from_its_end_to_the_release(page: Browser, small: str) -> None:
    page.open(small)
    choose(page, "doc.outcomes[story.outcome] === 'done' && !story.retries")
    drawn = arrows(page)
    assert drawn == expected_arrows(page)
    assert len(drawn) == 2
    said = [text for text, *_ in texts(page)]
    assert said.count("grant → READ") == said.count("release") == 1
    # The tips are seen, not only drawn: below the end of the one and above that of the other nothing else is.
    strong, ground = colour(page, "strong"), colour(page, "bg")
    for _, y0, x1, y1 in drawn:
        (inside,) = pixels(page, x1 - 0.5, y1 - 4 if y1 > y0 else y1 + 3, 1, 1)
        assert likeness(inside[0], ground, strong) > 0.8


def test_every_read_of_a_request_that_is_tried_again_has_its_arrow(page: Browser, many: str) -> None:
    page.open(many)
    choose(page, "story.retries && doc.outcomes[story.outcome] === 'done'")
    reads = "app.selected.requests[0].visits.filter((visit) => visit.state === 'reading').length"
    assert page.evaluate(reads) == 2
    drawn = arrows(page)
    assert drawn == expected_arrows(page)
    assert len(drawn) == 3
    assert len({x1 for _, _, x1, _ in drawn}) == 3
    said = [text for text, *_ in texts(page)]
    assert said.count("grant → READ") == 1  # once is enough
    assert page.evaluate("document.querySelectorAll('.sides .arrow.lit').length") == 3


def test_a_peer_of_which_nothing_is_read_has_no_arrow(page: Browser, small: str) -> None:
    """PeerReady leads to `done` where the READs of the other peers bring everything."""
    page.open(small)
    choose(page, "doc.outcomes[story.outcome] === 'done' && !story.retries")
    assert len(arrows(page)) == 2
    page.evaluate("app.selected.requests[0].steps.find((step) => step.event === 'PeerReady').state = 'done'")
    assert len(arrows(page)) == 1


def test_few_requests_have_their_arrows_at_once_and_many_only_when_pointed_at(page: Browser, many: str) -> None:
    page.open(many)
    assert arrows(page) == []  # they would hide everything
    page.evaluate("setView(doc.stories[20].start, doc.stories[40].end)")
    page.frame()
    several = arrows(page)
    assert len(several) > 20
    assert "release" not in [text for text, *_ in texts(page)]
    name = page.evaluate("doc.stories.slice(20, 40).find((story) => doc.outcomes[story.outcome] === 'done').name")
    page.move(*middle_of(page, name))
    page.frame()
    assert page.evaluate("app.hover.subject") == name
    assert arrows(page)[-2:] != several[-2:]  # its own are drawn last, upon the others
    assert "release" in [text for text, *_ in texts(page)]
    page.click(*middle_of(page, name))
    assert arrows(page) == expected_arrows(page)


# --- retries --------------------------------------------------------------------------------------------------------


def test_a_retry_has_a_badge_where_it_began(page: Browser, many: str) -> None:
    page.open(many)
    choose(page, "story.retries")
    again = "app.selected.requests[0].visits.filter((visit) => visit.state === 'pending_handshake')[1].start"
    x, top, tall = page.evaluate(f"[lanes.x({again}), lanes.rowTop(app.selected.requests[0]), lanes.rowHeight - 2]")
    ((_, text_x, text_y),) = [each for each in texts(page) if each[0] == "↻ 1"]
    assert x < text_x < x + 24
    assert text_y == pytest.approx(top + tall / 2, abs=1)
    strong, ground = colour(page, "strong"), colour(page, "bg")
    (row,) = pixels(page, x - 2, top + tall / 2 - 6, 24, 1)
    inside = [likeness(each, ground, strong) for each in row[6:16]]
    assert min(inside) > 0.9  # the pill, above its words


def test_the_badge_of_a_retry_does_not_hide_the_name(page: Browser, many: str) -> None:
    page.open(many)
    choose(page, "story.retries")
    name = page.evaluate("app.selected.requests[0].subject")
    (badge,) = [x for text, x, _ in texts(page) if text == "↻ 1"]
    # Before it, when the first attempt is the longest; behind it, when only the retry is in sight.
    (x,) = [x for text, x, _ in texts(page) if str(text).strip("…") in name and len(text) > 4]
    assert x < badge - 12
    page.evaluate(
        "(() => { const again = app.selected.requests[0].visits.filter((each) => each.state !== 'draining')[2];"
        " setView(again.start, again.end); })()"
    )
    page.frame()
    (badge,) = [x for text, x, _ in texts(page) if text == "↻ 1"]
    (x,) = [x for text, x, _ in texts(page) if text == name]
    assert x > badge + 12


def test_a_name_that_does_not_fit_keeps_its_end(page: Browser, many: str) -> None:
    """Ids of one server begin alike."""
    page.open(many)
    page.evaluate("setView(doc.stories[20].start, doc.stories[40].end)")
    page.frame()
    cut = [text for text, *_ in texts(page) if "…" in str(text)]
    assert cut
    names = page.evaluate("doc.bars.map((bar) => bar.subject)")
    assert all(any(name.endswith(text[1:]) for name in names) for text in cut)


def test_where_rows_are_low_the_badge_of_a_retry_is_a_notch(page: Browser, many: str) -> None:
    page.size(1280, 420)
    page.open(many)
    name = page.evaluate("doc.stories.find((story) => story.retries).name")
    page.evaluate(f"app.goTo(doc.byKey.get('{name}').start), setView(app.cursor - 1e6, app.cursor + 1.5e6)")
    page.evaluate(f"scrollTo(doc.byKey.get('{name}').deciding)")
    page.frame()
    request = f"doc.byKey.get('{name}').requests[0]"
    again = f"{request}.visits.filter((visit) => visit.state === 'pending_handshake')[1].start"
    x, y, high = page.evaluate(f"[lanes.x({again}), lanes.rowTop({request}), lanes.rowHeight]")
    assert high < 12
    assert not [each for each in texts(page) if str(each[0]).startswith("↻")]
    assert [pytest.approx(each) for each in (x - 3, y - 1)] in [
        call[1:] for call in page.evaluate(DRAW) if call[0] == "moveTo"
    ]
    ((seen,),) = pixels(page, x - 0.5, y, 1, 1)
    assert likeness(seen, colour(page, "bg"), colour(page, "strong")) > 0.8


# --- the queue ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True])
def test_the_wait_in_the_queue_of_vllm_is_the_first_part_of_a_bar(page: Browser, tmp_path: Path, dark: bool) -> None:
    page.size(1280, 800, dark=dark)
    page.open(written(stories(histories(with_queue(trace(SMALL)))), tmp_path))
    page.evaluate(f"app.choose(doc.byKey.get('{QUEUED}'), true)")
    page.frame()
    request = "app.selected.requests[0]"
    begun, created, top, high = page.evaluate(
        f"[lanes.x({request}.start), lanes.x({request}.steps[0].at), lanes.rowTop({request}), lanes.rowHeight - 2]"
    )
    assert created - begun > 300
    ((first,),) = pixels(page, begun + 2, top + 2, 1, 1)
    ((last,),) = pixels(page, created - 3, top + 2, 1, 1)
    assert {first, last} == {colour(page, "queued")}
    ((before,),) = pixels(page, begun - 6, top + high / 2, 1, 1)
    assert before != first
    assert QUEUED in [text for text, *_ in texts(page)]  # upon the longest part
    x, y = middle_of(page, QUEUED)
    page.move(x, y)
    page.frame()
    assert "in vLLM's queue for 12.8 s" in page.evaluate("byId('tip').innerText")


# --- how it ended ---------------------------------------------------------------------------------------------------

SIGNS = {
    "failed": ["# #", " # ", "# #"],
    "expired": ["###", " # ", "###"],
    "aborted": ["  #", " # ", "#  "],
    "open": ["   ", "###", "   "],
}
"""A cross, an hourglass, a slash, three dots: which ninths of the sign have ink in them."""


def ending(page: Browser, bar: str) -> list[list[Colour]]:
    """Nine by nine pixels at the end of a bar, where its sign is."""
    page.evaluate(f"setView({bar}.end - 3e4, {bar}.end + 1e4)")
    page.frame()
    page.evaluate(f"scrollTo({bar})")
    page.frame()
    x, y, high = page.evaluate(f"[lanes.x({bar}.end), lanes.rowTop({bar}), lanes.rowHeight - 2]")
    assert high >= 12
    return pixels(page, x - 8 - 4.5, y + high / 2 - 4.5, 9, 9)


def sign(page: Browser, bar: str) -> list[str]:
    """What is drawn at the end of a bar, in ninths."""
    seen = ending(page, bar)
    strong, ground = colour(page, "strong"), colour(page, "bg")
    return [
        "".join(
            "#" if sum(likeness(seen[r][c], ground, strong) for r in rows for c in columns) > 2.7 else " "
            for columns in (range(3), range(3, 6), range(6, 9))
        )
        for rows in (range(3), range(3, 6), range(6, 9))
    ]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("outcome", SIGNS)
def test_how_a_request_ended_is_a_sign_at_the_end_of_its_bar(
    page: Browser, many: str, outcome: str, dark: bool
) -> None:
    page.size(1280, 800, dark=dark)
    page.open(many)
    bar = f"doc.stories.find((story) => doc.outcomes[story.outcome] === '{outcome}').requests[0]"
    assert sign(page, bar) == SIGNS[outcome]


def test_a_lease_that_is_over_has_a_sign_too(page: Browser, many: str) -> None:
    page.open(many)
    for state in ("expired", "held"):
        lease = f"doc.stories.find((story) => story.leases[0].state === '{state}').leases[0]"
        assert sign(page, lease) == SIGNS["open" if state == "held" else state]


def test_what_ended_well_has_no_sign(page: Browser, many: str) -> None:
    page.open(many)
    bar = "doc.stories.find((s) => doc.outcomes[s.outcome] === 'done' && s.took > 5e4 && !s.retries).requests[0]"
    assert {each for row in ending(page, bar) for each in row} == {colour(page, "done")}
